"""Writes the plans of docs/multi_gpu.md: how models of four sizes train on 1, 8 and 64 GPUs.

    python tools/plan_sizes.py --out docs/multi_gpu.md

For each it takes the simplest setup that fits, by the numbers of `grpo plan`. No weights are needed.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

sys.path.insert(0, str(Path(__file__).parent.parent))

from grpo_lightning.training.memory import CUDA_CONTEXT, Estimate, Job, Spread, amount
from grpo_lightning.training.plan import within

from grpo_lightning.engines.kv_memory import GIB
from grpo_lightning.engines.native import NativeEngine
from grpo_lightning.engines.sampling import Sampling

SIZES: dict[str, dict[str, Any]] = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
    "32B": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40},
}
"""The shapes of Qwen2.5."""
HEADS = {"0.5B": (2, True, 151936), "1.5B": (2, True, 151936), "7B": (4, False, 152064), "32B": (8, False, 152064)}
"""Key heads, whether embedding and head are one, tokens."""
GPUS = (1, 8, 64)
MEMORY_GIB = 72
"""Of one GPU with 80 GB; the rest is for what a plan does not know."""
PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 64, 8, 512, 1024


@dataclass(frozen=True)
class Setup:
    """One way to train."""

    sharded: bool
    recomputes: bool
    max_tokens: int = 16384
    dtype: torch.dtype = torch.float32

    @property
    def options(self) -> dict[str, Any]:
        """As `grpo plan` takes it, without the number of devices."""
        found: dict[str, Any] = {"trainer.strategy": "fsdp2" if self.sharded else "auto"}
        bfloat16 = self.dtype == torch.bfloat16
        found |= {"model.policy.dtype": "bfloat16"} if bfloat16 else {"trainer.precision": "bf16-mixed"}
        found |= {"model.policy.gradient_checkpointing": "true"} if self.recomputes else {}
        return found | {"loop.max_tokens": self.max_tokens}

    def fields(self, gpus: int) -> dict[str, Any]:
        """Fields of the job."""
        spread = Spread.sharded(gpus) if self.sharded else Spread.replicated(gpus) if gpus > 1 else Spread.single()
        precision = "32-true" if self.dtype == torch.bfloat16 else "bf16-mixed"
        return {
            "spread": spread,
            "recomputes": self.recomputes,
            "max_tokens": self.max_tokens,
            "dtype": self.dtype,
            "precision": precision,
        }


SETUPS = [
    Setup(sharded=False, recomputes=False),
    Setup(sharded=False, recomputes=True),
    Setup(sharded=True, recomputes=True),
    Setup(sharded=True, recomputes=True, max_tokens=4096),
    Setup(sharded=False, recomputes=True, max_tokens=4096, dtype=torch.bfloat16),
    Setup(sharded=True, recomputes=True, max_tokens=4096, dtype=torch.bfloat16),
]
"""The simplest first. Weights in bfloat16 come last, because they round small updates away."""


def config_of(size: str) -> PreTrainedConfig:
    """The configuration of a model without its weights."""
    key_heads, tied, tokens = HEADS[size]
    return AutoConfig.for_model(
        "qwen2",
        **SIZES[size],
        num_key_value_heads=key_heads,
        tie_word_embeddings=tied,
        vocab_size=tokens,
        max_position_embeddings=32768,
        architectures=["Qwen2ForCausalLM"],
    )


def job_of(size: str) -> Job:
    """The job of a size, on one GPU."""
    engine = NativeEngine()
    return Job(
        config=config_of(size),
        optimizer=partial(torch.optim.AdamW, lr=1e-6),
        sampling=Sampling(max_new_tokens=NEW_TOKENS),
        group_size=GROUP,
        prompts_per_step=PROMPTS,
        num_minibatches=1,
        max_tokens=0,
        prompt_tokens=PROMPT_TOKENS,
        max_rows=engine.max_rows,
        bounds_cache=True,
        device="cuda",
        process=CUDA_CONTEXT,
    )


@dataclass(frozen=True)
class Plan:
    """A size on a number of GPUs."""

    size: str
    gpus: int
    setup: Setup | None
    """None if none fits."""
    peak: float
    """Bytes; if none fits, the least that any setup would hold beside its activations."""
    phase: str = ""

    def __str__(self) -> str:
        if self.setup is None:
            return f"| {self.size} | {self.gpus} | does not fit | more than {amount(self.peak)} | |"
        how = ", ".join(f"`{key.split('.')[-1]}: {value}`" for key, value in self.setup.options.items())
        caution = " (rounds small updates)" if self.setup.dtype == torch.bfloat16 else ""
        return f"| {self.size} | {self.gpus} | {how}{caution} | {amount(self.peak)} | {self.phase} |"


def least(estimate: Estimate) -> float:
    """Bytes of weights, gradients and optimizer state, whatever a pass holds; it costs nothing to find."""
    shards, whole = estimate.job.spread.shards, estimate.weights
    kept = estimate.job.process + (whole + estimate.optimizer[0]) / shards
    gathered = whole - whole / shards  # while completions are sampled
    return kept + max(gathered, estimate.gradients / shards)


def plan_of(size: str, gpus: int) -> Plan:
    """The simplest setup that fits."""
    smallest = float("inf")
    for setup in SETUPS:
        if setup.sharded and gpus == 1:
            continue
        job = replace(job_of(size), **setup.fields(gpus), prompts_per_step=max(1, PROMPTS // gpus))
        estimate = Estimate(job)
        smallest = min(smallest, least(estimate))
        if least(estimate) > MEMORY_GIB * GIB:
            continue
        _, table = within(estimate, MEMORY_GIB * GIB)
        if table.peak <= MEMORY_GIB * GIB:
            return Plan(size, gpus, setup, table.peak, table.phase)
    return Plan(size, gpus, None, smallest)


def plans(sizes: tuple[str, ...] = tuple(SIZES)) -> Iterator[Plan]:
    """The simplest setup that fits, for each size and number of GPUs."""
    return (plan_of(size, gpus) for size in sizes for gpus in GPUS)


HEAD = """| model | GPUs | the simplest setup that fits | peak per GPU | phase of the peak |
|---|---:|---|---:|---|
"""


def table() -> str:
    """The plans as a table of Markdown."""
    return HEAD + "\n".join(map(str, plans())) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the page, in which the table is replaced")
    out = parser.parse_args().out
    text = table()
    if out is None:
        print(text)
        return
    page = out.read_text(encoding="utf-8")
    block = f"<!-- plans -->\n{text}<!-- /plans -->"
    out.write_text(re.sub(r"<!-- plans -->.*<!-- /plans -->", lambda _: block, page, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
