"""What the tests of engines draw, and what every engine promises."""

from collections.abc import Callable
from contextlib import closing
from functools import wraps
from operator import itemgetter
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from grpo_lightning import PlainEngine, Policy, RolloutEngine, Sampling, StopStrings
from grpo_lightning.command.overview import optional
from grpo_lightning.types import Completion, FinishReason, Prompt, RandomKey, Request
from helpers.tiny import STOP_IDS, forced_logp, prompts_of, teacher_forced

ENGINES = {name: kind for name, kind in (("plain", PlainEngine), ("native", optional("NativeEngine"))) if kind}
"""The engines that keep the contract of all: the core's, and a plugin's where there are plugins."""
PROMPTS = prompts_of([4, 1, 9, 4, 6])


def draw(
    engine: RolloutEngine,
    policy: Policy,
    requests: list[Request] | None = None,
    length: int = 24,
    key: RandomKey | None = None,
    **sampling: Any,
) -> list[Completion]:
    """Completions of the policy as it is now: four of each of PROMPTS unless said otherwise."""
    if not engine.has(policy):
        engine.sync(policy)
    requests = requests or Request.from_prompts(PROMPTS, 4)
    return engine.complete(requests, Sampling(max_new_tokens=length, **sampling), key or RandomKey())


def tokens(completions: list[Completion]) -> list[list[int]]:
    """Their ids."""
    return [completion.token_ids for completion in completions]


def gap(
    policy: Policy,
    prompts: list[Prompt],
    completions: list[Completion],
    temperature: float = 1.0,
    model: PreTrainedModel | None = None,
) -> float:
    """Largest difference to the log-probs of a plain forward over each completion, alone and unpadded.

    The forward is that of `model` where it is given, else of the policy's own.
    """
    group_size = len(completions) // len(prompts)
    expected = [
        forced_logp(model or policy.model, prompts[row // group_size].token_ids, one.token_ids, temperature)
        for row, one in enumerate(completions)
    ]
    found = [logp for one in completions for logp in one.logp or []]
    return float((torch.cat(expected) - torch.tensor(found)).abs().max())


def update(policy: Policy) -> None:
    """Changes the weights, as an optimizer would."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    policy.version += 1


def yields_each_completion_once(engine: RolloutEngine, policy: Policy, **sampling: Any) -> None:
    """Each request has one completion. An iterator that is closed early leaves nothing behind."""
    engine.sync(policy)
    requests, options = Request.from_prompts(PROMPTS, 4), Sampling(max_new_tokens=24, **sampling)
    ended = sorted(engine.generate(requests, options, RandomKey()), key=itemgetter(0))
    assert [index for index, _ in ended] == [*range(len(requests))]
    training = policy.model.training
    with closing(engine.generate(requests, options, RandomKey(1))) as early:
        next(early)
        assert policy.model.training is training
    assert [completion for _, completion in ended] == engine.complete(requests, options, RandomKey())


def watch_reading(monkeypatch: pytest.MonkeyPatch, policy: Policy, note: Callable[[torch.Size], None]) -> None:
    """Notes rows and columns of every forward over more than one token."""
    forward = type(policy.trunk).forward

    @wraps(forward)
    def noted(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if input_ids.shape[1] > 1:
            note(input_ids.shape)
        return forward(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(type(policy.trunk), "forward", noted)


def interrupt(engine: RolloutEngine, requests: list[Request], sampling: Sampling) -> None:
    """Ctrl-C when the first completion has ended."""
    with closing(engine.generate(requests, sampling, RandomKey())) as drawn:
        for _ in drawn:
            raise KeyboardInterrupt


class EngineContract:
    """What every engine promises, of fixtures `engine` and `policy`."""

    tolerance = 1e-5

    def test_log_probs_are_the_policys_before_and_after_updates(self, engine: RolloutEngine, policy: Policy) -> None:
        found = []
        for _ in range(2):
            completions = draw(engine, policy)
            assert gap(policy, PROMPTS, completions) < self.tolerance
            found.append(tokens(completions))
            update(policy)
        assert found[0] != found[1]
        assert gap(policy, PROMPTS, draw(engine, policy, temperature=0.7), temperature=0.7) < self.tolerance

    def test_completions_end_with_the_first_of_several_stop_tokens(self, engine: RolloutEngine, policy: Policy) -> None:
        ends = set()
        for completion in draw(engine, policy, Request.from_prompts(PROMPTS, 16)):
            *body, last = completion.token_ids
            assert not set(body) & set(STOP_IDS)
            assert completion.logp is not None and len(completion.logp) == len(completion.token_ids)
            stopped = last in STOP_IDS
            assert completion.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert stopped or len(completion.token_ids) == 24
            ends.add(last)
        assert set(STOP_IDS) <= ends

    def test_a_stop_string_ends_a_completion_where_it_is_complete(self, engine: RolloutEngine, policy: Policy) -> None:
        # The same completions as without strings, each up to the token that completes one.
        whole = draw(engine, policy)
        text = policy.tokenizer.decode(max(tokens(whole), key=len), skip_special_tokens=True)
        strings = [text[4:6], text[9]]
        expected = [StopStrings(policy, strings).cut(completion) for completion in whole]
        completions = draw(engine, policy, stop=strings)
        assert tokens(completions) == tokens(expected)
        assert [one.finish_reason for one in completions] == [one.finish_reason for one in expected]
        assert [one.stop_string for one in completions] == [one.stop_string for one in expected]
        assert {one.stop_string for one in completions} > {""}
        for actual, wanted in zip(completions, expected, strict=True):
            assert actual.logp == pytest.approx(wanted.logp, abs=self.tolerance)

    def test_completions_depend_on_key_prompt_and_position_alone(self, engine: RolloutEngine, policy: Policy) -> None:
        requests = Request.from_prompts(PROMPTS, 4)
        whole = tokens(draw(engine, policy, requests))
        assert all(len(set(map(tuple, whole[4 * group : 4 * group + 4]))) > 1 for group in range(5))
        order = [3, 0, 4, 1, 2]
        shuffled = tokens(draw(engine, policy, Request.from_prompts([PROMPTS[index] for index in order], 4)))
        for number, index in enumerate(order):
            assert shuffled[4 * number : 4 * number + 4] == whole[4 * index : 4 * index + 4]
        fewer = tokens(draw(engine, policy, Request.from_prompts(PROMPTS, 3)))
        assert fewer == [row for group in range(5) for row in whole[4 * group : 4 * group + 3]]
        mixed = [4 * group + sample for sample in (2, 0, 3, 1) for group in range(5)]
        assert tokens(draw(engine, policy, [requests[row] for row in mixed])) == [whole[row] for row in mixed]

        def begun(requests: list[Request], key: RandomKey) -> list[list[int]]:
            return tokens(draw(engine, policy, requests[:8], length=6, key=key))

        base = begun(requests, RandomKey(1, 1))
        assert begun(requests, RandomKey(1, 1)) == base
        assert begun(requests, RandomKey(2, 1)) != base
        assert begun(requests, RandomKey(1, 2)) != base
        assert begun([Request(r.token_ids, r.prompt_id + 1, r.sample) for r in requests], RandomKey(1, 1)) != base
        later = [Request(r.token_ids, r.prompt_id, r.sample, position=3) for r in requests]
        assert begun(later, RandomKey(1, 1)) != base

    def test_greedy_is_that_of_the_plain_engine(self, engine: RolloutEngine, policy: Policy) -> None:
        plain = PlainEngine()
        plain.sync(policy)
        requests = Request.from_prompts(PROMPTS, 2)
        expected = plain.complete(requests, Sampling(max_new_tokens=24, temperature=0), RandomKey())
        completions = draw(engine, policy, requests, temperature=0)
        assert tokens(completions) == tokens(expected)
        assert gap(policy, PROMPTS, completions) < self.tolerance

    def test_filtered_log_probs_are_those_of_the_filtered_distribution(
        self, engine: RolloutEngine, policy: Policy
    ) -> None:
        for row, completion in enumerate(draw(engine, policy, length=8, top_k=3, temperature=0.9)):
            logp = teacher_forced(policy.model, PROMPTS[row // 4].token_ids, completion.token_ids, temperature=0.9)
            top = logp.topk(3)
            for position, token in enumerate(completion.token_ids):
                (index,) = (top.indices[position] == token).nonzero()[0].tolist()
                expected = float(top.values[position].log_softmax(-1)[index])
                assert completion.logp is not None and completion.logp[position] == pytest.approx(
                    expected, abs=self.tolerance
                )

    def test_each_completion_is_yielded_once(self, engine: RolloutEngine, policy: Policy) -> None:
        samplings: list[dict[str, Any]] = [{}, {"temperature": 0}, {"stop": ["a"]}]
        for sampling in samplings:
            yields_each_completion_once(engine, policy, **sampling)
