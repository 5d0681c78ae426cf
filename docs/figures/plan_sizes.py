"""Writes the plans of docs/how_to/multi_gpu.md: how models of four sizes train on 1, 8 and 64 GPUs.

    python docs/figures/plan_sizes.py --out docs/how_to/multi_gpu.md

For each it takes the simplest setup that fits, by the numbers of `grpo plan`. No weights are needed.
"""

import argparse
import copy
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.grpo.loop import GRPOLoop
from grpo_lightning.plugins.compute.planning.memory import Devices, Plan, amount
from grpo_lightning.plugins.compute.planning.plan_report import process_bytes
from grpo_lightning.plugins.engines.native.kv_memory import GIB
from grpo_lightning.plugins.engines.native.native import NativeEngine
from grpo_lightning.policy.policy import Policy
from grpo_lightning.rewards.format import FormatReward
from grpo_lightning.training.module import GRPOModule

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
        found |= {"model.policy.compute.gradient_checkpointing": "true"} if self.recomputes else {}
        return found | {"loop.max_tokens": self.max_tokens}

    def applied(self, plan: Plan, gpus: int) -> Plan:
        """The plan of this setup."""
        precision = "32-true" if self.dtype == torch.bfloat16 else "bf16-mixed"
        strategy = "fsdp2" if self.sharded else "ddp"
        changes = {"trainer.count": gpus, "trainer.strategy": strategy, "trainer.precision": precision}
        changes |= {"loop.max_tokens": self.max_tokens, "model.policy.compute.gradient_checkpointing": self.recomputes}
        for key, value in (changes | {"model.policy.dtype": self.dtype}).items():
            plan = plan.changed(key, value)
        return plan


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


def plan_of(size: str) -> Plan:
    """The plan of a size, on one GPU."""
    policy = Policy(size)
    policy.config = config_of(size)
    module = GRPOModule(policy, [FormatReward()], NativeEngine(), Sampling(max_new_tokens=NEW_TOKENS))
    loop = GRPOLoop(group_size=GROUP, prompts_per_step=PROMPTS)
    return Plan(module, loop, Devices("cuda", process=process_bytes("cuda")), PROMPT_TOKENS)


@dataclass(frozen=True)
class Choice:
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


def least(plan: Plan) -> float:
    """Bytes of what a plan holds whatever a pass and decoding hold; it costs nothing to find."""
    bare = copy.copy(plan)
    vars(bare).update(passes=(0, 0, 0, 0))
    held = {name: values for name, values, _ in bare.rows if name not in ("key-value cache", "activations, logits")}
    return max(map(sum, zip(*held.values(), strict=True)))


def choice_of(size: str, gpus: int) -> Choice:
    """The simplest setup that fits."""
    smallest = float("inf")
    for setup in SETUPS:
        if setup.sharded and gpus == 1:
            continue
        plan = setup.applied(plan_of(size), gpus)
        smallest = min(smallest, least(plan))
        if least(plan) > MEMORY_GIB * GIB:
            continue
        plan = plan.within(MEMORY_GIB * GIB)
        if max(plan.sums) <= MEMORY_GIB * GIB:
            return Choice(size, gpus, setup, max(plan.sums), plan.phase)
    return Choice(size, gpus, None, smallest)


def choices(sizes: tuple[str, ...] = tuple(SIZES)) -> Iterator[Choice]:
    """The simplest setup that fits, for each size and number of GPUs."""
    return (choice_of(size, gpus) for size in sizes for gpus in GPUS)


HEAD = """| model | GPUs | the simplest setup that fits | peak per GPU | phase of the peak |
|---|---:|---|---:|---|
"""


def table() -> str:
    """The plans as a table of Markdown."""
    return HEAD + "\n".join(map(str, choices())) + "\n"


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
