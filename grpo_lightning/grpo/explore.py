"""Lines 7 and 8 of Algorithm 1: sample completions of the prompts, and score them."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from grpo_lightning.engines.engine import RolloutEngine
from grpo_lightning.engines.sampler import Sampler, SingleTurn
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.maths.reward_batch import RewardBatch
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.policy.policy import Policy
from grpo_lightning.rewards.results import Scores
from grpo_lightning.rewards.scorer import Scorer
from grpo_lightning.types import Prompt, RandomKey, Sample


@dataclass(slots=True, frozen=True)
class Exploration:
    """The completions that this rank sampled in one exploration step, and their scores."""

    samples: list[Sample]
    """Every completion that was sampled: G per prompt, group after group."""
    scores: Scores
    """The scores of all samples, by every reward."""
    rollouts: Rollouts
    """The completions that are learned from: some or all of `samples`.

    `Rollouts.sample_index` of a row is an index into `samples`. A completion usually is one row (see `Rollouts`).
    """
    seconds: dict[str, float]
    """`explore`: seconds spent sampling. `reward`: seconds spent waiting for scores after sampling."""
    policy_version: int
    """`Policy.version` of the weights that sampled the completions. While the policy has it, rollouts are on policy."""
    sampler_is_policy: bool = False
    """True if no filter such as top-p was on: `rollouts.sampler_logp` are the policy's log-probs up to rounding."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the source, by their full names; the same on every rank."""

    @classmethod
    def concat(cls, rounds: Sequence["Exploration"]) -> "Exploration":
        """Concatenates the sampling rounds of one step."""
        num_samples = [len(round.samples) for round in rounds]
        return cls(
            samples=[sample for round in rounds for sample in round.samples],
            scores=Scores.concat([round.scores for round in rounds]),
            rollouts=Rollouts.concat([round.rollouts for round in rounds], num_samples),
            seconds={name: sum(round.seconds[name] for round in rounds) for name in rounds[0].seconds},
            policy_version=min(round.policy_version for round in rounds),
            sampler_is_policy=all(round.sampler_is_policy for round in rounds),
            metrics={name: value for round in rounds for name, value in round.metrics.items()},
        )

    @property
    def prompt_ids(self) -> list[int]:
        """[B] the prompt id of each row of the rollouts."""
        return [self.samples[index].prompt.id for index in self.rollouts.sample_index.tolist()]

    @property
    def rewards(self) -> RewardBatch:
        """The rewards of the completions that are learned from, on the CPU. Rewards without a weight are left out."""
        rollouts = self.rollouts
        # A completion of several rows is rewarded once.
        is_first_row = rollouts.is_first_row
        indices = rollouts.sample_index[is_first_row].tolist()
        return self.scores.table(indices, rollouts.group[is_first_row].cpu(), rollouts.lengths_by_completion.cpu())


@dataclass(eq=False)
class Explorer:
    """Samples groups of completions and scores them."""

    engine: RolloutEngine
    """Samples tokens."""
    scorer: Scorer
    """Scores samples by the rewards."""
    sampler: Sampler = field(default_factory=SingleTurn)
    """Leads the engine through one turn per sample, or through several with an environment."""

    def settle(self) -> None:
        """Waits for completions of later steps that are being sampled. A source that samples ahead replaces it."""

    def close(self) -> None:
        """Closes engine, rewards and sampler. May be called twice."""
        self.engine.close()
        self.scorer.close()
        self.sampler.close()

    def sample(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        key: RandomKey,
        listeners: Sequence[Callable[[Sample], None]] = (),
    ) -> list[Sample]:
        """Samples `group_size` completions of each prompt. Every rank must call it, even without prompts.

        Args:
            policy: The policy to sample from. Sharded weights are gathered for the engine.
            prompts: The prompts of this rank.
            group_size: G, completions per prompt.
            sampling: Temperature, length limit and filters.
            key: Seed and step, which determine the random numbers.
            listeners: Called with each sample as soon as it has ended.

        Returns:
            The samples, group after group.
        """
        sample_by_index: dict[int, Sample] = {}
        self.settle()
        # In this context the engine has the current weights. `closing` stops the engine if a listener raises.
        with (
            self.engine.ready(policy),
            closing(self.sampler.draw(self.engine, policy, prompts, group_size, sampling, key)) as indexed_samples,
        ):
            # Samples come in the order in which their completions end, each with its index.
            for index, sample in indexed_samples:
                sample_by_index[index] = sample
                for listener in listeners:
                    listener(sample)
        return [sample_by_index[index] for index in range(len(prompts) * group_size)]

    def explore(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        key: RandomKey,
        listeners: Sequence[Callable[[Sample], None]] = (),
    ) -> Exploration:
        """Samples G completions of each prompt (line 7), and computes their rewards (line 8).

        It takes the arguments of `sample`.
        """
        started = time.perf_counter()
        # `scoring.add` scores a sample as soon as it has ended, while the engine goes on with the others.
        with self.scorer.begin() as scoring:
            samples = self.sample(policy, prompts, group_size, sampling, key, [scoring.add, *listeners])
            sampled = time.perf_counter()
            scores = scoring.scores(samples)
        return Exploration(
            samples=samples,
            scores=scores,
            rollouts=self.sampler.rollouts(samples, group_size, sampling.temperature),
            seconds={"explore": sampled - started, "reward": time.perf_counter() - sampled},
            policy_version=policy.version,
            sampler_is_policy=sampling.unfiltered,
        )
