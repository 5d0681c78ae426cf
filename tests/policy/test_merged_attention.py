"""Attention in parts against attention over a mask, in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from grpo_lightning.plugins.fast import parts
from grpo_lightning.plugins.fast.copies import Bucket
from grpo_lightning.plugins.fast.merged_attention import CALL, Heads, merged_attention, takes
from grpo_lightning.plugins.fast.parts import Part, calls_of, parts_of

PACKS: dict[str, tuple[list[int], list[list[int]]]] = {
    "equal": ([6, 6, 6], [[5, 5], [5, 5], [5, 5]]),
    "ragged": ([2, 5, 5], [[1, 9], [7], [2, 2, 6]]),
    "long": ([16, 33], [[21, 21], [8, 8, 8]]),
}
HEADS = {"MHA": (4, 4), "GQA": (6, 2), "MQA": (4, 1)}
BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}


def seen_by(prompts: list[int], rows: list[list[int]]) -> Tensor:
    """[T, T] whether a query sees a key."""
    owner, prompt, completion = [], [], []
    for index, length in enumerate(prompts):
        owner, prompt, completion = owner + [index] * length, prompt + [True] * length, completion + [-1] * length
    for index, own in enumerate(rows):
        for length in own:
            owner, prompt = owner + [index] * length, prompt + [False] * length
            completion += [max(completion) + 1] * length
    segments, is_prompt, completions = torch.tensor(owner), torch.tensor(prompt), torch.tensor(completion)
    same = completions[:, None] == completions
    return (segments[:, None] == segments) & (is_prompt | same) & torch.ones(len(owner), len(owner)).tril().bool()


def reference(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scaling: float | None) -> Tensor:
    """Attention of flat states under a mask."""
    states = (each.double().transpose(0, 1)[None] for each in (query, key, value))
    return scaled_dot_product_attention(*states, attn_mask=seen, scale=scaling, enable_gqa=True)[0].transpose(0, 1)


def states_of(heads: tuple[int, int], tokens: int, dtype: torch.dtype, size: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, heads[0], size), (tokens, heads[1], size), (tokens, heads[1], size))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [("MHA", torch.float32), ("GQA", torch.float64), ("GQA", torch.bfloat16), ("MQA", torch.float64)],
)
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("leaf", [4, 256])
def test_outputs_and_gradients(
    leaf: int, pack: str, heads: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "LEAF", leaf)
    (prompts, rows), (num_heads, num_keys) = PACKS[pack], HEADS[heads]
    seen = seen_by(prompts, rows)
    states = states_of((num_heads, num_keys), len(seen), dtype)
    calls = calls_of(parts_of(prompts, rows), num_heads // num_keys)
    actual = merged_attention(*states, calls, scaling=0.7)
    expected = reference(*states, seen, 0.7)
    assert actual.dtype == dtype and error(actual.detach(), expected.detach()) < BOUNDS[dtype]
    gradient = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    found = torch.autograd.grad(actual, states, gradient)
    for own, exact in zip(found, torch.autograd.grad(expected, states, gradient.double()), strict=True):
        assert own.dtype == dtype and error(own, exact.double()) < BOUNDS[dtype]


def test_scores_of_any_size() -> None:
    """The largest scores are in the prompt for some queries and in the completion for others."""
    prompts, rows = PACKS["ragged"]
    seen = seen_by(prompts, rows)
    query, key, value = states_of((2, 2), len(seen), torch.float32)
    calls = calls_of(parts_of(prompts, rows), 1)
    with torch.no_grad():
        actual, expected = (
            merged_attention(query, key, value, calls, 200.0),
            reference(query, key, value, seen, 200.0),
        )
    assert bool(actual.isfinite().all())
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-3)


def test_states_of_any_layout() -> None:
    """Heads first, and queries, keys and values in one tensor, as some models have them."""
    prompts, rows = PACKS["equal"]
    tokens = sum(prompts) + sum(map(sum, rows))
    query, key, value = states_of((4, 4), tokens, torch.float64)
    calls = calls_of(parts_of(prompts, rows), 1)
    expected = merged_attention(query, key, value, calls)
    heads_first = [state.transpose(0, 1).contiguous().transpose(0, 1) for state in (query, key, value)]
    assert torch.equal(merged_attention(*heads_first, calls), expected)
    together = torch.cat([query, key, value], dim=-1).split(8, dim=-1)
    assert torch.equal(merged_attention(*together, calls), expected)
    spread = [state.transpose(1, 2).contiguous().transpose(1, 2) for state in (query, key, value)]
    assert torch.equal(merged_attention(*spread, calls), expected)
    (gradient,) = torch.autograd.grad(expected.sum(), query)
    (other,) = torch.autograd.grad(merged_attention(*spread, calls).transpose(0, 2).sum(), query)
    torch.testing.assert_close(other, gradient)


def test_only_states_output_and_sums_are_kept() -> None:
    query, key, value = states_of((4, 2), 33, torch.float32)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda kept: kept):
        output = merged_attention(query, key, value, calls_of(parts_of([6, 6, 6], [[5], [5], [5]]), 2))
    assert [tuple(tensor.shape) for tensor in kept] == [(33, 4, 8), (33, 2, 8), (33, 2, 8), (33, 4, 8), (33, 4, 1)]
    assert kept[3].data_ptr() == output.data_ptr()


def test_what_it_takes() -> None:
    query, key, value = states_of((4, 2), 5, torch.float32)
    assert takes(query, key, value, 0.0)
    assert not takes(query, key, value, 0.1)
    assert not takes(query, key, value[..., :4], 0.0)
    assert not takes(query.to("meta"), key.to("meta"), value.to("meta"), 0.0)


def test_costs_by_hand() -> None:
    # 6 query heads, 2 key heads of size 32, 2 threads.
    heads = Heads(6, 2, 32, 2)
    # A prompt of 100 tokens by itself, and 8 completions of 50 tokens with it: 3 x 2 units, 3 per thread.
    calls = calls_of([Part(1, 100, 100, 0, 0, 100, 100, True), Part(1, 400, 100, 100, 0, 400, 100)], 3)
    assert heads.cost(calls) == 2 * CALL + 3 * 120 * 130 + 3 * 420 * 160
    # The same by copies: 6 units of 100 x 100, and 16 of 150 x 150. 500 queries and outputs, 1,300 keys and values.
    copied = 32 * (2 * 6 * 500 + 2 * 2 * (100 + 8 * 150)) / 3 / 2
    assert heads.cost_of([Bucket(1, 0, 100), Bucket(8, 100, 50)]) == pytest.approx(
        copied + 2 * CALL + 3 * 120 * 130 + 8 * 170 * 180
    )


def test_long_prompts_are_read_once_and_short_ones_copied() -> None:
    heads = Heads(4, 2, 32, 2)
    chosen = {
        prompt: heads.cost(calls_of(parts_of([prompt] * 16, [[64] * 8] * 16), 2))
        < heads.cost_of([Bucket(16, 0, prompt), Bucket(128, prompt, 64)])
        for prompt in (16, 512)
    }
    assert chosen == {16: False, 512: True}
