"""Scores of samples that come one after another: those of all at once, found in threads."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from helpers.fitting import Exact, Product
from helpers.tiny import prompts_of
from helpers.waiting import LIMIT

from grpo_lightning import FormatReward, FunctionReward, Reward, RewardResult, Scorer
from grpo_lightning.types import Conversation, FinishReason, Sample, Status

THREADS = "grpo-reward"

MODULE = """
import os

def graded(sample):
    if sample.text == "raise": raise KeyError("gone")
    if sample.text == "dead": os._exit(1)
    return float("nan") if sample.text == "nan" else len(sample.text)

def hangs(sample):
    open(sample.text, "w").close()
    while True: pass
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "early_rewards.py"
    path.write_text(MODULE)
    return path


def sample(text: str, prompt: int = 0, status: str | None = None) -> Sample:
    conversation = None if status is None else Conversation(status=status, error="broken")
    return Sample(prompts_of([3, 4])[prompt], text, [7, 8], FinishReason.STOP, conversation=conversation)


class Early(Reward):
    """Notes what it scores together; waits for `go` first."""

    scores_early = True

    def __init__(self, name: str = "early") -> None:
        super().__init__(name=name)
        self.begun, self.go = threading.Event(), threading.Event()
        self.batches: list[list[str]] = []
        self.threads: set[str] = set()

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        self.begun.set()
        assert self.go.wait(LIMIT)
        self.batches.append([one.text for one in samples])
        self.threads.add(threading.current_thread().name)
        return RewardResult([float(one.text) for one in samples])


class Late(Early):
    """The same, of all samples together."""

    scores_early = False


class Shortness(Reward):
    """It is scored at the end, as a reward is that does not say otherwise."""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        return RewardResult([-float(len(one.token_ids)) for one in samples])


@pytest.fixture
def rewards(module: Path) -> Iterator[Callable[[], list[Reward]]]:
    with ExitStack() as stack:

        def make() -> list[Reward]:
            rewards = [
                Exact(),
                FunctionReward(f"{module}:graded", num_workers=3, weight=0.1),
                Product(FormatReward(pattern=".*boxed.*"), Exact(), weight=0.7),
                Shortness(weight=-0.3),
            ]
            for reward in rewards:
                stack.callback(reward.close)
            return rewards

        yield make


def test_scores_and_counts_are_those_of_all_samples_at_once(rewards: Callable[[], list[Reward]]) -> None:
    texts = [r"\boxed{1}", "raise", r"\boxed{\frac{2}{2}}", "nan", r"\boxed{x+2}", "dead", r"\boxed{2}", "1", ""]
    samples = [sample(text, prompt) for prompt in range(2) for text in texts]
    samples.insert(4, sample("lost", status=Status.TIMEOUT))
    scorable = [one for one in samples if not one.failed]
    random.Random(1).shuffle(scorable)
    together, apart = Scorer(rewards()), Scorer(rewards())
    expected = together(samples)
    with apart.begin() as scoring:
        assert list(scoring.early) == ["exact", "graded", "product"]
        for one in scorable[:5]:
            scoring.add(one)
        actual = scoring.scores(samples)
    # NaN is not equal to itself.
    assert repr(actual) == repr(expected)
    assert list(actual.results) == list(expected.results)
    for own, other in zip(apart.rewards, together.rewards, strict=True):
        for part, whole in zip(own.with_parts(), other.with_parts(), strict=True):
            assert (part.tally.statuses, part.tally.failed) == (whole.tally.statuses, whole.tally.failed)
            assert part.tally.examples.keys() == whole.tally.examples.keys()
    assert apart.rewards[1].tally.failed == {"error": 2, "not_a_number": 2, "crash": 2, "timeout": 1}


def test_rewards_begin_early_and_score_waiting_samples_together() -> None:
    reward, late = Early(), Late("late")
    late.go.set()
    samples = [sample(str(number)) for number in range(5)]
    with Scorer([late, reward]).begin() as scoring:
        scoring.add(samples[3])
        assert reward.begun.wait(LIMIT)
        for number in (4, 0):
            scoring.add(samples[number])
        assert not late.begun.is_set()
        reward.go.set()
        scores = scoring.scores(samples)
    assert reward.batches[0] == ["3"]
    # The last two came with or after those before them, as the threads ran.
    assert [text for batch in reward.batches for text in batch] == ["3", "4", "0", "1", "2"]
    assert late.batches == [["0", "1", "2", "3", "4"]]
    assert scores.total == [0, 2, 4, 6, 8] and list(scores.results) == ["late", "early"]
    assert reward.threads == {f"{THREADS}-early"} and late.threads == {threading.main_thread().name}


def test_two_rewards_wait_at_the_same_time() -> None:
    first, second = Early("first"), Early("second")
    # Each is let go by the other one: in turn they would wait for ever.
    first.go, second.go = second.begun, first.begun
    with Scorer([first, second]).begin() as scoring:
        assert scoring.scores([sample("1")]).total == [2.0]


def test_a_sample_that_is_the_same_as_another_is_scored_too() -> None:
    reward = Early()
    reward.go.set()
    samples = [sample("1"), sample("1")]
    with Scorer([reward]).begin() as scoring:
        for one in reversed(samples):
            scoring.add(one)
        assert scoring.scores(samples).total == [1, 1]
    assert reward.tally.num_samples == 2


@pytest.mark.parametrize("around", [lambda inner: inner, lambda inner: Product(inner, Exact())])
def test_a_reward_that_is_in_the_list_twice_is_called_from_one_thread(around: Any) -> None:
    shared, alone = Early("shared"), Early("alone")
    scorer = Scorer([Product(shared, Exact(), name="a"), alone, around(shared)])
    with scorer.begin() as scoring:
        assert list(scoring.early) == ["alone"]


class Leaves(Early):
    """Ends the program."""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        raise SystemExit(7)


def test_a_reward_that_ends_the_program_does_so_in_a_thread_too() -> None:
    with pytest.raises(SystemExit, match="7"), Scorer([Leaves()]).begin() as scoring:
        scoring.scores([sample("1")])


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREADS)]


@pytest.mark.parametrize("when", ["sampling", "scoring"])
def test_what_stops_the_step_ends_the_workers_at_once(module: Path, tmp_path: Path, when: str) -> None:
    reward, late = FunctionReward(f"{module}:hangs", timeout=10 * LIMIT), Late()
    samples = [sample(str(tmp_path / name)) for name in "ab"]

    def stop(_: object = None) -> Any:
        while not Path(samples[0].text).exists():  # the worker has begun
            assert threads()
        raise KeyboardInterrupt

    late.score = stop  # type: ignore[method-assign]

    def step() -> None:
        with Scorer([reward, late]).begin() as scoring:
            scoring.add(samples[0])
            stop() if when == "sampling" else scoring.scores(samples)

    with pytest.raises(KeyboardInterrupt):
        step()
    for thread in threads():
        thread.join(LIMIT)
    assert not threads()
    assert not reward._pool._running
    assert reward.tally.num_samples == 0
