"""A GRPO step on a GPU: tokens per second, the update's MFU, and what fraction of the GPU's limits they are.

    python experiments/gpu/gpu.py
    python experiments/gpu/gpu.py --write

Models have the shapes of Qwen2.5 and random weights, so nothing is downloaded. grpo_lightning and TRL run in turns,
each with its own sampler and with vLLM, in processes of their own: those that
are installed. `--write` puts the table into README.md. Without a GPU it prints
that and ends.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VERSUS = HERE.parent / "versus_trl"
sys.path += [str(HERE.parent / "roofline"), str(VERSUS), str(ROOT / "docs" / "figures"), str(ROOT)]

import torch  # noqa: E402
from compare import version_of  # noqa: E402
from counts import Model, Sizes, total  # noqa: E402
from machine import DATA_SHEETS, product_rate, read_rate  # noqa: E402
from plan_sizes import HEADS, SIZES  # noqa: E402
from race import (  # noqa: E402
    Race,
    make_endless,
    make_model,
    model_folder,
    prompts_file,
    random_prompts,
    write_prompts,
)
from regimes import between  # noqa: E402
from result_tables import NONE, table  # noqa: E402
from transformers import LlamaConfig  # noqa: E402

README = HERE / "README.md"
SIDES = {
    "ours": ("grpo_lightning", ()),
    "ours-vllm": ("grpo_lightning, vLLM", ("vllm",)),
    "trl": ("TRL", ("trl",)),
    "trl-vllm": ("TRL, vLLM", ("trl", "vllm")),
}
"""By the name that sides.py has: the table's, and the packages it needs."""
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
"""A shape to try the experiment with."""
PACKAGES = ("torch", "transformers", "lightning", "trl", "vllm")
GIB = 2**30


def config_of(shape: str) -> LlamaConfig:
    """A Llama of a shape, without an end of text.

    Not a Qwen2: beside one, transformers replaces any tokenizer's splitting by Qwen2's. The biases that it lacks are a
    thousandth of the weights.
    """
    sizes = TINY if shape == "tiny" else SIZES[shape]
    key_heads, tied, vocabulary = (2, True, 512) if shape == "tiny" else HEADS[shape]
    return LlamaConfig(
        **sizes,
        num_key_value_heads=key_heads,
        tie_word_embeddings=tied,
        vocab_size=vocabulary,
        max_position_embeddings=32768,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )


def limits_of(race: Race, model: Model, operations: float, bandwidth: float) -> dict[str, float]:
    """Least seconds of sampling and of an update, each prompt read once per group."""
    sizes = Sizes.even(race.prompts, race.group_size, race.prompt_tokens, race.new_tokens)
    width = 2 if race.precision == "bf16" else 4
    sampled = [model.prefill(sizes, width), *model.decoding(sizes, width)]
    update = total([*model.update(sizes, width=width).values()])
    return {
        "sampling": sum(demand.seconds(operations, bandwidth) for demand in sampled),
        "update": update.seconds(operations, bandwidth) + model.optimizer().seconds(operations, bandwidth),
        "operations": update.operations,
    }


def rates_of(accelerator: str, precision: str) -> tuple[float, float, str]:
    """Operations and bytes per second, and where the two are from: data sheets where they are known, else measured."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    if accelerator == "cuda":
        name = torch.cuda.get_device_name()
        known = (rates for chip, rates in DATA_SHEETS.items() if chip in name and "Laptop" not in name)
        for half, single, bandwidth in known:
            return half if precision == "bf16" else single, bandwidth, f"{name}: data sheet"
    size, count = (8192, 2**30) if accelerator == "cuda" else (256, 2**22)
    seconds = 1.0 if accelerator == "cuda" else 0.05
    rates = product_rate(size, size, size, dtype, seconds, accelerator), read_rate(count, seconds, accelerator)
    return (*rates, f"{accelerator}: measured")


def run_side(side: str, folder: Path, race: Race) -> dict[str, Any] | str:
    """What a side measured, or the last line of its log if it failed."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    command = [sys.executable, str(VERSUS / "sides.py"), side, str(folder), race.to_json()]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.stderr.write(f"{side}:\n{done.stdout[-4000:]}\n")
        return (done.stdout.strip().splitlines() or ["no output"])[-1]
    return json.loads((folder / f"{side}.json").read_text())


def row_of(label: str, race: Race, limits: Mapping[str, float], peak: float, found: dict[str, Any] | str) -> list[str]:
    """Cells of a side, without the shape.

    Args:
        label: The side's.
        race: The sizes.
        limits: Of `limits_of`.
        peak: Operations per second of the device.
        found: Of `run_side`.
    """
    if isinstance(found, str):
        return [label, *[NONE] * 7, found.replace("|", "/")[:80]]
    phases = found["phases"]
    seconds = sorted(found["seconds"])[len(found["seconds"]) // 2]
    update = phases["forward and backward"] + phases["optimizer"]
    drawn = race.rows * race.new_tokens
    note = "" if {*found["tokens"]} == {race.tokens(0)} else f"tokens per step: {found['tokens']}"
    return [
        label,
        f"{seconds:.2f}",
        f"{phases['sampling']:.2f}",
        f"{drawn / phases['sampling']:,.0f}",
        f"{100 * limits['sampling'] / phases['sampling']:.0f} %",
        f"{update:.2f}",
        f"{100 * limits['operations'] / (update * peak):.0f} %",
        f"{found['peak_gpu'] / GIB:.1f}",
        note,
    ]


def measure(options: argparse.Namespace) -> str:
    """The table of all shapes and sides, and how it was made."""
    operations, bandwidth, source = rates_of(options.accelerator, options.precision)
    heads = ["model", "prompt + new tokens", "", "s per step", "sampling, s", "tokens per s", "of the limit"]
    heads += ["update, s", "MFU", "GPU memory, GiB", "note"]
    rows: list[list[str]] = []
    for shape in options.shape:
        with tempfile.TemporaryDirectory(dir=options.scratch) as name:
            folder, config = Path(name), config_of(shape)
            make_model(folder / "ending", config)
            make_endless(folder / "ending", model_folder(folder))
            model = Model.from_config(config)
            for prompt_tokens in options.prompt_tokens:
                race = race_of(options, prompt_tokens)
                write_prompts(prompts_file(folder, race), random_prompts(4 * race.prompts, prompt_tokens))
                limits = limits_of(race, model, operations, bandwidth)
                first = [shape, race.name]
                for side, (label, needs) in SIDES.items():
                    if side not in options.sides or not all(map(find_spec, needs)):
                        continue
                    row = row_of(label, race, limits, operations, run_side(side, folder, race))
                    print(f"{shape}, {race.name}: {' | '.join(row)}", flush=True)
                    rows.append([*first, *row])
                    first = ["", ""]
                drawn = race.rows * race.new_tokens
                limit = [f"{limits['sampling'] + limits['update']:.2f}", f"{limits['sampling']:.2f}"]
                limit += [f"{drawn / limits['sampling']:,.0f}", "100 %", f"{limits['update']:.2f}"]
                reached = 100 * limits["operations"] / (limits["update"] * operations)
                rows.append(["", "", "limit", *limit, f"{reached:.0f} %", "", ""])
    versions = ", ".join(f"{name} {version_of(name)}" for name in PACKAGES)
    note = (
        f"{datetime.date.today().isoformat()}; {source}, {operations / 1e12:.4g} TFLOP/s, {bandwidth / 1e12:.3g} TB/s; "
        f"{versions}; {options.prompts} prompts x {options.group_size} completions, {options.precision}"
    )
    return f"{table(heads, rows)}\n\n{note}."


def race_of(options: argparse.Namespace, prompt_tokens: int) -> Race:
    """The sizes of a step."""
    return Race.from_options(
        options, prompt_tokens=prompt_tokens, precision=options.precision, accelerator=options.accelerator
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--shape", nargs="+", choices=["tiny", *SIZES], default=["0.5B", "1.5B"], help="models (%(default)s)")
    add("--prompt-tokens", type=int, nargs="+", default=[128, 512], help="tokens of a prompt (%(default)s)")
    add("--new-tokens", type=int, default=512, help="tokens of every completion (%(default)s)")
    add("--prompts", type=int, default=32, help="prompts per step (%(default)s)")
    add("--group-size", type=int, default=8, help="completions per prompt (%(default)s)")
    add("--warm-up", type=int, default=2, help="steps that are not timed (%(default)s)")
    add("--steps", type=int, default=3, help="steps timed (%(default)s)")
    add("--max-tokens", type=int, default=32768, help="our tokens in one forward and backward (%(default)s)")
    add("--trl-rows", type=int, default=32, help="TRL's completions in one forward and backward (%(default)s)")
    add("--precision", choices=["fp32", "bf16"], default="bf16", help="of the products (%(default)s)")
    add("--sides", nargs="+", choices=list(SIDES), default=list(SIDES), help="what runs, if installed (all)")
    add("--accelerator", choices=["cuda", "cpu"], default="cuda", help="cpu is for trying it out (%(default)s)")
    add("--scratch", type=Path, help="folder for the models, of up to 6 GB each (the system's)")
    add("--write", action="store_true", help="put the table into README.md")
    options = parser.parse_args(arguments)
    for name in ("new_tokens", "prompts", "warm_up", "steps", "max_tokens", "trl_rows"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: give 1 or more")
    rows = options.prompts * options.group_size
    if options.group_size < 2 or rows % options.trl_rows or options.trl_rows % options.group_size:
        parser.error(
            f"--trl-rows {options.trl_rows} --group-size {options.group_size}: give a group of 2 or more, and rows "
            f"that are a multiple of it and divide the {rows} completions of a step"
        )
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = parse(arguments)
    if options.accelerator == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here: nothing to measure (try --accelerator cpu --shape tiny to see what would run)")
    text = measure(options)
    print(f"\n{text}")
    if options.write:
        README.write_text(between(README.read_text(encoding="utf-8"), "results", text), encoding="utf-8")


if __name__ == "__main__":
    main()
