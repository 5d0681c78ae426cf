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
from helpers.drawing import (
    PROMPTS,
    depends_on_nothing_else,
    draw,
    ends_with_stop_tokens,
    gap,
    hands_over_what_it_returns,
    tokens,
    update,
)
from helpers.tiny import policy_of, prompts_of, teacher_forced

from grpo_lightning.engines.native import NativeEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.stop_strings import StopStrings
from grpo_lightning.engines.vllm import VLLMEngine
from grpo_lightning.engines.vllm_requests import STRIDE, calls_of, seeds_of
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import FinishReason, RandomKey, Request, UsageError


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    """Its head is tied to its embedding."""
    return saved(tmp_path, "qwen2", tie_word_embeddings=True)


def saved(folder: Path, shape: str, **overrides: Any) -> Policy:
    """A tiny policy in a folder, where vLLM finds its config."""
    policy_of(shape, **vllm_stand_in.SIZES, **overrides).save_pretrained(folder / shape)
    policy = Policy(str(folder / shape))
    policy.load()
    return policy


@pytest.mark.parametrize(("shape", "tied"), [("qwen2", True), ("llama", False)])
def test_log_probs_are_the_policys_before_and_after_updates(
    engine: VLLMEngine, tmp_path: Path, shape: str, tied: bool
) -> None:
    policy = saved(tmp_path, shape, tie_word_embeddings=tied)
    found = []
    for _ in range(3):
        completions = draw(engine, policy)
        assert gap(policy, PROMPTS, completions) < 1e-4
        found.append(tokens(completions))
        update(policy)
    assert found[0] != found[1] != found[2]


def test_keys_and_values_of_old_weights_are_forgotten(engine: VLLMEngine, tmp_path: Path) -> None:
    policy = saved(tmp_path, "qwen2", tie_word_embeddings=True, max_position_embeddings=512)
    long = prompts_of([300])  # vLLM's blocks have 128 tokens on a CPU
    for _ in range(2):
        assert gap(policy, long, draw(engine, policy, Request.from_prompts(long, 4))) < 1e-4
        update(policy)


def test_completions_end_with_the_first_of_several_stop_tokens(engine: VLLMEngine, policy: Policy) -> None:
    ends_with_stop_tokens(engine, policy)


def test_without_any_stop_token_every_completion_has_full_length(engine: VLLMEngine, policy: Policy) -> None:
    policy.model.generation_config.eos_token_id = policy.model.config.eos_token_id = policy.tokenizer.eos_token = None
    assert not policy.stop_ids
    completions = draw(engine, policy)
    assert {len(completion.token_ids) for completion in completions} == {24}
    assert {completion.finish_reason for completion in completions} == {FinishReason.LENGTH}


def test_completions_do_not_depend_on_order_company_or_group_size(engine: VLLMEngine, policy: Policy) -> None:
    whole = depends_on_nothing_else(engine, policy)
    requests = Request.from_prompts(PROMPTS, 4)
    alternating = [requests[4 * group + sample] for sample in (2, 0, 3, 1) for group in range(5)]
    found = iter(tokens(draw(engine, policy, alternating)))
    assert all(next(found) == whole[4 * group + sample] for sample in (2, 0, 3, 1) for group in range(5))


def test_another_seed_step_prompt_or_position_draws_other_completions(engine: VLLMEngine, policy: Policy) -> None:
    requests = Request.from_prompts(PROMPTS, 4)
    base = tokens(draw(engine, policy, requests, key=RandomKey(1, 1)))
    assert tokens(draw(engine, policy, requests, key=RandomKey(1, 1))) == base
    assert tokens(draw(engine, policy, requests, key=RandomKey(2, 1))) != base
    assert tokens(draw(engine, policy, requests, key=RandomKey(1, 2))) != base
    renamed = [Request(r.token_ids, r.prompt_id + 1, r.sample) for r in requests]
    assert tokens(draw(engine, policy, renamed, key=RandomKey(1, 1))) != base
    later = [Request(r.token_ids, r.prompt_id, r.sample, position=3) for r in requests]
    assert tokens(draw(engine, policy, later, key=RandomKey(1, 1))) != base
    assert all(len(set(map(tuple, base[4 * group : 4 * group + 4]))) > 1 for group in range(5))


def test_greedy_is_that_of_the_default_engine(engine: VLLMEngine, policy: Policy) -> None:
    native = NativeEngine()
    native.sync(policy)
    requests = Request.from_prompts(PROMPTS, 2)
    expected = native.complete(requests, Sampling(max_new_tokens=24, temperature=0), RandomKey())
    completions = draw(engine, policy, temperature=0, requests=requests)
    assert tokens(completions) == tokens(expected)
    assert gap(policy, PROMPTS, completions) < 1e-4


def test_filtered_log_probs_are_those_of_the_filtered_distribution(engine: VLLMEngine, policy: Policy) -> None:
    for row, completion in enumerate(draw(engine, policy, top_k=3, temperature=0.9)):
        logp = teacher_forced(policy.model, PROMPTS[row // 4].token_ids, completion.token_ids, temperature=0.9)
        top = logp.topk(3)
        renormalised = top.values.log_softmax(-1)
        assert completion.logp is not None
        for index, (token, noted) in enumerate(zip(completion.token_ids, completion.logp, strict=True)):
            rank = top.indices[index].tolist().index(token)
            assert noted == pytest.approx(float(renormalised[index, rank]), abs=1e-4)


def test_temperature_is_in_the_log_probs(engine: VLLMEngine, policy: Policy) -> None:
    assert gap(policy, PROMPTS, draw(engine, policy, temperature=0.7), temperature=0.7) < 1e-4


def test_a_stop_string_ends_a_completion_where_it_is_complete(engine: VLLMEngine, policy: Policy) -> None:
    # The same completions as without strings, each up to the token that completes one.
    whole = draw(engine, policy, Request.from_prompts(PROMPTS, 8))
    text = policy.tokenizer.decode(max(whole, key=lambda one: len(one.token_ids)).token_ids)
    strings = [text[4:6], text[9]]
    stops = StopStrings(policy, strings)
    expected = [stops.cut(completion) for completion in whole]
    completions = draw(engine, policy, Request.from_prompts(PROMPTS, 8), stop=strings)
    assert tokens(completions) == tokens(expected)
    assert [one.finish_reason for one in completions] == [one.finish_reason for one in expected]
    assert [one.stop_string for one in completions] == [one.stop_string for one in expected]
    assert {one.stop_string for one in completions} > {""}
    for actual, wanted in zip(completions, expected, strict=True):
        assert actual.logp == pytest.approx(wanted.logp, abs=1e-4)


def test_progress_adds_up_to_the_number_of_completions(engine: VLLMEngine, policy: Policy) -> None:
    told: list[int] = []
    engine.sync(policy)
    requests = Request.from_prompts(PROMPTS, 4)
    for sampling in (Sampling(8), Sampling(8, temperature=0), Sampling(8, stop=["a"])):
        engine.complete(requests, sampling, RandomKey(), told.append)
        assert sum(told) == 20
        told.clear()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0}, {"stop": ["a"]}], ids=str)
def test_what_is_handed_over_is_what_is_returned(engine: VLLMEngine, policy: Policy, sampling: dict[str, Any]) -> None:
    hands_over_what_it_returns(engine, policy, **sampling)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_memory_that_vllm_cannot_give_back_is_refused(vllm: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_process_is_left_as_it_was_found(engine: VLLMEngine, policy: Policy) -> None:
    before = state_of_the_process()
    engine.sync(policy)
    assert state_of_the_process() == before
    draw(engine, policy)
    draw(engine, policy, stop=["a"])
    assert state_of_the_process() == before
    engine.close()
    assert state_of_the_process() == before


def test_a_process_group_of_the_runs_own_outlives_it(engine: VLLMEngine, policy: Policy, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        expected = tokens(draw(engine, policy))
        engine.close()
        assert torch.distributed.group.WORLD is group
        # It still works, and so do groups that are made after it.
        torch.distributed.barrier()
        torch.distributed.new_group([0])
        assert tokens(draw(engine, policy)) == expected
        engine.close()
        assert torch.distributed.group.WORLD is group
    finally:
        torch.distributed.destroy_process_group()


def test_it_starts_where_the_output_is_no_file(
    engine: VLLMEngine, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = io.StringIO()
    monkeypatch.setattr(sys, "stdout", notebook)
    draw(engine, policy)
    assert sys.stdout is notebook


@pytest.mark.parametrize("surroundings", ["inference", "autocast", "bfloat16", "deterministic"])
def test_what_surrounds_it_does_not_matter(engine: VLLMEngine, policy: Policy, surroundings: str) -> None:
    expected = tokens(draw(engine, policy))
    engine.close()
    if surroundings == "inference":
        with torch.inference_mode():
            completions = draw(engine, policy)
    elif surroundings == "autocast":
        engine.sync(policy)
        with torch.autocast("cpu", torch.bfloat16):
            completions = draw(engine, policy)
    elif surroundings == "deterministic":
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            completions = draw(engine, policy)
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.is_deterministic_algorithms_warn_only_enabled()
        finally:
            torch.use_deterministic_algorithms(False)
    else:
        torch.set_default_dtype(torch.bfloat16)
        try:
            completions = draw(engine, policy)
        finally:
            torch.set_default_dtype(torch.float32)
    assert tokens(completions) == expected
    assert gap(policy, PROMPTS, completions) < 1e-4
    update(policy)
    assert gap(policy, PROMPTS, draw(engine, policy)) < 1e-4


@pytest.mark.parametrize("stop", [[], ["a"]], ids=str)
def test_what_was_interrupted_leaves_nothing_behind(engine: VLLMEngine, policy: Policy, stop: list[str]) -> None:
    def interrupt(ended: int) -> None:
        raise KeyboardInterrupt

    expected = tokens(draw(engine, policy, stop=stop))
    before = state_of_the_process()
    with pytest.raises(KeyboardInterrupt):
        engine.complete(Request.from_prompts(PROMPTS, 4), Sampling(24, stop=stop), RandomKey(), interrupt)
    assert state_of_the_process() == before
    assert not engine.has(policy)
    assert tokens(draw(engine, policy, stop=stop)) == expected


def test_what_does_not_fit_is_refused_rather_than_cut(vllm: str, policy: Policy) -> None:
    engine = VLLMEngine(max_cache_gib=0.06, max_model_len=32)
    try:
        with pytest.raises(UsageError, match=r"engine\.max_model_len=32: .* sampling\.max_new_tokens=24 has 33 tokens"):
            draw(engine, policy)
        with pytest.raises(UsageError, match=r"max_model_len=32: no room for a prompt .* sampling\.max_new_tokens=32"):
            engine.check(policy, Sampling(max_new_tokens=32))
        engine.check(policy, Sampling(max_new_tokens=31))
        assert len(draw(engine, policy, length=23)) == 20
    finally:
        engine.close()


def test_a_closed_engine_starts_again(engine: VLLMEngine, policy: Policy) -> None:
    expected = tokens(draw(engine, policy))
    engine.close()
    engine.close()
    assert not engine.has(policy)
    assert tokens(draw(engine, policy)) == expected


@pytest.mark.parametrize("vllm", ["stand-in"], indirect=True)
def test_a_folder_that_vllm_cannot_start_with_is_named(engine: VLLMEngine, policy: Policy) -> None:
    policy.path = "nowhere/at/all"
    with pytest.raises(UsageError, match=r"VLLMEngine: vLLM does not start with nowhere/at/all .* use model\.engine"):
        engine.sync(policy)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("vllm", ["stand-in"], indirect=True)
def test_a_failure_while_weights_are_handed_over_ends_it(
    engine: VLLMEngine, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.sync(policy)
    monkeypatch.setattr("grpo_lightning.engines.vllm.named_weights", lambda *args: [("no_such.weight", torch.zeros(1))])
    with pytest.raises(ValueError, match="no_such"):
        engine.sync(policy)
    assert engine._llm is None and not engine.has(policy)


@pytest.mark.parametrize("vllm", ["stand-in"], indirect=True)
def test_on_a_gpu_it_sleeps_while_the_policy_learns(
    engine: VLLMEngine, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VLLMEngine, "_sleeps", property(lambda self: self._llm is not None))
    engine.wake()
    expected = tokens(draw(engine, policy))
    engine.sleep()
    assert not engine.has(policy)
    engine.wake()
    assert tokens(draw(engine, policy)) == expected
    engine.sleep()
    (llm,) = vllm_stand_in.LLM.started
    # Every time weights come before the cache; the first start is awake.
    again = ["wake weights", "reload_weights", "wake kv_cache", "sleep 2"]
    assert llm.calls == ["reload_weights", "wake kv_cache", "sleep 2", *again]


@pytest.mark.parametrize("vllm", ["stand-in"], indirect=True)
def test_what_vllm_is_told(engine: VLLMEngine, policy: Policy) -> None:
    engine.options = {"max_num_seqs": 7}
    engine.sync(policy)
    (llm,) = vllm_stand_in.LLM.started
    assert llm.settings["enforce_eager"] and not llm.settings["enable_sleep_mode"]
    assert llm.settings["kv_cache_memory_bytes"] == int(0.06 * 2**30)
    assert llm.settings["max_num_seqs"] == 7
    assert "distributed_executor_backend" not in llm.settings and llm.rank is None


@pytest.mark.parametrize("vllm", ["stand-in"], indirect=True)
def test_among_several_ranks_vllm_learns_which_it_is(
    engine: VLLMEngine, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_lightning.ranks.world_size", lambda: 2)
    monkeypatch.setattr("grpo_lightning.ranks.rank", lambda: 1)
    engine.sync(policy)
    (llm,) = vllm_stand_in.LLM.started
    assert llm.settings["distributed_executor_backend"] == "external_launcher" and llm.rank == "1"


@pytest.mark.parametrize("vllm", ["stand-in"], indirect=True)
def test_it_computes_in_the_policys_type(engine: VLLMEngine, policy: Policy) -> None:
    policy.model.to(torch.bfloat16)
    engine.sync(policy)
    (llm,) = vllm_stand_in.LLM.started
    assert llm.model.dtype == torch.bfloat16


def test_without_vllm_the_way_to_it_is_named(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UsageError, match=r"needs vLLM: pip install 'grpo-lightning\[vllm\]'.*=NativeEngine"):
        VLLMEngine().check(policy, Sampling())


@pytest.mark.parametrize(
    "argument", [{"gpu_memory": 0}, {"gpu_memory": 1.5}, {"max_cache_gib": 0}, {"max_model_len": 1}], ids=str
)
def test_arguments_out_of_range_are_refused_by_name(argument: dict[str, Any]) -> None:
    (name,) = argument
    with pytest.raises(UsageError, match=rf"model\.engine\.{name}="):
        VLLMEngine(**argument)


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


def test_a_sample_beyond_the_stride_has_a_seed_of_its_own() -> None:
    last, beyond, first = seeds_of([Request([1], 5, sample) for sample in (STRIDE - 1, STRIDE, 0)], RandomKey())
    assert last == first + STRIDE - 1
    assert beyond not in range(first, first + STRIDE + 1)


def test_a_group_is_one_request_of_vllm() -> None:
    requests = Request.from_prompts(PROMPTS[:2], 3)
    assert [call.rows for call in calls_of(requests, Sampling(), RandomKey(), True)] == [
        [[0], [1], [2]],
        [[3], [4], [5]],
    ]
    assert len(calls_of(requests, Sampling(), RandomKey(), False)) == 6
    # A second turn: each completion of the group has its own text.
    turns = [Request([*r.token_ids, 7 + r.sample], r.prompt_id, r.sample, position=1) for r in requests]
    assert len(calls_of(turns, Sampling(), RandomKey(), True)) == 6
    greedy = calls_of(requests, Sampling(temperature=0), RandomKey(), True)
    assert [(call.seed, call.rows) for call in greedy] == [(None, [[0, 1, 2]]), (None, [[3, 4, 5]])]


@pytest.mark.vllm
@pytest.mark.parametrize("vllm", ["vllm"], indirect=True)
def test_twenty_syncs_take_no_memory(engine: VLLMEngine, tmp_path: Path) -> None:
    policy = saved(tmp_path, "qwen2", tie_word_embeddings=True, intermediate_size=2048)

    def used() -> int:
        """MiB of this process in memory."""
        fields = Path("/proc/self/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20

    sizes = []
    for _ in range(25):
        assert gap(policy, PROMPTS, draw(engine, policy)) < 1e-4
        sizes.append(used())
        update(policy)
    # The first ones fill the caches of allocators; 20 copies of the weights would be 60 MiB.
    assert sizes[-1] - sizes[4] < 10
