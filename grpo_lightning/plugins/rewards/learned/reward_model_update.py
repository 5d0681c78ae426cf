"""Line 12 of Algorithm 1: a reward model that learns at the end of each iteration, with replay of earlier ones."""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import Tensor

from grpo_lightning import ranks
from grpo_lightning.plugins.rewards.learned.classifier import RewardModel
from grpo_lightning.plugins.rewards.learned.pairwise_loss import (
    BinaryCrossEntropy,
    LabelledBatchSize,
    RewardLoss,
    accuracy,
)
from grpo_lightning.plugins.rewards.learned.replay import Batch, LabelledGroup, Replay, ReplayBuffer, mixed
from grpo_lightning.types import at_least, require

log = logging.getLogger(__name__)
GRAD_CLIP = 1.0


class Quality(NamedTuple):
    """The quality of a reward model on prompts it was not trained on."""

    accuracy: float
    """The fraction that `pairwise_loss.accuracy` returns."""
    loss: float
    """The loss of all of these prompts as one batch."""


class Trial(NamedTuple):
    """The quality of the old model and of its candidate on held-out prompts."""

    new: tuple[Quality, Quality]
    """On this iteration's prompts: before the training, and after it."""
    old: tuple[Quality, Quality] | None
    """On prompts of earlier iterations, before and after; None if there are none."""
    replayed: float
    """The fraction of the training completions that came from history."""


@dataclass
class RewardUpdate:
    """The training of a reward model at the end of an iteration, on new data and replay, and its test.

    Args:
        loss: The function that is minimised.
        num_passes: Passes over an iteration's new data. At 0 the model is tested, but never trained.
        batch_size: Prompts per optimizer update of the reward model.
        lr: Peak learning rate. AdamW starts afresh in every iteration: the rate rises over a tenth of its updates, then
            falls to 0.
        max_forgetting: Largest allowed drop in accuracy on the held-out prompts of earlier iterations; an update that
            loses more is undone.
        min_gain: Smallest required gain in accuracy on this iteration's held-out prompts. At 0, equal accuracy with a
            smaller loss also passes. To keep every update set `min_gain=-1` and `max_forgetting=1`.
    """

    loss: RewardLoss = field(default_factory=BinaryCrossEntropy)
    """The function that is minimised."""
    num_passes: int = 1
    """Passes over an iteration's new data."""
    batch_size: int = 16
    """Prompts per optimizer update."""
    lr: float = 2e-5
    """Peak learning rate."""
    max_forgetting: float = 0.02
    """Largest allowed drop in accuracy on prompts of earlier iterations."""
    min_gain: float = 0.0
    """Smallest required gain in accuracy on this iteration's held-out prompts."""

    def __post_init__(self) -> None:
        for name, minimum in (("num_passes", 0), ("batch_size", 1), ("max_forgetting", 0)):
            at_least(f"update.{name}", getattr(self, name), minimum, "LearnedReward")
        require(-1 <= self.min_gain < 1, f"update.min_gain={self.min_gain} of LearnedReward: give -1 to below 1")
        require(0 < self.lr < math.inf, f"update.lr={self.lr} of LearnedReward: give more than 0")

    def __call__(
        self, model: RewardModel, batches: Sequence[Batch], new: Sequence[LabelledGroup], old: Sequence[LabelledGroup]
    ) -> Trial:
        """Trains a candidate, tests it on held-out prompts, and restores the old weights unless it is accepted."""
        old_weights = {name: value.clone() for name, value in model.model.state_dict().items()}
        held_out = [groups for groups in (new, old) if groups]
        old_qualities = [self.quality(model, groups) for groups in held_out]
        replayed = self.train(model, batches)
        new_qualities = [self.quality(model, groups) for groups in held_out]

        quality_pairs = [*zip(old_qualities, new_qualities, strict=True)]
        trial = Trial(quality_pairs[0], quality_pairs[1] if old else None, replayed)
        if not self.accepts(trial):
            model.model.load_state_dict(old_weights)
        return trial

    def train(self, model: RewardModel, batches: Sequence[Batch]) -> float:
        """Trains in place; returns the fraction of the training completions that came from history."""
        parameters = [parameter for parameter in model.model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=self.lr, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: rate(update, len(batches)))
        for batch, _ in batches:
            size = LabelledBatchSize.from_groups(batch)
            with torch.enable_grad():
                for micro_batch, rows in micro_batches(model, batch):
                    score = model.forward(rows)[:, 0]
                    label, group = (column.to(score.device) for column in columns(micro_batch))
                    self.loss(score, label.float(), group, size).backward()
            torch.nn.utils.clip_grad_norm_(parameters, GRAD_CLIP)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        # All ranks train alike, but GPUs may differ in the last bit.
        for parameter in parameters if ranks.world_size() > 1 else ():
            torch.distributed.broadcast(parameter.detach(), src=0)
        replayed = sum(len(group) for batch, num_old in batches for group in batch[len(batch) - num_old :])
        return replayed / sum(len(group) for batch, _ in batches for group in batch)

    @torch.no_grad()
    def quality(self, model: RewardModel, groups: Sequence[LabelledGroup]) -> Quality:
        """Returns the quality of `model` on `groups`, of which there is at least one."""
        scores = model.score([ids for group in groups for ids in encoded(model, group)])
        score = torch.tensor(scores, dtype=torch.float64)
        label, group = columns(groups)
        loss = self.loss(score.float(), label.float(), group, LabelledBatchSize.from_groups(groups))
        # Rank 0's numbers, so that all ranks decide alike.
        return ranks.gather(Quality(accuracy(score.sigmoid(), label, group), float(loss)))[0]

    def accepts(self, trial: Trial) -> bool:
        """Tells whether accuracy gains `min_gain` on new prompts, and loses at most `max_forgetting` on old ones.

        A gain of just `min_gain` counts with a smaller loss. Nothing is accepted where an accuracy is NaN.
        """
        old_quality, new_quality = trial.new
        gain = new_quality.accuracy - old_quality.accuracy
        gains = gain > self.min_gain or (gain == self.min_gain and new_quality.loss < old_quality.loss)
        if trial.old is None:
            return gains
        return gains and trial.old[1].accuracy >= trial.old[0].accuracy - self.max_forgetting - 1e-9


def rate(update: int, num_updates: int) -> float:
    """Returns the factor of the learning rate at an update: up to 1 over the first tenth, then down to 0."""
    warmup = -(-num_updates // 10)
    return min((update + 1) / warmup, (num_updates - update) / max(num_updates - warmup, 1))


def columns(groups: Sequence[LabelledGroup]) -> tuple[Tensor, Tensor]:
    """[B] float64 labels and [B] int64 indices of prompts."""
    label = torch.tensor([label for group in groups for label in group.labels], dtype=torch.float64)
    return label, torch.tensor([index for index, group in enumerate(groups) for _ in group.labels])


def encoded(model: RewardModel, group: LabelledGroup) -> list[list[int]]:
    """Returns the token ids of each completion with its prompt."""
    texts = zip(group.completions, group.ended, strict=True)
    return [model.encode(group.prompt, completion, has_ended)[0] for completion, has_ended in texts]


def micro_batches(
    model: RewardModel, groups: Sequence[LabelledGroup]
) -> Iterator[tuple[list[LabelledGroup], list[list[int]]]]:
    """Yields micro-batches of whole groups with their token ids, of at most `model.max_tokens` with padding."""
    micro_batch: list[LabelledGroup] = []
    rows: list[list[int]] = []
    for group in groups:
        new_rows = encoded(model, group)
        if micro_batch and len(rows + new_rows) * max(map(len, rows + new_rows)) > model.max_tokens:
            yield micro_batch, rows
            micro_batch = []
            rows = []
        micro_batch.append(group)
        rows = rows + new_rows
    yield micro_batch, rows


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
        """The data of the running iteration, and of earlier ones that could not be trained on yet."""
        self._best: dict[int, float] = {}

    def remember(self, iteration: int, groups: Sequence[LabelledGroup]) -> None:
        """Adds the prompts of an iteration to the buffers."""
        rng = Random(f"{self.replay.seed} remember {iteration}")
        trained_on, held_out = split(groups, self.replay.held_out)
        self.history.add(iteration, trained_on, rng)
        self.test.add(iteration, held_out, rng)

    def end(self, name: str) -> dict[str, float]:
        """Learns from the pending data and remembers it; returns the metrics."""
        # An iteration can be trained on and tested if it has prompts of both kinds.
        groups = self.pending
        new, held_out = split(groups, self.replay.held_out)
        learns = self.update.num_passes > 0
        remembered = self.test.by_iteration()

        # The iteration remembered last has no accuracy yet.
        self._best |= self._accuracies({key: groups for key, groups in remembered.items() if key not in self._best})

        metrics = {"accepted": 0.0, "replayed": 0.0}
        if new and held_out and learns:
            rng = Random(f"{self.replay.seed} train {self.iteration}")
            mixture = (new, [*self.history], self.update.batch_size, self.replay.fraction, rng)
            batches = [batch for _ in range(self.update.num_passes) for batch in mixed(*mixture)]
            trial = self.update(self.model, batches, held_out, [*self.test])
            metrics |= self._report(trial, name)

        # Forgetting as in Chaudhry et al. (arXiv 1801.10112, Eq. 3), but never negative, as the best includes the
        # present.
        accuracies = self._accuracies(remembered)
        self._best |= {iteration: max(self._best[iteration], present) for iteration, present in accuracies.items()}
        losses = [self._best[iteration] - present for iteration, present in accuracies.items()]
        metrics |= {"version": self.version, "forgetting": sum(losses) / max(len(losses), 1)}

        # Data that cannot be trained on or tested waits for the next iteration's.
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
        old_accuracy, new_accuracy = (quality.accuracy for quality in trial.new)
        metrics = {"accepted": float(accepted), "replayed": trial.replayed}
        metrics |= {"new_before": old_accuracy, "new_after": new_accuracy}
        old_text = "no earlier iterations"
        if trial.old is not None:
            metrics |= {"old_before": trial.old[0].accuracy, "old_after": trial.old[1].accuracy}
            old_text = f"on earlier iterations {trial.old[0].accuracy:.3f} -> {trial.old[1].accuracy:.3f}"
        rank_zero_info(
            f"{name}: iteration {self.iteration + 1}, "
            f"held-out accuracy {old_accuracy:.3f} -> {new_accuracy:.3f}, {old_text}: "
            + (f"accepted as version {self.version}" if accepted else f"undone, version {self.version} stays")
        )
        return metrics

    def _accuracies(self, iterations: dict[int, list[LabelledGroup]]) -> dict[int, float]:
        return {key: self.update.quality(self.model, groups).accuracy for key, groups in iterations.items()}

    def state_dict(self) -> dict[str, Any]:
        """Returns weights, buffers, and the data of the running iteration."""
        return {
            "model": self.model.model.state_dict(),
            "numbers": [self.version, self.iteration, self._best],
            "history": self.history.state_dict(),
            "test": self.test.state_dict(),
            "pending": [asdict(group) for group in self.pending],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that `state_dict` returned."""
        self.model.model.load_state_dict(state["model"])
        self.version, self.iteration, self._best = state["numbers"]
        self.history.load_state_dict(state["history"])
        self.test.load_state_dict(state["test"])
        self.pending = [LabelledGroup.from_row(row) for row in state["pending"]]


def split(groups: Sequence[LabelledGroup], fraction: float) -> tuple[list[LabelledGroup], list[LabelledGroup]]:
    """Returns the groups to train on, and the held-out groups. The prompt alone decides in which of them it is."""
    new = [group for group in groups if group.hashed >= fraction]
    return new, [group for group in groups if group.hashed < fraction]
