"""What a run's updates did to each token: the records under `inspect/` in its folder. docs/inspect.md describes them.

A file holds one exploration step: a line of JSON about the step, then a line per group. Numbers per token are packed:
base64 of little-endian float32, int32 or int8, so a token takes about 200 bytes.
"""

import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from grpo_lightning.plugins.inspect.checking import bytes_of, check_objective, known_fields, parsed
from grpo_lightning.plugins.inspect.turns import ConversationRecord, TurnRecord
from grpo_lightning.types import UsageError

Array = np.ndarray

FOLDER = "inspect"
"""Where a run's records are, in its folder."""
NAME = re.compile(r"step-[0-9]+\.jsonl")
"""What a record's file is called."""
FORMAT = 1
"""The version of the file format."""
NUM_ALTERNATIVES = 5
"""K, how many of the likeliest tokens are recorded at each position."""
NUM_CURVE = 40
"""The points of a token's curve."""
DEEPEST = 16
"""How many parts inside each other are described."""


@dataclass(slots=True)
class TokenRecord:
    """The T tokens of a completion, drawn and given. An array is None where the run has no such number.

    Given tokens, which the policy did not draw, have NaN in every float32 array and 0 in `clip`.
    """

    ids: Array
    """[T] int32."""
    pieces: list[str]
    """[T] the text that each token adds. A token that ends inside a character adds nothing; the next adds the whole."""
    given: Array | None = None
    """[T] int8, 1 for tokens that the policy did not draw; None: it drew all."""
    sampler_logp: Array | None = None
    """[T] float32 log-prob recorded when the token was drawn. A followed answer has it only where nothing but the
    temperature set its distribution: not if it is greedy, or filtered by top_k, top_p or min_p."""
    old_logp: Array | None = None
    """[T] float32 log π_old."""
    update_logp: Array | None = None
    """[T] float32 log π_θ in the forward of the last update that the token took part in, so before that update."""
    after_logp: Array | None = None
    """[T] float32 log π_θ after the step's updates."""
    ref_logp: Array | None = None
    """[T] float32 log π_ref."""
    advantage: Array | None = None
    """[T] float32 Â."""
    weight: Array | None = None
    """[T] float32 factor in the objective."""
    correction: Array | None = None
    """[T] float32 factor for the mismatch of sampler and policy, which `weight` includes."""
    surrogate: Array | None = None
    """[T] float32 the surrogate's value at `update_logp`."""
    kl: Array | None = None
    """[T] float32 estimate of KL(π_θ || π_ref) at `update_logp`."""
    push: Array | None = None
    """[T] float32 derivative of the objective by the token's log π_θ at `update_logp`."""
    clip: Array | None = None
    """[T] int8 at `update_logp`: -1 at the lower bound or target, 1 at the upper, 0 between."""
    entropy_before: Array | None = None
    """[T] float32 entropy of π_θ before the step's updates, in nats."""
    entropy_update: Array | None = None
    """[T] float32 entropy in the forward of `update_logp`."""
    entropy_after: Array | None = None
    """[T] float32 entropy after the step's updates."""
    top_before_ids: Array | None = None
    """[T, K] int32 the likeliest tokens before the step's updates, likeliest first."""
    top_before_logp: Array | None = None
    """[T, K] float32 their log-probs."""
    top_after_ids: Array | None = None
    """[T, K] int32 the likeliest tokens after the step's updates."""
    top_after_logp: Array | None = None
    """[T, K] float32 their log-probs."""
    near: Array | None = None
    """[T, 2] float32 the probabilities around those of the policies, between which half of the curve's points are."""
    curve: Array | None = None
    """[T, NUM_CURVE] float16 the surrogate with this token elsewhere, less `surrogate`: first at probabilities from 0
    to 1, then at those of `near`, evenly spread, with the rest of the completion as in the last update."""
    curve_kl: Array | None = None
    """[T, NUM_CURVE] float16 the same of `kl`."""
    bounds: Array | None = None
    """[T, 2] float32 probabilities where the token gets to its lower and its upper bound; NaN where there is none."""
    columns: dict[str, Array] = field(default_factory=dict)
    """[T] float32 each: what the surrogate prepared, such as the targets of `TargetProbability`."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def drawn(self) -> Array:
        """[T] bool, whether the policy drew the token."""
        return np.ones(len(self), bool) if self.given is None else self.given == 0

    def terms(self, beta: float, entropy_bonus: float) -> Array:
        """[T] float64 terms of the objective: weight * (surrogate - beta * kl + entropy_bonus * entropy); 0 if given.

        Summed over the tokens of an update they are its `policy/objective`.
        """
        assert self.weight is not None and self.surrogate is not None
        value = self.surrogate.astype(np.float64)
        if beta:
            assert self.kl is not None
            value -= beta * self.kl
        if entropy_bonus:
            assert self.entropy_update is not None
            value += entropy_bonus * self.entropy_update
        return np.where(self.weight != 0, np.nan_to_num(self.weight * value), 0.0)


@dataclass(slots=True)
class CompletionRecord:
    """A completion, its scores and its tokens."""

    text: str
    finish_reason: str
    reward: float | None
    """The weighted sum; None where a reward failed."""
    right: bool | None
    """By the reward `judge`; None where that failed."""
    scores: dict[str, float | None]
    """Each reward's value; None where it failed."""
    statuses: dict[str, str]
    answer: str | None
    """The answer that the reward `judge` found."""
    segments: dict[str, list[tuple[int, float | None]]]
    """By reward: index of each segment's last token, and its value; None where it failed."""
    tokens: TokenRecord
    greedy: bool = False
    judge: str = ""
    """The name of the reward that decides what is right: `model.correct` in training, in validation the judge."""
    conversation: ConversationRecord | None = None
    """The turns, where there is an environment. A conversation has a completion per piece; None without environment."""


@dataclass(slots=True)
class GroupRecord:
    """A prompt with its completions."""

    kind: str
    """`train`, or `validation` for a prompt that is followed over the run."""
    roles: list[str]
    """Why it was chosen: `mixed`, `moved`, `worst`, `best`, `followed`."""
    prompt_id: int
    question: str
    gold: str
    source: str
    prompt: str
    """After the template."""
    num_prompt_tokens: int
    mean: float | None
    """Mean reward."""
    std: float | None
    """Population standard deviation of the rewards."""
    update: int | None
    """The last update of the step whose forward saw it, from 0.

    It may be one that was not made: a stop rule refused it, or it was not finite. `update/*` leaves such ones out.
    """
    completions: list[CompletionRecord]
    vocabulary: dict[int, str]
    """The text of each alternative."""


@dataclass(slots=True)
class StepRecord:
    """What is recorded of an exploration step."""

    step: int
    """Exploration steps done: 1 more than x in TensorBoard."""
    objective: dict[str, Any]
    """The objective's class and settings, nested; an infinite setting is None."""
    temperature: float
    """Of training."""
    rewards: list[str]
    """The names of the rewards."""
    correct: str
    """The reward that decides what is right in training."""
    groups: list[GroupRecord]
    val_temperature: float | None = None
    """That of validation, at which followed prompts are measured; 1 where validation is greedy."""
    format: int = FORMAT

    def lines(self) -> list[str]:
        """The lines of the step's file."""
        head = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "groups"}
        return [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in (head, *map(_packed, self.groups))]

    @classmethod
    def from_lines(cls, lines: list[str]) -> "StepRecord":
        """The inverse of `lines`. Fields that are not known here are left out.

        Raises:
            ValueError: The lines are of another format, or broken.
        """
        return cls.from_rows(checked_rows(lines))

    @classmethod
    def from_rows(cls, rows: list[dict[str, Any]]) -> "StepRecord":
        """The record of rows that `checked_rows` has checked."""
        head, *groups = rows
        return cls(**head, groups=[_group(row) for row in groups])


def checked_rows(lines: list[str]) -> list[dict[str, Any]]:
    """The rows of a step's file as JSON, each field of the kind that it must be, and without unknown fields.

    Raises:
        ValueError: The lines are of another format, or broken.
    """
    head, *groups = map(parsed, lines)
    written = head.get("format") if isinstance(head, dict) else None
    if written != FORMAT:
        raise ValueError(f"no record of a step: `format` of its first line is {written!r}, expected {FORMAT}")
    try:
        head = known_fields({"groups": [], **head}, StepRecord, "the step", {"groups": list[Any]})
        check_objective(head["objective"])
        return [{name: value for name, value in head.items() if name != "groups"}, *map(_checked_group, groups)]
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def _checked_group(row: Any) -> dict[str, Any]:
    group = known_fields(row, GroupRecord, "a group", {"completions": list[Any]})
    group["completions"] = [_checked_completion(one) for one in group["completions"]]
    return group


def _checked_completion(row: Any) -> dict[str, Any]:
    special: dict[str, Any] = {"tokens": dict[str, Any], "conversation": dict[str, Any] | None}
    completion = known_fields(row, CompletionRecord, "a completion", special)
    packed = {f.name: str for f in fields(TokenRecord) if f.name not in ("pieces", "columns")}
    special = packed | {"columns": dict[str, str]}
    tokens = known_fields(completion["tokens"], TokenRecord, "a completion's tokens", special)
    arrays = {name: text for name, text in tokens.items() if name in packed}
    sizes = {name: _size(name, text) for name, text in (tokens.get("columns", {}) | arrays).items()}
    for name, size in sizes.items():
        if size != len(tokens["pieces"]):
            raise ValueError(
                f"`{name}` of a completion is of {size:g} tokens, its `pieces` are {len(tokens['pieces'])}"
            )
    for name, found in completion["segments"].items():
        if any(not 0 <= end < len(tokens["pieces"]) for end, _ in found):
            raise ValueError(f"a segment of {name} ends outside of its completion")
    if completion.get("conversation") is not None:
        completion["conversation"] = _checked_conversation(completion["conversation"], len(tokens["pieces"]))
    return completion | {"tokens": tokens}


def _checked_conversation(row: Any, num_tokens: int) -> dict[str, Any]:
    conversation = known_fields(row, ConversationRecord, "a conversation", {"turns": list[Any]})
    turns = [known_fields(turn, TurnRecord, "a turn") for turn in conversation.get("turns", [])]
    ends = [-1, *(turn["end"] for turn in turns)]
    if (turns and ends[-1] != num_tokens - 1) or any(later <= earlier for earlier, later in pairwise(ends)):
        raise ValueError("the turns of a conversation do not follow each other to the end of its tokens")
    return conversation | {"turns": turns}


def _size(name: str, text: str) -> float:
    """The tokens of a packed array."""
    width = np.dtype(DTYPES.get(name, "<f4")).itemsize * WIDTHS.get(name, 1)
    return len(bytes_of(text, name)) / width


def path_of(run: Path | str, step: int) -> Path:
    """The file of an exploration step, counted from 1."""
    return Path(run) / FOLDER / f"step-{step:06d}.jsonl"


def step_of(file: Path) -> int:
    """The exploration step of a file that `path_of` has named."""
    return int(file.stem.removeprefix("step-"))


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The rows of a step's file, checked.

    Raises:
        ValueError: It cannot be read, is of another format, broken, or of another step than its name says.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise ValueError(f"it cannot be opened ({error.strerror})") from error
    rows = checked_rows(text.removesuffix("\n").split("\n"))
    if file.name != path_of("", rows[0]["step"]).name:
        raise ValueError(f"its name is not that of its step, {path_of('', rows[0]['step']).name}")
    return rows


def files_of(run: Path | str) -> list[Path]:
    """The files of a run's records, in the order of the steps. Files with other names are no records."""
    files = [file for file in (Path(run) / FOLDER).glob("step-*.jsonl") if NAME.fullmatch(file.name)]
    return sorted(files, key=step_of)


def read(run: Path | str) -> list[StepRecord]:
    """The records of a run, in the order of its steps.

    Args:
        run: The run's folder.

    Raises:
        UsageError: There are none, or one is broken.
    """
    files = files_of(run)
    if not files:
        raise UsageError(f"{run}: no records in {Path(run) / FOLDER}; give the folder of a run with `inspect` on")
    records = []
    for file in files:
        try:
            rows = rows_of(file)
        except ValueError as error:
            raise UsageError(f"{file}: {error}; remove the file, the others can be read without it") from error
        records.append(StepRecord.from_rows(rows))
    return records


DTYPES: Mapping[str, str] = {
    "ids": "<i4",
    "given": "<i1",
    "clip": "<i1",
    "top_before_ids": "<i4",
    "top_after_ids": "<i4",
    "curve": "<f2",
    "curve_kl": "<f2",
}
"""Types of the arrays that are not float32."""

WIDTHS: Mapping[str, int] = {
    **{f"top_{when}_{what}": NUM_ALTERNATIVES for when in ("before", "after") for what in ("ids", "logp")},
    **{"near": 2, "curve": NUM_CURVE, "curve_kl": NUM_CURVE, "bounds": 2},
}
"""The numbers per token of the arrays that have several."""


def _pack(name: str, values: Array | None) -> str | None:
    if values is None:
        return None
    return base64.b64encode(np.ascontiguousarray(values, DTYPES.get(name, "<f4")).tobytes()).decode()


def _unpack(name: str, text: str | None) -> Array | None:
    if text is None:
        return None
    values = np.frombuffer(base64.b64decode(text), DTYPES.get(name, "<f4"))
    return values.reshape(-1, WIDTHS[name]) if name in WIDTHS else values


def _packed(group: GroupRecord) -> dict[str, Any]:
    row = {f.name: getattr(group, f.name) for f in fields(group)}
    row["completions"] = []
    for completion in group.completions:
        packed = {f.name: getattr(completion, f.name) for f in fields(completion)}
        tokens = {f.name: getattr(completion.tokens, f.name) for f in fields(TokenRecord)}
        for name, value in tokens.items():
            if name == "columns":
                tokens[name] = {key: _pack(key, column) for key, column in value.items()}
            elif name != "pieces":
                tokens[name] = _pack(name, value)
        if completion.conversation is None:
            del packed["conversation"]
        else:
            packed["conversation"] = asdict(completion.conversation)
        row["completions"].append(packed | {"tokens": {n: value for n, value in tokens.items() if value is not None}})
    return row


def _group(row: dict[str, Any]) -> GroupRecord:
    completions = []
    for packed in row["completions"]:
        tokens = packed["tokens"]
        columns: dict[str, Any] = {key: _unpack("", text) for key, text in tokens.get("columns", {}).items()}
        arrays: dict[str, Any] = {n: _unpack(n, text) for n, text in tokens.items() if n not in ("pieces", "columns")}
        segments = {name: [(int(end), value) for end, value in found] for name, found in packed["segments"].items()}
        record = TokenRecord(**arrays, pieces=tokens["pieces"], columns=columns)
        talk = _conversation(packed.get("conversation"))
        completions.append(CompletionRecord(**packed | {"tokens": record, "segments": segments, "conversation": talk}))
    vocabulary = {int(id): piece for id, piece in row["vocabulary"].items()}
    return GroupRecord(**row | {"completions": completions, "vocabulary": vocabulary})


def _conversation(row: dict[str, Any] | None) -> ConversationRecord | None:
    if row is None:
        return None
    closing = [(role, text) for role, text in row.get("closing", [])]
    return ConversationRecord(**row | {"turns": [TurnRecord(**turn) for turn in row["turns"]], "closing": closing})


def describe(part: Any, above: Sequence[int] = ()) -> Any:
    """A part of the objective as JSON: its class, and its settings with the parts that it is made of.

    What points back to a part that it belongs to, or lies deeper than `DEEPEST`, is its class alone.

    Args:
        part: An object, list, mapping or plain value. What starts with `_` and what is no setting are left out.
        above: The ids of the parts that it belongs to.
    """
    if isinstance(part, float) and not math.isfinite(part):
        return None
    if part is None or isinstance(part, (bool, int, float, str)):
        return part
    if isinstance(part, type):
        return part.__name__
    name = {"class": type(part).__name__}
    if id(part) in above or len(above) >= DEEPEST:
        return name
    above = (*above, id(part))
    if isinstance(part, (list, tuple)):
        return [describe(item, above) for item in part]
    if isinstance(part, Mapping):
        return {str(key): describe(value, above) for key, value in part.items()}
    settings = getattr(part, "__dict__", {})
    return name | {key: describe(value, above) for key, value in settings.items() if not key.startswith("_")}
