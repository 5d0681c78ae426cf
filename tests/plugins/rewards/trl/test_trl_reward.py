"""TRL's reward functions as rewards: what they get, what they may return, and the total that follows."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import Grpo
from helpers.fitting import scalars

from grpo_lightning import PerRewardStd, Scorer, TRLReward
from grpo_lightning.maths.reward_batch import RewardBatch
from grpo_lightning.rewards.reward import Run
from grpo_lightning.types import Conversation, FinishReason, Prompt, Question, Sample, UsageError

MODULE = '''
import asyncio
import torch

def lengths(completions, **kwargs):
    """From TRL's documentation."""
    return [float(len(completion)) for completion in completions]

def content_lengths(completions, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]

def accuracy(completions, solution, **kwargs):
    return [1.0 if completion == gold else None for completion, gold in zip(completions, solution)]

def sees(prompts, completions, completion_ids, level, trainer_state, log_metric=None, **kwargs):
    assert log_metric is None and sorted(kwargs) == ["answer"], kwargs
    assert (prompts, completions) == (["Q: q"] * 2, ["a", "bb"])
    assert (completion_ids, level, kwargs["answer"]) == ([[5, 6], [5, 6]], [3, 3], ["42"] * 2)
    return [trainer_state.global_step] * 2

def sees_messages(prompts, completions, **kwargs):
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    return [
        float(turns == prompt and completion == [{"role": "assistant", "content": "<think>a"}])
        for turns, completion in zip(prompts, completions)
    ]

def num_tool_turns(prompts, completions, **kwargs):
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    return [sum(turn["role"] == "tool" for turn in completion) for completion in completions]

async def later(completions, **kwargs):
    await asyncio.sleep(0)
    return torch.tensor([float(len(completion)) for completion in completions])

def raises(completions, **kwargs):
    if "bad" in completions:
        raise ValueError("bad")
    return [float("nan") if completion == "nan" else 1.0 for completion in completions]

def too_few(completions, **kwargs):
    return [1.0]

def needs_environments(completions, environments, **kwargs):
    return [1.0 for _ in completions]
'''


PLAIN_TURNS = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"

Make = Callable[..., TRLReward]


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trl") / "rewards_of_trl.py"
    path.write_text(MODULE)
    return path


@pytest.fixture
def make(module: Path) -> Iterator[Make]:
    """Makes the reward of a function of the module, which is closed after the test."""
    with ExitStack() as stack:

        def made(name: str, **options: Any) -> TRLReward:
            reward = TRLReward(f"{module}:{name}", **options)
            stack.callback(reward.close)
            return reward

        yield made


def samples_of(*texts: str, question: Question | None = None, prefix: str = "") -> list[Sample]:
    """The completions of one prompt."""
    question = question or Question("q", "42", "train.jsonl:17", {"level": 3})
    prompt = Prompt(0, "Q: q", [1], question, prefix)
    return [Sample(prompt, text, [5, 6], FinishReason.STOP) for text in texts]


def run(chat: bool = False) -> Run:
    return Run(torch.device("cpu"), None, 8, chat=chat, num_updates=lambda: 17)


def test_a_function_gets_texts_columns_and_the_state(make: Make) -> None:
    reward = make("sees")
    samples = samples_of("a", "bb")
    reward.read_questions([samples[0].prompt.question])
    reward.setup(run())
    result = reward(samples)
    assert (result.value, result.status) == ([17.0, 17.0], ["ok", "ok"]), reward.tally.examples


def test_a_function_gets_messages_in_a_chat(make: Make) -> None:
    reward = make("sees_messages")
    reward.setup(run(chat=True))
    question = Question("q", "42", history=[{"role": "system", "content": "s"}])
    assert reward(samples_of("a", "b", question=question, prefix="<think>")).value == [1.0, 0.0]


def test_a_function_gets_the_turns_of_a_conversation(make: Make) -> None:
    question = Question("q", "", history=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}])
    roles = "system user assistant user assistant tool tool assistant"
    messages = [{"role": role, "content": "c"} for role in roles.split()]
    (sample,) = samples_of("c", question=question)
    sample.conversation = Conversation(messages, ends=[0, 1])
    assert make("num_tool_turns")([sample]).value == [2.0]


def test_functions_return_lists_tensors_and_none(make: Make) -> None:
    samples = samples_of("a", "42", "bb")
    assert make("lengths")(samples).value == [1.0, 2.0, 2.0]
    assert make("later")(samples).value == [1.0, 2.0, 2.0]
    reward = make("accuracy", answer="solution")
    result = reward(samples)
    assert result.status == ["not_applicable", "ok", "not_applicable"]
    assert [math.isnan(value) for value in result.value] == [True, False, True]
    assert not reward.tally.failed and not reward.tally.examples
    few = make("too_few")
    assert few(samples).status == ["not_a_number"] * 3
    assert "it returned [1.0] (list) for 3 samples" in few.tally.examples["not_a_number"]


def test_a_failure_costs_its_group_and_nan_its_sample(make: Make) -> None:
    reward = make("raises")
    other = samples_of("x", "nan")
    for sample in other:
        sample.prompt.id = 1
    result = reward([*samples_of("bad", "good"), *other])
    assert result.status == ["error", "error", "ok", "not_a_number"]
    assert "rewards_of_trl.py" in reward.tally.examples["error"]


def test_what_does_not_apply_adds_nothing_to_the_total(make: Make) -> None:
    # The total of TRL is a sum that leaves out None.
    samples = samples_of("a", "42", "bb")
    accuracy = make("accuracy", answer="solution", weight=2.0)
    scorer = Scorer([accuracy, make("lengths", weight=0.5)], max_failed=0.0)
    scores = scorer(samples)
    assert scores.total == [0.5, 3.0, 1.0]
    scorer.stop_if_broken()
    # Where no reward applies, there is nothing to learn from.
    assert [str(total) for total in Scorer([accuracy])(samples).total] == ["nan", "2.0", "nan"]
    # A failure still costs its sample.
    failing = Scorer([accuracy, make("raises")])(samples_of("nan", "42"))
    assert [str(total) for total in failing.total] == ["nan", "3.0"]


def test_rewards_of_some_completions_are_normalised_over_these() -> None:
    # The first reward applies to two completions, (1, 3), with mean 2 and std sqrt(2); the second to all.
    value = torch.tensor([[1.0, 3.0, torch.nan], [0.0, 0.0, 0.0]], dtype=torch.float64)
    batch = RewardBatch(
        value,
        weight=torch.tensor([1.0, 1.0], dtype=torch.float64),
        group=torch.zeros(3, dtype=torch.int64),
        lengths=torch.ones(3, dtype=torch.int64),
        segments=[None, None],
        total=torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64),
    )
    advantages = PerRewardStd(advantage_eps=0).per_token(batch)
    half = 0.5**0.5
    over_batch = (2 * half**2 / 3) ** 0.5
    assert advantages.tolist() == pytest.approx([-half / over_batch, half / over_batch, 0.0])
    # A further reward, such as the KL in the reward, leaves the totals of what applies.
    more = batch.plus(torch.tensor([1.0, 1.0, 1.0]), 0.5)
    assert more.total.tolist() == [1.5, 3.5, 0.5]


def test_columns_that_are_not_there_are_told_before_the_run(make: Make) -> None:
    question = Question("q", "42", "train.jsonl:17", {"level": 3, "prompt": "q"})
    for name, column in (("accuracy", "solution"), ("needs_environments", "environments")):
        with pytest.raises(
            UsageError, match=rf"takes {column}, and train.jsonl:17 has no such column; there are answer,"
        ):
            make(name).read_questions([question])
    make("accuracy", answer="solution").read_questions([question])
    with pytest.raises(UsageError, match=r"concurrency|cannot load|no_such_module"):
        TRLReward("no_such_module.f").read_questions([])


def test_a_function_is_tried_as_the_run_calls_it(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    for chat, num_warnings in ((True, 0), (False, 1)):
        caplog.clear()
        reward = make("content_lengths")
        reward.read_questions([Question("q", "42", "train.jsonl:1")])
        reward.setup(run(chat))
        reward.setup(run(chat))
        assert len(caplog.messages) == num_warnings
    assert "content_lengths fails on '42', made up as a completion for train.jsonl:1: rewards_of_trl.py" in caplog.text


CHAT_FUNCTION = """
def digits(prompts, completions, solution, trainer_state, **kwargs):
    assert all(prompt == [{"role": "user", "content": gold}] for prompt, gold in zip(prompts, solution))
    values = [float(sum(letter.isdigit() for letter in turns[0]["content"])) for turns in completions]
    return [value + trainer_state.global_step for value in values]
"""


def test_a_run_with_messages_as_prompts(grpo: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path.cwd())
    tokenizer_config = Path("policy/tokenizer_config.json")
    tokenizer_config.write_text(json.dumps(json.loads(tokenizer_config.read_text()) | {"chat_template": PLAIN_TURNS}))
    rows = [{"prompt": [{"role": "user", "content": str(row)}], "solution": str(row)} for row in range(8)]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path("rewards_of_mine.py").write_text(CHAT_FUNCTION)
    options = ["--data.task.question=prompt", "--data.chat=true", "--trainer.limit_val_batches=0"]
    options += ["--trainer.max_epochs=2", "--loop.mu=3"]
    message = grpo.mistake("fit", *options, "--model.rewards=rewards_of_mine.digits")
    assert "class_path: TRLReward, init_args: {function: rewards_of_mine.digits}" in message
    grpo.ok("fit", *options, "--model.rewards=TRLReward", "--model.rewards.function=rewards_of_mine.digits")
    values = scalars(Path("run"))
    assert values["reward/digits/ok"] == {0: 1.0, 1: 1.0}
    # The state counts updates, of which the first step made three.
    assert values["reward/digits/mean"][1] >= 3
