"""Fused layers against the library's own: outputs, gradients, what they keep, and which layers they are."""

import copy
from typing import Any

import pytest
import torch
from helpers.adapters import adapted
from helpers.tiny import gradients, model_of, policy_of, rollouts_of, tokenizer
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from grpo_lightning.plugins.fast import gated_mlp, rotary
from grpo_lightning.plugins.fast.fused_layers import fuse, fused
from grpo_lightning.plugins.fast.gated_mlp import FusedGatedMLP
from grpo_lightning.plugins.fast.products import OneDNNProducts, TorchProducts, use_onednn
from grpo_lightning.plugins.fast.rms_norm import FusedRMSNorm, _RMSNorm
from grpo_lightning.policy.policy import Policy

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


def test_without_gradients_it_computes_the_same_bits_and_calls_no_function_of_autograd(monkeypatch: Any) -> None:
    _, exchanged = both()
    exchanged.model.layers[0].mlp.up_proj.register_forward_hook(lambda *args: None)  # One MLP calls its layers.
    ids = torch.arange(24).view(2, 12) + 6
    expected = exchanged(ids, use_cache=False).logits.detach()
    for function in (_RMSNorm, rotary._Rotated, gated_mlp._Activated):
        monkeypatch.setattr(function, "apply", lambda *args: pytest.fail("called"))
    with torch.no_grad():
        assert torch.equal(exchanged(ids, use_cache=False).logits, expected)


@pytest.mark.parametrize(
    ("family", "norms", "mlps", "rotations"),
    [("llama", 5, 2, 2), ("qwen2", 5, 2, 2), ("qwen3", 9, 2, 2), ("smollm3", 5, 2, 2), ("gemma", 0, 0, 2)],
)
def test_what_is_exchanged(family: str, norms: int, mlps: int, rotations: int) -> None:
    plain, exchanged = both(family)
    assert len(parts(exchanged, FusedRMSNorm)) == norms
    assert len(parts(exchanged, FusedGatedMLP)) == mlps
    pairs = zip(exchanged.model.layers, plain.model.layers, strict=True)
    assert sum(type(layer.self_attn) is not type(old.self_attn) for layer, old in pairs) == rotations
    for layer, old in zip(exchanged.modules(), plain.modules(), strict=True):
        assert isinstance(layer, type(old))


def test_other_layers_stay_what_they_are() -> None:
    _, gpt2 = both("gpt2")
    assert not parts(gpt2, (FusedRMSNorm, FusedGatedMLP))
    _, other = both("llama", hidden_act="gelu")
    assert not parts(other, FusedGatedMLP) and parts(other, FusedRMSNorm)
    assert fused(nn.Linear, type(None)) is nn.Linear


def test_the_norms_gradient_is_that_of_finite_differences() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: _RMSNorm.apply(x, w, 0.1), (hidden, weight))


def test_the_norm_by_hand() -> None:
    """x = (3, 4), d = 2: the mean square is 12.5, with epsilon 3.5 it is 16, so the factor is 1/4."""
    hidden = torch.tensor([[3.0, 4.0]], requires_grad=True)
    weight = torch.tensor([2.0, 10.0], requires_grad=True)
    output = _RMSNorm.apply(hidden, weight, 3.5)
    assert output.tolist() == [[1.5, 10.0]]
    # g = (1, 0): w f g - x f^3 / d * (g x w) = 0.5 - 3 * 6 / 128, and 0 - 4 * 6 / 128.
    output[0, 0].backward()
    close(hidden.grad, torch.tensor([[0.5 - 18 / 128, -24 / 128]]), 1e-7)
    close(weight.grad, torch.tensor([0.75, 0.0]), 1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16])
def test_the_norm_rounds_where_the_librarys_does(dtype: torch.dtype, of_weight: torch.dtype) -> None:
    torch.manual_seed(1)
    norm = LlamaRMSNorm(48).to(of_weight)
    with torch.no_grad():
        norm.weight.normal_()
    hidden = torch.randn(7, 48, dtype=dtype)
    expected = norm(hidden)
    norm.__class__ = fused(LlamaRMSNorm, type(None))
    actual = norm(hidden)
    assert actual.dtype == expected.dtype
    close(actual, expected, 1e-6 if dtype == of_weight == torch.float32 else 1e-2)


def mlp_of(dtype: torch.dtype, bias: bool) -> Any:
    config = model_of("llama", mlp_bias=bias).config
    torch.manual_seed(2)
    return LlamaMLP(config).to(dtype)


@pytest.mark.parametrize("bias", [False, True])
def test_the_mlps_gradient_is_that_of_the_librarys(bias: bool) -> None:
    plain = mlp_of(torch.float64, bias)
    exchanged = copy.deepcopy(plain)
    fuse(exchanged)
    assert type(exchanged) is not type(plain)
    hidden = torch.randn(2, 5, 32, dtype=torch.float64)
    weight = torch.randn(2, 5, 32, dtype=torch.float64)
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    (exchanged(ours) * weight).sum().backward()
    (plain(theirs) * weight).sum().backward()
    close(ours.grad, theirs.grad, 1e-12)
    for name, value in plain.named_parameters():
        close(exchanged.get_parameter(name).grad, value.grad, 1e-12)


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

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            elements[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(hidden).sum()
    return sum(elements.values())


def test_what_is_kept_is_the_least() -> None:
    hidden = torch.randn(10, 32, requires_grad=True)
    mlp = mlp_of(torch.float32, bias=False)
    fuse(mlp)
    assert kept(mlp, hidden) == 10 * (32 + 2 * 48)
    norm = nn.Sequential(LlamaRMSNorm(32))
    fuse(norm)
    assert kept(norm, hidden) == 10 * (32 + 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rotation_is_the_librarys(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    # As attention makes them: heads beside each other in memory.
    states = [torch.randn(2, 5, heads, 8, dtype=dtype).transpose(1, 2) for heads in (4, 2)]
    cos, sin = (torch.randn(2, 5, 8, dtype=torch.float32 if dtype == torch.bfloat16 else dtype) for _ in range(2))
    results = []
    for function in (apply_rotary_pos_emb, rotary.apply_rotary_pos_emb):
        own = [state.clone(memory_format=torch.preserve_format).requires_grad_() for state in states]
        turned = function(*own, cos, sin)
        loss = sum((each * torch.linspace(-1, 1, each.numel()).view(each.shape)).sum() for each in turned)
        results.append([*turned, *torch.autograd.grad(loss, own)])
    for expected, actual in zip(*results, strict=True):
        assert actual.dtype == expected.dtype and actual.stride() == expected.stride()
        close(actual, expected, 1e-12 if dtype == torch.float64 else 2e-2)


@pytest.mark.parametrize("threads", [1, 2])
def test_products_of_the_backward_pass(threads: int) -> None:
    before = torch.get_num_threads()
    torch.manual_seed(4)
    gradient, hidden, weight, total = (torch.randn(shape) for shape in ((37, 24), (37, 40), (24, 40), (37, 40)))
    exact = [tensor.double() for tensor in (gradient, hidden, weight, total)]
    try:
        torch.set_num_threads(threads)
        for by in (TorchProducts, OneDNNProducts) if torch.backends.mkldnn.is_available() else (TorchProducts,):
            close(by.for_weight(gradient, hidden), exact[0].t() @ exact[1], 1e-4)
            close(by.for_weight(gradient[:, ::2], hidden), exact[0][:, ::2].t() @ exact[1], 1e-4)
            close(by.for_hidden(gradient, weight), exact[0] @ exact[2], 1e-4)
            close(by.for_hidden(gradient, weight, total.clone()), exact[3] + exact[0] @ exact[2], 1e-4)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("make", "onednn"), [(policy_of, False), (policy_of, True), (adapted, False)])
def test_a_policys_log_probs_and_gradients_are_the_same(make: Any, onednn: bool) -> None:
    expected, actual = make(), make()
    if onednn:
        use_onednn(actual.model)
    fuse(actual.model)
    rollouts = rollouts_of([4, 2, 6, 1], [3, 5])
    for policy in (expected, actual):
        policy(rollouts).logp.sum().backward()
    close(actual(rollouts).logp, expected(rollouts).logp, 1e-5)
    ours = dict(gradients(actual))
    for name, value in gradients(expected):
        close(ours[name], value)


def test_a_policy_that_is_read_has_them_unless_switched_off(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **kwargs: model)
    folder = tmp_path_factory.mktemp("policy")
    model_of("llama").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    for arguments, expected in (({}, True), ({"fused": False}, False), ({"compile": True}, False)):
        policy = Policy(str(folder), **arguments)
        policy.load()
        assert bool(parts(policy.model, FusedGatedMLP)) is expected
        assert any(type(layer) is LlamaAttention for layer in policy.model.modules()) is not expected
