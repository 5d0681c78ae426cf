"""What a run's updates did to each token: the records under `inspect/` in its folder. docs/inspect.md describes them.

A file holds one exploration step: a line of JSON about the step, then a line per group. Numbers per token are packed:
base64 of little-endian float32, int32 or int8, so a token takes about 200 bytes.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from grpo_lightning.plugins.inspect.packing import Array, pack, unpack
from grpo_lightning.plugins.inspect.turns import ConversationRecord
from grpo_lightning.types import UsageError

FOLDER = "inspect"
NAME = re.compile(r"step-[0-9]+\.jsonl")
FORMAT = 1


@dataclass(slots=True)
class TokenRecord:
    """The T tokens of a completion, drawn and given. An array is [T] float32, or None where the run has no such number.

    Given tokens, which the policy did not draw, have NaN in every float32 array and 0 in `clip`.
    """

    ids: Array
    """[T] int32."""
    pieces: list[str]
    """[T] the text that each token adds. A token that ends inside a character adds nothing; the next adds the whole."""
    given: Array | None = None
    """[T] int8, 1 for tokens that the policy did not draw; None: it drew all."""
    sampler_logp: Array | None = None
    """Log-prob recorded when the token was drawn. A followed answer has it only where nothing but the
    temperature set its distribution: not if it is greedy, or filtered by top_k, top_p or min_p."""
    old_logp: Array | None = None
    update_logp: Array | None = None
    """Log π_θ in the forward of the last update that the token took part in, so before that update."""
    after_logp: Array | None = None
    """Log π_θ after the step's updates."""
    ref_logp: Array | None = None
    advantage: Array | None = None
    weight: Array | None = None
    correction: Array | None = None
    """Factor for the mismatch of sampler and policy, which `weight` includes."""
    surrogate: Array | None = None
    """The surrogate's value at `update_logp`."""
    kl: Array | None = None
    """Estimate of KL(π_θ || π_ref) at `update_logp`."""
    push: Array | None = None
    """Derivative of the objective by the token's log π_θ at `update_logp`."""
    clip: Array | None = None
    """[T] int8 at `update_logp`: -1 at the lower bound or target, 1 at the upper, 0 between."""
    entropy_before: Array | None = None
    """Entropy of π_θ before the step's updates, in nats."""
    entropy_update: Array | None = None
    """Entropy in the forward of `update_logp`."""
    entropy_after: Array | None = None
    top_before_ids: Array | None = None
    """[T, K] int32 the likeliest tokens before the step's updates, likeliest first."""
    top_before_logp: Array | None = None
    top_after_ids: Array | None = None
    """[T, K] int32 the likeliest tokens after the step's updates."""
    top_after_logp: Array | None = None
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
    """What the surrogate prepared, such as the targets of `TargetProbability`."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def drawn(self) -> Array:
        """[T] bool, whether the policy drew the token."""
        return np.ones(len(self), bool) if self.given is None else self.given == 0


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
    segments: dict[str, list[tuple[int, float | None]]]
    """By reward: index of each segment's last token, and its value; None where it failed."""
    tokens: TokenRecord
    greedy: bool = False
    judge: str = ""
    """The name of the reward that decides what is right: in validation the judge."""
    conversation: ConversationRecord | None = None
    """The turns, where there is an environment. A conversation has a completion per piece; None without environment."""
    notes: dict[str, str] = field(default_factory=dict)
    """What rewards say of their values: a judge's reply, the tests that failed."""


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
    std: float | None
    update: int | None
    """The last update of the step whose forward saw it, from 0.

    It may be one that was not made: a stop rule refused it, or it was not finite. `update/*` leaves such ones out.
    """
    completions: list[CompletionRecord]
    vocabulary: dict[int, str]


@dataclass(slots=True)
class StepRecord:
    """What is recorded of an exploration step."""

    step: int
    """Exploration steps done: 1 more than x in TensorBoard."""
    objective: dict[str, Any]
    """The objective's class and settings, nested; an infinite setting is None."""
    temperature: float
    rewards: list[str]
    correct: str
    """The reward that decides what is right in training."""
    groups: list[GroupRecord]
    val_temperature: float | None = None
    """That of validation, at which followed prompts are measured; 1 where validation is greedy."""
    format: int = FORMAT

    def lines(self) -> list[str]:
        """The lines of the step's file."""
        head = pack(self)
        rows = [head, *head.pop("groups")]
        return [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows]

    @classmethod
    def from_lines(cls, lines: list[str]) -> "StepRecord":
        """The inverse of `lines`. Fields that are not known here are left out."""
        head, *groups = map(json.loads, lines)
        if head["format"] != FORMAT:
            raise ValueError(f"its format is {head['format']!r}, not {FORMAT}")
        step: StepRecord = unpack(cls, head | {"groups": groups})
        return step


def describe(part: Any, above: Sequence[int] = ()) -> Any:
    """A part of the objective as JSON: its class, and its settings with the parts that it is made of.

    What points back to a part that it belongs to is its class alone. What starts with `_` and what is no setting are
    left out. `above` has the ids of the parts that it belongs to.
    """
    if isinstance(part, float) and not math.isfinite(part):
        return None
    if part is None or isinstance(part, (bool, int, float, str)):
        return part
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
    settings = getattr(part, "__dict__", {})
    return name | {key: describe(value, above) for key, value in settings.items() if not key.startswith("_")}


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


def read(run: Path | str) -> list[StepRecord]:
    """The records of a run, in the order of its steps."""
    files = files_of(run)
    if not files:
        raise UsageError(f"{run}: no records in {Path(run) / FOLDER}; give the folder of a run with `inspect` on")
    records = []
    for file in files:
        try:
            records.append(read_file(file))
        except ValueError as error:
            raise UsageError(f"{file}: {error}; remove the file, the others can be read without it") from error
    return records
