"""Prompts with images: log-probs and gradients of an independent loop over the whole model, and samplers that agree."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.tiny import COMPUTES
from helpers.tiny_vision import CAUSAL, family_of, mixed_prompts, picture, prompt_of, seeing_policy, whole_model_logp
from torch import Tensor

from grpo_lightning import Compute, PlainEngine, Policy, Prompt, RandomKey, Request, Rollouts, Sampling, UsageError
from grpo_lightning.command.overview import optional
from grpo_lightning.engines.sampler import SingleTurn

COMPLETIONS = [[20, 21, 22], [23, 24, 25, 26, 27, 28], [29], [30, 31, 32, 33], [34, 35], [36, 37, 38]]
GROUP = [0, 0, 1, 1, 2, 3]
NUM_TOKENS = sum(map(len, COMPLETIONS))
ENGINES = [kind for kind in (PlainEngine, optional("NativeEngine")) if kind]


def rollouts_of(prompts, completions=COMPLETIONS, group=GROUP, **fields) -> Rollouts:
    states = [prompt.image_states for prompt in prompts]
    return Rollouts.from_lists([p.token_ids for p in prompts], group, completions, image_states=states, **fields)


def gradients_of(model) -> dict[str, Tensor]:
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


@pytest.mark.parametrize("vision", [False, True])
@pytest.mark.parametrize("name", CAUSAL)
def test_log_probs_and_gradient_are_those_of_the_whole_model(name, vision):
    """In float64; also of each micro-batch, and with and without a shared prefix."""
    weight = torch.linspace(-1, 1, NUM_TOKENS, dtype=torch.float64)
    for compute in COMPUTES:
        family = family_of(name)
        family.model.double()
        prompts = mixed_prompts(family)
        rows = zip(GROUP, COMPLETIONS, strict=True)
        expected = torch.cat([whole_model_logp(family.model, prompts[group], ids) for group, ids in rows])
        (expected * weight).sum().backward()
        gradient = gradients_of(family.model)

        policy = Policy.from_model(family.model, family.tokenizer, compute=compute(), vision=vision)
        rollouts = rollouts_of(policy.encode_images(prompts))
        assert len(rollouts.image_states) == 4
        actual = policy(rollouts).logp
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2e-6)
        (actual * weight).sum().backward()
        actual_gradient = gradients_of(family.model)
        assert vision == (gradient.keys() <= actual_gradient.keys())
        largest = max(float(value.norm()) for value in gradient.values())
        for key in gradient.keys() & actual_gradient.keys():
            assert float((actual_gradient[key] - gradient[key]).norm()) <= 1e-6 * largest, key

        # Small micro-batches: each holds the images of its own prompts.
        total = torch.zeros(NUM_TOKENS, dtype=torch.float64)
        starts = torch.tensor([0, *map(len, COMPLETIONS)]).cumsum(0)
        for micro_batch in rollouts.micro_batches(70, policy.compute.shares_prefix):
            logps = policy(micro_batch).logp.detach().split(micro_batch.lengths.tolist())
            for row, logp in zip(micro_batch.sample_index.tolist(), logps, strict=True):
                total[starts[row] : starts[row + 1]] = logp.double()
        torch.testing.assert_close(total, expected.detach(), rtol=0, atol=2e-6)


def completions_of(engine, policy, prompts, group_size=3):
    engine.sync(policy)
    sampling = Sampling(max_new_tokens=6)
    return engine.complete(Request.from_prompts(prompts, group_size), sampling, RandomKey())


def gap(policy: Policy, prompts: list[Prompt], completions) -> float:
    """The largest difference between the log-probs of a sampler and the policy."""
    group = [index // 3 for index in range(len(completions))]
    with torch.no_grad():
        logp = policy(rollouts_of(prompts, [completion.token_ids for completion in completions], group)).logp
    return float((logp - torch.tensor([p for completion in completions for p in completion.logp])).abs().max())


@pytest.mark.parametrize("name", CAUSAL)
def test_samplers_sample_from_the_policy(name):
    policy, family = seeing_policy(name, compute=COMPUTES[0]())
    prompts = policy.encode_images(mixed_prompts(family))
    engines = [PlainEngine(), PlainEngine(max_tokens=24)]
    # Qwen3.5's recurrent layers have no keys and values.
    if len(ENGINES) > 1 and name != "qwen3_5":
        engines += [ENGINES[1](), ENGINES[1](threads=2)]
    expected_ids = None
    for engine in engines:
        completions = completions_of(engine, policy, prompts)
        assert gap(policy, prompts, completions) <= 1e-5
        token_ids = [completion.token_ids for completion in completions]
        expected_ids = expected_ids or token_ids
        assert token_ids == expected_ids


@pytest.mark.parametrize("engine_class", ENGINES)
def test_what_would_be_wrong_is_seen(engine_class):
    """Each of these mistakes is far above the gap that rounding explains."""
    policy, family = seeing_policy("qwen3_vl", compute=COMPUTES[0]())
    prompts = policy.encode_images(mixed_prompts(family))
    completions = completions_of(engine_class(), policy, prompts)
    assert gap(policy, prompts, completions) <= 1e-5

    def changed(**fields):
        return [
            replace(prompt, image_states=prompt.image_states and replace(prompt.image_states, **fields))
            for prompt in prompts
        ]

    # A prefill that prompts of equal text share, whose images differ.
    assert prompts[0].token_ids == prompts[1].token_ids
    assert gap(policy, prompts, completions_of(engine_class(), policy, changed(images=SimpleNamespace(key="")))) > 0.05
    # An update without the images.
    blind = [replace(prompt, image_states=None) for prompt in prompts]
    assert gap(policy, blind, completions) > 0.05
    # Positions as of text.
    assert gap(policy, changed(positions=None), completions) > 1e-3
    # Images without the states of the first layers.
    assert gap(policy, changed(layers=()), completions) > 1e-3
    # Images of two prompts, exchanged.
    states = [prompt.image_states for prompt in prompts]
    exchanged = [replace(prompts[0], image_states=states[1]), replace(prompts[1], image_states=states[0]), *prompts[2:]]
    assert gap(policy, exchanged, completions) > 0.05


def test_the_key_of_images_tells_requests_apart():
    policy, family = seeing_policy("smolvlm")
    prompts = policy.encode_images(mixed_prompts(family))
    requests = Request.from_prompts(prompts, 2)
    assert requests[0].prefix == requests[1].prefix != requests[2].prefix
    same = policy.encode_images([prompt_of(family, 50, f"{family.mark}How?", [picture(0)])])
    assert Request.from_prompts(same, 1)[0].prefix == requests[0].prefix
    assert requests[-1].prefix == (tuple(prompts[3].token_ids), "")


def test_an_image_is_encoded_once_per_prompt():
    """8 prompts x 8 completions, two passes: 8 calls of the encoder, trial included."""
    policy, family = seeing_policy("qwen2_5_vl", compute=COMPUTES[0]())
    calls = []
    policy.model.model.visual.register_forward_hook(lambda *args: calls.append(args))
    prompts = [prompt_of(family, id, f"{family.mark}{id}?", [picture(id)]) for id in range(8)]
    engine = ENGINES[-1]()
    engine.sync(policy)
    samples = dict(SingleTurn().draw(engine, policy, prompts, 8, Sampling(max_new_tokens=3), RandomKey()))
    rollouts = SingleTurn().rollouts([samples[index] for index in range(64)], 8, 1.0)
    for _ in range(2):
        for micro_batch in rollouts.micro_batches(200, policy.compute.shares_prefix):
            policy(micro_batch).logp.sum().backward()
    assert len(calls) == 8


def test_a_sampled_image_token_is_a_token():
    policy, family = seeing_policy("qwen3_vl", compute=COMPUTES[0]())
    prompts = policy.encode_images(mixed_prompts(family)[:1])
    image_id = policy.config.image_token_id
    rollouts = rollouts_of(prompts, [[image_id, 20, image_id], [21]], [0, 0])
    logp = policy(rollouts).logp
    alone = policy(rollouts.select(torch.tensor([1]))).logp
    assert logp.isfinite().all()
    torch.testing.assert_close(logp[3:], alone, rtol=0, atol=1e-5)


def test_rollouts_carry_images_with_their_prompts():
    policy, family = seeing_policy("smolvlm")
    prompts = policy.encode_images(mixed_prompts(family))
    rollouts = rollouts_of(prompts)
    assert [states is not None for states in rollouts.image_states] == [True, True, True, False]
    assert rollouts.select(torch.tensor([5])).image_states == ()
    chosen = rollouts.select(torch.tensor([4, 2]))
    assert [*chosen.image_states] == [prompts[1].image_states, prompts[2].image_states]
    text = Rollouts.from_lists([[7, 8]], [0], [[9]])
    both = Rollouts.concat([text, chosen])
    assert [*both.image_states] == [None, *chosen.image_states]
    assert Rollouts.concat([text, text]).image_states == ()


def test_images_that_see_ahead_are_refused():
    policy, family = seeing_policy("gemma3")
    with pytest.raises(UsageError, match="its image tokens see later ones"):
        policy.encode_images(mixed_prompts(family))


def test_an_engine_of_text_is_refused():
    policy, family = seeing_policy("smolvlm")
    engine = PlainEngine()
    engine.reads_images = False
    engine.sync(policy)
    with pytest.raises(UsageError, match=r"model\.engine=PlainEngine: it reads no images"):
        [*SingleTurn().draw(engine, policy, mixed_prompts(family), 1, Sampling(max_new_tokens=1), RandomKey())]


def test_a_model_of_text_is_refused():
    from helpers.tiny import policy_of

    _, family = seeing_policy("smolvlm")
    with pytest.raises(UsageError, match="LlamaForCausalLM cannot read the images of a prompt"):
        policy_of().encode_images(mixed_prompts(family))
    with pytest.raises(UsageError, match="vision=true: LlamaForCausalLM has no image encoder"):
        Policy.from_model(policy_of().model, family.tokenizer, vision=True)


def test_text_alone_is_as_it_was():
    """Bit by bit: a seeing model's rollouts of text, beside none with images."""
    policy, _family = seeing_policy("qwen2_5_vl", compute=Compute())
    text = [[20, 21, 22], [23, 24]]
    rollouts = Rollouts.from_lists(text, [0, 1], [[25, 26], [27]])
    ids = torch.tensor([[20, 21, 22, 25], [23, 24, 20, 20]])
    states = policy.trunk(input_ids=ids, use_cache=False).last_hidden_state
    hidden = torch.stack([states[0, 2], states[0, 3], states[1, 1]])
    expected = policy.logits(hidden).log_softmax(-1).gather(-1, torch.tensor([[25], [26], [27]])).squeeze(-1)
    assert torch.equal(policy(rollouts).logp, expected)
    assert rollouts.image_states == ()
