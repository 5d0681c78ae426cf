"""Stop strings through the explorer and a whole run: texts end with the string, and tokens with its last one."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.all_tokenizers import STABLE
from helpers.drawing import ENGINES
from helpers.fitting import Digits
from helpers.tiny import model_of, policy_of, prompts_of

from grpo_lightning import Exploration, Explorer, FinishReason, PlainEngine, Policy, RandomKey, Sampling, Scorer


def explore(engine: Any, policy: Policy, stop: Sequence[str] = (), count: int = 4) -> Exploration:
    explorer = Explorer(engine, Scorer([Digits()]))
    sampling = Sampling(max_new_tokens=30, stop=list(stop))
    return explorer.explore(policy, prompts_of([3, 5, 1]), count, sampling, RandomKey(1, 0))


def cut(text: str, stop: Sequence[str]) -> str:
    ends = [text.index(string) + len(string) for string in stop if string in text]
    return text[: min(ends)] if ends else text


@pytest.mark.parametrize("kind", STABLE)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_text_that_rewards_see_is_the_unstopped_one_cut_after_the_string(engine: str, kind: str) -> None:
    policy = Policy.from_model(model_of("llama", scale=0.05), STABLE[kind](random.Random(1)))
    whole = explore(ENGINES[engine](), policy)
    pieces = [piece for sample in whole.samples for piece in sample.text.split("\ufffd") if len(piece) > 3]
    ended = 0
    for seed in range(3):
        rng = random.Random(seed)
        stop = [piece[1 : 1 + rng.randint(1, 6)] for piece in rng.choices(pieces, k=2)]
        found = explore(ENGINES[engine](), policy, stop)
        for long, short in zip(whole.samples, found.samples, strict=True):
            assert short.text == cut(long.text, stop)
            has_string = any(string in long.text for string in stop)
            assert short.finish_reason is (FinishReason.STOP if has_string else long.finish_reason)
            assert short.text.endswith(short.stop_string) and bool(short.stop_string) is has_string
            assert short.token_ids == long.token_ids[: len(short.token_ids)]
            ended += has_string
        # What is learned from: the tokens up to the one that completes the string, and their log-probs.
        assert found.rollouts.lengths.tolist() == [len(sample.token_ids) for sample in found.samples]
        assert found.rollouts.truncated.tolist() == [sample.truncated for sample in found.samples]
        with torch.no_grad():
            assert float((policy(found.rollouts).logp - found.rollouts.sampler_logp).abs().max()) < 1e-5
    assert ended > 6


def test_a_stop_token_that_is_text_is_left_out_and_not_searched() -> None:
    """`a` ends completions as a stop token; a stop string with it in can only be there before."""
    policy = policy_of(eos_token_id=[10, 3, 5])
    spell = policy.tokenizer
    assert spell.decode([10]) == "4"
    whole = explore(PlainEngine(), policy, count=16)
    assert any(sample.token_ids[-1] == 10 and len(sample.token_ids) > 1 for sample in whole.samples)
    found = explore(PlainEngine(), policy, ["4"], count=16)
    assert [sample.token_ids for sample in found.samples] == [sample.token_ids for sample in whole.samples]
    assert [sample.text for sample in found.samples] == [sample.text for sample in whole.samples]
