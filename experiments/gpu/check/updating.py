"""Seconds and MFU of one micro-batch's forward and backward at a 0.5B shape, and what each part of it would gain."""

import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from common import (
    DEVICE,
    IS_CUDA,
    STARTED,
    attempt,
    mixed,
    note,
    note_profile,
    peak_gib,
    prefer_cudnn,
    qwen_policy,
    seconds_of,
    timed,
)
from varlen_attention import Rows, varlen_attention

from grpo_lightning import Rollouts

RATE = 800e12
"""What an H100 multiplies in bfloat16, measured."""
PROMPTS, GROUP, LONGEST = (32, 8, 256) if IS_CUDA else (4, 2, 24)

policy = qwen_policy()
policy.train()
random.seed(0)
prompts = [[2] * random.randint(*((150, 250) if IS_CUDA else (10, 20))) for _ in range(PROMPTS)]
mean = 5.0 if IS_CUDA else 2.5
lengths = [min(LONGEST, max(8, int(random.lognormvariate(mean, 0.4)))) for _ in range(PROMPTS * GROUP)]
group = [row // GROUP for row in range(PROMPTS * GROUP)]
rollouts = Rollouts.from_lists(prompts, group, [[3 + row % 50] * length for row, length in enumerate(lengths)])
micro_batches = rollouts.micro_batches(16384, True)
micro_batch = micro_batches[0].to(DEVICE)
tokens, sampled = int(micro_batch.sizes.prompt_lengths.sum()) + micro_batch.num_tokens, micro_batch.num_tokens
trunk = sum(parameter.numel() for name, parameter in policy.model.named_parameters() if "embed" not in name)
head = policy.model.get_output_embeddings().weight.numel()
pairs = sum(length * (len(prompts[row // GROUP]) + length / 2) for row, length in enumerate(lengths))
pairs *= sampled / rollouts.num_tokens
attended = 12 * pairs * policy.config.num_hidden_layers * policy.config.hidden_size
OPERATIONS = 6 * trunk * tokens + 6 * head * sampled + attended
note("packs", micro_batches=len(micro_batches), tokens=tokens, sampled=sampled, tflop=OPERATIONS / 1e12)


def updated(context: Callable[[], Any], backward: bool = True) -> Callable[[], Any]:
    """A forward over the micro-batch, with its backward."""
    layout = policy.compute.layout(micro_batch)

    def once() -> Any:
        with context():
            logp = policy(micro_batch, layout=layout).logp
        if backward:
            logp.sum().backward()
        layout.free()
        return logp.detach()

    return once


def through_trunk(context: Callable[[], Any]) -> Callable[[], Any]:
    """The same without the head."""
    layout = policy.compute.layout(micro_batch)

    def once() -> None:
        with context():
            hidden = policy.compute.hidden(policy.trunk, micro_batch, layout)
        hidden.float().sum().backward()

    return once


def measure(case: str, once: Callable[[], Any], operations: float = OPERATIONS, times: int = 3) -> None:
    with attempt(case):
        spent = seconds_of(once, times)
        mfu = operations / spent / RATE
        note("update", case=case, seconds=spent, tokens_per_s=sampled / spent, mfu_of_800=mfu, peak_gib=peak_gib())


measure("bf16-mixed", updated(mixed))
measure("bf16-mixed, trunk alone", through_trunk(mixed), OPERATIONS - 6 * head * sampled)
if IS_CUDA:
    with attempt("varlen"):
        expected = updated(mixed, False)()
        with varlen_attention(Rows.from_rollouts(micro_batch, DEVICE)):
            actual = updated(mixed, False)()
            gap = (actual - expected).abs()
            note("varlen", mean_gap=float(gap.mean()), max_gap=float(gap.max()))
            measure("bf16-mixed, varlen", updated(mixed))
            measure("bf16-mixed, varlen, trunk alone", through_trunk(mixed), OPERATIONS - 6 * head * sampled)
for power in (21, 23, 26, 28):
    policy.compute.logits_at_once = 2**power
    measure(f"bf16-mixed, logits_at_once=2^{power}", updated(mixed), times=2)
policy.compute.logits_at_once = None
measure("32-true", updated(nullcontext), times=1)
torch.set_float32_matmul_precision("high")
measure("32-true, TF32 products", updated(nullcontext), times=2)
torch.set_float32_matmul_precision("highest")
with attempt("optimizers"):
    for parameter in policy.parameters():
        parameter.grad = torch.full_like(parameter, 1e-4)
    for options in ({}, {"fused": True}):
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, **options)
        note("AdamW", options=options, ms=1e3 * seconds_of(optimizer.step))
        del optimizer
    note("clipping", ms=1e3 * seconds_of(lambda: torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)))
with attempt("profile of an update"):
    note_profile("profile of an update", updated(mixed))
if IS_CUDA and time.perf_counter() - STARTED < 60:
    with attempt("update, cuDNN first"):
        prefer_cudnn()
        once = updated(mixed)
        note("update", case="bf16-mixed, cuDNN first, new shapes", seconds=timed(once))
        note("update", case="bf16-mixed, cuDNN first, same shapes again", seconds=timed(once))
