"""The LightningModule: policy, reference and old policy, and the one optimizer update that everything leads to."""

import functools
import math
import operator
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torchmetrics import MeanMetric

from grpo_lightning import sharding
from grpo_lightning.advantages import AdvantageEstimator, GroupStd
from grpo_lightning.data import PromptBatch
from grpo_lightning.diagnostics import Diagnostics
from grpo_lightning.engines import NativeEngine, RolloutEngine, Sampling
from grpo_lightning.explorer import Explorer
from grpo_lightning.kl import RewardKL
from grpo_lightning.metrics import RIGHT, majority_at_k, nan_mean, pass_at_k
from grpo_lightning.minibatch import Minibatch
from grpo_lightning.objective import Objective
from grpo_lightning.policy import Policy
from grpo_lightning.ragged import segments
from grpo_lightning.rewards.base import Reward
from grpo_lightning.rewards.scorer import Scorer, Scores
from grpo_lightning.snapshots import FrozenCopy, PolicySnapshot, RecordedLogp
from grpo_lightning.types import Prompt, Sample, UsageError

EVALUATION = 2**32 - 1
"""The random numbers' step in validation: the same at every validation, so that two differ by the policy alone."""

LOGP_TOLERANCE = 1e-3
"""Largest difference between the sampler's and the policy's log-probs of one token that float32 explains."""


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
        max_failed_rewards: Largest share of a step's samples that a reward may fail on before the run stops.
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
        reward_kl: RewardKL | None = None,
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
        k = val_samples
        names = ["pass@1", f"avg@{k}", f"pass@{k}", "reward", "length", "truncated"]
        names += [f"maj@{k}"] if rewards[0].finds_answers else []
        self.val_metrics = torch.nn.ModuleDict({name: MeanMetric(nan_strategy="ignore") for name in names})

    def setup(self, stage: str) -> None:
        self.explorer.scorer.setup(self.trainer.strategy.root_device)

    def configure_model(self) -> None:
        """Reads the weights; the reference starts as the initial policy. A strategy with a device mesh shards them."""
        mesh = None if self.device_mesh is None else sharding.data_mesh(self.device_mesh)
        self.policy.load()
        for snapshot in (self.old_policy, self.reference):
            if snapshot is not None:
                snapshot.refresh(self.policy)
        if mesh is not None:
            for policy in [module for module in self.modules() if isinstance(module, Policy)]:
                policy.shard(mesh)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self.optimizer([p for p in self.policy.parameters() if p.requires_grad])
        if self.lr_scheduler is None:
            return {"optimizer": optimizer}
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.lr_scheduler(optimizer), "interval": "step"},
        }

    def on_fit_start(self) -> None:
        # from_pretrained leaves the model in eval mode, and gradient checkpointing needs training mode.
        self.policy.train()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what rewards have learned."""
        checkpoint["rewards"] = self.explorer.scorer.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Lets a checkpoint be read with another `beta`, and evaluated in its run's own TensorBoard folder."""
        self.explorer.scorer.load_state_dict(checkpoint.get("rewards", {}))
        # Lightning's own strategy for sharded weights has read them by now.
        state, own = checkpoint.get("state_dict", {}), self.state_dict()
        reference = [name for name in {**state, **own} if name.startswith("reference.")]
        for name in reference:
            if name not in own:
                del state[name]
            elif name not in state:
                state[name] = own[name]
        if self.trainer.state.fn != TrainerFn.FITTING:
            # What validation logs belongs to the update the checkpoint was saved at, not to the start.
            done = checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"]
            self.trainer.fit_loop.epoch_loop._batches_that_stepped = done

    def training_step(self, minibatch: Minibatch, batch_idx: int) -> None:
        """One optimizer update: line 11 of DeepSeekMath's Algorithm 1. Nothing once a stop rule has ended them."""
        if minibatch.passes.ended_by is not None:
            self._log_nothing()
            return
        started = time.perf_counter()
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        rate = optimizer.param_groups[0]["lr"]
        diagnostics, logp_gap = self._backward(minibatch)
        grad_norm = sharding.assembled(
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.grad_clip or math.inf)
        )
        if minibatch.passes.ends_at(diagnostics):
            pass
        elif bool(diagnostics.objective.isfinite() & grad_norm.isfinite()):
            self.bad_updates_in_a_row.zero_()
            optimizer.step()
            scheduler = self.lr_schedulers()
            if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
                scheduler.step()
        else:
            self.bad_updates += 1
            self.bad_updates_in_a_row += 1
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
            "optim/lr": rate,
            "optim/bad_updates": self.bad_updates.float(),
        }
        if self.reference is not None:
            metrics["policy/kl_ref"] = diagnostics.kl_ref / tokens
        if minibatch.on_policy and logp_gap is not None:
            self.log("policy/logp_gap", self._check_gap(logp_gap), on_step=False, on_epoch=True, batch_size=1)
        metrics["time/update"] = time.perf_counter() - started
        self.log_dict(metrics)

    def _backward(self, minibatch: Minibatch) -> tuple[Diagnostics, Tensor | None]:
        """Adds up the gradients of all packs; ranks sync on the last. What is returned is of all ranks."""
        parts: list[Diagnostics] = []
        gaps: list[Tensor] = []
        for number, pack in enumerate(minibatch.packs, start=1):
            with self._gradient_sync(number == len(minibatch.packs)):
                scored = self.policy(pack, self.sampling.temperature, self.objective.entropy_bonus > 0)
                objective, diagnostics = self.objective(scored.logp, scored.entropy, pack)
                # Ranks average their gradients, but J is a sum over all of them.
                self.manual_backward(-objective * self.trainer.world_size)
            parts.append(diagnostics)
            if pack.sampler_logp is not None:
                gaps.append((scored.logp.detach() - pack.sampler_logp).abs().max())
        reduce = self.trainer.strategy.reduce
        gap = reduce(torch.stack(gaps).max(), reduce_op="max") if gaps else None
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

    def _check_gap(self, gap: Tensor) -> Tensor:
        """The first pass finds the policy unchanged, so its log-probs should be those of the sampler."""
        if gap > LOGP_TOLERANCE:
            rank_zero_warn(
                f"the sampler's and the policy's log-probs of the same tokens differ by up to {gap:.2g} before the "
                f"first update (expected: at most {LOGP_TOLERANCE:g}); the ratio does not start at 1. "
                "See policy/logp_gap"
            )
        return gap

    @torch.no_grad()
    def _explain(self, minibatch: Minibatch, objective: Tensor, grad_norm: Tensor) -> str:
        """Which tokens and rewards make the loss or the gradient infinite or NaN."""
        culprits = []
        for pack in minibatch.packs:
            logp = self.policy(pack, self.sampling.temperature).logp
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
                "pass@1": float(greedy_scores.main.value[number] > RIGHT),
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
        rows = []
        for row in range(batch.num_real * self.val_samples):
            sample, parts = samples[row], scores.describe(row)
            rows.append(
                {
                    "source": sample.prompt.question.source,
                    "question": sample.prompt.question.text,
                    "answer": sample.answer,
                    "completion": sample.text,
                    "finish_reason": str(sample.finish_reason),
                    "reward": none_if_nan(scores.total[row]),
                    "scores": {name: none_if_nan(value) for name, (value, _) in parts.items()},
                    "statuses": {name: status for name, (_, status) in parts.items()},
                }
            )
        return rows

    def teardown(self, stage: str) -> None:
        self.explorer.engine.close()
        self.explorer.scorer.close()


def none_if_nan(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value
