"""Milliseconds per decoded position of a 0.5B shape: in several precisions, as a CUDA graph, and with cuDNN first."""

import time
from contextlib import nullcontext
from typing import Any

import torch
from common import IS_CUDA, STARTED, attempt, mixed, note, note_profile, peak_gib, prefer_cudnn, qwen_policy, timed
from static_decoding import StaticDecoder

from grpo_lightning import NativeEngine, RandomKey, Request, Sampling

ROWS, PROMPTS, LENGTH, NEW = (256, 32, 200, 64) if IS_CUDA else (8, 4, 20, 12)


def requests_of(ragged: bool) -> list[Request]:
    """Prompts of equal length, or of up to 7 tokens less."""
    group_size = ROWS // PROMPTS
    length_of = [LENGTH - prompt % 8 * ragged for prompt in range(PROMPTS)]
    return [
        Request([5 + prompt % 9] * length_of[prompt], prompt, sample)
        for prompt in range(PROMPTS)
        for sample in range(group_size)
    ]


def figures(engine: NativeEngine, requests: list[Request], new: int) -> dict[str, float]:
    """Prefill and first token by themselves, and what each further position takes."""

    def sample(num_tokens: int) -> Any:
        return engine.complete(requests, Sampling(max_new_tokens=num_tokens), RandomKey())

    sample(2)
    first, all_tokens = timed(lambda: sample(1)), timed(lambda: sample(new))
    position = (all_tokens - first) / (new - 1)
    return {"ms_per_position": 1e3 * position, "prefill_s": first, "tokens_per_s": ROWS / position}


policy = qwen_policy()
CASES: list[tuple[str, Any, bool, int]] = [
    ("bf16-mixed", mixed, True, NEW),
    ("bf16-mixed, equal prompts", mixed, False, NEW),
    ("32-true", nullcontext, True, NEW // 2),
]
for name, context, ragged, new in CASES:
    with attempt(name), context(), torch.no_grad():
        engine = NativeEngine()
        engine.sync(policy)
        found = figures(engine, requests_of(ragged), new)
        note("decoding", case=name, rows=ROWS, new=new, peak_gib=peak_gib(), **found)

for name, context in (("bf16-mixed", mixed), ("32-true", nullcontext)):
    with attempt(f"static decoding, {name}"), context(), torch.no_grad():
        engine = NativeEngine()
        engine.sync(policy)
        expected = engine.complete(requests_of(True), Sampling(max_new_tokens=NEW), RandomKey())
        decoder = StaticDecoder(engine, requests_of(True), NEW, RandomKey())
        begun = time.perf_counter()
        decoder.prepare(IS_CUDA)
        capture = time.perf_counter() - begun
        begun = time.perf_counter()
        tokens, logps = decoder.decode()
        spent = time.perf_counter() - begun
        equal = sum(one.token_ids == ids for one, ids in zip(expected, tokens.tolist(), strict=True)) / ROWS
        pairs = zip(expected, logps.tolist(), strict=True)
        gap = max(abs(a - b) for one, others in pairs for a, b in zip(one.logp[:2], others[:2], strict=True))
        note(
            "static decoding",
            case=name,
            is_graph=IS_CUDA,
            ms_per_position=1e3 * spent / (NEW - 1),
            capture_s=capture,
            rows_equal=equal,
            first_logp_gap=gap,
            tokens_per_s=ROWS * (NEW - 1) / spent,
        )

with attempt("profile of decoding"), mixed(), torch.no_grad():
    engine = NativeEngine()
    engine.sync(policy)
    ten = Sampling(max_new_tokens=10)
    note_profile("profile of decoding", lambda: engine.complete(requests_of(True), ten, RandomKey()), per=10)

if IS_CUDA and time.perf_counter() - STARTED < 75:
    with attempt("decoding, cuDNN first"), mixed(), torch.no_grad():  # last: it may take a minute
        prefer_cudnn()
        engine = NativeEngine()
        engine.sync(policy)
        note("decoding", case="bf16-mixed, cuDNN first, 6 positions", **figures(engine, requests_of(True), 6))
