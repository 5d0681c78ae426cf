"""Draws what a run learned: the mean reward and the validation scores over the exploration steps, or other metrics.

python tools/plot_run.py --run runs/quickstart --out docs/quickstart.png
python tools/plot_run.py --run runs/quickstart --metrics '[policy/entropy, rollout/length_mean]' --out run.png
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import auto_cli

from grpo_lightning.plugins.looking.run_files.run_configs import flat, read_config
from grpo_lightning.plugins.looking.run_files.run_graders import measure
from grpo_lightning.plugins.looking.run_files.run_scalars import read_scalars, validation_names

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#999999"
"""Okabe and Ito's colours, which the colour-blind can tell apart."""


def plot(run: Path, out: Path, metrics: Sequence[str] = ()) -> None:
    """Draws a panel of reward and one of validation, side by side, or a panel per metric, each of 450 x 350 pixels.

    Args:
        run: The run's folder.
        out: The picture, a PNG.
        metrics: Scalars, a panel each; reward and validation by default.

    Raises:
        ValueError: The run has not logged a metric.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    scalars = read_scalars(run)
    if missing := [name for name in metrics or ["reward/mean"] if name not in scalars]:
        there = f"; logged are {', '.join(scalars)}" if scalars else "; give a folder that grpo fit has logged to"
        raise ValueError(f"{run}: no {missing[0]} is logged there{there}")
    panels = {name: ("", [name]) for name in metrics}
    measured = measure([flat(read_config(run / "config.yaml") or {})])
    usual = {"reward/mean": ("Training", ["reward/mean"]), measured: ("Validation", validation_names(scalars))}
    panels = panels or usual
    figure = Figure(figsize=(4.5 * len(panels), 3.5), dpi=100, layout="constrained")
    (row,) = figure.subplots(1, len(panels), squeeze=False)
    for panel, (label, (title, shown)) in zip(row, panels.items(), strict=True):
        for name, color, marker in zip(shown, (BLUE, ORANGE, GREEN), "os^", strict=False):
            steps, values = zip(*scalars[name], strict=True)
            dots = {"marker": marker, "markersize": 4} if len(steps) < 25 else {"linewidth": 1.8}
            panel.plot([step + 1 for step in steps], values, color=color, label=name, **dots)
        panel.set(title=title, xlabel="exploration steps", ylabel=label)
        panel.spines[["top", "right"]].set_visible(False)
        if len(shown) > 1:
            panel.legend(frameon=False, loc="lower right")
    out.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(out)


if __name__ == "__main__":
    try:
        auto_cli(plot, as_positional=False)
    except ValueError as error:
        sys.exit(str(error))
