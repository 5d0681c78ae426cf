"""Rewards that wait score completions while others are still drawn; numbers stay those of scoring them afterwards."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from helpers.fast import policy_of
from helpers.fitting import Digits
from helpers.games import explore as explore_games
from helpers.games import player
from helpers.tiny import prompts_of
from helpers.waiting import LIMIT

from grpo_lightning import Exploration, Explorer, NativeEngine, RandomKey, RewardResult, Sample, Sampling, Scorer
from grpo_lightning.plugins.data.conversations.dialogue import PLAIN
from grpo_lightning.plugins.engines.native import native_batch as batch_module


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
    return explorer.explore(policy_of("gpt2"), prompts_of([3, 5, 1])[:count], 4, sampling, RandomKey(1, 0))


def test_a_reward_begins_before_the_native_engine_has_drawn_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    reward, draw, positions = Waits(), batch_module.sample_tokens, 0

    def waiting(*args: Any) -> Any:
        nonlocal positions
        positions += 1
        # The last look before this position was at the one before: rows had ended by then.
        assert positions < 32 or reward.begun.wait(LIMIT)
        return draw(*args)

    monkeypatch.setattr(batch_module, "sample_tokens", waiting)
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
    for name in ("token_ids", "lengths", "group", "sample_index", *(["sampler_logp", "truncated"] if count else [])):
        assert getattr(actual.rollouts, name).equal(getattr(expected.rollouts, name))


def test_conversations_are_scored_as_they_end() -> None:
    reward = Waits()
    _, found = explore_games(player(), PLAIN, reward)
    # Those of one turn come first; each is scored once.
    assert sorted(reward.seen) == sorted(sample.token_ids for sample in found.samples)
    assert found.scores.results["waits"].value == Digits().score(found.samples).value
