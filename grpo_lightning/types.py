"""The words of the trade: what passes between data, engine, rewards and loop."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

BROKEN = "\ufffd"  # in a decoded text: bytes that are no character, or not yet, since later tokens may change it
FIRST_LOOK = "First look"  # the curves to read first in TensorBoard: an upper-case letter comes before all others
TOTAL = "total"  # the weighted sum of all rewards
Message = dict[str, Any]  # `role` (`system`, `user`, `assistant` or `tool`), `content`, and more for chat templates


class UsageError(ValueError):
    """A user's mistake. The message names the key, the value, what is allowed and the fix."""


def require(holds: bool, message: str) -> None:
    """Raises UsageError with the message unless the condition holds."""
    if not holds:
        raise UsageError(message)


def at_least(key: str, value: float | None, least: float, owner: str = "") -> None:
    """Raises UsageError where `value` is below `least` or not a number; None stands for a default and passes.

    `key` is the setting as the user writes it, and `owner` the class that has it, where the key alone does not tell.
    """
    of = f" of {owner}" if owner else ""
    require(value is None or value >= least, f"{key}={value}{of}: give {least} or more")


class Stateful:
    """Something that learns from one step for the next ones; here it keeps nothing."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold, so that a resumed run continues exactly. It is the same on every rank."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # the model drew one of its stop tokens, or completed a stop string
    LENGTH = "length"  # it reached `max_new_tokens`: the completion is truncated


class Status(StrEnum):
    """The fate of a sample that was scored, or of a task in a worker process. docs/metrics.md explains each."""

    OK = "ok"
    ERROR = "error"  # an exception was raised
    TIMEOUT = "timeout"
    MEMORY = "memory"  # a worker process needed more memory than it may use
    CRASH = "crash"  # the task ended two worker processes
    NOT_FINITE = "not_finite"  # the reward is infinite, or NaN without a reason
    NOT_A_NUMBER = "not_a_number"  # a user's function returned something other than a finite number
    NO_ANSWER = "no_answer"
    UNPARSEABLE = "unparseable"
    TOO_LONG = "too_long"
    RESTATED = "restated"
    GOLD_BAD = "gold_bad"
    NO_GOLD = "no_gold"  # the row has no gold answer to compare with
    NO_MATCH = "no_match"  # the completion does not have the form that was asked for
    CLOSED = "closed"  # a gate was scored and is not open
    CUT = "cut"  # the input lost its beginning, because it was too long for the model


@dataclass(slots=True)
class Question:
    """One row of a task: a question, its gold answer, and where the row came from."""

    text: str  # as the task states it, before any prompt template
    answer: str  # the gold answer, bare (`42`, not `#### 42`)
    source: str = ""  # for messages: `train.jsonl:17`
    metadata: dict[str, Any] = field(default_factory=dict)  # the row's other columns, for rewards that want them
    history: list[Message] = field(default_factory=list)  # the turns before the question, where it is a conversation


@dataclass(slots=True)
class Prompt:
    """q of the paper: a question as the model sees it.

    `id` keys the random numbers of its completions. In training it is the prompt's index in the stream of drawn
    prompts, so a question that comes again gets new completions; in evaluation it is the row of the question.
    """

    id: int
    text: str  # after the template
    token_ids: list[int]  # [P], never empty
    question: Question
    answer_prefix: str = ""  # the end of `text` with which the assistant's turn begins: given, not drawn


class RandomKey(NamedTuple):
    """The key of the random numbers of one call of an engine, beside the fields of each `Request`."""

    seed: int = 0  # that of the run
    step: int = 0  # the exploration step: at another step the same prompt gets other completions


@dataclass(slots=True)
class Request:
    """One completion to draw. Its random numbers are keyed by the last three fields and a `RandomKey`.

    `position` is that of its first token among all drawn ones of a conversation. A second turn goes on where the first
    ended, or it would draw the same random numbers again.
    """

    token_ids: list[int]  # [P] what the model reads first, never empty; requests with equal ones share their prefill
    prompt_id: int  # `Prompt.id`
    sample: int  # the completion's index in its group
    position: int = 0

    @classmethod
    def from_prompts(cls, prompts: Sequence[Prompt], group_size: int) -> list["Request"]:
        """`group_size` requests per prompt, group after group."""
        return [cls(prompt.token_ids, prompt.id, sample) for prompt in prompts for sample in range(group_size)]


@dataclass(slots=True)
class Completion:
    """o_i of the paper: the tokens that the policy drew after one prompt."""

    token_ids: list[int]  # [R] sampled ids with the stop token, if one was sampled; at least one
    logp: list[float] | None  # [R] log-prob in nats of each id under the distribution it was drawn from; None: unknown
    finish_reason: FinishReason
    stop_string: str = ""  # the one of `Sampling.stop` that its last token completed, if any
    versions: list[int] | None = None  # [R] `Policy.version` of the weights that drew each id; None: all the engine's

    @property
    def written(self) -> list[int]:
        """The ids that its text is of: all but the stop token."""
        ends_with_stop_token = self.finish_reason is FinishReason.STOP and not self.stop_string
        return self.token_ids[:-1] if ends_with_stop_token else self.token_ids


@dataclass(slots=True)
class Piece:
    """Part of a conversation that keeps its history as it was: all of it, unless a chat template rewrites it.

    Tokens that the policy drew in an earlier piece are given in a later one.
    """

    token_ids: list[int]  # [T] from the first token of the prompt to the last drawn one
    drawn: list[bool]  # [T] True if the policy drew the token; at least one is
    logp: list[float] | None  # [R] of the drawn tokens, as in `Completion`


@dataclass(slots=True)
class Conversation:
    """A conversation of the policy with an environment."""

    messages: list[Message] = field(default_factory=list)  # the prompt's first, as the environment has them
    pieces: list[Piece] = field(default_factory=list)  # in order, together one completion
    ends: list[int] = field(default_factory=list)  # [turns] index of each turn's last token, among all drawn ones
    rewards: list[float] = field(default_factory=list)  # [turns] given by the environment for each turn
    outcome: float | None = None  # given for the conversation as a whole
    status: str = Status.OK  # how the environment failed, which leaves the completion out of its group
    error: str = ""  # the failure in words
    num_calls: int = 0  # calls of tools, failed ones included
    num_failed_calls: int = 0  # calls that cannot be read, or of which the tool raised: the policy was told

    @property
    def num_given(self) -> int:
        """Tokens that others wrote after the first drawn one."""
        return sum(sum(not own for own in piece.drawn[piece.drawn.index(True) :]) for piece in self.pieces)


@dataclass(slots=True)
class Sample:
    """A prompt and one of its completions, as a reward sees them.

    `text` is what the policy wrote: the completion decoded, without the stop token and without special tokens. It ends
    with the stop string, if one ended it. Of a conversation it is the last turn, while `token_ids` are those of all.
    """

    prompt: Prompt
    text: str
    token_ids: list[int]  # [R] as in `Completion`
    finish_reason: FinishReason
    stop_string: str = ""  # as in `Completion`
    conversation: Conversation | None = None  # the turns, where there is an environment
    logp: list[float] | None = None  # [R] as in `Completion`; of a conversation its pieces have them
    versions: list[int] | None = None  # [R] as in `Completion`

    @property
    def failed(self) -> bool:
        """True if the environment failed, so that nothing can be learned from it."""
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
        """True if the completion was cut off at `max_new_tokens`, or the conversation at one of its limits."""
        return self.finish_reason is FinishReason.LENGTH
