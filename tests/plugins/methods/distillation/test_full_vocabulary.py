"""Divergences of whole distributions: value and gradient against a loop in float64, and what is never in memory."""

import math
from typing import Any

import pytest
import torch
from helpers.distilling import gradient
from helpers.fitting import relative
from helpers.largest import Largest
from helpers.tiny import model_of, rollouts_of, tokenizer
from torch import Tensor, nn

from grpo_lightning.maths.kl import KLPenalty
from grpo_lightning.plugins.methods.distillation import full_vocabulary as module
from grpo_lightning.plugins.methods.distillation.full_vocabulary import FullVocabulary
from grpo_lightning.plugins.methods.distillation.states import States
from grpo_lightning.plugins.methods.penalties.importance_weighted import ImportanceWeighted
from grpo_lightning.policy.adapter import LoRA
from grpo_lightning.policy.architecture import Head
from grpo_lightning.policy.policy import Policy
from grpo_lightning.policy.snapshots import AdapterOff, FrozenCopy
from grpo_lightning.types import UsageError

TOKENS, WIDTH = 7, 16
KINDS: list[dict[str, Any]] = [
    {},
    {"divergence": "forward"},
    {"divergence": "jensen_shannon"},
    {"divergence": "jensen_shannon", "mixture": 0.2, "temperature": 1.7},
    {"temperature": 2.0},
    {"top_k": 4},
    {"top_k": 5, "divergence": "forward", "temperature": 0.5},
    {"top_k": 3, "divergence": "jensen_shannon"},
]


def heads() -> tuple[Head, Head]:
    """Those of two models of different widths."""
    torch.manual_seed(0)
    return Head(model_of("llama")), Head(model_of("llama", seed=1, hidden_size=WIDTH, head_dim=4))


def states() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(4 * torch.randn(TOKENS, width, generator=generator) for width in (32, WIDTH))


def by_a_loop(kl: FullVocabulary, mine: list[float], its: list[float], temperature: float) -> tuple[float, list[float]]:
    """D of a token, and its derivatives by the policy's logits, from those of both models: plain numbers."""

    def softmax(logits: list[float]) -> list[float]:
        largest = max(logits)
        sizes = [math.exp((logit - largest) / temperature / kl.temperature) for logit in logits]
        return [size / sum(sizes) for size in sizes]

    p, q = softmax(mine), softmax(its)
    likeliest = p if kl.divergence == "reverse" else q
    order = sorted(range(len(p)), key=lambda token: -likeliest[token])
    kept = order if kl.top_k is None else order[: kl.top_k]
    cells = [[token] for token in kept] + ([[*order[kl.top_k :]]] if kl.top_k is not None else [])
    value, slope = 0.0, [0.0] * len(p)
    for cell in cells:
        a, b = sum(p[token] for token in cell), sum(q[token] for token in cell)
        w = kl.mixture
        m = w * b + (1 - w) * a
        if kl.divergence == "reverse":
            own, by_a = a * math.log(a / b), math.log(a / b) + 1
        elif kl.divergence == "forward":
            own, by_a = b * math.log(b / a), -b / a
        else:
            own = w * b * math.log(b / m) + (1 - w) * a * math.log(a / m)
            by_a = (1 - w) * math.log(a / m)  # the rest of it is the same in every cell, and cancels below
        value += own
        for token in cell:
            slope[token] = by_a
    mean = sum(a * s for a, s in zip(p, slope, strict=True))
    scale = kl.temperature**2 / (temperature * kl.temperature)
    return kl.temperature**2 * value, [scale * a * (s - mean) for a, s in zip(p, slope, strict=True)]


@pytest.mark.parametrize("chunk", [64 * TOKENS, 64 * 2, 1])
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_value_and_gradient_are_those_of_a_loop_in_float64(
    options: dict[str, Any], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk)
    kl, (head, its_head), (hidden, its), temperature = FullVocabulary(**options), heads(), states(), 1.3
    hidden.requires_grad_()
    weight = torch.rand(TOKENS, generator=torch.Generator().manual_seed(1))
    found = kl.compare(hidden, head, [States(its, its_head)], temperature)
    assert found.shape == (TOKENS,) and found.dtype == torch.float32
    (weight * found).sum().backward()
    w, own = head.embedding.weight, hidden.detach().double()
    mine, theirs = own @ w.detach().double().T, its.double() @ its_head.embedding.weight.detach().double().T
    pairs = zip(mine.tolist(), theirs.tolist(), strict=True)
    values, slopes = zip(*[by_a_loop(kl, a, b, temperature) for a, b in pairs], strict=True)
    dl = weight.double()[:, None] * torch.tensor(slopes, dtype=torch.float64)
    expected = {"hidden": dl @ w.detach().double(), "head": dl.T @ own}
    assert relative({"value": found.detach()}, {"value": torch.tensor(values)}) < 1e-6
    assert hidden.grad is not None and w.grad is not None
    assert relative({"hidden": hidden.grad, "head": w.grad}, expected) < 1e-6


def test_an_exact_divergence_is_refused_as_reward_or_weighted_estimate() -> None:
    with pytest.raises(UsageError, match=r"reward_kl.kl=FullVocabulary: it is the same whichever token is drawn"):
        KLPenalty(kl=FullVocabulary(top_k=4))
    with pytest.raises(UsageError, match="exact already"):
        ImportanceWeighted(FullVocabulary())


def test_no_tensor_has_all_tokens_and_the_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 64 * 20)
    (head, its_head), hidden = heads(), torch.randn(200, 32, requires_grad=True)
    with Largest() as largest:
        FullVocabulary().compare(hidden, head, [States(torch.randn(200, WIDTH), its_head)], 1.0).sum().backward()
    assert largest.elements == 200 * 32 < 64 * 200


def test_chunks_are_no_smaller_than_what_glibc_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(self: FullVocabulary, head: Any, its_head: Any, temperature: float, mine: Any, its: Any) -> torch.Tensor:
        rows.append(len(mine))
        return mine.sum(1)

    assert module.CHUNK_ELEMENTS * 4 >= 2**25  # glibc's largest DEFAULT_MMAP_THRESHOLD
    rows: list[int] = []
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 64 * 20 + 1)
    monkeypatch.setattr(FullVocabulary, "_of_chunk", note)
    (head, its_head), _ = heads(), states()
    FullVocabulary().compare(torch.randn(50, 32), head, [States(torch.randn(50, WIDTH), its_head)], 1.0)
    assert rows == [25, 25]


def test_tokens_that_no_model_writes_add_nothing() -> None:
    (head, its_head), (hidden, its) = heads(), states()
    found = {}
    for excluded in (-1e4, -math.inf):
        for one in (head, its_head):
            one.embedding.bias = nn.Parameter(torch.zeros(64))
            one.embedding.bias.data[4:9] = excluded
        own = hidden.clone().requires_grad_()
        value = FullVocabulary().compare(own, head, [States(its, its_head)], 1.0)
        value.sum().backward()
        found[excluded] = value.detach(), own.grad
    assert all(a.equal(b) and a.isfinite().all() for a, b in zip(*found.values(), strict=True))


def distilled(policy: Policy, reference: Any) -> dict[str, Tensor]:
    return gradient(policy, reference, rollouts_of([4, 9, 1, 6], prompt_lengths=[3, 1]))


def test_an_adapter_is_compared_with_the_base_model() -> None:
    policy = Policy.from_model(model_of("llama"), tokenizer(), adapter=LoRA(rank=4))
    copy = FrozenCopy()
    copy.refresh(policy)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    off, of_copy = distilled(policy, AdapterOff()), distilled(policy, copy)
    assert relative(off, of_copy) < 1e-6 and all("lora_" in name for name in off)
    policy.compute.threads = 2  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="threads=2"):
        distilled(policy, copy)
