"""Seconds and memory that a GRPO step takes here and in TRL's GRPOTrainer: the same model, prompts, reward and machine.

    python experiments/versus_trl/compare.py
    python experiments/versus_trl/compare.py --model runs/smollm2 --write
    python experiments/versus_trl/compare.py --model runs/smollm2 --regime all --precision fp32 bf16 --write

Without `--model` it is a small Llama with random weights. Each side runs in a process of its own, in turns, and is
timed from the end of its last step of warm-up to the end of its last step, with whatever it does between steps. A
process that takes more memory than `--memory-limit` is killed, and its row says so. Nothing else should run on the
machine meanwhile. `--write` puts the tables of a real model into README.md; with `--regime`, what was measured goes
into regimes.json, and the table and the plot of all regimes are made from it.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
README = HERE / "README.md"
RECORDS, PLOT = HERE / "regimes.json", HERE / "regimes.png"
sys.path += [str(HERE), str(ROOT / "tools")]

import memory_limit  # noqa: E402
import regimes  # noqa: E402
from race import (  # noqa: E402
    Race,
    english_prompts,
    make_endless,
    make_model,
    model_folder,
    prompts_file,
    random_prompts,
    write_prompts,
)
from result_tables import SIDES, Outcome, comparison, where_time_goes  # noqa: E402
from run_experiment import inserted  # noqa: E402

SMALL = {"prompt_tokens": [32], "new_tokens": 64, "prompts": 32, "warm_up": 3, "steps": 10, "rounds": 2}
REAL = {"prompt_tokens": [63, 490], "new_tokens": 32, "prompts": 4, "warm_up": 1, "steps": 3, "rounds": 1}
"""Default sizes, of the small model and of a real one."""
MAX_TOKENS = {False: 8192, True: 2304}
"""Default `--max-tokens`, by whether the model is a real one."""
TIMES = {False: {"warm_up": 2, "steps": 5, "rounds": 2}, True: {"warm_up": 1, "steps": 2, "rounds": 1}}
"""Default steps and rounds of a regime, by whether the model is a real one."""
NUM_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
PACKAGES = ("torch", "transformers", "lightning", "trl")


class Failure(RuntimeError):
    """A side that did not run to its end, or did something else than it was to do."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with the defaults that belong to the model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, help="folder of a causal LM; its end-of-text token is taken away (default: a small one)")
    add("--prompt-tokens", type=int, nargs="+", help="tokens of a prompt, a row of the tables for each (32; 63 490)")
    add("--new-tokens", type=int, help="tokens of the longest completion, of every one with --model (64; 32)")
    add("--prompts", type=int, help="prompts per step (32; 4)")
    add(
        "--regime",
        nargs="+",
        choices=["all", *regimes.SMALL],
        help="sizes and lengths of these regimes; what is given beside them changes them",
    )
    add("--precision", nargs="+", choices=regimes.PRECISIONS, default=["fp32"], help="of both sides (%(default)s)")
    add("--trl-weights", choices=["float32", "bfloat16"], default="float32", help="type of TRL's weights (%(default)s)")
    add("--group-size", type=int, default=8, help="completions per prompt (%(default)s)")
    add("--warm-up", type=int, help="steps that are not timed, 1 or more (3; 1)")
    add("--steps", type=int, help="steps timed (10; 3)")
    add("--rounds", type=int, help="runs of each side (2; 1)")
    add("--max-tokens", type=int, help="grpo_lightning's tokens in one forward and backward (8192; 2304)")
    add("--threads", type=int, help="threads that grpo_lightning divides completions among (as many as cores; 1)")
    add("--trl-rows", type=int, help="TRL's completions in one forward and backward (all of a step)")
    add("--memory-limit", type=float, default=20.0, help="GiB that a side may take (%(default)s)")
    add("--plain", action="store_true", help="grpo_lightning with torch's own products instead of oneDNN's")
    add("--only", choices=list(SIDES), help="run one side; the other has dashes")
    add("--write", action="store_true", help="put the tables into README.md; with --model")
    add("--dry-run", action="store_true", help="print the command lines and empty tables; nothing is run or written")
    options = parser.parse_args(arguments)
    real = bool(options.model)
    options.max_tokens = MAX_TOKENS[real] if options.max_tokens is None else options.max_tokens
    if options.threads is None:
        options.threads = 1 if real or options.plain else NUM_CORES
    if options.regime:
        return parse_regimes(parser, options)
    for name, value in (REAL if real else SMALL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    rows = options.prompts * options.group_size
    options.trl_rows = rows if options.trl_rows is None else options.trl_rows
    check(parser, options, races_of(options))
    if options.write and not options.model:
        parser.error("--write: README.md has marks for the tables of a real model alone; give --model")
    return options


def parse_regimes(parser: argparse.ArgumentParser, options: argparse.Namespace) -> argparse.Namespace:
    """The options of regimes, with the defaults that belong to the model."""
    if "all" in options.regime:
        options.regime = list(regimes.SMALL)
    for name, value in TIMES[bool(options.model)].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    check(parser, options, races_of(options))
    return options


def check(parser: argparse.ArgumentParser, options: argparse.Namespace, races: Sequence[Race]) -> None:
    """Ends with a message for a size that cannot be."""
    for race in races:
        for name in ("prompt_tokens", "new_tokens", "prompts", "warm_up", "steps", "trl_rows", "threads"):
            if (value := getattr(race, name)) < 1:
                parser.error(f"--{name.replace('_', '-')} {value}: give 1 or more")
        if race.group_size < 2:
            parser.error(
                f"--group-size {race.group_size}: give 2 or more, since the completions of a prompt are compared"
            )
        if race.rows % race.trl_rows or race.trl_rows % race.group_size:
            parser.error(
                f"--trl-rows {race.trl_rows}: give a multiple of --group-size={race.group_size} that divides the "
                f"{race.rows} completions of a step"
            )
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: give 1 or more")
    if options.model and not options.dry_run and not (options.model / "config.json").is_file():
        parser.error(
            f"--model {options.model}: there is no config.json; give a model's folder, or make one with "
            "`python tools/get_smollm2.py --out runs/smollm2`"
        )


def races_of(options: argparse.Namespace) -> list[Race]:
    """One for each regime or length of prompts, and precision."""
    if options.regime:
        known = regimes.REAL if options.model else regimes.SMALL
        return [
            regime_race(options, name, known[name], precision)
            for name in dict.fromkeys(options.regime)
            for precision in dict.fromkeys(options.precision)
        ]
    return [
        Race.from_options(
            options,
            precision=precision,
            trl_weights=options.trl_weights,
            fast=not options.plain,
            threads=options.threads,
            prompt_tokens=length,
        )
        for length in dict.fromkeys(options.prompt_tokens)
        for precision in dict.fromkeys(options.precision)
    ]


def regime_race(options: argparse.Namespace, name: str, sizes: dict[str, Any], precision: str) -> Race:
    """The race of a regime, with the sizes that were given instead of its own."""
    given = {key: getattr(options, key) for key in ("new_tokens", "prompts", "trl_rows")}
    given["prompt_tokens"] = options.prompt_tokens[0] if options.prompt_tokens else None
    sizes = sizes | {key: value for key, value in given.items() if value is not None}
    return Race.from_options(
        options,
        **{"trl_rows": sizes["prompts"] * options.group_size} | sizes,
        regime=name,
        precision=precision,
        trl_weights=options.trl_weights,
        fast=not options.plain,
        threads=options.threads,
    )


def prepare(options: argparse.Namespace, races: Sequence[Race], folder: Path) -> None:
    """Makes the model and the prompts that both sides read."""
    if options.model is None:
        make_model(folder / "ending" if options.regime else model_folder(folder))
        if options.regime:
            make_endless(folder / "ending", model_folder(folder))
        for race in races:
            write_prompts(prompts_file(folder, race), random_prompts(4 * race.prompts, race.prompt_tokens))
        return
    from transformers import AutoTokenizer

    make_endless(options.model, model_folder(folder))
    tokenizer = AutoTokenizer.from_pretrained(model_folder(folder))
    for race in races:
        write_prompts(prompts_file(folder, race), english_prompts(4 * race.prompts, race.prompt_tokens, tokenizer))


def command_of(side: str, folder: Path, race: Race) -> list[str]:
    """The process of one side."""
    return [sys.executable, str(HERE / "sides.py"), side, str(folder), race.to_json()]


def run_side(side: str, folder: Path, race: Race, limit: float, outcome: Outcome, exact: bool) -> None:
    """Runs one side once, and adds what it did to `outcome`.

    Args:
        side: One of SIDES.
        folder: With model and prompts.
        race: The sizes.
        limit: Bytes of memory.
        outcome: Of the earlier rounds.
        exact: Whether every prompt and completion has the number of tokens that it was to have.

    Raises:
        Failure: The process failed, or had another number of tokens.
    """
    environment = os.environ | {
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    log = folder / f"{side}.log"
    ended = memory_limit.run(command_of(side, folder, race), limit, environment, log)
    outcome.peak = max(outcome.peak, ended.peak)
    outcome.exceeded |= ended.exceeded
    if ended.exceeded:
        return
    if ended.returncode:
        raise Failure(f"{SIDES[side]} failed at {race.name} tokens:\n{log.read_text(errors='replace')[-4000:]}")
    outcome.details = json.loads((folder / f"{side}.json").read_text())
    outcome.seconds += outcome.details["seconds"]
    found = outcome.details["tokens"]
    expected = [race.tokens(step) for step in range(len(found))]
    if exact and found != expected:
        raise Failure(f"{SIDES[side]} had {found} tokens per step, not {expected}: the two sides would not do the same")


def measure(options: argparse.Namespace, races: Sequence[Race], results: dict[Race, dict[str, Outcome]]) -> None:
    """Runs the sides in turns; fills in `results` as they end."""
    limit = options.memory_limit * memory_limit.GIB
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(options, races, folder)
        for race in races:
            for _ in range(options.rounds):
                for side, outcome in results[race].items():
                    if options.only not in (None, side) or outcome.exceeded:
                        continue
                    run_side(side, folder, race, limit, outcome, exact=bool(options.model or options.regime))
                    print(line_of(side, race, outcome), flush=True)


def line_of(side: str, race: Race, outcome: Outcome) -> str:
    """What a side has done so far."""
    if outcome.exceeded:
        return f"{race.name} tokens, {SIDES[side]}: killed at {outcome.peak / memory_limit.GIB:.1f} GiB"
    seconds = ", ".join(f"{value:.2f}" for value in outcome.seconds)
    return f"{race.name} tokens, {SIDES[side]}: {seconds} s; {outcome.peak / memory_limit.GIB:.1f} GiB"


def report(options: argparse.Namespace, results: dict[Race, dict[str, Outcome]]) -> str:
    """Both tables, and how they were made."""
    threads = {
        outcome.details["threads"] for sides in results.values() for outcome in sides.values() if outcome.details
    }
    made = [datetime.date.today().isoformat(), f"threads: {' or '.join(map(str, sorted(threads)))}"] if threads else []
    versions = ", ".join(f"{name} {version_of(name)}" for name in PACKAGES) if threads else ""
    if options.regime:
        return regimes.regime_table(records_of(options, results))
    sizes = (
        f"{options.prompts} prompts x {options.group_size} completions; `--steps {options.steps} --rounds "
        f"{options.rounds} --max-tokens {options.max_tokens} --trl-rows {options.trl_rows}`, at most "
        f"{options.memory_limit:g} GiB"
    )
    note = "; ".join(filter(None, [*made, versions, sizes]))
    return f"{comparison(results)}\n\n{where_time_goes(results)}\n\n{note}."


def records_of(options: argparse.Namespace, results: dict[Race, dict[str, Outcome]]) -> list[regimes.Record]:
    """What was measured, race by race."""
    from sides import Model
    from transformers import AutoConfig

    model = "1M"
    if options.model and (options.model / "config.json").is_file():
        model = f"{Model.from_config(AutoConfig.from_pretrained(options.model)).parameters / 1e6:.0f}M"
    versions = ", ".join(f"{name} {version_of(name)}" for name in PACKAGES)
    note = f"{datetime.date.today().isoformat()}; {NUM_CORES} cores; {versions}"
    return [regimes.record_of(model, race, sides, note) for race, sides in results.items()]


def write_regimes(records: Sequence[regimes.Record]) -> None:
    """Adds to regimes.json, and makes the table and the plot from all that is there."""
    records = regimes.merged(regimes.read(RECORDS), records)
    RECORDS.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    notes = "; ".join(dict.fromkeys(record["note"] for record in records))
    text = f"{regimes.regime_table(records)}\n\n{notes}.\n\n![the phases of both sides]({PLOT.name})"
    README.write_text(regimes.between(README.read_text(encoding="utf-8"), "regimes", text), encoding="utf-8")
    regimes.plot(records, PLOT)


def version_of(package: str) -> str:
    """The version installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = parse(arguments)
    races = races_of(options)
    results = {race: {side: Outcome() for side in SIDES} for race in races}
    if options.write and options.regime:
        regimes.between(README.read_text(encoding="utf-8"), "regimes", "")  # raises now, not after the measurement
    elif options.write:
        inserted(README.read_text(encoding="utf-8"), "")  # raises now, not after the measurement
    failure = ""
    if options.dry_run:
        for race in races:
            for side in [side for side in SIDES if options.only in (None, side)]:
                print(shlex.join(command_of(side, Path("FOLDER"), race)))
    else:
        try:
            measure(options, races, results)
        except Failure as error:
            failure = str(error)
    tables = report(options, results)
    print(f"\n{tables}")
    if failure:
        sys.exit(failure)
    if options.write and options.regime and not options.dry_run:
        write_regimes(records_of(options, results))
    elif options.write and not options.dry_run:
        README.write_text(inserted(README.read_text(encoding="utf-8"), tables), encoding="utf-8")


if __name__ == "__main__":
    main()
