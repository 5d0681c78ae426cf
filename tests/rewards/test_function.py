"""The reward that is a user's function."""

import math
import time

import pytest

from grpo_lightning.rewards.function import FunctionReward
from grpo_lightning.rewards.scorer import Scorer
from grpo_lightning.types import FinishReason, Prompt, Question, Sample, UsageError

MODULE = """
import numpy as np

def by_text(sample):
    return {
        "good": lambda: 2.5,
        "true": lambda: True,
        "numpy": lambda: np.float32(0.5),
        "hang": lambda: exec("while True: pass"),
        "raise": lambda: {}["key"],
        "hog": lambda: len(bytearray(2**30)),
        "none": lambda: None,
        "nan": lambda: float("nan"),
        "text": lambda: "1.0",
        "dead": lambda: __import__("os")._exit(1),
    }[sample.text]()

def sees(sample):
    return float(
        (sample.prompt, sample.question, sample.text, sample.answer, sample.token_ids, sample.truncated)
        == ("Q: q", "q", "good", "42", [5, 6], True)
        and sample.metadata == {"level": 3}
    )

number = 3

async def waits(sample):
    import asyncio, time
    await asyncio.sleep(0.2)
    if sample.text == "wait":
        await asyncio.sleep(60)
    if sample.text == "block":
        time.sleep(60)
    if sample.text == "own timeout":
        raise TimeoutError("the server's")
    return by_text(sample)

loops = set()

async def same_loop(sample):
    import asyncio
    loops.add(asyncio.get_running_loop())
    return len(loops)
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "users_rewards.py"
    path.write_text(MODULE)
    return path


@pytest.fixture(scope="module")
def reward(module):
    reward = FunctionReward(f"{module}:by_text", timeout=0.5, memory_limit_mb=512)
    yield reward
    reward.close()


def sample(text: str) -> Sample:
    question = Question("q", "42", "train.jsonl:17", {"level": 3})
    return Sample(Prompt(0, "Q: q", [1], question), text, [5, 6], FinishReason.LENGTH)


def test_each_failure_costs_its_own_sample(reward):
    texts = ["good", "hang", "true", "raise", "hog", "numpy", "none", "nan", "text", "dead", "good"]
    result = reward([sample(text) for text in texts])
    assert result.status == [
        "ok", "timeout", "ok", "error", "memory", "ok",
        "not_a_number", "not_a_number", "not_a_number", "crash", "ok",
    ]  # fmt: skip
    expected = [2.5, None, 1.0, None, None, 0.5, None, None, None, None, 2.5]
    assert [None if math.isnan(value) else value for value in result.value] == expected


def test_failures_are_told_once_per_step_with_their_count_and_an_example(module, caplog):
    scorer = Scorer([FunctionReward(f"{module}:by_text", name="mine")])
    for _ in range(2):
        scorer([sample("raise"), sample("none"), sample("raise"), sample("good")])
        scorer([sample("good"), sample("none"), sample("raise"), sample("good")])
        scorer.report()
    assert caplog.messages == 2 * [
        "reward mine failed on 5 of 8 samples (error: 3, not_a_number: 2), for example on a sample of "
        "train.jsonl:17, 'raise': KeyError: 'key'"
    ]
    scorer([sample("none")])
    scorer.report()
    assert caplog.messages[2].endswith("'none': it returned None")
    scorer.close()


def test_what_the_function_sees(module):
    reward = FunctionReward(f"{module}:sees")
    reward.read_questions([])
    assert reward.name == "sees"
    assert reward([sample("good")]).value == [1.0]
    reward.close()


def test_dotted_paths_and_the_working_directory(module, monkeypatch):
    monkeypatch.chdir(module.parent)
    for function in ("users_rewards.sees", "users_rewards:sees", "users_rewards.py:sees"):
        reward = FunctionReward(function)
        assert reward([sample("good")]).value == [1.0]
        reward.close()


def test_an_async_function_is_awaited(module):
    reward = FunctionReward(f"{module}:waits", timeout=1.0, num_workers=1)
    reward.read_questions([])
    result = reward([sample(text) for text in ("good", "wait", "raise", "own timeout", "none", "true")])
    assert result.status == ["ok", "timeout", "error", "error", "not_a_number", "ok"]
    assert result.value[0] == 2.5
    assert result.value[5] == 1.0
    reward.close()


def test_one_worker_has_one_event_loop(module):
    """What a module keeps open, such as an HTTP client, belongs to the loop it was made in."""
    for concurrency in (1, 2):
        reward = FunctionReward(f"{module}:same_loop", num_workers=1, concurrency=concurrency)
        assert reward([sample("good")] * 4).value == [1.0] * 4
        reward.close()


def test_async_calls_wait_together(module):
    reward = FunctionReward(f"{module}:waits", timeout=1.0, num_workers=1, concurrency=8)
    reward.read_questions([])
    started = time.monotonic()
    assert reward([sample("good")] * 16).value == [2.5] * 16
    assert 0.4 <= time.monotonic() - started < 1.5  # two rounds of 0.2 s; one by one they take 3.2 s
    reward.close()


def test_a_failure_among_those_that_wait_together_is_its_own(module):
    reward = FunctionReward(f"{module}:waits", timeout=0.6, num_workers=1, concurrency=4)
    texts = ["good", "wait", "raise", "own timeout", "good", "none", "dead", "true", "block", "numpy"]
    result = reward([sample(text) for text in texts])
    assert result.status == [
        "ok", "timeout", "error", "error", "ok", "not_a_number", "crash", "ok", "timeout", "ok",
    ]  # fmt: skip
    expected = [2.5, None, None, None, 2.5, None, None, 1.0, None, 0.5]
    assert [None if math.isnan(value) else value for value in result.value] == expected
    reward.close()


def test_only_async_functions_wait_together(module):
    with pytest.raises(UsageError, match=r"by_text is not an `async def`"):
        FunctionReward(f"{module}:by_text", concurrency=2).read_questions([])
    with pytest.raises(UsageError, match="concurrency=0"):
        FunctionReward(f"{module}:waits", concurrency=0)


@pytest.mark.parametrize("function", ["sees", "", "my_rewards.", "path/to/my_rewards.py", "my_rewards:"])
def test_not_an_import_path(function):
    with pytest.raises(UsageError, match="import path"):
        FunctionReward(function)


@pytest.mark.parametrize("name", ["missing", "number"])
def test_what_cannot_be_imported_is_said_before_the_run(module, name):
    reward = FunctionReward(f"{module}:{name}")
    with pytest.raises(UsageError, match=f"{name}"):
        reward.read_questions([])
    with pytest.raises(UsageError, match="no_such_module"):
        FunctionReward("no_such_module.f").read_questions([])


@pytest.mark.parametrize("function", [lambda sample: 1.0, len, None], ids=["lambda", "function", "None"])
def test_a_function_itself_is_refused_with_what_to_give_instead(function):
    with pytest.raises(UsageError, match=r"function=.*give its import path as text, such as 'my_rewards.shorter'"):
        FunctionReward(function)
