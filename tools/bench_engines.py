"""What engines take to draw the same completions, in turns in one process.

    python tools/bench_engines.py --model runs/smollm2

Prompts are random tokens, which few models end a text after, so that all engines draw as many tokens. `sync` hands over
the weights. In bfloat16 the products are of that type; the native engine then has copies of the weights.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from grpo_lightning.engines.base import RolloutEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import RandomKey, Request


def native(precision: str) -> RolloutEngine:
    """The default engine with all that makes it fast."""
    from grpo_lightning.plugins.fast.native import NativeEngine

    return NativeEngine(packed=True, dtype="bfloat16" if precision == "bf16" else None)


def vllm(precision: str) -> RolloutEngine:
    """vLLM in this process."""
    from grpo_lightning.plugins.vllm.engine import VLLMEngine

    return VLLMEngine()


def plain(precision: str) -> RolloutEngine:
    """Attention and cache of transformers."""
    from grpo_lightning.engines.plain import PlainEngine

    return PlainEngine()


ENGINES: dict[str, Callable[[str], RolloutEngine]] = {"native": native, "vllm": vllm, "plain": plain}


def requests_of(options: argparse.Namespace, vocabulary: int) -> list[Request]:
    """The completions to draw."""
    generator = torch.Generator().manual_seed(0)
    shape = (options.prompts, options.prompt_tokens)
    prompts = torch.randint(min(100, vocabulary // 2), vocabulary, shape, generator=generator).tolist()
    return [Request(ids, index, sample) for index, ids in enumerate(prompts) for sample in range(options.group_size)]


def measure(policy: Policy, precision: str, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Seconds of `sync` and `generate`, and tokens drawn, by engine and round; the first round is not among them."""
    engines = {name: ENGINES[name](precision) for name in options.engines}
    requests = requests_of(options, policy.text_config.vocab_size)
    sampling = Sampling(max_new_tokens=options.new_tokens)
    found: dict[str, dict[str, list[float]]] = {name: {"sync": [], "generate": [], "tokens": []} for name in engines}
    for index in range(options.rounds + 1):
        for name, engine in engines.items():
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                engine.wake()
                started = time.perf_counter()
                engine.sync(policy)
                synced = time.perf_counter()
                completions = engine.complete(requests, sampling, RandomKey(0, index))
                ended = time.perf_counter()
            engine.sleep()
            if index:
                values = (synced - started, ended - synced, float(sum(len(one.token_ids) for one in completions)))
                for column, value in zip(found[name].values(), values, strict=True):
                    column.append(value)
    for engine in engines.values():
        engine.close()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measures how long engines take to draw the same completions.")
    add: Any = parser.add_argument
    add("--model", required=True, help="folder of a causal LM")
    add("--engines", nargs="+", choices=ENGINES, default=["native", "vllm"], help="which (%(default)s)")
    add("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"], help="of products (%(default)s)")
    defaults = {"prompts": 4, "group_size": 8, "prompt_tokens": 64, "new_tokens": 64, "rounds": 3}
    options = bench.parse(parser, arguments, defaults)
    policy = Policy(options.model, products="auto")
    policy.load()
    print("| precision | engine | generate, s | sync, s | generate / that of the first | tokens |")
    print("| --- | --- | --- | --- | --- | --- |")
    for precision in options.precision:
        found = measure(policy, precision, options)
        first = statistics.median(found[options.engines[0]]["generate"])
        for name, columns in found.items():
            median = {what: statistics.median(values) for what, values in columns.items()}
            numbers = [median["generate"], median["sync"], median["generate"] / first]
            cells = [precision, name, *(f"{number:.2f}" for number in numbers), f"{median['tokens']:.0f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
