"""What a run's updates did to each token: the records under `inspect/` in its folder.

Tables in docs/inspect.md tell what each field is. A file holds one exploration step: a line of JSON about the step,
then a line per group. Numbers per token are packed: base64 of little-endian float32, float16, int32 or int8, so a
token takes about 200 bytes.
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
FORMAT = 1

NUM_ALTERNATIVES = 5  # how many of the likeliest tokens are recorded at each position
NUM_CURVE = 40

DTYPES: Mapping[str, str] = {
    **dict.fromkeys(("ids", "top_before_ids", "top_after_ids"), "<i4"),
    **dict.fromkeys(("given", "clip"), "<i1"),
    **dict.fromkeys(("curve", "curve_kl"), "<f2"),
}
"""Types of the arrays that are not float32."""

WIDTHS: Mapping[str, int] = {
    **{f"top_{when}_{what}": NUM_ALTERNATIVES for when in ("before", "after") for what in ("ids", "logp")},
    **{"near": 2, "curve": NUM_CURVE, "curve_kl": NUM_CURVE, "bounds": 2},
}
"""K, of the arrays that are [T, K]."""


@dataclass(slots=True)
class TokenRecord:
    """The T tokens of a completion, drawn and given.

    An array is [T] or [T, K], by DTYPES and WIDTHS, or None where the run has no such number. Given tokens, which the
    policy did not draw, have NaN in every float array and 0 in `clip`.
    """

    ids: Array
    pieces: list[str]
    given: Array | None = None  # None: the policy drew all
    sampler_logp: Array | None = None
    old_logp: Array | None = None
    update_logp: Array | None = None
    after_logp: Array | None = None
    ref_logp: Array | None = None
    advantage: Array | None = None
    weight: Array | None = None
    correction: Array | None = None
    surrogate: Array | None = None
    kl: Array | None = None
    push: Array | None = None
    clip: Array | None = None
    entropy_before: Array | None = None
    entropy_update: Array | None = None
    entropy_after: Array | None = None
    top_before_ids: Array | None = None
    top_before_logp: Array | None = None
    top_after_ids: Array | None = None
    top_after_logp: Array | None = None
    near: Array | None = None
    curve: Array | None = None
    curve_kl: Array | None = None
    bounds: Array | None = None
    columns: dict[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def drawn(self) -> Array:
        """[T] bool, whether the policy drew the token."""
        return np.ones(len(self), bool) if self.given is None else self.given == 0


@dataclass(slots=True)
class TurnRecord:
    """Tokens of a conversation that one side wrote. What the chat template writes around them belongs to given ones."""

    role: str
    end: int
    reward: float | None = None


@dataclass(slots=True)
class ConversationRecord:
    """A conversation with an environment, and which piece of it a completion is."""

    piece: int
    num_pieces: int
    turns: list[TurnRecord] = field(default_factory=list)
    closing: list[tuple[str, str]] = field(default_factory=list)
    outcome: float | None = None
    num_calls: int = 0
    num_failed_calls: int = 0
    error: str = ""


@dataclass(slots=True)
class CompletionRecord:
    """A completion, its scores and its tokens."""

    text: str
    finish_reason: str
    reward: float | None
    right: bool | None
    scores: dict[str, float | None]
    statuses: dict[str, str]
    answer: str | None
    segments: dict[str, list[tuple[int, float | None]]]
    tokens: TokenRecord
    greedy: bool = False
    grader: str = ""
    conversation: ConversationRecord | None = None
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class GroupRecord:
    """A prompt with its completions."""

    kind: str
    roles: list[str]
    prompt_id: int
    question: str
    gold: str
    source: str
    prompt: str
    num_prompt_tokens: int
    mean: float | None
    std: float | None
    update: int | None
    completions: list[CompletionRecord]
    vocabulary: dict[int, str]


@dataclass(slots=True)
class StepRecord:
    """What is recorded of an exploration step."""

    step: int
    objective: dict[str, Any]
    temperature: float
    rewards: list[str]
    correct: str
    groups: list[GroupRecord]
    val_temperature: float | None = None
    format: int = FORMAT

    def lines(self) -> list[str]:
        """The lines of the step's file."""
        head = micro_batch(self)
        return [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in (head, *head.pop("groups"))]

    @classmethod
    def from_lines(cls, lines: list[str]) -> "StepRecord":
        """The inverse of `lines`. Fields that are not known here are left out."""
        head, *groups = map(json.loads, lines)
        if head["format"] != FORMAT:
            raise ValueError(f"its format is {head['format']!r}, not {FORMAT}")
        return unpack(cls, head | {"groups": groups})


def name_bounds(record: StepRecord) -> None:
    """Adds to the name of each grader that gave other values than 0 and 1 what was taken for right: `reward > 0.5`."""
    completions = [completion for group in record.groups for completion in group.completions]
    values = {(completion.grader, completion.scores.get(completion.grader)) for completion in completions}
    bounded = {name for name, value in values if value not in (None, 0, 1)}
    for completion in completions:
        if completion.grader in bounded:
            completion.grader = with_bound(completion.grader)


def micro_batch(value: Any, name: str = "") -> Any:
    """A dataclass, an array, a container or a plain value as JSON; `name` is that of its field.

    A field of a dataclass that could hold an array or a conversation, and is None, is left out.
    """
    if isinstance(value, Array):
        return base64.b64encode(np.ascontiguousarray(value, DTYPES.get(name, "<f4")).tobytes()).decode()
    if is_dataclass(value):
        parts = [(field, getattr(value, field.name)) for field in fields(value)]
        large = (Array, ConversationRecord)
        return {
            f.name: micro_batch(part, f.name)
            for f, part in parts
            if part is not None or get_args(f.type)[0] not in large
        }
    if isinstance(value, dict):
        return {str(key): micro_batch(part) for key, part in value.items()}
    return [micro_batch(part) for part in value] if isinstance(value, (list, tuple)) else value


def unpack(kind: Any, value: Any, name: str = "") -> Any:
    """The inverse of `pack`: a value of JSON as an annotation says. Fields of a later version are left out."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if value is None else unpack(inner[0], value, name)
    if kind is Array:
        values = np.frombuffer(base64.b64decode(value, validate=True), DTYPES.get(name, "<f4"))
        return values.reshape(-1, WIDTHS[name]) if name in WIDTHS else values
    if is_dataclass(kind):
        known = {f.name: unpack(f.type, value[f.name], f.name) for f in fields(kind) if f.name in value}
        return kind(**known)  # type: ignore[operator]
    if origin is dict:
        return {inner[0](key): unpack(inner[1], one) for key, one in value.items()}
    if origin in (list, tuple):
        kinds = inner * len(value) if origin is list else inner
        return origin(unpack(part, one) for part, one in zip(kinds, value, strict=True))
    return value


def describe(part: Any, above: Sequence[int] = ()) -> Any:
    """A part of the objective as JSON: its class, and its settings with the parts that it is made of.

    What points back to a part that it belongs to, one of the ids `above`, is its class alone. What starts with `_` and
    what is no setting are left out.
    """
    if part is None or isinstance(part, (bool, int, float, str)):
        return None if isinstance(part, float) and not math.isfinite(part) else part
    if isinstance(part, type):
        return part.__name__
    name = {"class": type(part).__name__}
    if id(part) in above:
        return name
    above = (*above, id(part))
    if isinstance(part, (list, tuple)):
        return [describe(item, above) for item in part]
    if isinstance(part, Mapping):
        return {str(key): describe(value, above) for key, value in part.items()}
    settings = {key: value for key, value in getattr(part, "__dict__", {}).items() if not key.startswith("_")}
    return name | {key: describe(value, above) for key, value in settings.items()}


def path_of(run: Path | str, step: int) -> Path:
    """The file of an exploration step, counted from 1."""
    return Path(run) / FOLDER / f"step-{step:06d}.jsonl"


def step_of(file: Path) -> int:
    """The exploration step of a file that `path_of` has named."""
    return int(file.stem.removeprefix("step-"))


def read_file(file: Path) -> StepRecord:
    """The record in a step's file."""
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
    """The files of a run's records, in the order of the steps. Files with other names are no records."""
    files = [file for file in (Path(run) / FOLDER).glob("step-*.jsonl") if NAME.fullmatch(file.name)]
    return sorted(files, key=step_of)


def recorded(run: Path | str) -> list[Path]:
    """The files of a run's records; raises UsageError where there are none."""
    require(Path(run).is_dir(), f"{run}: there is no such folder; give that of a run, such as runs/quickstart")
    if not (files := files_of(run)):
        raise UsageError(
            f"{run}: no records in {Path(run) / FOLDER}; give the folder of a run with `inspect` on, which records its "
            "first steps after a few minutes. A run in Python records with Trainer(callbacks=[..., Inspector()])"
        )
    return files


def read(run: Path | str) -> list[StepRecord]:
    """The records of a run, in the order of its steps."""
    records = []
    for file in recorded(run):
        try:
            records.append(read_file(file))
        except ValueError as error:
            raise UsageError(f"{file}: {error}; remove the file, the others can be read without it") from error
    return records
