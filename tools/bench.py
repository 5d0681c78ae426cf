"""What the fast ways of sampling and learning gain over the plain ones, on this machine: `make bench`.

    python tools/bench.py

The two ways of a pair take turns in one process, so that what else the machine does falls on both. A ratio is the
median of those of all rounds. Nothing is asserted: numbers are printed, whatever they are. A pair that this version
lacks is left out.
"""

import argparse
import copy
import inspect
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from make_tiny_policy import make_model, make_tokenizer
from transformers import GenerationConfig

sys.path.insert(0, str(Path(__file__).parent.parent))

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.fast.native import NativeEngine
from grpo_lightning.plugins.fast.products import use_onednn
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import RandomKey, Request

SWITCHES = {"fused": "the log-probs of drawn tokens, and what else is fused"}
"""Attributes of `Policy` that make an update faster and change nothing else."""
OPTIONS = {
    "packed": "weights packed for few rows",
}
"""Arguments of `NativeEngine` that make decoding faster and change nothing else."""


@dataclass
class Pair:
    """Two ways to do the same."""

    what: str
    fast_name: str
    plain_name: str
    fast: Callable[[], object]
    plain: Callable[[], object]
    seconds: list[tuple[float, float]] = field(default_factory=list)
    """Wall clock of both, round by round."""
    cpu: list[tuple[float, float]] = field(default_factory=list)
    """Processor time of both, over all threads."""

    def run(self) -> None:
        """One round; which of the two begins alternates."""
        order = ("fast", "plain") if len(self.seconds) % 2 == 0 else ("plain", "fast")
        wall, cpu = {}, {}
        for name in order:
            started, used = time.perf_counter(), time.process_time()
            getattr(self, name)()
            wall[name], cpu[name] = time.perf_counter() - started, time.process_time() - used
        self.seconds.append((wall["fast"], wall["plain"]))
        self.cpu.append((cpu["fast"], cpu["plain"]))

    def row(self) -> str:
        """A line of the table."""
        fast, plain = (statistics.median(times) for times in zip(*self.seconds, strict=True))
        ratios = [slow / quick for quick, slow in self.seconds]
        cpu = statistics.median(slow / max(quick, 1e-9) for quick, slow in self.cpu)
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


def new_policy(hidden: int = 128, layers: int = 5) -> Policy:
    """A Llama of a million random weights (by default) that ends no completion."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, hidden, layers)
    tokenizer.eos_token = None
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return Policy.from_model(model, tokenizer)


def sampling_by(policy: Policy, sizes: Sizes, **options: Any) -> Callable[[], object]:
    """Draws the completions with the native engine."""
    engine, requests = NativeEngine(**options), sizes.requests()
    engine.sync(policy)
    return lambda: engine.complete(requests, Sampling(max_new_tokens=sizes.new_tokens), RandomKey())


def generating(policy: Policy, sizes: Sizes) -> Callable[[], object]:
    """Draws as many completions with transformers, which reads a prompt once per completion."""
    ids = torch.tensor(sizes.token_ids(sizes.prompts, sizes.prompt_tokens, 0))
    config = GenerationConfig(
        max_new_tokens=sizes.new_tokens,
        do_sample=True,
        top_k=0,
        num_return_sequences=sizes.group_size,
        pad_token_id=0,
    )
    model: Any = policy.model
    return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)


def learning(
    policy: Policy,
    sizes: Sizes,
    shares: bool = True,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Callable[[], object]:
    """A forward and backward over the completions.

    Args:
        policy: Whose gradient it is.
        sizes: Of the completions.
        shares: Whether a group's prompt is passed once.
        precision: Makes the context of the forward.
    """
    rollouts, able = sizes.rollouts(), policy.shares_prefix

    def update() -> None:
        policy.shares_prefix = shares and able
        with precision():
            scored = policy(rollouts)
        scored.logp.sum().backward()
        policy.zero_grad(set_to_none=True)
        policy.shares_prefix = able

    return update


def switched(policy: Policy, name: str, value: bool, work: Callable[[], object]) -> Callable[[], object]:
    """The work with an attribute of the policy set."""

    def with_switch() -> None:
        before = getattr(policy, name)
        setattr(policy, name, value)
        try:
            work()
        finally:
            setattr(policy, name, before)

    return with_switch


def pairs_of(policy: Policy, sizes: Sizes) -> Iterator[Pair]:
    """Those that this version has both ways of."""
    yield Pair("sampling", "native", "generate", sampling_by(policy, sizes), generating(policy, sizes))
    known = inspect.signature(NativeEngine).parameters
    for name in filter(known.__contains__, OPTIONS):
        fast, plain = (sampling_by(policy, sizes, **{name: value}) for value in (True, False))
        yield Pair(f"sampling: {OPTIONS[name]}", name, "without", fast, plain)
    yield Pair("update", "shared prefix", "rows", learning(policy, sizes), learning(policy, sizes, shares=False))
    for name in filter(lambda name: hasattr(policy, name), SWITCHES):
        fast, plain = (switched(policy, name, value, learning(policy, sizes)) for value in (True, False))
        yield Pair(f"update: {SWITCHES[name]}", name, "plain", fast, plain)
    by_onednn = copy.deepcopy(policy)
    use_onednn(by_onednn.model)
    yield Pair("update: products", "oneDNN", "torch", learning(by_onednn, sizes), learning(policy, sizes))
    half = learning(policy, sizes, precision=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    yield Pair("update", "bfloat16", "float32", half, learning(policy, sizes))


COUNTS = {
    "prompts": "prompts",
    "group_size": "completions per prompt",
    "prompt_tokens": "tokens of a prompt",
    "new_tokens": "tokens of a completion",
    "rounds": "times that each way is measured",
}
"""Options that are 1 or more, and their help."""


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, defaults: dict[str, int]
) -> argparse.Namespace:
    """The options of a command line with `COUNTS`, whose defaults are these."""
    for name, text in COUNTS.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=defaults[name], help=f"{text} (%(default)s)")
    options = parser.parse_args(arguments)
    for name in COUNTS:
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: give 1 or more")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measures what the fast ways gain over the plain ones.")
    parser.add_argument("--seconds", type=float, default=110, help="no round begins later (%(default)s)")
    defaults = {"prompts": 8, "group_size": 8, "prompt_tokens": 192, "new_tokens": 64, "rounds": 7}
    options = parse(parser, arguments, defaults)
    sizes = Sizes(options.prompts, options.group_size, options.prompt_tokens, options.new_tokens)
    policy = new_policy()
    begun, pairs = time.perf_counter(), list(pairs_of(policy, sizes))
    for pair in pairs:
        pair.run()  # warms up
        pair.seconds.clear()
        pair.cpu.clear()
    for index in range(options.rounds):
        if index and time.perf_counter() - begun > options.seconds:
            break
        for pair in pairs:
            pair.run()
    print(
        f"{sizes.prompts} prompts of {sizes.prompt_tokens} tokens x {sizes.group_size} completions of "
        f"{sizes.new_tokens}; {sum(p.numel() for p in policy.parameters()) / 1e6:.1f}M parameters; "
        f"{torch.get_num_threads()} threads; torch {torch.__version__}; {len(pairs[0].seconds)} rounds\n"
    )
    print("| what | fast | plain | plain / fast | of single rounds | in processor time |")
    print("| --- | --- | --- | --- | --- | --- |")
    for pair in pairs:
        print(pair.row())


if __name__ == "__main__":
    main()
