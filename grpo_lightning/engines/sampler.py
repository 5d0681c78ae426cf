"""Samples from an engine: prompts in, completions with their texts out."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import closing

import torch
from torch import Tensor

from grpo_lightning.engines.engine import RolloutEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.stop_strings import text_of
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.policy.policy import Policy
from grpo_lightning.types import Prompt, RandomKey, Request, Sample, UsageError

Samples = Generator[tuple[int, Sample], None, None]
"""Yields the index of each sample, group after group, and the sample, in the order in which the samples end."""


class Sampler(ABC):
    """Makes samples of prompts with an engine: of one turn each, or of several turns with an environment."""

    @abstractmethod
    def draw(
        self,
        engine: RolloutEngine,
        policy: Policy,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        key: RandomKey,
    ) -> Samples:
        """Yields the index of each of `group_size` samples per prompt, and the sample, as soon as it has ended.

        Without prompts it yields nothing, and does not call the engine.

        Args:
            engine: Samples the completions.
            policy: Its tokenizer decodes them.
            prompts: A group is sampled for each.
            group_size: Completions per prompt.
            sampling: The distribution to sample from, and what ends a completion.
            key: Seed of the run and exploration step.
        """

    @abstractmethod
    def rollouts(self, samples: Sequence[Sample], group_size: int, temperature: float) -> Rollouts:
        """Returns the rollouts of samples, group after group."""

    def longest(self, sampling: Sampling) -> int:
        """Returns the largest number of sampled tokens that a sample can have."""
        return sampling.max_new_tokens

    def close(self) -> None:
        """Frees what sampling has started. May be called twice."""


class SingleTurn(Sampler):
    """Makes samples of one completion each, without an environment."""

    def draw(
        self,
        engine: RolloutEngine,
        policy: Policy,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        key: RandomKey,
    ) -> Samples:
        if not prompts:
            return
        if not engine.reads_images and any(prompt.images for prompt in prompts):
            raise UsageError(
                f"model.engine={type(engine).__name__}: it reads no images; use NativeEngine or PlainEngine"
            )
        prompts = policy.encode_images(prompts)
        with closing(engine.generate(Request.from_prompts(prompts, group_size), sampling, key)) as completions:
            for index, completion in completions:
                sample = Sample(
                    prompts[index // group_size],
                    text_of(completion, policy.tokenizer),
                    completion.token_ids,
                    completion.finish_reason,
                    completion.stop_string,
                    None,
                    completion.logp,
                    completion.versions,
                )
                yield index, sample

    def rollouts(self, samples: Sequence[Sample], group_size: int, temperature: float) -> Rollouts:
        prompts = [sample.prompt for sample in samples[::group_size]]
        assert all(prompt.image_states or prompt.images is None for prompt in prompts), "see Policy.encode_images"
        return Rollouts.from_lists(
            prompts=[prompt.token_ids for prompt in prompts],
            group=[index // group_size for index in range(len(samples))],
            completions=[sample.token_ids for sample in samples],
            truncated=torch.tensor([sample.truncated for sample in samples], dtype=torch.bool),
            columns={"sampler_logp": sampler_logp([sample.logp for sample in samples])},
            temperature=temperature,
            image_states=[prompt.image_states for prompt in prompts],
        )


def sampler_logp(logps: Sequence[list[float] | None]) -> Tensor | None:
    """[N] float32 log-probs that the engine recorded; None if it knows none, or there are no completions."""
    recorded = [logp for logp in logps if logp is not None]
    assert len(recorded) in (0, len(logps)), "an engine records the log-probs of all completions or of none"
    return torch.tensor([p for logp in recorded for p in logp], dtype=torch.float32) if recorded else None
