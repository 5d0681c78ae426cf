"""The page of a run: its records and curves in one HTML file that needs no server, and loads nothing."""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from grpo_lightning.plugins.inspect.arms import changes_of, read_config
from grpo_lightning.plugins.inspect.markup import escaped
from grpo_lightning.plugins.inspect.output import write_whole
from grpo_lightning.plugins.inspect.record import FOLDER, files_of, rows_of
from grpo_lightning.plugins.inspect.scalars import Scalars, read_scalars, validation_names
from grpo_lightning.types import UsageError

SCRIPTS = [
    *("decode", "dom", "text", "scale", "quantities", "permalink", "curves", "filters", "groups"),
    *("turns", "completions", "histogram", "landscape", "card", "follow", "compare", "keys", "bar", "app"),
]
"""The scripts in assets/, in the order in which they are joined."""
NUM_POINTS = 300
"""The most points of a curve."""
CURVES = {
    "reward": "reward/mean",
    "validation": "",
    "length": "rollout/length_mean",
    "KL ref": "policy/kl_ref",
    "KL old": "policy/kl_old",
    "clipped": "policy/clip_low + policy/clip_high",
    "entropy": "policy/entropy",
}
"""The page's curves in their order, and the scalar that each shows; that of validation has the run's k in its name."""


@dataclass(slots=True)
class RecordedStep:
    """A readable file of records."""

    step: int
    lines: list[str]
    """JSON: the step, then each group."""

    @property
    def size(self) -> int:
        """Its bytes in the page, about."""
        return sum(len(line.encode("utf-8", "backslashreplace")) for line in self.lines)


@dataclass(slots=True)
class RunData:
    """What the page shows of a run."""

    name: str
    """Of its folder."""
    steps: list[RecordedStep]
    curves: dict[str, list[tuple[int, float]]]
    metrics: dict[str, str]
    """The scalar that each curve shows."""
    notes: list[str] = field(default_factory=list)
    """What could not be read or was left out, a sentence each."""

    @classmethod
    def read(cls, folder: Path) -> "RunData":
        """The records and curves in a run's folder. A broken file is left out, and a note says so.

        Raises:
            UsageError: It is no run's folder, or has no records.
        """
        refuse_other_folders(folder)
        config = read_config(folder / "config.yaml")
        steps, notes = [], [f"{folder.resolve().name} {change}." for change in changes_of(folder, config or {})]
        for file in files_of(folder):
            try:
                head, *groups = rows_of(file)
            except ValueError as error:
                notes.append(f"{FOLDER}/{file.name} cannot be read and is left out: {error}.")
                continue
            lines = [json.dumps(row, ensure_ascii=False) for row in (head, *groups)]
            steps.append(RecordedStep(head["step"], lines))
        scalars = read_scalars(folder)
        return cls(folder.resolve().name, steps, curves_of(scalars), metrics_of(scalars), notes)

    @property
    def size(self) -> int:
        """The bytes of its steps."""
        return sum(step.size for step in self.steps)

    def thin(self, max_bytes: float) -> None:
        """Keeps as many steps, evenly spread, as fit into `max_bytes`; the last always stays. A note tells it."""
        kept = [*self.steps]
        while len(kept) > 1 and sum(step.size for step in kept) > max_bytes:
            kept = evenly(self.steps, len(kept) - 1)
        if len(kept) < len(self.steps):
            self.notes.append(
                f"{len(kept)} of the {len(self.steps)} recorded steps of {self.name} are here, evenly spread, to keep "
                "the page small; --max_mb sets its size."
            )
        self.steps = kept
        if (only := kept[-1:]) and only[0].size > max_bytes:
            self.notes.append(
                f"Step {only[0].step} of {self.name} alone has {only[0].size / 1e6:.3g} MB, more than --max_mb allows. "
                "It is here all the same. Fewer inspect.num_groups or inspect.num_followed make a step smaller."
            )


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """`count` of the items, evenly spread: the last, and if there are two or more the first."""
    if count == 1:
        return [items[-1]]
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


def refuse_other_folders(folder: Path) -> None:
    """Raises UsageError where `folder` is no folder with records, and names one that is."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such folder; give that of a run, such as runs/quickstart")
    if files_of(folder):
        return
    if folder.resolve().name == FOLDER and files_of(folder.resolve().parent):
        raise UsageError(f"{folder}: this is where a run keeps its records; give the run's folder, one up")
    below = sorted(path for path in folder.glob("*") if path.is_dir() and files_of(path))
    if below:
        raise UsageError(f"{folder}: no records here, but in folders below it; give one, such as {below[0]}")
    raise UsageError(
        f"{folder}: no records in {folder / FOLDER}; give the folder of a run with `inspect` on, which records its "
        "first steps after a few minutes. A run in Python records with Trainer(callbacks=[..., Inspector()])"
    )


def curves_of(scalars: Scalars) -> dict[str, list[tuple[int, float]]]:
    """The page's curves of a run, those that it has and that are not always 0, with at most NUM_POINTS points each."""
    sides = [dict(scalars.get(f"policy/clip_{side}", [])) for side in ("low", "high")]
    clipped = [(step, sum(side.get(step, 0.0) for side in sides)) for step in sorted({*sides[0], *sides[1]})]
    found = {name: scalars.get(key, []) for name, key in metrics_of(scalars).items()} | {"clipped": clipped}
    return {name: thinned(points) for name, points in found.items() if any(value for _, value in points)}


def metrics_of(scalars: Scalars) -> dict[str, str]:
    """The names of the scalars that the page's curves show, by the curve's name."""
    return CURVES | {"validation": next(iter(validation_names(scalars)), "")}


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most NUM_POINTS of the points, evenly spread, each with four figures; those that are not finite go."""
    finite = [(step, float(f"{value:.4g}")) for step, value in points if abs(value) < float("inf")]
    return evenly(finite, NUM_POINTS) if len(finite) > NUM_POINTS else finite


def build(runs: Sequence[RunData]) -> str:
    """The page of a run, or of two to compare: HTML with everything in it."""
    style = (files(__package__) / "assets" / "style.css").read_text(encoding="utf-8")
    script = joined_scripts()
    about = {
        "runs": [
            {
                "name": run.name,
                "steps": [{"step": step.step} for step in run.steps],
                "curves": run.curves,
                "metrics": run.metrics,
            }
            for run in runs
        ],
        "notes": [note for run in runs for note in run.notes],
    }
    data = [data_block("page", json.dumps(about, ensure_ascii=False))]
    for index, run in enumerate(runs):
        data += [data_block(f"step-{index}-{step.step}", f"[{','.join(step.lines)}]") for step in run.steps]
    parts = {
        "policy": escaped(policy_of(style, script)),
        "title": escaped(" and ".join(run.name for run in runs)),
        "style": style,
        "data": "\n".join(data),
        "script": script,
    }
    page = (files(__package__) / "assets" / "page.html").read_text(encoding="utf-8")
    pieces = page.replace("}}", "{{").split("{{")
    # Not by replacing one after the other: a record may contain `{{script}}`.
    return "".join(piece if index % 2 == 0 else parts[piece] for index, piece in enumerate(pieces))


def joined_scripts() -> str:
    """The scripts as one, in a scope of their own."""
    folder = files(__package__) / "assets"
    scripts = [(folder / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS]
    return "\n".join(['(() => {\n"use strict";', *scripts, "})();"])


def data_block(name: str, text: str) -> str:
    """JSON in an element that no browser runs. No `<` is left in it, so nothing in it can end the element."""
    # A half of a pair of surrogates is no UTF-8: it becomes its escape.
    whole = text.encode("utf-8", "backslashreplace").decode("utf-8")
    safe = whole.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return f'<script type="application/json" id="{escaped(name)}">{safe}</script>'


def policy_of(style: str, script: str) -> str:
    """A Content-Security-Policy: this style and this script alone, and no request to anywhere."""
    return (
        f"default-src 'none'; script-src {source_of(script)}; style-src {source_of(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def source_of(text: str) -> str:
    """The name of an inline script or style in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def write(run: Path, out: Path, compare: Path | None = None, max_mb: float = 25.0) -> list[str]:
    """Writes the page of a run; returns what could not be read or was left out, a sentence each.

    Args:
        run: The run's folder.
        out: The file to write. It is replaced as a whole.
        compare: The folder of a second run.
        max_mb: The most megabytes of records, of both runs together; beyond it steps are left out, evenly.

    Raises:
        UsageError: A folder has no records, or the file cannot be written.
    """
    runs = [RunData.read(folder) for folder in (run, compare) if folder is not None]
    total = sum(one.size for one in runs)
    for one in runs:
        one.thin(max_mb * 1e6 * one.size / max(total, 1))
    try:
        write_whole(out, build(runs))
    except OSError as error:
        raise UsageError(f"{out}: cannot be written: {error.strerror}; give a file elsewhere with -o") from error
    return [note for one in runs for note in one.notes]
