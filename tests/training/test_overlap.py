"""Rewards that wait score completions while others are still drawn; numbers stay those of scoring them afterwards."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.fitting import Digits, fit, scalars
from helpers.games import explore as explore_games
from helpers.games import player
from helpers.tiny import policy_of, prompts_of
from helpers.waiting import LIMIT

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.scripted import ScriptedEngine
from grpo_lightning.plugins.conversations.dialogue import PLAIN
from grpo_lightning.plugins.fast import batch as batch_module
from grpo_lightning.plugins.fast.native import NativeEngine
from grpo_lightning.rewards.function import FunctionReward
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.rewards.scorer import Scorer
from grpo_lightning.training.explorer import Exploration, Explorer
from grpo_lightning.types import Request, Sample

"""How long one thread waits for another before the test fails."""


class Waits(Digits):
    """Says when it begins, as one does that waits for a server."""

    scores_early = True

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.seen: list[list[int]] = []

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        self.seen += [sample.token_ids for sample in samples]
        self.begun.set()
        return super().score(samples)


def explore(explorer: Explorer, stop: Sequence[str] = (), count: int = 3) -> Exploration:
    sampling = Sampling(max_new_tokens=32, stop=list(stop))
    return explorer.explore(policy_of("gpt2"), prompts_of([3, 5, 1])[:count], 4, sampling, seed=1, step=0)


def test_a_reward_begins_before_the_native_engine_has_drawn_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    reward, draw, positions = Waits(), batch_module.draw, 0

    def waiting(*args: Any) -> Any:
        nonlocal positions
        positions += 1
        # The last look before this position was at the one before: rows had ended by then.
        assert positions < 32 or reward.begun.wait(LIMIT)
        return draw(*args)

    monkeypatch.setattr(batch_module, "draw", waiting)
    found = explore(Explorer(NativeEngine(check_every=1), Scorer([reward])))
    assert positions == 32
    lengths = [len(sample.token_ids) for sample in found.samples]
    assert min(lengths) < 32 == max(lengths)
    # Shorter ones first, and each once.
    assert [len(ids) for ids in reward.seen] == sorted(lengths)


@pytest.mark.parametrize("count", [3, 0], ids=["prompts", "a rank without prompts"])
@pytest.mark.parametrize("stop", [(), ("a", "7", "<eos>")])
def test_the_exploration_is_that_of_scoring_afterwards(stop: Sequence[str], count: int) -> None:
    early, late = Waits(), Waits()
    late.scores_early = False
    actual = explore(Explorer(NativeEngine(check_every=2), Scorer([early])), stop, count)
    expected = explore(Explorer(NativeEngine(check_every=2), Scorer([late])), stop, count)
    assert repr(actual.samples) == repr(expected.samples)
    assert actual.scores == expected.scores
    assert all(sample.token_ids in early.seen for sample in actual.samples)
    assert late.seen == [sample.token_ids for sample in expected.samples]
    for name in ("token_ids", "lengths", "group", "row", *(["sampler_logp", "truncated"] if count else [])):
        assert getattr(actual.rollouts, name).equal(getattr(expected.rollouts, name))


def test_an_engine_that_fails_ends_what_waits() -> None:
    reward = Waits()

    def script(request: Request, text: str) -> str:
        if request.prompt_id > 10:
            assert reward.begun.wait(LIMIT)
            raise ConnectionError("the engine is gone")
        return "7"

    with pytest.raises(ConnectionError, match="the engine is gone"):
        explore(Explorer(ScriptedEngine(script), Scorer([reward])))


def test_conversations_are_scored_when_all_have_ended() -> None:
    reward = Waits()
    _, found = explore_games(player(), PLAIN, reward)
    assert reward.seen == [sample.token_ids for sample in found.samples]
    assert found.scores.results["waits"].value == Digits().score(found.samples).value


REWARD = """
def graded(sample):
    if "b" in sample.text: raise KeyError("gone")
    return sum(c.isdigit() for c in sample.text) / max(1, len(sample.text))
"""


def test_a_run_has_the_numbers_of_one_that_scores_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards.py").write_text(REWARD)

    def run(name: str) -> Any:
        reward = FunctionReward(f"{tmp_path / 'rewards.py'}:graded", num_workers=3)
        engine = NativeEngine(check_every=1, max_rows=6)
        options = {"max_epochs": 2, "limit_val_batches": 1}
        return fit(tmp_path / name, trainer=options, engine=engine, rewards=[reward, Digits(weight=0.5)])

    early = run("early").policy.state_dict()
    monkeypatch.setattr(FunctionReward, "scores_early", False)
    late = run("late").policy.state_dict()
    assert all(value.equal(late[name]) for name, value in early.items())
    numbers = scalars(tmp_path / "early")
    assert repr(numbers) == repr(scalars(tmp_path / "late"))
    assert max(numbers["reward/graded/error"].values()) > 0 and "val/greedy" in numbers
