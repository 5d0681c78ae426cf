"""Algorithm 1 of DeepSeekMath (arXiv 2402.03300) as a Lightning callback.

One Lightning epoch is one exploration step, and one Lightning batch is one optimizer update. The callback explores
and prepares when an epoch starts. Lightning then takes the step's minibatches from the train loader and calls
`GRPOModule.training_step` for each, which calls `update`. Numbers in comments are the algorithm's lines.
"""

from dataclasses import replace
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

    `validate_first` does not affect what is learned; `max_tokens` affects only memory, speed and rounding. All other
    arguments change the result.

    Args:
        group_size: G, completions per prompt.
        prompts_per_step: Prompts per exploration step, over all ranks together.
        mu: μ, optimisation passes over the rollouts of one step.
        num_minibatches: Optimizer updates per pass. Each takes an equal part of the prompts; groups stay whole.
        steps_per_iteration: M, steps after which an iteration ends and the reference is refreshed. None: never.
        stop: Rule that ends the passes before all μ are done.
        dynamic_sampling: Sample further prompts until enough groups have rewards that differ. None takes the first
            prompts as they are.
        source: Where the rollouts come from; by default they are sampled when a step begins.
        validate_first: Validate before the first step too, so that curves start at the untrained policy. Resumed runs
            and runs with `trainer.fast_dev_run` do not.
        max_tokens: Tokens in one forward and backward: prompts, completions and padding. 0 sets no limit: a minibatch
            is one micro-batch.
        seed: Seed of the random numbers that completions are sampled with.
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
        for name in ("group_size", "prompts_per_step", "mu", "num_minibatches", "steps_per_iteration"):
            at_least(f"loop.{name}", getattr(self, name), 1)
        at_least("loop.max_tokens", max_tokens, 0)

        self.observers: list[Observer] = []
        """The datamodule and the callbacks that derive from `Observer`; `setup` collects them."""
        self.step: Step | None = None
        """The current exploration step. It stays here after its end, until the next step begins."""
        self._is_resuming = False

    @staticmethod
    def find(trainer: L.Trainer) -> "GRPOLoop":
        """Returns the loop among the trainer's callbacks."""
        callbacks: list[Callback] = getattr(trainer, "callbacks", [])
        return next(callback for callback in callbacks if isinstance(callback, GRPOLoop))

    @property
    def current_step(self) -> Step:
        """The current exploration step. There is none before the first epoch."""
        assert self.step is not None
        return self.step

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates per exploration step."""
        return self.mu * self.num_minibatches

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Connects the source and the observers to the run, and the minibatches to Lightning's train loader."""
        if stage != "fit":
            return
        datamodule: Any = getattr(trainer, "datamodule", None)
        pl_module.connect(datamodule)
        policy = pl_module.parts.policy

        # The datamodule and callbacks that derive from `Observer` are called at each stage of a step.
        candidates = (datamodule, *trainer.callbacks)
        self.observers[:] = [candidate for candidate in candidates if isinstance(candidate, Observer)]

        datamodule.train_loader = Minibatches(lambda: self.current_step, policy, self.mu, self.num_minibatches)
        self.source.setup(
            SourceInputs(
                policy=policy,
                explorer=pl_module.parts.explorer,
                data=datamodule,
                sampling=pl_module.parts.sampling,
                prompts_per_step=self.prompts_per_step,
                group_size=self.group_size,
                seed=self.seed,
                dynamic_sampling=self.dynamic_sampling,
                observers=self.observers,
            )
        )

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Runs lines 2 to 9: samples and scores the completions of a step, and prepares its updates.

        Lightning then runs the updates: `Minibatches` yields the minibatches of the step, and `training_step` makes
        one update of each.
        """
        started = perf_counter()
        step_index = trainer.current_epoch
        parts = pl_module.parts
        policy = parts.policy
        reference = parts.reference

        # Release the memory of the last step before the next step takes more.
        self.step = None
        # Reseed, so that dropout and rewards that use random numbers repeat after a resume.
        ranks.seed(self.seed, step_index)

        # In this context there are neither gradients nor dropout.
        with pl_module.evaluating():
            # 2-3: in the first step of an iteration π_ref becomes π_θ.
            if reference is not None and self.steps_per_iteration and step_index % self.steps_per_iteration == 0:
                reference.refresh(policy)

            # 6: π_old becomes π_θ. By default no weights are copied: `prepare` computes the log-probs of π_old instead.
            parts.old_policy.refresh(policy)

            # 5, 7, 8: take a batch of questions, sample G outputs of each, and compute their rewards.
            exploration = self.source.next(step_index)
            # All ranks must take the same path from here, so the oldest version of any rank counts for all.
            oldest_version = min(ranks.gather(exploration.policy_version))
            exploration = replace(exploration, policy_version=oldest_version)
            explored = perf_counter()

            # 9: compute the advantages. Prepare line 11: token weights, micro-batches, log-probs.
            rollouts, micro_batches = prepare(parts, exploration, self.num_minibatches, self.mu, self.max_tokens)
            seconds = {**exploration.seconds, "logp": perf_counter() - explored}
            exploration = replace(exploration, rollouts=rollouts, seconds=seconds)

        # 10: for GRPO iteration = 1, ..., μ, unless the stop rule ends the passes earlier.
        passes = Passes(self.stop, self.num_minibatches)
        self.step = Step(exploration, micro_batches, passes, started, prepared_at=perf_counter())
        for observer in self.observers:
            observer.prepared(self.step)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Minibatch, batch_idx: int
    ) -> None:
        """Calls the observers after the last update of a step, before Lightning validates."""
        self.current_step.updated_at = perf_counter()
        if batch_idx == self.updates_per_step - 1:
            for observer in self.observers:
                observer.updated(self.current_step)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Runs line 12: lets the reward models learn from the step."""
        step = self.current_step
        scorer = pl_module.parts.explorer.scorer
        iteration_ends = (trainer.current_epoch + 1) % (self.steps_per_iteration or 1) == 0
        step.metrics |= scorer.learn(step.exploration.samples, step.exploration.scores, iteration_ends)

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Lets the module explain an exception that Lightning raised before it called the module."""
        pl_module.explain(trainer, exception)

    def state_dict(self) -> dict[str, Any]:
        return {"source": self.source.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the source when a run is resumed."""
        if self._is_resuming:
            self.source.load_state_dict(state_dict["source"])

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Notes whether the checkpoint resumes a run, before `load_state_dict` is called.

        Lightning also restores callbacks for `validate`, `test` and `predict`. A fit after these must start anew.
        """
        self._is_resuming = trainer.state.fn == TrainerFn.FITTING
