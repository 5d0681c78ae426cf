"""Waits of the host for the device, as CUDA itself reports them."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fitting import fit
from helpers.tiny import policy_of, prompts_of, requests_of

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.maths.objective import Objective
from grpo_lightning.plugins.fast import batch
from grpo_lightning.plugins.fast.native import NativeEngine
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import RandomKey, Request


@contextmanager
def forbidden() -> Iterator[None]:
    """A wait inside raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with forbidden():
            return function(*args, **kwargs)

    return call


@pytest.mark.parametrize("lengths", [[5, 1, 7], [4, 4]], ids=["ragged", "equal"])
def test_a_decoding_step_never_waits(lengths: list[int], device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, prompts = policy_of().to(device), prompts_of(lengths)
    engine = NativeEngine()
    engine.sync(policy)
    sampling = Sampling(max_new_tokens=40)
    requests = Request.from_prompts(prompts, 4)
    expected = engine.complete(requests, sampling, RandomKey())  # Libraries make their handles in the first call.
    monkeypatch.setattr(Policy, "hidden", guarded(Policy.hidden))
    monkeypatch.setattr(Policy, "logits", guarded(Policy.logits))
    monkeypatch.setattr(batch, "draw", guarded(batch.draw))
    monkeypatch.setattr(batch, "uniforms", guarded(batch.uniforms))
    actual = engine.complete(requests, sampling, RandomKey())
    assert [c.token_ids for c in actual] == [c.token_ids for c in expected]


@contextmanager
def counted() -> Iterator[list[str]]:
    """The messages of the waits inside."""
    found: list[str] = []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found += [f"{w.filename}:{w.lineno}" for w in caught if "synchronizing CUDA operation" in str(w.message)]


def test_decoding_waits_once_per_look(device: torch.device, figures: Any) -> None:
    policy, waits = policy_of(scale=0.02).to(device), {}
    engine = NativeEngine(check_every=8)
    engine.sync(policy)
    engine.complete(requests_of([5, 1, 7], 12), Sampling(max_new_tokens=16), RandomKey())
    for new_tokens in (8, 48):
        with counted() as lines:
            engine.complete(requests_of([5, 1, 7], 12), Sampling(max_new_tokens=new_tokens), RandomKey())
        waits[new_tokens] = len(lines)
    figures.add("waits for 8 positions in decoding", waits[8], "waits")
    figures.add("waits for 48 positions in decoding", waits[48], "waits")
    assert waits[48] - waits[8] <= 10, lines  # how many rows have ended, and their tokens


def test_an_update_waits_the_same_for_one_pack_and_for_many(tmp_path: Path, figures: Any) -> None:
    waits = {}
    for max_tokens in (0, 40):
        for mu in (2, 3):
            with counted() as lines:
                fit(
                    tmp_path / f"{max_tokens}-{mu}",
                    loop={"mu": mu, "max_tokens": max_tokens},
                    objective=Objective(beta=0.1),
                    trainer={"max_epochs": 1, "accelerator": "gpu", "devices": 1},
                )
            waits[max_tokens, mu] = len(lines)
    one, many = (waits[max_tokens, 3] - waits[max_tokens, 2] for max_tokens in (0, 40))
    figures.add("waits of one update, one pack", one, "waits")
    figures.add("waits of one update, many packs", many, "waits")
    assert many == one <= 20
