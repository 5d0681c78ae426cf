"""oneDNN's products against float64, in a layer, in a policy and in a run."""

import copy
from pathlib import Path

import pytest
import torch
from helpers.tiny import read_policy
from torch import Tensor, nn

from grpo_lightning import Fast, Policy, UsageError
from grpo_lightning.plugins.compute.fast import products
from grpo_lightning.plugins.compute.fast.products import OneDNNLinear, use_onednn

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


def layers(bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    """The layer with oneDNN's products, and the same in float64."""
    torch.manual_seed(0)
    exact = nn.Linear(24, 40, bias=bias, dtype=torch.float64)
    layer = nn.Sequential(copy.deepcopy(exact).float())
    use_onednn(layer)
    assert type(layer[0]) is OneDNNLinear
    return layer[0], exact


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(7, 24), (3, 5, 24), (1, 24), (2, 1, 2, 24)])
def test_output_and_gradients_are_those_of_the_products(bias: bool, shape: tuple[int, ...]) -> None:
    layer, exact = layers(bias)
    hidden = torch.randn(shape, dtype=torch.float64)
    ours, theirs = hidden.float().requires_grad_(), hidden.clone().requires_grad_()
    weight = torch.randn(*shape[:-1], 40, dtype=torch.float64)
    (layer(ours) * weight.float()).sum().backward()
    (exact(theirs) * weight).sum().backward()
    close(layer(ours), exact(theirs))
    close(ours.grad, theirs.grad)
    for name, parameter in exact.named_parameters():
        close(layer.get_parameter(name).grad, parameter.grad)


def test_views_of_any_strides_are_read_right() -> None:
    layer, exact = layers()
    hidden = torch.randn(24, 9, dtype=torch.float64).t()[::2]
    close(layer(hidden.float()), exact(hidden))
    gradient = torch.ones(40, 5, dtype=torch.float64).t()
    for one, kind in ((layer, torch.float32), (exact, torch.float64)):
        one(hidden.to(kind)).backward(gradient.to(kind))
    close(layer.weight.grad, exact.weight.grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_and_autocast_stay_with_torch(dtype: torch.dtype) -> None:
    layer, exact = layers()
    exact.load_state_dict(layer.state_dict())
    hidden = torch.randn(4, 24)
    assert torch.equal(layer.to(dtype)(hidden.to(dtype)), exact.to(dtype)(hidden.to(dtype)))
    layer, exact = layers()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(hidden), exact.float()(hidden))


def test_a_policy_that_is_read_has_them(policy_folder: Path) -> None:
    read = Policy(str(policy_folder), compute=Fast(products="onednn"))
    read.check()
    read.load()
    assert any(type(layer) is OneDNNLinear for layer in read.model.modules())
    plain = read_policy(policy_folder, compute=Fast())
    assert not any(type(layer) is OneDNNLinear for layer in plain.model.modules())


@pytest.mark.parametrize(
    ("key", "maker", "expected"),
    [
        ("auto", "vendor_id: AuthenticAMD", True),
        ("auto", "GenuineIntel", False),
        ("onednn", "", True),
        ("torch", "AuthenticAMD", False),
    ],
)
def test_auto_is_onednn_on_amd(monkeypatch: pytest.MonkeyPatch, key: str, maker: str, expected: bool) -> None:
    monkeypatch.setattr(products, "processor", lambda: maker)
    assert products.by_onednn(key) is expected


def test_a_torch_without_onednn_is_a_mistake_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(products, "processor", lambda: "AuthenticAMD")
    assert not products.by_onednn("auto")
    with pytest.raises(UsageError, match=r"policy\.compute\.products=onednn.*products=torch"):
        products.by_onednn("onednn")


def close(actual: Tensor | None, expected: Tensor | None) -> None:
    assert actual is not None and expected is not None
    torch.testing.assert_close(actual.double(), expected.double(), atol=2e-5, rtol=1e-5)
