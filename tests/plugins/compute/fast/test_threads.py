"""Completions divided among threads: the parts, what threads take over, and the same numbers as without."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers.fast import fit, policy_of
from helpers.tiny import requests_of

from grpo_lightning import Completion, NativeEngine, Policy, RandomKey, Sampling
from grpo_lightning.plugins.compute.fast.threads import in_threads

SAMPLING = Sampling(max_new_tokens=12)


def test_threads_have_the_state_and_a_part_of_the_cores() -> None:
    def state() -> tuple[Any, ...]:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
            torch.get_num_threads(),
        )

    threads = torch.get_num_threads()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert in_threads([state, state]) == [(False, False, torch.bfloat16, max(1, threads // 2))] * 2
    with torch.inference_mode():
        assert in_threads([state, state])[0][:3] == (False, True, False)
    assert in_threads([state, state])[0][:3] == (True, False, False)
    assert torch.get_num_threads() == threads == in_threads([state])[0][3]


def test_an_error_in_a_thread_is_raised() -> None:
    def fail() -> None:
        raise FloatingPointError("in a thread")

    with pytest.raises(FloatingPointError, match="in a thread"):
        in_threads([lambda: None, fail])


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
@pytest.mark.parametrize("options", [{}, {"packed": True}, {"max_rows": 4}], ids=str)
def test_threads_draw_the_same_completions(policy: Policy, options: dict[str, Any]) -> None:
    found: list[list[Completion]] = []
    requests = requests_of([4, 1, 9], 3)
    for threads in (1, 2, 3):
        engine = NativeEngine(threads=threads, **options)
        engine.sync(policy)
        found.append(engine.complete(requests, SAMPLING, RandomKey()))
    for completions in found[1:]:
        assert [one.token_ids for one in completions] == [one.token_ids for one in found[0]]
        for one, other in zip(completions, found[0], strict=True):
            assert one.logp == pytest.approx(other.logp, abs=1e-5)


def test_conversations_are_not_divided() -> None:
    # What is kept of a row is one thread's.
    policy, engine = policy_of("llama"), NativeEngine(threads=2)
    engine.sync(policy)
    assert engine._num_threads(policy) == 2
    with engine.conversations():
        assert engine._num_threads(policy) == 1


class SeesBackward(L.Callback):
    """Counts the backward passes."""

    passes = 0

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.passes += 1


def test_a_callback_that_sees_backward_passes_sees_those_of_threads(tmp_path: Path) -> None:
    callback = SeesBackward()
    policy = policy_of("llama")
    policy.compute.threads = 2
    fit(tmp_path, [callback], policy=policy, loop={"max_tokens": 40}, trainer={"max_epochs": 1})
    assert callback.passes > 1
