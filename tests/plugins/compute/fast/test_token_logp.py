"""The fused head: numbers and gradients against the softmax of whole rows, in float64 and in the policy."""

from collections.abc import Iterator

import pytest
import torch
from helpers.fast import adapted, policy_of
from helpers.largest import Largest
from helpers.tiny import gradients, rollouts_of
from torch import Tensor, nn

from grpo_lightning import Policy, Rollouts, TokenLogp
from grpo_lightning.plugins.compute.fast import token_logp as module
from grpo_lightning.plugins.compute.fast.products import is_plain
from grpo_lightning.plugins.compute.fast.token_logp import BlockedHead, token_logp
from grpo_lightning.policy import architecture

TOKENS, WIDTH, VOCABULARY = 7, 6, 13
SCALE = 0.7


@pytest.fixture(params=[(1000, 1000, 1000), (35, 0, 1000), (20, 40, 5)], ids=str)
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Elements of a block: everything in one, or several uneven ones of which none or some are kept."""
    block, kept, rows = request.param
    monkeypatch.setattr(module, "KEPT_ELEMENTS", kept)
    monkeypatch.setattr(module, "MAX_ROWS", rows)
    return int(block)


def inputs(bias: bool, dtype: torch.dtype = torch.float64) -> tuple[Tensor, nn.Linear, Tensor]:
    """States, a head and ids."""
    generator = torch.Generator().manual_seed(3)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=dtype, requires_grad=True)
    return hidden, head, torch.randint(VOCABULARY, (TOKENS,), generator=generator)


def plain(hidden: Tensor, head: nn.Linear) -> Tensor:
    """[N, V] log-probs."""
    return (head(hidden) * SCALE).log_softmax(-1)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("bias", [False, True])
def test_numbers_are_those_of_the_softmax(block: int, bias: bool) -> None:
    hidden, head, ids = inputs(bias)
    logp, entropy, top_ids, top_logp = token_logp(hidden, head, ids, SCALE, num_top=3, block=block)
    expected = plain(hidden, head)
    close(logp, expected[range(TOKENS), ids])
    close(entropy, -(expected.exp() * expected).sum(-1))
    close(top_logp, expected.topk(3).values)
    assert top_ids.equal(expected.topk(3).indices)
    assert logp.requires_grad and not entropy.requires_grad and not top_logp.requires_grad


@pytest.mark.parametrize(("bias", "entropy_gradient"), [(False, True), (True, False)])
def test_the_gradient_is_that_of_finite_differences(block: int, bias: bool, entropy_gradient: bool) -> None:
    hidden, head, ids = inputs(bias)
    settings = BlockedHead(SCALE, torch.float64, 0, keeps=True, entropy_gradient=entropy_gradient, block=block)

    def function(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
        return module._TokenLogp.apply(hidden, weight, bias, ids, settings)[: 1 + entropy_gradient]

    assert torch.autograd.gradcheck(function, (hidden, *head.parameters()))


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_impossible_tokens_change_nothing(block: int, entropy_gradient: bool) -> None:
    """A head masks a padded vocabulary with a bias of -inf; here whole blocks, and a token among possible ones."""
    hidden, head, ids = inputs(bias=True)
    impossible = torch.tensor([2, 5, 6, 7, 8, 9, 12])
    possible = torch.tensor([0, 1, 3, 4, 10, 11])
    ids = possible[ids % len(possible)]
    with torch.no_grad():
        head.bias[impossible] = -torch.inf
    small = nn.Linear(WIDTH, len(possible), dtype=torch.float64)
    with torch.no_grad():
        small.weight.copy_(head.weight[possible])
        small.bias.copy_(head.bias[possible])
    states = hidden.detach().requires_grad_()
    expected = plain(states, small)
    columns = (ids[:, None] == possible).long().argmax(-1)
    expected_logp = expected[range(TOKENS), columns]
    expected_entropy = -(expected.exp() * expected).sum(-1)
    logp, entropy, *_ = token_logp(hidden, head, ids, SCALE, entropy_gradient, block=block)
    close(logp, expected_logp)
    close(entropy, expected_entropy)
    rates = torch.linspace(-1, 1, TOKENS, dtype=torch.float64)
    (rates * (logp + 2 * entropy if entropy_gradient else logp)).sum().backward()
    (rates * (expected_logp + 2 * expected_entropy if entropy_gradient else expected_logp)).sum().backward()
    assert hidden.grad is not None and states.grad is not None and head.weight.grad is not None
    close(hidden.grad, states.grad)
    close(head.weight.grad[possible], small.weight.grad)  # type: ignore[arg-type]
    close(head.weight.grad[impossible], torch.zeros(len(impossible), WIDTH, dtype=torch.float64))


@pytest.mark.parametrize("trained", ["states", "head"])
def test_what_is_frozen_has_no_gradient(block: int, trained: str) -> None:
    hidden, head, ids = inputs(bias=True)
    hidden.requires_grad_(trained == "states")
    head.requires_grad_(trained == "head")
    expected = plain(hidden, head)[range(TOKENS), ids].sum()
    actual = token_logp(hidden, head, ids, SCALE, block=block)[0].sum()
    inputs_with_gradient = [hidden] if trained == "states" else [*head.parameters()]
    both = (torch.autograd.grad(output, inputs_with_gradient) for output in (actual, expected))
    for pair in zip(*both, strict=True):
        close(*pair)


def test_without_tokens_the_gradient_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty_like", lambda like: torch.full_like(like, torch.nan))
    hidden, head, ids = inputs(bias=True)
    logp = token_logp(hidden[:0], head, ids[:0], SCALE)[0]
    for gradient in torch.autograd.grad(logp.sum(), [hidden, *head.parameters()]):
        assert not gradient.any()


def test_no_tensor_has_all_tokens_and_the_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_ELEMENTS", 0)
    head, hidden = nn.Linear(4, 1000, bias=False), torch.randn(500, 4, requires_grad=True)
    with Largest() as largest:
        token_logp(hidden, head, torch.zeros(500, dtype=torch.int64), block=100_000)[0].sum().backward()
    assert largest.elements == 100_000


def test_a_head_with_something_on_it_is_called() -> None:
    head = nn.Linear(2, 3)
    assert is_plain(head)
    head.register_forward_hook(lambda *_: None)
    assert not is_plain(head)
    assert not is_plain(nn.Sequential(nn.Linear(2, 3)))
    assert not is_plain(adapted(target_modules=["lm_head"]).model.get_output_embeddings())


def scored(policy: Policy, rollouts: Rollouts, autocast: bool = False) -> tuple[TokenLogp, dict[str, Tensor]]:
    """Log-probs, and the gradient of their weighted sum and of the entropy's."""
    policy.zero_grad()
    rollouts.temperature = 0.8
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = policy(rollouts, entropy_gradient=True)
        # As in training, where the backward pass runs inside of autocast too.
        (rollouts.weight * (found.logp + 0.1 * found.entropy)).sum().backward()
    return found.detached, {name: value.clone() for name, value in gradients(policy)}


@pytest.fixture(
    params=[
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("gpt2", {}),
        ("phi", {}),
        ("granite", {"logits_scaling": 4.0}),
        ("cohere", {"logit_scale": 0.25}),
    ],
    ids=["llama", "tied", "gpt2", "bias", "divided", "scaled"],
)
def policy(request: pytest.FixtureRequest) -> Iterator[Policy]:
    shape, overrides = request.param
    return policy_of(shape, **overrides)


@pytest.mark.parametrize(("at_once", "autocast"), [(None, True), (100, False)], ids=["autocast", "blocks"])
def test_the_policy_scores_as_without_it(
    policy: Policy, at_once: int | None, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = rollouts_of([4, 9, 1, 6, 2], [3, 1, 8])
    policy.compute.fused = False
    expected, expected_gradient = scored(policy, rollouts, autocast)
    policy.compute.fused, policy.compute.logits_at_once = True, at_once
    called = []
    monkeypatch.setattr(architecture.Head, "__call__", lambda self, hidden: called.append(hidden))
    actual, gradient = scored(policy, rollouts, autocast)
    assert not called
    close(actual.logp, expected.logp, 1e-5 if autocast else 2e-6)
    close(actual.entropy, expected.entropy, 1e-5 if autocast else 2e-6)
    for name, value in expected_gradient.items():
        scale = max(1.0, float(value.abs().max()))
        close(gradient[name], value, (2e-2 if autocast else 2e-6) * scale)


def test_capped_logits_go_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, rollouts = policy_of("gemma2", final_logit_softcapping=2.0), rollouts_of([4, 2])
    calls = []
    logits = architecture.Head.__call__
    monkeypatch.setattr(
        architecture.Head, "__call__", lambda self, hidden: calls.append(len(hidden)) or logits(self, hidden)
    )
    policy(rollouts)
    assert calls == [6]
