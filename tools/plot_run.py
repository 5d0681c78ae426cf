"""Draws what a run learned: the mean reward and the validation scores over the updates.

python tools/plot_run.py runs/quickstart --out docs/quickstart.png
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_lightning.inspect.scalars import Scalars, read_scalars, validation_names

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#999999"
"""Okabe and Ito's colours, which the colour-blind can tell apart."""


def plot(scalars: Scalars, out: Path) -> None:
    """Two panels, side by side, in a picture of 900 x 350 pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), dpi=100, layout="constrained")
    reward, validation = figure.subplots(1, 2)
    reward.plot(*zip(*scalars["reward/mean"], strict=True), color=GREY, linewidth=1.8)
    reward.set(title="Training", xlabel="updates", ylabel="reward/mean")
    names = validation_names(scalars)
    for name, color, marker in zip(names, (BLUE, ORANGE, GREEN), "os^", strict=False):
        validation.plot(*zip(*scalars[name], strict=True), color=color, marker=marker, markersize=4, label=name)
    validation.set(title="Validation", xlabel="updates", ylabel="fraction right")
    if names:
        validation.legend(frameon=False, loc="lower right")
    for panel in (reward, validation):
        panel.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure).print_png(out)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Draws what a run learned.")
    parser.add_argument("run", type=Path, help="the run's folder, which holds its event files")
    parser.add_argument("--out", type=Path, required=True, help="the picture, a PNG")
    options = parser.parse_args(arguments)
    scalars = read_scalars(options.run)
    if "reward/mean" not in scalars:
        sys.exit(f"{options.run}: no event file there has reward/mean; give a folder that grpo fit has logged to")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    plot(scalars, options.out)


if __name__ == "__main__":
    main()
