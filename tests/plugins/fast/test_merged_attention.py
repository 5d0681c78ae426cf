"""Attention in parts against attention over a mask, in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from grpo_lightning.plugins.fast import parts
from grpo_lightning.plugins.fast.merged_attention import merged_attention
from grpo_lightning.plugins.fast.parts import calls_of, parts_of

PACKS: dict[str, tuple[list[int], list[list[int]]]] = {
    "equal": ([6, 6, 6], [[5, 5], [5, 5], [5, 5]]),
    "ragged": ([2, 5, 5], [[1, 9], [7], [2, 2, 6]]),
    "a prompt without completions": ([3, 4], [[], [2, 2]]),
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


def test_only_states_output_and_sums_are_kept() -> None:
    query, key, value = states_of((4, 2), 33, torch.float32)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda kept: kept):
        output = merged_attention(query, key, value, calls_of(parts_of([6, 6, 6], [[5], [5], [5]]), 2))
    assert [tuple(tensor.shape) for tensor in kept] == [(33, 4, 8), (33, 2, 8), (33, 2, 8), (33, 4, 8), (33, 4, 1)]
    assert kept[3].data_ptr() == output.data_ptr()
