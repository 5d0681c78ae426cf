import random
from collections.abc import Callable
from contextlib import closing
from functools import wraps
from typing import Any

import pytest
import torch
from helpers.drawing import yields_each_completion_once
from helpers.tiny import CONTEXT, SHAPES, STOP_IDS, policy_of, prompts_of, teacher_forced, tokenizer

from grpo_lightning.engines.base import RolloutEngine
from grpo_lightning.engines.plain import PlainEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.scripted import ScriptedEngine
from grpo_lightning.plugins.fast import kv_memory, prompt_part, slab
from grpo_lightning.plugins.fast.native import NativeEngine
from grpo_lightning.policy.policy import Policy, recompute_activations
from grpo_lightning.types import Completion, FinishReason, Prompt, RandomKey, Request, UsageError

ENGINES = {"native": NativeEngine, "plain": PlainEngine}
PROMPTS = prompts_of([4, 1, 9, 4, 6])
"""One of a single token, two of one length."""
EQUAL = prompts_of([5, 5, 5])
"""All of one length: no padding anywhere."""


@pytest.fixture(params=ENGINES)
def engine_class(request: pytest.FixtureRequest) -> type[Any]:
    return ENGINES[request.param]


def generate(
    engine: RolloutEngine,
    policy: Policy,
    prompts: list[Prompt],
    group_size: int = 4,
    length: int = 24,
    **kwargs: Any,
) -> list[Completion]:
    key = RandomKey(kwargs.pop("seed", 0), kwargs.pop("step", 0))
    return draw(engine, policy, Request.from_prompts(prompts, group_size), length, key, **kwargs)


def draw(
    engine: RolloutEngine,
    policy: Policy,
    requests: list[Request],
    length: int = 24,
    key: RandomKey | None = None,
    **sampling: Any,
) -> list[Completion]:
    engine.sync(policy)
    return engine.complete(requests, Sampling(max_new_tokens=length, **sampling), key or RandomKey())


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def assert_scored_as_teacher_forced(
    policy: Policy, prompts: list[Prompt], completions: list[Completion], temperature: float = 1.0
) -> None:
    """A plain forward over each completion, alone and unpadded, finds the log-probs the sampler noted."""
    group_size = len(completions) // len(prompts)
    for row, completion in enumerate(completions):
        prompt = prompts[row // group_size].token_ids
        logp = teacher_forced(policy.model, prompt, completion.token_ids, temperature)
        expected = logp.gather(-1, torch.tensor(completion.token_ids)[:, None]).squeeze(-1)
        assert completion.logp == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("prompts", [PROMPTS, EQUAL], ids=["ragged", "equal"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_a_teacher_forced_forward(engine_class, policy, prompts, temperature):
    completions = generate(engine_class(), policy, prompts, temperature=temperature)
    assert len(completions) == 4 * len(prompts)
    lengths = {len(completion.token_ids) for completion in completions}
    assert len(lengths) > 2
    assert_scored_as_teacher_forced(policy, prompts, completions, temperature)


def test_greedy_is_generate_of_transformers_token_for_token(engine_class, policy):
    completions = generate(engine_class(), policy, PROMPTS, group_size=2, temperature=0.0)
    for row, completion in enumerate(completions):
        prompt = torch.tensor([PROMPTS[row // 2].token_ids])
        expected = policy.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False
        )
        assert completion.token_ids == expected[0, prompt.shape[1] :].tolist()
    assert_scored_as_teacher_forced(policy, PROMPTS, completions)


def test_completions_end_with_the_first_of_several_stop_tokens(engine_class, policy):
    ends = set()
    for completion in generate(engine_class(), policy, PROMPTS, group_size=16):
        *body, last = completion.token_ids
        assert not set(body) & set(STOP_IDS)
        assert len(completion.logp) == len(completion.token_ids)
        if last in STOP_IDS:
            assert completion.finish_reason is FinishReason.STOP
            ends.add(last)
        else:
            assert completion.finish_reason is FinishReason.LENGTH
            assert len(completion.token_ids) == 24
    assert ends == set(STOP_IDS)


def test_a_stop_token_at_the_last_position_counts_as_stopped(engine_class):
    policy = policy_of("llama")
    whole = generate(engine_class(), policy, PROMPTS, group_size=8)
    length = next(len(c.token_ids) for c in whole if c.finish_reason is FinishReason.STOP and len(c.token_ids) > 2)
    for long, cut in zip(whole, generate(engine_class(), policy, PROMPTS, group_size=8, length=length), strict=True):
        assert cut.token_ids == long.token_ids[:length]
        stopped = long.finish_reason is FinishReason.STOP and len(long.token_ids) <= length
        assert cut.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)


def test_one_new_token(engine_class, policy):
    for completion in generate(engine_class(), policy, PROMPTS, length=1):
        assert len(completion.token_ids) == len(completion.logp) == 1


@pytest.mark.parametrize("max_rows", [1, 3, 9])
def test_results_do_not_depend_on_rows_at_once(engine_class, policy, max_rows):
    whole = generate(engine_class(), policy, PROMPTS, seed=3, step=2)
    assert tokens(generate(engine_class(max_rows=max_rows), policy, PROMPTS, seed=3, step=2)) == tokens(whole)


@pytest.mark.parametrize("check_every", [1, 3, 64])
def test_results_do_not_depend_on_when_ended_rows_are_dropped(policy, check_every):
    whole = generate(NativeEngine(), policy, PROMPTS)
    other = generate(NativeEngine(check_every=check_every), policy, PROMPTS)
    assert tokens(other) == tokens(whole)
    for left, right in zip(whole, other, strict=True):
        assert left.logp == pytest.approx(right.logp, abs=1e-5)


def test_results_do_not_depend_on_order_company_or_group_size(engine_class, policy):
    whole = tokens(generate(engine_class(), policy, PROMPTS, group_size=4))
    order = [3, 0, 4, 1, 2]
    shuffled = tokens(generate(engine_class(), policy, [PROMPTS[i] for i in order], group_size=4))
    for place, index in enumerate(order):
        assert shuffled[4 * place : 4 * place + 4] == whole[4 * index : 4 * index + 4]
    alone = tokens(generate(engine_class(), policy, [PROMPTS[2]], group_size=4))
    assert alone == whole[8:12]
    fewer = tokens(generate(engine_class(), policy, PROMPTS, group_size=3))
    assert fewer == [row for group in range(5) for row in whole[4 * group : 4 * group + 3]]


def test_another_seed_step_or_prompt_id_draws_other_completions(engine_class):
    policy = policy_of("qwen2")
    base = tokens(generate(engine_class(), policy, PROMPTS, seed=1, step=1))
    assert tokens(generate(engine_class(), policy, PROMPTS, seed=1, step=1)) == base
    assert tokens(generate(engine_class(), policy, PROMPTS, seed=2, step=1)) != base
    assert tokens(generate(engine_class(), policy, PROMPTS, seed=1, step=2)) != base
    renamed = [Prompt(p.id + 1, p.text, p.token_ids, p.question) for p in PROMPTS]
    assert tokens(generate(engine_class(), policy, renamed, seed=1, step=1)) != base
    groups = [tuple(map(tuple, base[4 * g : 4 * g + 4])) for g in range(5)]
    assert all(len(set(group)) > 1 for group in groups)


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8, "temperature": 1.3}, {"min_p": 0.2}],
    ids=str,
)
def test_both_engines_draw_the_same(policy, sampling):
    native = generate(NativeEngine(), policy, PROMPTS, seed=5, **sampling)
    other = generate(PlainEngine(), policy, PROMPTS, seed=5, **sampling)
    assert tokens(native) == tokens(other)
    assert [c.finish_reason for c in native] == [c.finish_reason for c in other]
    for left, right in zip(native, other, strict=True):
        assert left.logp == pytest.approx(right.logp, abs=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 1},
        {"min_new_tokens": 12},
        {"min_length": 20},
        {"suppress_tokens": list(range(10, 40))},
        {"bad_words_ids": [[i] for i in range(10, 40)]},
        {"forced_eos_token_id": 3},
        {"num_beams": 3},
        {"num_return_sequences": 2},
        {"return_dict_in_generate": True, "output_scores": True},
        {"max_length": 7},
        {"do_sample": True, "temperature": 0.3, "top_k": 2, "top_p": 0.5},
    ],
    ids=str,
)
def test_the_models_own_generation_settings_do_not_change_the_distribution(engine_class, settings):
    # Instruct models ship settings for chatting. What is drawn is what `Sampling` says.
    policy = policy_of("llama")
    expected = generate(engine_class(), policy, PROMPTS)
    for key, value in settings.items():
        setattr(policy.model.generation_config, key, value)
    assert tokens(generate(engine_class(), policy, PROMPTS)) == tokens(expected)


def test_filtered_log_probs_are_those_of_the_filtered_distribution(engine_class):
    policy = policy_of("llama")
    for row, completion in enumerate(generate(engine_class(), policy, PROMPTS, top_k=3, temperature=0.9)):
        logp = teacher_forced(policy.model, PROMPTS[row // 4].token_ids, completion.token_ids, temperature=0.9)
        top = logp.topk(3)
        renormalised = top.values.log_softmax(-1)
        for place, (token, noted) in enumerate(zip(completion.token_ids, completion.logp, strict=True)):
            rank = top.indices[place].tolist().index(token)
            assert noted == pytest.approx(float(renormalised[place, rank]), abs=1e-5)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0}, {"stop": ["a", "7"]}], ids=str)
@pytest.mark.parametrize("max_rows", [4, 1024])
def test_each_completion_is_yielded_once(engine_class, max_rows, sampling):
    yields_each_completion_once(engine_class(max_rows=max_rows), policy_of("gpt2"), **sampling)


def test_completions_are_yielded_while_others_are_decoded(engine_class):
    policy, engine = policy_of("gpt2"), engine_class(check_every=2)
    engine.sync(policy)
    requests = Request.from_prompts(PROMPTS, 4)
    lengths = [len(one.token_ids) for _, one in engine.generate(requests, Sampling(max_new_tokens=24), RandomKey())]
    # It looks every second position, and after the last one.
    looks = [length + length % 2 for length in lengths]
    assert looks == sorted(looks) and len(set(looks)) > 3


def test_nothing_is_held_between_two_completions(engine_class):
    policy = policy_of("llama")
    policy.model.train()
    engine = engine_class(check_every=2)
    engine.sync(policy)
    attention = policy.model.config._attn_implementation
    with closing(engine.generate(Request.from_prompts(PROMPTS, 4), Sampling(max_new_tokens=24), RandomKey())) as drawn:
        for _ in drawn:
            assert policy.model.training and torch.is_grad_enabled()
            assert policy.model.config._attn_implementation == attention


def test_what_cannot_be_drawn_is_refused_before_the_first_completion(engine_class):
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
    generate(engine_class(), policy, PROMPTS)
    assert policy.model.config._attn_implementation == attention
    assert policy.model.training is training
    assert all(layer.training is training for layer in policy.model.modules())
    assert all(value.equal(before[name]) for name, value in policy.model.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in policy.model.parameters())


def test_dropout_is_off_while_sampling_from_a_model_in_training(engine_class):
    policy = policy_of("gpt2", resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5)
    expected = generate(engine_class(), policy, PROMPTS)
    policy.model.train()
    assert tokens(generate(engine_class(), policy, PROMPTS)) == tokens(expected)


def test_sampling_from_a_model_that_recomputes_activations_in_training(engine_class, policy):
    expected = generate(engine_class(), policy, PROMPTS)
    recompute_activations(policy.model)
    policy.model.train()
    assert tokens(generate(engine_class(), policy, PROMPTS)) == tokens(expected)


def test_without_any_stop_token_every_completion_has_full_length(engine_class, policy):
    policy.model.generation_config.eos_token_id = policy.model.config.eos_token_id = policy.tokenizer.eos_token = None
    assert not policy.stop_ids
    completions = generate(engine_class(), policy, PROMPTS)
    assert {len(completion.token_ids) for completion in completions} == {24}
    assert {completion.finish_reason for completion in completions} == {FinishReason.LENGTH}
    assert_scored_as_teacher_forced(policy, PROMPTS, completions)


def test_new_weights_count_at_once(engine_class):
    policy = policy_of("llama")
    engine = engine_class()
    before = generate(engine, policy, PROMPTS)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)
    after = engine.complete(Request.from_prompts(PROMPTS, 4), Sampling(max_new_tokens=24), RandomKey())
    assert tokens(after) != tokens(before)
    assert_scored_as_teacher_forced(policy, PROMPTS, after)


@pytest.mark.parametrize("prompts", [PROMPTS, EQUAL], ids=["ragged", "equal"])
@pytest.mark.parametrize("window", [2, 4, 12])
@pytest.mark.parametrize("shape", ["mistral", "gemma3_text"])
def test_sliding_windows_shorter_than_prompts_or_completions(engine_class, shape, window, prompts):
    policy = policy_of(shape, sliding_window=window)
    policy.model.train()
    completions = generate(engine_class(), policy, prompts)
    assert policy.model.training
    policy.model.eval()
    assert_scored_as_teacher_forced(policy, prompts, completions)


def test_native_decodes_a_sliding_window_that_nothing_reaches():
    policy = policy_of("mistral", sliding_window=64)
    assert_scored_as_teacher_forced(policy, PROMPTS, generate(NativeEngine(), policy, PROMPTS))


@pytest.mark.parametrize(
    ("shape", "overrides"), [("gemma2", {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 0.5})]
)
def test_native_refuses_attention_it_does_not_know_and_names_the_engine_that_does(shape, overrides):
    policy = policy_of(shape, **overrides)
    with pytest.raises(UsageError, match="engine=PlainEngine"):
        generate(NativeEngine(), policy, PROMPTS)
    completions = generate(PlainEngine(), policy, PROMPTS)
    assert_scored_as_teacher_forced(policy, PROMPTS, completions)


@pytest.mark.parametrize(
    "overrides", [{"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}], ids=str
)
def test_native_heeds_the_scaling_of_attention_scores(overrides):
    policy = policy_of("gpt2", **overrides)
    assert_scored_as_teacher_forced(policy, PROMPTS, generate(NativeEngine(), policy, PROMPTS))


@pytest.mark.parametrize("key_value_heads", [1, 4])
def test_any_number_of_key_value_heads(engine_class, key_value_heads):
    policy = policy_of("llama", num_key_value_heads=key_value_heads)
    assert_scored_as_teacher_forced(policy, PROMPTS, generate(engine_class(), policy, PROMPTS))


def test_up_to_the_last_position_of_the_context(engine_class):
    prompts = prompts_of([CONTEXT - 8, 3])
    for shape in SHAPES:
        policy = policy_of(shape)
        policy.model.generation_config.eos_token_id = policy.model.config.eos_token_id = policy.tokenizer.eos_token = (
            None
        )
        completions = generate(engine_class(), policy, prompts, length=8, group_size=1)
        assert_scored_as_teacher_forced(policy, prompts, completions)


@pytest.mark.parametrize(
    ("engine_class", "key"),
    [(NativeEngine, "max_rows"), (NativeEngine, "check_every"), (PlainEngine, "max_rows")],
)
def test_sizes_below_one_are_refused_by_name(engine_class, key):
    with pytest.raises(UsageError, match=f"{key}=0"):
        engine_class(**{key: 0})


def test_closing_twice_is_fine(engine_class):
    engine = engine_class()
    engine.close()
    engine.close()


def test_scripted_engine_says_what_it_is_told():
    policy = policy_of()
    engine = ScriptedEngine(lambda request, text: f"{request.prompt_id}x{text[0]}{request.sample}")
    completions = generate(engine, policy, PROMPTS[:2], group_size=3)
    texts = [tokenizer().decode(c.token_ids, skip_special_tokens=True) for c in completions]
    first, second = (prompt.text[0] for prompt in PROMPTS[:2])
    assert texts == [f"10x{first}{sample}" for sample in range(3)] + [f"20x{second}{sample}" for sample in range(3)]
    assert all(c.token_ids[-1] == 3 and c.finish_reason is FinishReason.STOP for c in completions)
    assert all(c.logp is None for c in completions)
    assert not engine.shares_weights


def test_scripted_engine_cuts_at_max_new_tokens():
    engine = ScriptedEngine(lambda request, text: "abcdef"[: 3 + request.sample])
    fits, cut = generate(engine, policy_of(), PROMPTS[:1], group_size=2, length=4)
    spell = tokenizer()
    assert fits.token_ids == [*spell.encode("abc", add_special_tokens=False), 3]
    assert fits.finish_reason is FinishReason.STOP
    assert cut.token_ids == spell.encode("abcd", add_special_tokens=False)
    assert cut.finish_reason is FinishReason.LENGTH


def shuffled(requests: list[Request]) -> list[Request]:
    return random.Random(3).sample(requests, len(requests))


def of_each(requests: list[Request], completions: list[Completion]) -> dict[tuple[int, int], list[int]]:
    """Tokens by prompt and sample."""
    pairs = zip(requests, completions, strict=True)
    return {(request.prompt_id, request.sample): completion.token_ids for request, completion in pairs}


@pytest.mark.parametrize("max_rows", [3, 5, 1024])
def test_completions_come_in_the_order_of_the_requests_whatever_it_is(engine_class, policy, max_rows):
    requests = Request.from_prompts(PROMPTS, 4)
    expected = of_each(requests, draw(NativeEngine(), policy, requests))
    mixed = shuffled(requests)
    assert of_each(mixed, draw(engine_class(max_rows=max_rows), policy, mixed)) == expected


def test_groups_may_be_of_different_sizes(engine_class, policy):
    requests = Request.from_prompts(PROMPTS, 4)
    expected = of_each(requests, draw(NativeEngine(), policy, requests))
    some = [request for index, request in enumerate(requests) if index % 5]
    found = of_each(some, draw(engine_class(max_rows=4), policy, some))
    assert found == {key: value for key, value in expected.items() if key in found}
    assert len(found) == 16


def rows_read(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> list[int]:
    """Rows of every forward over more than one token."""
    rows: list[int] = []
    watch_reading(monkeypatch, policy, lambda shape: rows.append(shape[0]))
    return rows


def watch_reading(monkeypatch: pytest.MonkeyPatch, policy: Policy, note: Callable[[torch.Size], None]) -> None:
    """Notes rows and columns of every forward over more than one token."""
    forward = type(policy.trunk).forward

    @wraps(forward)
    def noted(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if input_ids.shape[1] > 1:
            note(input_ids.shape)
        return forward(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(type(policy.trunk), "forward", noted)


@pytest.mark.parametrize("limit", [1, 12])
@pytest.mark.parametrize(
    ("engine", "shape"),
    [
        (NativeEngine(), "gpt2"),
        (NativeEngine(), "shared"),
        (NativeEngine(), "mistral"),
        (NativeEngine(max_rows=9, check_every=3), "llama"),
        (NativeEngine(threads=2), "llama"),
    ],
    ids=["gpt2", "shared", "windows", "batches", "threads"],
)
def test_many_prompts_are_read_in_parts(
    monkeypatch: pytest.MonkeyPatch, engine: RolloutEngine, shape: str, limit: int
) -> None:
    monkeypatch.setattr(prompt_part, "SAVED_BYTES", 0 if shape == "shared" else 2**60)
    windows = {"sliding_window": 6, "scale": 0.1} if shape == "mistral" else {}
    policy = policy_of("llama" if shape == "shared" else shape, **windows)
    read: list[torch.Size] = []
    watch_reading(monkeypatch, policy, read.append)
    expected = generate(engine, policy, PROMPTS)
    if shape != "shared":
        monkeypatch.setattr(slab.SlabLayer, "_allocate", with_nan(slab.SlabLayer._allocate))
    whole = len(read)
    monkeypatch.setattr(kv_memory, "READ_TOKENS", limit)
    found = generate(engine, policy, PROMPTS)
    assert tokens(found) == tokens(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.logp == pytest.approx(other.logp, rel=1e-5, abs=1e-5)
    assert all(shape.numel() <= limit or shape[0] == 1 for shape in read[whole:])
    assert len(read) > 2 * whole


def with_nan(allocate: Callable[..., None]) -> Callable[..., None]:
    """`SlabLayer._allocate`, in memory that held something else."""

    def filled(layer: slab.SlabLayer, *args: Any) -> None:
        allocate(layer, *args)
        layer.key_slab.fill_(torch.nan)
        layer.value_slab.fill_(torch.nan)

    return filled


def test_requests_with_equal_tokens_share_their_prefill_whatever_their_order(monkeypatch, engine_class):
    policy = policy_of("llama")
    rows = rows_read(monkeypatch, policy)
    requests = shuffled(Request.from_prompts(PROMPTS, 4))
    draw(engine_class(), policy, requests)
    assert rows == [5]


def test_prompts_of_one_text_share_their_prefill_but_no_random_number(monkeypatch, engine_class):
    policy = policy_of("llama")
    expected = tokens(draw(engine_class(), policy, [Request(PROMPTS[0].token_ids, id, 0) for id in (1,)]))
    rows = rows_read(monkeypatch, policy)
    twins = draw(engine_class(), policy, [Request(list(PROMPTS[0].token_ids), id, 0) for id in (1, 2, 3)])
    assert rows == [1]
    assert tokens(twins)[:1] == expected
    assert len({tuple(row) for row in tokens(twins)}) == 3


@pytest.mark.parametrize("cut", [1, 5, 8])
def test_a_second_turn_draws_what_one_long_completion_would_have_drawn(engine_class, policy, cut):
    policy.model.generation_config.eos_token_id = policy.model.config.eos_token_id = policy.tokenizer.eos_token = None
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


def test_a_model_that_reads_whole_prompts_alone_is_decoded_by_plain(monkeypatch):
    policy, engine = policy_of("llama"), PlainEngine(max_tokens=8)
    expected = tokens(generate(NativeEngine(), policy, PROMPTS))
    engine.check(policy, Sampling(max_new_tokens=4))
    assert engine._max_read == 8
    forward = type(policy.trunk).forward

    @wraps(forward)
    def whole_or_single(self, input_ids, *args, past_key_values=None, **kwargs):
        assert past_key_values is None or input_ids.shape[1] == 1
        return forward(self, input_ids, *args, past_key_values=past_key_values, **kwargs)

    monkeypatch.setattr(type(policy.trunk), "forward", whole_or_single)
    engine.check(policy, Sampling(max_new_tokens=4))
    assert engine._max_read is None
    assert tokens(generate(engine, policy, PROMPTS)) == expected


def test_an_engine_remembers_the_version_that_it_has(engine_class):
    policy, other, engine = policy_of(), policy_of(), engine_class()
    assert not engine.has(policy)
    engine.sync(policy)
    assert engine.has(policy)
    assert engine.version == 0
    assert not engine.has(other), "another policy of the same version"
    policy.version += 1
    assert not engine.has(policy)
    engine.sync(policy)
    assert engine.version == 1
