"""Puzzles of reasoning-gym and their scorers."""

import math
import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_lightning.plugins.rewards.reasoning_gym.gym_task import ReasoningGym, ReasoningGymReward
from grpo_lightning.types import FinishReason, Prompt, Question, Sample, UsageError

reasoning_gym = pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")

SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def sample(question: Question, answer: str) -> Sample:
    prompt = Prompt(0, question.text, [1], question)
    return Sample(prompt, f"<think>hm</think><answer>{answer}</answer>", [7], FinishReason.STOP)


@pytest.fixture(scope="module")
def sums() -> list[Question]:
    return [*ReasoningGym("chain_sum", num_train=4, num_val=2).questions("train")]


@pytest.fixture(scope="module")
def countdown() -> Question:
    """A puzzle with many right answers, whose scorer evaluates the expression."""
    return ReasoningGym("countdown", num_train=3, num_val=1).questions("train")[0]


@pytest.fixture(scope="module")
def reward():
    with closing(ReasoningGymReward(timeout=5)) as reward:
        yield reward


def test_the_questions_are_the_generators_own():
    task = ReasoningGym("chain_sum", num_train=7, num_val=3, seed=5)
    dataset = reasoning_gym.create_dataset("chain_sum", size=13, seed=5)
    for split, first, count in (("train", 6, 7), ("val", 0, 3), ("test", 3, 3), ("predict", 3, 3)):
        questions = task.questions(split)
        entries = [(dataset[row]["question"], dataset[row]["answer"], row) for row in range(first, first + count)]
        assert [(q.text, q.answer, q.source) for q in questions] == [(*e[:2], f"chain_sum:{e[2]}") for e in entries]
        assert questions == task.questions(split)


def test_no_question_is_in_two_splits():
    task = ReasoningGym("chain_sum", SMALL, num_train=300, num_val=20)
    train, val, test = ({question.text for question in task.questions(split)} for split in ("train", "val", "test"))
    assert not train & val and not train & test and not val & test
    assert len(task.questions("train")) < 300  # of 9 x 9 x 2 sums many come twice


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ReasoningGym("no_such_puzzle").questions("val"), "no_such_puzzle"),
        (lambda: ReasoningGym("chain_sum", {"terms": 2}).questions("val"), "terms"),
        (lambda: ReasoningGym("chain_sum", {"min_terms": 9, "max_terms": 2}).questions("val"), "max_terms"),
        (lambda: ReasoningGym("chain_sum", {"seed": 2}), r"task\.seed"),
        (lambda: ReasoningGym("chain_sum", num_val=0), "num_val=0"),
        (lambda: ReasoningGym("chain_sum").questions("dev"), "split='dev'"),
        (
            lambda: ReasoningGym("chain_sum", SMALL, num_val=3000, num_train=1).questions("train"),
            "every train question",
        ),
    ],
)
def test_a_wrong_name_config_or_number_is_refused(make, says):
    with pytest.raises(UsageError, match=says):
        make()


def test_what_depends_on_the_order_of_sets_is_the_same_in_every_process():
    """The answers of isomorphic_strings and four other generators change with PYTHONHASHSEED."""
    code = (
        "from grpo_lightning import ReasoningGym;"
        "task = ReasoningGym('isomorphic_strings', num_train=1, num_val=5);"
        "print([(q.text, q.answer) for q in task.questions('val')])"
    )
    told = [
        subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE)
        for seed in ("1", "2")
    ]
    assert told[0].returncode == 0
    assert told[0].stdout == told[1].stdout


def test_sums_are_scored(reward, sums):
    reward.read_questions(sums)
    right = [sample(question, question.answer) for question in sums]
    wrong = [sample(question, question.answer + "1") for question in sums]
    none = Sample(right[0].prompt, "I do not know", [7], FinishReason.STOP)
    result = reward([*right, *wrong, none])
    assert result.value == [1.0] * 4 + [0.0] * 5
    assert result.status == ["ok"] * 8 + ["no_answer"]
    assert result.answer == [*[q.answer for q in sums], *[q.answer + "1" for q in sums], None]


def test_any_right_answer_is_right(reward, countdown):
    gold = countdown.answer
    result = reward([sample(countdown, gold), sample(countdown, f"({gold})"), sample(countdown, f"{gold} + 1")])
    assert result.value == [1.0, 1.0, 0.0]


def test_hostile_answers_touch_nothing(tmp_path: Path, countdown):
    marker = tmp_path / "marker"
    hostile = [
        f"__import__('pathlib').Path('{marker}').write_text('')",
        f"__import__('os').system('touch {marker}')",
        f"__import__('subprocess').run(['touch', '{marker}'])",
        f"__import__('os').open('{marker}', 66)",
        "9**9**9**9",
        "[" * 5000,
        "exit()",
    ]
    with closing(ReasoningGymReward(timeout=1, num_workers=1)) as reward:
        result = reward([sample(countdown, answer) for answer in (*hostile, countdown.answer)])
    assert not any(value == 1.0 for value in result.value[:-1])
    assert result.value[-1] == 1.0
    assert not marker.exists()


def test_a_list_of_guesses_is_wrong(reward, sums):
    assert reward([sample(sums[0], f"{sums[0].answer} or 7")]).value == [0.0]


def test_questions_of_another_task(reward):
    question = Question("q", "1", "rows.jsonl:3")
    with pytest.raises(UsageError, match=r"rows\.jsonl:3 is not of the task ReasoningGym"):
        reward.read_questions([question])
    result = reward([sample(question, "1")])
    assert result.status == ["error"] and math.isnan(result.value[0])


def test_an_entry_that_has_changed_is_not_scored(reward, sums):
    question = replace(sums[0], text=sums[0].text + "!")
    assert reward([sample(question, question.answer)]).status == ["error"]
