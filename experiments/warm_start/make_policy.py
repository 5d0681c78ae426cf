"""Fine-tunes runs/guessing_policy on gold completions, and exports it: what GRPO starts from.

python experiments/warm_start/make_policy.py --out runs/warm_policy
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = "runs/warm_policy_run"
STEPS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=STEPS, help="updates of 32 gold completions")
    options = parser.parse_args()
    grpo = [sys.executable, "-m", "grpo_lightning"]
    task = ["--data.task=JsonPrompts", "--data.task.train=runs/longer_sums/train.jsonl"]
    task.append("--model.policy.path=runs/guessing_policy")
    files = [f"--config=configs/{name}.yaml" for name in ("quickstart", "warm_start")]
    more = [f"--trainer.max_epochs={options.steps}", "--trainer.limit_val_batches=0"]
    more += ["--model.optimizer.lr=0.002", "--model.lr_scheduler=WarmupCosine", "--model.sampling.max_new_tokens=48"]
    where = f"--trainer.default_root_dir={RUN}"
    shutil.rmtree(ROOT / RUN, ignore_errors=True)
    subprocess.run([*grpo, "fit", *files, *task, *more, where], cwd=ROOT, check=True)
    subprocess.run([*grpo, "export", RUN, "--out", options.out], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
