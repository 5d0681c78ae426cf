"""Line 5 of Algorithm 1: the questions of an exploration step, and the source of its rollouts."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from grpo_lightning import ranks
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.grpo.explore import Exploration, Explorer
from grpo_lightning.grpo.step import Observer
from grpo_lightning.maths.filters import DynamicSampling, GroupFilter
from grpo_lightning.policy.policy import Policy
from grpo_lightning.tasks.task import Questions
from grpo_lightning.types import RandomKey, Stateful


@dataclass(slots=True)
class SourceInputs:
    """The parts and sizes of the run that a source of rollouts uses."""

    policy: Policy
    """π_θ; its weights change with every update."""
    explorer: Explorer
    """Samples and scores completions."""
    data: Questions
    """The stream of questions."""
    sampling: Sampling
    """Temperature, length limit and filters of sampling."""
    prompts_per_step: int
    """Prompts per exploration step, over all ranks together."""
    group_size: int
    """G, completions per prompt."""
    seed: int
    """Seed of the random numbers that completions are sampled with."""
    dynamic_sampling: DynamicSampling | None = None
    """The filter of groups; None keeps all groups of a step's first round."""
    observers: Sequence[Observer] = field(default_factory=list)
    """Their `exploring` and `explored` are called as completions are sampled."""


class RolloutSource(Stateful, ABC):
    """The source of a step's rollouts. Derive from it to overlap sampling with training, or to read rollouts.

    Rollouts may come from an earlier policy: `Exploration.policy_version` gives its version. They must then have
    `sampler_logp`, which becomes log π_old unless `model.old_policy` is `Proximal`.
    """

    inputs: SourceInputs
    """The parts and sizes of the run; set by `setup`."""
    is_late: bool = False
    """True if rollouts are known before the run to come from an earlier policy."""
    num_copies: int = 0
    """Copies of the trained weights that the source keeps on each device."""

    def setup(self, inputs: SourceInputs) -> None:
        """Connects the source to the run, before its first step and before `load_state_dict`."""
        self.inputs = inputs

    @abstractmethod
    def next(self, step: int) -> Exploration:
        """Returns the rollouts of an exploration step on this rank. It is called in eval mode, without gradients.

        `rollouts` holds `group_size` completions per prompt. All ranks together have `prompts_per_step` prompts with
        different ids; a rank may have no prompt.

        Args:
            step: Index of the exploration step, from 0.
        """


class Synchronous(RolloutSource):
    """Samples from the current policy: every step is on policy, and training waits for sampling.

    With dynamic sampling it samples further prompts until enough groups pass the filter.
    """

    def __init__(self) -> None:
        self.num_questions = 0
        """Questions taken from the stream so far. The next question has this number as its id."""

    def next(self, step: int) -> Exploration:
        inputs = self.inputs
        dynamic = inputs.dynamic_sampling
        num_prompts = inputs.prompts_per_step
        max_rounds = dynamic.max_rounds if dynamic else 1
        first_id = self.num_questions
        rounds: list[Exploration] = []
        passed_ids: set[int] = set()

        # Each round takes as many new questions as groups are missing.
        with inputs.explorer.engine.awake():
            while len(passed_ids) < num_prompts and len(rounds) < max_rounds:
                ids = range(self.num_questions, self.num_questions + num_prompts - len(passed_ids))
                self.num_questions = ids.stop
                rounds.append(self._explore(ids, step))
                passed_ids |= passing(dynamic.filter, rounds[-1]) if dynamic else {*ids}
        inputs.explorer.scorer.stop_if_broken()

        # The step learns from the groups that passed. If they are too few, failed groups fill it up.
        sampled_ids = range(first_id, self.num_questions)
        failed_ids = [id for id in sampled_ids if id not in passed_ids]
        step_ids = {*(sorted(passed_ids) + failed_ids)[:num_prompts]}

        # All sampled groups are reported, but only the rollouts of the step's groups are learned from.
        exploration = Exploration.concat(rounds)
        rows = [row for row, id in enumerate(exploration.prompt_ids) if id in step_ids]
        rollouts = exploration.rollouts.select(torch.tensor(rows, dtype=torch.int64))
        metrics: dict[str, float] = {}
        if dynamic:
            metrics["rollout/rounds"] = float(len(rounds))
            metrics["rollout/groups_kept"] = len(passed_ids) / len(sampled_ids)
        return replace(exploration, rollouts=rollouts, metrics=metrics)

    def _explore(self, ids: range, step: int) -> Exploration:
        """Samples and scores completions of the questions `ids`, of which each rank takes some."""
        inputs = self.inputs
        prompts = inputs.data.ask(ids)
        for observer in inputs.observers:
            observer.exploring(len(prompts) * inputs.group_size)
        key = RandomKey(inputs.seed, step)
        listeners = [observer.explored for observer in inputs.observers]
        return inputs.explorer.explore(inputs.policy, prompts, inputs.group_size, inputs.sampling, key, listeners)

    def state_dict(self) -> dict[str, Any]:
        # The key is older than the attribute: checkpoints have it.
        return {"drawn": self.num_questions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_questions = state["drawn"]


def passing(group_filter: GroupFilter, exploration: Exploration) -> set[int]:
    """Returns the ids of the prompts, of all ranks, whose groups pass the filter. Every rank must call it."""
    rollouts = exploration.rollouts
    # A completion of several rows counts once, by its first row.
    is_first_row = rollouts.is_first_row
    reward = exploration.scores.values(group_filter.reward)[rollouts.sample_index[is_first_row]]
    passes = group_filter(reward, rollouts.group[is_first_row], len(rollouts.prompt_lengths))
    groups_of_rows = zip(exploration.prompt_ids, rollouts.group.tolist(), strict=True)
    passed_ids = [id for id, group in groups_of_rows if passes[group]]
    return {id for rank_ids in ranks.gather(passed_ids) for id in rank_ids}
