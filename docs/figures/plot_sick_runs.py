"""Makes runs that are ill on purpose, and draws them for docs/how_to/reading_a_run.md.

python docs/figures/plot_sick_runs.py [--workers 2] [--out docs/how_to/reading_a_run]

The runs are those of experiments/sick_runs/experiment.yaml, made by tools/run_experiment.py; those that are complete
are kept. The pictures are SVG files, one per illness, in the folder of `--out`. The table of the experiment's README,
between `<!-- results -->` and `<!-- /results -->`, is written anew. In a picture the first seed is drawn in full, the
others thin.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import run_experiment
from compare_runs import read_arms
from plot_run import BLUE, GREEN, GREY, ORANGE

from grpo_lightning.plugins.looking.report.arm_comparison import Arms, curve

COLORS = (GREY, ORANGE, BLUE, GREEN)
"""Of a picture's runs in their order."""
TABLE = (
    *("reward/mean", "reward/frac_zero_std", "val/avg@8", "val/pass@8", "policy/entropy"),
    *("rollout/length_mean", "rollout/truncated", "policy/kl_ref", "optim/grad_norm"),
)
"""The columns of the README's table."""


@dataclass(frozen=True)
class Picture:
    """One row of panels."""

    name: str
    """Of its file, without the suffix."""
    arms: tuple[str, ...]
    panels: tuple[str, ...]
    """The names of the scalars."""


PAYS = "equals sign pays"
PICTURES = (
    Picture(
        "healthy", ("healthy",), ("val/avg@8", "reward/mean", "policy/entropy", "rollout/length_mean", "policy/kl_ref")
    ),
    Picture(
        "learning_rate",
        ("healthy", "lr 3e-3", "lr 3e-2"),
        ("val/avg@8", "policy/kl_ref", "policy/entropy", "rollout/truncated"),
    ),
    Picture("flat", ("healthy", "lr 1e-6"), ("val/avg@8", "reward/mean", "policy/kl_ref", "optim/grad_norm")),
    Picture(
        "entropy",
        ("weak", "12 questions", "temperature 0.4"),
        ("policy/entropy", "reward/mean", "val/avg@8", "val/pass@8"),
    ),
    Picture(
        "length",
        ("healthy", "long wrong answers pay"),
        ("rollout/length_wrong", "rollout/length_right", "rollout/truncated", "val/greedy"),
    ),
    Picture(
        "hacking", ("weak", PAYS), ("reward/mean", "val/avg@8", "reward/math_verifier/mean", "rollout/length_mean")
    ),
    Picture(
        "kl",
        (PAYS, f"{PAYS[:11]}, beta 0.1", "equals sign, beta 0.1, M = 5", "equals sign, beta 1"),
        ("policy/kl_ref", "reward/mean", "val/avg@8", "rollout/truncated"),
    ),
    Picture(
        "passes",
        ("healthy", "32 updates per step"),
        ("val/avg@8", "policy/ratio_max", "policy/kl_old", "policy/clip_low"),
    ),
    Picture(
        "truncation",
        ("healthy", "21 tokens"),
        ("rollout/truncated", "rollout/length_max", "reward/math_verifier/mean", "val/pass@8"),
    ),
    Picture(
        "spread",
        ("healthy", "too hard", "too easy"),
        ("reward/frac_zero_std", "reward/mean", "optim/grad_norm", "val/avg@8"),
    ),
)


def draw(picture: Picture, arms: Arms, out: Path) -> None:
    """Writes a picture of four or five panels; the x axis is the exploration step."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # Text as text, and the same file from the same runs.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": picture.name, "font.size": 8}):
        figure = Figure(figsize=(10, 2.5), layout="constrained")
        panels = figure.subplots(1, len(picture.panels))
        for panel, name in zip(panels, picture.panels, strict=True):
            for arm, color in zip(picture.arms, COLORS, strict=False):
                draw_curves(panel, arms[arm], name, arm, color)
            panel.set_title(name, fontsize=9)
            panel.set(xlabel="step", xlim=(0, None))
            if panel.dataLim.y0 >= 0:
                panel.set_ylim(0, 1.06 * panel.dataLim.y1 or 1)  # a small change looks small
            panel.spines[["top", "right"]].set_visible(False)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})


def draw_curves(panel: Any, seeds: Mapping[str, Any], name: str, arm: str, color: str) -> None:
    """One scalar of one arm, a line per seed."""
    for index, scalars in enumerate(seeds.values()):
        if (found := curve(scalars, name, "step")) is not None:
            first = index == 0
            width, alpha = (1.8, 1.0) if first else (0.8, 0.5)
            marker = "o" if first and len(found.x) < 13 else ""
            label = arm if first else "_"
            panel.plot(
                found.x, found.y, color=color, linewidth=width, alpha=alpha, marker=marker, markersize=3, label=label
            )


def table(arms: Arms) -> str:
    """First and last value of the most telling curves, the mean over the seeds, as Markdown."""
    lines = ["| arm | " + " | ".join(TABLE) + " |", "|" + " --- |" * (len(TABLE) + 1)]
    for arm, seeds in arms.items():
        lines.append(f"| {arm} | " + " | ".join(first_and_last(list(seeds.values()), name) for name in TABLE) + " |")
    count = len(next(iter(arms.values())))
    return "\n".join(
        [*lines, "", f"First value → last value, {'one seed' if count == 1 else f'the mean over {count} seeds'}."]
    )


def first_and_last(runs: Sequence[Any], name: str) -> str:
    """`0.637 → 1.18`; a dash where no run has logged it."""
    found = [one for run in runs if (one := curve(run, name, "step")) is not None]
    ends = [float(np.mean([one.y[end] for one in found])) for end in (0, -1)] if found else []
    return " → ".join(f"{value:.3g}" for value in ends) or "–"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Makes runs that are ill on purpose, and draws them.")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at a time, a thread each")
    pictures = run_experiment.ROOT / "docs/how_to/reading_a_run"
    parser.add_argument("--out", type=Path, default=pictures, help="pictures' folder")
    options = parser.parse_args(arguments)
    folder = run_experiment.ROOT / "experiments/sick_runs"
    run_experiment.main([str(folder), "--workers", str(options.workers)])
    experiment = run_experiment.Experiment.read(folder)
    runs = experiment.runs(run_experiment.ROOT / run_experiment.folder_of(experiment))
    arms = read_arms({arm: [run.folder for run in runs if run.arm == arm] for arm in experiment.arms})
    options.out.mkdir(parents=True, exist_ok=True)
    for picture in PICTURES:
        draw(picture, arms, options.out / f"{picture.name}.svg")
        print(options.out / f"{picture.name}.svg")
    readme = folder / "README.md"
    readme.write_text(run_experiment.inserted(readme.read_text(encoding="utf-8"), table(arms)), encoding="utf-8")


if __name__ == "__main__":
    main()
