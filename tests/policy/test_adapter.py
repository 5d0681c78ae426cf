"""LoRA beside a policy: against PEFT's own model, against the base model, and what is refused."""

import copy

import pytest
import torch
from helpers.adapters import adapted, move
from helpers.fitting import relative
from helpers.tiny import model_of, rollouts_of, rows_of, tokenizer
from peft import get_peft_model

from grpo_lightning import Policy, UsageError
from grpo_lightning.policy import adapter as adapters
from grpo_lightning.policy.adapter import LoRA, adapted_layers, fingerprint
from grpo_lightning.policy.snapshots import AdapterOff, FrozenCopy, TrainedCopy

ROLLOUTS = rollouts_of([4, 9, 1, 6], prompt_lengths=[3, 1])
KINDS = {"lora": {}, "dora": {"dora": True}, "rslora": {"rslora": True}, "some": {"rank": 2, "alpha": 3.0}}


@torch.no_grad()
def logp(policy: Policy) -> torch.Tensor:
    return policy(ROLLOUTS).logp


def one_by_one(model: torch.nn.Module) -> None:
    """A backward per completion, with nothing of this package."""
    for row in rows_of(ROLLOUTS):
        prompt, completion = torch.tensor(row["prompt"]), torch.tensor(row["token_ids"])
        logits = model(input_ids=torch.cat([prompt, completion])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        logits.log_softmax(-1).gather(-1, completion[:, None]).sum().backward()


# PEFT asks by a name that transformers has renamed.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_pefts_own_model_in_a_plain_loop(kind: str) -> None:
    lora = LoRA(**{"rank": 4, "alpha": 8.0} | KINDS[kind])
    policy = Policy.from_model(model_of("llama"), tokenizer(), lora)
    move(policy)
    plain = get_peft_model(model_of("llama"), lora.config())
    missing = plain.load_state_dict(
        {f"base_model.{name}": value for name, value in policy.state_dict().items()}, strict=False
    )
    assert not missing.unexpected_keys
    trained = [
        {name: p for name, p in policy.named_parameters(prefix="base_model") if p.requires_grad},
        {name: p for name, p in plain.named_parameters() if p.requires_grad},
    ]
    assert trained[0].keys() == trained[1].keys() and len(trained[0]) == (21 if kind == "dora" else 14) * 2
    optimizers = [torch.optim.SGD(parameters.values(), lr=1e-4) for parameters in trained]
    for _ in range(3):
        policy(ROLLOUTS).logp.sum().backward()
        one_by_one(plain)
        gradients = [{name: p.grad.clone() for name, p in parameters.items()} for parameters in trained]
        # Both paths round; with AVX2's kernels they are 1.7e-6 apart.
        assert relative(*gradients) < 5e-6
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert relative(*({name: p.detach() for name, p in parameters.items()} for parameters in trained)) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "dtype"), [("llama", torch.float32), ("gpt2", torch.bfloat16)])
def test_switched_off_and_before_training_it_is_the_base_model(shape: str, kind: str, dtype: torch.dtype) -> None:
    base = Policy.from_model(model_of(shape).to(dtype), tokenizer())
    untrained = adapted(shape, moved=0.0, dtype=dtype, **KINDS[kind])
    assert torch.allclose(logp(untrained), logp(base), atol=1e-6 if dtype == torch.float32 else 0.05)
    policy = adapted(shape, dtype=dtype, **KINDS[kind])
    trained = policy.trained_state_dict().keys()
    assert float((logp(policy) - logp(base)).abs().max()) > 1e-3
    assert AdapterOff()(policy, ROLLOUTS).detach().equal(logp(base))
    before = logp(policy)
    with policy.without_adapter():
        assert logp(policy).equal(logp(base))
    assert logp(policy).equal(before)
    assert policy.trained_state_dict().keys() == trained


def test_the_matrices_are_float32_whatever_the_weights() -> None:
    policy = adapted(dtype=torch.bfloat16)
    assert {value.dtype for value in policy.trained_state_dict().values()} == {torch.float32}
    assert policy.model.dtype == torch.bfloat16
    policy(ROLLOUTS).logp.sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in policy.parameters() if p.requires_grad)


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_every_linear_layer_but_the_head_has_one(shape: str) -> None:
    policy = adapted(shape)
    assert len(adapted_layers(policy.model)) == 2 * (4 if shape == "gpt2" else 7)
    assert not hasattr(policy.model.get_output_embeddings(), "lora_A")
    assert all(".lora_" in name for name in policy.trained_state_dict())


def test_some_layers_by_their_names() -> None:
    policy = adapted(target_modules=["q_proj", "v_proj"])
    assert len(adapted_layers(policy.model)) == 4
    assert len(adapted_layers(adapted(target_modules=r".*layers\.1\..*_proj").model)) == 7


def test_a_frozen_copy_holds_the_trained_tensors_alone() -> None:
    policy, snapshot = adapted(), FrozenCopy()
    before = logp(policy)
    snapshot.refresh(policy)
    assert isinstance(snapshot.policy, TrainedCopy) and snapshot.exists
    assert snapshot.policy.state_dict().keys() == policy.trained_state_dict().keys()
    assert not any(p.requires_grad for p in snapshot.parameters())
    move(policy)
    now = logp(policy)
    policy.train()
    assert snapshot(policy, ROLLOUTS).equal(before)
    assert policy.training and all(module.training for module in policy.modules())
    assert logp(policy).equal(now) and not now.equal(before)
    snapshot.refresh(policy)
    move(policy)
    assert snapshot(policy, ROLLOUTS).equal(now)


def test_the_policy_has_its_own_tensors_again_when_the_copy_fails() -> None:
    policy, snapshot = adapted(), FrozenCopy()
    snapshot.refresh(policy)
    move(policy)
    now = logp(policy)
    with pytest.raises(AttributeError):
        snapshot(policy, None)  # type: ignore[arg-type]
    assert logp(policy).equal(now)


def test_an_adapter_on_tied_embeddings_is_refused() -> None:
    model = model_of("llama", tie_word_embeddings=True)
    with pytest.raises(UsageError, match="share their weights"):
        Policy.from_model(model, tokenizer(), LoRA(target_modules=["embed_tokens"]))
    # As all-linear leaves them out, they stay tied.
    policy = Policy.from_model(model_of("llama", tie_word_embeddings=True), tokenizer(), LoRA())
    assert policy.model.get_input_embeddings().weight is policy.model.get_output_embeddings().weight


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"peft, which is not installed. pip install 'grpo-lightning\["):
        LoRA().check()


def test_the_fingerprint_tells_weights_apart_and_not_their_type() -> None:
    model = model_of("llama")
    assert fingerprint(model) == fingerprint(copy.deepcopy(model).bfloat16()) != fingerprint(model_of("llama", seed=1))
