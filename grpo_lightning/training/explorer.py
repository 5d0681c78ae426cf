"""Exploration: prompts -> engine -> rewards = samples, scores and their rollouts."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from grpo_lightning.engines.base import RolloutEngine
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.engines.stop_strings import text_up_to
from grpo_lightning.maths.reward_batch import RewardBatch, SegmentRewards
from grpo_lightning.maths.rollouts import Rollouts
from grpo_lightning.plugins.conversations.running import Conversations
from grpo_lightning.policy.policy import Policy
from grpo_lightning.rewards.results import Scores, Segment
from grpo_lightning.rewards.scorer import Scorer, Scoring
from grpo_lightning.types import Completion, Piece, Prompt, RandomKey, Request, Sample, UsageError

Progress = Callable[[int], None]
"""Called with the number of completions that have just ended."""


@dataclass(slots=True)
class Exploration:
    """What this rank sampled: prompts x G completions, group after group."""

    samples: list[Sample]
    scores: Scores
    rollouts: Rollouts
    """The completions that are learned from; `Rollouts.row` is an index into `samples`.

    A conversation whose history a chat template rewrites has several rows, one whose environment failed none."""
    seconds: dict[str, float]
    """Seconds spent in `explore` (sampling), and in `reward` what was waited for scores after it."""
    policy_version: int
    """`Policy.version` of the weights that drew the completions. They are on policy while it is the policy's own."""
    sampler_is_policy: bool = False
    """Whether `rollouts.sampler_logp` should equal that policy's log-probs up to rounding: no filter was on."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the source of the rollouts logs with the step, by the whole name; the same on every rank."""

    @classmethod
    def concat(cls, parts: Sequence["Exploration"]) -> "Exploration":
        """Joins several rounds of one step."""
        rollouts = Rollouts.concat([part.rollouts for part in parts])
        # Rows are indices into the samples, of which a part may have more than rollouts.
        firsts = accumulate((len(part.samples) for part in parts), initial=0)
        rollouts.row = torch.cat([part.rollouts.row + first for part, first in zip(parts, firsts, strict=False)])
        return cls(
            samples=[sample for part in parts for sample in part.samples],
            scores=Scores.concat([part.scores for part in parts]),
            rollouts=rollouts,
            seconds={name: sum(part.seconds[name] for part in parts) for name in parts[0].seconds},
            policy_version=min(part.policy_version for part in parts),
            sampler_is_policy=all(part.sampler_is_policy for part in parts),
            metrics={name: value for part in parts for name, value in part.metrics.items()},
        )

    @property
    def prompt_ids(self) -> list[int]:
        """[B] the prompt's id of each completion that is learned from."""
        return [self.samples[row].prompt.id for row in self.rollouts.row.tolist()]

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
    """

    conversations: Conversations | None = None
    """What makes a completion of several turns; None: there is one turn, and no environment."""

    def __init__(self, engine: RolloutEngine, scorer: Scorer) -> None:
        self.engine = engine
        self.scorer = scorer
        self._awake = False

    def longest(self, sampling: Sampling) -> int:
        """The most tokens that a completion can have, drawn ones."""
        turns = 1 if self.conversations is None else self.conversations.limits.max_turns
        return turns * sampling.max_new_tokens

    def close(self) -> None:
        """Closes the engine, the rewards and the environment. May be called twice."""
        self.engine.close()
        self.scorer.close()
        if self.conversations is not None:
            self.conversations.close()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """The engine has its device memory inside, and gives it back at the end.

        `sample` does this by itself. Hold it around several calls, so that the engine wakes once.
        """
        if self._awake:
            yield
            return
        self.engine.wake()
        self._awake = True
        try:
            yield
        finally:
            self._awake = False
            self.engine.sleep()

    @contextmanager
    def _synced(self, policy: Policy) -> Iterator[None]:
        """The engine draws from `policy` as it is now. Whole weights are on a device only as long as it reads them."""
        if self.engine.shares_weights:
            with policy.gathered():
                if not self.engine.has(policy):
                    self.engine.sync(policy)
                yield
            return
        if not self.engine.has(policy):
            with nullcontext() if self.engine.gathers_weights else policy.gathered():
                self.engine.sync(policy)
        yield

    def sample(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: int,
        step: int,
        progress: Progress | None = None,
        scoring: Scoring | None = None,
    ) -> tuple[list[Completion], list[Sample]]:
        """`group_size` completions of each prompt, as the engine and as the rewards see them.

        Every rank must call it, even without prompts: sharded weights are gathered for it. Of a conversation with an
        environment the completion is the last turn; `Sample.conversation` has all of it.

        `scoring` gets completions as they end; it gets no conversations.
        """
        if self.conversations is not None:
            return self._converse(
                self.conversations, policy, prompts, group_size, sampling, RandomKey(seed, step), progress
            )
        requests = Request.from_prompts(prompts, group_size)
        with self.awake(), self._synced(policy):
            if not requests:
                return [], []
            found: dict[int, tuple[Completion, Sample]] = {}
            with closing(self.engine.generate(requests, sampling, RandomKey(seed, step))) as drawn:
                for row, completion in drawn:
                    text = str(policy.tokenizer.decode(completion.written, skip_special_tokens=True))
                    found[row] = completion, sample_of(prompts[row // group_size], text, completion)
                    if scoring is not None:
                        scoring.add(found[row][1])
                    if progress is not None:
                        progress(1)
        rows = range(len(requests))
        return [found[row][0] for row in rows], [found[row][1] for row in rows]

    def _converse(
        self,
        conversations: Conversations,
        policy: Policy,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        key: RandomKey,
        progress: Progress | None,
    ) -> tuple[list[Completion], list[Sample]]:
        """As `sample`, of conversations. Ranks need not have equally many turns: weights are gathered around all."""
        with self.awake(), self._synced(policy):
            samples = conversations.run(self.engine, policy, prompts, group_size, sampling, key, progress)
        turns = [
            Completion(sample.token_ids[sample.first :], None, sample.finish_reason, sample.stop_string)
            for sample in samples
        ]
        return turns, samples

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
        """Samples and scores: lines 7 and 8 of DeepSeekMath's Algorithm 1. No prompts give an empty exploration."""
        started = time.perf_counter()
        with self.scorer.begin() as scoring:
            completions, samples = self.sample(policy, prompts, group_size, sampling, seed, step, progress, scoring)
            sampled = time.perf_counter()
            scores = scoring.scores(samples)
        scored = time.perf_counter()

        if self.conversations is None:
            rollouts = Rollouts.from_lists(
                prompts=[prompt.token_ids for prompt in prompts],
                group=[row // group_size for row in range(len(completions))],
                completions=[completion.token_ids for completion in completions],
            )
            rollouts.sampler_logp = sampler_logp(completions)
        else:
            rollouts = of_conversations(samples, group_size)
        rollouts.temperature = sampling.temperature
        rollouts.truncated = torch.tensor([sample.truncated for sample in samples], dtype=torch.bool)[rollouts.row]
        return Exploration(
            samples=samples,
            scores=scores,
            rollouts=rollouts,
            seconds={"explore": sampled - started, "reward": scored - sampled},
            policy_version=policy.version,
            sampler_is_policy=sampling.unfiltered,
        )

    def rewards(self, exploration: Exploration) -> RewardBatch:
        """The rewards with a weight, of the completions that are learned from, pieces taken together; on the CPU."""
        rollouts = exploration.rollouts
        begins = rollouts.begins
        rows = rollouts.row[begins].tolist()
        counting = [(r.weight, exploration.scores.results[r.name]) for r in self.scorer.rewards if r.weight != 0]
        value = torch.tensor([[result.value[row] for row in rows] for _, result in counting], dtype=torch.float64)
        return RewardBatch(
            value=value.reshape(len(counting), len(rows)),
            weight=torch.tensor([weight for weight, _ in counting], dtype=torch.float64),
            group=rollouts.group[begins].cpu(),
            lengths=rollouts.whole_lengths.cpu(),
            segments=[segment_rewards(result.segments, rows) for _, result in counting],
        )


def sample_of(prompt: Prompt, text: str, completion: Completion) -> Sample:
    """What the rewards see of a completion, which was decoded to `text`."""
    return Sample(
        prompt,
        text_up_to(text, completion.stop_string),
        completion.token_ids,
        completion.finish_reason,
        completion.stop_string,
    )


def of_conversations(samples: Sequence[Sample], group_size: int) -> Rollouts:
    """The pieces of conversations as completions, without those whose environment failed.

    A group's prompt is what all of its pieces begin with; what only some begin with is given in these.

    Args:
        samples: The conversations, group after group.
        group_size: Conversations per prompt.
    """
    pieces = [
        (row, piece)
        for row, sample in enumerate(samples)
        if sample.conversation and not sample.failed
        for piece in sample.conversation.pieces
    ]
    by_group: dict[int, list[Piece]] = {}
    for row, piece in pieces:
        by_group.setdefault(row // group_size, []).append(piece)
    prompts = {group: common_prompt(own) for group, own in by_group.items()}
    index = {group: number for number, group in enumerate(prompts)}
    starts = [len(prompts[row // group_size]) for row, _ in pieces]
    rollouts = Rollouts.from_lists(
        prompts=list(prompts.values()),
        group=[index[row // group_size] for row, _ in pieces],
        completions=[piece.token_ids[start:] for start, (_, piece) in zip(starts, pieces, strict=True)],
        drawn=[piece.drawn[start:] for start, (_, piece) in zip(starts, pieces, strict=True)],
    )
    rollouts.row = torch.tensor([row for row, _ in pieces], dtype=torch.int64)
    rollouts.sampler_logp = sampler_logp([piece for _, piece in pieces])
    return rollouts


def common_prompt(pieces: Sequence[Piece]) -> list[int]:
    """The tokens that all pieces begin with, before any of them was drawn.

    Raises:
        UsageError: There are none.
    """
    first, *others = (piece.token_ids[: piece.drawn.index(True)] for piece in pieces)
    length = len(first)
    for ids in others:
        agree = (own == other for own, other in zip(first[:length], ids, strict=False))
        length = next((at for at, same in enumerate(agree) if not same), min(length, len(ids)))
    if not length:
        raise UsageError(
            "data.environment: conversations about one question begin with different tokens; let them begin with the "
            "same message, or with data.system"
        )
    return first[:length]


def sampler_logp(completions: Sequence[Completion | Piece]) -> Tensor | None:
    """[N] float32 log-probs that the engine recorded; None if it knows none, or there are no completions."""
    recorded = [completion.logp for completion in completions if completion.logp is not None]
    assert len(recorded) in (0, len(completions)), "an engine records the log-probs of all completions or of none"
    return torch.tensor([p for logp in recorded for p in logp], dtype=torch.float32) if recorded else None


def segment_rewards(scores: list[list[Segment]] | None, rows: Sequence[int]) -> SegmentRewards | None:
    """The segments of the completions `rows`, from those by sample; `SegmentRewards.row` is an index into `rows`."""
    if scores is None:
        return None
    segments = [(index, segment) for index, row in enumerate(rows) for segment in scores[row]]
    return SegmentRewards(
        row=torch.tensor([index for index, _ in segments], dtype=torch.int64),
        end=torch.tensor([segment.end for _, segment in segments], dtype=torch.int64),
        value=torch.tensor([segment.value for _, segment in segments], dtype=torch.float64),
    )
