import copy
import inspect
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import families
from helpers.tiny import (
    COMPUTES,
    STOP_IDS,
    gradients,
    model_of,
    policy_of,
    read_policy,
    rollouts_of,
    rows_of,
    teacher_forced,
    tokenizer,
)
from torch import Tensor
from torch.testing import assert_close
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo_lightning import LoRA, Policy, Rollouts, UsageError
from grpo_lightning.policy import policy as policy_module
from grpo_lightning.policy.architecture import Head, compute_head_in_float32

LENGTHS, PROMPT_LENGTHS = [4, 9, 1, 6, 2], [3, 1, 8]
GPT2_RATES = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
FIRST_LAYERS = {"llama": "model.model.layers.0.mlp", "gpt2": "model.transformer.h.0.mlp"}


@pytest.fixture
def rollouts() -> Rollouts:
    return rollouts_of(LENGTHS, PROMPT_LENGTHS)


@pytest.fixture(params=COMPUTES)
def policy(request: pytest.FixtureRequest, shape: str) -> Policy:
    return policy_of(shape, compute=request.param)


def save(folder: Path, shape: str, **overrides: Any) -> str:
    """A tiny model with its tokenizer, as transformers saves it."""
    model_of(shape, **overrides).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def load(path: str, **kwargs: Any) -> Policy:
    how = inspect.signature(COMPUTES[0]).parameters.keys() & kwargs.keys()
    policy = Policy(path, compute=COMPUTES[0](**{name: kwargs.pop(name) for name in how}), **kwargs)
    policy.load()
    return policy


def full_logp(policy: Policy, rollouts: Rollouts, temperature: float) -> Tensor:
    """[N, V] log-probs of all tokens, row by row, from one unpadded sequence each."""
    rows = rows_of(rollouts)
    return torch.cat([teacher_forced(policy.model, row["prompt"], row["token_ids"], temperature) for row in rows])


def gradient_of(policy: Policy, rollouts: Rollouts, temperature: float = 0.7) -> dict[str, Tensor]:
    """d(sum of weight x log-prob)/d(parameters)."""
    policy.zero_grad()
    rollouts.temperature = temperature
    (rollouts.weight * policy(rollouts).logp).sum().backward()
    return dict(gradients(policy))


def assert_same_gradient(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert actual.keys() == expected.keys()
    assert any(float(value.abs().max()) > 0.01 for value in expected.values())
    for name, value in expected.items():
        scale = max(1.0, float(value.abs().max()))
        assert_close(actual[name], value, atol=tolerance * scale, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probs_and_entropy_are_those_of_the_full_softmax(policy, temperature, rollouts):
    rollouts.temperature = temperature
    scored = policy(rollouts)
    full = full_logp(policy, rollouts, temperature).float()
    assert_close(scored.logp, full.gather(-1, rollouts.token_ids[:, None])[:, 0], atol=1e-5, rtol=0)
    assert_close(scored.entropy, -(full.exp() * full).sum(-1), atol=1e-5, rtol=0)
    assert scored.logp.requires_grad
    assert not scored.entropy.requires_grad


@pytest.mark.parametrize("shape", ["llama"])
def test_a_token_that_is_impossible_adds_nothing_to_the_entropy(policy, rollouts):
    impossible = sorted({*range(64)} - {*rollouts.token_ids.tolist()})
    head = policy.model.lm_head
    head.bias = torch.nn.Parameter(torch.zeros(64).index_fill(0, torch.tensor(impossible), -torch.inf))
    scored = policy(rollouts, entropy_gradient=True)
    hidden = policy.compute.hidden(policy.trunk, rollouts, policy.compute.layout(rollouts))
    possible = sorted({*rollouts.token_ids.tolist()})
    logp = (hidden @ head.weight[possible].T).log_softmax(-1)
    assert_close(scored.entropy, -(logp.exp() * logp).sum(-1), rtol=0, atol=2e-6)
    (scored.logp.sum() + scored.entropy.sum()).backward()
    gradient = policy.model.get_input_embeddings().weight.grad
    assert gradient.isfinite().all() and gradient.any()


@pytest.mark.parametrize("elements", [1, 64 * 5])
def test_the_head_in_chunks_gives_the_same_values_and_gradient(policy, elements, monkeypatch, rollouts):
    rollouts.temperature = 0.7
    policy.compute.fused = False
    whole, gradient = policy(rollouts), gradient_of(policy, rollouts)
    monkeypatch.setattr("grpo_lightning.policy.compute.HEAD_ELEMENTS", elements)
    largest = 0
    logits = Head.__call__

    def watched(self: Head, hidden: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, len(hidden))
        return logits(self, hidden)

    monkeypatch.setattr(Head, "__call__", watched)
    chunked = policy(rollouts)
    assert largest == max(1, elements // 64)
    # Entropies are near 2, where a float32 is exact to 2e-7, and some CPUs add up in another order.
    assert_close(chunked.logp, whole.logp, atol=1e-6, rtol=1e-6)
    assert_close(chunked.entropy, whole.entropy, atol=1e-6, rtol=1e-6)
    assert not chunked.entropy.requires_grad
    assert_same_gradient(gradient_of(policy, rollouts), gradient, tolerance=5e-6)
    with torch.no_grad():
        assert_close(policy(rollouts).logp, whole.logp, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("shape", "first_layer"), FIRST_LAYERS.items())
def test_gradient_checkpointing_gives_the_same_gradient(tmp_path, shape, first_layer, rollouts):
    path = save(tmp_path, shape)
    plain, checkpointed = load(path).train(), load(path, gradient_checkpointing=True).train()
    runs = []
    checkpointed.get_submodule(first_layer).register_forward_pre_hook(lambda *_: runs.append(1))
    assert_same_gradient(gradient_of(checkpointed, rollouts), gradient_of(plain, rollouts), tolerance=1e-6)
    assert len(runs) == 2  # Forward, and again in the backward pass.


@pytest.mark.parametrize("name", ["resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"])
def test_dropout_is_off_by_default_and_kept_on_request(tmp_path, name, rollouts):
    rates = {"attention_dropout": 0.3} if name == "attention_dropout" else dict.fromkeys(GPT2_RATES, 0.0) | {name: 0.1}
    path = save(tmp_path, "llama" if name == "attention_dropout" else "gpt2", **rates)
    without, kept = load(path).train(), load(path, dropout=True).train()
    first = without(rollouts).logp
    assert without(rollouts).logp.equal(first)
    assert without.eval()(rollouts).logp.equal(first)
    assert not kept(rollouts).logp.equal(kept(rollouts).logp)
    assert kept.eval()(rollouts).logp.equal(first)


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
@pytest.mark.parametrize("adapter", [None, LoRA(rank=2)], ids=["weights", "lora"])
@pytest.mark.parametrize("float32_head", [False, True])
def test_a_loaded_model_becomes_the_same_policy_as_its_folder(tmp_path, shape, adapter, float32_head, rollouts):
    """Dropout, gradient checkpointing, exchanged layers, adapter and head."""
    options = {"adapter": adapter, "float32_head": float32_head}
    computes = [COMPUTES[0](gradient_checkpointing=True) for _ in range(2)]
    path = save(tmp_path, shape, **dict.fromkeys(GPT2_RATES, 0.5) if shape == "gpt2" else {"attention_dropout": 0.5})
    torch.manual_seed(0)
    read = read_policy(path, compute=computes[0], **options).train()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")
    wrapped = Policy.from_model(model, tokenizer(), compute=computes[1], **options).train()
    assert [*map(type, wrapped.modules())] == [*map(type, read.modules())]
    assert wrapped.base == read.base and wrapped.trained_state_dict().keys() == read.trained_state_dict().keys()
    for _ in range(2):
        assert wrapped(rollouts).logp.equal(read(rollouts).logp)
    passes: list[Any] = []
    wrapped.get_submodule(FIRST_LAYERS[shape]).register_forward_pre_hook(lambda *_: passes.append(None))
    wrapped(rollouts).logp.sum().backward()
    assert len(passes) == 2  # the second time for the gradient


def test_stop_ids_are_those_of_both_configs_and_the_tokenizer():
    policy = policy_of("llama", eos_token_id=7)
    policy.model.generation_config.eos_token_id = [8, 9]
    assert policy.stop_ids == {5, 7, 8, 9}
    policy.model.generation_config.eos_token_id = policy.model.config.eos_token_id = None
    assert policy.stop_ids == {5}
    policy.tokenizer = SimpleNamespace(eos_token_id=None)
    assert policy.stop_ids == frozenset()
    assert policy_of("gpt2").stop_ids == set(STOP_IDS)


def test_an_unknown_head_is_refused_in_bfloat16_too(tmp_path, monkeypatch):
    policy = load(save(tmp_path, "llama"), dtype="bfloat16")
    forward = type(policy.model).forward

    def shifted(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = output.logits + torch.linspace(0, 0.01, 64)
        return output

    monkeypatch.setattr(type(policy.model), "forward", shifted)
    with pytest.raises(UsageError, match="changes its logits after the output embedding"):
        load(str(tmp_path), dtype="bfloat16")


class TestAttention:
    """sdpa where there is one, else eager; flash attention after the checks."""

    @pytest.fixture(autouse=True)
    def _said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        monkeypatch.setattr(policy_module, "rank_zero_info", self.said.append)

    def test_falls_back_to_eager_and_says_so_once(self, tmp_path):
        policy = load(save(tmp_path, "gemma2", query_pre_attn_scalar=16))
        assert policy.model.config._attn_implementation == "eager"
        policy.load()
        assert self.said == ["policy.compute.attention: Gemma2ForCausalLM has no sdpa attention, so eager is used"]

    def test_says_nothing_where_nothing_changes(self, tmp_path):
        load(save(tmp_path / "gemma2", "gemma2", query_pre_attn_scalar=16), attention="eager")
        load(save(tmp_path / "llama", "llama"))
        assert self.said == []

    def test_flash_attention_without_its_package_is_refused_with_the_way_out(self, tmp_path):
        with pytest.raises(
            UsageError, match=r"^model\.policy\.compute\.attention=flash_attention_2: LlamaForCausalLM cannot use it"
        ):
            load(save(tmp_path, "llama"), attention="flash_attention_2")

    def test_flash_attention_is_switched_to_after_checks_that_it_cannot_run(self, tmp_path, monkeypatch):
        # It refuses float32 outside autocast, which the weights are in when they are checked.
        path, asked = save(tmp_path, "llama"), []
        model_class = type(model_of("llama"))
        forward, switch = model_class.forward, model_class.set_attn_implementation

        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            assert not asked, "a forward with flash attention and float32 weights"
            return forward(self, *args, **kwargs)

        def noted(self: Any, implementation: str) -> None:
            if implementation != "flash_attention_2":
                return switch(self, implementation)
            return asked.append(implementation)

        monkeypatch.setattr(model_class, "forward", watched)
        monkeypatch.setattr(model_class, "set_attn_implementation", noted)
        load(path, attention="flash_attention_2", **{"share_prefix": False} if len(COMPUTES) > 1 else {})
        assert asked == ["flash_attention_2"]

    @pytest.mark.parametrize("adapter", [None, LoRA(rank=2)], ids=["weights", "lora"])
    @pytest.mark.parametrize(("shape", "wrong", "fault"), [
        ("llama", "nothing", None), ("gpt2", "nothing", None), ("llama", "forward", "be off by"),
        ("llama", "backward", "be off by"), ("gpt2", "backward", "be off by"), ("bloom", "nothing", "exchanged"),
    ])  # fmt: skip
    def test_a_registered_name_is_taken_if_it_computes_the_same(self, tmp_path, shape, wrong, fault, adapter):
        def attend(module: Any, query: Tensor, *args: Any, scaling: float, **kwargs: Any) -> Any:
            if wrong == "backward" and query.requires_grad:
                query.register_hook(lambda gradient: 3 * gradient)
            scaling *= 1.1 if wrong == "forward" else 1
            return sdpa_attention_forward(module, query, *args, scaling=scaling, **kwargs)

        AttentionInterface.register("own", attend)
        AttentionMaskInterface.register("own", sdpa_mask)
        families.save(shape, str(tmp_path))
        with (
            pytest.raises(UsageError, match=f"^model.policy.compute.attention=own: .*{fault}")
            if fault
            else nullcontext()
        ):
            policy = load(str(tmp_path), attention="own", adapter=adapter)
            assert policy.model.config._attn_implementation == "own"


def test_a_head_that_is_no_plain_layer_has_no_float32_form():
    model = model_of("llama")
    model.set_output_embeddings(torch.nn.Identity())
    with pytest.raises(UsageError, match=r"^float32_head=true: the head of LlamaForCausalLM is a Identity; leave it"):
        compute_head_in_float32(model, "float32_head")


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize(("dtype", "autocast"), [("bfloat16", False), ("float32", True)])
def test_a_float32_head_multiplies_16_bit_states_in_float32(tmp_path, compute, dtype, autocast, rollouts):
    policy = read_policy(save(tmp_path, "llama"), dtype=dtype, float32_head=True, compute=compute())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        hidden = policy.compute.hidden(policy.trunk, rollouts, policy.compute.layout(rollouts)).detach()
        logp, logits = policy(rollouts).logp, policy.logits(hidden)
    (gradient,) = torch.autograd.grad(logp.sum(), policy.head.embedding.weight)
    weight = policy.head.embedding.weight.detach().double().requires_grad_()
    expected = hidden.double() @ weight.T
    assert_close(logits.double(), expected, rtol=0, atol=1e-6)  # in bfloat16 they would be off by 1e-3
    expected = expected.log_softmax(-1).gather(-1, rollouts.token_ids[:, None])[:, 0]
    assert_close(logp.double(), expected, rtol=0, atol=1e-5)
    (by_hand,) = torch.autograd.grad(expected.sum(), weight)
    assert_close(gradient.double(), by_hand, rtol=0, atol=1e-2 if dtype == "bfloat16" else 1e-4)


def test_the_vision_tower_of_a_multimodal_model_is_not_trained(tmp_path, rollouts):
    families.save("gemma3", str(tmp_path))
    policy = load(str(tmp_path)).train()
    policy(rollouts).logp.sum().backward()
    parameters = dict(policy.named_parameters())
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    assert trained == {name for name, parameter in parameters.items() if parameter.grad is not None}
    assert any("vision" in name for name in parameters)
    assert not any("vision" in name for name in trained)


@pytest.mark.parametrize("family", ["bert", "phimoe"])
def test_models_that_would_be_scored_wrongly_leave_no_weights(tmp_path, family):
    families.save(family, str(tmp_path))
    policy = Policy(str(tmp_path), compute=COMPUTES[0]())
    state = torch.get_rng_state()
    with pytest.raises(UsageError, match="; use another model"):
        policy.load()
    assert torch.get_rng_state().equal(state)
    assert not hasattr(policy, "model")
    assert not list(policy.parameters())


def test_running_out_of_memory_is_no_mistake_of_the_user(tmp_path, monkeypatch):
    path = save(tmp_path, "llama")

    def full(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(model_of("llama")), "forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        load(path)


def test_the_version_moves_on_when_weights_are_read_into_the_policy():
    policy, other = policy_of(), policy_of(seed=1)
    assert policy.version == 0
    policy.load_state_dict(other.state_dict())
    assert policy.version == 1
    # A copy, and what is done to it, leave the policy's version alone.
    copy.deepcopy(policy).load_state_dict(other.state_dict())
    assert policy.version == 1
    outer = torch.nn.Module()
    outer.policy = policy
    outer.load_state_dict({f"policy.{name}": value for name, value in other.state_dict().items()})
    assert policy.version == 2


@torch.no_grad()
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("chunk", [2**25, 5 * 64], ids=["whole", "in chunks"])
def test_the_likeliest_tokens_beside_the_same_numbers(
    policy: Policy, chunk: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy.compute.fused, policy.compute.logits_at_once = fused, chunk
    monkeypatch.setattr("grpo_lightning.policy.compute.HEAD_ELEMENTS", chunk)
    rollouts = rollouts_of([4, 9, 1], prompt_lengths=[3, 2])
    rollouts.temperature = 0.7
    plain, scored = policy(rollouts), policy(rollouts, num_top=3)
    assert plain.top_ids is None and plain.top_logp is None
    assert torch.equal(scored.logp, plain.logp) and torch.equal(scored.entropy, plain.entropy)
    assert scored.top_ids is not None and scored.top_logp is not None
    full = full_logp(policy, rollouts, temperature=0.7).float()
    assert_close(scored.top_logp, full.topk(3).values, rtol=0, atol=1e-5)
    assert_close(scored.top_logp, full.gather(-1, scored.top_ids), rtol=0, atol=1e-5)
