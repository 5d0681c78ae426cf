"""A run that is killed at random moments and goes on, and one that is not."""

import contextlib
import json
import random
import subprocess
import time
from pathlib import Path

import torch

from helpers.fitting import scalars, weights_of
from helpers.programs import programs
from helpers.tiny import model_of, tokenizer

STEPS = 6
QUESTIONS = {"train": 10, "val": 8}
OPTIONS = f"""
seed_everything: 7
trainer:
  accelerator: cpu
  max_epochs: {STEPS}
  enable_progress_bar: false
  check_val_every_n_epoch: 3
model:
  rewards:
    - class_path: FormatReward
      init_args: {{pattern: ".*[a-m]+.*"}}
  sampling: {{max_new_tokens: 12}}
  objective: {{beta: 0.05}}
  optimizer: {{class_path: torch.optim.AdamW, init_args: {{lr: 0.01}}}}
  lr_scheduler: {{class_path: torch.optim.lr_scheduler.LinearLR, init_args: {{total_iters: 20}}}}
  validation: {{samples: 2, grader: {{class_path: FormatReward}}}}
data:
  task: {{class_path: JsonPrompts}}
loop: {{group_size: 4, prompts_per_step: 4, mu: 2, num_minibatches: 2, steps_per_iteration: 2}}
checkpoint: {{every_n_steps: 1}}
"""


def command(folder: Path, *more: str) -> list[str]:
    options = ["--config", str(folder.parent / "options.yaml"), "--model.policy.path", str(folder.parent / "policy")]
    for split in QUESTIONS:
        options += [f"--data.task.{split}", str(folder.parent / f"{split}.jsonl")]
    where = ["--trainer.default_root_dir", str(folder), "--model.policy.dropout", "true"]
    return ["fit", *options, *where, *more]


def die_and_go_on(folder: Path, times: int, *more: str) -> None:
    """A run in `unbroken`; and one in `killed` that is killed so many times, at random moments, and ends at last."""
    with programs({"unbroken": command(folder / "unbroken", *more)}, folder) as started:
        begun = time.monotonic()
        assert started["unbroken"].wait() == 0, started["unbroken"].errors
        duration = time.monotonic() - begun
    moments = random.Random(0)
    on = command(folder / "killed", *more, "--ckpt_path", "last")
    for _ in range(times):
        with programs({"killed": on}, folder) as started, contextlib.suppress(subprocess.TimeoutExpired):
            # Kills during start-up only delay: most moments fall into the training.
            started["killed"].wait(duration * moments.uniform(0.3, 1.0))
    with programs({"last": on}, folder, anew=True) as started:
        code, errors = started["last"].wait(), started["last"].errors
    # A quick machine may have finished before the last kill; then there is nothing to go on with.
    assert code == (2 if f"has done {STEPS} steps already" in errors else 0), errors[-2000:]


def prepare(folder: Path) -> None:
    """Writes the policy and the options. GPT-2 for its dropout, which draws from the global generator."""
    model_of("gpt2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1).save_pretrained(folder / "policy")
    tokenizer().save_pretrained(folder / "policy")
    (folder / "options.yaml").write_text(OPTIONS)
    for split, num_questions in QUESTIONS.items():
        rows = [{"question": f"{row}+{len(split)}=", "answer": str(row + len(split))} for row in range(num_questions)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def check_alike(folder: Path) -> None:
    """The two runs ended with the same weights, and logged the same."""
    unbroken, killed = weights_of(folder / "unbroken"), weights_of(folder / "killed")
    assert unbroken.keys() == killed.keys()
    assert all(torch.equal(unbroken[name], killed[name]) for name in unbroken)
    assert scalars(folder / "killed") == scalars(folder / "unbroken")
