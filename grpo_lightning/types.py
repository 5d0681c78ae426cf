"""The words of the trade: what passes between data, engine, rewards and loop."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    # Rewards are imported without torch.
    from torch import Tensor

BROKEN = "\ufffd"
"""Stands in a decoded text for bytes that are no character, or whose character ends in later tokens."""
FIRST_LOOK = "First look"
"""TensorBoard's section of the curves to read first: an upper-case letter comes before all others."""
TOTAL = "total"
"""The name of the weighted sum of all rewards."""
Message = dict[str, Any]
"""A turn: `role` (`system`, `user`, `assistant` or `tool`), `content`, and more for chat templates."""


class UsageError(ValueError):
    """A user's mistake. The message names the key, the value, what is allowed and the fix."""


def require(holds: bool, message: str) -> None:
    """Raises UsageError with the message unless the condition holds."""
    if not holds:
        raise UsageError(message)


def at_least(key: str, value: float | None, minimum: float, owner: str = "") -> None:
    """Raises UsageError if `value` is below `minimum` or NaN; None stands for a default and passes.

    Args:
        key: The setting as the user writes it.
        value: Its value.
        minimum: The smallest value that is allowed.
        owner: The class that has the setting, where the key alone does not tell.
    """
    of_owner = f" of {owner}" if owner else ""
    require(value is None or value >= minimum, f"{key}={value}{of_owner}: give {minimum} or more")


class Stateful:
    """Base of classes that keep a state from step to step. By default there is no state."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint must hold, so that a resumed run continues exactly; equal on every rank."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""


class FinishReason(StrEnum):
    """The reason why a completion ended."""

    STOP = "stop"
    """The model sampled one of its stop tokens, or completed a stop string."""
    LENGTH = "length"
    """The completion reached `max_new_tokens`: it is truncated."""


class Status(StrEnum):
    """The outcome of scoring a sample, or of a task in a worker process. docs/reference/metrics.md explains each."""

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
    NOT_APPLICABLE = "not_applicable"
    """The reward does not apply to the sample, and adds nothing to its total: this is no failure."""
    NO_MATCH = "no_match"
    """The completion does not have the required form."""
    CLOSED = "closed"
    """A gate was scored and is not open."""
    CUT = "cut"
    """The input lost its beginning, because it was too long for the model."""


@dataclass(slots=True)
class Question:
    """One row of a task: a question, its gold answer, and where the row came from."""

    text: str
    """The question as the task states it, before any prompt template."""
    answer: str
    """The gold answer, bare: `42`, not `#### 42`."""
    source: str = ""
    """Where the row came from, for messages: `train.jsonl:17`."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The row's other columns, for rewards that read them."""
    history: list[Message] = field(default_factory=list)
    """The turns before the question, where it is a conversation."""
    images: tuple[Any, ...] = ()
    """The images in their order: paths, bytes of image files, or images of PIL. Workers of rewards do not get them."""


class PromptImages(ABC):
    """The images of one prompt, prepared for an encoder."""

    key: str
    """Equal for equal images alone: prompts with equal token ids and other keys are different prompts."""

    @abstractmethod
    def states(self, model: Any, prompt_ids: "Tensor", tries: bool = False) -> "ImageStates":
        """Returns what the decoder of a model reads of the images, with gradient where gradients are on.

        Args:
            model: A model that sees.
            prompt_ids: [P] token ids of the prompt.
            tries: Raise UsageError unless the decoder computes with these states what the model as a whole computes.
        """


@dataclass(frozen=True, slots=True, eq=False)
class ImageStates:
    """What a decoder reads of the images of one prompt. The image tokens have ids, but nothing reads their embeddings.

    `Policy.encode_images` makes it once per prompt. It travels with the prompt, and no formula sees it.
    """

    index: "Tensor"
    """[n] int64, the indices of the image tokens in the prompt; on the CPU, as `positions`."""
    states: "Tensor"
    """[n, hidden] what the decoder reads at the image tokens, on the device of the policy."""
    images: PromptImages
    """`Prompt.images`, from which a trained encoder, or the encoder of a teacher, makes states of its own."""
    layers: "tuple[Tensor, ...]" = ()
    """[n, hidden] each, added at the image tokens after the first layers (DeepStack of Qwen3-VL, arXiv 2406.04334)."""
    positions: "Tensor | None" = None
    """[3, P] int64 position of each token in time, row and column (M-RoPE, arXiv 2409.12191); None: in its order."""

    @property
    def ahead(self) -> int:
        """The position of the token after the prompt, minus the prompt's length: an image takes few positions."""
        return 0 if self.positions is None else int(self.positions.max()) + 1 - self.positions.shape[1]


@dataclass(slots=True)
class Prompt:
    """q of the paper: a question as the model sees it."""

    id: int
    """The key of the random numbers of the prompt's completions.

    In training it is the prompt's index in the run's stream of prompts, so a question that comes again gets new
    completions. In evaluation it is the row of the question.
    """
    text: str
    """The prompt after the chat template."""
    token_ids: list[int]
    """[P] ids of `text`, never empty."""
    question: Question
    """The row of the task."""
    answer_prefix: str = ""
    """The end of `text` with which the assistant's turn begins; the policy does not sample it."""
    images: PromptImages | None = None
    """The images, prepared for an encoder; None for text alone."""
    image_states: ImageStates | None = None
    """What `Policy.encode_images` made of `images`."""


class RandomKey(NamedTuple):
    """The key of the random numbers of one call of an engine, beside the fields of each `Request`."""

    seed: int = 0
    """The seed of the run."""
    step: int = 0
    """The exploration step: at another step the same prompt gets other completions."""


@dataclass(slots=True)
class Request:
    """One completion to sample. Its random numbers are keyed by the last three fields and a `RandomKey`."""

    token_ids: list[int]
    """[P] ids that the model reads first, never empty; requests with equal `prefix` share their prefill."""
    prompt_id: int
    """`Prompt.id`."""
    sample: int
    """The completion's index in its group."""
    position: int = 0
    """The position of the completion's first token among all sampled tokens of a conversation.

    A second turn goes on where the first one ended; from 0 it would sample with the same random numbers again.
    """
    image_states: ImageStates | None = None
    """`Prompt.image_states`."""

    @property
    def prefix(self) -> tuple[tuple[int, ...], str]:
        """What two requests must share to share their prefill: the token ids, and a key of the images."""
        return tuple(self.token_ids), self.image_states.images.key if self.image_states else ""

    @classmethod
    def from_prompts(cls, prompts: Sequence[Prompt], group_size: int) -> list["Request"]:
        """Makes `group_size` requests per prompt, group after group."""
        return [
            cls(prompt.token_ids, prompt.id, sample, image_states=prompt.image_states)
            for prompt in prompts
            for sample in range(group_size)
        ]


@dataclass(slots=True)
class Completion:
    """o_i of the paper: the tokens that the policy sampled after one prompt."""

    token_ids: list[int]
    """[R] sampled ids with the stop token, if one was sampled; at least one."""
    logp: list[float] | None
    """[R] log-prob in nats of each id under the distribution from which it was sampled; None if unknown."""
    finish_reason: FinishReason
    """The reason why it ended."""
    stop_string: str = ""
    """The string of `Sampling.stop` that its last token completed, if any."""
    versions: list[int] | None = None
    """[R] `Policy.version` of the weights that sampled each id; None if all are the engine's."""

    @property
    def written(self) -> list[int]:
        """[R or R - 1] ids of the text: all but the stop token."""
        ends_with_stop_token = self.finish_reason is FinishReason.STOP and not self.stop_string
        return self.token_ids[:-1] if ends_with_stop_token else self.token_ids


@dataclass(slots=True)
class Piece:
    """Turns of a conversation whose tokens follow each other.

    A new piece begins where the chat template rewrites earlier turns. Tokens that the policy sampled in an earlier
    piece are context in the new piece. Most conversations are one piece.
    """

    token_ids: list[int]
    """[T] ids from the first token of the prompt to the last sampled token."""
    sampled: list[bool]
    """[T] True if the policy sampled the token. At least one token was sampled."""
    logp: list[float] | None
    """[R] log-probs of the sampled tokens, as in `Completion`."""


@dataclass(slots=True)
class Conversation:
    """A conversation of the policy with an environment."""

    messages: list[Message] = field(default_factory=list)
    """All messages as the environment has them; the messages of the prompt come first."""
    pieces: list[Piece] = field(default_factory=list)
    """The pieces in order; together they are one completion."""
    ends: list[int] = field(default_factory=list)
    """[turns] index of each turn's last token among all sampled tokens."""
    rewards: list[float] = field(default_factory=list)
    """[turns] reward of the environment for each turn."""
    outcome: float | None = None
    """The environment's reward for the conversation as a whole."""
    status: str = Status.OK
    """How the environment failed; `ok` if it did not. A failure leaves the completion out of its group."""
    error: str = ""
    """The failure in words."""
    num_calls: int = 0
    """Calls of tools, failed calls included."""
    num_failed_calls: int = 0
    """Calls that cannot be read, or whose tool raised an exception. The policy reads the error."""

    @property
    def num_context(self) -> int:
        """The number of context tokens after the first sampled token."""
        return sum(piece.sampled[piece.sampled.index(True) :].count(False) for piece in self.pieces)

    num_given = num_context
    """The name of `num_context` in 0.2, for rewards in users' files."""


@dataclass(slots=True)
class Sample:
    """A prompt and one of its completions, as a reward sees them."""

    prompt: Prompt
    """The prompt, with its question and gold answer."""
    text: str
    """What the policy wrote: the completion decoded, without the stop token and without special tokens.

    It ends with the stop string, if one ended it. Of a conversation it is the last turn, while `token_ids` are the ids
    of all turns.
    """
    token_ids: list[int]
    """[R] sampled ids, as in `Completion`."""
    finish_reason: FinishReason
    """The reason why the completion ended."""
    stop_string: str = ""
    """The stop string that ended it, as in `Completion`."""
    conversation: Conversation | None = None
    """The turns, where there is an environment."""
    logp: list[float] | None = None
    """[R] log-probs, as in `Completion`; of a conversation the pieces have them."""
    versions: list[int] | None = None
    """[R] versions of the weights, as in `Completion`."""

    @property
    def failed(self) -> bool:
        """True if the environment failed, so that nothing can be learned from it."""
        return self.conversation is not None and self.conversation.status != Status.OK

    @property
    def turn(self) -> str:
        """The assistant's turn: the answer prefix of the prompt, and what the policy wrote."""
        return self.prompt.answer_prefix + self.text

    @property
    def whole_turn(self) -> str:
        """`turn`, with `<think>` before it if the prompt before the answer prefix ends with it."""
        text_before_turn = self.prompt.text.removesuffix(self.prompt.answer_prefix)
        return "<think>" + self.turn if text_before_turn.rstrip().endswith("<think>") else self.turn

    @property
    def answer(self) -> str:
        """The gold answer."""
        return self.prompt.question.answer

    @property
    def truncated(self) -> bool:
        """True if the completion was cut off at `max_new_tokens`, or the conversation at one of its limits."""
        return self.finish_reason is FinishReason.LENGTH
