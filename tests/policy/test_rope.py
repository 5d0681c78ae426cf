"""A row's log-probs are the same alone and beside any others, in updates and in both engines."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.drawing import ENGINES
from helpers.fitting import Digits, Echo
from helpers.tiny import COMPUTES, model_of, read_policy, tokenizer, without_end
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

from grpo_lightning import Compute, Policy, Rollouts, Sampling, TaskData, UsageError
from grpo_lightning.rewards.scorer import Scorer
from grpo_lightning.types import RandomKey, Request

ORIGINAL = 32
"""The length beyond which these types take other frequencies."""
ROTATED = 8
"""Numbers of a head that are rotated."""
FACTORS = {"short_factor": [1.0] * (ROTATED // 2), "long_factor": [4.0] * (ROTATED // 2)}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL} | FACTORS
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
PROMPT = [7, 8, 9, 10]
SHORT, LONG = [11, 12, 13, 14, 15], [6 + 5 * index % 58 for index in range(60)]


def longrope() -> PreTrainedModel:
    return model_of("phi3", original_max_position_embeddings=ORIGINAL, rope_parameters=dict(LONGROPE))


def dynamic() -> PreTrainedModel:
    return model_of("llama", max_position_embeddings=ORIGINAL, rope_parameters=dict(DYNAMIC))


def by_layer() -> PreTrainedModel:
    """One set of frequencies for each type of layer."""
    rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": dict(DYNAMIC)}
    return model_of(
        "gemma3_text",
        max_position_embeddings=ORIGINAL,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=rope,
    )


KINDS = {"longrope": longrope, "dynamic": dynamic, "by layer": by_layer}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return KINDS[request.param]()


def logp_of(policy: Policy, *completions: list[int]) -> Tensor:
    rollouts = Rollouts.from_lists([PROMPT], [0] * len(completions), completions)
    with torch.no_grad():
        return policy(rollouts).logp


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("is_read", [True, False], ids=["read", "from_model"])
def test_a_row_beside_a_long_one_has_the_log_probs_that_it_has_alone(
    tmp_path: Path, model: PreTrainedModel, compute: type[Compute], is_read: bool
) -> None:
    short_ids = torch.tensor([[*PROMPT, *SHORT]])
    with torch.no_grad():
        logits = model(input_ids=short_ids).logits[0, len(PROMPT) - 1 : -1].float()
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(SHORT)[:, None])[:, 0]
    if is_read:
        model.save_pretrained(tmp_path)
        tokenizer().save_pretrained(tmp_path)
        policy = read_policy(tmp_path, compute=compute())
    else:
        with torch.no_grad():
            model(input_ids=torch.tensor([LONG]))  # leaves the frequencies of a long sequence behind
        policy = Policy.from_model(model, tokenizer(), compute=compute())
    for completions in ([SHORT], [SHORT, LONG], [SHORT]):
        assert_close(logp_of(policy, *completions)[: len(SHORT)], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_long_completion_is_scored_with_its_sampled_log_probs(model: PreTrainedModel, engine: str) -> None:
    policy = without_end(Policy.from_model(model, tokenizer()))
    sampler, sampling = ENGINES[engine](), Sampling(max_new_tokens=2 * ORIGINAL)
    sampler.check(policy, sampling)
    sampler.sync(policy)
    requests = [Request(PROMPT, 0, sample) for sample in range(2)]
    completions = sampler.complete(requests, sampling, RandomKey())
    recorded = torch.tensor([value for completion in completions for value in completion.logp or ()])
    assert len(recorded) == 2 * 2 * ORIGINAL
    actual = logp_of(policy, *(completion.token_ids for completion in completions))
    assert_close(actual, recorded, rtol=0, atol=2e-5)


def test_the_context_ends_where_longrope_would_change() -> None:
    policy = Policy.from_model(longrope(), tokenizer())
    assert (policy.context_length, policy.longrope_length) == (ORIGINAL, ORIGINAL)
    other = Policy.from_model(dynamic(), tokenizer())
    assert (other.context_length, other.longrope_length) == (ORIGINAL, None)
    # The longest prompts of the task have 7 tokens.
    sampling = Sampling(max_new_tokens=ORIGINAL - 6)
    with pytest.raises(UsageError, match=rf"context of {ORIGINAL} \(its longrope would change there\)\."):
        TaskData(Echo()).load("fit", policy, sampling, Scorer([Digits()]), validates=False)
    with pytest.raises(UsageError, match=rf"context of {ORIGINAL}\."):
        TaskData(Echo()).load("fit", other, sampling, Scorer([Digits()]), validates=False)


def test_positions_that_depend_on_the_longest_sequence_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with code of the model's own, whose type of positions nobody knows."""
    forward = LlamaRotaryEmbedding.forward

    def stretched(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        factor = 2.0 if position_ids.max() > 100 else 1.0
        return forward(self, x, position_ids / factor)

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", stretched)
    with pytest.raises(UsageError, match="computes a sequence otherwise beside others or longer ones"):
        Policy.from_model(model_of("llama"), tokenizer())
    # The whole context has the same positions.
    assert Policy.from_model(model_of("llama", max_position_embeddings=100), tokenizer()).context_length == 100


def test_layers_that_depend_on_the_number_of_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As experts do that take so many tokens of a forward, and leave out the others."""
    forward = LlamaMLP.forward

    def limited(self: LlamaMLP, states: Tensor) -> Tensor:
        return forward(self, states) * min(1.0, 40 / states.shape[:-1].numel())

    monkeypatch.setattr(LlamaMLP, "forward", limited)
    with pytest.raises(UsageError, match="computes a sequence otherwise beside others or longer ones"):
        Policy.from_model(model_of("llama"), tokenizer())
