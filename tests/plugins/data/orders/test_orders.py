"""Orders of questions: what each asks, and that a state goes on where it was."""

import io
import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from helpers.contracts import members

from examples.curriculum import Curriculum
from grpo_lightning.plugins.data.orders.difficulty_pools import DifficultyPools
from grpo_lightning.plugins.data.orders.replayed import Replayed
from grpo_lightning.tasks.orders import QuestionOrder, Shuffled
from grpo_lightning.types import Question, UsageError

ORDERS: dict[str, Callable[[], QuestionOrder]] = {
    "Shuffled": Shuffled,
    "DifficultyPools": DifficultyPools,
    "Replayed": lambda: Replayed(fraction=0.7),
    "Curriculum": lambda: Curriculum("level", ["low", "high"], accuracy=0.4, window=6, review=0.3),
}


def questions(count: int = 20) -> list[Question]:
    """Of two levels; `rank` is a number, and the higher the easier."""
    return [
        Question(f"q{row}", "", f"q:{row}", {"level": "high" if row % 3 else "low", "rank": str(row)})
        for row in range(count)
    ]


def set_up(order: QuestionOrder, count: int = 20) -> QuestionOrder:
    order.setup(questions(count), seed=5)
    return order


def rewards_of(id: int, row: int) -> list[float]:
    """Of four completions; some rows are never solved, some always; now and then one has failed."""
    chance = Random(f"{id} {row}")
    values = [float(chance.random() < (row % 5) / 4) for _ in range(4)]
    return [math.nan, *values[1:]] if chance.random() < 0.1 else values


def walk(order: QuestionOrder, first_step: int, lag: int, row_by_id: dict[int, int], states: list[bytes]) -> list[Any]:
    """Asks two rounds per step and observes `lag` steps later, up to step 12; appends the state after each step."""
    results: list[Any] = []
    for step in range(first_step, 12):
        for ids in (range(step * 5, step * 5 + 3), range(step * 5 + 3, step * 5 + 5)):
            results.append(order.next(ids))
            row_by_id |= dict(zip(ids, results[-1], strict=True))
        if step >= lag:
            start = (step - lag) * 5
            results.append(order.observe({id: rewards_of(id, row_by_id[id]) for id in range(start, start + 5)}))
        file = io.BytesIO()
        torch.save(order.state_dict(), file)
        states.append(file.getvalue())
    return results


def test_every_order_is_here() -> None:
    assert {kind.__name__ for kind in members(QuestionOrder)} | {"Curriculum"} == ORDERS.keys()


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("name", ORDERS)
def test_a_saved_state_goes_on_where_it_was(name: str, lag: int) -> None:
    row_by_id: dict[int, int] = {}
    states: list[bytes] = []
    expected = walk(set_up(ORDERS[name]()), 0, lag, row_by_id, states)
    assert all(0 <= row < 20 for row in row_by_id.values())
    for cut in (1, 5, 9):
        order = set_up(ORDERS[name]())
        order.load_state_dict(torch.load(io.BytesIO(states[cut - 1]), weights_only=True))
        actual = walk(order, cut, lag, {**row_by_id}, [])
        assert actual == expected[-len(actual) :] and actual


def test_an_order_begins_anew_with_other_questions_and_after_another_order(caplog: pytest.LogCaptureFixture) -> None:
    pools, replayed = set_up(DifficultyPools()), set_up(Replayed())
    pools.next(range(4))
    for state, count in ((pools.state_dict(), 21), (replayed.state_dict(), 20)):
        anew = set_up(DifficultyPools(), count)
        anew.load_state_dict(state)
        assert anew.next(range(4)) == set_up(DifficultyPools(), count).next(range(4))
    assert [message.split(":")[0] for message in caplog.messages] == ["data.order=DifficultyPools"] * 2
    shuffled = set_up(Shuffled())
    shuffled.load_state_dict(pools.state_dict())
    assert shuffled.next(range(4)) == set_up(Shuffled()).next(range(4))


def test_pools_by_pass_rate() -> None:
    order = set_up(DifficultyPools({"new": 1, "middling": 0, "hard": 0, "easy": 0}, memory=0.75), 8)
    first = order.next(range(4))
    assert first == set_up(Shuffled(), 8).next(range(4))  # new ones come as they are shuffled
    values = ([0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [math.nan, math.nan])
    metrics = order.observe(dict(enumerate(values)))
    assert metrics == {"order/new": 5 / 8, "order/middling": 1 / 8, "order/hard": 1 / 8, "order/easy": 1 / 8}
    hard, middling, easy, failed = first
    for pool, row in (("hard", hard), ("middling", middling), ("easy", easy)):
        order.parts = dict.fromkeys(order.parts, 0.0) | {pool: 1.0}
        assert order.next(range(10, 11)) == [row]
        assert order.next(range(11, 12)) != [row]  # it waits for its rewards
        order.observe({10: [], 11: []})
    # 3/4 * 0 + 1/4 * 1 is middling, and so is 3/4 * 1 + 1/4 * 0: a question comes back as the policy changes.
    order.row_by_id = {20: hard, 21: easy, 22: middling}
    order.observe({20: [1.0], 21: [0.0], 22: [1.0]})
    assert [float(order.rate[row]) for row in (hard, easy, middling)] == [0.25, 0.75, 0.625]
    assert torch.isnan(order.rate[failed])
    # Inside the pool the one asked longest ago comes first.
    order.parts = dict.fromkeys(order.parts, 0.0) | {"middling": 1.0}
    order.last[torch.tensor([hard, easy, middling])] = torch.tensor([7, 9, 8])
    assert order.next(range(30, 33)) == [hard, middling, easy]


def test_the_parts_of_the_pools_are_their_fractions() -> None:
    order = set_up(DifficultyPools({"new": 1, "middling": 3, "hard": 0, "easy": 0}), 4000)
    order.rate[::2] = 0.5
    rows = order.next(range(1600))
    assert sum(row % 2 == 0 for row in rows) / 1600 == pytest.approx(0.75, abs=0.03)
    assert len({*rows}) == 1600
    few = set_up(DifficultyPools(), 3)
    assert {*few.next(range(7))} == {0, 1, 2}  # more than there are


def test_what_was_rarely_solved_is_asked_again() -> None:
    order = set_up(Replayed(most_solved=2, fraction=1.0))
    stream = set_up(Shuffled()).next(range(20))
    assert order.next(range(5)) == stream[:5]
    # None right, one, two, three, and one of those that could be scored.
    values = ([0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 1], [1, 1, 1, 0], [math.nan, 1, 0, 0])
    assert order.observe(dict(enumerate(values))) == {"order/waiting": 3}
    assert order.next(range(5, 10)) == [stream[1], stream[2], stream[4], stream[5], stream[6]]
    assert order.observe({5: [0, 1, 0, 0], 6: [1, 1, 1, 1]}) == {"order/waiting": 1}
    order.row_by_id[10] = stream[1]  # while it waits already
    assert order.observe({10: [0, 1, 0, 0]}) == {"order/waiting": 1}
    rare = set_up(Replayed(fraction=0.0))
    rare.waiting = [3]
    assert rare.next(range(20)) == stream


def stages_of(order: QuestionOrder, rewards: Callable[[int], float], steps: int) -> list[list[Any]]:
    """The values of the column of what is asked in each step, where row r earns `rewards(r)`."""
    found = []
    for step in range(steps):
        ids = range(step * 4, step * 4 + 4)
        rows = order.next(ids)
        found.append(sorted({order.questions[row].metadata["level"] for row in rows}))
        order.observe({id: [rewards(row)] for id, row in zip(ids, rows, strict=True)})
    return found


def test_stages_end_by_steps_or_by_accuracy() -> None:
    by_steps = set_up(Curriculum("level", ["low", "high"], steps=3, accuracy=None, review=0.0))
    assert stages_of(by_steps, lambda row: 0.0, 5) == [["low"]] * 3 + [["high"]] * 2
    # Eight groups fill the window after two steps.
    solved = set_up(Curriculum("level", ["low", "high"], accuracy=1.0, window=8, review=0.0))
    assert stages_of(solved, lambda row: 1.0, 4) == [["low"]] * 2 + [["high"]] * 2
    never = set_up(Curriculum("level", ["low", "high"], accuracy=0.5, window=8, review=0.0))
    assert stages_of(never, lambda row: 0.4, 4) == [["low"]] * 4
    reviews = set_up(Curriculum("level", ["low", "high"], steps=1, review=0.5))
    low = sum(row % 3 == 0 for row in (reviews.next(range(1)), reviews.observe({}), reviews.next(range(1, 401)))[2])
    assert low / 400 == pytest.approx(0.5, abs=0.08)


@pytest.mark.parametrize("descending", [False, True])
def test_a_number_of_stages_cuts_the_sorted_questions(descending: bool) -> None:
    order = set_up(Curriculum("rank", 3, descending, steps=1, review=0.0))
    stages = []
    for step in range(3):
        stages.append({*order.next(range(step * 20, step * 20 + 20))})
        order.observe({})
    easy, middle, hard = stages[::-1] if descending else stages
    assert max(easy) < min(middle) and max(middle) < min(hard) and [*map(len, stages)] == [6, 7, 7]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DifficultyPools({"hot": 1}), "give any of new, middling, hard, easy"),
        (lambda: DifficultyPools(dict.fromkeys(("new", "middling", "hard", "easy"), 0)), "not 0 for all four"),
        (lambda: DifficultyPools(hard=1.0), "data.order.hard=1.0: give less"),
        (lambda: Replayed(0), "data.order.most_solved=0"),
        (lambda: Curriculum("level", ["low"], accuracy=None), "no stage would end"),
        (lambda: set_up(Curriculum("lebel", ["low"])), "'lebel': q:0 has no such column"),
        (lambda: set_up(Curriculum("level", ["low", "mid"])), r"no question has \['mid'\] in column 'level'"),
        (lambda: set_up(Curriculum("level", 2)), "could not convert string to float: 'low' in column 'level'"),
    ],
)
def test_mistakes(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()
