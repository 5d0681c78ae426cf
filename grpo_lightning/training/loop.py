"""Algorithm 1 of DeepSeekMath (arXiv 2402.03300) as a callback: explore, then mu passes over the rollouts.

One Lightning epoch is one exploration step, one Lightning batch is one optimizer update. The numbers in the
comments are the algorithm's lines.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import lightning as L
import numpy
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from grpo_lightning import ranks
from grpo_lightning.engines.trial import compute_dtype
from grpo_lightning.maths.group_filters import TOTAL
from grpo_lightning.maths.stopping import FixedPasses, Passes, StopRule
from grpo_lightning.policy.adapter import num_elements
from grpo_lightning.policy.snapshots import AdapterOff, MovingAverage
from grpo_lightning.rewards.base import Reward
from grpo_lightning.training import disk, internals
from grpo_lightning.training.board import rewind
from grpo_lightning.training.data import PromptDataModule
from grpo_lightning.training.dynamic_sampling import DynamicSampling
from grpo_lightning.training.explorer import Exploration
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.training.monitors import keep_patience, report_early_stopping, validate_monitors
from grpo_lightning.training.observer import Observer
from grpo_lightning.training.pace import has_end
from grpo_lightning.training.preparation import Preparation, minibatch_of_rows
from grpo_lightning.training.restoring import refuse_half_a_step
from grpo_lightning.training.source import RolloutSource, SourceInputs, Synchronous
from grpo_lightning.training.step import Clock, Minibatch, Step
from grpo_lightning.training.step_statistics import StepStatistics, peak_memory_gib
from grpo_lightning.training.throughput import Work, peak_of
from grpo_lightning.types import UsageError, at_least

PASSES = "loop.mu and loop.num_minibatches set the updates of a step, trainer.max_epochs the steps"


class GRPOLoop(Callback):
    """The loop of GRPO. `trainer.max_epochs` is the number of exploration steps.

    The last of them is validated whatever `trainer.check_val_every_n_epoch` is. A run that is asked to stop ends the
    step first.

    Every argument affects the result except `validate_first`, and `max_tokens`, which affects only memory and speed.

    Args:
        group_size: G, completions per prompt.
        prompts_per_step: Prompts per exploration step, over all ranks together.
        mu: μ, optimisation passes over the rollouts of one step.
        num_minibatches: Optimizer updates per pass. Each takes an equal part of the prompts; groups stay whole.
        steps_per_iteration: M: the reference is refreshed at every M-th step. None keeps the first reference.
        stop: When to leave the passes before all μ are done.
        dynamic_sampling: Draw more prompts until enough groups have rewards that differ. None takes the first drawn.
        source: Where the rollouts come from; by default they are sampled when a step begins.
        validate_first: Validate before the first step too, so that a curve has its beginning. A resumed run does not
            repeat it, and a trial with `trainer.fast_dev_run` leaves it out.
        max_tokens: Tokens in one forward and backward: prompts, completions and padding. 0 takes the minibatch whole.
        seed: Seed of the random numbers that completions are drawn with.
    """

    def __init__(
        self,
        group_size: int = 8,
        prompts_per_step: int = 32,
        mu: int = 1,
        num_minibatches: int = 1,
        steps_per_iteration: int | None = None,
        stop: StopRule | None = None,
        dynamic_sampling: DynamicSampling | None = None,
        source: RolloutSource | None = None,
        validate_first: bool = True,
        max_tokens: int = 16384,
        seed: int = 0,
    ) -> None:
        at_least("loop.group_size", group_size, 1)
        at_least("loop.prompts_per_step", prompts_per_step, 1)
        at_least("loop.mu", mu, 1)
        at_least("loop.num_minibatches", num_minibatches, 1)
        at_least("loop.steps_per_iteration", steps_per_iteration, 1)
        at_least("loop.max_tokens", max_tokens, 0)
        if prompts_per_step % num_minibatches:
            raise UsageError(
                f"loop.prompts_per_step={prompts_per_step} is not a multiple of "
                f"loop.num_minibatches={num_minibatches}: every update takes as many prompts"
            )
        self.group_size = group_size
        self.prompts_per_step = prompts_per_step
        self.mu = mu
        self.num_minibatches = num_minibatches
        self.steps_per_iteration = steps_per_iteration
        self.stop = stop or FixedPasses()
        self.dynamic_sampling = dynamic_sampling
        self.source = source or Synchronous()
        self.validate_first = validate_first
        self.max_tokens = max_tokens
        self.seed = seed
        self.observers: list[Observer] = []
        """Told how the steps go."""
        self._resumes = False
        self.validates_now = False
        """Whether this start validates before the first step."""
        self._lent = ExitStack()
        """Gives the trainer its own settings back, where the loop has set others for a while."""
        self._savers: list[ModelCheckpoint] = []
        """Those that would save at a validation, before the step has ended."""
        self._ended: float | None = None
        """When the last step had ended, by `perf_counter`; None before the first of this start."""
        self._peak = 0.0
        self._rates: set[str] = set()
        """The fractions that are logged as 0 where nothing happens: once they have been above it."""
        self.remarks: Counter[str] = Counter()
        """Why steps of this start learned nothing, and how many."""
        self.step: Step | None = None
        """The step under way, and the last one until the next begins."""

    @staticmethod
    def find(trainer: L.Trainer) -> "GRPOLoop":
        """The loop among the trainer's callbacks."""
        callbacks: list[Callback] = getattr(trainer, "callbacks", [])
        return next(callback for callback in callbacks if isinstance(callback, GRPOLoop))

    @property
    def current_step(self) -> Step:
        """The step under way, where there is one."""
        assert self.step is not None
        return self.step

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates per exploration step."""
        return self.mu * self.num_minibatches

    def validate(self, module: GRPOModule) -> None:
        """Raises UsageError where loop and module do not go together."""
        if self.group_size < 2 and module.advantage.compares_group:
            raise UsageError(
                f"loop.group_size={self.group_size}: give 2 or more; {type(module.advantage).__name__} compares the "
                "completions of one prompt"
            )
        if self.steps_per_iteration and isinstance(module.reference, AdapterOff):
            raise UsageError(
                f"loop.steps_per_iteration={self.steps_per_iteration}: the model without its adapter, AdapterOff, "
                "stays as it is. Set model.reference=FrozenCopy, or loop.steps_per_iteration=null"
            )
        if not self.steps_per_iteration and isinstance(module.reference, MovingAverage):
            raise UsageError(
                "model.reference=MovingAverage: it moves every loop.steps_per_iteration steps, and that is null. Give "
                "1 or more, such as loop.steps_per_iteration=1, or set model.reference=FrozenCopy, which never moves"
            )
        parts = [part for reward in module.explorer.scorer.rewards for part in reward.with_parts()]
        learns = any(type(part).learn is not Reward.learn for part in parts)
        if self.steps_per_iteration and module.reference is None and not learns:
            raise UsageError(
                f"loop.steps_per_iteration={self.steps_per_iteration}: there is no reference to refresh with "
                "model.objective.beta=0, and no reward that learns. Give a beta above 0, such as 0.04, or "
                "loop.steps_per_iteration=null"
            )
        if self.stop.names and self.updates_per_step == 1:
            raise UsageError(
                f"loop.stop={type(self.stop).__name__}: it is asked from the second update of a step on, and loop.mu=1 "
                "with loop.num_minibatches=1 makes one. Give a larger loop.mu, or loop.stop=FixedPasses"
            )
        rewards = [reward.name for reward in module.explorer.scorer.rewards]
        if self.dynamic_sampling and self.dynamic_sampling.filter.reward not in (None, TOTAL, *rewards):
            raise UsageError(
                f"loop.dynamic_sampling.filter.reward={self.dynamic_sampling.filter.reward}: give one of "
                f"{', '.join(rewards)}, or `{TOTAL}` for their weighted sum"
            )
        if self.source.is_late:
            refuse_for_late_rollouts(module)

    def validate_trainer(self, trainer: Any) -> None:
        """Raises UsageError for a trainer that cuts passes short, or a callback that watches what is not logged."""
        limit, overfit = trainer.limit_train_batches, trainer.overfit_batches
        whole = isinstance(limit, float) and limit == 1 and not overfit  # an int is a number of updates
        if not whole and not disk.is_trial(trainer):
            raise UsageError(
                f"trainer.limit_train_batches={limit}, overfit_batches={overfit}: they would cut the passes of every "
                f"step short; {PASSES}"
            )
        for saver in savers_of(trainer):
            if internals.saves_in_steps(saver) and not saver.save_weights_only:
                raise UsageError(
                    "ModelCheckpoint.every_n_train_steps, train_time_interval: they save in the middle of a step, from "
                    "where no run goes on. Give every_n_epochs (exploration steps), or save_weights_only=true"
                )
        validate_monitors(trainer.callbacks, validates=trainer.limit_val_batches != 0)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Connects source, data and trainer."""
        if stage != "fit":
            return
        module, data = _module(pl_module), _data(trainer)
        module.connect(data)
        self.validate(module)
        self.validate_trainer(trainer)
        if self.prompts_per_step % (self.num_minibatches * trainer.world_size):
            raise UsageError(
                f"loop.prompts_per_step={self.prompts_per_step} is not a multiple of loop.num_minibatches="
                f"{self.num_minibatches} x {trainer.world_size} ranks: every rank takes as many prompts of every update"
            )
        data.train_loader = _MinibatchLoader(self, module)
        self._rates = set()
        self.validates_now = self.validate_first and trainer.current_epoch == 0 and not disk.is_trial(trainer)
        if self.validates_now:
            # Lightning's own validation before training: it leaves the random numbers alone, and no callback counts it
            # as one of the run. It logs nothing; `on_validation_end` does. `on_load_checkpoint` takes it back.
            self._lent.enter_context(replaced(trainer, num_sanity_val_steps=math.inf))
        self.source.setup(
            SourceInputs(
                policy=module.policy,
                explorer=module.explorer,
                data=data,
                sampling=module.sampling,
                prompts_per_step=self.prompts_per_step,
                group_size=self.group_size,
                seed=self.seed,
                dynamic_sampling=self.dynamic_sampling,
                observers=self.observers,
            )
        )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Prints the policy, the device and the sizes of the run."""
        module = _module(pl_module)
        size = f"at most {self.max_tokens} tokens" if self.max_tokens else "the whole minibatch"
        trained, everything = (
            sum(num_elements(p) for p in module.policy.parameters() if p.requires_grad or everything)
            for everything in (False, True)
        )
        steps = trainer.max_epochs if has_end(trainer.max_epochs) else "any number of"
        some = "" if trained == everything else f", {trained / 1e6:.2f} M of them trained"
        rank_zero_info(
            f"policy {module.policy.path}: {everything / 1e6:.2f} M parameters{some}; {trainer.world_size} x "
            f"{device_name(module.device)}, precision {trainer.precision}"
        )
        rank_zero_info(
            f"{steps} steps of {self.prompts_per_step} prompts x {self.group_size} completions of at most "
            f"{module.sampling.max_new_tokens} tokens; each step {self.mu} x {self.num_minibatches} updates, {size} in "
            f"one forward and backward{', prompts shared by their group' if module.policy.shares_prefix else ''}"
        )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Starts the clock, and looks up what the device can do."""
        module, self._ended = _module(pl_module), None
        self._lent.close()
        self.remarks.clear()
        self._savers = [one for one in savers_of(trainer) if internals.saves_at_validation(one, trainer)]
        internals.log_at_step(trainer)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            rewind(logger, trainer.current_epoch)
        with trainer.strategy.precision_plugin.forward_context():
            self._peak = peak_of(module.device, compute_dtype(module.policy))

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Starts the clock of a step's validation, whose checkpoints wait for the end of the step."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.current_step.clock.validation_starts()
            internals.save_after_steps(self._savers, True)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stops the clock of a step's validation; logs the one before the first step."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.current_step.clock.validation_ends()
        if not (trainer.sanity_checking and self.validates_now):
            return
        found = trainer.callback_metrics
        metrics = {name: float(found[name]) for name in sorted(found) if name.startswith("val/")}
        for logger in trainer.loggers:
            logger.log_metrics(metrics | {"epoch": float(internals.BEFORE_TRAINING)}, step=internals.BEFORE_TRAINING)
            logger.save()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Explores, and prepares the updates."""
        module, index, clock = _module(pl_module), trainer.current_epoch, Clock()
        self.step = None
        # Whoever sets `trainer.should_stop` waits for the end of the step: no run could go on in its middle.
        self._lent.enter_context(
            replaced(trainer.fit_loop, min_epochs=max(index + 1, trainer.fit_loop.min_epochs or 0))
        )
        # Whatever draws from the global generators (dropout, a user's reward) draws the same after a resume.
        torch.manual_seed(hash((self.seed, index, trainer.global_rank)))
        random.seed(hash((self.seed, index, trainer.global_rank)))
        numpy.random.seed(hash((self.seed, index, trainer.global_rank)) % 2**32)
        with evaluating(trainer, module):
            # 2-3: an iteration begins
            if module.reference is not None and self.steps_per_iteration and index % self.steps_per_iteration == 0:
                module.reference.refresh(module.policy)
            # 6: the old policy becomes the policy
            module.old_policy.refresh(module.policy)
            # 5, 7, 8: sample a batch D_b and G outputs of each, compute rewards
            exploration = self.source.next(index)
            self._agree_on_version(exploration, module)
            clock.explored = perf_counter()
            # 9: compute advantages
            packs = self._preparation(module).cut(
                exploration.rollouts,
                module.explorer.rewards(exploration),
                minibatch_of_rows(exploration.prompt_ids, self.num_minibatches),
                self.num_minibatches,
                self.mu,
                exploration.policy_version,
            )
        self.step = Step(exploration, packs, Passes(self.stop, self.num_minibatches), clock)
        clock.prepared = perf_counter()
        for observer in self.observers:
            observer.prepared(self.step)
        clock.began = perf_counter()

    def _agree_on_version(self, exploration: Exploration, module: GRPOModule) -> None:
        """Makes the oldest version of all ranks that of each, since the ranks must take the same path."""
        exploration.policy_version = min(ranks.gather(exploration.policy_version))
        if exploration.policy_version != module.policy.version:
            refuse_for_late_rollouts(module)

    def _preparation(self, module: GRPOModule) -> Preparation:
        return Preparation(
            module.policy,
            module.objective,
            module.advantage,
            module.old_policy,
            module.reference,
            module.reward_kl,
            self.max_tokens,
            module.explorer.longest(module.sampling),
            module.device,
        )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Minibatch, batch_idx: int
    ) -> None:
        """Tells the observers the step's mean reward."""
        if batch_idx == 0:
            scored = [value for value in batch.step.exploration.scores.total if not math.isnan(value)]
            totals, counts = zip(*ranks.gather((sum(scored), len(scored))), strict=True)
            for observer in self.observers if sum(counts) else ():
                observer.rewarded(sum(totals) / sum(counts))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Minibatch, batch_idx: int
    ) -> None:
        """Stops the clock: validation comes between the last update and `on_train_epoch_end`."""
        self.current_step.clock.update_ends()
        if batch_idx == self.updates_per_step - 1:
            for observer in self.observers:
                observer.updated(self.current_step)
            self._lent.close()
            if trainer.current_epoch + 1 == trainer.max_epochs:
                # Lightning validates a step with which the run stops, if it is one that it may validate.
                self._lent.enter_context(replaced(trainer, check_val_every_n_epoch=1, should_stop=True))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Lets the rewards learn, and logs the step."""
        module, step = _module(pl_module), self.current_step
        self._lent.close()
        internals.save_after_steps(self._savers, step.clock.validation is not None or not trainer.enable_validation)
        exploration = step.exploration
        # 12: update the reward models
        iteration_ends = (trainer.current_epoch + 1) % (self.steps_per_iteration or 1) == 0
        learned = module.explorer.scorer.learn(exploration.samples, exploration.scores, iteration_ends)
        work = Work.of_updates(step.packs, len(step.passes.updates), module.policy, self._peak)
        statistics = StepStatistics.from_exploration(exploration, self.group_size, self._seconds(step), work).gather()
        # Whoever reads the last value of one must not find that of an earlier step.
        absent = [name for name in self._rates if name.split("/")[1] in exploration.scores.results]
        metrics = dict.fromkeys(absent, 0.0) | statistics.metrics() | learned
        remarks = statistics.remarks(step.passes, not module.objective.learns_from_advantage_alone)
        self.remarks.update(remarks)
        made, rule = step.passes.num_updates, step.passes.ended_by
        some = [f"{made} of {self.updates_per_step} updates{f', {rule}' if rule else ''}"]
        step.remarks = (some if made < self.updates_per_step else []) + remarks
        if self.updates_per_step > 1:
            metrics["optim/updates"] = made
        metrics |= {f"optim/stopped_by/{name}": float(name == rule) for name in self.stop.names}
        if bad_updates := int(module.bad_updates):  # no curve that is 0 throughout
            metrics["optim/bad_updates"] = bad_updates
        if self.dynamic_sampling is None and not metrics.get("rollout/wasted") and "rollout/wasted" not in self._rates:
            metrics.pop("rollout/wasted", None)
        self._rates |= {name for name in (*statistics.sample_counts, "rollout/wasted") if name in metrics}
        metrics |= exploration.metrics
        metrics["time/peak_memory_gib"] = peak_memory_gib(module.device)
        # Lightning would put plain numbers on the GPU, to fetch them from there.
        logged = {name: torch.tensor(float(value)) for name, value in metrics.items()}
        module.log("reward/mean", logged.pop("reward/mean", torch.tensor(math.nan)), prog_bar=True)
        module.log_dict(logged | step.metrics_of_updates())
        for observer in self.observers:
            observer.reported(metrics)
        # Callbacks after this one may look at the exploration; the packs are what takes memory.
        step.packs.clear()

    def _seconds(self, step: Step) -> dict[str, float]:
        """Seconds of each phase of a step, of the step, and since the end of the last one."""
        clock, now = step.clock, perf_counter()
        seconds = step.exploration.seconds | clock.seconds()
        begun = clock.started if self._ended is None else self._ended
        self._ended = now
        return seconds | {"wall": now - begun}

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Drops the last step."""
        self.step = None
        report_early_stopping(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leaves the trainer's own options behind."""
        self._lent.close()
        internals.save_after_steps(self._savers, False)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Does the same: Lightning calls no `teardown` now."""
        self.teardown(trainer, pl_module, "fit")

    def state_dict(self) -> dict[str, Any]:
        """The state of the source, and what has been logged."""
        return {"source": self.source.state_dict(), "rates": sorted(self._rates)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores them, where the run is resumed."""
        if self._resumes:
            self.source.load_state_dict(state_dict["source"])
            self._rates = set(state_dict.get("rates", ()))

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Notes whether the run is resumed; lets an EarlyStopping keep the patience that it is given now."""
        # `validate` and its kin load callbacks too. A fit after them starts with the first question.
        self._resumes = trainer.state.fn == TrainerFn.FITTING
        if self._resumes:
            refuse_half_a_step(checkpoint, trainer.ckpt_path)
            self.validates_now = False
            self._lent.close()
        keep_patience(trainer, checkpoint)


def follow(trainer: L.Trainer, observer: Observer) -> None:
    """Tells `observer`, once, how the steps of the trainer's loop go."""
    if observer not in (observers := GRPOLoop.find(trainer).observers):
        observers.append(observer)


def unfollow(trainer: L.Trainer, observer: Observer) -> None:
    """Tells it no longer, where the trainer has a loop: another trainer may use the loop."""
    for loop in [callback for callback in trainer.callbacks if isinstance(callback, GRPOLoop)]:  # type: ignore[attr-defined]
        loop.observers[:] = [other for other in loop.observers if other is not observer]


class _MinibatchLoader:
    """The train loader: with a length, and a generator that starts only when the step has been explored.

    Without a length Lightning would fetch a batch ahead, before the exploration that makes it.
    """

    def __init__(self, loop: GRPOLoop, module: GRPOModule) -> None:
        self.loop = loop
        self.module = module

    def __len__(self) -> int:
        return self.loop.updates_per_step

    def __iter__(self) -> Iterator[Minibatch]:
        for minibatch in self.loop.current_step.stream(self.module.policy, self.loop.mu):
            internals.log_at_step(self.module.trainer)
            yield minibatch


def savers_of(trainer: Any) -> list[ModelCheckpoint]:
    """Lightning's checkpoint callbacks of the trainer, `StepCheckpoint` among them."""
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


@contextmanager
def replaced(thing: Any, **values: Any) -> Iterator[None]:
    """Gives attributes of `thing` other values for a while."""
    before = {name: getattr(thing, name) for name in values}
    for name, value in values.items():
        setattr(thing, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(thing, name, value)


def refuse_for_late_rollouts(module: GRPOModule) -> None:
    """Raises UsageError for options that do not go with rollouts of an earlier policy."""
    if module.old_policy.is_proximal:
        return
    if not module.sampling.unfiltered:
        raise UsageError(
            "model.sampling: set top_k=0, top_p=1 and min_p=0 with a loop.source whose rollouts are of an earlier "
            "policy; their recorded log-probs are log π_old, which a filter changes"
        )
    if module.objective.correction.reads_sampler:
        raise UsageError(
            f"model.objective.correction={type(module.objective.correction).__name__}: set model.old_policy=Proximal "
            "with a loop.source whose rollouts are of an earlier policy, or correction=NoCorrection; else their "
            "recorded log-probs are log π_old, and every factor is 1"
        )


def device_name(device: torch.device) -> str:
    """`CPU`, or the name of the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


@contextmanager
def evaluating(trainer: L.Trainer, module: GRPOModule) -> Iterator[None]:
    """No gradients, eval mode, and the trainer's precision."""
    was_training = module.policy.training
    module.policy.eval()
    try:
        with torch.no_grad(), trainer.strategy.precision_plugin.forward_context():
            yield
    finally:
        module.policy.train(was_training)


def _module(pl_module: L.LightningModule) -> GRPOModule:
    assert isinstance(pl_module, GRPOModule)
    return pl_module


def _data(trainer: L.Trainer) -> PromptDataModule:
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, PromptDataModule):
        raise UsageError("GRPOLoop needs prompts: trainer.fit(module, datamodule=PromptDataModule(...))")
    return data
