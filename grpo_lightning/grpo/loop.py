"""Algorithm 1 of DeepSeekMath (arXiv 2402.03300) as a callback: explore, then mu passes over the rollouts.

One Lightning epoch is one exploration step, one Lightning batch is one optimizer update: Lightning takes the
minibatches of the step from the train loader, and calls `GRPOModule.training_step`, which calls `update`. The numbers
in the comments are the algorithm's lines.
"""

from time import perf_counter
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from grpo_lightning import ranks
from grpo_lightning.grpo.prepare import prepare
from grpo_lightning.grpo.source import RolloutSource, SourceInputs, Synchronous
from grpo_lightning.grpo.step import Minibatch, Minibatches, Observer, Step
from grpo_lightning.maths.filters import DynamicSampling
from grpo_lightning.maths.stopping import FixedPasses, Passes, StopRule
from grpo_lightning.types import at_least


class GRPOLoop(Callback):
    """The loop of GRPO. `trainer.max_epochs` is the number of exploration steps.

    `validate_first` does not affect the result, and `max_tokens` only memory, speed and rounding. All others do.

    Args:
        group_size: G, completions per prompt.
        prompts_per_step: Prompts per exploration step, over all ranks together.
        mu: μ, optimisation passes over the rollouts of one step.
        num_minibatches: Optimizer updates per pass. Each takes an equal part of the prompts; groups stay whole.
        steps_per_iteration: M, steps after which an iteration ends and the reference is refreshed. None: never.
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
        self.group_size, self.prompts_per_step = group_size, prompts_per_step
        self.mu, self.num_minibatches, self.steps_per_iteration = mu, num_minibatches, steps_per_iteration
        self.stop, self.dynamic_sampling = stop or FixedPasses(), dynamic_sampling
        self.source = source or Synchronous()
        self.validate_first, self.max_tokens, self.seed = validate_first, max_tokens, seed
        for name in ("group_size", "prompts_per_step", "mu", "num_minibatches", "steps_per_iteration"):
            at_least(f"loop.{name}", getattr(self, name), 1)
        at_least("loop.max_tokens", max_tokens, 0)
        self.observers: list[Observer] = []  # the trainer's data and callbacks that are told how the steps go
        self.step: Step | None = None  # the step under way, and the last one until the next begins
        self._resumes = False

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

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Connects source and observers with the run, and the updates with Lightning's train loader."""
        if stage != "fit":
            return
        data: Any = getattr(trainer, "datamodule", None)
        pl_module.connect(data)
        self.observers[:] = [one for one in (data, *trainer.callbacks) if isinstance(one, Observer)]
        parts, sizes = pl_module.parts, (self.prompts_per_step, self.group_size, self.seed)
        data.train_loader = Minibatches(lambda: self.current_step, parts.policy, self.mu, self.num_minibatches)
        inputs = (parts.policy, parts.explorer, data, parts.sampling, *sizes, self.dynamic_sampling, self.observers)
        self.source.setup(SourceInputs(*inputs))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Begins step `current_epoch` (line 4): explores, and prepares the updates, which Lightning then asks for."""
        parts, index, self.step, started = pl_module.parts, trainer.current_epoch, None, perf_counter()
        policy, reference = parts.policy, parts.reference
        # Whatever draws from the global generators (dropout, a user's reward) draws the same after a resume.
        ranks.seed(self.seed, index)
        with pl_module.evaluating():
            # 2-3: an iteration begins
            if reference is not None and self.steps_per_iteration and index % self.steps_per_iteration == 0:
                reference.refresh(policy)
            # 6: π_old becomes π_θ; by default it keeps log-probs alone, found below
            parts.old_policy.refresh(policy)
            # 5, 7, 8: sample a batch D_b and G outputs of each, compute rewards
            exploration = self.source.next(index)
            # The oldest version of all ranks is that of each: they must take the same path.
            exploration.policy_version = min(ranks.gather(exploration.policy_version))
            explored = perf_counter()
            # 9: compute advantages; and what 11 needs: weights, packs, log-probs
            rollouts, packs = prepare(parts, exploration, self.num_minibatches, self.mu, self.max_tokens)
            exploration.rollouts = rollouts
            exploration.seconds["logp"] = perf_counter() - explored
        passes = Passes(self.stop, self.num_minibatches)  # 10: for GRPO iteration = 1, ..., μ, unless a rule stops it
        self.step = Step(exploration, packs, passes, started, prepared=perf_counter())
        for observer in self.observers:
            observer.prepared(self.step)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Minibatch, batch_idx: int
    ) -> None:
        """Tells the observers after the last update, before Lightning validates."""
        self.current_step.updated = perf_counter()
        if batch_idx == self.updates_per_step - 1:
            for observer in self.observers:
                observer.updated(self.current_step)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        # 12: update the reward models
        step, scorer = self.current_step, pl_module.parts.explorer.scorer
        iteration_ends = (trainer.current_epoch + 1) % (self.steps_per_iteration or 1) == 0
        step.learned = scorer.learn(step.exploration.samples, step.exploration.scores, iteration_ends)

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Lets the module explain what Lightning raises before it calls the module."""
        pl_module.explain(trainer, exception)

    def state_dict(self) -> dict[str, Any]:
        return {"source": self.source.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores it, where the run is resumed."""
        if self._resumes:
            self.source.load_state_dict(state_dict["source"])

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Notes that the run is resumed. `validate` and its kin load callbacks too; a fit after them starts anew."""
        self._resumes = trainer.state.fn == TrainerFn.FITTING
