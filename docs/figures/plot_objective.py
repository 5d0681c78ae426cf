"""Draws the parts of the objective from the project's own functions, and works through four examples in numbers.

python docs/figures/plot_objective.py [--out docs]

objective.png     the clipped objective: unclipped, clipped, and the smaller of the two (π_old fixed, ε = 0.2)
kl_surface.png    k3 over π_θ and π_ref
surrogates.png    value and gradient of every surrogate for a completion of one token, π_old = 0.3
explanation/objective.md  the page with all of it, in which the examples are replaced
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from plot_run import BLUE, GREY, ORANGE

from grpo_lightning import CISPO, SAPO, Clipped, Reinforce, SequenceClipped, Surrogate
from grpo_lightning.maths.kl import K3
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.methods.surrogates.gmpo import GMPO
from grpo_lightning.plugins.methods.surrogates.target_probability import TargetProbability

GOOD, BAD = (1.0, BLUE, "Â = +1"), (-1.0, ORANGE, "Â = −1")
EPSILON = 0.2
OLD = 0.3
"""π_old of the token in surrogates.png."""
SURROGATES: dict[str, Surrogate] = {
    "Reinforce": Reinforce(),
    "Clipped": Clipped(),
    "CISPO": CISPO(),
    "SAPO": SAPO(),
    "SequenceClipped": SequenceClipped(),
    "GMPO": GMPO(),
    "TargetProbability": TargetProbability(),
}
"""With their defaults."""
EXAMPLES = (
    (0.01, 1.0, (0.008, 0.01, 0.012, 0.1, 0.5)),
    (0.9, 1.0, (0.8, 0.9, 0.95, 1.0)),
    (0.9, -1.0, (0.9, 0.8, 0.72, 0.5, 0.1)),
)
"""π_old, Â and values of π_θ."""
KL_EXAMPLE = {"advantage": 0.01, "beta": 0.02, "old": 0.5, "theta": 0.6}
KL_REFERENCES = (0.5, 0.1, 1e-50)


def one_token_completions(old_logp: Tensor, advantage: float) -> Rollouts:
    """N completions of one token, each of a question of its own, so that they share nothing."""
    n = len(old_logp)
    rollouts = Rollouts.from_lists([[0]] * n, list(range(n)), [[1]] * n)
    rollouts.old_logp, rollouts.advantage = old_logp, torch.full_like(old_logp, advantage)
    return rollouts


def evaluate(surrogate: Surrogate, theta: Tensor, old: Tensor, advantage: float) -> tuple[Tensor, Tensor]:
    """[N] π_θ and π_old -> [N] value and [N] its derivative by log π_θ."""
    logp, old_logp = theta.log().requires_grad_(), old.log()
    rollouts = one_token_completions(old_logp, advantage)
    rollouts.add_columns(surrogate.prepare(rollouts))
    value = surrogate(logp, old_logp, rollouts).value
    return value.detach(), torch.autograd.grad(value.sum(), logp)[0]


def new_figure(width: float, height: float) -> Any:
    """A figure of so many hundred pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain(panel: Any) -> None:
    """Only the axes that are read."""
    panel.spines[["top", "right"]].set_visible(False)


def plot_objective(out: Path) -> None:
    """Three panels over the ratio: ratio * Â, clip(ratio) * Â, and the smaller of the two, which is `Clipped`."""
    ratio = torch.linspace(0.0, 2.0, 401)
    old = torch.full_like(ratio, 0.5)
    clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
    surrogate = Clipped(EPSILON, EPSILON)
    figure = new_figure(9, 3.3)
    panels = figure.subplots(1, 3, sharey=True)
    for advantage, color, label in (GOOD, BAD):
        smaller, _ = evaluate(surrogate, ratio * old, old, advantage)
        for panel, values in zip(panels, (ratio * advantage, clipped * advantage, smaller), strict=True):
            panel.plot(ratio, values, color=color, linewidth=2, label=label)
            panel.plot(1, advantage, "o", color=color, markersize=5)
    for panel, title in zip(panels, ("ratio · Â", "clip(ratio, 0.8, 1.2) · Â", "the smaller of the two"), strict=True):
        panel.set(title=title, xlabel="ratio π_θ / π_old", xlim=(0, 2), xticks=(0, 0.8, 1, 1.2, 2))
        panel.set_xticklabels(("0", "0.8", "1", "1.2", "2"))
        panel.axvspan(1 - EPSILON, 1 + EPSILON, color=GREY, alpha=0.15, linewidth=0)
        panel.axhline(0, color=GREY, linewidth=0.8, zorder=0)
        plain(panel)
    panels[0].set_ylabel("objective")
    panels[0].legend(frameon=False, loc="upper left")
    figure.savefig(out)


def k3_surface(points: int) -> tuple[np.ndarray, np.ndarray]:
    """[P] probabilities, and [P, P] k3 with π_ref by rows and π_θ by columns."""
    probability = torch.linspace(1 / points, 1.0, points)
    ref, theta = torch.meshgrid(probability, probability, indexing="ij")
    return probability.numpy(), K3()(theta.log(), ref.log(), theta.log()).numpy()


def plot_kl_surface(out: Path) -> None:
    """k3 by colour on a logarithmic scale, with contours; it vanishes on the diagonal."""
    from matplotlib.colors import LogNorm

    probability, value = k3_surface(200)
    figure = new_figure(5.6, 4.6)
    panel = figure.subplots()
    levels = (0.01, 0.1, 1, 10)
    colors = panel.pcolormesh(
        probability, probability, value.clip(1e-3), norm=LogNorm(1e-3, 100), cmap="viridis", rasterized=True
    )
    lines = panel.contour(probability, probability, value, levels=levels, colors="white", linewidths=0.9)
    panel.clabel(lines, fmt="%g", fontsize=9)
    panel.plot((0, 1), (0, 1), "--", color="white", linewidth=1)
    panel.set(xlabel="π_θ", ylabel="π_ref", title="k3 = π_ref/π_θ − log(π_ref/π_θ) − 1", aspect="equal")
    panel.set(xlim=(0, 1), ylim=(0, 1))
    figure.colorbar(colors, ax=panel, label="nats", extend="both")
    figure.savefig(out)


def plot_surrogates(out: Path) -> None:
    """For each surrogate over the ratio: the value less that at ratio 1, and below it the derivative by log π_θ."""
    ratio = torch.linspace(0.01, 2.5, 1000)
    old = torch.full_like(ratio, OLD)
    figure = new_figure(9, 8)
    grid = figure.subplots(4, 4, sharex=True, sharey="row")
    columns = [*grid[:2].T, *grid[2:].T]
    for (name, surrogate), (above, below) in zip(SURROGATES.items(), columns, strict=False):
        for advantage, color, label in (GOOD, BAD):
            values, derivatives = evaluate(surrogate, ratio * old, old, advantage)
            at_one, _ = evaluate(surrogate, old[:1], old[:1], advantage)
            above.plot(ratio, values - at_one, color=color, linewidth=2, label=label)
            below.plot(ratio, derivatives, color=color, linewidth=2)
        above.set(title=name, ylim=(-1.7, 1.7))
        below.set(xlabel="ratio", xlim=(0, 2.5), ylim=(-2.7, 2.7), xticks=(0, 1, 2))
        below.tick_params(labelbottom=True)
        for panel in (above, below):
            panel.axvline(1, color=GREY, linewidth=0.8, zorder=0)
            panel.axhline(0, color=GREY, linewidth=0.8, zorder=0)
            plain(panel)
    for row in (0, 2):
        grid[row, 0].set_ylabel("value,\nless that at ratio 1")
        grid[row + 1, 0].set_ylabel("derivative\nby log π_θ")
    for panel in columns[-1]:
        panel.axis("off")
    note = f"π_old = {OLD}\n\nCISPO's ratio has no\ngradient: its value is\nnot what it climbs."
    columns[-1][1].text(0.05, 0.9, note, transform=columns[-1][1].transAxes, va="top", fontsize=9)
    columns[-1][0].legend(*columns[0][0].get_legend_handles_labels(), frameon=False, loc="center", fontsize=12)
    figure.savefig(out)


OPEN, CLOSE = "<!-- examples -->", "<!-- /examples -->"


def clipped_rows(old: float, advantage: float, thetas: Sequence[float]) -> list[list[float]]:
    """π_old, π_θ, ratio, the ratio that counts, and the clipped objective, for each π_θ."""
    theta = torch.tensor(thetas)
    value, _ = evaluate(Clipped(EPSILON, EPSILON), theta, torch.full_like(theta, old), advantage)
    columns = [[old] * len(thetas), list(thetas), (theta / old).tolist(), (value / advantage).tolist(), value.tolist()]
    return [list(row) for row in zip(*columns, strict=True)]


def kl_rows() -> list[list[float]]:
    """π_ref, π_old, π_θ just under the clip's bound, and dJ/dπ_θ: of the clipped term, of -β k3, and in all."""
    advantage, beta, old, theta = KL_EXAMPLE.values()
    assert math.isclose(theta, (1 + EPSILON) * old)
    below = torch.tensor([theta * (1 - 1e-6)])
    _, by_logp = evaluate(Clipped(EPSILON, EPSILON), below, torch.tensor([old]), advantage)
    rows = []
    for ref in KL_REFERENCES:
        logp = below.log().requires_grad_()
        term = -beta * K3()(logp, torch.tensor([math.log(ref)]), logp.detach())
        pulls = [float(g / below) for g in (by_logp, torch.autograd.grad(term.sum(), logp)[0])]
        rows.append([ref, old, theta, *pulls, sum(pulls)])
    return rows


def examples() -> str:
    """The four examples as Markdown."""
    parts = []
    for number, (old, advantage, thetas) in enumerate(EXAMPLES, start=1):
        parts.append(
            f"**Example {number}**: $\\pi_{{old}}={old:.3f}$, $\\varepsilon={EPSILON}$, $\\hat A={advantage:.1f}$"
        )
        rows = [[f"{x:.3f}" for x in row] for row in clipped_rows(old, advantage, thetas)]
        parts.append(table((r"$\pi_\theta$", "ratio", "clipped ratio", "objective"), [row[1:] for row in rows]))
    advantage, beta, old, _ = KL_EXAMPLE.values()
    parts.append(
        f"**Example 4**, where clip and KL term pull apart: $\\hat A={advantage}$, $\\varepsilon={EPSILON}$, "
        f"$\\beta={beta}$, $\\pi_{{old}}={old:.3f}$, $\\pi_\\theta$ just below $(1+\\varepsilon)\\pi_{{old}}$"
    )
    rows = [
        [f"{ref:g}" if ref < 1e-3 else f"{ref:.3f}", f"{clip:+.3f}", *signed(kl, total)]
        for ref, _, _, clip, kl, total in kl_rows()
    ]
    parts.append(table((r"$\pi_{ref}$", r"$dJ/d\pi_\theta$, clip term", "KL term", "total"), rows))
    return "\n\n".join(parts) + "\n"


def signed(*values: float) -> list[str]:
    """Four digits after the point, with the sign."""
    return [f"{value:+.4f}" for value in values]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads), *("| " + " | ".join(r) + " |" for r in rows)]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Draws the parts of the objective and works through examples.")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder for the pictures and the examples")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    plot_objective(options.out / "objective.png")
    plot_kl_surface(options.out / "kl_surface.png")
    plot_surrogates(options.out / "surrogates.png")
    text = examples()
    page = options.out / "explanation" / "objective.md"
    if page.exists():
        before, rest = page.read_text(encoding="utf-8").split(OPEN)
        page.write_text(f"{before}{OPEN}\n\n{text}\n{CLOSE}{rest.split(CLOSE)[1]}", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
