import random
import sys
from pathlib import Path

import pytest
from helpers.fitting import scalars
from helpers.loading import load_tool
from make_tiny_policy import EOS
from transformers.utils.logging import disable_progress_bar

from examples.guess_number import GuessNumber
from grpo_lightning import Arithmetic, ToolEnvironment
from grpo_lightning.cli import run
from grpo_lightning.plugins.console.start.init import EXAMPLES
from grpo_lightning.plugins.data.conversations.dialogue import PLAIN, Dialogue

tool = load_tool("make_turns_policy")
RNG = random.Random(0)
QUESTIONS = Arithmetic(5, num_train=200).questions("train")


def answers(talk: list[tuple[str, bool]]) -> list[str]:
    """What the policy writes."""
    return [text for text, own in talk if own]


def test_a_talk_with_the_calculator():
    question = QUESTIONS[0]
    call, answer = answers(tool.calculation(question, False, RNG))
    assert call == f"<tool>{question.metadata['expression']}</tool>"
    assert answer == f"<answer>{question.answer}</answer>{EOS}"


def test_the_tokens_of_a_talk_are_those_of_a_run():
    tokenizer = tool.make_tokenizer(tool.WORDS)
    dialogue = Dialogue(tokenizer, variables={"chat_template": PLAIN})
    calculator, game = ToolEnvironment("examples.calculator.Calculator"), GuessNumber()
    talks = [tool.calculation(question, True, RNG) for question in QUESTIONS]
    talks = [(calculator, question, talk) for question, talk in zip(QUESTIONS, talks, strict=True)]
    talks += [(game, question, tool.guesses(game, question, True, RNG)) for question in game.questions("train")]
    for environment, question, talk in talks:
        messages = environment.reset(question)
        expected, ids = dialogue.start(messages), tool.example(talk, tokenizer)[0]
        for text in answers(talk):
            drawn = tokenizer.encode(text)
            expected += drawn
            message = dialogue.turn(drawn)
            calls = [{"arguments": {"expression": text[6:-7]}, "name": "calculate"}] if "<tool>" in text else []
            turn = environment.step(message | {"tool_calls": calls})
            if not turn.done:
                expected += dialogue.follow(messages, drawn, turn.messages)
            messages = [*messages, message, *turn.messages]
        assert expected == ids


@pytest.mark.parametrize(("task", "example"), [("calculator", "calculator"), ("guess", "guess_number")])
def test_its_example_runs(task: str, example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["grpo"])
    monkeypatch.syspath_prepend(EXAMPLES / example)
    disable_progress_bar()
    updates = 80 if task == "calculator" else 5  # it has to have learned to call
    tool.make(tmp_path / "policy", task, updates=updates, hidden=64, layers=1)
    options = {
        "trainer.default_root_dir": tmp_path / "run",
        "trainer.max_epochs": 1,
        "trainer.limit_val_batches": 0,
        "trainer.enable_progress_bar": "false",
        "model.policy.path": tmp_path / "policy",
        "loop.group_size": 4,
        "loop.prompts_per_step": 4,
    }
    run(["fit", f"--config={EXAMPLES / example / 'run.yaml'}", *(f"--{key}={value}" for key, value in options.items())])
    logged = scalars(tmp_path / "run")
    if task == "calculator":
        assert min(logged["rollout/calls"].values()) > 0
        assert all(0 <= failed <= 1 for failed in logged["rollout/failed_calls"].values())
    assert max(logged["rollout/turns"].values()) > 1
    assert set(logged["rollout/environment_failed"].values()) == {0}
