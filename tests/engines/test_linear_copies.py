from typing import Any

import pytest
import torch
from helpers.adapters import adapted, move
from helpers.tiny import policy_of, prompts_of, requests_of, teacher_forced
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_lightning.engines import trial
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.plugins.fast import linear_copies
from grpo_lightning.plugins.fast.linear_copies import LinearCopies
from grpo_lightning.plugins.fast.native import NativeEngine
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import Completion, RandomKey

REQUESTS = requests_of([4, 1, 9], 3)
SAMPLING = Sampling(max_new_tokens=12)


def sampled(engine: NativeEngine, policy: Policy) -> list[Completion]:
    engine.sync(policy)
    return engine.complete(REQUESTS, SAMPLING, RandomKey())


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def gaps(policy: Policy, completions: list[Completion]) -> list[float]:
    """The difference of each recorded log-prob to that of a plain forward, in nats."""
    found = []
    for request, completion in zip(REQUESTS, completions, strict=True):
        logp = teacher_forced(policy.model, request.token_ids, completion.token_ids)
        expected = logp.gather(-1, torch.tensor(completion.token_ids)[:, None]).squeeze(-1)
        found += (expected - torch.tensor(completion.logp)).abs().tolist()
    return found


def update(policy: Policy) -> None:
    """An optimizer's update."""
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.3)
    input_ids = torch.tensor([prompts_of([6])[0].token_ids])
    (-policy.logits(policy.hidden(input_ids, use_cache=False)).log_softmax(-1)[..., 7].mean()).backward()
    optimizer.step()
    policy.version += 1


def test_packed_layers_draw_the_same_with_the_policys_log_probs(policy: Policy) -> None:
    engine = NativeEngine(packed=True)
    engine.check(policy, SAMPLING)
    packed = sampled(engine, policy)
    assert tokens(packed) == tokens(sampled(NativeEngine(), policy))
    assert max(gaps(policy, packed)) < 1e-5


def test_packed_layers_draw_in_inference_mode() -> None:
    # Lightning validates and predicts in it. Its tensors have no version.
    engine, policy = NativeEngine(packed=True), policy_of("llama")
    expected = tokens(sampled(engine, policy))
    with torch.inference_mode():
        assert tokens(sampled(engine, policy)) == expected


@pytest.mark.parametrize("tied", [True, False])
def test_every_linear_layer_has_a_copy_and_the_embedding_none(tied: bool) -> None:
    policy = policy_of("llama", tie_word_embeddings=tied)
    copies = LinearCopies(policy, torch.float32)
    linear = [module for module in policy.model.modules() if isinstance(module, torch.nn.Linear)]
    assert len(copies) == len(linear)
    input_ids, embedding = torch.tensor([[7, 8, 9]]), policy.model.get_input_embeddings().weight
    with torch.no_grad():
        expected, rows = policy.logits(policy.hidden(input_ids)), embedding.detach().clone()
        for layer in linear:
            layer.weight.zero_()
        assert bool(embedding.any()) != tied
        with copies.in_use():
            policy.model.get_input_embeddings().weight = torch.nn.Parameter(rows)
            assert torch.allclose(policy.logits(policy.hidden(input_ids)), expected, atol=1e-5)


@pytest.mark.parametrize("fails", [False, True])
def test_the_layers_have_their_own_forward_again_afterwards(fails: bool) -> None:
    policy = policy_of()
    before = [dict(vars(module)) for module in policy.model.modules()]
    copies = LinearCopies(policy, torch.float32)
    try:
        with copies.in_use():
            assert any("forward" in vars(module) for module in policy.model.modules())
            if fails:
                raise RuntimeError
    except RuntimeError:
        pass
    assert [vars(module) for module in policy.model.modules()] == before


@pytest.mark.parametrize("options", [{"packed": True}, {"dtype": "bfloat16"}], ids=["packed", "bfloat16"])
@pytest.mark.parametrize("kind", ["whole", "lora"])
def test_copies_are_never_those_of_earlier_weights(kind: str, options: dict[str, Any]) -> None:
    policy = adapted("llama") if kind == "lora" else policy_of()
    if kind == "lora":
        move(policy)
    engine = NativeEngine(**options)
    first = sampled(engine, policy)
    update(policy)
    # Without another sync.
    second = engine.complete(REQUESTS, SAMPLING, RandomKey())
    assert tokens(second) == tokens(sampled(NativeEngine(**options), policy))
    assert [c.logp for c in second] != [c.logp for c in first]
    weights = {name: value * 0.9 for name, value in policy.state_dict().items()}
    policy.load_state_dict(weights)
    third = engine.complete(REQUESTS, SAMPLING, RandomKey())
    assert [c.logp for c in third] == [c.logp for c in sampled(NativeEngine(**options), policy)]
    assert [c.logp for c in third] != [c.logp for c in second]


def test_an_adapter_is_copied_with_its_layer() -> None:
    policy = adapted("llama")
    move(policy)
    packed = sampled(NativeEngine(packed=True), policy)
    assert max(gaps(policy, packed)) < 1e-5
    with policy.without_adapter():
        assert max(gaps(policy, packed)) > 1e-3


def test_whole_copies_are_made_of_sharded_weights(mesh: DeviceMesh) -> None:
    expected = sampled(NativeEngine(packed=True), policy_of())
    policy, engine = policy_of(), NativeEngine(packed=True)
    policy.shard(mesh)
    with policy.gathered():
        found = sampled(engine, policy)
    assert tokens(found) == tokens(expected)
    assert found[0].logp == pytest.approx(expected[0].logp, abs=1e-6)


def test_bfloat16_copies_round_and_record_what_they_drew_from(policy: Policy) -> None:
    engine = NativeEngine(dtype="bfloat16")
    engine.check(policy, SAMPLING)
    completions = sampled(engine, policy)
    assert 1e-5 < max(gaps(policy, completions)) < 0.5
    with torch.no_grad(), LinearCopies(policy, torch.bfloat16).in_use():
        assert max(gaps(policy, completions)) < 2e-2
    assert engine.product_dtype(policy) is torch.bfloat16
    assert NativeEngine(packed=True).product_dtype(policy) is torch.float32


def test_under_autocast_the_copies_have_its_type(policy: Policy) -> None:
    engine = NativeEngine(packed=True)
    with torch.autocast("cpu", torch.bfloat16):
        engine.check(policy, SAMPLING)
        engine.sync(policy)
        assert engine._copies is not None and engine._copies.dtype is torch.bfloat16
        completions = engine.complete(REQUESTS, SAMPLING, RandomKey())
        assert max(gaps(policy, completions)) < 0.5


class Casts(TorchDispatchMode):
    """Counts how often each of some weights is cast."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self.counts = {weight.data_ptr(): 0 for weight in weights}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.counts:
            self.counts[args[0].data_ptr()] += 1
        return func(*args, **(kwargs or {}))


def test_frozen_weights_are_cast_once_under_autocast_and_not_at_every_position() -> None:
    engine, policy = NativeEngine(), adapted("llama")
    frozen = [p for p in policy.trunk.parameters() if p.ndim == 2 and not p.requires_grad][1:]  # All but the embedding.
    with torch.autocast("cpu", torch.bfloat16), Casts(frozen) as casts:
        engine.check(policy, SAMPLING)
        casts.counts = dict.fromkeys(casts.counts, 0)
        found = sampled(engine, policy)
    assert len(frozen) == 2 * 7 and set(casts.counts.values()) == {1}
    assert sum(gaps(policy, found)) / len(gaps(policy, found)) < trial.TOLERANCES[torch.bfloat16]
    # Outside of autocast, and where the weights have its type, nothing is to be cast.
    sampled(engine, policy)
    assert engine._copies is None


def test_sleep_frees_the_copies_and_the_next_use_begins_with_a_sync() -> None:
    policy, engine = policy_of(), NativeEngine(packed=True)
    engine.sync(policy)
    assert engine.has(policy)
    engine.sleep()
    assert engine._copies is None and not engine.has(policy)
    plain = NativeEngine()
    plain.sync(policy)
    plain.sleep()
    assert plain._copies is None and plain.has(policy)


def test_where_nothing_can_be_packed_only_another_type_makes_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of()
    expected = sampled(NativeEngine(dtype="bfloat16"), policy)
    monkeypatch.setattr(linear_copies, "_packed_types", lambda: set())
    assert len(LinearCopies(policy, torch.float32)) == 0
    assert len(LinearCopies(policy, torch.bfloat16)) > 0
    found = sampled(NativeEngine(dtype="bfloat16"), policy)
    assert found[0].logp == pytest.approx(expected[0].logp, abs=0.1)


def products(copies: LinearCopies, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> int:
    """Products of one forward with the copies."""
    called: list[int] = []
    real = linear_copies._as_outside
    monkeypatch.setattr(linear_copies, "_as_outside", lambda *args: called.append(1) or real(*args))
    with torch.no_grad(), copies.in_use():
        policy.logits(policy.hidden(torch.tensor([[7, 8, 9]])))
    return len(called)
