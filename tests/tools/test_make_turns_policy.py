import random
from pathlib import Path

import pytest
from helpers.loading import load_tool
from make_tiny_policy import EOS

from examples.guess_number import GuessNumber
from grpo_lightning import Arithmetic, ToolEnvironment
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


@pytest.mark.parametrize("task", tool.SIZES)
def test_a_policy_is_made(task: str, tmp_path: Path):
    """As the examples have them, which run in tests/plugins/console/start."""
    tool.make(tmp_path, task, updates=2, hidden=64, layers=1)
    assert (tmp_path / "model.safetensors").exists() and (tmp_path / "tokenizer.json").exists()
