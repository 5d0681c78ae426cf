"""The parts of attention cover what each token sees, each pair of tokens once."""

from collections import Counter

import pytest
import torch

from grpo_lightning.plugins.fast import parts
from grpo_lightning.plugins.fast.parts import Call, Part, calls_of, parts_of, triangles

PACKS: dict[str, tuple[list[int], list[list[int]]]] = {
    "equal": ([4, 4, 4], [[3, 3], [3, 3], [3, 3]]),
    "ragged": ([2, 5, 5], [[1, 9], [7], [2, 2, 6]]),
    "a prompt without completions": ([3, 4], [[], [2, 2]]),
    "long": ([16, 16, 33], [[19], [20], [8, 8, 8]]),
}


def pairs(part: Part) -> list[tuple[int, int]]:
    """Every query of a part with every key that it sees, by their places in the flat sequence."""
    return [
        (part.first_query + row * part.query_step + query, part.first_key + row * part.key_step + key)
        for row in range(part.rows)
        for query in range(part.queries)
        for key in range(query + 1 if part.causal else part.keys)
    ]


def test_triangles_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LEAF", 4)
    # Two segments of 8 from token 10 on: four triangles of 4, and the second halves with the first.
    assert list(triangles(10, 8, 2, 8)) == [Part(4, 4, 4, 10, 10, 4, 4, True), Part(2, 4, 4, 14, 10, 8, 8)]
    # Two of 7: their first 4, their last 3, and the last with the first.
    assert list(triangles(10, 7, 2, 7)) == [
        Part(2, 4, 4, 10, 10, 7, 7, True),
        Part(2, 3, 3, 14, 14, 7, 7, True),
        Part(2, 3, 4, 14, 10, 7, 7),
    ]


@pytest.mark.parametrize("leaf", [2, 5, 256])
@pytest.mark.parametrize("pack", PACKS)
def test_every_pair_is_in_one_part(pack: str, leaf: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LEAF", leaf)
    prompts, rows = PACKS[pack]
    expected: Counter[tuple[int, int]] = Counter()
    first_key, first = 0, sum(prompts)
    for length, own in zip(prompts, rows, strict=True):
        prompt = range(first_key, first_key + length)
        expected.update((query, key) for query in prompt for key in prompt if key <= query)
        for count in own:
            tokens = range(first, first + count)
            expected.update((query, key) for query in tokens for key in (*prompt, *tokens) if key <= query)
            first += count
        first_key += length
    found = parts_of(prompts, rows)
    assert Counter(pair for part in found for pair in pairs(part)) == expected
    # The first part of each token is on the diagonal.
    seen: set[int] = set()
    for part in found:
        queries = {query for query, _ in pairs(part)}
        assert part.causal == queries.isdisjoint(seen)
        seen |= queries


def test_equal_prompts_and_completions_are_one_part_each() -> None:
    assert parts_of([4, 4], [[3, 3], [3, 3]]) == [
        Part(2, 4, 4, 0, 0, 4, 4, True),
        Part(4, 3, 3, 8, 8, 3, 3, True),
        Part(2, 6, 4, 8, 0, 6, 4),
    ]


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_calls_are_views_of_the_flat_states(groups: int) -> None:
    part = Part(2, 3, 4, 9, 1, 3, 4)
    query, key = torch.randn(20, 2 * groups, 5), torch.randn(20, 2, 5)
    calls = calls_of([part], groups)
    assert calls == [Call(part, groups, index, groups > 2) for index in range(2 if groups > 2 else groups)]
    scores = torch.full((2, 2 * groups, 3, 4), torch.nan)
    for call in calls:
        own = call.of_queries(query) @ call.of_keys(key).mT
        if call.whole_rows:
            # [groups, key heads]: head k * groups + g is the g-th of key head k.
            scores[call.index] = own.transpose(0, 1).flatten(0, 1)
        else:
            scores[:, call.index :: groups] = own
        assert call.of_queries(query)._base is query and call.of_keys(key)._base is key
    for row in range(2):
        q, k = query[9 + 3 * row :][:3], key[1 + 4 * row :][:4].repeat_interleave(groups, 1)
        torch.testing.assert_close(scores[row], torch.einsum("qhd,khd->hqk", q, k))
