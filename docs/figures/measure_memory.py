"""Compares the memory that `grpo fit` announces with what it then uses: real runs of a few steps on a CPU.

    python docs/figures/measure_memory.py --shape 1M 135M

Each run is a process of its own, with random weights of that shape, and reads its own largest resident set from
/proc/self/status (VmHWM). `MALLOC_TRIM_THRESHOLD_` and `MALLOC_MMAP_THRESHOLD_` are set, so that glibc gives freed
tensors back at once; without them it keeps some, and a run may measure a little more.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from make_tiny_policy import make_tokenizer

from grpo_lightning.engines.engine import Completions
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.plugins.engines.native.native import NativeEngine
from grpo_lightning.rewards.results import RewardResult
from grpo_lightning.rewards.reward import Reward
from grpo_lightning.types import Completion, FinishReason, RandomKey, Request, Sample

ROOT = Path(__file__).resolve().parents[2]
SHAPES: dict[str, dict[str, Any]] = {
    "1M": {"hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 2, "heads": 6, "vocab_size": 101},
    "28M": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "heads": 6, "vocab_size": 49152},
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "heads": 9, "vocab_size": 49152},
}
"""SmolLM2's 135M, one of a fifth of its parameters, and a small one like that of make_tiny_policy.py."""

NEW_TOKENS = {"1M": 512, "28M": 96, "135M": 96}
PACK = {"1M": 4096, "28M": 1024, "135M": 1024}
"""`loop.max_tokens` unless a case sets it."""
GLIBC = {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Case:
    """One run."""

    shape: str
    heads: str = "gqa"
    """`gqa`, a third as many key-value heads as heads, or `plain`."""
    lengths: str = "full"
    max_tokens: int | None = None
    options: tuple[str, ...] = ()
    teacher: str = ""
    """The shape of another model as the reference, if there is one."""


class CutEngine(NativeEngine):
    """Cuts completions to chosen lengths.

    Args:
        lengths: `full`, `lognormal` (median an eighth of the longest), or `runaway` (one is long, the rest short).
    """

    def __init__(self, lengths: str = "full", max_rows: int = 1024) -> None:
        super().__init__(max_rows=max_rows)
        self.lengths = lengths

    def generate(self, requests: Sequence[Request], sampling: Sampling, key: RandomKey) -> Completions:
        """As `NativeEngine.generate`, when all are drawn."""
        rng = random.Random(0)
        for number, (index, completion) in enumerate(
            sorted(super().generate(requests, sampling, key), key=itemgetter(0))
        ):
            longest = len(completion.token_ids)
            fraction = {
                "full": 1.0,
                "lognormal": rng.lognormvariate(math.log(1 / 8), 1.0),
                "runaway": 1.0 if number == 0 else 0.06,
            }[self.lengths]
            length = max(1, min(longest, round(fraction * longest)))
            reason = FinishReason.LENGTH if length == longest else FinishReason.STOP
            assert completion.logp is not None
            yield index, Completion(completion.token_ids[:length], completion.logp[:length], reason)


class Alternating(Reward):
    """0 and 1 in turn: every completion has an advantage, so that every one is passed."""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        return RewardResult([float(number % 2) for number in range(len(samples))], ["ok"] * len(samples))


def make(case: Case, folder: Path) -> None:
    """Random weights of policy and teacher, a tokenizer and questions."""
    for name, shape in (("policy", case.shape), ("teacher", case.teacher)):
        if shape:
            make_model(shape, case.heads == "plain", folder / name)
    rows = ({"question": f"{number:064d}", "answer": "1"} for number in range(64))
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


def make_model(shape: str, plain: bool, folder: Path) -> None:
    """Random weights and a tokenizer."""
    sizes = dict(SHAPES[shape])
    heads = sizes.pop("heads")
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        **sizes,
        num_attention_heads=heads,
        num_key_value_heads=heads if plain else heads // 3,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def arguments(case: Case) -> list[str]:
    """The command line of a case, in the folder that `make` filled."""
    return [
        "fit",
        "--trainer.accelerator=cpu",
        "--trainer.max_epochs=2",
        "--trainer.limit_val_batches=0",
        "--trainer.default_root_dir=run",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_checkpointing=false",
        "--model.policy.path=./policy",
        "--model.rewards=[measure_memory.Alternating]",
        "--model.engine=measure_memory.CutEngine",
        f"--model.engine.lengths={case.lengths}",
        f"--model.sampling.max_new_tokens={NEW_TOKENS[case.shape]}",
        "--model.optimizer=torch.optim.AdamW",
        "--model.optimizer.lr=1e-6",
        "--data.task=JsonPrompts",
        "--data.task.train=rows.jsonl",
        "--loop.group_size=4",
        "--loop.prompts_per_step=4",
        f"--loop.max_tokens={PACK[case.shape] if case.max_tokens is None else case.max_tokens}",
        *case.options,
    ]


def run_here(options: Sequence[str]) -> None:
    """Fits, and prints what was announced and what was used, in bytes."""
    from grpo_lightning.cli import GRPOCLI
    from grpo_lightning.plugins.compute.planning.plan_report import MemoryReport
    from grpo_lightning.plugins.console.display.quiet import quieten
    from grpo_lightning.policy.policy import Policy

    quieten()
    # Random weights of a small vocabulary end a completion soon; CutEngine alone says when.
    setattr(Policy, "stop_ids", property(lambda policy: frozenset()))  # noqa: B010
    torch.set_num_threads(1)
    sys.argv = sys.argv[:1]
    cli = GRPOCLI(options)
    used = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    report = next(callback for callback in getattr(cli.trainer, "callbacks", []) if isinstance(callback, MemoryReport))
    assert report.plan is not None
    plan = report.plan
    found = {"announced": max(plan.sums), "used": int(used.split()[1]) * 1024, "phase": plan.phase}
    print(json.dumps(found | {"process": plan.trainer.process, "table": str(plan)}))


def measure(case: Case, timeout: float | None = None) -> dict[str, Any]:
    """The result of `run_here`, from a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        make(case, Path(name))
        paths = [str(Path(__file__).parent.resolve()), str(ROOT)]
        environment = {**os.environ, **GLIBC, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), "--run", *arguments(case)]
        done = subprocess.run(command, cwd=name, env=environment, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def cases(shape: str) -> list[Case]:
    """The measurements of a shape."""
    options = {
        "reference": ("--model.objective.beta=0.1",),
        "recomputed": ("--model.policy.compute.gradient_checkpointing=true",),
        "SGD": ("--model.optimizer=torch.optim.SGD",),
        "bf16-mixed": ("--trainer.precision=bf16-mixed",),
        "rows": ("--model.policy.compute.share_prefix=false",),
        "threads": ("--model.policy.compute.threads=2",),
    }
    if shape == "28M":
        distilled = ("--model.advantage=NoAdvantage", "--model.objective.beta=1", "--model.reference=Teacher")
        distilled += ("--model.reference.path=./teacher",)
        kinds = ("--model.objective.kl=K2", "--model.objective.kl=FullVocabulary")
        return [Case(shape, options=(*distilled, kind), teacher="135M") for kind in kinds]
    return [
        Case(shape),
        Case(shape, heads="plain"),
        Case(shape, max_tokens=512),
        Case(shape, lengths="lognormal"),
        Case(shape, lengths="runaway"),
        *(Case(shape, options=given) for given in options.values()),
    ]


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["--run"]:
        run_here(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description="Compares announced and used memory.")
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["1M"], help="models to run")
    parser.add_argument("--tables", action="store_true", help="print each run's table too")
    options = parser.parse_args()
    print("| shape | heads | lengths | `max_tokens` | changed | announced MiB | used MiB | announced / used | peak |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in (case for shape in options.shape for case in cases(shape)):
        found = measure(case)
        tokens = case.max_tokens or PACK[case.shape]
        cells = [case.shape, case.heads, case.lengths, tokens, *(case.options or ["-"])]
        cells += [f"{found[key] / 2**20:.0f}" for key in ("announced", "used")]
        cells += [f"{found['announced'] / found['used']:.2f}", found["phase"]]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
        if options.tables:
            print(found["table"], flush=True)


if __name__ == "__main__":
    main()
