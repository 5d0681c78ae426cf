"""The LightningModule of GRPO: policy, reference and old policy, and the optimizer update."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn

from grpo_lightning.engines.engine import RolloutEngine
from grpo_lightning.engines.plain import PlainEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.stop_strings import StopStrings
from grpo_lightning.grpo.explore import Explorer
from grpo_lightning.grpo.loop import GRPOLoop
from grpo_lightning.grpo.step import Minibatch, Parts
from grpo_lightning.grpo.update import Watcher, update
from grpo_lightning.maths.advantages import AdvantageEstimator, GroupStd
from grpo_lightning.maths.objective import Objective
from grpo_lightning.policy import sharding
from grpo_lightning.policy.architecture import evaluating
from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.snapshots import AdapterOff, FrozenCopy, PolicySnapshot, RecordedLogp, TrainedCopy
from grpo_lightning.rewards.reward import Reward, Run
from grpo_lightning.rewards.scorer import Scorer
from grpo_lightning.training.averages import (
    CURRENT,
    check_averages,
    complete_averages,
    copied_weights,
    resume_trained_weights,
)
from grpo_lightning.training.checkpoint_files import check_same_model, fit_snapshots
from grpo_lightning.training.checks import (
    check_limit,
    check_module,
    check_precision,
    check_run,
    check_strategy,
    warn_of_lost_updates,
)
from grpo_lightning.training.evaluation import EvaluatingModule, Evaluation, Validation
from grpo_lightning.training.internals import has_end
from grpo_lightning.training.lightning_machine import Guard, LightningMachine
from grpo_lightning.training.sampler_gap import SamplerGap
from grpo_lightning.training.schedules import OptimizerOptions, RunSchedule
from grpo_lightning.training.step_report import StepReport
from grpo_lightning.training.task_data import TaskData
from grpo_lightning.training.whole_steps import WholeSteps
from grpo_lightning.types import UsageError


class GRPOModule(EvaluatingModule):
    """The policy of GRPO, its reference and its old policy; maximises the objective over minibatches of rollouts.

    Args:
        policy: π_θ, the causal LM that is trained.
        rewards: The terms of R(q, o), summed by their weights.
        engine: Samples the completions.
        sampling: The distribution that completions are sampled from.
        advantage: Computes Â from the rewards of a group.
        objective: The surrogate, the KL term and how tokens are averaged.
        old_policy: π_old, the denominator of the ratio.
        reference: π_ref of the KL terms. It exists only with an `objective.beta` above 0 or an `objective.reward_kl`.
            None is a `FrozenCopy`, or `AdapterOff` of a policy with an adapter.
        optimizer: Makes the optimizer from the trained parameters.
        lr_scheduler: The learning-rate schedule, stepped once per optimizer update. None keeps the rate.
        guard: Limits beyond which gradients are clipped or the run stops.
        validation: How many completions validation samples, and which grader decides what is right.
    """

    def __init__(
        self,
        policy: Policy,
        rewards: list[Reward],
        engine: RolloutEngine | None = None,
        sampling: Sampling | None = None,
        advantage: AdvantageEstimator | None = None,
        objective: Objective | None = None,
        old_policy: PolicySnapshot | None = None,
        reference: PolicySnapshot | None = None,
        optimizer: OptimizerCallable = lambda parameters: torch.optim.AdamW(parameters, lr=1e-6, weight_decay=0.0),
        lr_scheduler: LRSchedulerCallable | None = None,
        guard: Guard | None = None,
        validation: Validation | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy = policy
        self.sampling = sampling or Sampling()
        self.guard = guard or Guard()
        self.validation = validation or Validation()
        self.objective = objective or Objective()
        scorer = Scorer(rewards, self.guard.max_failed_rewards, self.validation.correct)
        self.explorer = Explorer(engine or PlainEngine(), scorer)
        self.advantage = advantage or GroupStd()
        self.old_policy = old_policy or RecordedLogp()
        # A reference that nothing reads would only take memory.
        default_reference = FrozenCopy if policy.adapter is None else AdapterOff
        is_read = self.objective.needs_reference or "ref_logp" in self.advantage.reads
        self.reference = (reference or default_reference()) if is_read else None
        check_module(self, old_policy, reference)
        # A checkpoint of an adapter has only the trained tensors; `check_same_model` compares these.
        self.strict_loading = policy.adapter is None
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.register_load_state_dict_pre_hook(_fill_in)
        self.register_buffer("bad_updates", torch.tensor(0))
        self.register_buffer("bad_updates_in_a_row", torch.tensor(0))
        self.evaluation = Evaluation(self.explorer, self.val_sampling, self.validation.samples)
        self._loaded = False
        self._options: OptimizerOptions
        self._resumed: tuple[list[dict[str, Any]], int | None] = [], None
        """The state of the schedules and the policy's version from a checkpoint, until the fit begins."""

    @property
    def parts(self) -> Parts:
        """The parts of GRPO that the loop and the updates work with."""
        return Parts(
            self.policy,
            self.old_policy,
            self.reference,
            self.explorer,
            self.sampling,
            self.advantage,
            self.objective,
        )

    @property
    def val_sampling(self) -> Sampling:
        """The distribution of validation, test and prediction."""
        return self.validation.sampling.over(self.sampling)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Returns a context without gradients, in eval mode and with the trainer's precision."""
        with evaluating(self.policy), torch.no_grad(), self.trainer.strategy.precision_plugin.forward_context():
            yield

    def configure_callbacks(self) -> list[Callback]:
        """Adds the callbacks that keep the trainer to whole steps and log the steps, unless the trainer has them."""
        trainer: Any = self.trainer
        present = {type(callback) for callback in trainer.callbacks}
        if GRPOLoop in present and trainer.state.fn == TrainerFn.FITTING:
            # This hook runs before Lightning starts its loggers, which write files.
            check_run(self, trainer)
        return [kind() for kind in (WholeSteps, StepReport) if kind not in present and GRPOLoop in present]

    def explain(self, trainer: Any, exception: BaseException) -> None:
        """Raises UsageError if a strategy that forks or spawns processes fails, since its exception tells little."""
        if not isinstance(exception, UsageError):
            check_strategy(trainer.strategy)

    def connect(self, data: Any) -> None:
        """Takes the data's sampler and validations, and the grader of its task if `validation` has none."""
        if not hasattr(data, "train_loader"):
            raise UsageError("GRPOLoop needs prompts: trainer.fit(module, datamodule=PromptDataModule(...))")
        self.explorer.sampler = data.sampler
        engine = self.explorer.engine
        data.text_engine = "" if engine.reads_images else type(engine).__name__
        self.evaluation.set_grader(self.validation.grader or data.task.grader)
        if self.validation.correct is None:
            self.explorer.scorer.grade_by(self.evaluation.grader)
        for name, validation in data.validations.items():
            if name not in self.named:
                self.named[name] = validation.evaluation(self.explorer, self.sampling)

    def setup(self, stage: str) -> None:
        """Reads the questions of the data, and sets up the rewards for the run."""
        trainer = self.trainer
        check_precision(trainer.precision)
        # An interrupted validation has not reached its end.
        self._validating.close()
        data = getattr(trainer, "datamodule", None)
        if isinstance(data, TaskData):
            self.read_questions(data, stage, trainer)
        longest = self.explorer.sampler.longest(self.sampling)
        run = Run(
            trainer.strategy.root_device,
            self.policy.tokenizer,
            longest,
            trainer.global_rank,
            getattr(data, "chat", False),
            lambda: int(trainer.global_step),
        )
        evaluations = self.evaluations.values() if _validates(stage, trainer) else ()
        # The scorer of a validation holds the rewards of training too.
        for scorer in [evaluation.scorer for evaluation in evaluations] or [self.explorer.scorer]:
            scorer.setup(run)

    def read_questions(self, data: TaskData, stage: str, trainer: Any) -> None:
        """Reads the questions that `stage` needs, and shows them to the rewards and the grader that will score them."""
        self.connect(data)
        data.load(
            stage,
            self.policy,
            self.sampling,
            self.explorer.scorer,
            _validates(stage, trainer),
            self.val_sampling,
            self.evaluation.grader,
        )
        check_limit(trainer, data, stage)

    def load(self, precision: Precision) -> None:
        """Reads the weights, and checks that the engine can decode them. A second call does nothing."""
        if self._loaded:
            return
        if self.reference is not None:
            self.reference.check(self.policy)
        self.policy.load()
        # The engine is checked under the run's autocast; the true half precisions convert the weights later.
        autocast = precision.forward_context() if isinstance(precision, MixedPrecision) else nullcontext()
        samplings = self.sampling, *(evaluation.sampling for evaluation in self.evaluations.values())
        # Lightning calls this where new tensors are made on the GPU; in training they are made on the CPU.
        with autocast, torch.device("cpu"):
            self.explorer.engine.check(self.policy, max(samplings, key=lambda sampling: sampling.max_new_tokens))
        for sampling in samplings:
            # Refuses strings that no text can have.
            StopStrings(self.policy, sampling.stop)
        self._loaded = True

    def configure_model(self) -> None:
        """Reads the weights and makes the snapshots; a strategy with a device mesh shards both.

        The reference starts as the initial policy.
        """
        self.load(self.trainer.strategy.precision_plugin)
        if self.trainer.state.fn == TrainerFn.FITTING:
            check_averages(self.trainer, self.policy, self.device_mesh is not None)
        for snapshot in (self.old_policy, self.reference):
            # A second `fit`, or one after `validate`, must not move the reference to the policy.
            if snapshot is not None and not snapshot.exists:
                snapshot.refresh(self.policy)
        if self.device_mesh is not None:
            for weights in [module for module in self.modules() if isinstance(module, (Policy, TrainedCopy))]:
                weights.shard(sharding.data_mesh(self.device_mesh))

    def configure_optimizers(self) -> Any:
        """Makes the optimizer of the trained parameters, and its schedule."""
        optimizer = self.optimizer([parameter for parameter in self.policy.parameters() if parameter.requires_grad])
        trainer: Any = self.trainer
        self._updates_per_step = len(trainer.datamodule.train_dataloader())
        num_updates = self._updates_per_step * trainer.max_epochs if has_end(trainer.max_epochs) else None
        self._options = OptimizerOptions(optimizer, self.lr_scheduler, num_updates)
        schedule = {"scheduler": self._options.scheduler, "interval": "step"}
        return {"optimizer": optimizer, **({"lr_scheduler": schedule} if self._options.scheduler else {})}

    def on_fit_start(self) -> None:
        """Puts the policy into training mode."""
        # from_pretrained leaves the model in eval mode, and gradient checkpointing needs training mode.
        self.policy.train()
        self._checkpoint_step = None
        warn_of_lost_updates(self.policy, self._options.optimizer)

    def on_train_start(self) -> None:
        """Brings the schedule to the update that the run resumes from."""
        # By now the optimizer has its state back, under any strategy.
        num_updates = self.trainer.global_step
        # A schedule over the run counts updates that are not made, too.
        if isinstance(self._options.scheduler, RunSchedule):
            num_updates = self.trainer.current_epoch * self._updates_per_step
        schedules, version = self._resumed
        self._options.restore_schedule(schedules, num_updates)
        if version is not None:
            # Rollouts that a source kept across the resume are as old as they were.
            self.policy.version = version
            self.explorer.engine.version = None
        self._resumed = [], None

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the weights of policy and snapshots; only an adapter's, if the policy has one.

        π_old is left out if the next step replaces it.
        """
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        for name in self._unsaved_state():
            state.pop(prefix + name, None)
        return state

    def _unsaved_state(self) -> dict[str, Any]:
        """Returns the weights that a checkpoint leaves out, by name."""
        unsaved: dict[str, Any] = {}
        if self.old_policy.is_policy:
            unsaved |= self.old_policy.state_dict(prefix="old_policy.")
        if self.policy.adapter is not None:
            frozen = self.policy.state_dict(prefix="policy.")
            for name in self.policy.trained_state_dict():
                frozen.pop(f"policy.{name}", None)
            unsaved |= frozen
        return unsaved

    def __deepcopy__(self, memo: dict[int, Any]) -> "GRPOModule":
        """Copies the module with its weights, for callbacks that average them. The copy cannot be validated."""
        return copied_weights(self, ["evaluation", "named"], memo)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the policy's version, the state of the rewards, and the fingerprint of an adapter's base model."""
        checkpoint["policy_version"] = self.policy.version
        checkpoint["rewards"] = self.explorer.scorer.state_dict()
        stateful = self.advantage, self.objective.entropy
        checkpoint["parts"] = {type(component).__name__: component.state_dict() for component in stateful}
        if self.policy.adapter is not None:
            checkpoint["base"] = self.policy.base

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Reads a checkpoint of another `beta`, `reference`, `old_policy` or schedule, but of no other model."""
        self.explorer.scorer.load_state_dict(checkpoint.get("rewards", {}))
        for component in (self.advantage, self.objective.entropy):
            if state := checkpoint.get("parts", {}).get(type(component).__name__):
                component.load_state_dict(state)
        # Lightning's strategy for sharded weights has written them by now, layer by layer, past the policy.
        self.policy.mark_written()
        is_fitting = self.trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            resume_trained_weights(self.trainer, checkpoint)
        if checkpoint.get("state_dict"):
            policy = self.policy
            check_same_model(checkpoint, self.state_dict(), policy.base, self.trainer.ckpt_path, policy.path)
        for state in filter(None, (checkpoint.get("state_dict"), checkpoint.get(CURRENT))):
            fit_snapshots(state, {"reference": self.reference, "old_policy": self.old_policy})
        if is_fitting:
            self._resumed = checkpoint.get("lr_schedulers", []), checkpoint.get("policy_version")
            # Lightning would load a schedule's state into the schedule of this run, which may be another.
            checkpoint["lr_schedulers"] = []
        else:
            self._checkpoint_step = checkpoint["epoch"]

    def training_step(self, minibatch: Minibatch, batch_idx: int) -> None:
        """Makes one optimizer update: line 11 of DeepSeekMath's Algorithm 1.

        Once a stop rule has ended the updates of the step, only the schedule may move.
        """
        if minibatch.step.passes.ended:
            self._step_schedule(is_made=False)
            return
        optimizer: Any = self.optimizers()
        started = time.perf_counter()
        rate = optimizer.param_groups[0]["lr"]
        machine = LightningMachine(self, optimizer)
        callbacks = getattr(self.trainer, "callbacks", [])
        watchers = [SamplerGap(self.parts), *(callback for callback in callbacks if isinstance(callback, Watcher))]
        is_made, metrics = update(minibatch, self.parts, machine, self.guard.grad_clip, watchers)

        # Lightning calls this hook only if it makes the updates itself.
        for callback in callbacks:
            callback.on_before_zero_grad(self.trainer, self, optimizer)
        self.on_before_zero_grad(optimizer)
        optimizer.zero_grad()
        self._step_schedule(is_made)

        if metrics is not None:
            # Adafactor may choose the rate itself; it is None then.
            rates = {} if rate is None else {"optim/lr": torch.tensor(rate)}
            seconds = torch.tensor(time.perf_counter() - started)
            minibatch.step.updates.append((is_made, {**metrics, **rates, "time/update": seconds}))

    def on_train_batch_end(self, *args: Any) -> None:
        """Completes the averages of the weights that callbacks have updated."""
        complete_averages(self.trainer, self)

    # Some callbacks update their average at the end of a step.
    on_train_epoch_end = on_train_batch_end

    def _step_schedule(self, is_made: bool) -> None:
        """Steps the schedule after an update that was made; a `RunSchedule` counts the others too."""
        scheduler: Any = self.lr_schedulers()
        if scheduler is not None and (is_made or isinstance(scheduler, RunSchedule)):
            scheduler.step()

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Raises UsageError: a checkpoint holds weights, and not the policy, the rewards and the engine."""
        raise UsageError(
            f"GRPOModule.load_from_checkpoint({str(checkpoint_path)!r}): a checkpoint holds no policy, rewards or "
            "engine. Make the module as for the run, and give the path to the trainer, as in "
            "trainer.validate(module, datamodule=data, ckpt_path=path)"
        )

    def teardown(self, stage: str) -> None:
        """Closes the engine, the rewards and the environments."""
        self._validating.close()
        self.explorer.close()
        self.explorer.settle()
        for evaluation in self.evaluations.values():
            evaluation.explorer.sampler.close()
            evaluation.scorer.close()


def _validates(stage: str, trainer: Any) -> bool:
    """Whether a stage answers validation questions: every stage but a `fit` without validation."""
    return stage != "fit" or trainer.limit_val_batches != 0


def _fill_in(module: GRPOModule, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Adds the present weights that `state_dict` leaves out, so that loading does not change them."""
    for name, value in module._unsaved_state().items():
        state.setdefault(prefix + name, value)
