"""The LightningModule: policy, reference and old policy, and the one optimizer update that everything leads to."""

import functools
import math
import operator
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from grpo_lightning.engines.base import FAR_FRACTION, MEAN_FRACTION, RolloutEngine
from grpo_lightning.engines.plain import PlainEngine
from grpo_lightning.engines.sampling import Sampling, ValidationSampling
from grpo_lightning.engines.stop_strings import StopStrings
from grpo_lightning.maths.advantages import AdvantageEstimator, GroupStd
from grpo_lightning.maths.diagnostics import Diagnostics
from grpo_lightning.maths.kl import K3
from grpo_lightning.maths.kl_penalty import KLPenalty
from grpo_lightning.maths.mismatch import FAR, Mismatch
from grpo_lightning.maths.objective import Objective
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.policy import sharding
from grpo_lightning.policy.policy import Policy, TokenLogp
from grpo_lightning.policy.snapshots import AdapterOff, FrozenCopy, PolicySnapshot, RecordedLogp
from grpo_lightning.policy.threads import in_threads
from grpo_lightning.policy.trained_copy import TrainedCopy
from grpo_lightning.rewards.base import Reward, Run
from grpo_lightning.rewards.scorer import Scorer
from grpo_lightning.training import host_memory, internals
from grpo_lightning.training.data import PromptBatch, PromptDataModule
from grpo_lightning.training.evaluation import Evaluation, Validation
from grpo_lightning.training.explorer import Explorer
from grpo_lightning.training.optimizer_options import OptimizerOptions, warn_of_small_rate
from grpo_lightning.training.pace import has_end
from grpo_lightning.training.post_mortem import culprits
from grpo_lightning.training.precision import validate_precision, warn_of_rounded_updates
from grpo_lightning.training.restoring import fit_snapshots, refuse_other_base, refuse_other_model
from grpo_lightning.training.schedules import WarmupCosine
from grpo_lightning.training.step import Minibatch
from grpo_lightning.types import UsageError, at_least


class GRPOModule(L.LightningModule):
    """The policy of GRPO, its reference and its old policy; maximises the objective over minibatches of rollouts.

    Args:
        policy: π_θ, the causal LM that is trained.
        rewards: The terms of R(q, o), summed by their weights.
        engine: Draws the completions.
        sampling: The distribution that completions are drawn from.
        advantage: Â from the rewards of a group.
        objective: The surrogate, the KL term and how tokens are averaged.
        reward_kl: A KL penalty in the reward, beside that of the objective or instead of it.
        old_policy: π_old, the denominator of the ratio.
        reference: π_ref of the KL terms. It exists only with an `objective.beta` above 0 or a `reward_kl`. None is a
            `FrozenCopy`, or `AdapterOff` of a policy with an adapter.
        optimizer: The optimizer, given the parameters.
        lr_scheduler: The learning-rate schedule, stepped once per optimizer update. None keeps the rate.
        grad_clip: Largest norm of the gradient; 0 does not clip.
        max_bad_updates: The run stops after this number of updates in a row whose loss or gradient is not finite.
        max_failed_rewards: Largest fraction of the samples of a step, or a validation, over all ranks, that a reward
            may fail on before the run stops.
        correct: Name of the reward that decides what is right in the statistics of training. None is the first.
        validation: How validation decides what is right.
        val_samples: k of avg@k, pass@k and maj@k.
        val_sampling: What validation, test and prediction draw otherwise than training; None nothing.
    """

    def __init__(
        self,
        policy: Policy,
        rewards: list[Reward],
        engine: RolloutEngine | None = None,
        sampling: Sampling | None = None,
        advantage: AdvantageEstimator | None = None,
        objective: Objective | None = None,
        reward_kl: KLPenalty | None = None,
        old_policy: PolicySnapshot | None = None,
        reference: PolicySnapshot | None = None,
        optimizer: OptimizerCallable = lambda parameters: torch.optim.AdamW(parameters, lr=1e-6, weight_decay=0.0),
        lr_scheduler: LRSchedulerCallable | None = None,
        grad_clip: float = 1.0,
        max_bad_updates: int = 5,
        max_failed_rewards: float = 0.5,
        correct: str | None = None,
        validation: Validation | None = None,
        val_samples: int = 8,
        val_sampling: ValidationSampling | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy = policy
        self._loaded = False
        self._awake = ExitStack()
        self._placed = ExitStack()
        self._standing: int | None = None
        """Step of the checkpoint that these weights are from; None once they are trained, or if there is none."""
        self.sampling = sampling or Sampling()
        if self.sampling.greedy:
            raise UsageError("sampling.temperature=0: training needs completions that differ; give more than 0")
        self.validation = validation or Validation()
        self._val_sampling = val_sampling or ValidationSampling()
        self.objective = objective or Objective()
        refuse_filtered_correction(self.objective, self.sampling)
        self.explorer = Explorer(engine or PlainEngine(), Scorer(rewards, max_failed_rewards, correct))
        self.advantage = advantage or GroupStd()
        self.reward_kl = reward_kl
        self.old_policy = old_policy or RecordedLogp()
        needs_reference = self.objective.beta > 0 or reward_kl is not None
        usual = FrozenCopy if policy.adapter is None else AdapterOff
        self.reference = (reference or usual()) if needs_reference else None
        if not needs_reference and type(reference) not in (usual, type(None)):
            raise UsageError(
                f"model.reference={type(reference).__name__}: nothing reads it with model.objective.beta=0 and no "
                "model.reward_kl. Give a beta above 0, such as 0.04, or model.reference=null"
            )
        if self.objective.beta == 0 and type(self.objective.kl) is not K3:
            raise UsageError(
                f"model.objective.kl={type(self.objective.kl).__name__}: it has no effect with model.objective.beta=0. "
                "Give a beta above 0, such as 0.04, or kl=K3, which is the default"
            )
        for key, snapshot in (("reference", reference), ("old_policy", old_policy)):
            if isinstance(snapshot, AdapterOff) and (policy.adapter is None or key == "old_policy"):
                raise UsageError(
                    f"model.{key}=AdapterOff: it is the model without its adapter. "
                    + ("Use FrozenCopy, or set model.policy.adapter" if key == "reference" else "Use RecordedLogp")
                )
        if policy.adapter is not None:
            # A checkpoint has the trained tensors; what else is missing, `refuse_other_model` finds.
            self.strict_loading = False
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        if not grad_clip >= 0:
            raise UsageError(f"model.grad_clip={grad_clip}: give 0 (no clipping) or more")
        at_least("model.max_bad_updates", max_bad_updates, 1)
        at_least("model.val_samples", val_samples, 1)
        self.grad_clip = grad_clip
        self.max_bad_updates = max_bad_updates
        self.val_samples = val_samples
        self.bad_updates: Tensor
        self.bad_updates_in_a_row: Tensor
        self.register_buffer("bad_updates", torch.tensor(0))
        self.register_buffer("bad_updates_in_a_row", torch.tensor(0))
        self._options: OptimizerOptions | None = None
        self._saved_schedules: list[dict[str, Any]] = []
        self._saved_version: int | None = None
        self.evaluation = Evaluation(self.explorer, self.val_sampling, val_samples)

    @property
    def val_sampling(self) -> Sampling:
        """The distribution of validation, test and prediction."""
        return self._val_sampling.over(self.sampling)

    def connect(self, data: PromptDataModule) -> None:
        """Takes over the environment of the data, and the judge of its task where `validation` has none."""
        self.explorer.conversations = data.conversations
        self.evaluation.judge_by(self.validation.judge or data.task.judge)

    def setup(self, stage: str) -> None:
        """Lets the data read its questions, and the rewards what they need of the run."""
        validate_precision(self.trainer.precision)
        self._awake.close()  # an interrupted validation had no end
        if self.trainer.strategy.root_device.type == "cpu":
            host_memory.keep_freed()
        trainer, validates = self.trainer, stage != "fit" or self.trainer.limit_val_batches != 0
        data = getattr(trainer, "datamodule", None)
        if isinstance(data, PromptDataModule):
            self.connect(data)
            self.read_questions(data, stage, validates)
        scorer = self.evaluation.scorer if validates else self.explorer.scorer
        device, rank = trainer.strategy.root_device, trainer.global_rank
        scorer.setup(Run(device, self.policy.tokenizer, self.explorer.longest(self.sampling), rank))

    def read_questions(self, data: PromptDataModule, stage: str, validates: bool) -> None:
        """Lets the data read what `stage` needs, and the rewards and the judge the questions that they will score."""
        scorer, judge = self.explorer.scorer, self.evaluation.judge
        data.load(stage, self.policy, self.sampling, scorer, validates, self.val_sampling, judge)

    def load(self, precision: Precision) -> None:
        """Reads the weights, and checks that the engine can decode them; the second call does nothing."""
        if self._loaded:
            return
        self.policy.load()
        # What autocast computes is what is checked; the true half precisions convert the weights later.
        autocast = precision.forward_context() if isinstance(precision, MixedPrecision) else nullcontext()
        # As in training: Lightning loads where every new tensor is made on the GPU.
        longest = max(self.sampling, self.val_sampling, key=lambda sampling: sampling.max_new_tokens)
        with autocast, torch.device("cpu"):
            self.explorer.engine.check(self.policy, longest)
        for sampling in (self.sampling, self.val_sampling):
            StopStrings(self.policy, sampling.stop)  # refuses strings that no text can have
        self._loaded = True

    def configure_model(self) -> None:
        """Reads the weights; the reference starts as the initial policy. A strategy with a device mesh shards them."""
        mesh = None if self.device_mesh is None else sharding.data_mesh(self.device_mesh)
        self.load(self.trainer.strategy.precision_plugin)
        for snapshot in (self.old_policy, self.reference):
            # The second `fit`, or one after `validate`, finds them made: the reference must not follow the policy here.
            if snapshot is not None and not snapshot.exists:
                snapshot.refresh(self.policy)
        if mesh is not None:
            for weights in [module for module in self.modules() if isinstance(module, (Policy, TrainedCopy))]:
                weights.shard(mesh)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer of the trained parameters, and its schedule."""
        optimizer = self.optimizer([p for p in self.policy.parameters() if p.requires_grad])
        steps = self.trainer.max_epochs
        num_updates = self._updates_per_step * steps if steps is not None and has_end(steps) else None
        self._options = OptimizerOptions(optimizer, self.lr_scheduler, num_updates)
        if self._options.scheduler is None:
            return {"optimizer": optimizer}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self._options.scheduler, "interval": "step"}}

    @property
    def _updates_per_step(self) -> int:
        """Optimizer updates per exploration step."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        return len(data.train_dataloader())

    def on_fit_start(self) -> None:
        """Puts the policy into training mode."""
        # from_pretrained leaves the model in eval mode, and gradient checkpointing needs training mode.
        self.policy.train()
        self._standing = None
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        warn_of_rounded_updates(self.policy, optimizer.optimizer)
        if self.policy.adapter is not None:
            warn_of_small_rate(optimizer.optimizer)

    def on_train_start(self) -> None:
        """Brings the schedule to where the run is."""
        # The optimizer has its state back by now, under any strategy.
        assert self._options is not None
        counts_all = isinstance(self._options.scheduler, WarmupCosine)
        done = self.trainer.current_epoch * self._updates_per_step if counts_all else self.trainer.global_step
        self._options.restore_schedule(self._saved_schedules, done)
        self._saved_schedules = []
        if self._saved_version is not None:
            # Rollouts that a source kept across the resume are as old as they were.
            self.policy.version, self._saved_version = self._saved_version, None
            self.explorer.engine.version = None

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The weights of policy and reference, and those of π_old unless the next step replaces them.

        Of a policy with an adapter, the trained tensors alone.
        """
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        if self.old_policy.is_policy:
            for name in [name for name in state if name.startswith(f"{prefix}old_policy.")]:
                del state[name]
        if self.policy.adapter is not None:
            trained = {f"{prefix}policy.{name}" for name in self.policy.trained_state_dict()}
            for name in [name for name in state if name.startswith(f"{prefix}policy.") and name not in trained]:
                del state[name]
        return state

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the policy's version, what the rewards have learned and which weights an adapter was trained on."""
        checkpoint["policy_version"] = self.policy.version
        checkpoint["rewards"] = self.explorer.scorer.state_dict()
        if self.policy.adapter is not None:
            checkpoint["base"] = self.policy.base

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Lets a checkpoint be read with another `beta`, `reference`, `old_policy` or schedule, but no other model.

        A reference that is not in it starts as the model in `policy.path`, π_old as the policy.
        """
        self.explorer.scorer.load_state_dict(checkpoint.get("rewards", {}))
        # Lightning's own strategy for sharded weights has read them by now, layer by layer: the policy did not notice.
        self.policy.version += 1
        if state := checkpoint.get("state_dict", {}):
            refuse_other_model(state, self.state_dict(), self.trainer.ckpt_path, self.policy.path)
            refuse_other_base(checkpoint, self.policy.base, self.trainer.ckpt_path, self.policy.path)
            fit_snapshots(state, {"reference": self.reference, "old_policy": self.old_policy})
        if self.trainer.state.fn == TrainerFn.FITTING:
            # Lightning would load a schedule's state into whatever schedule there is now.
            self._saved_schedules, checkpoint["lr_schedulers"] = checkpoint.get("lr_schedulers", []), []
            self._saved_version = checkpoint.get("policy_version")
        else:
            self._standing = checkpoint["epoch"]

    def training_step(self, minibatch: Minibatch, batch_idx: int) -> None:
        """One optimizer update: line 11 of DeepSeekMath's Algorithm 1. Nothing once a stop rule has ended them."""
        passes, started = minibatch.step.passes, time.perf_counter()
        if passes.ended:
            self._step_schedule(is_made=False)
            return
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        rate = optimizer.param_groups[0]["lr"]
        total, gap, mismatch = self._backward(minibatch)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.grad_clip or math.inf)
        # The one time that the update waits for a GPU: whatever is decided and logged is decided from copies.
        diagnostics, (grad_norm, logp_gap) = total.on_host(sharding.assembled(norm), gap)
        comparable = minibatch.on_policy and minibatch.step.exploration.sampler_is_policy and bool(logp_gap > -math.inf)
        if comparable:
            self._check_gap(float(logp_gap), mismatch)
        passes.record(diagnostics)
        if not diagnostics.tokens:
            # Of no rank is there a token to learn from: neither weights nor moments move.
            optimizer.zero_grad()
            self._step_schedule(is_made=False)
            return
        is_bad = not (passes.ended or bool(diagnostics.objective.isfinite() & grad_norm.isfinite()))
        if is_bad:
            self._skip(minibatch, diagnostics.objective, grad_norm)
        elif not passes.ended:
            self._step(optimizer)
            for pack in minibatch.packs:
                pack.updated = True
        self._step_schedule(is_made=not (is_bad or passes.ended))
        optimizer.zero_grad()

        metrics = diagnostics.metrics()
        if self.reference is None:
            del metrics["policy/kl_ref"]
        metrics["optim/grad_norm"] = grad_norm
        metrics["optim/lr"] = torch.tensor(rate)
        if mismatch is not None:
            metrics |= mismatch.metrics()
        if comparable:
            metrics["policy/logp_gap"] = logp_gap
        metrics["time/update"] = torch.tensor(time.perf_counter() - started)
        minibatch.step.updates.append((not (is_bad or passes.ended), metrics))

    def _step(self, optimizer: LightningOptimizer) -> None:
        """Makes the update, and counts it in the policy's version."""
        self.bad_updates_in_a_row.zero_()
        optimizer.step()
        self.policy.version += 1

    def _step_schedule(self, is_made: bool) -> None:
        """Steps the schedule after an update that is made; one over the whole run after any."""
        scheduler: Any = self.lr_schedulers()
        if scheduler is not None and (is_made or isinstance(scheduler, WarmupCosine)):
            scheduler.step()

    def _skip(self, minibatch: Minibatch, objective: Tensor, grad_norm: Tensor) -> None:
        """Counts an update that is not finite, and stops the run after too many."""
        self.bad_updates += 1
        self.bad_updates_in_a_row += 1
        if self.bad_updates_in_a_row >= self.max_bad_updates:
            raise FloatingPointError(
                f"{int(self.bad_updates_in_a_row)} updates in a row were not finite (objective {float(objective)}, "
                f"gradient norm {float(grad_norm)}); max_bad_updates={self.max_bad_updates}.\n  "
                + culprits(self.policy, minibatch)
            )

    def _backward(self, minibatch: Minibatch) -> tuple[Diagnostics, Tensor, Mismatch | None]:
        """Adds up the gradients of all packs; ranks sync on the last. What is returned is of all ranks.

        Returns:
            The diagnostics, the largest difference to the sampler's log-probs (-inf where it recorded none), and how
            far it is from the policy, where it may be.
        """
        parts: list[Diagnostics] = []
        mismatches: list[Mismatch] = []
        differs = self._sampler_differs(minibatch)
        gaps = [torch.full((), -math.inf, device=self.device)]
        for pack, scored, diagnostics in self._gradients(minibatch.packs):
            self.policy.free_masks(pack)
            pack.scored = scored.detached
            if pack.old_logp is None:
                # π_θ is π_old here: the passes to come compare with this one.
                pack.old_logp = scored.logp.detach()
            parts.append(diagnostics)
            if differs:
                logp = scored.logp.detach()
                mismatches.append(Mismatch.from_pack(pack, logp, self.objective.factor(pack.old_logp, pack)))
            if pack.sampler_logp is not None:
                gap = (scored.logp.detach() - pack.sampler_logp).abs().max()
                # No sampler drew the token of an idle pack, which has no weight.
                gaps.append(torch.where(pack.weight.any(), gap, gaps[0]))
        reduce = self.trainer.strategy.reduce
        mismatch = functools.reduce(operator.add, mismatches).reduce(reduce) if mismatches else None
        gap = reduce(torch.stack(gaps).max(), reduce_op="max")
        return functools.reduce(operator.add, parts).reduce(reduce), gap, mismatch

    def _gradients(self, packs: Sequence[Rollouts]) -> Iterator[tuple[Rollouts, TokenLogp, Diagnostics]]:
        """Adds the gradient of each pack to those of the parameters; what was found on the way."""

        def objective_of(pack: Rollouts) -> tuple[TokenLogp, Tensor, Diagnostics]:
            scored = self.policy(pack, self.objective.entropy_bonus > 0)
            return scored, *self.objective(scored.logp, scored.entropy, pack)

        def gradient_of(pack: Rollouts) -> tuple[TokenLogp, Diagnostics, Sequence[Tensor | None]]:
            scored, objective, diagnostics = objective_of(pack)
            return scored, diagnostics, torch.autograd.grad(-objective, trained, allow_unused=True)

        threads = self.policy.threads if self._is_alone else 1
        if threads == 1:
            for index, pack in enumerate(packs, start=1):
                with self._gradient_sync(index == len(packs)):
                    scored, objective, diagnostics = objective_of(pack)
                    # Ranks average their gradients, but J is a sum over all of them.
                    self.manual_backward(-objective * self.trainer.world_size)
                yield pack, scored, diagnostics
            return
        trained = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        for first in range(0, len(packs), threads):
            several = packs[first : first + threads]
            results = in_threads([partial(gradient_of, pack) for pack in several])
            # Added up in the order of the packs: the sum does not depend on which thread is first.
            for pack, (scored, diagnostics, gradients) in zip(several, results, strict=True):
                for parameter, gradient in zip(trained, gradients, strict=True):
                    if gradient is not None:
                        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
                yield pack, scored, diagnostics
            del results, gradients, gradient  # The next packs have gradients of their own.

    @property
    def _is_alone(self) -> bool:
        """Whether packs may be passed in threads: on a CPU, by one process, with nothing random in a pass."""
        return self.device.type == "cpu" and self.trainer.world_size == 1 and not self.policy.dropout

    def _sampler_differs(self, minibatch: Minibatch) -> bool:
        """Whether this is a step's first update, and its sampler may be another policy than π_θ: as all ranks see it.

        A filter makes it one on purpose; that is no mismatch.
        """
        if minibatch.step.passes.updates or not minibatch.step.exploration.sampler_is_policy:
            return False
        return self._may_differ(late=not minibatch.on_policy, dtype=self.explorer.engine.product_dtype(self.policy))

    def _may_differ(self, late: bool, dtype: torch.dtype) -> bool:
        rounds = dtype not in (torch.float32, torch.float64)
        return self.objective.correction.reads_sampler or late or rounds or not self.explorer.engine.shares_weights

    @contextmanager
    def _gradient_sync(self, sync: bool) -> Iterator[None]:
        """Ranks exchange gradients in this backward only if `sync`."""
        strategy = self.trainer.strategy
        if sync or not isinstance(strategy, ParallelStrategy):
            yield
        else:
            with strategy.block_backward_sync():
                yield

    def _check_gap(self, gap: float, mismatch: Mismatch | None) -> None:
        """Compares the log-probs of sampler and policy while both have the same weights.

        A single token beyond the tolerance warns. The more tokens there are, the further off is the worst of them.

        Args:
            gap: Largest difference of one token's, over all ranks.
            mismatch: Of all tokens and ranks; None with shared weights in float32.

        Raises:
            UsageError: If, with weights of the engine's own, the mean is beyond what rounding explains, or too many
                tokens are off by over 1 nat.
        """
        engine = self.explorer.engine
        tolerance = engine.logp_tolerance[engine.product_dtype(self.policy)]
        mean, far = (0.0, 0.0) if mismatch is None else mismatch.gaps()
        too_far = far > FAR_FRACTION and tolerance <= FAR
        differ = "the sampler's and the policy's log-probs of the same tokens differ by"
        when = "before the first update (expected: at most"
        which = "the engine does not draw from this policy. See policy/logp_gap"
        if not engine.shares_weights and (mean > MEAN_FRACTION * tolerance or too_far):
            causes = f". {engine.gap_causes}" if engine.gap_causes else ""
            raise UsageError(
                f"model.engine={type(engine).__name__}: {differ} {mean:.2g} nats on average, and {far:.1%} of them by "
                f"over 1 nat, {when} {MEAN_FRACTION * tolerance:.2g} and {FAR_FRACTION:.0%}): {which}, or use "
                f"model.engine=NativeEngine{causes}"
            )
        if gap > tolerance:
            rank_zero_warn(f"{differ} up to {gap:.2g} {when} {tolerance:g}): perhaps {which}")

    def on_validation_start(self) -> None:
        """Begins the metrics anew, and wakes the engine for all batches."""
        self.evaluation.reset()
        if self.trainer.state.fn != TrainerFn.FITTING:
            self._placed.enter_context(internals.standing(self.trainer, self._standing))
        self._awake.enter_context(self.explorer.awake())

    on_test_start = on_predict_start = on_validation_start

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """What the judge gives the greedy answer, and avg@k, pass@k and maj@k of k completions by `val_sampling`."""
        self._evaluate(batch, "val")

    def test_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """As `validation_step`, on the test prompts."""
        self._evaluate(batch, "test")

    def _evaluate(self, batch: PromptBatch, stage: str) -> None:
        self.evaluation.update(self.policy, batch)
        metrics: dict[str, Any] = {f"{stage}/{name}": metric for name, metric in self.evaluation.metrics.items()}
        self.log_dict(metrics, on_step=False, on_epoch=True, batch_size=len(batch.prompts))

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[dict[str, Any]]:
        """`val_samples` completions of each prompt with their scores and statuses, as one JSON-ready record each."""
        return self.evaluation.predict(self.policy, batch)

    def on_validation_epoch_end(self) -> None:
        """The engine gives its memory back; the run ends where too many samples got no score.

        Raises:
            RewardFailure: A reward, or the judge, failed on more than `max_failed_rewards` of the samples.
        """
        self._awake.close()
        if self.trainer.state.fn != TrainerFn.FITTING:
            rank_zero_info(f"avg@{self.val_samples} and greedy: {self.evaluation.measure}")
        self.evaluation.scorer.stop_if_broken("validation")

    on_test_epoch_end = on_validation_epoch_end

    def on_predict_epoch_end(self) -> None:
        """Reports what got no score; the engine gives its memory back."""
        self._awake.close()
        self.evaluation.scorer.report()

    def on_validation_end(self) -> None:
        """Puts the trainer back to where it was, once the metrics are logged."""
        self._placed.close()

    on_test_end = on_predict_end = on_validation_end

    def teardown(self, stage: str) -> None:
        """Closes the engine, the rewards and the environment."""
        self._awake.close()
        self._placed.close()
        self.explorer.close()
        self.evaluation.scorer.close()
        host_memory.give_back()


def refuse_filtered_correction(objective: Objective, sampling: Sampling) -> None:
    """Raises UsageError for a correction of samplers that leave tokens out on purpose."""
    if objective.correction.reads_sampler and not sampling.unfiltered:
        raise UsageError(
            f"model.objective.correction={type(objective.correction).__name__}: set model.sampling.top_k=0, top_p=1 "
            "and min_p=0; a filter changes the recorded log-probs, and the factors would undo it"
        )
