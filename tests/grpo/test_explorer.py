"""When an engine is woken, synced, and given whole weights; what becomes of the log-probs that it records."""

import copy
import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fitting import Digits, fit, scalars
from helpers.tiny import policy_of, prompts_of

from grpo_lightning import Exploration, Explorer, PlainEngine, Policy, RandomKey, Sampling, Scorer, UsageError
from grpo_lightning.engines.engine import Completions


class Watched(PlainEngine):
    """Notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def wake(self) -> None:
        self.calls.append("wake")

    def sleep(self) -> None:
        self.calls.append("sleep")

    def close(self) -> None:
        self.calls.append("close")

    def sync(self, policy: Policy) -> None:
        self.calls.append("sync")
        super().sync(policy)

    def generate(self, *args: Any, **kwargs: Any) -> Completions:
        self.calls.append("generate")
        return super().generate(*args, **kwargs)


class Apart(Watched):
    """Decodes with weights of its own, as an engine on another device does."""

    shares_weights = False
    own: Policy | None = None

    def sync(self, policy: Policy) -> None:
        super().sync(policy)
        self.own = copy.deepcopy(policy)

    def generate(self, *args: Any, **kwargs: Any) -> Completions:
        synced, self.policy = self.policy, self.own
        try:
            return super().generate(*args, **kwargs)
        finally:
            self.policy = synced


def explore(engine: Any, policy: Policy, sampling: Sampling | None = None, count: int = 2) -> Exploration:
    explorer = engine if isinstance(engine, Explorer) else Explorer(engine, Scorer([Digits()]))
    prompts = prompts_of([3, 5])[:count]
    return explorer.explore(policy, prompts, 4, sampling or Sampling(max_new_tokens=6), RandomKey(1, 0))


def runs(calls: Sequence[str]) -> list[str]:
    """The calls, each once in a row."""
    return [call for call, _ in itertools.groupby(calls)]


@pytest.mark.parametrize("count", [2, 0], ids=["prompts", "a rank without prompts"])
@pytest.mark.parametrize("engine_class", [Watched, Apart])
def test_weights_are_gathered_no_longer_than_the_engine_reads_them(
    monkeypatch: pytest.MonkeyPatch, engine_class: type[Watched], count: int
) -> None:
    policy, engine = policy_of(), engine_class()

    @contextmanager
    def gathered(self: Policy) -> Iterator[None]:
        engine.calls.append("gather")
        yield
        engine.calls.append("reshard")

    monkeypatch.setattr(Policy, "gathered", gathered)
    generate = ["generate"] * bool(count)
    for _ in range(2):
        explore(engine, policy, count=count)
    used = [call for call in engine.calls if call not in ("wake", "sleep")]
    if engine.shares_weights:
        assert used == ["gather", "sync", *generate, "reshard", "gather", *generate, "reshard"]
    else:
        assert used == ["gather", "sync", "reshard", *generate, *generate]


@pytest.mark.parametrize("engine_class", [Watched, Apart])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"temperature": 0.7}], ids=str)
def test_recorded_log_probs_are_kept_and_marked(engine_class: type[Watched], filters: dict[str, Any]) -> None:
    policy = policy_of()
    found = explore(engine_class(), policy, Sampling(max_new_tokens=6, **filters))
    recorded = found.rollouts.sampler_logp
    assert recorded is not None
    with torch.no_grad():
        gap = float((policy(found.rollouts).logp - recorded).abs().max())
    assert found.sampler_is_policy is not any(name.startswith("top") for name in filters)
    # Filters raise the probability of what they leave.
    assert (gap < 1e-5) is found.sampler_is_policy


def test_a_run_syncs_once_per_version_and_wakes_once_per_phase(tmp_path: Path) -> None:
    engine = Apart()
    loop = {"mu": 2, "num_minibatches": 2}
    fit(tmp_path, engine=engine, loop=loop, trainer={"max_epochs": 2, "limit_val_batches": 1.0})
    step, validation = ["wake", "generate", "sleep"], ["wake", "sync", "generate", "sleep"]
    # Nothing is learned between a validation and the step after it.
    assert runs(engine.calls) == [*validation, *step, *validation, *step, *validation, "close"]
    # Three validations of 24 questions, 5 in a batch: greedy, and drawn. Two steps.
    assert engine.calls.count("generate") == 3 * 2 * 5 + 2
    gaps = scalars(tmp_path)["policy/logp_gap"]
    assert len(gaps) == 2
    assert max(gaps.values()) < 1e-5


class Off(Apart):
    """Its log-probs are off by some nats at every so many tokens; it says that it computes in bfloat16."""

    def __init__(self, off: float, every: int) -> None:
        super().__init__()
        self.off, self.every = off, every

    def product_dtype(self, policy: Policy) -> torch.dtype:
        return torch.bfloat16

    def generate(self, *args: Any) -> Completions:
        count = 0
        for row, completion in super().generate(*args):
            for index in range(len(completion.token_ids)):
                completion.logp[index] += self.off * (count % self.every == 0)
                count += 1
            yield row, completion


@pytest.mark.parametrize(
    ("off", "every", "ends"),
    [(3.0, 10**6, "warns"), (0.1, 1, "goes on"), (0.2, 1, "stops"), (2.0, 20, "stops")],
    ids=["one token", "rounding", "all tokens", "one in twenty"],
)
def test_one_token_warns_and_many_stop_the_run(tmp_path: Path, off: float, every: int, ends: str) -> None:
    engine, sizes = Off(off, every), {"group_size": 8, "prompts_per_step": 8}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(UsageError, match="does not sample from") if ends == "stops" else nullcontext():
            fit(tmp_path, engine=engine, loop=sizes, trainer={"max_epochs": 1})
    warned = [str(one.message) for one in caught if "does not sample from this policy" in str(one.message)]
    assert bool(warned) is (ends == "warns")
    assert all("differ by up to 3 before the first update (expected: at most 1)" in message for message in warned)
