"""Completions of lengths that are drawn beforehand, the same ones on both sides, row by row and step by step.

A length is when a row ends, not what stands in it: tokens are drawn from the model's distribution as always. What ends
the rows costs neither side a pass over the logits: TRL's `generate` compares counters, grpo_lightning marks random
numbers.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

MEDIAN, SIGMA = 0.25, 1.0
"""Of the lognormal: the median as a fraction of the longest completion, and the deviation of the logarithm."""
MARKER = 1
"""The token that ends a row of grpo_lightning; drawn before the end it counts as the next one."""


def lognormal_lengths(step: int, rows: int, longest: int) -> list[int]:
    """Tokens of each completion of a step, from 1 to `longest`: a pure function of these numbers.

    Args:
        step: Its number, from 0.
        rows: Completions.
        longest: What is cut off there is as long as this.
    """
    generator = random.Random(f"lengths of step {step}")
    drawn = (generator.lognormvariate(math.log(MEDIAN * longest), SIGMA) for _ in range(rows))
    return [max(1, min(longest, round(length))) for length in drawn]


def stopping(trainer: Any, lengths_of: Callable[[int], Sequence[int]]) -> None:
    """Makes the completions of a GRPOTrainer end where they should.

    `generate` has criteria that end single rows. A row that has ended is passed on with padding until the last one
    ends, as one that drew its stop token is. TRL then cuts it off at the stop token, which is done here.

    Args:
        trainer: TRL's, with `generate` of transformers.
        lengths_of: The lengths by the number of the step.
    """
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    generate, turn = trainer.model.generate, trainer._generate_single_turn
    step = -1

    class AtLength(StoppingCriteria):
        """Ends each row at its own length."""

        def __init__(self, prompt: int) -> None:
            self.ends = torch.tensor(lengths_of(step), device=trainer.accelerator.device) + prompt

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return self.ends <= input_ids.shape[1]

    def ended_generate(**kwargs: Any) -> Any:
        criteria = StoppingCriteriaList([AtLength(kwargs["input_ids"].shape[1])])
        return generate(**kwargs, stopping_criteria=criteria)

    def cut_turn(*args: Any, **kwargs: Any) -> Any:
        nonlocal step
        step += 1
        completion_ids, logps = turn(*args, **kwargs)
        return [ids[:end] for ids, end in zip(completion_ids, lengths_of(step), strict=True)], logps

    trainer.model.generate = ended_generate
    trainer._generate_single_turn = cut_turn


def forcing_engine(lengths_of: Callable[[int], Sequence[int]], **options: Any) -> Any:
    """A `NativeEngine` whose completions end where they should: it then drops their rows, as after a stop token.

    The random number of a row's last token is marked by adding 1, and what draws from it takes MARKER. The policy must
    have MARKER as its only stop token: `marking_policies`.

    Args:
        lengths_of: The lengths by the number of the step.
        **options: Of `NativeEngine`.
    """
    import torch

    from grpo_lightning.plugins.engines.native import native
    from grpo_lightning.plugins.engines.native import native_batch as batch

    class ForcingEngine(native.NativeEngine):
        """Ends each row at its own length."""

        def generate(self, requests: Any, sampling: Any, key: Any) -> Any:
            """As `NativeEngine.generate`."""
            ends = {(r.prompt_id, r.sample): n for r, n in zip(requests, lengths_of(key.step), strict=True)}
            with marked_draws(batch, ends):
                yield from super().generate(requests, sampling, key)

    @contextmanager
    def marked_draws(module: Any, ends: dict[tuple[int, int], int]) -> Iterator[None]:
        uniforms, draw = module.uniforms, module.draw

        def marking(key: Any, prompt: Any, sample: Any, first: Any, count: int) -> Any:
            rows = zip(prompt.tolist(), sample.tolist(), strict=True)
            last = torch.tensor([ends[row] for row in rows], device=first.device) - 1
            positions = first[:, None] + torch.arange(count, device=first.device)
            return uniforms(key, prompt, sample, first, count) + (positions >= last[:, None])

        def ending(logits: Any, uniform: Any, sampling: Any) -> Any:
            token, logp = draw(logits, uniform % 1, sampling)
            other = torch.where(token == MARKER, MARKER + 1, token)
            forced = torch.where(uniform >= 1, MARKER, other)
            if (changed := forced != token).any():
                logp[changed] = logits[changed].float().log_softmax(-1).gather(1, forced[changed][:, None])[:, 0]
            return forced, logp

        module.uniforms, module.draw = marking, ending
        try:
            yield
        finally:
            module.uniforms, module.draw = uniforms, draw

    return ForcingEngine(**options)


@contextmanager
def marking_policies() -> Iterator[None]:
    """Every policy has MARKER as its only stop token."""
    from grpo_lightning.policy.policy import Policy

    found = Policy.stop_ids
    setattr(Policy, "stop_ids", property(lambda policy: frozenset({MARKER})))  # noqa: B010
    try:
        yield
    finally:
        setattr(Policy, "stop_ids", found)  # noqa: B010
