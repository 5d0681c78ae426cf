"""Exploration: prompts -> engine -> rewards -> advantages = rollouts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from grpo_lightning.advantages import AdvantageEstimator
from grpo_lightning.engines.base import Progress, RolloutEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.policy import Policy
from grpo_lightning.ragged import spread
from grpo_lightning.rewards.scorer import Scorer, Scores
from grpo_lightning.rollouts import Rollouts
from grpo_lightning.types import Completion, FinishReason, Prompt, Sample


@dataclass(slots=True)
class Exploration:
    """What one exploration step of this rank found: B = prompts * G completions, group after group."""

    samples: list[Sample]
    scores: Scores
    rollouts: Rollouts
    seconds: dict[str, float]
    """Seconds spent in `explore` (sampling) and in `reward`."""

    def describe(self, row: int) -> str:
        """One completion with its prompt and scores, for a message."""
        sample = self.samples[row]
        scores = ", ".join(f"{name}={value} ({status})" for name, (value, status) in self.scores.describe(row).items())
        return f"prompt {sample.prompt.text!r} completion {sample.text!r} rewards {scores}"


class Explorer:
    """Samples groups of completions and scores them.

    Args:
        engine: Draws the completions.
        scorer: Scores them.
        advantage: Turns the scores of a group into advantages.
    """

    def __init__(self, engine: RolloutEngine, scorer: Scorer, advantage: AdvantageEstimator) -> None:
        self.engine = engine
        self.scorer = scorer
        self.advantage = advantage

    def sample(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: int,
        step: int,
        progress: Progress | None = None,
    ) -> tuple[list[Completion], list[Sample]]:
        """`group_size` completions of each prompt, as the engine and as the rewards see them."""
        self.engine.sync(policy)
        completions = self.engine.generate(prompts, group_size, sampling, seed, step, progress)
        written = [c.token_ids[:-1] if c.finish_reason is FinishReason.STOP else c.token_ids for c in completions]
        texts = policy.tokenizer.batch_decode(written, skip_special_tokens=True)
        samples = [
            Sample(prompts[row // group_size], text, completion.token_ids, completion.finish_reason)
            for row, (text, completion) in enumerate(zip(texts, completions, strict=True))
        ]
        return completions, samples

    def explore(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: int,
        step: int,
        progress: Progress | None = None,
    ) -> Exploration:
        """One exploration step: lines 7 to 10 of DeepSeekMath's Algorithm 1."""
        started = time.perf_counter()
        completions, samples = self.sample(policy, prompts, group_size, sampling, seed, step, progress)
        sampled = time.perf_counter()
        scores = self.scorer(samples)
        self.scorer.check(scores)
        scored = time.perf_counter()

        rollouts = Rollouts.from_lists(
            prompts=[prompt.token_ids for prompt in prompts],
            group=[row // group_size for row in range(len(completions))],
            completions=[completion.token_ids for completion in completions],
        )
        advantage = self.advantage(torch.tensor(scores.total), rollouts.group)
        rollouts.advantage = spread(advantage, rollouts.lengths)
        float32 = policy.model.dtype == torch.float32 and not torch.is_autocast_enabled(policy.device.type)
        if self.engine.exact and sampling.unfiltered and float32:
            rollouts.sampler_logp = torch.tensor([logp for c in completions for logp in c.logp])
        return Exploration(samples, scores, rollouts, {"explore": sampled - started, "reward": scored - sampled})
