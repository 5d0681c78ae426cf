"""The memory table: numbers worked out by hand, and what a real forward and backward hold."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from grpo_lightning.training.memory import Estimate, Job, MemoryTable, Spread, optimizer_bytes, remedies
from grpo_lightning.training.simulation import Held, LiveBytes, Twin, most
from helpers.tiny import model_of, policy_of
from transformers import LlamaConfig

from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.policy.adapter import LoRA
from grpo_lightning.policy.fused_layers import fuse
from grpo_lightning.policy.policy import Policy, recompute_activations, remove_dropout

PARAMETERS = 2 * 64 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 32
"""tiny.py's Llama: embedding and head; queries, output, keys, values, MLP and norms of two layers; the last norm."""
BUFFERS = 2 * 4 * 4
"""RoPE's four frequencies, twice in float32."""
CACHE = 2 * 2 * 2 * 8 * 4
"""Keys and values of two layers with two heads of eight float32 for a token."""


def adamw(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def job_with(**changes: Any) -> Job:
    """Four prompts of 10 tokens, four completions each of at most 20."""
    job = Job(
        config=model_of("llama").config,
        optimizer=adamw,
        sampling=Sampling(max_new_tokens=20),
        group_size=4,
        prompts_per_step=4,
        num_minibatches=1,
        max_tokens=0,
        prompt_tokens=10,
        max_rows=1024,
        process=1000,
    )
    return replace(job, **changes)


def test_the_rows_of_a_tiny_model_by_hand() -> None:
    table = MemoryTable.from_job(job_with(frozen_copies=2))
    weights = 4 * PARAMETERS + BUFFERS
    assert table["process"] == (1000, 1000, 1000)
    assert table["weights"] == (weights, weights, weights)
    assert table["gradients"] == (0, 0, 4 * PARAMETERS)
    assert table["optimizer"] == (8 * PARAMETERS,) * 3
    assert table["frozen copies"] == (2 * weights,) * 3
    assert table["key-value cache"] == (CACHE * 16 * 30, 0, 0)
    assert table["gathered weights"] == (0, 0, 0)
    for phase in range(3):
        assert table.sums[phase] == sum(row.bytes[phase] for row in table.rows)
    assert table.peak == max(table.sums) and table.phase == "updating"


def test_types_of_weights_and_cache() -> None:
    assert MemoryTable.from_job(job_with(dtype=torch.bfloat16))["gradients"][2] == 2 * PARAMETERS
    assert Estimate(job_with(precision="64-true")).gradients == 8 * PARAMETERS
    mixed = MemoryTable.from_job(job_with(precision="bf16-mixed"))
    assert mixed["gradients"][2] == 4 * PARAMETERS
    assert mixed["key-value cache"][0] == CACHE // 2 * 16 * 30


ADAPTER = 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
"""Rank 4 beside queries, output, keys, values and MLP of two layers."""


def test_only_trained_parameters_have_gradients_and_optimizer_state() -> None:
    table = MemoryTable.from_job(job_with(adapter=LoRA(rank=4), frozen_copies=1))
    assert table["gradients"][2] == 4 * ADAPTER
    assert table["optimizer"][0] == 8 * ADAPTER
    assert table["frozen copies"][0] == 4 * ADAPTER
    assert table["weights"][0] == 4 * (PARAMETERS + ADAPTER) + BUFFERS
    assert "trained" in str(table)


def test_an_adapter_is_float32_beside_weights_of_other_types() -> None:
    table = MemoryTable.from_job(job_with(adapter=LoRA(rank=4), dtype=torch.bfloat16))
    assert table["weights"][0] == 2 * PARAMETERS + 4 * ADAPTER + BUFFERS
    assert table["gradients"][2] == 4 * ADAPTER
    assert table["key-value cache"][0] == CACHE // 2 * 16 * 30
    four = MemoryTable.from_job(job_with(adapter=LoRA(rank=4, quantise="nf4"), dtype=torch.bfloat16))
    linear = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    # 4 bits, 8 bits per 64 weights and 32 bits per 64 x 256; embedding, head and norms stay.
    expected = linear * (1 / 2 + 1 / 64 + 4 / 16384) + 2 * (PARAMETERS - linear) + 4 * ADAPTER + BUFFERS
    assert four["weights"][0] == pytest.approx(expected)
    assert four["dequantised weight"] == (2 * 32 * 48,) * 3


def test_a_twin_with_an_adapter_holds_less_in_an_update() -> None:
    adapter, pack = LoRA(rank=4), Estimate(job_with()).pack
    twins = [
        Twin(model_of("llama").config, torch.float32, "sdpa", True, False, False, None, adapter=one)
        for one in (None, adapter)
    ]
    trained = [sum(p.numel() for p in twin.model.parameters() if p.requires_grad) for twin in twins]
    assert trained == [PARAMETERS, ADAPTER]
    held = [most(*twin.update(pack)).total for twin in twins]
    assert 0 < held[1] < 1.5 * held[0]


def test_sharded_weights_are_whole_while_exploring() -> None:
    whole, table = MemoryTable.from_job(job_with()), MemoryTable.from_job(job_with(spread=Spread.sharded(4)))
    assert table["optimizer"][2] == whole["optimizer"][2] / 4
    assert table["gradients"][2] == whole["gradients"][2] / 4
    assert table["weights"][0] + table["gathered weights"][0] == whole["weights"][0]
    # Of two layers both are gathered at once: all weights, and in the backward pass their gradients.
    assert table["gathered weights"][1] == whole["weights"][1]
    assert table["gathered weights"][2] == 2 * whole["weights"][1]


def test_ddp_exchanges_a_copy_of_the_gradients() -> None:
    assert MemoryTable.from_job(job_with(spread=Spread.replicated(2)))["gradients"][2] == 8 * PARAMETERS
    assert MemoryTable.from_job(job_with(spread=Spread.replicated(1)))["gradients"][2] == 4 * PARAMETERS


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (adamw, 2),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
        # A row and a column of 64 x 96.
        (lambda p: torch.optim.Adafactor(p), (64 + 96) / (64 * 96)),
    ],
)
def test_states_of_an_optimizer(optimizer: Callable[..., torch.optim.Optimizer], expected: float) -> None:
    assert optimizer_bytes(optimizer, torch.float32, "cpu")[0] == pytest.approx(expected)


def test_an_optimizer_that_steps_all_at_once_holds_as_much_again() -> None:
    # The square root of the second moments, for all parameters or for one after the other.
    assert optimizer_bytes(adamw, torch.float32, "cuda")[1:] == pytest.approx((1, 1), abs=0.01)
    assert optimizer_bytes(adamw, torch.float32, "cpu")[2] == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, 16),
        ({"max_rows": 9}, 8),
        ({"max_rows": 9, "refills": True}, 9),
        ({"max_rows": 17, "refills": True}, 16),
        ({"max_rows": 3}, 3),
        # A row's cache and, of its logits, four float32 tensors.
        ({"max_cache": (CACHE * 30 + 4 * 64 * 4) * 13}, 12),
        ({"validated_prompts": 3, "val_samples": 8}, 24),
    ],
)
def test_rows_decoded_at_once(changes: dict[str, Any], rows: int) -> None:
    assert Estimate(job_with(**changes)).rows_at_once == rows


def a_pack() -> Rollouts:
    return Rollouts.from_lists([[7] * 9, [8] * 5], [0, 0, 0, 1, 1], [[9] * n for n in (40, 12, 3, 25, 25)])


def truly_held(policy: Policy, pack: Rollouts, gradients: bool, autocast: torch.dtype | None) -> float:
    """The peak of a real forward, and backward, over tensors with numbers."""
    policy.train(gradients)
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter) if gradients else None
    known = [*policy.parameters(), *policy.buffers(), *(p.grad for p in policy.parameters() if p.grad is not None)]
    live = LiveBytes(known)
    with live, torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None), torch.set_grad_enabled(gradients):
        scored = policy(pack)
        if gradients:
            (scored.logp + scored.entropy).sum().backward()
        del scored
    return most(*live.peaks).total


@pytest.mark.parametrize(("recomputes", "autocast"), [(False, None), (True, None), (False, torch.bfloat16)])
@pytest.mark.parametrize("fused", [False, True])
def test_a_twin_holds_what_the_policy_holds(
    shape: str, recomputes: bool, autocast: torch.dtype | None, fused: bool
) -> None:
    policy, pack = policy_of(shape), a_pack()
    remove_dropout(policy.model)
    policy.fused = fused
    if fused:
        fuse(policy.model)
    if recomputes:
        recompute_activations(policy.model)
    attention = policy.model.config._attn_implementation
    twin = Twin(policy.config, torch.float32, attention, policy.shares_prefix, recomputes, False, autocast, fused=fused)
    for gradients in (True, False):
        found = twin.update(pack) if gradients else twin.score(pack)
        expected = truly_held(policy, pack, gradients, autocast)
        assert most(*found).total == pytest.approx(expected, rel=0.03), gradients


def test_live_bytes_of_a_few_tensors_by_hand() -> None:
    live = LiveBytes()
    with live:
        first = torch.zeros(100)
        view = first.view(10, 10)
        second = first + 1
        del first, second
        assert live.live == Held(activations=400)  # The view keeps it.
        del view
        live.in_head = True
        third = torch.zeros(50)
    assert live.live == Held(logits=200)
    assert live.peaks == [Held(activations=800)]
    del third
    assert live.live.total == 0


@pytest.mark.parametrize("changes", [{"recomputes": True}, {"precision": "bf16-mixed"}])
def test_few_layers_tell_about_many(changes: dict[str, Any]) -> None:
    config = model_of("llama", num_hidden_layers=5).config
    job = job_with(config=config, **changes)
    expected = Estimate(job)
    expected.__dict__["_twins"] = [expected._twin(5)]
    actual = Estimate(job)
    assert len(actual._twins) == 2
    for name in ("updated", "scored", "explored"):
        assert getattr(actual, name).total == pytest.approx(getattr(expected, name).total, rel=1e-6), name


def test_layers_that_differ_are_all_run() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    config = model_of("qwen2", num_hidden_layers=4, layer_types=kinds, sliding_window=8, use_sliding_window=True).config
    estimate = Estimate(job_with(config=config, shares_prefix=False))
    assert len(estimate._twins) == 1
    assert estimate.updated.total > 0


def test_the_head_of_a_large_vocabulary_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        vocab_size=5000,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    plain, fused = job_with(config=config, fused=False), job_with(config=config)
    whole = Estimate(plain).updated.logits
    # 320 tokens x 5,000 float32: logits, their log-softmax, and in the backward pass its gradient at least.
    assert whole >= 3 * 320 * 5000 * 4
    monkeypatch.setattr("grpo_lightning.policy.policy.HEAD_ELEMENTS", 5000 * 16)
    assert Estimate(plain).updated.logits < whole / 2
    # The logits themselves, kept for the backward pass, and two tensors of a block.
    monkeypatch.setattr("grpo_lightning.training.simulation.logits_at_once", lambda device: 5000 * 16)
    kept = Estimate(fused).updated.logits
    assert 320 * 5000 * 4 <= kept <= 1.3 * (320 + 2 * 16) * 5000 * 4
    monkeypatch.setattr("grpo_lightning.policy.token_logp.KEPT_ELEMENTS", 0)
    assert Estimate(fused).updated.logits < kept / 3


def test_more_tokens_in_a_pack_hold_more() -> None:
    held = [Estimate(job_with(max_tokens=size)).updated.total for size in (30, 120, 0)]
    assert held == sorted(held) and held[-1] > 2 * held[0]


def test_the_pack_stays_within_max_tokens() -> None:
    pack = Estimate(job_with(max_tokens=100)).pack
    assert pack.num_tokens + len(pack.prompt_token_ids) <= 100


def test_remedies_lower_the_peak_by_what_they_say() -> None:
    job = job_with(prompts_per_step=8, spread=Spread.replicated(4))
    found = remedies(Estimate(job), devices=4)
    keys = [remedy.key for remedy in found]
    assert any(key.startswith("loop.max_tokens=") for key in keys)
    assert "model.policy.gradient_checkpointing=true" in keys
    assert [remedy.saves for remedy in found] == sorted((remedy.saves for remedy in found), reverse=True)
    peak = MemoryTable.from_job(job).peak
    fewer = next(remedy for remedy in found if remedy.key.startswith("loop.max_tokens="))
    changed = MemoryTable.from_job(replace(job, max_tokens=int(fewer.key.split("=")[1])))
    assert peak - changed.peak == fewer.saves > 0


def test_a_phase_has_its_own_remedies() -> None:
    keys = [remedy.key for remedy in remedies(Estimate(job_with()), "exploring")]
    assert "model.engine.max_rows=8" in keys
    assert not any("max_tokens" in key for key in keys)


def test_the_table_as_text() -> None:
    lines = str(MemoryTable.from_job(job_with(process=100 * 2**20, spread=Spread.sharded(2)))).splitlines()
    assert " ".join(lines[0].split()) == "memory of each of 2 devices, MiB exploring log-probs updating"
    assert " ".join(lines[1].split()) == "process 100.0 100.0 100.0 Python and libraries"
    assert lines[-1].split()[0] == "sum"
    assert max(map(len, lines)) <= 110


def test_a_model_without_sdpa_takes_eager_attention() -> None:
    twin = Twin(model_of("gemma2").config, torch.float32, "no_such_attention", False, False, False, None)
    assert twin.model.config._attn_implementation == "eager"


def test_longer_completions_in_validation_need_a_larger_cache() -> None:
    """Four prompts of 10 tokens, four completions each of at most 20; two prompts are validated."""
    job = job_with(validated_prompts=2, val_samples=4)
    assert Estimate(job).cache == CACHE * 16 * 30
    longer = replace(job, val_sampling=Sampling(max_new_tokens=80))
    assert Estimate(longer).cache == CACHE * 8 * 90
    assert "8 rows x 90 tokens" in str(MemoryTable.from_job(longer))
    # 100 rows of 30 tokens take more than 8 of 90.
    many = replace(longer, prompts_per_step=25)
    assert Estimate(many).cache == CACHE * 100 * 30
    # What is kept of a step is of training.
    assert Estimate(longer).rollouts == Estimate(job).rollouts
    assert Estimate(longer).explored.total >= Estimate(job).explored.total


def test_the_same_sampling_in_validation_changes_nothing() -> None:
    job = job_with(validated_prompts=6, val_samples=4)
    assert str(MemoryTable.from_job(replace(job, val_sampling=replace(job.sampling)))) == str(MemoryTable.from_job(job))


def test_activations_in_main_memory_leave_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of recomputed layers only the inputs are left, and those go."""
    monkeypatch.setattr("grpo_lightning.policy.offloading.SMALL", 1)
    job = job_with(device="cuda", recomputes=True, config=model_of("llama", num_hidden_layers=8).config)
    stays = Estimate(job)
    goes = stays.changed(offloads=True)
    assert goes.updated.total < stays.updated.total
    keys = [remedy.key for remedy in remedies(stays, phase="updating")]
    assert "model.policy.offload_activations=true" in keys


@pytest.mark.parametrize(
    ("changes", "bytes_per_number"),
    [
        ({}, 0),
        ({"packs": True}, 4),
        ({"packs": True, "precision": "bf16-mixed"}, 2),
        ({"copied_dtype": torch.bfloat16}, 2),
    ],
)
def test_copies_for_decoding_are_held_while_exploring(changes: dict[str, Any], bytes_per_number: int) -> None:
    estimate = Estimate(job_with(**changes))
    linear = [module for module in estimate.model.modules() if isinstance(module, torch.nn.Linear)]
    expected = bytes_per_number * sum(module.weight.numel() for module in linear)
    assert estimate.linear_copies == expected
    assert MemoryTable.from_estimate(estimate)["copies for decoding"] == (expected, 0, 0)


# 4 prompts with 10 + 4 * 20 = 90 tokens: one pack of 360, two of 180 or four of 90.
@pytest.mark.parametrize(
    ("max_tokens", "threads", "at_once", "gradients"), [(0, 2, 1, 1), (180, 2, 2, 2), (90, 2, 2, 3), (90, 8, 4, 4)]
)
def test_packs_passed_at_once_hold_as_many_times(max_tokens: int, threads: int, at_once: int, gradients: int) -> None:
    one, several = (MemoryTable.from_job(job_with(max_tokens=max_tokens, threads=n)) for n in (1, threads))
    assert several["gradients"][2] == gradients * 4 * PARAMETERS
    assert several["activations"][2] == at_once * one["activations"][2]
    assert several["logits"][2] == at_once * one["logits"][2]
    assert several["activations"][:2] == one["activations"][:2]
