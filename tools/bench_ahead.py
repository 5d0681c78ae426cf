"""Measures what overlap gains: steps of `OneStepOffPolicy` against the same servers in turns, in interleaved repeats.

    taskset -c 0 vllm serve runs/smollm2 ...   # docs/how_to/vllm.md has the line
    OMP_NUM_THREADS=1 taskset -c 1 python tools/bench_ahead.py --model runs/smollm2 --url http://127.0.0.1:8000

In turns a step takes sampling + training; ahead it should take the longer of the two. The load of the machine is
printed with each row: above 2 on two cores a row is noisy.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import lightning as L
import torch

from grpo_lightning import (
    Arithmetic,
    Fast,
    GRPOLoop,
    GRPOModule,
    OneStepOffPolicy,
    Policy,
    Reward,
    RewardResult,
    Sample,
    Sampling,
    Synchronous,
    VLLMServerEngine,
)
from grpo_lightning.grpo.source import RolloutSource
from grpo_lightning.training.task_data import TaskData


class Coin(Reward):
    """1 or 0 by the text alone: a reward with spread, whatever the policy writes."""

    def score(self, samples: Sequence[Sample]) -> RewardResult:
        return RewardResult([float(crc32(sample.text.encode()) % 2) for sample in samples], ["ok"] * len(samples))


SIZES = {"sampling": (2, 2, 128), "balanced": (8, 8, 48), "training": (8, 8, 12)}
"""Prompts, completions of each, and tokens of each, by the half that is to be the slower one."""

COLUMNS = ("slower half", "in turns", "sampling", "weights", "training", "ahead", "by the slower half", "gain", "load")


class Timed(VLLMServerEngine):
    """Notes the seconds in which weights are brought: part of sampling in turns, and beside nothing ahead."""

    def sync(self, policy: Policy) -> None:
        started = time.perf_counter()
        super().sync(policy)
        self.seconds = [*getattr(self, "seconds", []), time.perf_counter() - started]


class Clock(L.Callback):
    """Seconds of each step but the first two, which compile and are on policy: whole, sampling."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self.ended = 0.0

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        now, self.ended = time.perf_counter() - self.ended, time.perf_counter()
        if trainer.current_epoch > 1:
            self.steps.append((now, float(trainer.callback_metrics.get("time/explore", 0.0))))


def measure(arguments: argparse.Namespace, size: str, source: RolloutSource) -> tuple[float, float, float]:
    """Median seconds of a step, of its sampling, and of bringing weights."""
    prompts, group_size, tokens = SIZES[size]
    engine, clock = Timed([arguments.url], timeout=600), Clock()
    rate: Any = lambda parameters: torch.optim.AdamW(parameters, lr=1e-6, fused=True)  # noqa: E731
    policy = Policy(arguments.model, compute=Fast(products="auto"))
    module = GRPOModule(policy, [Coin()], engine, Sampling(max_new_tokens=tokens), optimizer=rate)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    loop = GRPOLoop(group_size, prompts, source=source, validate_first=False)
    settings: Any = {"accelerator": "cpu", "max_epochs": arguments.steps, "limit_val_batches": 0, **off}
    L.Trainer(callbacks=[clock, loop], **settings).fit(module, datamodule=TaskData(Arithmetic(sentence=True)))
    whole, sampling = zip(*clock.steps, strict=True)
    return statistics.median(whole), statistics.median(sampling), statistics.median(engine.seconds[2:])


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    arguments = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for size in arguments.sizes:
        for _ in range(arguments.repeats):
            turns, sampling, weights = measure(arguments, size, Synchronous())
            ahead = measure(arguments, size, OneStepOffPolicy())[0]
            slower, load = max(sampling, turns - sampling), os.getloadavg()[0]
            row = [turns, sampling, weights, turns - sampling, ahead, ahead / slower, turns / ahead, load]
            print(f"| {size} | {' | '.join(f'{one:.2f}' for one in row)} |", flush=True)


if __name__ == "__main__":
    main()
