"""What the fast ways of sampling and learning gain over the plain ones, on this machine: `make bench`.

    python tools/bench.py

The two ways of a pair take turns in one process, so that what else the machine does falls on both. A ratio is the
median of those of all rounds. Nothing is asserted: numbers are printed, whatever they are.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from jsonargparse.typing import PositiveInt
from make_tiny_policy import make_model, make_tokenizer
from transformers import GenerationConfig

sys.path.insert(0, str(Path(__file__).parent.parent))

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.compute.fast.fast_compute import Fast
from grpo_lightning.plugins.engines.native.native import NativeEngine
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import RandomKey, Request

Work = Callable[[], object]


@dataclass
class Pair:
    """Two ways to do the same."""

    what: str
    fast_name: str
    plain_name: str
    fast: Work
    plain: Work
    rounds: list[dict[str, float]] = field(default_factory=list)
    """Wall clock and processor time, over all threads, of both."""

    def run(self) -> None:
        """One round; which of the two begins alternates."""
        works = {"fast": self.fast, "plain": self.plain}
        found: dict[str, float] = {}
        for name in works if len(self.rounds) % 2 == 0 else reversed(works):
            started, used = time.perf_counter(), time.process_time()
            works[name]()
            found |= {name: time.perf_counter() - started, f"{name} cpu": time.process_time() - used}
        self.rounds.append(found)

    def row(self) -> str:
        """A line of the table."""
        fast, plain = (statistics.median(one[name] for one in self.rounds) for name in ("fast", "plain"))
        ratios = [one["plain"] / one["fast"] for one in self.rounds]
        cpu = statistics.median(one["plain cpu"] / max(one["fast cpu"], 1e-9) for one in self.rounds)
        cells = [self.what, f"{self.fast_name} {fast:.3f} s", f"{self.plain_name} {plain:.3f} s"]
        cells += [f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}", f"{cpu:.2f}"]
        return f"| {' | '.join(cells)} |"


@dataclass(frozen=True)
class Sizes:
    """What is sampled and learned from."""

    prompts: int
    group_size: int
    prompt_tokens: int
    new_tokens: int

    def token_ids(self, count: int, length: int, seed: int) -> list[list[int]]:
        """Random characters of the tokenizer."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(6, 100, (count, length), generator=generator).tolist()

    def requests(self) -> list[Request]:
        """Completions to draw."""
        prompts = self.token_ids(self.prompts, self.prompt_tokens, 0)
        return [Request(ids, index, sample) for index, ids in enumerate(prompts) for sample in range(self.group_size)]

    def rollouts(self) -> Rollouts:
        """Completions to learn from."""
        rows = self.prompts * self.group_size
        return Rollouts.from_lists(
            self.token_ids(self.prompts, self.prompt_tokens, 0),
            [row // self.group_size for row in range(rows)],
            self.token_ids(rows, self.new_tokens, 1),
        )


def new_policy(**options: Any) -> Policy:
    """A Llama of a million random weights that ends no completion."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, hidden=128, layers=5)
    tokenizer.eos_token = None
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return Policy.from_model(model, tokenizer, compute=Fast(**options))


def sampling_by(policy: Policy, sizes: Sizes, **options: Any) -> Work:
    """Draws the completions with the native engine."""
    engine, requests = NativeEngine(**options), sizes.requests()
    engine.sync(policy)
    return lambda: engine.complete(requests, Sampling(max_new_tokens=sizes.new_tokens), RandomKey())


def generating(policy: Policy, sizes: Sizes) -> Work:
    """Draws as many completions with transformers, which reads a prompt once per completion."""
    ids = torch.tensor(sizes.token_ids(sizes.prompts, sizes.prompt_tokens, 0))
    options: dict[str, Any] = {"max_new_tokens": sizes.new_tokens, "num_return_sequences": sizes.group_size}
    config = GenerationConfig(do_sample=True, top_k=0, pad_token_id=0, **options)
    model: Any = policy.model
    return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)


def learning(policy: Policy, sizes: Sizes, precision: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Work:
    """A forward, in the context that `precision` makes, and a backward over the completions."""
    rollouts = sizes.rollouts()

    def update() -> None:
        with precision():
            scored = policy(rollouts)
        scored.logp.sum().backward()
        policy.zero_grad(set_to_none=True)

    return update


def pairs_of(policy: Policy, sizes: Sizes) -> Iterator[Pair]:
    """What is compared."""
    native, usual = sampling_by(policy, sizes), learning(policy, sizes)
    yield Pair("sampling", "native", "generate", native, generating(policy, sizes))
    yield Pair(
        "sampling: weights packed for few rows", "packed", "without", sampling_by(policy, sizes, packed=True), native
    )
    for name, plain in (("share_prefix", "rows"), ("fused", "plain")):
        yield Pair("update", name, plain, usual, learning(new_policy(**{name: False}), sizes))
    yield Pair("update: products", "oneDNN", "torch", learning(new_policy(products="onednn"), sizes), usual)
    half = learning(policy, sizes, lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    yield Pair("update", "bfloat16", "float32", half, usual)


def bench(
    prompts: PositiveInt = 8,
    group_size: PositiveInt = 8,
    prompt_tokens: PositiveInt = 192,
    new_tokens: PositiveInt = 64,
    rounds: PositiveInt = 7,
    seconds: float = 110,
) -> None:
    """Measures what the fast ways gain over the plain ones.

    Args:
        prompts: Prompts.
        group_size: Completions per prompt.
        prompt_tokens: Tokens of a prompt.
        new_tokens: Tokens of a completion.
        rounds: Times that each way is measured.
        seconds: No round begins later.
    """
    sizes = Sizes(prompts, group_size, prompt_tokens, new_tokens)
    policy = new_policy()
    begun, pairs = time.perf_counter(), list(pairs_of(policy, sizes))
    for index in range(rounds + 1):
        if index < 2 or time.perf_counter() - begun < seconds:
            for pair in pairs:
                pair.run()
    print(
        f"{sizes.prompts} prompts of {sizes.prompt_tokens} tokens x {sizes.group_size} completions of "
        f"{sizes.new_tokens}; {sum(p.numel() for p in policy.parameters()) / 1e6:.1f}M parameters; "
        f"{torch.get_num_threads()} threads; torch {torch.__version__}; {len(pairs[0].rounds) - 1} rounds\n"
    )
    print("| what | fast | plain | plain / fast | of single rounds | in processor time |")
    print("| --- | --- | --- | --- | --- | --- |")
    for pair in pairs:
        del pair.rounds[0]  # it warmed up
        print(pair.row())


if __name__ == "__main__":
    auto_cli(bench, as_positional=False)
