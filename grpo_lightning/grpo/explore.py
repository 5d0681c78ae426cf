"""Lines 7 and 8: draw samples of the prompts, score them, and make rollouts of them."""

import time
from collections.abc import Callable, Sequence
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


@dataclass(slots=True)
class Exploration:
    """The completions that this rank sampled: prompts x G, group after group."""

    samples: list[Sample]
    scores: Scores
    rollouts: Rollouts
    """The completions that are learned from; `Rollouts.row` is an index into `samples`, with several rows or none."""
    seconds: dict[str, float]
    """`explore`: seconds spent sampling. `reward`: seconds spent waiting for scores after sampling."""
    policy_version: int
    """`Policy.version` of the weights that drew the completions. They are on policy while it is the policy's own."""
    sampler_is_policy: bool = False
    """True if `rollouts.sampler_logp` should equal that policy's log-probs up to rounding: no filter was on."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the source of the rollouts logs with the step, by the whole name; the same on every rank."""

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
        """[B] the prompt's id of each completion that is learned from."""
        return [self.samples[row].prompt.id for row in self.rollouts.row.tolist()]

    @property
    def rewards(self) -> RewardBatch:
        """The rewards with a weight, of the completions that are learned from; on the CPU."""
        rollouts = self.rollouts
        rows = rollouts.row[rollouts.begins].tolist()
        return self.scores.table(rows, rollouts.group[rollouts.begins].cpu(), rollouts.whole_lengths.cpu())


@dataclass(eq=False)
class Explorer:
    """Samples groups of completions and scores them."""

    engine: RolloutEngine
    """Draws the completions."""
    scorer: Scorer
    sampler: Sampler = field(default_factory=SingleTurn)
    """Makes samples of what the engine draws."""
    settle: Callable[[], None] = field(default_factory=lambda: lambda: None, init=False)
    """Waits for draws ahead."""

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
        """`group_size` samples of each prompt, group after group; listeners are told of each as soon as it has ended.

        Every rank must call it, even without prompts: sharded weights are gathered for it.
        """
        samples: dict[int, Sample] = {}
        work = policy, prompts, group_size, sampling, key
        self.settle()
        with self.engine.ready(policy), closing(self.sampler.draw(self.engine, *work)) as drawn:
            for row, sample in drawn:
                samples[row] = sample
                for listener in listeners:
                    listener(sample)
        return [samples[row] for row in range(len(prompts) * group_size)]

    def explore(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        key: RandomKey,
        listeners: Sequence[Callable[[Sample], None]] = (),
    ) -> Exploration:
        """Samples G outputs of each prompt (line 7) and computes their rewards (line 8)."""
        started = time.perf_counter()
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
