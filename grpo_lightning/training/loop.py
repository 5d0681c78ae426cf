"""Algorithm 1 of DeepSeekMath (arXiv 2402.03300) as a callback: explore, then mu passes over what was found.

One Lightning epoch is one exploration step, one Lightning batch is one optimizer update. The numbers in the
comments are the algorithm's lines.
"""

import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import numpy
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from grpo_lightning import ranks
from grpo_lightning.maths.group_filters import TOTAL
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.maths.stopping import FixedPasses, Passes, StopRule
from grpo_lightning.training.callbacks.monitors import (
    STEP,
    UPDATE,
    check_monitors,
    is_own,
    keep_patience,
    say_why_it_stopped,
)
from grpo_lightning.training.callbacks.progress import StepProgressBar
from grpo_lightning.training.data import PromptDataModule
from grpo_lightning.training.dynamic_sampling import DynamicSampling
from grpo_lightning.training.explorer import Exploration
from grpo_lightning.training.minibatch import Minibatch
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.training.preparation import Preparation
from grpo_lightning.training.step_statistics import StepStatistics, peak_memory_gib
from grpo_lightning.types import UsageError

PASSES = "loop.mu and loop.num_minibatches set the updates of a step, trainer.max_epochs the steps"


class GRPOLoop(Callback):
    """The loop of GRPO. `trainer.max_epochs` is the number of exploration steps.

    All but `max_tokens` decide the result; that decides only memory and speed.

    Args:
        group_size: G, completions of each prompt.
        prompts_per_step: Prompts of one exploration step, over all ranks together.
        mu: μ, optimisation passes over the rollouts of one step.
        num_minibatches: Optimizer updates of one pass; each takes its share of the prompts, groups stay whole.
        steps_per_iteration: M: the reference is refreshed at every M-th step. None keeps the first reference.
        stop: When to leave the passes before all μ are done.
        dynamic_sampling: Draw more prompts until enough groups have rewards that differ. None takes the first drawn.
        max_tokens: Tokens in one forward and backward, prompts, completions and padding; 0 takes the minibatch whole.
        seed: Of the random numbers completions are drawn with.
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
        max_tokens: int = 16384,
        seed: int = 0,
    ) -> None:
        for name, value, least in (
            ("group_size", group_size, 1),
            ("prompts_per_step", prompts_per_step, 1),
            ("mu", mu, 1),
            ("num_minibatches", num_minibatches, 1),
            ("steps_per_iteration", 1 if steps_per_iteration is None else steps_per_iteration, 1),
            ("max_tokens", max_tokens, 0),
        ):
            if value < least:
                raise UsageError(f"loop.{name}={value}: give {least} or more")
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
        self.max_tokens = max_tokens
        self.seed = seed
        self.exploration: Exploration | None = None
        self.passes = Passes(self.stop, num_minibatches)
        self._packs: list[list[Rollouts]] = []
        self._seconds: dict[str, float] = {}
        self._rounds, self._kept = 1, 1.0
        self._step_started = self._updates_started = self._updates_ended = 0.0

    @staticmethod
    def find(trainer: L.Trainer) -> "GRPOLoop":
        """The loop among the trainer's callbacks."""
        callbacks: list[Callback] = getattr(trainer, "callbacks", [])
        return next(callback for callback in callbacks if isinstance(callback, GRPOLoop))

    def check(self, module: GRPOModule) -> None:
        """Raises UsageError where loop and module do not go together."""
        if self.group_size < 2 and module.advantage.compares_group:
            raise UsageError(
                f"loop.group_size={self.group_size}: give 2 or more; {type(module.advantage).__name__} compares the "
                "completions of one prompt"
            )
        rewards = [reward.name for reward in module.explorer.scorer.rewards]
        if self.dynamic_sampling and self.dynamic_sampling.filter.reward not in (None, TOTAL, *rewards):
            raise UsageError(
                f"loop.dynamic_sampling.filter.reward={self.dynamic_sampling.filter.reward}: give one of "
                f"{', '.join(rewards)}, or `{TOTAL}` for their weighted sum"
            )

    def check_trainer(self, trainer: Any, module: GRPOModule) -> None:
        """Raises UsageError for a trainer that cuts passes short, or a callback that watches what is not logged."""
        limit, overfit = trainer.limit_train_batches, trainer.overfit_batches
        whole = isinstance(limit, float) and limit == 1 and not overfit  # an int is a number of updates
        if not whole and not trainer.fast_dev_run:
            raise UsageError(
                f"trainer.limit_train_batches={limit}, overfit_batches={overfit}: they would cut the passes of every "
                f"step short; {PASSES}"
            )
        parts = [module, *trainer.callbacks, *module.explorer.scorer.rewards]
        check_monitors(
            trainer.callbacks,
            self.metrics(module, validates=trainer.limit_val_batches != 0),
            [reward.name for reward in module.explorer.scorer.rewards],
            own=any(map(is_own, parts)),
        )

    def metrics(self, module: GRPOModule, validates: bool) -> list[str]:
        """The names of all metrics that the run logs, but for those of single rewards and their statuses."""
        names = [*STEP, *UPDATE, *(f"optim/stopped_by/{name}" for name in self.stop.names)]
        names += ["policy/kl_ref"] if module.reference is not None else []
        names += ["rollout/rounds", "rollout/groups_kept"] if self.dynamic_sampling else []
        return names + ([f"val/{name}" for name in module.val_metrics] if validates else [])

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self.check(_module(pl_module))
        self.check_trainer(trainer, _module(pl_module))
        if self.prompts_per_step % (self.num_minibatches * trainer.world_size):
            raise UsageError(
                f"loop.prompts_per_step={self.prompts_per_step} is not a multiple of loop.num_minibatches="
                f"{self.num_minibatches} x {trainer.world_size} ranks: every rank takes as many prompts of every update"
            )
        _data(trainer).train_loader = _MinibatchLoader(self)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        module = _module(pl_module)
        size = f"at most {self.max_tokens} tokens" if self.max_tokens else "the whole minibatch"
        rank_zero_info(
            f"{trainer.max_epochs} steps of {self.prompts_per_step} prompts x {self.group_size} completions of at most "
            f"{module.sampling.max_new_tokens} tokens; each step {self.mu} x {self.num_minibatches} updates, {size} in "
            f"one forward and backward{', prompts shared by their group' if module.policy.shares_prefix else ''}"
        )

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        module, data, step = _module(pl_module), _data(trainer), trainer.current_epoch
        self._step_started = time.perf_counter()
        # Whatever draws from the global generators (dropout, a user's reward) draws the same after a resume.
        torch.manual_seed(hash((self.seed, step, trainer.global_rank)))
        random.seed(hash((self.seed, step, trainer.global_rank)))
        numpy.random.seed(hash((self.seed, step, trainer.global_rank)) % 2**32)
        with _exploring(trainer, module):
            # 2-3: an iteration begins
            if module.reference is not None and self.steps_per_iteration and step % self.steps_per_iteration == 0:
                module.reference.refresh(module.policy)
            # 6: the old policy becomes the policy
            module.old_policy.refresh(module.policy)
            # 5, 7, 8: sample a batch D_b and G outputs of each, compute rewards
            self.exploration, minibatch, spare = self._explore(trainer, module, data)
            started = time.perf_counter()
            # 9: compute advantages
            preparation = Preparation(module, trainer.strategy, self.max_tokens, spare)
            rewards = module.explorer.rewards(self.exploration)
            self._packs = preparation.cut(self.exploration.rollouts, rewards, minibatch, self.num_minibatches, self.mu)
        self.passes = Passes(self.stop, self.num_minibatches)
        self._updates_started = time.perf_counter()
        self._seconds = self.exploration.seconds | {"logp": self._updates_started - started}

    def _explore(
        self, trainer: L.Trainer, module: GRPOModule, data: PromptDataModule
    ) -> tuple[Exploration, Tensor, Rollouts]:
        """This rank's share of the step, [B] the minibatch of each completion in it, and all rollouts it sampled.

        Prompts are dealt to the ranks in turn, so each minibatch holds the same prompts for any number of ranks.
        """
        dynamic = self.dynamic_sampling
        parts: list[Exploration] = []
        kept: list[int] = []
        others: list[int] = []
        while len(kept) < self.prompts_per_step and len(parts) < (dynamic.max_rounds if dynamic else 1):
            drawn = data.draw(self.prompts_per_step - len(kept))
            mine = drawn[trainer.global_rank :: trainer.world_size]
            prompts = [data.prompt(question, id=place) for place, question in mine]
            progress = None
            if isinstance(trainer.progress_bar_callback, StepProgressBar):
                trainer.progress_bar_callback.start_exploring(len(prompts) * self.group_size)
                progress = trainer.progress_bar_callback.explored
            parts.append(
                module.explorer.explore(
                    module.policy, prompts, self.group_size, module.sampling, self.seed, trainer.current_epoch, progress
                )
            )
            places = [place for place, _ in drawn]
            passed = set(dynamic.passing(parts[-1]) if dynamic else places)
            kept += [place for place in places if place in passed]
            others += [place for place in places if place not in passed]
        self._rounds, self._kept = len(parts), len(kept) / (len(kept) + len(others))
        chosen = sorted((kept + others)[: self.prompts_per_step])
        size = len(chosen) // self.num_minibatches
        minibatch_of = {place: number // size for number, place in enumerate(chosen)}
        module.explorer.scorer.stop_if_broken()
        exploration = Exploration.concat(parts)
        spare = exploration.rollouts
        minibatch = torch.tensor([minibatch_of.get(sample.prompt.id, -1) for sample in exploration.samples])
        exploration.rollouts = spare.select((minibatch >= 0).nonzero().squeeze(1))
        return exploration, minibatch[minibatch >= 0], spare

    def stream(self) -> Iterator[Minibatch]:
        """The step's optimizer updates: mu passes over the minibatches."""
        # 10: for GRPO iteration = 1, ..., mu
        assert self.exploration is not None
        for number in range(self.mu):
            for place, packs in enumerate(self._packs):
                # 11: GRPOModule.training_step maximises the objective
                yield Minibatch(packs, number == place == 0, self.exploration, self.passes)

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of one exploration step."""
        return self.mu * self.num_minibatches

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Minibatch, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            scored = [value for value in batch.exploration.scores.total if not math.isnan(value)]
            totals, counts = zip(*ranks.gather((sum(scored), len(scored))), strict=True)
            if isinstance(trainer.progress_bar_callback, StepProgressBar) and sum(counts):
                trainer.progress_bar_callback.rewarded(sum(totals) / sum(counts))

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        keep_patience(trainer, checkpoint)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        say_why_it_stopped(trainer)

    def on_train_batch_end(self, *args: Any) -> None:
        # Validation comes between the last update and on_train_epoch_end and is not part of the step.
        self._updates_ended = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        module = _module(pl_module)
        assert self.exploration is not None
        seconds = self._seconds | {
            "optimise": self._updates_ended - self._updates_started,
            "step": self._updates_ended - self._step_started,
        }
        # 12: update the reward models
        iteration_ends = (trainer.current_epoch + 1) % (self.steps_per_iteration or 1) == 0
        learned = module.explorer.scorer.learn(self.exploration.samples, self.exploration.scores, iteration_ends)
        metrics = (
            StepStatistics.from_exploration(self.exploration, self.group_size, seconds).gather().metrics() | learned
        )
        metrics["optim/updates"] = self.passes.num_updates
        metrics |= {f"optim/stopped_by/{name}": float(name == self.passes.ended_by) for name in self.stop.names}
        if self.dynamic_sampling:
            metrics |= {"rollout/rounds": self._rounds, "rollout/groups_kept": self._kept}
        metrics["time/peak_memory_gib"] = peak_memory_gib(module.device)
        # Lightning would put plain numbers on the GPU, to fetch them from there.
        logged = {name: torch.tensor(float(value)) for name, value in metrics.items()}
        module.log("reward/mean", logged.pop("reward/mean", torch.tensor(math.nan)), prog_bar=True)
        module.log_dict(logged)
        self._packs = []


class _MinibatchLoader:
    """The train loader: with a length, and a generator that starts only when the step has been explored.

    Without a length Lightning would fetch a batch ahead, before the exploration that makes it.
    """

    def __init__(self, loop: GRPOLoop) -> None:
        self.loop = loop

    def __len__(self) -> int:
        return self.loop.updates_per_step

    def __iter__(self) -> Iterator[Minibatch]:
        yield from self.loop.stream()


@contextmanager
def _exploring(trainer: L.Trainer, module: GRPOModule) -> Iterator[None]:
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
