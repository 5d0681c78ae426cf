"""The words of the trade: what passes between data, engine, rewards and loop."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

BROKEN = "\ufffd"
"""Stands in a decoded text for bytes that are no character, or not yet: later tokens may change it."""

FIRST_LOOK = "First look"
"""The group of curves to read first in TensorBoard; an upper-case letter comes before all others."""


Message = dict[str, Any]
"""A message of a conversation, as transformers has it: `role` (`system`, `user`, `assistant` or `tool`), `content`, and
what else chat templates read."""


class UsageError(ValueError):
    """A user's mistake. The message names the key, the value, what is allowed and the fix."""


def at_least(key: str, value: float | None, least: float, owner: str = "") -> None:
    """Raises UsageError where `value` is below `least` or not a number; None stands for a default and passes.

    Args:
        key: The setting, as the user writes it: `loop.mu`.
        value: What it was set to.
        least: The smallest value that is allowed.
        owner: The class that has the setting, where the key alone does not tell.
    """
    if value is not None and not value >= least:
        raise UsageError(f"{key}={value}{f' of {owner}' if owner else ''}: give {least} or more")


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """The model drew one of its stop tokens, or completed a stop string."""
    LENGTH = "length"
    """It reached `max_new_tokens`: the completion is truncated."""


class Status(StrEnum):
    """What happened to a sample that was scored, or to a task in a worker process. docs/metrics.md explains each."""

    OK = "ok"
    ERROR = "error"
    """An exception was raised."""
    TIMEOUT = "timeout"
    MEMORY = "memory"
    """A worker process needed more memory than it may use."""
    CRASH = "crash"
    """The task ended two worker processes."""
    NOT_FINITE = "not_finite"
    """The reward is infinite, or NaN without a reason."""
    NOT_A_NUMBER = "not_a_number"
    """A user's function returned something other than a finite number."""
    NO_ANSWER = "no_answer"
    UNPARSEABLE = "unparseable"
    TOO_LONG = "too_long"
    RESTATED = "restated"
    GOLD_BAD = "gold_bad"
    NO_GOLD = "no_gold"
    """The row has no gold answer to compare with."""
    NO_MATCH = "no_match"
    """The completion does not have the form that was asked for."""
    CLOSED = "closed"
    """A gate was scored and is not open."""
    CUT = "cut"
    """The input lost its beginning, because it was too long for the model."""


@dataclass(slots=True)
class Question:
    """One row of a task: what is asked, what is right, and where the row came from."""

    text: str
    """The question as the task states it, before any prompt template."""
    answer: str
    """The gold answer, bare (`42`, not `#### 42`)."""
    source: str = ""
    """Where the row comes from, for messages: `train.jsonl:17`."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The row's other columns, for rewards that want them."""


@dataclass(slots=True)
class Prompt:
    """q of the paper: a question as the model sees it."""

    id: int
    """Keys the random numbers of its completions. In training it is the prompt's index in the stream of drawn prompts,
    so a question that comes again gets new completions; in evaluation it is the row of the question."""
    text: str
    """After the template."""
    token_ids: list[int]
    """[P] token ids, never empty."""
    question: Question
    answer_prefix: str = ""
    """The end of `text` with which the assistant's turn begins: given, not drawn."""


class RandomKey(NamedTuple):
    """What keys the random numbers of one call of an engine, beside what each `Request` says."""

    seed: int = 0
    """That of the run."""
    step: int = 0
    """The exploration step: at another step the same prompt gets other completions."""


@dataclass(slots=True)
class Request:
    """One completion to draw. Its random numbers are keyed by the last three fields and a `RandomKey`."""

    token_ids: list[int]
    """[P] what the model reads first, never empty. Requests with equal `token_ids` share their prefill."""
    prompt_id: int
    """`Prompt.id`."""
    sample: int
    """The completion's index in its group."""
    position: int = 0
    """Position of the first drawn token, counted from the conversation's first drawn token. A second turn goes on where
    the first ended, or it would draw the same random numbers again."""

    @classmethod
    def from_prompts(cls, prompts: Sequence[Prompt], group_size: int) -> list["Request"]:
        """`group_size` requests per prompt, group after group."""
        return [cls(prompt.token_ids, prompt.id, sample) for prompt in prompts for sample in range(group_size)]


@dataclass(slots=True)
class Completion:
    """o_i of the paper: the tokens that the policy drew after one prompt."""

    token_ids: list[int]
    """[R] sampled ids with the stop token, if one was sampled; at least one."""
    logp: list[float] | None
    """[R] log-prob in nats of each id under the distribution it was drawn from; None if the engine knows none."""
    finish_reason: FinishReason
    stop_string: str = ""
    """The one of `Sampling.stop` that its last token completed; empty if a stop token ended it, or nothing did."""

    @property
    def written(self) -> list[int]:
        """The ids that its text is of: all but the stop token."""
        return _without_stop_token(self.token_ids, self.finish_reason, self.stop_string)


@dataclass(slots=True)
class Piece:
    """Part of a conversation that keeps its history as it was: all of it, unless a chat template rewrites it.

    What the policy drew in an earlier piece is given in a later one.
    """

    token_ids: list[int]
    """[T] from the first token of the prompt to the last drawn one."""
    drawn: list[bool]
    """[T] whether the policy drew the token; at least one is."""
    logp: list[float] | None
    """[R] of the drawn tokens, as in `Completion`."""

    @classmethod
    def given(cls, token_ids: list[int]) -> "Piece":
        """A piece that begins with tokens which the policy did not draw."""
        return cls([*token_ids], [False] * len(token_ids), [])

    def give(self, token_ids: list[int]) -> None:
        """Adds tokens that the policy did not draw."""
        self.token_ids += token_ids
        self.drawn += [False] * len(token_ids)

    def draw(self, completion: "Completion") -> None:
        """Adds what the policy drew."""
        self.token_ids += completion.token_ids
        self.drawn += [True] * len(completion.token_ids)
        self.logp = None if self.logp is None or completion.logp is None else self.logp + completion.logp

    def trim(self) -> None:
        """Leaves out what comes after the last drawn token; all of it, if none was drawn."""
        while self.drawn and not self.drawn[-1]:
            self.token_ids.pop()
            self.drawn.pop()


@dataclass(slots=True)
class Conversation:
    """A conversation of the policy with an environment, which ends one way or another."""

    messages: list[Message] = field(default_factory=list)
    """All of it, the prompt's messages first, as the environment and the chat template have them."""
    pieces: list[Piece] = field(default_factory=list)
    """In order, together one completion. There is one piece, unless the chat template rewrites earlier turns."""
    ends: list[int] = field(default_factory=list)
    """[turns] index of the last token of each turn of the policy, among all that it drew."""
    rewards: list[float] = field(default_factory=list)
    """[turns] what the environment gave for each turn."""
    outcome: float | None = None
    """What it gave for the conversation as a whole; None if it gives nothing of the kind."""
    status: str = Status.OK
    """How the environment failed, which leaves the completion out of its group: a `Status`."""
    error: str = ""
    """The failure in words."""
    num_calls: int = 0
    """Calls of tools, failed ones included."""
    num_failed_calls: int = 0
    """Calls that cannot be read, or of which the tool raised: the policy was told."""

    @property
    def num_given(self) -> int:
        """Tokens that others wrote after the first drawn one."""
        return sum(sum(not own for own in piece.drawn[piece.drawn.index(True) :]) for piece in self.pieces)


@dataclass(slots=True)
class Sample:
    """A prompt and one of its completions, as a reward sees them."""

    prompt: Prompt
    text: str
    """What the policy wrote: the completion decoded, without the stop token and without special tokens.

    It ends with the stop string, if one ended it: what the last token has beyond that is left out."""
    token_ids: list[int]
    """[R] as in `Completion`."""
    finish_reason: FinishReason
    stop_string: str = ""
    """As in `Completion`."""
    conversation: Conversation | None = None
    """The turns, where there is an environment. `text` is then that of the last turn, `token_ids` are drawn in all."""

    def add_turn(self, drawn: Completion, text: str) -> None:
        """Adds a turn of the policy, whose text is `text`, to its conversation."""
        assert self.conversation is not None
        self.token_ids += drawn.token_ids
        self.text, self.finish_reason, self.stop_string = text, drawn.finish_reason, drawn.stop_string
        self.conversation.pieces[-1].draw(drawn)
        self.conversation.messages = [*self.conversation.messages, {"role": "assistant", "content": text}]
        self.conversation.ends.append(len(self.token_ids) - 1)
        self.conversation.rewards.append(0.0)

    @property
    def first(self) -> int:
        """Index of the first of `token_ids` that `text` is of: 0, but for a conversation of several turns."""
        ends = self.conversation.ends if self.conversation else []
        return ends[-2] + 1 if len(ends) > 1 else 0

    @property
    def written(self) -> list[int]:
        """The ids that `text` is of: all but the stop token."""
        return _without_stop_token(self.token_ids[self.first :], self.finish_reason, self.stop_string)

    @property
    def failed(self) -> bool:
        """Whether the environment failed, so that nothing can be learned from it."""
        return self.conversation is not None and self.conversation.status != Status.OK

    @property
    def turn(self) -> str:
        """The assistant's whole turn: the answer prefix that it was given, and what the policy wrote."""
        return self.prompt.answer_prefix + self.text

    @property
    def whole_turn(self) -> str:
        """`turn`, with `<think>` before it if the prompt before the answer prefix ends with it."""
        asked = self.prompt.text.removesuffix(self.prompt.answer_prefix)
        return "<think>" + self.turn if asked.rstrip().endswith("<think>") else self.turn

    @property
    def answer(self) -> str:
        """The gold answer."""
        return self.prompt.question.answer

    @property
    def truncated(self) -> bool:
        """Whether the completion was cut off at `max_new_tokens`, or the conversation at one of its limits."""
        return self.finish_reason is FinishReason.LENGTH


def _without_stop_token(token_ids: list[int], finish_reason: FinishReason, stop_string: str) -> list[int]:
    """The ids, less the last where that is a stop token."""
    return token_ids[:-1] if finish_reason is FinishReason.STOP and not stop_string else token_ids
