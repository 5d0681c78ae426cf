"""The key-value cache stays within its bound; results do not depend on it; what does not fit is refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fast import policy_of
from helpers.tiny import requests_of
from torch import Tensor
from transformers import AutoConfig

from grpo_lightning import Completion, NativeEngine, RandomKey, Sampling, UsageError
from grpo_lightning.plugins.compute.planning.memory import LiveBytes
from grpo_lightning.plugins.engines.native import kv_memory
from grpo_lightning.plugins.engines.native.kv_memory import GIB, cache_bytes_per_token, row_bytes
from grpo_lightning.plugins.engines.native.slab import SlabLayer


def test_bytes_per_token_of_a_model_everybody_knows() -> None:
    # Qwen2.5-7B: 28 layers, 28 heads, 4 key-value heads, width 3,584.
    qwen = AutoConfig.for_model(
        "qwen2", num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, hidden_size=3584
    )
    assert cache_bytes_per_token(qwen, torch.bfloat16) == 28 * 2 * 4 * 128 * 2 == 57_344
    assert cache_bytes_per_token(qwen, torch.float32) == 2 * 57_344


class Watched(NativeEngine):
    """Notes the largest cache that is held at once, in bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.largest = 0
        expand = SlabLayer.expand

        def expanded(layer: SlabLayer, rows: Tensor, capacity: int) -> None:
            expand(layer, rows, capacity)
            self.largest = max(self.largest, 2 * sum(slab.nbytes for slab in layer.slabs))

        monkeypatch.setattr(SlabLayer, "expand", expanded)

    def draw(self, policy: Any) -> list[Completion]:
        self.sync(policy)
        return self.complete(requests_of([4, 1, 9, 4, 6], 6), Sampling(max_new_tokens=24), RandomKey(3, 0))


@pytest.mark.parametrize("rows", [1, 2, 4, 6, 13])
def test_any_bound_gives_the_same_completions_within_it(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    # 1, 2 and 4 rows cut the groups of 6.
    policy = policy_of()
    whole = Watched(monkeypatch).draw(policy)
    bound = rows * row_bytes(policy.config, torch.float32, 9 + 24)
    engine = Watched(monkeypatch, max_cache_gib=bound / GIB)
    bounded = engine.draw(policy)
    assert [c.token_ids for c in bounded] == [c.token_ids for c in whole]
    for left, right in zip(bounded, whole, strict=True):
        assert left.logp == pytest.approx(right.logp, abs=1e-5)
    assert bound / 2 < engine.largest <= bound


@pytest.mark.parametrize("autocast", [False, True])
def test_reading_prompts_takes_less_than_twice_the_cache(autocast: bool) -> None:
    # Per token 1 KiB of cache, and 24 KiB of activations in the MLP alone: all at once they would take twelve times it.
    sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_key_value_heads": 1, "max_position_embeddings": 512}
    policy, engine = policy_of(scale=0.05, **sizes), NativeEngine(max_cache_gib=2**22 / GIB)
    requests = requests_of([64] * 56, 1)
    autocasts = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with autocasts:
        engine.sync(
            policy
        )  # here, since a CPU with bfloat16 packs the copies into tensors whose bytes nobody can count
    with autocasts, LiveBytes() as bytes_:
        engine.complete(requests[:1], Sampling(max_new_tokens=2), RandomKey(0, 0))
        before = bytes_.live  # The weights, whose transposes were seen, and autocast's copies of them.
        engine.complete(requests, Sampling(max_new_tokens=2), RandomKey(0, 0))
    assert bytes_.peak - before < 2 * 2**22


def test_where_not_one_row_fits_the_numbers_and_keys_are_named() -> None:
    policy, engine = policy_of(), NativeEngine(max_cache_gib=1e-6)
    message = (
        r"model\.engine\.max_cache_gib=1e-06: one completion of 33 tokens with its prompt takes .* GiB \(256 bytes per "
        r"token\) and .* GiB may be used; raise model\.engine\.max_cache_gib, or lower sampling\.max_new_tokens or the "
        r"length of prompts"
    )
    with pytest.raises(UsageError, match=message):
        Watched.draw(engine, policy)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"engine\.max_cache_gib=1e-06: one completion of 25 tokens"):
        engine.check(policy, Sampling(max_new_tokens=24))


def test_what_is_free_bounds_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of()
    each = row_bytes(policy.config, torch.float32, 9 + 24)
    whole = Watched(monkeypatch).draw(policy)
    monkeypatch.setattr(kv_memory, "available_bytes", lambda: int(2.5 * each / kv_memory.CPU_FRACTION))
    engine = Watched(monkeypatch)
    assert [c.token_ids for c in engine.draw(policy)] == [c.token_ids for c in whole]
    assert each < engine.largest <= 2.5 * each
    monkeypatch.setattr(kv_memory, "available_bytes", lambda: 100)
    with pytest.raises(UsageError, match=r"memory of cpu: one completion of 33 tokens.*; lower sampling"):
        engine.draw(policy)


def test_what_a_container_may_take_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kv_memory.in_cgroup(tmp_path) == math.inf
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 400\ninactive_file 200\n")
    assert kv_memory.in_cgroup(tmp_path) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert kv_memory.in_cgroup(tmp_path) == math.inf
    monkeypatch.setattr(kv_memory, "in_cgroup", lambda folder: 500)
    assert kv_memory.available_bytes() == 500
