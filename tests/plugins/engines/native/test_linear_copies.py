import weakref
from typing import Any

import pytest
import torch
from helpers.adapters import move
from helpers.drawing import draw, gap, tokens, update
from helpers.fast import adapted, policy_of
from helpers.tiny import prompts_of
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_lightning import Completion, NativeEngine, Policy, RandomKey, Request, Sampling
from grpo_lightning.plugins.engines.native.linear_copies import LinearCopies
from grpo_lightning.policy.architecture import compute_head_in_float32
from grpo_lightning.policy.policy import NUM_ELEMENTS

PROMPTS = prompts_of([4, 1, 9])
REQUESTS = Request.from_prompts(PROMPTS, 3)
SAMPLING = Sampling(max_new_tokens=12)


def sampled(engine: NativeEngine, policy: Policy) -> list[Completion]:
    return draw(engine, policy, REQUESTS, SAMPLING.max_new_tokens)


def test_packed_layers_draw_the_same_with_the_policys_log_probs(policy: Policy) -> None:
    engine = NativeEngine(packed=True)
    engine.check(policy, SAMPLING)
    packed = sampled(engine, policy)
    assert tokens(packed) == tokens(sampled(NativeEngine(), policy))
    assert gap(policy, PROMPTS, packed) < 1e-5


def test_packed_layers_draw_in_inference_mode() -> None:
    # Lightning validates and predicts in it. Its tensors have no version.
    engine, policy = NativeEngine(packed=True), policy_of("llama")
    expected = tokens(sampled(engine, policy))
    with torch.inference_mode():
        assert tokens(sampled(engine, policy)) == expected


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
    assert gap(policy, PROMPTS, packed) < 1e-5
    with policy.without_adapter():
        assert gap(policy, PROMPTS, packed) > 1e-3


@pytest.mark.parametrize(("dtype", "least", "most"), [("bfloat16", 1e-3, 0.5), ("float16", 1e-5, 0.05)])
def test_copies_in_half_the_bytes_record_what_they_drew_from(
    policy: Policy, dtype: Any, least: float, most: float
) -> None:
    engine = NativeEngine(dtype=dtype)
    engine.check(policy, SAMPLING)
    completions = sampled(engine, policy)
    assert least < gap(policy, PROMPTS, completions) < most
    with torch.no_grad(), LinearCopies(policy, getattr(torch, dtype)).in_use():
        assert gap(policy, PROMPTS, completions) < most / 20
    assert engine.product_dtype(policy) is getattr(torch, dtype)
    assert NativeEngine(packed=True).product_dtype(policy) is torch.float32


def test_under_autocast_the_copies_have_its_type(policy: Policy) -> None:
    engine = NativeEngine(packed=True)
    with torch.autocast("cpu", torch.bfloat16):
        engine.check(policy, SAMPLING)
        engine.sync(policy)
        assert engine._copies is not None and engine._copies.dtype is torch.bfloat16
        completions = engine.complete(REQUESTS, SAMPLING, RandomKey())
        assert gap(policy, PROMPTS, completions) < 0.5


def test_a_float32_head_is_not_copied(policy: Policy) -> None:
    compute_head_in_float32(policy.model, "model.policy.float32_head")
    with torch.no_grad(), LinearCopies(policy, torch.bfloat16).in_use():
        logits = policy.logits(policy.hidden(torch.tensor([PROMPTS[0].token_ids])))
    assert not logits.equal(logits.bfloat16().float())


class WeightCasts(TorchDispatchMode):
    """Counts the casts of a policy's weights, or of parts of them, that happen under it."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.weights = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A fingerprint reads a few elements of each weight, once for all positions.
        is_sample = args and isinstance(args[0], torch.Tensor) and args[0].numel() <= NUM_ELEMENTS
        if func is torch.ops.aten._to_copy.default and not args[0].is_mkldnn and not is_sample:
            self.count += args[0].untyped_storage().data_ptr() in self.weights
        return func(*args, **(kwargs or {}))


PRECISIONS: dict[str, tuple[Precision, torch.dtype]] = {
    "32-true": (Precision(), torch.float32),
    "bf16-mixed": (MixedPrecision("bf16-mixed", "cpu"), torch.float32),
    "16-mixed": (MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")), torch.float32),
    "bfloat16 weights": (Precision(), torch.bfloat16),
    "bf16-mixed with bfloat16 weights": (MixedPrecision("bf16-mixed", "cpu"), torch.bfloat16),
}


@pytest.mark.parametrize("head", ["plain head", "float32 head"])
@pytest.mark.parametrize("kind", ["whole", "lora"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_weight_is_cast_at_a_position(precision: str, kind: str, head: str) -> None:
    """Lightning opens autocast without its cache, which is otherwise what keeps the casts of trained weights."""
    context, dtype = PRECISIONS[precision]
    policy = adapted("llama") if kind == "lora" else policy_of("llama")
    for name, parameter in policy.named_parameters():
        if "lora" not in name:
            parameter.data = parameter.data.to(dtype)
    if head == "float32 head":
        compute_head_in_float32(policy.model, "model.policy.float32_head")
    engine, casts = NativeEngine(check_every=3), WeightCasts(policy)
    with context.forward_context():
        engine.sync(policy)
        with casts:
            completions = engine.complete(REQUESTS, SAMPLING, RandomKey())
        assert gap(policy, PROMPTS, completions) < 0.5
    assert casts.count == 0


def test_copies_are_freed_in_sleep_and_made_for_another_type_of_products() -> None:
    policy, engine = policy_of("llama"), NativeEngine()
    context = MixedPrecision("bf16-mixed", "cpu").forward_context
    engine.sync(policy)
    assert engine._copies is None
    with context():
        engine.complete(REQUESTS, SAMPLING, RandomKey())
        assert engine._copies is not None
        mixed = engine.complete(REQUESTS, SAMPLING, RandomKey())
    # What was copied for one context is not used in another.
    exact = engine.complete(REQUESTS, SAMPLING, RandomKey())
    assert engine._copies is None and gap(policy, PROMPTS, exact) < 1e-5 < gap(policy, PROMPTS, mixed)
    with context(), engine.ready(policy):
        engine.complete(REQUESTS, SAMPLING, RandomKey())
        assert engine._copies is not None
        copies = [weakref.ref(forward.args[1]) for forward in engine._copies._forwards.values()]
    assert copies and not any(copy() is not None for copy in copies)
    assert not engine.has(policy)
