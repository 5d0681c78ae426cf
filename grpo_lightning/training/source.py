"""Where the rollouts of an exploration step come from."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_lightning import ranks
from grpo_lightning.engines.sampling import Sampling
from grpo_lightning.policy.policy import Policy
from grpo_lightning.training.data import PromptDataModule
from grpo_lightning.training.dynamic_sampling import DynamicSampling
from grpo_lightning.training.explorer import Exploration, Explorer
from grpo_lightning.training.observer import Observer
from grpo_lightning.types import Prompt


@dataclass(slots=True)
class SourceInputs:
    """The run as a source of rollouts needs it."""

    policy: Policy
    """π_θ, as it is at the moment."""
    explorer: Explorer
    """Samples and scores."""
    data: PromptDataModule
    """The stream of training questions."""
    sampling: Sampling
    """The distribution that completions are drawn from."""
    prompts_per_step: int
    """Over all ranks together."""
    group_size: int
    """G, the completions per prompt."""
    seed: int
    """Seed of the random numbers that completions are drawn with."""
    dynamic_sampling: DynamicSampling | None = None
    """Which groups to keep; None keeps the first drawn."""
    observers: Sequence[Observer] = field(default_factory=list)
    """Told how the exploration goes."""


class RolloutSource(ABC):
    """Where the rollouts of a step come from. Derive from it to overlap sampling with training, or to read rollouts.

    The rollouts may be of an earlier policy: they say so in `Exploration.policy_version`. They must then have
    `sampler_logp`, which becomes log π_old unless `model.old_policy` is `Proximal`.
    """

    inputs: SourceInputs
    is_late: bool = False
    """Whether it is certain, before the run, that rollouts will be of an earlier policy."""
    num_copies: int = 0
    """Copies of the trained weights that it keeps on each device."""

    def setup(self, inputs: SourceInputs) -> None:
        """Connects the source to the run, before its first step and before `load_state_dict`."""
        self.inputs = inputs

    @abstractmethod
    def next(self, step: int) -> Exploration:
        """The rollouts of exploration step `step` on this rank, from 0. Called without gradients, in eval mode.

        `rollouts` holds `group_size` completions of each prompt. All ranks together have `prompts_per_step` prompts,
        each with an id of its own; a rank may have none of them.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold, so that a resumed run continues exactly. It is the same on every rank."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""


class Synchronous(RolloutSource):
    """Samples from the policy as it is now: every step is on policy, and training waits for sampling.

    With dynamic sampling it draws further prompts until enough groups pass the filter.
    """

    def __init__(self) -> None:
        self.drawn = 0
        """Questions drawn from the stream so far."""

    def next(self, step: int) -> Exploration:
        """Samples and scores, in one round or, with dynamic sampling, in several."""
        dynamic, wanted = self.inputs.dynamic_sampling, self.inputs.prompts_per_step
        rounds: list[Exploration] = []
        kept: list[int] = []
        others: list[int] = []
        with self.inputs.explorer.awake():
            while len(kept) < wanted and len(rounds) < (dynamic.max_rounds if dynamic else 1):
                ids = range(self.drawn, self.drawn + wanted - len(kept))
                self.drawn = ids.stop
                rounds.append(self._explore(self._mine(ids), step))
                passed = {*dynamic.passing(rounds[-1])} if dynamic else {*ids}
                kept += [id for id in ids if id in passed]
                others += [id for id in ids if id not in passed]
        self.inputs.explorer.scorer.stop_if_broken()
        exploration = Exploration.concat(rounds)
        chosen = {*(kept + others)[:wanted]}
        rows = [row for row, id in enumerate(exploration.prompt_ids) if id in chosen]
        exploration.rollouts = exploration.rollouts.select(torch.tensor(rows, dtype=torch.int64))
        if dynamic:
            fraction = len(kept) / (len(kept) + len(others))
            exploration.metrics = {"rollout/rounds": len(rounds), "rollout/groups_kept": fraction}
        return exploration

    def _mine(self, ids: range) -> list[Prompt]:
        """This rank's prompts: they are dealt in turn, so that the minibatches are the same for any number of ranks."""
        data = self.inputs.data
        return [data.prompt(data.question(id), id) for id in ids[ranks.rank() :: ranks.world_size()]]

    def _explore(self, prompts: Sequence[Prompt], step: int) -> Exploration:
        inputs = self.inputs
        for observer in inputs.observers:
            observer.exploring(len(prompts) * inputs.group_size)

        def progress(num_completions: int) -> None:
            for observer in inputs.observers:
                observer.explored(num_completions)

        return inputs.explorer.explore(
            inputs.policy, prompts, inputs.group_size, inputs.sampling, inputs.seed, step, progress
        )

    def state_dict(self) -> dict[str, Any]:
        """The number of questions drawn so far."""
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues the stream of questions where it was."""
        self.drawn = state["drawn"]
