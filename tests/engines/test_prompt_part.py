"""Attention in two parts, to a prompt's keys and to a row's own, is attention to both."""

import sys
from typing import Any

import pytest
import torch
from helpers.tiny import SHAPES, policy_of, requests_of, teacher_forced
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.plugins.fast import batch, prompt_part, slab
from grpo_lightning.plugins.fast.native import NativeEngine
from grpo_lightning.plugins.fast.prompt_part import Groups, PromptPart, in_two_parts, is_worth, of_products, part
from grpo_lightning.plugins.fast.slab import SlabLayer
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import Completion, RandomKey, Request

SAMPLING = Sampling(max_new_tokens=24)
LENGTHS = {"ragged": [4, 1, 9, 4, 6], "equal": [5, 5, 5]}


def drawn(policy: Policy, requests: list[Request], engine: NativeEngine | None = None) -> list[Completion]:
    engine = engine or NativeEngine()
    engine.sync(policy)
    return engine.complete(requests, SAMPLING, RandomKey())


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def exact(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """[g, D], [S, D], [S, E] -> [g, E], [g] in float64: attention, and the logarithm of its sum."""
    scores = (query.double() @ key.double().T) * scaling
    return scores.softmax(-1) @ value.double(), scores.logsumexp(-1)


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=str)
def test_a_part_and_the_logarithm_of_its_sum(dtype: torch.dtype, within: float) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, 2, size, 8).to(dtype) for size in (4, 7, 7))
    hidden = torch.zeros(3, 1, 7, dtype=torch.bool)
    hidden[1, 0, 5:] = True
    output, log_sum = part(query, key, value, hidden, 0.6)
    for prompt, head in ((0, 0), (1, 1), (2, 1)):
        seen = 5 if prompt == 1 else 7
        expected, expected_sum = exact(query[prompt, head], key[prompt, head, :seen], value[prompt, head, :seen], 0.6)
        assert torch.allclose(output[prompt, head].double(), expected, atol=within)
        assert torch.allclose(log_sum[prompt, head].double(), expected_sum, atol=within)


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-2)], ids=str)
def test_two_parts_are_attention_to_both(dtype: torch.dtype, within: float) -> None:
    # Scores far apart: a part may weigh nothing.
    torch.manual_seed(0)
    prompt = torch.tensor([0, 0, 0, 1, 2, 2])
    widths = [6, 4, 1]
    query = (4 * torch.randn(6, 4, 1, 8)).to(dtype)
    prompt_keys, prompt_values = (torch.randn(3, 2, 6, 8).to(dtype) for _ in range(2))
    keys, values = (torch.randn(6, 2, 5, 8).to(dtype) for _ in range(2))
    hidden = torch.arange(6) >= torch.tensor(widths)[:, None, None]
    for rows in (torch.arange(6), torch.tensor([0, 2, 4])):
        prompts, groups = Groups.of(prompt, 3, hidden).keep(rows)
        both = PromptPart(prompt_keys, prompt_values, groups).keep(prompts, groups)
        found = in_two_parts(query[rows], keys[rows], values[rows], None, None, both)
        for place, row in enumerate(rows.tolist()):
            for head in range(4):
                end, of = widths[prompt[row]], (prompt[row], head // 2)
                all_keys = torch.cat([prompt_keys[of][:end], keys[row, head // 2]])
                all_values = torch.cat([prompt_values[of][:end], values[row, head // 2]])
                expected, _ = exact(query[row, head], all_keys, all_values, 8**-0.5)
                assert torch.allclose(found[place, head].double(), expected, atol=within)


def test_groups_by_hand() -> None:
    groups = Groups.of(torch.tensor([0, 0, 0, 1]), 2, None)
    assert groups.members.tolist() == [[0, 1, 2], [3, 0, 0]]
    # Two key heads: the queries of row r and head k lie at 2 r + k, and go to (prompt, head, place).
    sources, places = groups.index(2)
    assert sources.tolist() == [0, 2, 4, 1, 3, 5, 6, 0, 0, 7, 1, 1]
    assert places.tolist() == [0, 3, 1, 4, 2, 5, 6, 9]
    prompts, left = groups.keep(torch.tensor([3]))
    assert prompts.tolist() == [1]
    assert left.members.tolist() == [[0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hundreds_of_columns_that_are_not_seen_weigh_nothing(dtype: torch.dtype) -> None:
    # More than a block of the kernel's keys, before those that are seen: as of a row that joined late.
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, size, 16).to(dtype) for size in (3, 1300, 1300))
    mask = torch.ones(2, 1, 1, 1300, dtype=torch.bool)
    mask[1, ..., :1290] = False
    outputs = part(query, key, value, ~mask[:, 0], None)[0], slab.kernels.masked(query, key, value, mask)
    for row, first in ((0, 0), (1, 1290)):
        for head in range(2):
            expected, _ = exact(query[row, head], key[row, head, first:], value[row, head, first:], 16**-0.5)
            for output in outputs:
                assert torch.allclose(output[row, head].double(), expected, atol=2e-2)


@pytest.mark.parametrize("masked", [False, True])
def test_plain_products_are_the_kernels_attention(masked: bool) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, heads, size, 8) for heads, size in ((4, 1), (2, 7), (2, 7)))
    mask = torch.rand(3, 1, 1, 7) < 0.6 if masked else None
    if mask is not None:
        mask[..., 0] = True
    expected = slab.kernels.masked(query, key, value, mask)
    assert torch.allclose(of_products(query, key, value, mask), expected, atol=1e-6)


def test_worth_it_where_enough_would_be_copied() -> None:
    # 8 rows of 2 prompts: 6 copies of 2 x 2 x 100 x 64 numbers of 4 bytes.
    keys = torch.empty(2, 2, 100, 64)
    assert 6 * 2 * keys[0].numel() * 4 < prompt_part.SAVED_BYTES
    assert not is_worth(keys, 8)
    assert is_worth(keys, 8 * 8)
    assert not is_worth(keys, 2), "nothing would be copied"


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_shared_prompts_give_the_same_completions(monkeypatch: Any, shape: str, lengths: list[int]) -> None:
    policy, requests = policy_of(shape), requests_of(lengths, 4)
    expected = drawn(policy, requests)
    monkeypatch.setattr(prompt_part, "SAVED_BYTES", 0)
    for engine in (NativeEngine(), NativeEngine(max_rows=3), NativeEngine(check_every=1), NativeEngine(packed=True)):
        found = drawn(policy, requests, engine)
        assert tokens(found) == tokens(expected)
        for request, completion in zip(requests, found, strict=True):
            logp = teacher_forced(policy.model, request.token_ids, completion.token_ids)
            right = logp.gather(-1, torch.tensor(completion.token_ids)[:, None]).squeeze(-1)
            assert completion.logp == pytest.approx(right.tolist(), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_bfloat16_shared_prompts_round_like_copies(monkeypatch: Any, dtype: torch.dtype) -> None:
    policy, requests = policy_of("llama"), requests_of([4, 9], 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        expected = drawn(policy, requests)
        monkeypatch.setattr(prompt_part, "SAVED_BYTES", 0)
        found = drawn(policy, requests)
    pairs = zip(expected, found, strict=True)
    off = [abs(a.logp[0] - b.logp[0]) for a, b in pairs if a.logp and b.logp and a.token_ids[0] == b.token_ids[0]]
    assert len(off) == 8
    assert max(off) < (1e-5 if dtype is torch.float32 else 0.1)


@pytest.mark.parametrize("shared", [False, True])
def test_scores_are_never_rounded_to_bfloat16(monkeypatch: Any, shared: bool) -> None:
    monkeypatch.setattr(prompt_part, "SAVED_BYTES", 0 if shared else sys.maxsize)
    policy, requests = policy_of("llama"), requests_of([4, 9], 4)
    with torch.autocast("cpu", torch.bfloat16), torch.profiler.profile() as profile:
        drawn(policy, requests)
    called = {event.key for event in profile.key_averages()}
    assert "aten::bmm" not in called
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in called


def test_no_row_has_a_copy_of_its_prompt(monkeypatch: Any) -> None:
    shared: list[tuple[int, ...]] = []
    share = SlabLayer.share

    def noted(layer: SlabLayer, groups: Groups, capacity: int) -> None:
        share(layer, groups, capacity)
        assert layer.prompts is not None
        shared.append((*layer.prompts.keys.shape[:3], *layer.key_slab.shape[:3]))

    monkeypatch.setattr(SlabLayer, "share", noted)
    monkeypatch.setattr(SlabLayer, "expand", lambda *args: pytest.fail("copied"))
    monkeypatch.setattr(prompt_part, "SAVED_BYTES", 0)
    drawn(policy_of("llama"), requests_of([4, 9], 8))
    assert shared == [(2, 2, 9, 16, 2, 24)] * 2


@pytest.mark.parametrize("window", [2, 64])
def test_sliding_windows_have_copies(monkeypatch: Any, window: int) -> None:
    policy, requests = policy_of("mistral", sliding_window=window), requests_of([4, 9], 4)
    expected = drawn(policy, requests)
    monkeypatch.setattr(prompt_part, "SAVED_BYTES", 0)
    monkeypatch.setattr(SlabLayer, "share", lambda *args: pytest.fail("shared"))
    engine = NativeEngine()
    engine.check(policy, SAMPLING)
    assert tokens(drawn(policy, requests, engine)) == tokens(expected)


def test_a_model_that_loses_the_prompts_has_copies(monkeypatch: Any) -> None:
    policy, requests = policy_of("llama"), requests_of([4, 9], 4)
    expected = drawn(policy, requests)
    update = SlabLayer.update

    def another(layer: SlabLayer, *states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = update(layer, *states, **kwargs)
        return keys * 1, values  # As a model would that scales its keys.

    monkeypatch.setattr(SlabLayer, "update", another)
    monkeypatch.setattr(prompt_part, "SAVED_BYTES", 0)
    engine = NativeEngine()
    engine.check(policy, SAMPLING)
    assert tokens(drawn(policy, requests, engine)) == tokens(expected)
    lost = drawn(policy, requests)
    assert tokens(lost) != tokens(expected), "unchecked it would be wrong"


def repeated(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    """Attention as it was before prompts were shared: torch's own, one product per key head, to copies."""
    groups = query.shape[1] // key.shape[1]
    if query.shape[2] > 1:
        keys, values = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        output = scaled_dot_product_attention(query, keys, values, is_causal=True, scale=kwargs["scaling"])
    else:
        folded = query.reshape(len(query), key.shape[1], groups, -1)
        output = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=kwargs["scaling"])
    return output.reshape(*query.shape[:-1], -1).transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_switched_off_each_row_has_a_copy_and_every_bit_of_before(monkeypatch: Any, lengths: list[int]) -> None:
    policy, requests = policy_of("qwen2"), requests_of(lengths, 4)
    monkeypatch.setattr(prompt_part, "SAVED_BYTES", 0)
    shared = drawn(policy, requests)
    monkeypatch.setattr(SlabLayer, "share", lambda *args: pytest.fail("shared"))
    engine = NativeEngine(share_prompts=False)
    engine.check(policy, SAMPLING)
    found = drawn(policy, requests, engine)
    AttentionInterface.register(engine.attention, repeated)
    try:
        expected = drawn(policy, requests, engine)
    finally:
        AttentionInterface.register(engine.attention, slab.attention)
    assert found == expected
    assert found != shared
    assert tokens(found) == tokens(shared)


def test_the_rule_decides_after_the_check(monkeypatch: Any) -> None:
    engine = NativeEngine()
    engine.check(policy_of("llama"), SAMPLING)
    asked: list[int] = []
    monkeypatch.setattr(batch, "is_worth", lambda keys, rows: bool(asked.append(rows)))
    drawn(policy_of("llama"), requests_of([4, 9], 4), engine)
    assert set(asked) == {8}
