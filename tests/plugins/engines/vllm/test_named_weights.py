"""An engine with weights of its own gets them as a checkpoint names them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.adapters import adapted
from helpers.tiny import policy_of
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from grpo_lightning import Policy, UsageError
from grpo_lightning.plugins.engines.vllm.named_weights import named_weights

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}


def checkpoint(policy: Policy, folder: Path) -> dict[str, Tensor]:
    """The weights as transformers saves them."""
    policy.model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name, weight in actual.items() if not weight.equal(expected[name])] == []


@pytest.mark.parametrize(
    ("shape", "overrides"),
    [
        ("llama", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("gpt2", {}),
        # transformers holds all experts in one tensor; a checkpoint has three per expert.
        ("qwen3_moe", EXPERTS),
    ],
)
def test_names_and_tensors_are_those_of_a_checkpoint(tmp_path: Path, shape: str, overrides: dict[str, Any]) -> None:
    policy = policy_of(shape, **overrides)
    assert_equal(dict(named_weights(policy, tied_head=False)), checkpoint(policy, tmp_path))


def test_a_tied_head_is_named_where_it_is_asked_for(tmp_path: Path) -> None:
    policy = policy_of("qwen2", tie_word_embeddings=True)
    expected = checkpoint(policy, tmp_path)
    expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    assert_equal(dict(named_weights(policy, tied_head=True)), expected)


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_an_adapter_is_added_to_the_weights(shape: str) -> None:
    policy = adapted(shape, rslora=True)
    merged = policy_of(shape)
    weights = dict(named_weights(policy, tied_head=False))
    merged.model.load_state_dict(weights, strict=False)
    assert weights.keys() == dict(named_weights(merged, tied_head=False)).keys()
    prompt = torch.arange(1, 9)[None]
    with torch.no_grad():
        found, expected = (one.model(input_ids=prompt).logits for one in (policy, merged))
    assert (found - expected).abs().max() < 1e-5
    with policy.without_adapter(), torch.no_grad():
        assert (policy.model(input_ids=prompt).logits - expected).abs().max() > 1e-3


def test_dora_cannot_be_added() -> None:
    with pytest.raises(UsageError, match="NativeEngine"):
        dict(named_weights(adapted(dora=True)))


def test_sharded_weights_are_assembled_one_at_a_time(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dict(named_weights(policy_of()))
    policy, assembled = policy_of(), []
    policy.shard(mesh)
    full_tensor = DTensor.full_tensor

    def noted(self: DTensor, **kwargs: Any) -> Tensor:
        assembled.append(self)
        return full_tensor(self, **kwargs)

    monkeypatch.setattr(DTensor, "full_tensor", noted)
    for count, (name, weight) in enumerate(named_weights(policy), start=1):
        assert len(assembled) == count
        assert weight.equal(whole[name]) and not isinstance(weight, DTensor)
    assert count == len(whole)
    assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())
