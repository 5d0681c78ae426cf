"""The LightningModule: policy, reference and old policy, and the one optimizer update that everything leads to."""

import functools
import math
import operator
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torchmetrics import MeanMetric

from grpo_lightning.engines.base import RolloutEngine
from grpo_lightning.engines.native import NativeEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.trial import compute_dtype
from grpo_lightning.maths.advantages import AdvantageEstimator, GroupStd
from grpo_lightning.maths.diagnostics import Diagnostics
from grpo_lightning.maths.kl_penalty import KLPenalty
from grpo_lightning.maths.metrics import RIGHT_ABOVE, majority_at_k, nan_mean, pass_at_k
from grpo_lightning.maths.objective import Objective
from grpo_lightning.maths.ragged import segments
from grpo_lightning.policy import sharding
from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.snapshots import FrozenCopy, PolicySnapshot, RecordedLogp
from grpo_lightning.rewards.base import Reward, Run
from grpo_lightning.rewards.scorer import Scorer, Scores
from grpo_lightning.training.data import PromptBatch
from grpo_lightning.training.explorer import Explorer
from grpo_lightning.training.minibatch import Minibatch
from grpo_lightning.training.optimizer_options import OptimizerOptions
from grpo_lightning.training.precision import check_precision, warn_of_rounded_updates
from grpo_lightning.training.records import record
from grpo_lightning.types import Prompt, Sample, UsageError

EVALUATION = 2**32 - 1
"""The random numbers' step in validation: the same at every validation, so that two differ by the policy alone."""


class GRPOModule(L.LightningModule):
    """GRPO's policy, its reference and its old policy; maximises the objective over minibatches of rollouts.

    Args:
        policy: π_θ, the causal LM that is trained.
        rewards: The terms of R(q, o), summed by their weights. The first decides what is right in validation.
        engine: Draws the completions.
        sampling: The distribution completions are drawn from.
        advantage: Â from the rewards of a group.
        objective: The surrogate, the KL term and how tokens are averaged.
        reward_kl: A KL penalty in the reward, beside or in the place of the objective's.
        old_policy: π_old, the denominator of the ratio.
        reference: π_ref of the KL terms; it exists only where `objective.beta` is above 0 or there is a `reward_kl`.
        optimizer: The optimizer, given the parameters.
        lr_scheduler: The learning-rate schedule, stepped once an optimizer update. None keeps the rate.
        grad_clip: Largest norm of the gradient; 0 does not clip.
        max_bad_updates: Updates in a row that may be skipped for a loss or gradient that is not finite.
        max_failed_rewards: Largest fraction of a step's samples, over all ranks, that a reward may fail on before the
            run stops.
        val_samples: k of avg@k, pass@k and maj@k.
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
        val_samples: int = 8,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy = policy
        self._loaded = False
        self.sampling = sampling or Sampling()
        if self.sampling.greedy:
            raise UsageError("sampling.temperature=0: training needs completions that differ; give more than 0")
        self.objective = objective or Objective()
        self.explorer = Explorer(engine or NativeEngine(), Scorer(rewards, max_failed_rewards))
        self.advantage = advantage or GroupStd()
        self.reward_kl = reward_kl
        self.old_policy = old_policy or RecordedLogp()
        needs_reference = self.objective.beta > 0 or reward_kl is not None
        self.reference = (reference or FrozenCopy()) if needs_reference else None
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        if grad_clip < 0:
            raise UsageError(f"model.grad_clip={grad_clip}: give 0 (no clipping) or more")
        if max_bad_updates < 1:
            raise UsageError(f"model.max_bad_updates={max_bad_updates}: give 1 or more")
        if val_samples < 1:
            raise UsageError(f"model.val_samples={val_samples}: give 1 or more")
        self.grad_clip = grad_clip
        self.max_bad_updates = max_bad_updates
        self.val_samples = val_samples
        self.bad_updates: Tensor
        self.bad_updates_in_a_row: Tensor
        self.register_buffer("bad_updates", torch.tensor(0))
        self.register_buffer("bad_updates_in_a_row", torch.tensor(0))
        self._options: OptimizerOptions | None = None
        self._saved_schedules: list[dict[str, Any]] = []
        k = val_samples
        names = ["pass@1", f"avg@{k}", f"pass@{k}", "reward", "length", "truncated"]
        names += [f"maj@{k}"] if rewards[0].finds_answers else []
        self.val_metrics = torch.nn.ModuleDict({name: MeanMetric(nan_strategy="ignore") for name in names})

    def setup(self, stage: str) -> None:
        check_precision(self.trainer.precision)
        trainer, tokenizer = self.trainer, self.policy.tokenizer
        run = Run(trainer.strategy.root_device, tokenizer, self.sampling.max_new_tokens, trainer.global_rank)
        self.explorer.scorer.setup(run)

    def load(self, precision: Precision) -> None:
        """Reads the weights and makes sure that the engine can decode them; the second call does nothing."""
        if self._loaded:
            return
        self.policy.load()
        # What autocast computes is what is checked; the true half precisions convert the weights later.
        autocast = precision.forward_context() if isinstance(precision, MixedPrecision) else nullcontext()
        # As in training: Lightning loads where every new tensor is made on the GPU.
        with autocast, torch.device("cpu"):
            self.explorer.engine.check(self.policy, self.sampling)
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
            for policy in [module for module in self.modules() if isinstance(module, Policy)]:
                policy.shard(mesh)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self.optimizer([p for p in self.policy.parameters() if p.requires_grad])
        self._options = OptimizerOptions(optimizer, self.lr_scheduler)
        if self._options.scheduler is None:
            return {"optimizer": optimizer}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self._options.scheduler, "interval": "step"}}

    def on_fit_start(self) -> None:
        # from_pretrained leaves the model in eval mode, and gradient checkpointing needs training mode.
        self.policy.train()
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        warn_of_rounded_updates(self.policy, optimizer.optimizer)

    def on_train_start(self) -> None:
        # The optimizer has its state back by now, under any strategy.
        assert self._options is not None
        self._options.restore_schedule(self._saved_schedules, self.trainer.global_step)
        self._saved_schedules = []

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Weights of policy and reference; those of π_old only where the next step does not make it anew."""
        state = super().state_dict(*args, **kwargs)
        if self.old_policy.is_policy:
            prefix = kwargs.get("prefix", "")
            for name in [name for name in state if name.startswith(f"{prefix}old_policy.")]:
                del state[name]
        return state

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what rewards have learned."""
        checkpoint["rewards"] = self.explorer.scorer.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Lets a checkpoint be read with another `beta`, `reference`, `old_policy` or schedule, but no other model.

        A reference that is not in it starts as the model in `policy.path`, π_old as the policy.
        """
        self.explorer.scorer.load_state_dict(checkpoint.get("rewards", {}))
        # Lightning's own strategy for sharded weights has read them by now, layer by layer: the policy did not notice.
        self.policy.version += 1
        if state := checkpoint.get("state_dict", {}):
            self._refuse_other_model(state)
            self._fit_snapshots(state)
        if self.trainer.state.fn == TrainerFn.FITTING:
            # Lightning would load a schedule's state into whatever schedule there is now.
            self._saved_schedules, checkpoint["lr_schedulers"] = checkpoint.get("lr_schedulers", []), []
        else:
            # What validation logs belongs where the run's own validation of these weights stood: at the last update.
            done = checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"]
            self.trainer.fit_loop.epoch_loop._batches_that_stepped = max(0, done - 1)
            self.trainer.fit_loop.epoch_progress.current.completed = checkpoint["epoch"]

    def _refuse_other_model(self, state: dict[str, Any]) -> None:
        saved = {name: tuple(value.shape) for name, value in state.items() if name.startswith("policy.")}
        own = {name: tuple(value.shape) for name, value in self.state_dict().items() if name.startswith("policy.")}
        differ = [name for name in own | saved if own.get(name) != saved.get(name)]
        if differ:
            here, there = (
                str(list(shapes[differ[0]])) if differ[0] in shapes else "missing" for shapes in (own, saved)
            )
            raise UsageError(
                f"ckpt_path={self.trainer.ckpt_path}: it is of another model than policy.path={self.policy.path}: "
                f"{differ[0].removeprefix('policy.model.')} is {there} in the checkpoint and {here} in the model "
                f"({len(differ)} of {len(own | saved)} weights differ)"
            )

    def _fit_snapshots(self, state: dict[str, Any]) -> None:
        """Makes the reference and π_old in a checkpoint those that there are now."""
        for part, snapshot in (("reference", self.reference), ("old_policy", self.old_policy)):
            own = {} if snapshot is None else snapshot.state_dict(prefix=f"{part}.")
            for name in [name for name in state if name.startswith(f"{part}.") and name not in own]:
                del state[name]
            for name in own.keys() - state.keys():
                of_policy = state.get(name.removeprefix(f"{part}."))
                state[name] = own[name] if part == "reference" or of_policy is None else of_policy

    def training_step(self, minibatch: Minibatch, batch_idx: int) -> None:
        """One optimizer update: line 11 of DeepSeekMath's Algorithm 1. Nothing once a stop rule has ended them."""
        if minibatch.passes.ended_by is not None:
            self._log_nothing()
            return
        started = time.perf_counter()
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        rate = optimizer.param_groups[0]["lr"]
        total, gap = self._backward(minibatch)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.grad_clip or math.inf)
        # The one time that the update waits for a GPU: whatever is decided and logged is decided from copies.
        diagnostics, (grad_norm, logp_gap, bad_updates) = total.on_host(sharding.assembled(norm), gap, self.bad_updates)
        comparable = minibatch.on_policy and minibatch.exploration.sampler_is_policy and not logp_gap.isnan()
        if comparable:
            self._check_gap(float(logp_gap))
        if minibatch.passes.ends_at(diagnostics):
            pass
        elif bool(diagnostics.objective.isfinite() & grad_norm.isfinite()):
            self.bad_updates_in_a_row.zero_()
            optimizer.step()
            self.policy.version += 1
            scheduler: Any = self.lr_schedulers()
            if scheduler is not None:
                scheduler.step()
        else:
            self.bad_updates += 1
            self.bad_updates_in_a_row += 1
            bad_updates += 1
            if self.bad_updates_in_a_row >= self.max_bad_updates:
                raise FloatingPointError(self._explain(minibatch, diagnostics.objective, grad_norm))
        optimizer.zero_grad()

        tokens = diagnostics.tokens.clamp(min=1)
        metrics = {
            "policy/objective": diagnostics.objective,
            "policy/entropy": diagnostics.entropy / tokens,
            "policy/ratio_mean": diagnostics.ratio / tokens,
            "policy/ratio_max": diagnostics.ratio_max,
            "policy/kl_old": diagnostics.kl_old / tokens,
            "policy/clip_low": diagnostics.clipped_low / tokens,
            "policy/clip_high": diagnostics.clipped_high / tokens,
            "policy/unreachable": diagnostics.unreachable / tokens,
            "optim/grad_norm": grad_norm,
            "optim/lr": torch.tensor(rate),
            "optim/bad_updates": bad_updates,
        }
        if self.reference is not None:
            metrics["policy/kl_ref"] = diagnostics.kl_ref / tokens
        if comparable:
            self.log("policy/logp_gap", logp_gap, on_step=False, on_epoch=True, batch_size=1)
        metrics["time/update"] = torch.tensor(time.perf_counter() - started)
        # Lightning would put plain numbers on the GPU, to fetch them from there.
        self.log_dict(metrics)

    def _backward(self, minibatch: Minibatch) -> tuple[Diagnostics, Tensor]:
        """Adds up the gradients of all packs; ranks sync on the last. What is returned is of all ranks.

        Returns:
            The diagnostics, and the largest difference to the sampler's log-probs; NaN where it recorded none.
        """
        parts: list[Diagnostics] = []
        gaps: list[Tensor] = []
        for number, pack in enumerate(minibatch.packs, start=1):
            with self._gradient_sync(number == len(minibatch.packs)):
                scored = self.policy(pack, self.objective.entropy_bonus > 0)
                objective, diagnostics = self.objective(scored.logp, scored.entropy, pack)
                # Ranks average their gradients, but J is a sum over all of them.
                self.manual_backward(-objective * self.trainer.world_size)
            self.policy.free_masks(pack)
            if pack.old_logp is None:
                # π_θ is π_old here: the passes to come compare with this one.
                pack.old_logp = scored.logp.detach()
            parts.append(diagnostics)
            if pack.sampler_logp is not None:
                gaps.append((scored.logp.detach() - pack.sampler_logp).abs().max())
        reduce = self.trainer.strategy.reduce
        unknown = torch.full((), math.nan, device=self.device)
        gap = reduce(torch.stack(gaps).max(), reduce_op="max") if gaps else unknown
        return functools.reduce(operator.add, parts).reduce(reduce), gap

    def _log_nothing(self) -> None:
        """Keeps Lightning from logging the last update's numbers again for this one."""
        for metric in (self.trainer._results or {}).values():
            metric.has_reset |= metric.meta.on_step and not metric.meta.on_epoch

    @contextmanager
    def _gradient_sync(self, sync: bool) -> Iterator[None]:
        """Ranks exchange gradients in this backward only if `sync`."""
        strategy = self.trainer.strategy
        if sync or not isinstance(strategy, ParallelStrategy):
            yield
        else:
            with strategy.block_backward_sync():
                yield

    def _check_gap(self, gap: float) -> None:
        """Compares the log-probs of sampler and policy while both have the same weights.

        Args:
            gap: Largest difference of one token's, over all ranks.

        Raises:
            UsageError: If it is beyond the tolerance of an engine with weights of its own.
        """
        engine = self.explorer.engine
        tolerance = engine.logp_tolerance[compute_dtype(self.policy)]
        if gap <= tolerance:
            return
        found = (
            f"the sampler's and the policy's log-probs of the same tokens differ by up to {gap:.2g} before the "
            f"first update (expected: at most {tolerance:g}): the engine does not draw from this policy. "
            "See policy/logp_gap"
        )
        if not engine.shares_weights:
            raise UsageError(f"model.engine={type(engine).__name__}: {found}, or use model.engine=NativeEngine")
        rank_zero_warn(found)

    @torch.no_grad()
    def _explain(self, minibatch: Minibatch, objective: Tensor, grad_norm: Tensor) -> str:
        """Which tokens and rewards make the loss or the gradient infinite or NaN."""
        culprits = []
        for pack in minibatch.packs:
            logp = self.policy(pack).logp
            bad = ~(logp.isfinite() & pack.advantage.isfinite() & pack.weight.isfinite())
            rows = segments(pack.lengths)
            for token in bad.nonzero().flatten().tolist()[:1]:
                text = self.policy.tokenizer.decode([int(pack.token_ids[token])])
                culprits.append(
                    f"token {text!r} (logp {float(logp[token])}, advantage {float(pack.advantage[token])}) of "
                    + minibatch.exploration.describe(int(pack.row[rows[token]]))
                )
        where = "\n  ".join(culprits) or (
            "no single token has a log-prob or advantage that is not finite: the gradient overflowed; "
            "lower the learning rate or use precision 32-true. The minibatch's first row: "
            + minibatch.exploration.describe(int(minibatch.packs[0].row[0]))
        )
        return (
            f"{int(self.bad_updates_in_a_row)} updates in a row were not finite (objective {float(objective)}, "
            f"gradient norm {float(grad_norm)}); max_bad_updates={self.max_bad_updates}.\n  {where}"
        )

    def on_validation_start(self) -> None:
        # What `validate` left was made in inference mode, and `fit` could not add to it.
        for metric in self.val_metrics.values():
            assert isinstance(metric, MeanMetric)
            metric.reset()

    def on_test_start(self) -> None:
        self.on_validation_start()

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Greedy pass@1, and avg@k, pass@k and maj@k of k completions drawn as in training."""
        self._evaluate(batch, "val")

    def test_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """As `validation_step`, on the test prompts."""
        self._evaluate(batch, "test")

    def _evaluate(self, batch: PromptBatch, stage: str) -> None:
        k = self.val_samples
        _, greedy_scores = self._sample_and_score(batch.prompts, 1, replace(self.sampling, temperature=0.0))
        samples, scores = self._sample_and_score(batch.prompts, k, self.sampling)
        # A rank whose prompts only fill up still takes part in every metric, or the ranks would not sync alike.
        self._record(dict.fromkeys(self.val_metrics, math.nan))
        for number in range(batch.num_real):
            group = slice(number * k, (number + 1) * k)
            values = scores.main.value[group]
            found = {
                "pass@1": float(greedy_scores.main.value[number] > RIGHT_ABOVE),
                f"avg@{k}": nan_mean(values),
                f"pass@{k}": pass_at_k(values),
                "reward": nan_mean(scores.total[group]),
                "length": nan_mean([len(sample.token_ids) for sample in samples[group]]),
                "truncated": nan_mean([sample.truncated for sample in samples[group]]),
            }
            if f"maj@{k}" in self.val_metrics:
                answers = scores.main.answer or [None] * len(samples)
                found[f"maj@{k}"] = majority_at_k(values, answers[group])
            self._record(found)
        metrics: dict[str, Any] = {f"{stage}/{name}": metric for name, metric in self.val_metrics.items()}
        self.log_dict(metrics, on_step=False, on_epoch=True, batch_size=len(batch.prompts))

    def on_validation_epoch_end(self) -> None:
        """Reports the rewards' failures."""
        self.explorer.scorer.report()

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    def _record(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            metric = self.val_metrics[name]
            assert isinstance(metric, MeanMetric)
            metric.update(value)

    def _sample_and_score(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling
    ) -> tuple[list[Sample], Scores]:
        _, samples = self.explorer.sample(self.policy, prompts, group_size, sampling, seed=0, step=EVALUATION)
        return samples, self.explorer.scorer(samples)

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[dict[str, Any]]:
        """`val_samples` completions of each prompt with their scores and statuses, one JSON-ready row each."""
        samples, scores = self._sample_and_score(batch.prompts, self.val_samples, self.sampling)
        return [record(samples[row], scores, row) for row in range(batch.num_real * self.val_samples)]

    def teardown(self, stage: str) -> None:
        self.explorer.engine.close()
        self.explorer.scorer.close()
