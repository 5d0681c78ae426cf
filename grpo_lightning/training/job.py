"""A configuration as a `Job`: the numbers that decide its memory."""

import os
from dataclasses import replace
from pathlib import Path

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy

from grpo_lightning.engines.kv_memory import GIB, free_bytes
from grpo_lightning.engines.native import NativeEngine
from grpo_lightning.policy.shared_prefix import ATTENTION
from grpo_lightning.policy.snapshots import FrozenCopy
from grpo_lightning.training.data import PromptDataModule
from grpo_lightning.training.internals import attention_of
from grpo_lightning.training.loop import GRPOLoop
from grpo_lightning.training.memory import Job, Spread
from grpo_lightning.training.module import GRPOModule

TOUCHED_LATER = 24 * 2**20
"""Bytes of library code and buffers first used in the first step of a CPU run, measured on Linux with torch 2.13."""


def job_of(
    module: GRPOModule,
    loop: GRPOLoop,
    validation: PromptDataModule | None,
    precision: str,
    spread: Spread,
    device: str,
    prompt_tokens: int,
    process: int,
) -> Job:
    """The job of a module, a loop and the settings of a trainer.

    Args:
        module: The weights of its policy may be unread.
        loop: It has the sizes of a step.
        validation: The data, if there is validation.
        precision: Precision of the trainer.
        spread: That of the strategy.
        device: `cpu` or `cuda`.
        prompt_tokens: Longest prompt.
        process: Bytes of the process itself.
    """
    policy, engine = module.policy, module.explorer.engine
    full, attention = policy._full_attention, ATTENTION if policy.attention == "sdpa" else policy.attention
    is_loaded = hasattr(policy, "model")
    if is_loaded:
        attention = attention_of(policy.model)
    max_cache_gib = getattr(engine, "max_cache_gib", None)
    # Known once the weights are there; before that, what a model with these settings does.
    expected = policy.share_prefix and full and attention == ATTENTION
    shares = policy.shares_prefix if is_loaded else expected
    return Job(
        config=policy.config,
        optimizer=module.optimizer,
        sampling=module.sampling,
        val_sampling=module.val_sampling,
        group_size=loop.group_size,
        prompts_per_step=max(1, loop.prompts_per_step // spread.world_size),
        num_minibatches=loop.num_minibatches,
        max_tokens=loop.max_tokens,
        prompt_tokens=prompt_tokens,
        max_rows=getattr(engine, "max_rows", loop.prompts_per_step * loop.group_size),
        refills=False,
        validated_prompts=0 if validation is None else validation.val_batch_size,
        val_samples=module.val_samples,
        max_cache=None if max_cache_gib is None else max_cache_gib * GIB,
        bounds_cache=hasattr(engine, "max_cache_gib"),
        packs=isinstance(engine, NativeEngine) and engine.packed and device == "cpu",
        copied_dtype=engine.dtype if isinstance(engine, NativeEngine) else None,
        threads=policy.threads if device == "cpu" and spread.world_size == 1 and not policy.dropout else 1,
        dtype=policy.dtype,
        precision=precision,
        attention=attention,
        shares_prefix=shares,
        recomputes=policy.gradient_checkpointing,
        offloads=policy.offload_activations and device != "cpu",
        fused=policy.fused,
        dropout=policy.dropout,
        entropy_gradient=module.objective.entropy_bonus > 0,
        frozen_copies=sum(isinstance(one, FrozenCopy) for one in (module.old_policy, module.reference))
        + loop.source.num_copies,
        spread=spread,
        device=device,
        process=process,
        trust_remote_code=policy.trust_remote_code,
        adapter=policy.adapter,
    )


def with_free_memory(job: Job, device: torch.device) -> Job:
    """The job with the bound that its engine sets itself: the free memory of `device`."""
    if job.max_cache is not None or not job.bounds_cache:
        return job
    return replace(job, max_cache=float(free_bytes(device)))


def spread_of(strategy: type[Strategy], world_size: int) -> Spread:
    """How a strategy spreads weights over `world_size` devices."""
    if issubclass(strategy, ModelParallelStrategy):
        return Spread.sharded(world_size)
    return Spread.replicated(world_size) if issubclass(strategy, DDPStrategy) else Spread.single()


def longest_prompt(data: PromptDataModule, tried: int = 16) -> int:
    """Tokens of the longest prompt among the `tried` longest texts of the questions that are loaded."""
    questions = [question for split in data.questions.values() for question in split]
    longest = sorted(questions, key=lambda question: -len(question.text))[:tried]
    return max((len(data.encode(data.render(question))) for question in longest), default=1)


def process_bytes() -> int:
    """Bytes that this process uses now, and that its libraries use later; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + TOUCHED_LATER
