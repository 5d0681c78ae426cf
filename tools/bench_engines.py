"""What engines take to draw the same completions, in turns in one process.

    python tools/bench_engines.py --model runs/smollm2

Prompts are random tokens, which few models end a text after, so that all engines draw as many tokens. `sync` hands over
the weights. In bfloat16 the products are of that type; the native engine then has copies of the weights.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from jsonargparse import auto_cli
from jsonargparse.typing import PositiveInt

sys.path.insert(0, str(Path(__file__).parent.parent))

import grpo_lightning
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.plugins.compute.fast.fast_compute import Fast
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import RandomKey, Request

Columns = dict[str, list[float]]


def measure(
    policy: Policy, requests: Sequence[Request], new_tokens: int, half: bool, names: Sequence[str], rounds: int
) -> dict[str, Columns]:
    """Seconds of `sync` and `generate`, and tokens drawn, by engine and round; the first round is not among them."""
    fast = {"packed": True, "dtype": "bfloat16" if half else None}
    engines = {name: getattr(grpo_lightning, name)(**fast if name == "NativeEngine" else {}) for name in names}
    found: dict[str, Columns] = {name: {"sync": [], "generate": [], "tokens": []} for name in engines}
    for index in range(rounds + 1):
        for name, engine in engines.items():
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                engine.wake()
                started = time.perf_counter()
                engine.sync(policy)
                synced = time.perf_counter()
                completions = engine.complete(requests, Sampling(max_new_tokens=new_tokens), RandomKey(0, index))
                ended = time.perf_counter()
            engine.sleep()
            if index:
                found[name]["sync"].append(synced - started)
                found[name]["generate"].append(ended - synced)
                found[name]["tokens"].append(sum(len(one.token_ids) for one in completions))
    for engine in engines.values():
        engine.close()
    return found


def bench(
    model: str,
    engines: list[str] = ["NativeEngine", "VLLMEngine"],  # noqa: B006
    prompts: PositiveInt = 4,
    group_size: PositiveInt = 8,
    prompt_tokens: PositiveInt = 64,
    new_tokens: PositiveInt = 64,
    rounds: PositiveInt = 3,
) -> None:
    """Measures how long engines take to draw the same completions.

    Args:
        model: Folder of a causal LM.
        engines: Names of the classes.
        prompts: Prompts.
        group_size: Completions per prompt.
        prompt_tokens: Tokens of a prompt.
        new_tokens: Tokens of a completion.
        rounds: Times that each engine is measured.
    """
    policy = Policy(model, compute=Fast(products="auto"))
    policy.load()
    vocabulary, generator = policy.text_config.vocab_size, torch.Generator().manual_seed(0)
    ids = torch.randint(min(100, vocabulary // 2), vocabulary, (prompts, prompt_tokens), generator=generator).tolist()
    requests = [Request(own, index, sample) for index, own in enumerate(ids) for sample in range(group_size)]
    print("| precision | engine | generate, s | sync, s | generate / that of the first | tokens |")
    print("| --- | --- | --- | --- | --- | --- |")
    for precision in ("fp32", "bf16"):
        found = measure(policy, requests, new_tokens, precision == "bf16", engines, rounds)
        first = statistics.median(found[engines[0]]["generate"])
        for name, columns in found.items():
            median = {what: statistics.median(values) for what, values in columns.items()}
            numbers = [median["generate"], median["sync"], median["generate"] / first]
            cells = [precision, name, *(f"{number:.2f}" for number in numbers), f"{median['tokens']:.0f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    auto_cli(bench, as_positional=False)
