"""What a run's updates did to each token: the records under `inspect/` in its folder.

docs/reference/records.md has tables of the fields. A file holds one exploration step: a line of JSON about the step,
then a line per group. Numbers per token are base64 of little-endian float32, float16, int32, int8 or bool, so a token
takes about 200 bytes.
"""

import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import numpy as np

from grpo_lightning.maths.metrics import with_bound
from grpo_lightning.types import UsageError, require

Array = np.ndarray

FOLDER = "inspect"
NAME = re.compile(r"step-[0-9]+\.jsonl")

FORMAT = 2
"""The format of a step's file. In format 1, of version 0.2, `grader` is called `judge` and `context` is `given`."""

NUM_ALTERNATIVES = 5
"""The likeliest tokens that are recorded at each position."""

NUM_CURVE = 40
"""The points of a token's curve."""

DTYPES: Mapping[str, str] = {
    **dict.fromkeys(("ids", "top_before_ids", "top_after_ids"), "<i4"),
    **{"context": "?", "clip": "<i1"},
    **dict.fromkeys(("curve", "curve_kl"), "<f2"),
}
"""Types of the arrays that are not float32."""

WIDTHS: Mapping[str, int] = {
    **{f"top_{moment}_{field}": NUM_ALTERNATIVES for moment in ("before", "after") for field in ("ids", "logp")},
    **{"near": 2, "curve": NUM_CURVE, "curve_kl": NUM_CURVE, "bounds": 2},
}
"""K, of the arrays that are [T, K]."""


@dataclass(slots=True)
class TokenRecord:
    """The T tokens of a completion: those that the policy sampled, and context tokens.

    An array is None where the run has no such number. Context tokens, which the policy did not sample, have NaN in
    every float array and 0 in `clip`. Log-probs and entropies are in nats, at the sampling temperature.
    """

    ids: Array
    """[T] int32 token ids."""
    pieces: list[str]
    """[T] the text that each token adds; joined, the pieces are the decoded text with the names of special tokens.

    A token that ends inside a character adds nothing; the token that completes the character adds all of it."""
    context: Array | None = None
    """[T] bool, True for context tokens; None if the policy sampled every token."""
    sampler_logp: Array | None = None
    """[T] float32 log-prob that the engine recorded when it sampled the token, filters included.

    None for a followed answer that is greedy or filtered: it comes from another distribution than is measured."""
    old_logp: Array | None = None
    """[T] float32 log π_old."""
    update_logp: Array | None = None
    """[T] float32 log π_θ in the forward of the last update that saw the token; None if no update did."""
    after_logp: Array | None = None
    """[T] float32 log π_θ after the updates of the step."""
    ref_logp: Array | None = None
    """[T] float32 log π_ref; None without a reference."""
    advantage: Array | None = None
    """[T] float32 Â; None for validation prompts."""
    weight: Array | None = None
    """[T] float32 factor of the token in the objective, `correction` included."""
    correction: Array | None = None
    """[T] float32 factor for the mismatch of sampler and policy; None if the objective has no correction."""
    surrogate: Array | None = None
    """[T] float32 value of the surrogate at `update_logp`, before its weight."""
    kl: Array | None = None
    """[T] float32 estimate of KL(π_θ ‖ π_ref) at `update_logp`, in nats."""
    push: Array | None = None
    """[T] float32 derivative of the objective by the token's log-prob at `update_logp`, weight included."""
    clip: Array | None = None
    """[T] int8 bound or target that the token is at: -1 lower, 1 upper, 0 none."""
    entropy_before: Array | None = None
    """[T] float32 entropy of π_θ before the updates of the step."""
    entropy_update: Array | None = None
    """[T] float32 entropy of π_θ in the forward of the last update that saw the token."""
    entropy_after: Array | None = None
    """[T] float32 entropy of π_θ after the updates of the step."""
    top_before_ids: Array | None = None
    """[T, 5] int32 ids of the likeliest tokens before the updates, likeliest first."""
    top_before_logp: Array | None = None
    """[T, 5] float32 log-probs of `top_before_ids` before the updates."""
    top_after_ids: Array | None = None
    """[T, 5] int32 ids of the likeliest tokens after the updates, likeliest first."""
    top_after_logp: Array | None = None
    """[T, 5] float32 log-probs of `top_after_ids` after the updates."""
    near: Array | None = None
    """[T, 2] float32 lowest and highest probability of the second half of the curve, around the policies."""
    curve: Array | None = None
    """[T, 40] float16 change of `surrogate` if only this token moves: 20 probabilities from 0 to 1, 20 in `near`."""
    curve_kl: Array | None = None
    """[T, 40] float16 change of `kl` at the probabilities of `curve`; None if β is 0."""
    bounds: Array | None = None
    """[T, 2] float32 probabilities at which the token gets to its lower and upper bound; NaN without a bound."""
    columns: dict[str, Array] = field(default_factory=dict)
    """[T] float32 further numbers by name: what the surrogate prepared, and the `version` of the weights."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def sampled(self) -> Array:
        """[T] bool, True for the tokens that the policy sampled."""
        return np.ones(len(self), bool) if self.context is None else ~self.context


@dataclass(slots=True)
class TurnRecord:
    """Tokens of a conversation that one side wrote. What the chat template writes around them is context."""

    role: str
    """Who wrote the turn: `assistant` for the policy, a role of the messages, `prompt` or `history`."""
    end: int
    """Index of the turn's last token."""
    reward: float | None = None
    """What the environment gave for a turn of the policy; None for other turns."""


@dataclass(slots=True)
class ConversationRecord:
    """A conversation with an environment, and which piece of it a completion is."""

    piece: int
    """Index of the completion's piece; a later piece is a branch, for the chat template rewrote earlier turns."""
    num_pieces: int
    """Pieces of the conversation; 0 if its environment failed before any token."""
    turns: list[TurnRecord] = field(default_factory=list)
    """The turns of the piece, in order."""
    closing: list[tuple[str, str]] = field(default_factory=list)
    """Role and text of what the environment wrote after the last turn, which the policy did not read."""
    outcome: float | None = None
    """What the environment says of the whole conversation; None if it says nothing."""
    num_calls: int = 0
    """Calls of tools in the whole conversation, failed calls included."""
    num_failed_calls: int = 0
    """Calls of tools that failed."""
    error: str = ""
    """How the environment failed; empty if it did not."""


@dataclass(slots=True)
class CompletionRecord:
    """A completion, its scores and its tokens."""

    text: str
    """What the policy wrote, without special tokens; of a conversation the last turn."""
    finish_reason: str
    """Why it ended: a value of `FinishReason`, such as `stop` or `length`."""
    reward: float | None
    """The weighted sum of the rewards; None if it failed."""
    right: bool | None
    """The grader's verdict; None where grading failed."""
    scores: dict[str, float | None]
    """Each reward's value by its name; None where the reward failed."""
    statuses: dict[str, str]
    """Each reward's status by its name: `ok`, or why there is no value."""
    answer: str | None
    """The answer that the grader found in the text; None if it found none or looks for none."""
    segments: dict[str, list[tuple[int, float | None]]]
    """By reward, index of each segment's last token and the segment's value, None where that failed."""
    tokens: TokenRecord
    """The tokens and their numbers."""
    greedy: bool = False
    """True for the greedy answer to a validation prompt."""
    grader: str = ""
    """The name of the reward that decides what is right, above 0.5; its value is in `scores`. Empty if none."""
    conversation: ConversationRecord | None = None
    """The turns; None without an environment."""
    notes: dict[str, str] = field(default_factory=dict)
    """What rewards say of their values, by name: the reply of a judge, the tests that failed."""


@dataclass(slots=True)
class GroupRecord:
    """A prompt with its completions."""

    kind: str
    """`train`, or `validation` for a followed prompt."""
    roles: list[str]
    """Why the group is recorded: `mixed`, `moved`, `worst`, `best` or `followed`, the deciding role first."""
    prompt_id: int
    """The prompt's id in its step, or in validation."""
    question: str
    """The question's text, before the template."""
    gold: str
    """The right answer; empty if the question has none."""
    source: str
    """Where the question comes from: data set and row."""
    prompt: str
    """The prompt after the template, as the policy read it."""
    num_prompt_tokens: int
    """Tokens of the prompt."""
    mean: float | None
    """Mean reward of the completions that are not greedy; None if every reward failed."""
    std: float | None
    """Population standard deviation of those rewards; None if every reward failed."""
    update: int | None
    """Index of the last update of the step whose forward saw the group, from 0; None if no update did.

    A stop rule may have refused that update, or it was not finite."""
    completions: list[CompletionRecord]
    """The completions; the greedy answer of a validation prompt first."""
    vocabulary: dict[int, str]
    """The text of each id in `top_before_ids` and `top_after_ids`."""
    images: list[str] = field(default_factory=list)
    """The images of the prompt at 256 pixels or fewer, as `data:` addresses of PNG or JPEG files."""


@dataclass(slots=True)
class StepRecord:
    """What is recorded of an exploration step."""

    step: int
    """Exploration steps done, 1 more than x in TensorBoard; 0 before the first update."""
    objective: dict[str, Any]
    """The objective's class and settings, nested; an infinite setting is None."""
    temperature: float
    """The sampling temperature of training."""
    rewards: list[str]
    """The names of the rewards."""
    correct: str
    """The name of the grader in training."""
    groups: list[GroupRecord]
    """The recorded groups: those of training, then the followed prompts."""
    val_temperature: float | None = None
    """The temperature at which followed prompts are measured."""
    format: int = FORMAT
    """The format of the file."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """What made the start of the run that recorded the step, as in `provenance.yaml`; empty if it is unknown."""

    def lines(self) -> list[str]:
        """Returns the lines of the step's file."""
        head = to_json(self)
        groups = head.pop("groups")
        return [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in (head, *groups)]

    @classmethod
    def from_lines(cls, lines: list[str]) -> "StepRecord":
        """Reads the lines of a step's file, of format 1 too. Fields of later versions are left out."""
        head, *groups = map(json.loads, lines)
        if head["format"] == 1:
            rename_fields(groups)
        elif head["format"] != FORMAT:
            raise ValueError(f"its format is {head['format']!r}, not {FORMAT}")
        return from_json(cls, head | {"groups": groups, "format": FORMAT})


def rename_fields(groups: list[dict[str, Any]]) -> None:
    """Gives the groups in a file of format 1 the field names of format 2."""
    for completion in (completion for group in groups for completion in group["completions"]):
        for record, old, new in ((completion, "judge", "grader"), (completion["tokens"], "given", "context")):
            if old in record:
                record[new] = record.pop(old)


def name_bounds(record: StepRecord) -> None:
    """Adds what counts as right, `reward > 0.5`, to the name of each grader that gave other values than 0 and 1."""
    completions = [completion for group in record.groups for completion in group.completions]
    values = {(completion.grader, completion.scores.get(completion.grader)) for completion in completions}
    bounded = {name for name, value in values if value not in (None, 0, 1)}
    for completion in completions:
        if completion.grader in bounded:
            completion.grader = with_bound(completion.grader)


def to_json(value: Any, name: str = "") -> Any:
    """Returns a dataclass, an array, a container or a plain value of the field `name` as JSON.

    A field that could hold an array or a conversation, and is None, is left out.
    """
    if isinstance(value, Array):
        return base64.b64encode(np.ascontiguousarray(value, DTYPES.get(name, "<f4")).tobytes()).decode()
    if is_dataclass(value):
        large = (Array, ConversationRecord)
        return {
            member.name: to_json(item, member.name)
            for member in fields(value)
            if (item := getattr(value, member.name)) is not None or get_args(member.type)[0] not in large
        }
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, (list, tuple)) else value


def from_json(kind: Any, value: Any, name: str = "") -> Any:
    """Returns the value of the annotated type `kind` that `to_json` wrote. Fields of later versions are left out."""
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is UnionType:
        return None if value is None else from_json(arguments[0], value, name)
    if kind is Array:
        values = np.frombuffer(base64.b64decode(value, validate=True), DTYPES.get(name, "<f4"))
        return values.reshape(-1, WIDTHS[name]) if name in WIDTHS else values
    if is_dataclass(kind):
        present = [member for member in fields(kind) if member.name in value]
        members = {member.name: from_json(member.type, value[member.name], member.name) for member in present}
        return kind(**members)  # type: ignore[operator]
    if origin is dict:
        return {arguments[0](key): from_json(arguments[1], item) for key, item in value.items()}
    if origin in (list, tuple):
        kinds = arguments * len(value) if origin is list else arguments
        return origin(from_json(item_kind, item) for item_kind, item in zip(kinds, value, strict=True))
    return value


def describe(value: Any, enclosing: Sequence[int] = ()) -> Any:
    """Returns an object of the objective as JSON: its class, and its settings with the objects inside it.

    An object that points back to one around it, by the ids `enclosing`, is its class alone. Attributes that start with
    `_` and what is no setting are left out.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return None if isinstance(value, float) and not math.isfinite(value) else value
    if isinstance(value, type):
        return value.__name__
    name = {"class": type(value).__name__}
    if id(value) in enclosing:
        return name
    enclosing = (*enclosing, id(value))
    if isinstance(value, (list, tuple)):
        return [describe(item, enclosing) for item in value]
    if isinstance(value, Mapping):
        return {str(key): describe(item, enclosing) for key, item in value.items()}
    settings = {key: item for key, item in getattr(value, "__dict__", {}).items() if not key.startswith("_")}
    return name | {key: describe(item, enclosing) for key, item in settings.items()}


def path_of(run: Path | str, step: int) -> Path:
    """Returns the file of an exploration step, counted from 1."""
    return Path(run) / FOLDER / f"step-{step:06d}.jsonl"


def step_of(file: Path) -> int:
    """Returns the exploration step of a file that `path_of` has named."""
    return int(file.stem.removeprefix("step-"))


def read_file(file: Path) -> StepRecord:
    """Reads a step's file; raises ValueError if it holds no record."""
    try:
        record = StepRecord.from_lines(file.read_text(encoding="utf-8").removesuffix("\n").split("\n"))
        if file.name != path_of("", record.step).name:
            raise ValueError(f"its name is not that of its step, {path_of('', record.step).name}")
    except OSError as error:
        raise ValueError(f"it cannot be opened ({error.strerror})") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is no record of a step ({type(error).__name__}: {error})") from error
    return record


def files_of(run: Path | str) -> list[Path]:
    """Returns the files of a run's records, in the order of the steps. Files with other names are no records."""
    files = [file for file in (Path(run) / FOLDER).glob("step-*.jsonl") if NAME.fullmatch(file.name)]
    return sorted(files, key=step_of)


def recorded(run: Path | str) -> list[Path]:
    """Returns the files of a run's records; raises UsageError if there are none."""
    require(Path(run).is_dir(), f"{run}: there is no such folder; give that of a run, such as runs/quickstart")
    if not (files := files_of(run)):
        raise UsageError(
            f"{run}: no records in {Path(run) / FOLDER}; give the folder of a run with `inspect` on, which records its "
            "first steps after a few minutes. A run in Python records with Trainer(callbacks=[..., Inspector()])"
        )
    return files


def read(run: Path | str) -> list[StepRecord]:
    """Reads the records of a run, in the order of its steps; raises UsageError if there are none or one is broken."""
    records = []
    for file in recorded(run):
        try:
            records.append(read_file(file))
        except ValueError as error:
            raise UsageError(f"{file}: {error}; remove the file, the others can be read without it") from error
    return records
