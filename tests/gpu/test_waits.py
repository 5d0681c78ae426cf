"""Waits of the host for the device, as CUDA itself reports them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.fast import policy_of
from helpers.tiny import prompts_of

from grpo_lightning import NativeEngine, Policy, RandomKey, Request, Sampling
from grpo_lightning.plugins.engines.native import native_batch as batch


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
    monkeypatch.setattr(batch, "sample_tokens", guarded(batch.sample_tokens))
    monkeypatch.setattr(batch, "uniforms", guarded(batch.uniforms))
    actual = engine.complete(requests, sampling, RandomKey())
    assert [c.token_ids for c in actual] == [c.token_ids for c in expected]
