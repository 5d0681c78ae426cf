"""VLLMEngine on a stand-in for vLLM, and with `-m vllm` on vLLM itself: both keep the same contract."""

import io
import os
import random
import signal
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import vllm_stand_in
from helpers.drawing import PROMPTS, EngineContract, draw, gap, interrupt, tokens, update
from helpers.fast import policy_of
from helpers.tiny import prompts_of, read_policy

from grpo_lightning import Policy, RandomKey, Request, Sampling, UsageError, VLLMEngine
from grpo_lightning.plugins.engines.vllm.vllm_requests import STRIDE, seeds_of

FEW = Request.from_prompts(PROMPTS[:2], 2)


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    """Its head is tied to its embedding."""
    return saved(tmp_path, "qwen2", tie_word_embeddings=True)


def saved(folder: Path, shape: str, **overrides: Any) -> Policy:
    """A tiny policy in a folder, where vLLM finds its config."""
    policy_of(shape, **vllm_stand_in.SIZES, **overrides).save_pretrained(folder / shape)
    return read_policy(folder / shape)


class TestContract(EngineContract):
    tolerance = 1e-4


def test_a_head_of_its_own_is_handed_over_too(engine: VLLMEngine, tmp_path: Path) -> None:
    policy = saved(tmp_path, "llama", tie_word_embeddings=False)
    for _ in range(2):
        assert gap(policy, PROMPTS, draw(engine, policy, length=6)) < 1e-4
        update(policy)


def test_keys_and_values_of_old_weights_are_forgotten(engine: VLLMEngine, tmp_path: Path) -> None:
    policy = saved(tmp_path, "qwen2", tie_word_embeddings=True, max_position_embeddings=512)
    long = prompts_of([300])  # vLLM's blocks have 128 tokens on a CPU
    for _ in range(2):
        assert gap(policy, long, draw(engine, policy, Request.from_prompts(long, 4))) < 1e-4
        update(policy)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_memory_that_vllm_cannot_give_back_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_stand_in.install(monkeypatch)
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    with pytest.raises(UsageError, match=rf"{name}=.*expandable_segments:True: vLLM cannot give back its memory"):
        VLLMEngine().check(on_gpu, Sampling(8))  # type: ignore[arg-type]
    VLLMEngine().check(SimpleNamespace(device=torch.device("cpu")), Sampling(8))  # type: ignore[arg-type]
    monkeypatch.setenv(name, "expandable_segments:False")
    VLLMEngine().check(on_gpu, Sampling(8))  # type: ignore[arg-type]


def state_of_the_process() -> list[Any]:
    """What a guest may not change."""
    generators = [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]
    functions = [torch.set_num_threads, torch.accelerator.empty_cache, torch.accelerator.synchronize, sys.excepthook]
    signals = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
    settings = [torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision()]
    settings += [torch.is_grad_enabled(), torch.distributed.is_initialized(), dict(os.environ), list(warnings.filters)]
    return [*generators, *functions, *signals, *settings]


def test_the_process_is_left_as_it_was_and_a_closed_engine_starts_again(
    engine: VLLMEngine, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = io.StringIO()  # no file
    monkeypatch.setattr(sys, "stdout", notebook)
    before = state_of_the_process()
    engine.sync(policy)
    assert state_of_the_process() == before
    expected = tokens(draw(engine, policy, FEW))
    draw(engine, policy, FEW, stop=["a"])
    assert state_of_the_process() == before and sys.stdout is notebook
    for _ in range(2):
        engine.close()
    assert state_of_the_process() == before and not engine.has(policy)
    assert tokens(draw(engine, policy, FEW)) == expected


@pytest.mark.usefixtures("mesh")
def test_a_process_group_of_the_runs_own_outlives_it(engine: VLLMEngine, policy: Policy) -> None:
    group = torch.distributed.group.WORLD
    expected = tokens(draw(engine, policy, FEW))
    engine.close()
    assert torch.distributed.group.WORLD is group
    # It still works, and so do groups that are made after it.
    torch.distributed.barrier()
    torch.distributed.new_group([0])
    assert tokens(draw(engine, policy, FEW)) == expected
    engine.close()
    assert torch.distributed.group.WORLD is group


def test_what_surrounds_it_does_not_matter(engine: VLLMEngine, policy: Policy) -> None:
    expected = tokens(draw(engine, policy, FEW))
    engine.close()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.inference_mode():
            engine.sync(policy)
            with torch.autocast("cpu", torch.bfloat16):
                completions = draw(engine, policy, FEW)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    assert tokens(completions) == expected
    assert gap(policy, PROMPTS[:2], completions) < 1e-4
    update(policy)
    assert gap(policy, PROMPTS[:2], draw(engine, policy, FEW)) < 1e-4


@pytest.mark.parametrize("stop", [[], ["a"]], ids=str)
def test_what_was_interrupted_leaves_nothing_behind(engine: VLLMEngine, policy: Policy, stop: list[str]) -> None:
    expected = tokens(draw(engine, policy, FEW, stop=stop))
    before = state_of_the_process()
    with pytest.raises(KeyboardInterrupt):
        interrupt(engine, FEW, Sampling(24, stop=stop))
    assert state_of_the_process() == before
    assert not engine._llm.llm_engine.has_unfinished_requests()
    assert tokens(draw(engine, policy, FEW, stop=stop)) == expected


def test_what_does_not_fit_is_refused_rather_than_cut(vllm: str, policy: Policy) -> None:
    engine = VLLMEngine(max_cache_gib=0.06, max_model_len=32)
    try:
        with pytest.raises(UsageError, match=r"engine\.max_model_len=32: .* sampling\.max_new_tokens=24 has 33 tokens"):
            draw(engine, policy)
        with pytest.raises(UsageError, match=r"max_model_len=32: no room for a prompt .* sampling\.max_new_tokens=32"):
            engine.check(policy, Sampling(max_new_tokens=32))
        engine.check(policy, Sampling(max_new_tokens=31))
        assert len(draw(engine, policy, Request.from_prompts(PROMPTS, 1), length=23)) == 5
    finally:
        engine.close()


@pytest.mark.parametrize("vllm", ["stand-in"], indirect=True)
def test_vllm_does_not_go_beyond_the_length_at_which_longrope_changes(engine: VLLMEngine, policy: Policy) -> None:
    policy.config.rope_parameters |= {"rope_type": "longrope", "original_max_position_embeddings": 32}
    engine.sync(policy)
    assert engine._llm.llm_engine.model_config.max_model_len == 32
    VLLMEngine(max_model_len=32).check(policy, Sampling(8))
    with pytest.raises(UsageError, match=r"engine\.max_model_len=33: give at most 32; with more vLLM takes longrope's"):
        VLLMEngine(max_model_len=33).check(policy, Sampling(8))


@pytest.mark.parametrize("vllm", ["stand-in"], indirect=True)
def test_a_folder_that_vllm_cannot_start_with_is_named(engine: VLLMEngine, policy: Policy) -> None:
    policy.path = "nowhere/at/all"
    with pytest.raises(UsageError, match=r"VLLMEngine: vLLM does not start with nowhere/at/all .* use model\.engine"):
        engine.sync(policy)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("vllm", ["stand-in"], indirect=True)
def test_on_a_gpu_it_sleeps_while_the_policy_learns(
    engine: VLLMEngine, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VLLMEngine, "_sleeps", property(lambda self: self._llm is not None))
    engine.wake()
    expected = tokens(draw(engine, policy, FEW))
    engine.sleep()
    assert not engine.has(policy)
    engine.wake()
    assert tokens(draw(engine, policy, FEW)) == expected
    engine.sleep()
    (llm,) = vllm_stand_in.LLM.started
    # Every time weights come before the cache; the first start is awake.
    again = ["wake weights", "reload_weights", "wake kv_cache", "sleep 2"]
    assert llm.calls == ["reload_weights", "wake kv_cache", "sleep 2", *again]


def test_without_vllm_the_way_to_it_is_named(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UsageError, match=r"needs vLLM: pip install 'grpo-lightning\[vllm\]'.*=NativeEngine"):
        VLLMEngine().check(policy, Sampling())


def test_seeds_of_a_group_follow_one_another_and_groups_are_apart() -> None:
    requests = Request.from_prompts(prompts_of([3] * 200), 8)
    seeds = seeds_of(requests, RandomKey(3, 4))
    for first in range(0, len(seeds), 8):
        assert seeds[first : first + 8] == list(range(seeds[first], seeds[first] + 8))
        assert seeds[first] % STRIDE == 0
    assert len(set(seeds)) == len(seeds)
    # A CPU's generator looks at the lower half only.
    assert len({seed % 2**32 for seed in seeds}) == len(seeds)
    assert min(seeds) >= 0 and max(seeds) < 2**60
    assert not set(seeds) & set(seeds_of(requests, RandomKey(3, 5)))
