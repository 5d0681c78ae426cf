"""Line 12 of Algorithm 1: a reward model that learns at the end of each iteration, with replay of earlier ones."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import asdict
from random import Random
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from grpo_lightning.plugins.learned.agreement import Agreement
from grpo_lightning.plugins.learned.labelled import LabelledGroup
from grpo_lightning.plugins.learned.model import RewardModel
from grpo_lightning.plugins.learned.replay import Replay, ReplayBuffer, mixed
from grpo_lightning.plugins.learned.update import RewardUpdate, Trial, scored

log = logging.getLogger(__name__)


class Iterations:
    """The iterations of a reward model: the data it has learned from, its updates, and how much it has forgotten."""

    def __init__(self, model: RewardModel, update: RewardUpdate, replay: Replay) -> None:
        self.model = model
        self.update = update
        self.replay = replay
        self.version = 0
        """The number of updates accepted so far."""
        self.iteration = 0
        """The number of iterations ended so far. In the history they count from 1; 0 is the data of `seed.jsonl`."""
        num_test = min(max(round(replay.buffer_size * replay.held_out), 1), replay.buffer_size - 1)
        self.history = ReplayBuffer(replay.buffer_size - num_test)
        self.test = ReplayBuffer(num_test)
        self.pending: list[LabelledGroup] = []
        """The data of the running iteration, and of those that wait for it."""
        self._best: dict[int, float] = {}

    def remember(self, iteration: int, groups: Sequence[LabelledGroup]) -> None:
        """Adds the prompts of an iteration to the buffers."""
        rng = Random(f"{self.replay.seed} remember {iteration}")
        for buffer, own in zip((self.history, self.test), split(groups, self.replay.held_out), strict=True):
            buffer.add(iteration, own, rng)

    def end(self, name: str) -> dict[str, float]:
        """Learns from the pending data and remembers it; returns the metrics."""
        groups = self.pending
        new, held_out = split(groups, self.replay.held_out)
        learns = self.update.num_passes > 0
        self._best |= self._accuracies(known=self._best)  # The iteration remembered last has none yet.
        metrics = {"accepted": 0.0, "replayed": 0.0}
        if new and held_out and learns:
            rng = Random(f"{self.replay.seed} train {self.iteration}")
            drawing = (new, [*self.history], self.update.batch_size, self.replay.fraction, rng)
            batches = [batch for _ in range(self.update.num_passes) for batch in mixed(*drawing)]
            trial = self.update(self.model, batches, held_out, [*self.test])
            metrics |= self._report(trial, name)
        now = self._accuracies()
        # As in Chaudhry et al. (arXiv 1801.10112, Eq. 3), but never negative, as the best includes the present.
        self._best |= {iteration: max(self._best[iteration], accuracy) for iteration, accuracy in now.items()}
        losses = [self._best[iteration] - accuracy for iteration, accuracy in now.items()]
        metrics |= {"version": self.version, "forgetting": sum(losses) / max(len(losses), 1)}
        if waits := bool(groups) and learns and not (new and held_out):
            rank_zero_only(log.warning)(
                "%s: of this iteration's %d prompts %s held out (held_out=%g), so no update can be trained and "
                "judged; they wait for the next iteration. Give an iteration more prompts, or change held_out",
                name, len({g.prompt for g in groups}), "all are" if held_out else "none is", self.replay.held_out,
            )  # fmt: skip
        else:
            self.remember(self.iteration + 1, groups)
        self.pending = groups[-self.history.size :] if waits else []
        self.iteration += 1
        return metrics | {"remembered": len(self.history)}

    def _report(self, trial: Trial, name: str) -> dict[str, float]:
        """Counts and prints an update; returns its metrics."""
        accepted = self.update.accepts(trial)
        self.version += accepted
        before, after = (quality.accuracy for quality in trial.new)
        metrics = {"accepted": float(accepted), "replayed": trial.replayed, "new_before": before, "new_after": after}
        old = "no earlier iterations"
        if trial.old is not None:
            metrics |= {"old_before": trial.old[0].accuracy, "old_after": trial.old[1].accuracy}
            old = f"on earlier iterations {trial.old[0].accuracy:.3f} -> {trial.old[1].accuracy:.3f}"
        rank_zero_info(
            f"{name}: iteration {self.iteration + 1}, held-out accuracy {before:.3f} -> {after:.3f}, {old}: "
            + (f"accepted as version {self.version}" if accepted else f"undone, version {self.version} stays")
        )
        return metrics

    def _accuracies(self, known: Collection[int] = ()) -> dict[int, float]:
        """The accuracy on the held-out prompts of every earlier iteration that is not `known`."""
        now = {}
        for iteration, groups in self.test.by_iteration().items():
            if iteration not in known:
                score, label, group = scored(self.model, groups)
                now[iteration] = Agreement(score.sigmoid(), label, group).accuracy()
        return now

    def state_dict(self) -> dict[str, Any]:
        """Weights, buffers, and the data of the running iteration."""
        return {
            "model": self.model.model.state_dict(),
            "numbers": [self.version, self.iteration, self._best],
            "history": self.history.state_dict(),
            "test": self.test.state_dict(),
            "pending": [asdict(group) for group in self.pending],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.model.model.load_state_dict(state["model"])
        self.version, self.iteration, self._best = state["numbers"]
        self.history.load_state_dict(state["history"])
        self.test.load_state_dict(state["test"])
        self.pending = [LabelledGroup.from_row(row) for row in state["pending"]]


def split(groups: Sequence[LabelledGroup], fraction: float) -> tuple[list[LabelledGroup], list[LabelledGroup]]:
    """The groups to train on, and those held out. The prompt alone decides: a held-out one is never trained on."""
    new = [group for group in groups if group.hashed >= fraction]
    return new, [group for group in groups if group.hashed < fraction]
