"""One update of a reward model: trains a candidate, and keeps it only if held-out prompts show that it is better."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch

from grpo_lightning import ranks
from grpo_lightning.plugins.learned.agreement import Agreement
from grpo_lightning.plugins.learned.labelled import LabelledGroup
from grpo_lightning.plugins.learned.loss import LabelledBatchSize, RewardLoss
from grpo_lightning.plugins.learned.model import RewardModel
from grpo_lightning.plugins.learned.replay import mixed

GRAD_CLIP = 1.0


@dataclass(slots=True, frozen=True)
class Quality:
    """The quality of a reward model on prompts it was not trained on."""

    accuracy: float
    """As in `Agreement.accuracy`."""
    loss: float

    def beats(self, other: "Quality", by: float = 0.0) -> bool:
        """Whether its accuracy is higher by more than `by`, or by exactly `by` with a smaller loss. Never with NaN."""
        gain = self.accuracy - other.accuracy
        return gain > by or (gain == by and self.loss < other.loss)


@dataclass(slots=True, frozen=True)
class Trial:
    """The comparison of the old model and its candidate on held-out prompts."""

    new: tuple[Quality, Quality]
    """Before and after, on this iteration's prompts."""
    old: tuple[Quality, Quality] | None
    """Before and after, on the prompts of earlier iterations; None where there are none."""
    replayed: float
    """The fraction of the training completions that came from history."""

    def accepts(self, max_forgetting: float, min_gain: float = 0.0) -> bool:
        """Whether accuracy gains `min_gain` on the new prompts, and loses at most `max_forgetting` on the old ones."""
        if self.old is None:
            forgets = False
        else:
            before, after = self.old
            forgets = not after.accuracy >= before.accuracy - max_forgetting - 1e-9
        return self.new[1].beats(self.new[0], by=min_gain) and not forgets


@dataclass(slots=True)
class RewardUpdate:
    """The training of a reward model between iterations: on new data and replay, with a fresh AdamW.

    The learning rate rises over the first tenth of the optimizer updates, then falls to 0.
    """

    loss: RewardLoss
    replay: float
    """The fraction of history in each batch."""
    num_passes: int
    """The number of passes over the new data."""
    batch_size: int
    """The number of prompts in one optimizer update."""
    lr: float

    def train(
        self, model: RewardModel, new: Sequence[LabelledGroup], history: Sequence[LabelledGroup], rng: Random
    ) -> float:
        """Trains in place; returns the fraction of the training completions that came from history."""
        parameters = [parameter for parameter in model.model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=self.lr, weight_decay=0.0)
        passes = [mixed(new, history, self.batch_size, self.replay, rng) for _ in range(self.num_passes)]
        batches = [batch for batches_of_pass in passes for batch in batches_of_pass]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: rate(update, len(batches)))
        trained = replayed = 0
        for batch, old in batches:
            size = LabelledBatchSize.from_groups(batch)
            with torch.enable_grad():
                for pack, rows in packs(model, batch):
                    score = model.forward(rows)
                    label, group = (column.to(score.device) for column in columns(pack))
                    self.loss(score, label.float(), group, size).backward()
            torch.nn.utils.clip_grad_norm_(parameters, GRAD_CLIP)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            trained += size.num_completions
            replayed += sum(map(len, batch[len(batch) - old :]))
        # All ranks train alike, but GPUs may differ in the last bit.
        ranks.broadcast(parameters)
        return replayed / max(trained, 1)

    @torch.no_grad()
    def quality(self, model: RewardModel, groups: Sequence[LabelledGroup]) -> Quality:
        """The quality of `model` on `groups`, of which there is at least one."""
        score, label, group = scored(model, groups)
        loss = self.loss(score.float(), label.float(), group, LabelledBatchSize.from_groups(groups))
        # Rank 0's, so that all ranks decide alike.
        return ranks.gather(Quality(Agreement(score.sigmoid(), label, group).accuracy(), float(loss)))[0]

    def __call__(
        self,
        model: RewardModel,
        new: Sequence[LabelledGroup],
        history: Sequence[LabelledGroup],
        held_out: Sequence[LabelledGroup],
        held_out_before: Sequence[LabelledGroup],
        max_forgetting: float,
        min_gain: float,
        rng: Random,
    ) -> Trial:
        """Trains a candidate, and restores the old weights unless it is accepted.

        Args:
            model: The model, which is trained in place.
            new: This iteration's prompts.
            history: The prompts of earlier iterations.
            held_out: This iteration's prompts that are never trained on, at least one.
            held_out_before: The held-out prompts of earlier iterations.
            max_forgetting: Largest allowed drop in accuracy on `held_out_before`.
            min_gain: Smallest required gain in accuracy on `held_out`.
            rng: Decides order and draws.
        """
        kept = {name: value.clone() for name, value in model.model.state_dict().items()}
        before = self.quality(model, held_out)
        old_before = self.quality(model, held_out_before) if held_out_before else None
        replayed = self.train(model, new, history, rng)
        old = (old_before, self.quality(model, held_out_before)) if old_before else None
        trial = Trial((before, self.quality(model, held_out)), old, replayed)
        if not trial.accepts(max_forgetting, min_gain):
            model.model.load_state_dict(kept)
        return trial


def rate(update: int, num_updates: int) -> float:
    """The factor of the learning rate at the update with this index: up to 1 over the first tenth, then down to 0."""
    warmup = -(-num_updates // 10)
    return min((update + 1) / warmup, (num_updates - update) / max(num_updates - warmup, 1))


def scored(model: RewardModel, groups: Sequence[LabelledGroup]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[B] float64 raw scores, [B] float64 labels and [B] int64 indices of prompts, on the CPU."""
    score = model.score([ids for group in groups for ids in encoded(model, group)])
    return torch.tensor(score, dtype=torch.float64), *columns(groups)


def columns(groups: Sequence[LabelledGroup]) -> tuple[torch.Tensor, torch.Tensor]:
    """[B] float64 labels and [B] int64 indices of prompts."""
    label = torch.tensor([label for group in groups for label in group.labels], dtype=torch.float64)
    return label, torch.tensor([index for index, group in enumerate(groups) for _ in group.labels])


def encoded(model: RewardModel, group: LabelledGroup) -> list[list[int]]:
    """The token ids of each completion with its prompt."""
    texts = zip(group.completions, group.ended, strict=True)
    return [model.encode(group.prompt, completion, ended)[0] for completion, ended in texts]


def packs(model: RewardModel, groups: Sequence[LabelledGroup]) -> Iterator[tuple[list[LabelledGroup], list[list[int]]]]:
    """Yields packs of whole groups with their token ids, of at most `model.max_tokens` with padding."""
    pack: list[LabelledGroup] = []
    rows: list[list[int]] = []
    for group in groups:
        more = encoded(model, group)
        if pack and len(rows + more) * max(map(len, rows + more)) > model.max_tokens:
            yield pack, rows
            pack, rows = [], []
        pack.append(group)
        rows = rows + more
    if pack:
        yield pack, rows
