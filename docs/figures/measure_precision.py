"""Measures what each precision does to a policy: its log-probs, by position, and the weights that 20 steps change.

python docs/figures/measure_precision.py [--policy grpo_lightning:tiny_policy] [--config configs/quickstart.yaml]
    [--out docs/explanation/precision.md]

Prints the table; with --out, puts it between the marks of that file.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from grpo_lightning.policy.policy import Policy

PRECISIONS = {
    "`32-true`": ("32-true", "float32"),
    "`bf16-mixed`": ("bf16-mixed", "float32"),
    "`policy.dtype: bfloat16`": ("32-true", "bfloat16"),
}
"""The trainer's precision and the policy's dtype."""
RATES = (1e-6, 1e-5)
STEPS = 20
OPEN, CLOSE = "<!-- measured -->", "<!-- /measured -->"


def load(path: str, dtype: str) -> Policy:
    """The policy at `path` with weights of that type."""
    policy = Policy(path, dtype=dtype)  # type: ignore[arg-type]
    policy.load()
    return policy


@torch.no_grad()
def divergence(policy: Policy, twin: Policy, mixed: bool, tokens: Tensor) -> Tensor:
    """[T] KL(policy || twin) in nats behind each position of one sequence."""
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        own = policy.logits(policy.hidden(tokens, use_cache=False))[0].double().log_softmax(-1)
    other = twin.logits(twin.hidden(tokens, use_cache=False))[0].double().log_softmax(-1)
    return (own.exp() * (own - other)).sum(-1)


def changed(path: str, config: str, precision: str, dtype: str, rate: float) -> float:
    """The fraction of weights that `STEPS` steps of `grpo fit` with AdamW at `rate` change."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "trainer.default_root_dir": folder,
            "trainer.max_epochs": STEPS,
            "trainer.limit_val_batches": 0,
            "trainer.precision": precision,
            "trainer.enable_progress_bar": "false",
            "model.policy.path": path,
            "model.policy.dtype": dtype,
            "model.optimizer": "torch.optim.AdamW",
            "model.optimizer.lr": rate,
            "model.optimizer.weight_decay": 0.0,
        }
        command = [sys.executable, "-m", "grpo_lightning", "fit", "--config", config]
        command += [f"--{key}={value}" for key, value in options.items()]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"})
        after = torch.load(Path(folder) / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    before = load(path, dtype).state_dict()
    pairs = [(value, after[f"policy.{name}"]) for name, value in before.items()]
    return sum(int((a != b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)


def table(path: str, config: str) -> str:
    """The measurements as a Markdown table."""
    twin = load(path, "float32")
    longest = min(twin.context_length or 2048, 2048)
    positions = [position for position in (50, 500, 1400) if position + 40 <= longest]
    tokens = torch.randint(6, len(twin.tokenizer), (1, longest), generator=torch.Generator().manual_seed(0))
    heads = [f"KL to float32 at {position}" for position in positions]
    heads += [f"weights changed, lr {rate:g}" for rate in RATES]
    lines = ["| precision | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for name, (precision, dtype) in PRECISIONS.items():
        kl = divergence(load(path, dtype), twin, precision == "bf16-mixed", tokens)
        cells = [f"{float(kl[position - 40 : position + 40].mean()):.1e}" for position in positions]
        cells += [f"{100 * changed(path, config, precision, dtype, rate):.1f} %" for rate in RATES]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        print(lines[-1], file=sys.stderr)
    return "\n".join(lines)


def main() -> None:
    """Measures, prints, and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="grpo_lightning:tiny_policy", help="folder of the policy")
    parser.add_argument("--config", default="configs/quickstart.yaml", help="run that trains it")
    parser.add_argument("--out", help="Markdown file with the marks")
    options = parser.parse_args()
    found = table(options.policy, options.config)
    print(found)
    if options.out:
        file = Path(options.out)
        before, rest = file.read_text(encoding="utf-8").split(OPEN)
        after = rest.split(CLOSE)[1]
        file.write_text(f"{before}{OPEN}\n{found}\n{CLOSE}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
