"""`grpo inspect`: a run's records and curves in one HTML file that needs no server, and loads nothing.

It imports neither torch nor Lightning, so it starts at once.
"""

import argparse
import json
import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count as count_from
from pathlib import Path
from typing import Any

from markupsafe import escape

from grpo_lightning.plugins.looking.inspector.record import FOLDER, name_bounds, read_file, recorded
from grpo_lightning.plugins.looking.pages.markup import ASSETS, check_out, filled, source_of, write_page
from grpo_lightning.plugins.looking.run_files.run_configs import changes_of, read_config, starts_of
from grpo_lightning.plugins.looking.run_files.run_scalars import Scalars, read_scalars, validation_names
from grpo_lightning.types import at_least

PAGE = "inspect.html"
SCRIPTS = [
    *("decode", "dom", "text", "scale", "quantities", "permalink", "curves", "filters", "groups"),
    *("turns", "completions", "histogram", "landscape", "card", "follow", "compare", "keys", "bar", "app"),
]
"""The scripts in assets/, in the order in which they are joined."""
NUM_POINTS = 300
"""The most points of a curve in the page."""
CURVES = {
    "reward": "reward/mean",
    "validation": "",
    "length": "rollout/length_mean",
    "KL ref": "policy/kl_ref",
    "KL old": "policy/kl_old",
    "clipped": "policy/clip_low + policy/clip_high",
    "entropy": "policy/entropy",
}
"""The page's curves in their order, and the scalar that each shows; the scalar of validation has k in its name."""


@dataclass(slots=True)
class RunData:
    """The data of a run that the page shows."""

    name: str
    """The name of the run's folder, after its parent's where `names_of` says so."""
    steps: dict[int, list[str]]
    """By step, the lines of JSON of each readable record: the step, then its groups."""
    curves: dict[str, list[tuple[int, float]]]
    """By the caption of a curve, (x, value) of its points."""
    metrics: dict[str, str]
    """By the caption of a curve, the name of the scalar that it shows."""
    notes: list[str]
    """A sentence for each file that cannot be read, for what was left out, and for changed options."""

    @classmethod
    def read(cls, folder: Path, max_bytes: float = math.inf, name: str = "") -> "RunData":
        """Reads the curves of a run, and as many of its records, evenly spread, as fit into `max_bytes`.

        The last record is always read. A broken file is left out, and a note says so.
        """
        name = name or names_of([folder])[0]
        steps: dict[int, list[str]] = {}
        starts = starts_of(folder, read_config(folder / "config.yaml") or {})
        notes = [f"{name} {change}." for change in changes_of(starts)]
        all_files = recorded(folder)
        files = fitting(all_files, list(map(size_of, all_files)), max_bytes)
        for file in files:
            try:
                record = read_file(file)
                name_bounds(record)
                steps[record.step] = record.lines()
            except ValueError as error:
                notes.append(f"{FOLDER}/{file.name} cannot be read and is left out: {error}.")
        if len(files) < len(all_files):
            notes.append(
                f"{len(files)} of the {len(all_files)} recorded steps of {name} are here, evenly spread, to keep the "
                "page small; --max_mb sets its size. Fewer inspect.num_groups or inspect.num_followed make a step "
                "smaller."
            )
        return cls(name, steps, *curves_of(read_scalars(folder)), notes)


def names_of(folders: Sequence[Path]) -> list[str]:
    """Returns names of runs by their folders: `run`, or `arm/0` if a folder is named by a seed or two have one name."""
    paths = [folder.resolve().parts for folder in folders]
    has_seed_name = any(re.fullmatch(r"(seed[_-]?)?\d+", path[-1]) for path in paths)
    # The fewest last names of each path that tell it from the other.
    counts = count_from(1 + has_seed_name)
    num_names = next(n for n in counts if len({path[-n:] for path in paths}) == len({*paths}))
    return ["/".join(path[-num_names:]) for path in paths]


def size_of(file: Path) -> int:
    """Returns about how many bytes a record takes in the page."""
    return file.stat().st_size if file.is_file() else 0


def fitting(files: Sequence[Path], sizes: Sequence[int], max_bytes: float) -> list[Path]:
    """Returns as many files, evenly spread, as have at most `max_bytes` together; at least the last file."""

    def fits(num_left_out: int) -> bool:
        return sum(evenly(sizes, len(sizes) - num_left_out)) <= max_bytes

    # Fewer files have fewer bytes, or nearly so: it is enough to look at a few counts.
    return evenly(files, len(files) - bisect_left(range(len(files) - 1), True, key=fits))


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """Returns `count` of the items, evenly spread: the last, and if there are two or more the first."""
    if count == 1:
        return [items[-1]]
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


def curves_of(scalars: Scalars) -> tuple[dict[str, list[tuple[int, float]]], dict[str, str]]:
    """Returns the page's curves of a run, and the names of the scalars that they show.

    A scalar that is always 0 has no curve. Values have four figures; of more than NUM_POINTS finite points an evenly
    spread selection is left.
    """
    names = CURVES | {"validation": next(iter(validation_names(scalars)), "")}
    low, high = (dict(scalars.get(f"policy/clip_{side}", [])) for side in ("low", "high"))
    clipped = [(step, low.get(step, 0.0) + high.get(step, 0.0)) for step in sorted({*low, *high})]
    curves = {}
    for name, key in names.items():
        points = clipped if name == "clipped" else scalars.get(key, [])
        if any(value for _, value in points):
            finite = [(step, float(f"{value:.4g}")) for step, value in points if abs(value) < float("inf")]
            curves[name] = evenly(finite, NUM_POINTS) if len(finite) > NUM_POINTS else finite
    return curves, names


def build(runs: Sequence[RunData]) -> str:
    """Returns the page of a run, or of two to compare: HTML with everything in it."""
    style = (ASSETS / "style.css").read_text(encoding="utf-8")
    scripts = [(ASSETS / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS]
    script = "\n".join(['(() => {\n"use strict";', *scripts, "})();"])
    heads = [
        {"name": run.name, "steps": [{"step": n} for n in run.steps], "curves": run.curves, "metrics": run.metrics}
        for run in runs
    ]
    page = {"runs": heads, "notes": [note for run in runs for note in run.notes]}
    # The browser decodes a step when it is first looked at, so each has an element.
    data = [data_block("page", json.dumps(page, ensure_ascii=False))]
    for index, run in enumerate(runs):
        data += [data_block(f"step-{index}-{step}", f"[{','.join(lines)}]") for step, lines in run.steps.items()]
    # This style and this script alone, and no request to anywhere.
    policy = (
        f"default-src 'none'; script-src {source_of(script)}; style-src {source_of(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    title = " and ".join(run.name for run in runs)
    return filled("page.html", policy=policy, title=title, style=style, script=script, data="\n".join(data))


def data_block(name: str, text: str) -> str:
    """Returns JSON in an element that no browser runs. It has no `<`, so nothing in it can end the element."""
    # A half of a pair of surrogates is no UTF-8: it becomes its escape.
    valid = text.encode("utf-8", "backslashreplace").decode("utf-8")
    safe = valid.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return f'<script type="application/json" id="{escape(name)}">{safe}</script>'


def write(run: Path, out: Path, compare: Path | None = None, max_mb: float = 25.0) -> list[str]:
    """Writes the page of a run; returns what could not be read or was left out, a sentence each."""
    folders = [folder for folder in (run, compare) if folder is not None]
    sizes = [sum(map(size_of, recorded(folder))) for folder in folders]
    bytes_per_byte = max_mb * 1e6 / max(sum(sizes), 1)
    runs = [
        RunData.read(folder, size * bytes_per_byte, name)
        for folder, size, name in zip(folders, sizes, names_of(folders), strict=True)
    ]
    write_page(out, build(runs))
    return [note for run_data in runs for note in run_data.notes]


def main(args: Sequence[str] | None = None) -> int:
    """Writes the page and prints where it is; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="grpo inspect",
        description="Writes one HTML file that shows what a run's updates did to each token. Open it in any browser; "
        "it needs no server and no network.",
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="the run's folder")
    add("-o", "--out", type=Path, metavar="FILE", help=f"the page, .html (default: RUN/{PAGE})")
    add("--compare", type=Path, metavar="RUN2", help="a second run, to see the same prompts side by side")
    limit = "most megabytes of records; beyond it steps are left out, evenly (default: 25)"
    add("--max_mb", type=float, default=25.0, metavar="MB", help=limit)
    options = parser.parse_args(args)
    out = options.out or options.run / PAGE
    at_least("max_mb", options.max_mb, 0)
    check_out(out, PAGE)
    notes = write(options.run, out, options.compare, options.max_mb)
    print(*notes, f"{out}: {out.stat().st_size / 1e6:.1f} MB; open it in a browser", sep="\n")
    return 0
