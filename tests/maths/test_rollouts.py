import random

import pytest
import torch
from helpers.tiny import rollouts_of, rows_of
from lightning.pytorch.plugins import HalfPrecision

from grpo_lightning.maths.rollouts import Rollouts

OPTIONAL = ("old_logp", "ref_logp", "sampler_logp", "entropy_rank", "logp_low", "logp_high")


def random_rollouts(seed: int) -> Rollouts:
    rng = random.Random(seed)
    prompt_lengths = [rng.randrange(1, 9) for _ in range(rng.randrange(1, 6))]
    lengths = [rng.randrange(1, 12) for _ in range(rng.randrange(1, 15))]
    group = [rng.randrange(len(prompt_lengths)) for _ in lengths]
    return rollouts_of(lengths, prompt_lengths, group, seed)


def test_from_lists_lays_prompts_and_completions_end_to_end():
    rollouts = Rollouts.from_lists(prompts=[[1, 2], [3]], group=[1, 0, 1], completions=[[7], [8, 9], [6, 5, 4]])
    assert rollouts.prompt_token_ids.tolist() == [1, 2, 3]
    assert rollouts.prompt_lengths.tolist() == [2, 1]
    assert rollouts.group.tolist() == [1, 0, 1]
    assert rollouts.token_ids.tolist() == [7, 8, 9, 6, 5, 4]
    assert rollouts.lengths.tolist() == [1, 2, 3]
    assert (len(rollouts), rollouts.num_tokens) == (3, 6)
    assert rollouts.sequence_lengths.tolist() == [2, 4, 4]
    assert rollouts.row.tolist() == [0, 1, 2]
    assert rollouts.advantage.tolist() == rollouts.weight.tolist() == [0.0] * 6
    assert rollouts.truncated.tolist() == [False] * 3
    assert all(getattr(rollouts, name) is None for name in OPTIONAL)


def test_select_by_hand():
    rollouts = Rollouts.from_lists(prompts=[[1, 2], [3], [4, 4]], group=[1, 0, 2], completions=[[7], [8, 9], [6]])
    rollouts.advantage = torch.tensor([1.0, 2.0, 2.5, 3.0])
    rollouts.truncated = torch.tensor([True, False, True])
    rollouts.entropy_rank = torch.tensor([0.1, 0.2, 0.3, 0.4])
    rollouts.logp_low, rollouts.logp_high = -torch.ones(4), torch.tensor([1.0, 2.0, 3.0, 4.0])
    chosen = rollouts.select(torch.tensor([2, 1]))
    assert chosen.prompt_token_ids.tolist() == [1, 2, 4, 4]
    assert chosen.prompt_lengths.tolist() == [2, 2]
    assert chosen.group.tolist() == [1, 0]
    assert chosen.token_ids.tolist() == [6, 8, 9]
    assert chosen.advantage.tolist() == [3.0, 2.0, 2.5]
    assert chosen.row.tolist() == [2, 1]
    assert chosen.truncated.tolist() == [True, False]
    assert chosen.entropy_rank.tolist() == pytest.approx([0.4, 0.2, 0.3])
    assert chosen.logp_low.tolist() == [-1, -1, -1]
    assert chosen.logp_high.tolist() == [4, 2, 3]


@pytest.mark.parametrize("seed", range(20))
def test_select_takes_the_rows_in_their_order_with_only_the_prompts_they_need(seed):
    rollouts = random_rollouts(seed)
    rng = random.Random(1000 + seed)
    rows = [rng.randrange(len(rollouts)) for _ in range(rng.randrange(1, 12))]
    chosen = rollouts.select(torch.tensor(rows))
    before = rows_of(rollouts)
    assert rows_of(chosen) == [before[row] for row in rows]
    assert len(chosen.prompt_lengths) == len({int(rollouts.group[row]) for row in rows})


@pytest.mark.parametrize("name", OPTIONAL)
def test_select_leaves_out_what_is_not_there(name):
    rollouts = random_rollouts(0)
    setattr(rollouts, name, None)
    chosen = rollouts.select(torch.tensor([0]))
    assert getattr(chosen, name) is None
    assert all(getattr(chosen, other) is not None for other in OPTIONAL if other != name)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("max_tokens", [0, 1, 25, 60])
def test_split_keeps_every_row_whole_and_once_within_the_budget(seed, max_tokens):
    rollouts = random_rollouts(seed)
    packs = rollouts.split(max_tokens)
    after = [row for pack in packs for row in rows_of(pack)]
    assert sorted(after, key=lambda row: row["row"]) == rows_of(rollouts)
    sizes = [(len(pack), int(pack.sequence_lengths.max())) for pack in packs]
    assert max_tokens or len(packs) == 1
    assert all(rows == 1 or max_tokens == 0 or rows * longest <= max_tokens for rows, longest in sizes)
    assert [longest for _, longest in sizes] == sorted((longest for _, longest in sizes), reverse=True)


@pytest.mark.parametrize("by_group", [False, True])
def test_split_selects_the_rows_of_packs(by_group):
    rollouts = random_rollouts(3)
    packs = rollouts.packs(30, by_group)
    assert [pack.row.tolist() for pack in rollouts.split(30, by_group)] == [rows.tolist() for rows in packs]


def test_concat_by_hand():
    first = Rollouts.from_lists(prompts=[[1, 2], [3]], group=[1, 0], completions=[[7], [8, 9]])
    second = Rollouts.from_lists(prompts=[[4]], group=[0, 0], completions=[[6], [5]])
    first.old_logp, second.old_logp = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-4.0, -5.0])
    both = Rollouts.concat([first, second])
    assert both.prompt_token_ids.tolist() == [1, 2, 3, 4]
    assert both.prompt_lengths.tolist() == [2, 1, 1]
    assert both.group.tolist() == [1, 0, 2, 2]
    assert both.token_ids.tolist() == [7, 8, 9, 6, 5]
    assert both.row.tolist() == [0, 1, 2, 3]
    assert both.old_logp.tolist() == [-1, -2, -3, -4, -5]
    assert both.ref_logp is None


@pytest.mark.parametrize("seed", range(5))
def test_concat_says_what_its_parts_say(seed):
    parts = [random_rollouts(seed), random_rollouts(100 + seed), random_rollouts(200 + seed)]
    rows = rows_of(Rollouts.concat(parts))
    assert [row.pop("row") for row in rows] == list(range(len(rows)))
    expected = [row for part in parts for row in rows_of(part)]
    assert rows == [{name: value for name, value in row.items() if name != "row"} for row in expected]


@pytest.mark.parametrize("place", [0, 1])
def test_concat_with_nobody_changes_nothing(place):
    parts = [random_rollouts(0)]
    parts.insert(place, Rollouts.from_lists([], [], []))
    assert rows_of(Rollouts.concat(parts)) == rows_of(random_rollouts(0))


def test_rollouts_of_nobody():
    nobody = Rollouts.from_lists([], [], [])
    assert (len(nobody), nobody.num_tokens) == (0, 0)
    dtypes = {getattr(nobody, name).dtype for name in ("prompt_token_ids", "group", "token_ids", "lengths", "row")}
    assert dtypes == {torch.int64}


def test_row_still_counts_in_the_whole_step_after_two_selections():
    rollouts = rollouts_of([1, 2, 3, 4])
    assert rollouts.select(torch.tensor([3, 1, 0])).select(torch.tensor([1, 0])).row.tolist() == [1, 3]


def test_to_moves_every_tensor_and_keeps_dtypes():
    rollouts = rollouts_of([2, 3], prompt_lengths=[2, 4])
    moved = rollouts.to("meta")
    for name, value in vars(rollouts).items():
        there = getattr(moved, name)
        if name == "sizes":
            assert there is value  # On the host, wherever the rest is.
            continue
        assert (there.device.type, there.dtype, there.shape) == ("meta", value.dtype, value.shape)
        assert value.device.type == "cpu"
    rollouts.old_logp = None
    assert rollouts.to("meta").old_logp is None


def test_half_precision_does_not_reach_into_rollouts():
    rollouts = rollouts_of([2, 3])
    converted = HalfPrecision("bf16-true").convert_input(rollouts)
    assert rows_of(converted) == rows_of(rollouts)
    assert converted.old_logp.dtype == torch.float32


def test_a_log_prob_of_the_wrong_length_or_type_is_an_error():
    rollouts = rollouts_of([2, 3])
    fields = vars(rollouts)
    with pytest.raises(AssertionError):
        Rollouts(**fields | {"old_logp": torch.zeros(4)})
    with pytest.raises(AssertionError):
        Rollouts(**fields | {"old_logp": torch.zeros(5, dtype=torch.bfloat16)})
    with pytest.raises(AssertionError):
        Rollouts(**fields | {"logp_high": torch.zeros(5, dtype=torch.float64)})
    with pytest.raises(AssertionError):
        Rollouts(**fields | {"truncated": torch.zeros(5, dtype=torch.bool)})


def test_one_completion_per_prompt_is_packed_with_its_padding() -> None:
    # Nothing is shared then, so these rows are padded to the longest.
    rollouts = rollouts_of([9, 1, 1, 1], prompt_lengths=[3, 3, 3, 3])
    assert [pack.tolist() for pack in rollouts.packs(20, by_group=True)] == [[0], [1, 2, 3]]
