"""What the tests of all of vLLM's engines draw, and what every one of them promises."""

from contextlib import closing
from operator import itemgetter
from typing import Any

import torch

from grpo_lightning.engines.base import RolloutEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import Completion, FinishReason, Prompt, RandomKey, Request
from helpers.tiny import STOP_IDS, prompts_of, teacher_forced

PROMPTS = prompts_of([4, 1, 9, 4, 6])


def draw(
    engine: RolloutEngine,
    policy: Policy,
    requests: list[Request] | None = None,
    length: int = 24,
    key: RandomKey | None = None,
    **sampling: Any,
) -> list[Completion]:
    """Completions of the policy as it is now."""
    if not engine.has(policy):
        engine.sync(policy)
    requests = requests or Request.from_prompts(PROMPTS, 4)
    return engine.complete(requests, Sampling(max_new_tokens=length, **sampling), key or RandomKey())


def tokens(completions: list[Completion]) -> list[list[int]]:
    """Their ids."""
    return [completion.token_ids for completion in completions]


def gap(policy: Policy, prompts: list[Prompt], completions: list[Completion], temperature: float = 1.0) -> float:
    """Largest difference to the log-probs of a plain forward over each completion."""
    group_size, largest = len(completions) // len(prompts), 0.0
    for row, completion in enumerate(completions):
        prompt = prompts[row // group_size].token_ids
        logp = teacher_forced(policy.model, prompt, completion.token_ids, temperature)
        expected = logp.gather(-1, torch.tensor(completion.token_ids)[:, None]).squeeze(-1)
        assert completion.logp is not None
        largest = max(largest, float((expected - torch.tensor(completion.logp)).abs().max()))
    return largest


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


def ends_with_stop_tokens(engine: RolloutEngine, policy: Policy) -> None:
    """Each completion ends with the first of several stop tokens, or is as long as it may be."""
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


def depends_on_nothing_else(engine: RolloutEngine, policy: Policy) -> list[list[int]]:
    """The ids of whole groups, which do not depend on the order of prompts or the size of a group."""
    whole = tokens(draw(engine, policy))
    order = [3, 0, 4, 1, 2]
    shuffled = tokens(draw(engine, policy, Request.from_prompts([PROMPTS[index] for index in order], 4)))
    for number, index in enumerate(order):
        assert shuffled[4 * number : 4 * number + 4] == whole[4 * index : 4 * index + 4]
    fewer = tokens(draw(engine, policy, Request.from_prompts(PROMPTS, 3)))
    assert fewer == [row for group in range(5) for row in whole[4 * group : 4 * group + 3]]
    return whole
