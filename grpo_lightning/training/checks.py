"""Checks that the trainer, the module and the loop of a run go together."""

import re
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from grpo_lightning import disk
from grpo_lightning.engines.recorded import check_late
from grpo_lightning.grpo.loop import GRPOLoop
from grpo_lightning.maths.kl import K3
from grpo_lightning.maths.objective import Objective
from grpo_lightning.maths.stopping import FixedPasses
from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.snapshots import AdapterOff, FrozenCopy, MovingAverage, PolicySnapshot
from grpo_lightning.rewards.reward import Reward
from grpo_lightning.training import internals
from grpo_lightning.training.schedules import check_optimizer
from grpo_lightning.types import TOTAL, UsageError

PASSES = "loop.mu and loop.num_minibatches set the updates of a step, trainer.max_epochs the steps"

REPLACED_BY: dict[str, tuple[Any, str]] = {
    "gradient_clip_val": (None, "model.guard.grad_clip"),
    "gradient_clip_algorithm": (None, "model.guard.grad_clip (a norm)"),
    "accumulate_grad_batches": (1, "loop.max_tokens; it sets the memory of a forward and never changes the gradient"),
    "max_steps": (-1, "trainer.max_epochs, exploration steps: max_steps / (loop.mu x loop.num_minibatches)"),
    "overfit_batches": (0, "few questions in data.task, for as many steps as it takes"),
    "limit_train_batches": (1.0, f"trainer.max_epochs for fewer steps; {PASSES}"),
    "reload_dataloaders_every_n_epochs": (0, "nothing: every step samples anew"),
    "barebones": (False, "trainer.logger=false and trainer.enable_checkpointing=false; it would log no metric either"),
}
"""Trainer options that conflict with manual optimisation or exact resuming: their default, and what to use instead."""

REFUSED_CALLBACKS = {
    "BackboneFinetuning": "it needs a model in two parts. Use model.policy.adapter to train few weights",
    "BaseFinetuning": "it freezes nothing by itself. Derive a class from it, or use model.policy.adapter",
    "BatchSizeFinder": "loop.prompts_per_step and loop.group_size decide the result; loop.max_tokens sets the memory",
    "GradientAccumulationScheduler": "use loop.max_tokens; it sets the memory of a forward, never the gradient",
    "LearningRateFinder": "it makes updates without rollouts. Give model.optimizer.lr, and model.lr_scheduler",
    "ModelPruning": "it changes weights outside of updates. Prune the model first, and give its folder as "
    "model.policy.path",
    "OnExceptionCheckpoint": "the next run would go on from its file, unasked, perhaps from the middle of a step. "
    "last.ckpt has the last whole step; go on from it with ckpt_path=last",
    "SpikeDetection": "an update returns no loss. Use model.guard.max_bad_updates and model.guard.grad_clip",
    "StochasticWeightAveraging": "its average reaches neither policy nor checkpoints, and it sets the learning rate to "
    "swa_lrs. Use EMAWeightAveraging",
    "ThroughputMonitor": "a step samples before it trains. The run logs perf/tokens_per_second itself",
}
"""Lightning's callbacks that have no effect here, or do harm, with the reason and what to use instead. Others work."""

REFUSED_STRATEGIES = {
    r"^fsdp(?!2)\w*|\bFSDPStrategy\b": "FSDP1 lays the weights of a layer into one flat tensor, which cannot be "
    "clipped by a norm or saved for other strategies here. Use trainer.strategy=fsdp2, which shards the same",
    r"^deepspeed\w*|\bDeepSpeedStrategy\b": "DeepSpeed makes the updates itself, and they are made here. Use "
    "trainer.strategy=fsdp2, which shards weights, gradients and optimizer state",
    r"^(single_)?(xla|tpu)\w*|\b\w*XLAStrategy\b": "TPUs are not supported. Use trainer.strategy=auto",
    r"^ddp_(fork|spawn|notebook)\w*|\b(fork|forkserver|spawn)\b": "the trained weights would stay in processes "
    "that end with the fit. Use trainer.strategy=ddp in a script; in a notebook use trainer.devices=1",
}
"""Patterns of names, classes and start methods of strategies that fail, with the reason and what to use instead."""

BETTER = {
    "max": r"reward/mean|val/([\w-]+/)?(reward|greedy|\w+@\d+)|rollout/right_and_finished",
    "min": r"val/([\w-]+/)?(truncated|failed|ci95)",
}
"""Patterns of metrics whose best value is the largest (`max`) or the smallest (`min`)."""


def check_precision(precision: str | int | None) -> None:
    """Raises UsageError for a precision that GRPO does not work in."""
    if precision in ("32-true", "bf16-mixed", "16-mixed", "64-true", 16, 32, 64, "16", "32", "64", "bf16", None):
        return
    reason = "float16 rounds small updates away" if "16" in str(precision) else "it is not tested"
    if precision == "bf16-true":
        reason = (
            "it rounds the rotary frequencies, so that log-probs go wrong with the position. For bfloat16 weights set "
            "model.policy.dtype=bfloat16 and trainer.precision=32-true"
        )
    raise UsageError(
        f"trainer.precision={precision}: {reason}. Use bf16-mixed or 16-mixed (float32 weights, arithmetic in 16 "
        "bits), or 32-true"
    )


def check_strategy(strategy: Any) -> None:
    """Raises UsageError for a strategy that fails: a name, a class with its arguments, or the strategy itself."""
    kinds = [kind.__name__ for kind in type(strategy).__mro__]
    for pattern, reason in REFUSED_STRATEGIES.items():
        if match := re.search(pattern, f"{strategy} {kinds} {internals.start_method(strategy)}"):
            raise UsageError(f"trainer.strategy={match[0]}: {reason}")


def check_options(trainer: Any) -> None:
    """Raises UsageError for options that conflict with exploration steps, of a trainer or of its configuration."""
    for name, (default, instead) in REPLACED_BY.items():
        value = getattr(trainer, name)
        if value not in (None, default):
            raise UsageError(f"trainer.{name}={value}: use {instead}")
    if trainer.check_val_every_n_epoch == 0:
        raise UsageError("trainer.check_val_every_n_epoch=0: give 1 or more; for none, trainer.limit_val_batches=0")
    check_precision(trainer.precision)
    check_strategy(trainer.strategy)


def check_half(precision: str | int | None, accelerator: Any) -> None:
    """Raises UsageError for float16 on a CPU, where Lightning would compute in bfloat16."""
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.accelerator.is_available())
    if on_cpu and str(precision) in ("16", "16-mixed"):
        raise UsageError(
            f"trainer.precision={precision}: Lightning takes bfloat16 in its place on a CPU. Use bf16-mixed. To try "
            "float16 there: --trainer.plugins MixedPrecision --trainer.plugins.precision 16-mixed "
            "--trainer.plugins.device cpu"
        )


def warn_of_lost_updates(policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Warns if bfloat16 weights lose most updates to rounding, or the learning rate is small for an adapter."""
    # Adafactor chooses the rate itself: it is None.
    rate = max(group["lr"] or 0.0 for group in optimizer.param_groups)
    if rate > 0 and any(weight.dtype == torch.bfloat16 for weight in policy.parameters() if weight.requires_grad):
        rank_zero_warn(
            f"model.policy.dtype=bfloat16: a weight keeps 8 bits, so an update of lr={rate:g} is rounded away wherever "
            f"|weight| > {256 * rate:.2g}. For float32 weights with bfloat16 arithmetic set policy.dtype=float32 and "
            "trainer.precision=bf16-mixed"
        )
    rate = max(float(group.get("initial_lr", group["lr"]) or 0) for group in optimizer.param_groups)
    if policy.adapter is not None and 0 < rate < 1e-5:
        rank_zero_warn(
            f"model.optimizer.lr={rate:g} is one for training all weights: with model.policy.adapter little would be "
            "learned. Give about ten times as much, between 1e-5 and 3e-4"
        )


def check_module(module: Any, old_policy: PolicySnapshot | None, reference: PolicySnapshot | None) -> None:
    """Raises UsageError if the arguments of a `GRPOModule` do not go together."""
    policy: Policy = module.policy
    objective: Objective = module.objective
    if module.sampling.greedy:
        raise UsageError("sampling.temperature=0: training needs completions that differ; give more than 0")
    if objective.correction.reads_sampler and not module.sampling.unfiltered:
        raise UsageError(
            f"model.objective.correction={type(objective.correction).__name__}: set model.sampling.top_k=0, top_p=1 "
            "and min_p=0; a filter changes the recorded log-probs, and the factors would undo it"
        )
    default_reference = FrozenCopy if policy.adapter is None else AdapterOff
    if module.reference is None and type(reference) not in (default_reference, type(None)):
        raise UsageError(
            f"model.reference={type(reference).__name__}: nothing reads it with model.objective.beta=0 and no "
            "model.objective.reward_kl. Give a beta above 0, such as 0.04, or model.reference=null"
        )
    if objective.beta == 0 and type(objective.kl) is not K3:
        raise UsageError(
            f"model.objective.kl={type(objective.kl).__name__}: it has no effect with model.objective.beta=0. "
            "Give a beta above 0, such as 0.04, or kl=K3, which is the default"
        )
    if objective.denominator == "has_advantage" and (objective.reward_kl is not None or module.advantage.reads):
        raise UsageError(
            "model.objective.denominator=has_advantage: it must know the advantages before any log-prob, which "
            "model.objective.reward_kl or model.advantage needs. Take kept"
        )
    if isinstance(reference, AdapterOff) and policy.adapter is None:
        raise UsageError(
            "model.reference=AdapterOff: it is the model without its adapter. Use FrozenCopy, or set "
            "model.policy.adapter"
        )
    if isinstance(old_policy, AdapterOff):
        raise UsageError("model.old_policy=AdapterOff: it is the model without its adapter. Use RecordedLogp")
    if old_policy is not None and old_policy.stays:
        raise UsageError(f"model.old_policy={type(old_policy).__name__}: it is another model. Use model.reference")


def check_loop(loop: GRPOLoop, module: Any) -> None:
    """Raises UsageError if loop and module do not go together."""
    if loop.group_size < 2 and module.advantage.compares_group:
        raise UsageError(
            f"loop.group_size={loop.group_size}: give 2 or more; {type(module.advantage).__name__} compares the "
            "completions of one prompt"
        )
    if loop.steps_per_iteration and module.reference and module.reference.stays:
        raise UsageError(
            f"loop.steps_per_iteration={loop.steps_per_iteration}: {type(module.reference).__name__} stays as it is. "
            "Set model.reference=FrozenCopy, or loop.steps_per_iteration=null"
        )
    if not loop.steps_per_iteration and isinstance(module.reference, MovingAverage):
        raise UsageError(
            "model.reference=MovingAverage: it moves every loop.steps_per_iteration steps, and that is null. Give "
            "1 or more, such as loop.steps_per_iteration=1, or set model.reference=FrozenCopy, which never moves"
        )
    rewards = module.explorer.scorer.rewards
    learns = any(type(nested).learn is not Reward.learn for reward in rewards for nested in reward.with_parts())
    if loop.steps_per_iteration and module.reference is None and not learns:
        raise UsageError(
            f"loop.steps_per_iteration={loop.steps_per_iteration}: there is no reference to refresh with "
            "model.objective.beta=0, and no reward that learns. Give a beta above 0, such as 0.04, or "
            "loop.steps_per_iteration=null"
        )
    if not isinstance(loop.stop, FixedPasses) and loop.updates_per_step == 1:
        raise UsageError(
            f"loop.stop={type(loop.stop).__name__}: it is asked from the second update of a step on, and loop.mu=1 "
            "with loop.num_minibatches=1 makes one. Give a larger loop.mu, or loop.stop=FixedPasses"
        )
    names = [reward.name for reward in rewards]
    if loop.dynamic_sampling and loop.dynamic_sampling.filter.reward not in (None, TOTAL, *names):
        raise UsageError(
            f"loop.dynamic_sampling.filter.reward={loop.dynamic_sampling.filter.reward}: give one of "
            f"{', '.join(names)}, or `{TOTAL}` for their weighted sum"
        )
    if loop.source.is_late:
        check_late(module.old_policy, module.objective.correction, module.sampling)


def check_run(module: Any, trainer: Any, message_of: Callable[[Exception], str] = str) -> None:
    """Raises UsageError for a fit that would fail, before anything is written.

    `message_of` turns an exception of the optimizer into a message.
    """
    loop = GRPOLoop.find(trainer)
    check_loop(loop, module)
    check_trainer(loop, trainer)
    num_updates = loop.updates_per_step * trainer.max_epochs if internals.has_end(trainer.max_epochs) else None
    check_optimizer(module, num_updates, trainer.strategy.root_device, message_of)


def check_trainer(loop: GRPOLoop, trainer: Any) -> None:
    """Raises UsageError for a trainer that would cut passes short, or a callback that does not work with steps."""
    limit = trainer.limit_train_batches
    interval = trainer.val_check_interval
    num_updates = loop.updates_per_step
    if not disk.is_trial(trainer):
        check_options(trainer)
        # An integer is a number of updates.
        if isinstance(limit, int):
            raise UsageError(f"trainer.limit_train_batches={limit}: it would cut the passes short; {PASSES}")
    if isinstance(interval, int) and interval > num_updates and trainer.check_val_every_n_epoch:
        raise UsageError(
            f"trainer.val_check_interval={interval}: it counts updates, and a step has {num_updates} (loop.mu x "
            f"loop.num_minibatches). To validate every {interval} steps set trainer.check_val_every_n_epoch={interval}"
        )
    for callback in trainer.callbacks:
        name = type(callback).__name__
        mro = type(callback).__mro__
        kind = next((base.__name__ for base in mro if base.__module__.startswith("lightning.")), "")
        # Classes derived from BaseFinetuning choose themselves what to freeze.
        if kind in REFUSED_CALLBACKS and (kind != "BaseFinetuning" or kind == name):
            # OnExceptionCheckpoint would save a checkpoint now.
            trainer.callbacks.remove(callback)
            raise UsageError(f"trainer.callbacks={name}: {REFUSED_CALLBACKS[kind]}")
        saves_run = isinstance(callback, ModelCheckpoint) and not callback.save_weights_only
        if saves_run and internals.saves_in_steps(callback):
            raise UsageError(
                "ModelCheckpoint.every_n_train_steps, train_time_interval: they save in the middle of a step, from "
                "where no run goes on. Give every_n_epochs (exploration steps), or save_weights_only=true"
            )
        monitor, mode = (str(getattr(callback, setting, "")) for setting in ("monitor", "mode"))
        key = name.replace("StepCheckpoint", "checkpoint")
        if monitor.startswith("val/") and trainer.limit_val_batches == 0:
            raise UsageError(f"{key}.monitor={monitor}: the run has no validation (trainer.limit_val_batches=0)")
        for best, metrics in BETTER.items():
            if re.fullmatch(metrics, monitor) and mode not in ("", best):
                size = "larger" if best == "max" else "smaller"
                raise UsageError(f"{key}.mode={mode}: {monitor} is better the {size} it is. Give {key}.mode={best}")
    if loop.prompts_per_step % (loop.num_minibatches * trainer.world_size):
        raise UsageError(
            f"loop.prompts_per_step={loop.prompts_per_step} is not a multiple of loop.num_minibatches="
            f"{loop.num_minibatches} x {trainer.world_size} ranks: every rank takes as many prompts of every update"
        )


def check_limit(trainer: Any, data: Any, stage: str) -> None:
    """Raises UsageError if a fraction of the batches of a validation, test or prediction leaves no batch."""
    # Lightning's `stage` is an enum that equals its name, but prints otherwise.
    split = next((name for name in ("test", "predict") if stage == name), "val")
    limit = getattr(trainer, f"limit_{split}_batches")
    for loader in getattr(data, f"{split}_dataloader")() if isinstance(limit, float) and limit else ():
        if limit * len(loader) < 1:
            raise UsageError(
                f"trainer.limit_{split}_batches={limit}: it leaves none of {len(loader)} batches. Lower "
                f"data.val_batch_size={data.val_batch_size}, or take fewer questions with data.val_limit"
            )
