"""Conversations of a scripted policy: turns, tools, limits, and failures of the environment."""

from collections.abc import Callable, Iterator
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
from helpers.fitting import Echo
from helpers.games import player
from helpers.guessing import Guess

from grpo_lightning import (
    Conversations,
    Environment,
    Limits,
    Policy,
    PromptDataModule,
    Sampling,
    ScriptedEngine,
    ToolEnvironment,
)
from grpo_lightning.plugins.data.conversations.dialogue import PLAIN
from grpo_lightning.plugins.rewards.process.process_reward import last_turn
from grpo_lightning.types import Prompt, Question, RandomKey, Request, Sample, UsageError

Script = Callable[[Request, str], str]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return player(max_position_embeddings=1024)


@pytest.fixture
def talk(policy: Policy) -> Iterator[Callable[..., list[Sample]]]:
    """Holds one conversation per answer of the task."""
    opened: list[Conversations] = []

    def talk(environment: Environment, script: Script, answers: str = "4", **limits: Any) -> list[Sample]:
        engine = ScriptedEngine(script)
        engine.sync(policy)
        conversations = Conversations(environment, Limits(**{"seconds": 0.5} | limits))
        opened.append(conversations)
        conversations.load(policy.tokenizer)
        questions = [Question("guess", answer, metadata={"environment": answer}) for answer in answers]
        prompts = [Prompt(row, "guess", [9], question) for row, question in enumerate(questions)]
        samples = dict(conversations.draw(engine, policy, prompts, 1, Sampling(max_new_tokens=30), RandomKey(1, 2)))
        return [samples[row] for row in range(len(prompts))]

    yield talk
    for conversations in opened:
        conversations.close()


def halving(request: Request, text: str) -> str:
    """Guesses a digit by halving."""
    low, high, guess = 0, 9, 5
    for line in text.split("\n")[1:]:
        if line == "h":
            low = guess + 1
        elif line == "l":
            high = guess - 1
        else:
            continue
        guess = (low + high + 1) // 2
    return str(guess)


def whole(policy: Policy, sample: Sample) -> str:
    """The text of all that the policy saw and drew."""
    assert sample.conversation is not None
    (piece,) = sample.conversation.pieces
    return str(policy.tokenizer.decode(piece.token_ids))


def test_turns_alternate_and_every_token_is_marked(policy: Policy, talk: Any) -> None:
    (sample,) = talk(Guess(), halving, "7")
    assert whole(policy, sample) == "guess5<eos>\nh\n8<eos>\nl\n7<eos>"
    (piece,) = sample.conversation.pieces
    sampled_ids = [*compress(piece.token_ids, piece.sampled)]
    assert policy.tokenizer.decode(sampled_ids) == "5<eos>8<eos>7<eos>"
    assert sampled_ids == sample.token_ids
    assert sample.conversation.ends == [1, 3, 5]
    assert sample.conversation.rewards == pytest.approx([0.8, 0.9, 1.0])
    assert sample.conversation.num_context == 6
    first, written = last_turn(sample)
    assert (sample.text, sample.truncated, first) == ("7", False, 4)
    assert policy.tokenizer.decode(written) == "7"
    assert [message["content"] for message in sample.conversation.messages] == ["guess", "5", "h", "8", "l", "7", "l"]


def test_positions_count_sampled_tokens(talk: Any) -> None:
    positions: list[tuple[int, int]] = []

    def script(request: Request, text: str) -> str:
        positions.append((len(request.token_ids), request.position))
        return halving(request, text)

    talk(Guess(), script, "7")
    assert positions == [(5, 0), (10, 2), (15, 4)]


def test_conversations_of_different_lengths_do_not_matter_to_each_other(policy: Policy, talk: Any) -> None:
    together = talk(Guess(), halving, "0257")
    for answer, sample in zip("0257", together, strict=True):
        (alone,) = talk(Guess(), halving, answer)
        assert whole(policy, alone) == whole(policy, sample)
        assert sample.text == answer


def test_limits_truncate(talk: Any) -> None:
    (turns,) = talk(Guess(), halving, "7", max_turns=2)
    assert turns.truncated and len(turns.conversation.ends) == 2
    (tokens,) = talk(Guess(), halving, "7", max_tokens=36)
    assert tokens.truncated and len(tokens.conversation.ends) == 2
    (cut,) = talk(Guess(), lambda request, text: "1" * 40, "7")
    assert cut.truncated and cut.conversation.rewards == [0.0]
    assert [message["role"] for message in cut.conversation.messages] == ["user", "assistant"]


def test_a_conversation_without_room_for_a_turn_has_failed(talk: Any) -> None:
    (sample,) = talk(ToolEnvironment("helpers.guessing.LongEnv"), halving)
    assert (sample.failed, sample.conversation.status, sample.token_ids) == (True, "too_long", [])


@pytest.mark.parametrize(
    ("way", "status", "error"),
    [
        ("reset", "error", "ValueError: no such game"),
        ("raise", "error", "KeyError: 'no such thing'"),
        ("hang", "timeout", "timeout"),
        ("shout", "too_long", "the answer has more than 65536 bytes"),
        ("die", "crash", "crash"),
        ("nonsense", "error", "give `role` and `content`, both text"),
        ("role", "error", "refuses messages of user, assistant, judge (no such role)"),
    ],
)
def test_a_failure_costs_its_conversation_only(
    talk: Any, monkeypatch: pytest.MonkeyPatch, way: str, status: str, error: str
) -> None:
    refuses = "{% for m in messages if m.role == 'judge' %}{{ raise_exception('no such role') }}{% endfor %}"
    monkeypatch.setattr("grpo_lightning.plugins.data.conversations.dialogue.PLAIN", refuses + PLAIN)
    samples = talk(Guess(fail={"7": way}), halving, "5747")
    assert [sample.failed for sample in samples] == [False, True, False, True]
    assert samples[1].conversation.status == status
    assert error in samples[1].conversation.error
    assert samples[2].conversation.rewards[-1] == 1.0


def test_text_that_no_tokenizer_takes_is_read_with_question_marks(policy: Policy, talk: Any) -> None:
    """A policy may cause it, by printing a lone surrogate with a tool."""
    (sample,) = talk(Guess(fail={"7": "surrogate"}), lambda request, text: "5", "7", max_turns=2)
    assert whole(policy, sample) == "guess5<eos>\n?\n5<eos>"


def test_a_class_of_trl_is_called_by_the_policy(policy: Policy, talk: Any) -> None:
    turns = ["<tool>2</tool>", "<tool>3</tool>and", "<tool>x</tool>", "<tool>-1</tool>", "done"]

    def script(request: Request, text: str) -> str:
        return turns[text.count("\n") // 2]

    (sample,) = talk(ToolEnvironment("helpers.guessing.CounterEnv"), script)
    messages = sample.conversation.messages
    assert messages[0] == {"role": "user", "content": "guess Start at 0."}
    answers = [message for message in messages if message["role"] == "tool"]
    assert [answer["content"] for answer in answers[:2]] == ["2", "5"]
    assert "Error" in answers[2]["content"] and answers[3]["content"] == "{'error': 'only up'}"
    assert (sample.conversation.num_calls, sample.conversation.num_failed_calls) == (4, 2)
    assert (sample.conversation.outcome, sample.text) == (5.0, "done")
    # The stop string ends a turn; what a script writes after it is not drawn.
    assert "and" not in whole(policy, sample)


def test_a_dict_as_trl_has_it_gives_each_question_its_class_and_tools(talk: Any) -> None:
    environment = ToolEnvironment("helpers.guessing.FACTORIES")
    script: Script = lambda request, text: "<tool>1</tool>" if text.count("\n") < 4 else "ok"  # noqa: E731
    conversations = [sample.conversation for sample in talk(environment, script, "4567")]
    calls = [(c.outcome, c.num_calls, c.num_failed_calls, c.error) for c in conversations]
    # Of a class, an async class, and two without rewards.
    assert calls == [(2.0, 2, 0, ""), (2.0, 2, 0, ""), (None, 2, 0, ""), (None, 0, 0, "")]
    assert conversations[2].messages[2]["content"] == "1"
    first_texts = [conversation.messages[0]["content"] for conversation in conversations]
    assert first_texts == ["guess Start at 0.", "guess", "guess", "guess['answer', 'prompt', 'question']"]
    with pytest.raises(UsageError, match=r"FACTORIES: question .* has environment='8'; give .* one of 4, 5, 6, 7"):
        talk(environment, script, "8")


def test_an_environment_of_a_function_is_refused(policy: Policy) -> None:
    class Local(Guess):
        pass

    with pytest.raises(UsageError, match=r"data\.environment=Local: .*must be in a module"):
        Conversations(Local()).load(policy.tokenizer)


def test_turns_that_begin_after_their_end_are_refused() -> None:
    policy = player()
    policy.tokenizer.chat_template = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    conversations = Conversations(Guess(), chat=True)
    conversations.load(policy.tokenizer)
    with pytest.raises(UsageError, match=r"data.environment: the policy's turns would begin after '<eos>', which ends"):
        conversations.check_end(policy.stop_ids)
    plain = Conversations(Guess())
    plain.load(policy.tokenizer)
    plain.check_end(policy.stop_ids)
    for one in (conversations, plain):
        one.close()


def test_the_turns_before_a_question_reach_tools_or_are_refused(policy: Policy) -> None:
    before = {"role": "system", "content": "Add."}
    question = Question("1+1?", "2", "rows:1", history=[before])
    tools = ToolEnvironment("helpers.guessing.CounterEnv")
    assert tools.reset(question) == [before, {"role": "user", "content": "1+1? Start at 0."}]
    data = PromptDataModule(Echo(), environment=Guess())
    with pytest.raises(UsageError, match=r"rows:1: it is a conversation, which data.environment would not see"):
        data.render(question)


TOOLS_THAT_END = '''
import asyncio, sys
class Odd:
    def reset(self, **row): return None
    def leaves(self) -> str:
        """Leaves."""
        sys.exit(3)
    def interrupts(self) -> str:
        """Interrupts."""
        raise KeyboardInterrupt
    def cancels(self) -> str:
        """Cancels."""
        raise asyncio.CancelledError
    def adds(self) -> str:
        """Adds."""
        return "7"
'''


def test_a_tool_that_leaves_python_costs_its_call_alone(tmp_path: Path) -> None:
    (tmp_path / "tools_that_end.py").write_text(TOOLS_THAT_END)
    environment = ToolEnvironment(f"{tmp_path}/tools_that_end.py:Odd")
    environment.reset(Question("Q", ""))
    calls = [{"name": name, "arguments": {}} for name in ("leaves", "interrupts", "cancels", "adds")]
    turn = environment.step({"role": "assistant", "content": "", "tool_calls": calls})
    expected = ["{'error': 'SystemExit: 3'}", "{'error': 'KeyboardInterrupt: '}", "{'error': 'CancelledError: '}", "7"]
    assert [message["content"] for message in turn.messages] == expected
    assert turn.num_failed_calls == 3 and not turn.done
