"""Fused layers against the library's own: outputs, gradients, what they keep, and which layers they are."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import model_of, read_policy
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from grpo_lightning import Fast
from grpo_lightning.plugins.compute.fast.fused_layers import FusedGatedMLP, FusedRMSNorm, _RMSNorm, fuse, fused

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "smollm3", "granite", "gemma", "phi3", "olmo2", "gpt2")


def close(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


def both(family: str = "llama", **overrides: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model and its copy with fused layers."""
    plain = model_of(family, **overrides)
    exchanged = copy.deepcopy(plain)
    fuse(exchanged)
    return plain, exchanged


def parts(model: nn.Module, kind: type) -> list[Any]:
    return [layer for layer in model.modules() if isinstance(layer, kind)]


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_what_it_did(family: str, autocast: bool) -> None:
    plain, exchanged = both(family)
    assert list(plain.state_dict()) == list(exchanged.state_dict())
    ids = torch.arange(24).view(2, 12) + 6
    found = []
    for model in (plain, exchanged):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(ids, use_cache=False).logits.float()
            (logits.log_softmax(-1) * torch.linspace(-1, 1, logits.shape[-1])).sum().backward()
        found.append((logits.detach(), {name: value.grad for name, value in model.named_parameters()}))
    (expected, expected_gradients), (actual, actual_gradients) = found
    close(actual, expected, 3e-2 * float(expected.abs().max()) if autocast else 2e-5)
    for name, value in expected_gradients.items():
        scale = max(1.0, float(value.abs().max()))
        close(actual_gradients[name] / scale, value / scale, 5e-2 if autocast else 2e-5)


def test_other_layers_stay_what_they_are() -> None:
    _, gpt2 = both("gpt2")
    assert not parts(gpt2, (FusedRMSNorm, FusedGatedMLP))
    _, other = both("llama", hidden_act="gelu")
    assert not parts(other, FusedGatedMLP) and parts(other, FusedRMSNorm)
    assert fused(nn.Linear, FusedRMSNorm) is nn.Linear


def test_a_class_of_another_formula_stays() -> None:
    class Centred(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))

    class Renamed(LlamaRMSNorm):
        def forward(self, states: Tensor) -> Tensor:
            return self.weight * states * (states.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    assert fused(Centred, FusedRMSNorm) is Centred and issubclass(fused(Renamed, FusedRMSNorm), FusedRMSNorm)


def test_the_norms_gradient_is_that_of_finite_differences() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: _RMSNorm.apply(x, w, 0.1), (hidden, weight))


def mlp_of(dtype: torch.dtype, bias: bool) -> Any:
    config = model_of("llama", mlp_bias=bias).config
    torch.manual_seed(2)
    return LlamaMLP(config).to(dtype)


@pytest.mark.parametrize(
    "trained", ["hidden", "gate_proj.weight", "up_proj.weight", "down_proj.weight", "up_proj.bias"]
)
def test_what_is_frozen_has_no_gradient(trained: str) -> None:
    plain = mlp_of(torch.float64, bias=True)
    for name, value in plain.named_parameters():
        value.requires_grad_(name == trained)
    exchanged = copy.deepcopy(plain)
    fuse(exchanged)
    results = []
    for mlp in (plain, exchanged):
        hidden = torch.linspace(-1, 1, 96, dtype=torch.float64).view(3, 32).requires_grad_(trained == "hidden")
        left = hidden if trained == "hidden" else mlp.get_parameter(trained)
        results.append(torch.autograd.grad(mlp(hidden).square().sum(), left)[0])
        assert [name for name, value in mlp.named_parameters() if value.requires_grad] == (
            [] if trained == "hidden" else [trained]
        )
    close(results[1], results[0], 1e-12)


def test_a_layer_with_something_on_it_is_called() -> None:
    mlp = mlp_of(torch.float32, bias=False)
    hidden = torch.randn(4, 32)
    expected = mlp(hidden)
    fuse(mlp)
    calls: list[Tensor] = []
    mlp.up_proj.register_forward_hook(lambda layer, args, output: calls.append(output))
    close(mlp(hidden), expected, 1e-6)
    assert len(calls) == 1
    mlp.down_proj.__dict__["forward"] = lambda states: states[..., :1]
    assert mlp(hidden).shape == (4, 1)


def kept(model: nn.Module, hidden: Tensor) -> int:
    """Elements that the forward pass keeps, parameters aside."""
    elements: dict[int, int] = {}

    def micro_batch(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            elements[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    with saved_tensors_hooks(micro_batch, lambda tensor: tensor):
        model(hidden).sum()
    return sum(elements.values())


def test_what_is_kept() -> None:
    hidden = torch.randn(10, 32, requires_grad=True)
    mlp = mlp_of(torch.float32, bias=False)
    fuse(mlp)
    assert kept(mlp, hidden) == 10 * (32 + 3 * 48)
    norm = nn.Sequential(LlamaRMSNorm(32))
    fuse(norm)
    assert kept(norm, hidden) == 10 * (32 + 1)


def test_a_policy_that_is_read_has_them_unless_switched_off(policy_folder: Path) -> None:
    for arguments, expected in (({}, True), ({"fused": False}, False)):
        policy = read_policy(policy_folder, compute=Fast(**arguments))
        assert bool(parts(policy.model, FusedGatedMLP)) is expected
