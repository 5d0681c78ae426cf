"""experiments/roofline: counts of a step against numbers worked out by hand, the rates, the table and the plot."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.experiment import imported
from helpers.fast import policy_of
from helpers.tiny import rollouts_of

from grpo_lightning.plugins.display.utilisation import Cost


@pytest.fixture(scope="module")
def parts() -> Iterator[SimpleNamespace]:
    with imported("versus_trl", "roofline") as modules:
        yield modules


def model_of(parts: SimpleNamespace, **changes: Any) -> Any:
    """A model of round numbers: 10 weights below the head, 5 in it, 2 operations per pair, 3 numbers cached."""
    values = {"cost": Cost(60.0, 30.0, 6.0), "parameters": 15, "weights": 15, "cache": 3, "vocabulary": 7}
    return parts.counts.Model(**values | changes)


def test_reading_prompts(parts: SimpleNamespace) -> None:
    sizes = parts.counts.Sizes.even(prompts=2, group_size=4, prompt_tokens=5, new_tokens=3)
    # 10 tokens x 2 x 10 weights, the head for two of them, 2 x 25 pairs of 2 operations.
    found = model_of(parts).prefill(sizes)
    assert found.operations == 10 * 20 + 2 * 10 + 50 * 2
    # 15 weights and 10 tokens' cache of 4 bytes per number; two rows of logits.
    assert found.bytes == 4 * (15 + 30) + 4 * 7 * 2
    half = model_of(parts).prefill(sizes, width=2, shared=False)
    assert (half.operations, half.bytes) == (40 * 20 + 8 * 10 + 200 * 2, 2 * (15 + 120) + 4 * 7 * 8)


def test_decoding_by_position_while_rows_end(parts: SimpleNamespace) -> None:
    # Two groups of two; lengths 1, 3 and 2, 2: the first position passes three rows, the second one of the first group.
    sizes = parts.counts.Sizes(prompt_tokens=5, group_size=2, lengths=(1, 3, 2, 2))
    first, second = model_of(parts).decoding(sizes)
    assert first.operations == 3 * (20 + 10 + 2 * 6)
    assert second.operations == 1 * (20 + 10 + 2 * 7)
    # Both prompts are read once, then one; each row reads its own tokens so far.
    assert first.bytes == 4 * (15 + 3 * (2 * 5 + 3 * 1)) + 4 * 7 * 3
    assert second.bytes == 4 * (15 + 3 * (1 * 5 + 1 * 2)) + 4 * 7 * 1
    # Without sharing every row reads its own copy of the prompt.
    assert model_of(parts).decoding(sizes, shared=False)[0].bytes == 4 * (15 + 3 * (3 * 5 + 3)) + 4 * 7 * 3


def test_an_update_counts_what_perf_mfu_counts(parts: SimpleNamespace) -> None:
    policy = policy_of()
    cost = Cost.from_model(policy.model)
    assert cost is not None
    pack = rollouts_of([2, 4, 3, 3], prompt_lengths=[3, 3], group=[0, 0, 1, 1])
    sizes = parts.counts.Sizes(prompt_tokens=3, group_size=2, lengths=(2, 4, 3, 3))
    for shared in (True, False):
        found = model_of(parts, cost=cost).update(sizes, shared=shared)
        assert sum(part.operations for part in found.values()) == cost.of(pack, shares_prefix=shared)


def test_an_update_reads_weights_and_adds_to_gradients_once_per_pack(parts: SimpleNamespace) -> None:
    found = model_of(parts).update(parts.counts.Sizes.even(1, 2, 5, 3), packs=3, width=2)
    assert (found["trunk"].bytes, found["head"].bytes) == (3 * (2 * 2 + 2 * 4) * 10, 3 * (2 * 2 + 2 * 4) * 5)
    assert model_of(parts).optimizer().bytes == 7 * 4 * 15
