"""Line 5: the questions of an exploration step, and the rollouts that come of them."""

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
from grpo_lightning.tasks.base import Questions
from grpo_lightning.types import RandomKey, Stateful


@dataclass(slots=True)
class SourceInputs:
    """The run as a source of rollouts needs it."""

    policy: Policy  # π_θ, as it is at the moment
    explorer: Explorer
    data: Questions
    sampling: Sampling
    prompts_per_step: int  # over all ranks together
    group_size: int  # G, the completions per prompt
    seed: int
    dynamic_sampling: DynamicSampling | None = None  # the groups to keep; None keeps the first drawn
    observers: Sequence[Observer] = field(default_factory=list)


class RolloutSource(Stateful, ABC):
    """Where the rollouts of a step come from. Derive from it to overlap sampling with training, or to read rollouts.

    The rollouts may be of an earlier policy: they say so in `Exploration.policy_version`. They must then have
    `sampler_logp`, which becomes log π_old unless `model.old_policy` is `Proximal`.
    """

    inputs: SourceInputs
    is_late: bool = False  # whether it is certain, before the run, that rollouts will be of an earlier policy
    num_copies: int = 0  # copies of the trained weights that it keeps on each device

    def setup(self, inputs: SourceInputs) -> None:
        """Connects the source to the run, before its first step and before `load_state_dict`."""
        self.inputs = inputs

    @abstractmethod
    def next(self, step: int) -> Exploration:
        """The rollouts of exploration step `step` on this rank, from 0. Called without gradients, in eval mode.

        `rollouts` holds `group_size` completions of each prompt. All ranks together have `prompts_per_step` prompts,
        each with an id of its own; a rank may have none of them.
        """


class Synchronous(RolloutSource):
    """Samples from the policy as it is now: every step is on policy, and training waits for sampling.

    With dynamic sampling it draws further prompts until enough groups pass the filter.
    """

    def __init__(self) -> None:
        self.drawn = 0  # questions drawn from the stream so far

    def next(self, step: int) -> Exploration:
        dynamic, wanted = self.inputs.dynamic_sampling, self.inputs.prompts_per_step
        rounds: list[Exploration] = []
        first, kept = self.drawn, set[int]()
        with self.inputs.explorer.engine.awake():
            while len(kept) < wanted and len(rounds) < (dynamic.max_rounds if dynamic else 1):
                ids = range(self.drawn, self.drawn + wanted - len(kept))
                self.drawn = ids.stop
                rounds.append(self._explore(ids, step))
                kept |= passing(dynamic.filter, rounds[-1]) if dynamic else {*ids}
        self.inputs.explorer.scorer.stop_if_broken()
        exploration, tried = Exploration.concat(rounds), range(first, self.drawn)
        chosen = {*sorted(tried, key=lambda id: id not in kept)[:wanted]}  # those kept come first
        rows = [row for row, id in enumerate(exploration.prompt_ids) if id in chosen]
        rollouts = exploration.rollouts.select(torch.tensor(rows, dtype=torch.int64))
        metrics = {"rollout/rounds": float(len(rounds)), "rollout/groups_kept": len(kept) / len(tried)}
        return replace(exploration, rollouts=rollouts, metrics=metrics if dynamic else {})

    def _explore(self, ids: range, step: int) -> Exploration:
        """Explores this rank's questions."""
        run = self.inputs
        prompts = run.data.ask(ids)
        for observer in run.observers:
            observer.exploring(len(prompts) * run.group_size)
        key, told = RandomKey(run.seed, step), [observer.explored for observer in run.observers]
        return run.explorer.explore(run.policy, prompts, run.group_size, run.sampling, key, told)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


def passing(group_filter: GroupFilter, exploration: Exploration) -> set[int]:
    """The ids of the prompts, of all ranks, whose groups pass the filter. Every rank must call it."""
    rollouts = exploration.rollouts
    reward = exploration.scores.values(group_filter.reward)[rollouts.row[rollouts.begins]]
    passes = group_filter(reward, rollouts.group[rollouts.begins], len(rollouts.prompt_lengths))
    rows = zip(exploration.prompt_ids, rollouts.group.tolist(), strict=True)
    return {id for ids in ranks.gather([id for id, group in rows if passes[group]]) for id in ids}
