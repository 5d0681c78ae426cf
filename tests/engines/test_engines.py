from functools import wraps
from typing import Any

import pytest
import torch
from helpers.drawing import (
    ENGINES,
    PROMPTS,
    EngineContract,
    draw,
    gap,
    tokens,
    watch_reading,
    yields_each_completion_once,
)
from helpers.tiny import CONTEXT, SHAPES, policy_of, prompts_of, without_end

from grpo_lightning import PlainEngine, Sampling
from grpo_lightning.policy.architecture import cache_name
from grpo_lightning.types import FinishReason, RandomKey, Request, UsageError

EQUAL = prompts_of([5, 5, 5])
"""All of one length: no padding anywhere."""


@pytest.fixture(params=ENGINES)
def engine_class(request: pytest.FixtureRequest) -> type[Any]:
    return ENGINES[request.param]


class TestContract(EngineContract):
    @pytest.fixture
    def engine(self, engine_class):
        # Rows that wait for others must not change anything.
        return engine_class(max_rows=7)


def test_greedy_is_generate_of_transformers_token_for_token(policy):
    completions = draw(PlainEngine(), policy, Request.from_prompts(PROMPTS, 2), temperature=0.0)
    for row, completion in enumerate(completions):
        prompt = torch.tensor([PROMPTS[row // 2].token_ids])
        expected = policy.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False
        )
        assert completion.token_ids == expected[0, prompt.shape[1] :].tolist()
    assert gap(policy, PROMPTS, completions) < 1e-5


def test_a_stop_token_at_the_last_position_counts_as_stopped(engine_class):
    policy = policy_of("llama")
    requests = Request.from_prompts(PROMPTS, 8)
    whole = draw(engine_class(), policy, requests)
    length = next(len(c.token_ids) for c in whole if c.finish_reason is FinishReason.STOP and len(c.token_ids) > 2)
    for long, cut in zip(whole, draw(engine_class(), policy, requests, length), strict=True):
        assert cut.token_ids == long.token_ids[:length]
        stopped = long.finish_reason is FinishReason.STOP and len(long.token_ids) <= length
        assert cut.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)


def test_generation_settings_of_the_model_do_not_change_the_distribution(engine_class):
    # Instruct models ship settings for chatting; only `Sampling` counts.
    policy = policy_of("llama")
    expected = draw(engine_class(), policy)
    settings = {"repetition_penalty": 1.5, "min_new_tokens": 12, "suppress_tokens": list(range(10, 40))}
    settings |= {"num_beams": 3, "num_return_sequences": 2, "return_dict_in_generate": True, "max_length": 7}
    settings |= {"do_sample": True, "temperature": 0.3, "top_k": 2, "top_p": 0.5}
    for key, value in settings.items():
        setattr(policy.model.generation_config, key, value)
    assert tokens(draw(engine_class(), policy)) == tokens(expected)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0}, {"stop": ["a", "7"]}], ids=str)
def test_each_completion_is_yielded_once(engine_class, sampling):
    yields_each_completion_once(engine_class(max_rows=4), policy_of("gpt2"), **sampling)


def test_completions_are_yielded_while_others_are_decoded(engine_class):
    policy, engine = policy_of("gpt2"), engine_class(check_every=2)
    engine.sync(policy)
    requests = Request.from_prompts(PROMPTS, 4)
    completions = engine.generate(requests, Sampling(max_new_tokens=24), RandomKey())
    # It checks at every second position, and after the last one.
    checks = [-(-len(completion.token_ids) // 2) for _, completion in completions]
    assert checks == sorted(checks) and len(set(checks)) > 3


def test_a_bad_stop_string_is_refused_before_the_first_completion(engine_class):
    policy = policy_of("llama")
    policy.tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    engine = engine_class()
    engine.sync(policy)
    with pytest.raises(UsageError, match=r"sampling\.stop"):
        engine.generate(Request.from_prompts(PROMPTS, 1), Sampling(stop=["<turn> a"]), RandomKey())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(engine_class, attention, training):
    policy = policy_of("llama")
    policy.model.set_attn_implementation(attention)
    policy.model.train(training)
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    draw(engine_class(), policy)
    assert policy.model.config._attn_implementation == attention
    assert policy.model.training is training
    assert all(layer.training is training for layer in policy.model.modules())
    assert all(value.equal(before[name]) for name, value in policy.model.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in policy.model.parameters())


def test_dropout_is_off_while_sampling_from_a_model_in_training(engine_class):
    policy = policy_of("gpt2", resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5)
    expected = draw(engine_class(), policy)
    policy.model.train()
    assert tokens(draw(engine_class(), policy)) == tokens(expected)


@pytest.mark.parametrize("prompts", [PROMPTS, EQUAL], ids=["ragged", "equal"])
@pytest.mark.parametrize("window", [2, 4, 12])
@pytest.mark.parametrize("shape", ["mistral", "gemma3_text"])
def test_sliding_windows_shorter_than_prompts_or_completions(engine_class, shape, window, prompts):
    policy = policy_of(shape, sliding_window=window)
    policy.model.train()
    completions = draw(engine_class(), policy, Request.from_prompts(prompts, 4))
    assert policy.model.training
    policy.model.eval()
    assert gap(policy, prompts, completions) < 1e-5


def test_up_to_the_last_position_of_the_context(engine_class):
    prompts = prompts_of([CONTEXT - 8, 3])
    for shape in SHAPES:
        policy = without_end(policy_of(shape))
        completions = draw(engine_class(), policy, Request.from_prompts(prompts, 1), length=8)
        assert gap(policy, prompts, completions) < 1e-5


def test_equal_prompts_share_their_prefill_but_no_random_number(monkeypatch, engine_class):
    policy = policy_of("llama")
    expected = tokens(draw(engine_class(), policy, [Request(PROMPTS[0].token_ids, 1, 0)]))
    rows: list[int] = []
    watch_reading(monkeypatch, policy, lambda shape: rows.append(shape[0]))
    twins = draw(engine_class(), policy, [Request(list(PROMPTS[0].token_ids), id, 0) for id in (1, 2, 3)])
    assert rows == [1]
    assert tokens(twins)[:1] == expected
    assert len({tuple(row) for row in tokens(twins)}) == 3


@pytest.mark.parametrize("cut", [1, 8])
def test_a_second_turn_continues_the_random_numbers_of_the_first(engine_class, policy, cut):
    without_end(policy)
    requests = Request.from_prompts(PROMPTS, 3)
    key = RandomKey(5, 2)
    whole = draw(engine_class(), policy, requests, 24, key)
    # Every conversation is cut at a place of its own.
    cuts = [cut + row % 4 for row in range(len(requests))]
    turns = [
        Request(request.token_ids + long.token_ids[:at], request.prompt_id, request.sample, position=at)
        for request, long, at in zip(requests, whole, cuts, strict=True)
    ]
    second = draw(engine_class(), policy, turns, 12, key)
    for long, turn, at in zip(whole, second, cuts, strict=True):
        assert turn.token_ids == long.token_ids[at : at + 12]
        assert turn.logp == pytest.approx(long.logp[at : at + 12], abs=1e-5)
    # Without its position a turn would use the first turn's random numbers.
    again = [Request(turn.token_ids, turn.prompt_id, turn.sample) for turn in turns]
    repeated = draw(engine_class(), policy, again, 12, key)
    assert sum(a.token_ids != b.token_ids for a, b in zip(second, repeated, strict=True)) > len(turns) // 2


def test_plain_decodes_models_that_must_read_prompts_whole(monkeypatch):
    policy, engine = policy_of("llama"), PlainEngine(max_tokens=8)
    expected = tokens(draw(PlainEngine(), policy))
    engine.check(policy, Sampling(max_new_tokens=4))
    assert engine._max_read == 8
    forward = type(policy.trunk).forward

    @wraps(forward)
    def whole_or_single(self, input_ids, *args, **kwargs):
        assert kwargs.get(cache_name(self)) is None or input_ids.shape[1] == 1
        return forward(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(type(policy.trunk), "forward", whole_or_single)
    engine.check(policy, Sampling(max_new_tokens=4))
    assert engine._max_read is None
    assert tokens(draw(engine, policy)) == expected
