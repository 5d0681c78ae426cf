"""How near a real step comes to what the machine can do: operations and bytes of each phase, and the fraction reached.

    python experiments/roofline/roofline.py
    python experiments/roofline/roofline.py --model runs/smollm2 --prompts 2 --new-tokens 128 --write

Without `--model` it is the small Llama of experiments/versus_trl, whose process of our side runs the step. The rates of
the machine are measured in this process afterwards, with the same threads. Nothing else should run meanwhile; where
other programs do, `--cpu` takes one thread and its processor seconds. `--write` adds the result to results.json, and
makes the table of README.md and the plot from all that is there.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VERSUS = HERE.parent / "versus_trl"
sys.path += [str(HERE), str(VERSUS), str(ROOT)]

import machine  # noqa: E402
import torch  # noqa: E402
from compare import prepare  # noqa: E402
from counts import Demand, Model, Sizes, total  # noqa: E402
from machine import Machine, product_rate, thin_rate  # noqa: E402
from race import Race, model_folder  # noqa: E402
from regimes import between  # noqa: E402
from result_tables import table  # noqa: E402
from transformers import AutoConfig, PreTrainedConfig  # noqa: E402

README, RESULTS, PLOT = HERE / "README.md", HERE / "results.json", HERE / "results.png"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GIGA = 1e9


@dataclass(frozen=True)
class Phase:
    """A phase of a step, as counted and as measured."""

    name: str
    demands: tuple[Demand, ...]
    """One per position in decoding, else one."""
    seconds: float
    """Measured."""

    def limit(self, rates: Machine, writes: bool) -> float:
        """The least seconds it can take.

        Args:
            rates: Of the machine.
            writes: Whether its bytes are written in place as well as read.
        """
        bandwidth = rates.updating if writes else rates.reading
        return sum(demand.seconds(rates.products, bandwidth) for demand in self.demands)

    def row(self, rates: Machine) -> dict[str, Any]:
        """What the table has of it."""
        writes = self.name == "optimizer"
        demand, limit = total(self.demands), self.limit(rates, writes)
        operations = demand.operations / rates.products
        return {
            "phase": self.name,
            "operations": demand.operations,
            "bytes": demand.bytes,
            "limit": limit,
            # Where single positions differ, what binds most of the time.
            "bound": "operations" if operations > 0.5 * limit else "bytes",
            "seconds": self.seconds,
        }


def phases_of(model: Model, race: Race, found: Mapping[str, Any]) -> list[Phase]:
    """What was counted beside what was measured.

    Args:
        model: Of the policy.
        race: The sizes.
        found: What the process of our side wrote, and `prefill`, the seconds of sampling one token.
    """
    sizes = Sizes(race.prompt_tokens, race.group_size, tuple(race.lengths(race.warm_up)))
    width = 2 if race.precision == "bf16" else 4
    updates = model.update(sizes, int(found["packs"]), width)
    seconds, parts, prefill = found["phases"], found["parts"], found["prefill"]
    return [
        Phase("reading prompts", (model.prefill(sizes, width),), prefill),
        Phase("decoding", tuple(model.decoding(sizes, width)), max(0.0, seconds["sampling"] - prefill)),
        Phase("update: transformer", (updates["trunk"],), parts["trunk"]),
        Phase("update: head, objective", (updates["head"],), parts["head"]),
        Phase("optimizer", (model.optimizer(),), seconds["optimizer"]),
    ]


def weight_shapes(config: PreTrainedConfig) -> list[tuple[int, int]]:
    """[out, in] of every matrix that decoding multiplies with, layer by layer, the head last."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings().weight
    layers = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name and p is not head]
    return [(p.shape[0], p.shape[1]) for p in [*layers, head]]


def details_of(config: PreTrainedConfig, race: Race, seconds: float) -> dict[str, float]:
    """What torch's own products reach at the step's shapes: operations per second, and bytes of weights per second."""
    text, dtype = config.get_text_config(decoder=True), DTYPES[race.precision]
    width = text.hidden_size
    tokens = min(race.max_tokens, race.prompts * race.prompt_tokens + sum(race.lengths(race.warm_up)))
    return {
        "update": product_rate(tokens, width, getattr(text, "intermediate_size", 4 * width), dtype, seconds),
        "head": product_rate(min(tokens, 1024), width, text.vocab_size, dtype, seconds),
        "decoding": thin_rate(race.rows, weight_shapes(config), dtype, seconds),
    }


def run_step(race: Race, folder: Path, cpu: bool) -> dict[str, Any]:
    """Runs our side in a process of its own, which times the reading of the prompts at the end."""
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, str(VERSUS / "sides.py"), "ours", str(folder), race.to_json(), "--prefill"]
    if cpu:
        command.append("--cpu")
        environment |= {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the step failed:\n{done.stderr[-4000:]}")
    return json.loads((folder / "ours.json").read_text())


def measure(options: argparse.Namespace, race: Race) -> dict[str, Any]:
    """The record of a step: its phases, the machine's rates, and the sizes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(argparse.Namespace(model=options.model, regime=[]), [race], folder)
        config = AutoConfig.from_pretrained(model_folder(folder))
        found = run_step(race, folder, options.cpu)
    model = Model.from_config(config)
    torch.set_num_threads(found["threads"])
    clock = "of the processor" if options.cpu else "of the wall clock"
    machine.now = time.process_time if options.cpu else time.perf_counter
    dtype = DTYPES[race.precision]
    rates = Machine.measure(dtype, model.weights * dtype.itemsize, options.seconds)
    return {
        "model": f"{model.parameters / 1e6:.0f}M",
        "sizes": f"{race.prompts} x {race.group_size}, {race.name}",
        "phases": [phase.row(rates) for phase in phases_of(model, race, found)],
        "rest": found["phases"]["forward and backward"] - sum(found["parts"].values()),
        "step": sorted(found["seconds"])[len(found["seconds"]) // 2],
        "machine": vars(rates) | details_of(config, race, options.seconds),
        "note": ", ".join(
            [
                datetime.date.today().isoformat(),
                f"threads: {found['threads']}",
                f"seconds {clock}",
                f"torch {torch.__version__}",
            ]
        ),
    }


def tables_of(records: Sequence[Mapping[str, Any]]) -> str:
    """A table of phases and one of rates, over all records."""
    heads = ["model; prompts x completions, tokens", "phase", "GFLOP", "GB", "limit, s", "bound by", "measured, s"]
    phases, rates = [], []
    for record in records:
        label = f"{record['model']}; {record['sizes']}"
        for row in record["phases"]:
            amounts = [f"{row[name] / GIGA:.2f}" for name in ("operations", "bytes")]
            cells = [f"{row['limit']:.3f}", row["bound"], f"{row['seconds']:.3f}", reached(row)]
            phases.append([label, row["phase"], *amounts, *cells])
            label = ""
        limit, step = sum(row["limit"] for row in record["phases"]), record["step"]
        phases.append(["", "whole step", "", "", f"{limit:.3f}", "", f"{step:.3f}", percent(limit, step)])
        found = record["machine"]
        names = ("products", "update", "head", "reading", "copying", "updating", "decoding")
        rates.append(
            [
                f"{record['model']}; {record['sizes']}",
                *(f"{found[name] / GIGA:.1f}" for name in names),
                record["note"],
            ]
        )
    rate_heads = [
        "step",
        "products, GFLOP/s",
        "at the update's shape",
        "at the head's",
        "reading, GB/s",
        "copying, GB/s",
        "updating in place, GB/s",
    ]
    rate_heads += ["weights in decoding's products, GB/s", "measured"]
    return f"{table([*heads, 'reached'], phases)}\n\n{table(rate_heads, rates)}"


def reached(row: Mapping[str, Any]) -> str:
    """The limit as a fraction of what was measured."""
    return percent(row["limit"], row["seconds"])


def percent(limit: float, seconds: float) -> str:
    """As the table has it; a dash for a phase that was not measured."""
    return f"{100 * limit / seconds:.0f} %" if seconds > 0 else "–"


def plot(records: Sequence[Mapping[str, Any]], out: Path) -> None:
    """A panel per record: per phase a bar as long as it took, filled as far as its limit."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.9 * len(records) + 0.4), dpi=90, layout="constrained")
    for panel, record in zip(figure.subplots(len(records), 1, squeeze=False)[:, 0], records, strict=True):
        rows = record["phases"]
        for index, row in enumerate(rows):
            color = "#0072B2" if row["bound"] == "operations" else "#D55E00"
            panel.barh(index, row["seconds"], 0.7, color="#DDDDDD")
            panel.barh(index, row["limit"], 0.7, color=color)
            panel.text(max(row["seconds"], row["limit"]), index, f" {reached(row)}", va="center", fontsize=8)
        panel.set(yticks=range(len(rows)), yticklabels=[row["phase"] for row in rows], xlabel="seconds per step")
        panel.set_title(f"{record['model']}; {record['sizes']}", fontsize=9, loc="left")
        panel.invert_yaxis()
        panel.margins(x=0.12)
        panel.spines[["top", "right"]].set_visible(False)
    legend = [("#0072B2", "limit: operations"), ("#D55E00", "limit: bytes"), ("#DDDDDD", "measured")]
    handles = [figure.axes[0].barh(0, 0, color=color) for color, _ in legend]
    figure.axes[0].legend(handles, [label for _, label in legend], frameon=False, fontsize=8, loc="lower right")
    FigureCanvasAgg(figure).print_png(out)


def write(record: Mapping[str, Any]) -> None:
    """Adds to results.json, and makes the table of README.md and the plot."""
    before = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else []
    keys = ("model", "sizes")
    kept = [one for one in before if any(one[key] != record[key] for key in keys)]
    records = sorted([*kept, record], key=lambda one: (len(one["model"]), one["model"], one["sizes"]))
    RESULTS.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    text = f"{tables_of(records)}\n\n![limit and measured seconds of each phase]({PLOT.name})"
    README.write_text(between(README.read_text(encoding="utf-8"), "results", text), encoding="utf-8")
    plot(records, PLOT)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, help="folder of a causal LM (default: a small one with random weights)")
    add("--prompts", type=int, help="prompts per step (32; with --model 4)")
    add("--group-size", type=int, default=8, help="completions per prompt (%(default)s)")
    add("--prompt-tokens", type=int, default=63, help="tokens of a prompt (%(default)s)")
    add("--new-tokens", type=int, help="tokens of a completion (128; with --model 32)")
    add("--max-tokens", type=int, help="tokens in one forward and backward (16384; with --model 2304)")
    add("--precision", choices=list(DTYPES), default="fp32", help="of the products (%(default)s)")
    add("--steps", type=int, default=3, help="steps timed, after one to warm up (%(default)s)")
    add("--seconds", type=float, default=1.0, help="of each measurement of the machine (%(default)s)")
    add("--cpu", action="store_true", help="one thread and its processor seconds: where other programs run")
    add("--write", action="store_true", help="put the result into README.md and the plot")
    options = parser.parse_args(arguments)
    real = options.model is not None
    for name, values in {"prompts": (32, 4), "new_tokens": (128, 32), "max_tokens": (16384, 2304)}.items():
        if getattr(options, name) is None:
            setattr(options, name, values[real])
    for name in ("prompts", "prompt_tokens", "new_tokens", "max_tokens", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: give 1 or more")
    if options.group_size < 2:
        parser.error(f"--group-size {options.group_size}: give 2 or more")
    if real and not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: there is no config.json; give a model's folder")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = parse(arguments)
    race = Race.from_options(
        options,
        prompt_tokens=options.prompt_tokens,
        warm_up=1,
        trl_rows=options.group_size,
        precision=options.precision,
    )
    record = measure(options, race)
    print(tables_of([record]))
    if options.write:
        write(record)


if __name__ == "__main__":
    main()
