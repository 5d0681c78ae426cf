"""NativeEngine beside PlainEngine; it keeps the contract in engines/test_engines.py too."""

import pytest
import torch
from helpers.drawing import PROMPTS, draw, gap, tokens, watch_reading
from helpers.fast import policy_of

from grpo_lightning import NativeEngine, PlainEngine, RandomKey, RolloutEngine, UsageError
from grpo_lightning.plugins.engines.native import kv_memory


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8, "temperature": 1.3}, {"min_p": 0.2}],
    ids=str,
)
def test_both_engines_draw_the_same(policy, sampling):
    native = draw(NativeEngine(), policy, key=RandomKey(5), **sampling)
    other = draw(PlainEngine(), policy, key=RandomKey(5), **sampling)
    assert tokens(native) == tokens(other)
    assert [c.finish_reason for c in native] == [c.finish_reason for c in other]
    for left, right in zip(native, other, strict=True):
        assert left.logp == pytest.approx(right.logp, abs=1e-5)


def test_unknown_attention_is_refused_with_the_engine_to_use():
    policy = policy_of("gemma2", query_pre_attn_scalar=16, attn_logit_softcapping=0.5)
    with pytest.raises(UsageError, match="engine=PlainEngine"):
        draw(NativeEngine(), policy)
    completions = draw(PlainEngine(), policy)
    assert gap(policy, PROMPTS, completions) < 1e-5


@pytest.mark.parametrize(
    "overrides", [{"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}], ids=str
)
def test_native_heeds_the_scaling_of_attention_scores(overrides):
    policy = policy_of("gpt2", **overrides)
    assert gap(policy, PROMPTS, draw(NativeEngine(), policy)) < 1e-5


@pytest.mark.parametrize("limit", [1, 12])
@pytest.mark.parametrize(
    ("engine", "shape"),
    [
        (NativeEngine(), "gpt2"),
        (NativeEngine(), "mistral"),
        (NativeEngine(max_rows=9, check_every=3), "llama"),
        (NativeEngine(threads=2), "llama"),
    ],
    ids=["gpt2", "windows", "batches", "threads"],
)
def test_many_prompts_are_read_in_parts(
    monkeypatch: pytest.MonkeyPatch, engine: RolloutEngine, shape: str, limit: int
) -> None:
    windows = {"sliding_window": 6, "scale": 0.1} if shape == "mistral" else {}
    policy = policy_of(shape, **windows)
    read: list[torch.Size] = []
    watch_reading(monkeypatch, policy, read.append)
    expected = draw(engine, policy)
    whole = len(read)
    monkeypatch.setattr(kv_memory, "READ_TOKENS", limit)
    found = draw(engine, policy)
    assert tokens(found) == tokens(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.logp == pytest.approx(other.logp, rel=1e-5, abs=1e-5)
    assert all(shape.numel() <= limit or shape[0] == 1 for shape in read[whole:])
    assert len(read) > 2 * whole
