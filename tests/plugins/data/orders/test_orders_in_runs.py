"""Orders of questions in whole runs: killed and resumed, late rollouts, two ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.elsewhere import Elsewhere
from helpers.fitting import Digits, EarlyDigits, Echo, fit, resumes_exactly, scalars
from helpers.killing import command, prepare
from helpers.programs import programs

from examples.curriculum import Curriculum
from grpo_lightning.maths.filters import DynamicSampling
from grpo_lightning.plugins.data.orders.difficulty_pools import DifficultyPools
from grpo_lightning.plugins.data.orders.replayed import Replayed
from grpo_lightning.plugins.sources.asynchronous.one_step_off_policy import OneStepOffPolicy
from grpo_lightning.plugins.sources.stale.stale_source import StaleSource
from grpo_lightning.tasks.orders import QuestionOrder
from grpo_lightning.training.task_data import TaskData
from grpo_lightning.types import Question, Sample


class Leveled(Echo):
    """Questions with a column."""

    def questions(self, split: str) -> list[Question]:
        return [Question(q.text, q.answer, q.source, {"level": len(q.text) % 2}) for q in super().questions(split)]


def a_fifth(sample: Sample, share: float) -> float:
    """Right are those with a fifth of digits: some groups are all wrong."""
    return float(share > 0.2)


class Noted(DifficultyPools):
    """Notes the rewards that it observes."""

    def setup(self, questions: Any, seed: int) -> None:
        super().setup(questions, seed)
        self.observed: list[dict[int, list[float]]] = []

    def observe(self, rewards: Any) -> dict[str, float]:
        self.observed.append({**rewards})
        return super().observe(rewards)


def orders() -> list[QuestionOrder]:
    return [DifficultyPools(), Replayed(fraction=0.8), Curriculum("level", [0, 1], accuracy=0.3, window=4)]


LATE: dict[str, Callable[[], dict[str, Any]]] = {
    "rounds": lambda: {"loop": {"dynamic_sampling": DynamicSampling(max_rounds=3), "source": StaleSource(2)}},
    "ahead": lambda: {"loop": {"source": OneStepOffPolicy()}, "engine": Elsewhere()},
}


@pytest.mark.parametrize("late", LATE.values(), ids=LATE)
@pytest.mark.parametrize("index", range(3))
def test_orders_resume_with_late_rollouts(tmp_path: Path, index: int, late: Callable[[], dict[str, Any]]) -> None:
    def options() -> dict[str, Any]:
        fields = late()
        fields["loop"]["prompts_per_step"] = 3
        data = TaskData(Leveled(), seed=3, order=orders()[index])
        return fields | {"data": data, "rewards": [EarlyDigits(change=a_fifth)]}

    resumes_exactly(tmp_path, options, steps=5, cut=3)


def test_the_order_is_told_the_rewards_of_every_round(tmp_path: Path) -> None:
    order = Noted()
    loop = {"dynamic_sampling": DynamicSampling(max_rounds=3)}
    fit(tmp_path, loop=loop, data=TaskData(Echo(), order=order), rewards=[Digits(change=a_fifth)])
    ids = [id for rewards in order.observed for id in rewards]
    assert ids == [*range(len(ids))] and len(ids) > 12 and len(order.observed) == 3 and not order.row_by_id
    assert all(len(values) == 4 for rewards in order.observed for values in rewards.values())
    pools = [scalars(tmp_path)[f"order/{name}"][2] for name in ("new", "middling", "hard", "easy")]
    assert sum(pools) == pytest.approx(1) and pools[0] < 1


NOTED = """
from pathlib import Path

from grpo_lightning import DifficultyPools
from grpo_lightning.ranks import rank, world_size


class Noted(DifficultyPools):
    \"\"\"Writes what it asks.\"\"\"

    def next(self, ids):
        rows = super().next(ids)
        with Path(f"rank-{rank()}-of-{world_size()}.txt").open("a") as file:
            file.write(f"{ids} {rows}\\n")
        return rows
"""


@pytest.mark.whole
def test_two_ranks_ask_what_one_asks(tmp_path: Path) -> None:
    prepare(tmp_path)
    (tmp_path / "noted.py").write_text(NOTED)
    options = ["--data.order=noted.Noted", "--loop.dynamic_sampling.max_rounds=2", "--loop.source=StaleSource"]
    options += ["--model.policy.dropout=false", "--trainer.max_epochs=3"]
    for name, devices in {"one": [], "two": ["--trainer.devices=2", "--trainer.strategy=ddp"]}.items():
        with programs({name: command(tmp_path / name, *options, *devices)}, tmp_path, anew=True) as started:
            assert started[name].wait() == 0, started[name].errors
    [one], [first, second] = (sorted(tmp_path.glob(f"rank-*-of-{world}.txt")) for world in (1, 2))
    assert one.read_text() == first.read_text() == second.read_text()
    alone, together = scalars(tmp_path / "one"), scalars(tmp_path / "two")
    assert alone["order/middling"] == together["order/middling"]
