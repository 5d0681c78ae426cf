"""The reward that is a user's function."""

import importlib
import math
import re
import sys
from contextlib import ExitStack
from types import FunctionType

import pytest
from helpers.waiting import LIMIT

from grpo_lightning import FormatReward, FunctionReward, Scorer
from grpo_lightning.rewards.function import as_reward
from grpo_lightning.training.evaluation import Validation
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

import asyncio, time

async def waits(sample):
    await asyncio.sleep(0.01)
    if sample.text == "wait":
        await asyncio.sleep(60)
    if sample.text == "block":
        time.sleep(60)
    if sample.text == "own timeout":
        raise TimeoutError("the server's")
    return by_text(sample)

meeting = asyncio.Barrier(8)

async def meets(sample):
    await meeting.wait()
    return 2.5

def naps(sample):
    time.sleep(1.0)
    return 2.5

def longest(samples):
    if samples[0].question == "raise":
        raise ValueError(samples[0].question)
    if samples[0].question == "one number":
        return 1.0
    most = max(len(sample.text) for sample in samples)
    return np.array([float(len(sample.text) == most) for sample in samples])

async def longest_later(samples):
    return longest(samples)

def of_trl(completions, **kwargs):
    return [float(len(completion)) for completion in completions]

def of_trl_with_prompts(prompts, completions, **kwargs):
    return [1.0] * len(prompts)

def of_two(sample, level):
    return 1.0

def misreads(sample):
    return sample.completion

loops = set()

async def same_loop(sample):
    loops.add(asyncio.get_running_loop())
    return len(loops)
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "users_rewards.py"
    path.write_text(MODULE)
    return path


@pytest.fixture
def make(module):
    """Makes the reward of a function of the module, which is closed after the test."""
    with ExitStack() as stack:

        def make(name, **kwargs):
            reward = FunctionReward(f"{module}:{name}", **kwargs)
            stack.callback(reward.close)
            return reward

        yield make


def sample(text: str) -> Sample:
    question = Question("q", "42", "train.jsonl:17", {"level": 3})
    return Sample(Prompt(0, "Q: q", [1], question), text, [5, 6], FinishReason.LENGTH)


def test_each_failure_costs_its_own_sample(make):
    reward = make("by_text", timeout=2.0, memory_limit_mb=512)
    texts = ["good", "hang", "true", "raise", "hog", "numpy", "none", "nan", "text", "dead", "good"]
    result = reward([sample(text) for text in texts])
    assert result.status == [
        "ok", "timeout", "ok", "error", "memory", "ok",
        "not_a_number", "not_a_number", "not_a_number", "crash", "ok",
    ]  # fmt: skip
    expected = [2.5, None, 1.0, None, None, 0.5, None, None, None, None, 2.5]
    assert [None if math.isnan(value) else value for value in result.value] == expected
    examples = reward.tally.examples
    assert examples["not_a_number"] == (
        "a sample of train.jsonl:17, 'none': it returned None (NoneType); return a finite number"
    )
    assert re.fullmatch(r".*, 'raise': users_rewards.py:\d+: KeyError: 'key'", examples["error"])


def constant(sample):
    return 0.25


def test_a_plain_function_is_a_reward(module, monkeypatch):
    monkeypatch.syspath_prepend(module.parent)
    scorer = Scorer([importlib.import_module("users_rewards").sees])
    assert [reward.name for reward in scorer.rewards] == ["sees"]
    assert scorer([sample("good")] * 2).total == [1.0, 1.0]
    scorer.close()
    assert Validation(grader=constant).grader.function == f"{__name__}:constant"  # type: ignore[arg-type, union-attr]
    assert Validation().grader is None


def test_a_function_of_a_script_is_imported_from_its_file(module, monkeypatch):
    script = type(math)("__main__")
    script.__file__ = str(module)
    monkeypatch.setitem(sys.modules, "__main__", script)
    local = FunctionType(constant.__code__, {"__name__": "__main__"})
    assert as_reward(local).function == f"{module}:constant"
    del script.__file__  # a notebook
    with pytest.raises(UsageError, match=r"constant: worker processes import .* by its name: write it at the top"):
        as_reward(local)


def test_what_cannot_be_imported_is_no_reward():
    def local(sample):
        return 1.0

    for odd in (lambda sample: 1.0, local):
        with pytest.raises(UsageError, match=r"write it at the top of a file"):
            Scorer([odd])
    for odd in ("MathVerifier", FormatReward, None):
        with pytest.raises(UsageError, match=r" is no reward: give an object of a class of rewards, or a function"):
            Scorer([odd])


def test_a_call_that_waits_longer_than_it_may_compute_is_no_failure(make):
    reward = make("naps", timeout=0.5)
    assert reward([sample("good")]).status == ["ok"]


def test_dotted_paths_and_the_working_directory(module, monkeypatch):
    monkeypatch.chdir(module.parent)
    for function in ("users_rewards.sees", "users_rewards.py:sees"):
        reward = FunctionReward(function)
        assert reward([sample("good")]).value == [1.0]
        reward.close()


def test_one_worker_has_one_event_loop(make):
    """What a module keeps open, such as an HTTP client, belongs to the loop it was made in."""
    for concurrency in (1, 2):
        reward = make("same_loop", num_workers=1, concurrency=concurrency)
        assert reward([sample("good")] * 4).value == [1.0] * 4


def test_async_calls_wait_together(make):
    reward = make("meets", timeout=LIMIT, num_workers=1, concurrency=8)
    # Each waits until eight do: one by one they would wait for ever.
    assert reward([sample("good")] * 16).value == [2.5] * 16


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_failure_among_awaited_calls_costs_its_own_sample(make, concurrency):
    reward = make("waits", timeout=0.4, num_workers=2, concurrency=concurrency)
    reward.read_questions([])
    texts = ["good", "wait", "raise", "own timeout", "dead", "none", "true", "numpy"]
    if concurrency > 1:
        texts += ["block", "good"]
    result = reward([sample(text) for text in texts])
    assert result.status == [
        "ok", "timeout", "error", "error", "crash", "not_a_number", "ok", "ok", "timeout", "ok",
    ][: len(texts)]  # fmt: skip
    expected = [2.5, None, None, None, None, None, 1.0, 0.5, None, 2.5][: len(texts)]
    assert [None if math.isnan(value) else value for value in result.value] == expected


@pytest.mark.parametrize(("function", "concurrency"), [("longest", 1), ("longest_later", 3)])
def test_a_function_of_samples_gets_those_of_a_prompt_together(make, function, concurrency):
    reward = make(function, concurrency=concurrency)
    asked = [Prompt(id, "Q", [1], Question(text, "")) for id, text in enumerate(["a", "raise", "b", "one number"])]
    # In any order, and with groups of different sizes.
    texts = ["xx", "x", "x", "xx", "xxx", "x", "x", "x", "xx"]
    prompts = [asked[row] for row in (0, 1, 2, 1, 2, 0, 3, 3, 0)]
    result = reward([Sample(prompt, text, [1], FinishReason.STOP) for prompt, text in zip(prompts, texts, strict=True)])
    errors, not_numbers = ["error"] * 2, ["not_a_number"] * 2
    assert result.status == ["ok", errors[0], "ok", errors[1], "ok", "ok", *not_numbers, "ok"]
    assert [value for value in result.value if not math.isnan(value)] == [1.0, 0.0, 1.0, 0.0, 1.0]
    with Scorer([reward]).begin() as scoring:
        assert not scoring.early  # it waits for the group
    assert (
        "it returned 1.0 (float) for 2 samples; return a list of as many numbers"
        in reward.tally.examples["not_a_number"]
    )


@pytest.mark.parametrize(
    ("name", "takes"), [("of_trl", "completions"), ("of_trl_with_prompts", "prompts, completions")]
)
def test_the_arguments_of_trl_are_refused_with_the_class_to_write(make, name, takes):
    reward = make(name)
    with pytest.raises(UsageError, match=rf"takes \({takes}\), as TRL's .*\{{class_path: TRLReward, .*:{name}\}}\}}$"):
        reward.read_questions([])


def test_other_arguments_are_refused_with_what_to_write(make):
    with pytest.raises(UsageError, match=r"takes \(sample, level\). Write `def f\(sample\)`.*`def f\(samples\)`"):
        make("of_two").read_questions([])


def test_a_function_is_tried_before_the_run(make, caplog):
    question = Question("3+4=", "7", "train.jsonl:1", {"level": 3})
    for name in ("misreads", "by_text", "longest"):
        reward = make(name)
        reward.read_questions([question])
        assert not reward.tally.statuses
    first, second = [re.sub(r"py:\d+", "py:LINE", message) for message in caplog.messages]
    assert first == (
        "reward misreads fails on '7', made up as a completion for train.jsonl:1: users_rewards.py:LINE: "
        "AttributeError: there is no `completion`; there are answer, metadata, prompt, question, text, token_ids, "
        "truncated, turn"
    )
    assert "users_rewards.py:LINE: KeyError: '7'" in second


def test_only_async_functions_wait_together(make):
    with pytest.raises(UsageError, match=r"by_text is not an `async def`"):
        make("by_text", concurrency=2).read_questions([])


@pytest.mark.parametrize("name", ["missing", "number"])
def test_what_cannot_be_imported_is_said_before_the_run(make, name):
    reward = make(name)
    with pytest.raises(UsageError, match=f"{name}"):
        reward.read_questions([])
    with pytest.raises(UsageError, match="no_such_module"):
        FunctionReward("no_such_module.f").read_questions([])
