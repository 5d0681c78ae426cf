"""Makes docs/live: the inspector's page and a report of short runs of the quickstart, for the site.

python docs/figures/live_pages.py [--runs runs/live] [--out docs/live]

inspect.html    fifteen steps, in which the tiny policy learns to carry; every fifth is recorded
report.html     the advantage with the group's standard deviation and without it, three seeds each
"""

import argparse
import subprocess
import sys
from pathlib import Path

STEPS = ["--config", "grpo_lightning:quickstart"]
STEPS += ["--trainer.max_epochs", "15", "--trainer.check_val_every_n_epoch", "5"]
RECORDED = ["--inspect.every_n_steps", "5", "--inspect.num_groups", "2"]
RECORDED += ["--inspect.num_followed", "1", "--inspect.num_samples", "1"]
NOT_RECORDED = ["--inspect.every_n_steps", "0"]
ARMS = {"with_std": [], "without_std": ["--model.advantage", "GroupMean"]}
SEEDS = ("0", "1", "2")


def grpo(*arguments: str) -> None:
    """Runs a command of the package; a failure ends the program."""
    subprocess.run([sys.executable, "-m", "grpo_lightning", *arguments], check=True)


def main() -> None:
    """Trains what is not there yet, and writes both pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/live"), help="where the runs are")
    parser.add_argument("--out", type=Path, default=Path("docs/live"), help="where the pages go")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    runs = {options.runs / "quickstart": RECORDED}
    for arm, keys in ARMS.items():
        runs |= {
            options.runs / "advantage" / arm / seed: [*NOT_RECORDED, "--seed_everything", seed, *keys] for seed in SEEDS
        }
    for folder, keys in runs.items():
        if not folder.exists():
            grpo("fit", *STEPS, *keys, "--trainer.default_root_dir", str(folder))
    grpo("inspect", str(options.runs / "quickstart"), "--out", str(options.out / "inspect.html"))
    grpo("report", str(options.runs / "advantage"), "--out", str(options.out / "report.html"))


if __name__ == "__main__":
    main()
