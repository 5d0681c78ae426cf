"""How the cost of a step grows with group size, prompt, answer, model and μ.

    python experiments/roofline/curves.py --write

`--write` replaces the table of README.md and the picture of docs/how_to/performance.md.

Each point is a few steps of the small Llama of experiments/versus_trl, in this process. Points are measured in turns,
round by round, and one is the median of its rounds. Processor seconds count, over all threads: they vary less than the
wall clock where other programs run. Five minutes on two cores.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path += [str(HERE), str(HERE.parent / "versus_trl"), str(ROOT)]

import torch  # noqa: E402
from counts import Model, Sizes, total  # noqa: E402
from regimes import between  # noqa: E402
from result_tables import table  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from grpo_lightning.engines.sampling import Sampling  # noqa: E402
from grpo_lightning.maths.rollouts import Rollouts  # noqa: E402
from grpo_lightning.plugins.compute.fast.fast_compute import Fast  # noqa: E402
from grpo_lightning.plugins.engines.native.native import NativeEngine  # noqa: E402
from grpo_lightning.policy.policy import Policy  # noqa: E402
from grpo_lightning.types import RandomKey, Request  # noqa: E402

MARK = "curves"


@dataclass(frozen=True)
class Point:
    """The sizes of one measurement."""

    prompts: int = 8
    group_size: int = 8
    prompt_tokens: int = 64
    new_tokens: int = 64
    hidden: int = 128
    layers: int = 5
    vocabulary: int = 512
    mu: int = 1
    shares: bool = True

    @property
    def config(self) -> LlamaConfig:
        """Of the model, which has no end-of-text token."""
        heads = max(1, self.hidden // 32)
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 2),
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            pad_token_id=0,
            eos_token_id=None,
            bos_token_id=None,
        )

    @property
    def sizes(self) -> Sizes:
        """Of the step."""
        return Sizes.even(self.prompts, self.group_size, self.prompt_tokens, self.new_tokens)


@dataclass(frozen=True)
class Curve:
    """One size that grows, the others fixed."""

    name: str
    label: str
    points: tuple[Point, ...]
    x: Callable[[Point], float]


def curves(base: Point, scale: int = 1) -> list[Curve]:
    """Those of the page.

    Args:
        base: What does not grow.
        scale: Divides the largest sizes.
    """

    def grown(name: str, values: Sequence[int], **fixed: Any) -> tuple[Point, ...]:
        return tuple(replace(base, **{name: max(2, value // scale)} | fixed) for value in values)

    groups = (2, 4, 8, 16, 32)
    lengths = (32, 64, 128, 256, 512)
    widths = (64, 128, 256, 512)
    return [
        Curve("G", "group_size (8 prompts)", grown("group_size", groups), lambda p: p.group_size),
        Curve("prompt", "tokens of a prompt", grown("prompt_tokens", lengths), lambda p: p.prompt_tokens),
        Curve(
            "prompt, rows",
            "tokens of a prompt, share_prefix: false",
            grown("prompt_tokens", lengths[:4], shares=False),
            lambda p: p.prompt_tokens,
        ),
        Curve("answer", "tokens of a completion", grown("new_tokens", lengths), lambda p: p.new_tokens),
        Curve("width", "hidden size (5 layers)", grown("hidden", widths), lambda p: p.hidden),
        Curve("vocabulary", "vocabulary", grown("vocabulary", (512, 4096, 16384, 49152)), lambda p: p.vocabulary),
        Curve("mu", "μ", tuple(replace(base, mu=mu) for mu in (1, 2, 4)), lambda p: p.mu),
    ]


@dataclass
class Bench:
    """A policy and its rollouts at a point, ready to be timed."""

    point: Point
    sampling: list[float] = field(default_factory=list)
    """Processor seconds of each round."""
    update: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Makes model, requests and rollouts."""
        torch.manual_seed(0)
        point = self.point
        self.policy = Policy.from_model(LlamaForCausalLM(point.config), NoStops(), compute=Fast())  # type: ignore[arg-type]
        self.policy.compute.shares_prefix &= point.shares
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-6, fused=True)
        self.engine = NativeEngine()
        rows = point.prompts * point.group_size
        prompts = torch.randint(point.vocabulary, (point.prompts, point.prompt_tokens)).tolist()
        samples = range(point.group_size)
        self.requests = [Request(ids, index, sample) for index, ids in enumerate(prompts) for sample in samples]
        completions = torch.randint(point.vocabulary, (rows, point.new_tokens)).tolist()
        groups = [row // point.group_size for row in range(rows)]
        self.rollouts = Rollouts.from_lists(prompts, groups, completions)

    def run(self) -> None:
        """One step: its completions, and μ updates."""
        started = time.process_time()
        self.engine.sync(self.policy)
        self.engine.complete(self.requests, Sampling(max_new_tokens=self.point.new_tokens), RandomKey())
        sampled = time.process_time()
        self.policy.train()
        for _ in range(self.point.mu):
            self.policy(self.rollouts).logp.mean().backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.sampling.append(sampled - started)
        self.update.append(time.process_time() - sampled)


@dataclass
class NoStops:
    """Stands for a tokenizer without stop tokens: nothing else of one is used here."""

    eos_token_id: None = None


def measure(points: Sequence[Point], rounds: int) -> dict[Point, tuple[float, float]]:
    """Processor seconds of sampling and update by point, the median of `rounds` after one to warm up."""
    found: dict[Point, Bench] = {}
    for round_number in range(rounds + 1):
        for point in dict.fromkeys(points):
            bench = found.setdefault(point, Bench(point))
            bench.run()
            if round_number == 0:
                bench.sampling.clear()
                bench.update.clear()
    return {point: (statistics.median(one.sampling), statistics.median(one.update)) for point, one in found.items()}


def rows_of(curve: Curve, seconds: dict[Point, tuple[float, float]]) -> list[list[str]]:
    """Lines of the table: what grows, seconds, operations and microseconds per drawn token."""
    rows = []
    for point in curve.points:
        sampling, update = seconds[point]
        model = Model.from_config(point.config)
        work = model.prefill(point.sizes) + total(model.decoding(point.sizes))
        passes = total([*model.update(point.sizes, shared=point.shares).values()])
        rows.append(
            [
                curve.label if point is curve.points[0] else "",
                f"{curve.x(point):g}",
                f"{sampling:.3f}",
                f"{update:.3f}",
                f"{1e6 * (sampling + update) / point.sizes.sampled:.0f}",
                f"{work.operations / sampling / 1e9:.0f}",
                f"{point.mu * passes.operations / update / 1e9:.0f}",
            ]
        )
    return rows


def table_of(found: Sequence[Curve], seconds: dict[Point, tuple[float, float]]) -> str:
    """All curves as Markdown."""
    heads = ["what grows", "", "sampling, s", "update, s", "µs per drawn token"]
    heads += ["sampling, GFLOP/s", "update, GFLOP/s"]
    return table(heads, [row for curve in found for row in rows_of(curve, seconds)])


def plot(found: Sequence[Curve], seconds: dict[Point, tuple[float, float]], out: Path) -> None:
    """A panel per curve: sampling and update over what grows, both axes logarithmic."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FormatStrFormatter, LogLocator

    shown = [curve for curve in found if curve.name != "prompt, rows"]
    rows_curve = next(curve for curve in found if curve.name == "prompt, rows")
    figure = Figure(figsize=(9, 5), dpi=90, layout="constrained")
    for panel, curve in zip(figure.subplots(2, 3).flat, shown, strict=True):
        x = [curve.x(point) for point in curve.points]
        for index, (label, color) in enumerate((("sampling", "#0072B2"), ("update", "#D55E00"))):
            y = [seconds[point][index] for point in curve.points]
            panel.plot(x, y, "o-", color=color, markersize=3, label=label)
            panel.plot(x, [y[0] * value / x[0] for value in x], ":", color="#999999", linewidth=1)
        if curve.name == "prompt":
            points = rows_curve.points
            y = [seconds[point][1] for point in points]
            panel.plot([curve.x(p) for p in points], y, "s--", color="#D55E00", markersize=3, label="update, rows")
        panel.set(xscale="log", yscale="log", xlabel=curve.label)
        panel.set_xticks(x, [f"{value:g}" for value in x])
        panel.minorticks_off()
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        panel.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("processor seconds per step")
    figure.axes[3].set_ylabel("processor seconds per step")
    figure.axes[1].legend(frameon=False, fontsize=8)
    FigureCanvasAgg(figure).print_png(out)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measures how the cost of a step grows.")
    parser.add_argument("--rounds", type=int, default=3, help="rounds after one to warm up (%(default)s)")
    parser.add_argument("--scale", type=int, default=1, help="divides the sizes that grow, for a trial (%(default)s)")
    parser.add_argument("--write", action="store_true", help="replace the table of README.md and docs/performance.png")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.scale < 1:
        parser.error(f"--rounds {options.rounds} --scale {options.scale}: give 1 or more")
    found = curves(Point(), options.scale)
    seconds = measure([point for curve in found for point in curve.points], options.rounds)
    text = f"{table_of(found, seconds)}\n\nthreads: {torch.get_num_threads()}; torch {torch.__version__}."
    print(text)
    if options.write:
        page = HERE / "README.md"
        page.write_text(between(page.read_text(encoding="utf-8"), MARK, text), encoding="utf-8")
        plot(found, seconds, ROOT / "docs" / "performance.png")


if __name__ == "__main__":
    main()
