"""One update of a reward model: train a candidate, and keep it only if it deserves it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch

from grpo_lightning import ranks
from grpo_lightning.rewards.learned.agreement import Agreement
from grpo_lightning.rewards.learned.labelled import LabelledGroup
from grpo_lightning.rewards.learned.loss import LabelledBatchSize, RewardLoss
from grpo_lightning.rewards.learned.model import RewardModel
from grpo_lightning.rewards.learned.replay import mixed

GRAD_CLIP = 1.0


@dataclass(slots=True, frozen=True)
class Quality:
    """How good a reward model is on prompts it was not trained on."""

    accuracy: float
    """Of `Agreement.accuracy`."""
    loss: float

    def beats(self, other: "Quality", by: float = 0.0) -> bool:
        """Whether its accuracy is higher by more than `by`, or by just that with a smaller loss. Never with a NaN."""
        gain = self.accuracy - other.accuracy
        return gain > by or (gain == by and self.loss < other.loss)


@dataclass(slots=True, frozen=True)
class Trial:
    """The old model and its candidate on held-out prompts."""

    new: tuple[Quality, Quality]
    """On this iteration's: before and after."""
    old: tuple[Quality, Quality] | None
    """On those of earlier iterations; None where there are none."""
    replayed: float
    """Share of the completions trained on that came from history."""

    def accepts(self, max_forgetting: float, min_gain: float = 0.0) -> bool:
        """Whether the candidate is better on the new by `min_gain`, and on the old not worse by `max_forgetting`."""
        if self.old is None:
            forgets = False
        else:
            before, after = self.old
            forgets = not after.accuracy >= before.accuracy - max_forgetting - 1e-9
        return self.new[1].beats(self.new[0], by=min_gain) and not forgets


@dataclass(slots=True)
class RewardUpdate:
    """How a reward model is trained: from its weights on, on new data and replay, with a fresh AdamW.

    Its learning rate rises over the first tenth of the update and then falls to 0.
    """

    loss: RewardLoss
    replay: float
    """Share of history in each batch."""
    epochs: int
    """Over the new data."""
    batch_size: int
    """Prompts in one optimizer step."""
    lr: float

    def train(
        self, model: RewardModel, new: Sequence[LabelledGroup], history: Sequence[LabelledGroup], rng: Random
    ) -> float:
        """Trains in place; returns the share of the completions trained on that came from history."""
        parameters = [parameter for parameter in model.model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=self.lr, weight_decay=0.0)
        epochs = [mixed(new, history, self.batch_size, self.replay, rng) for _ in range(self.epochs)]
        batches = [batch for epoch in epochs for batch in epoch]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, len(batches)))
        trained = replayed = 0
        for batch, old in batches:
            size = LabelledBatchSize.from_groups(batch)
            with torch.enable_grad():
                for part, rows in parts(model, batch):
                    score = model.forward(rows)
                    label, group = (column.to(score.device) for column in columns(part))
                    self.loss(score, label.float(), group, size).backward()
            torch.nn.utils.clip_grad_norm_(parameters, GRAD_CLIP)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            trained += size.completions
            replayed += sum(map(len, batch[len(batch) - old :]))
        # Ranks train alike; a GPU's last bit must not set them apart.
        ranks.broadcast(parameters)
        return replayed / max(trained, 1)

    @torch.no_grad()
    def quality(self, model: RewardModel, groups: Sequence[LabelledGroup]) -> Quality:
        """Of `model` on `groups`, at least one."""
        score, label, group = scored(model, groups)
        loss = self.loss(score.float(), label.float(), group, LabelledBatchSize.from_groups(groups))
        # Of rank 0, so that all ranks decide alike.
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
        """Trains a candidate and puts the old weights back unless it is accepted.

        Args:
            model: Trained in place.
            new: This iteration's prompts.
            history: Those of earlier iterations.
            held_out: This iteration's prompts that nothing is trained on, at least one.
            held_out_before: Those of earlier iterations.
            max_forgetting: Accuracy that may be lost on `held_out_before`.
            min_gain: Accuracy that must be gained on `held_out`.
            rng: Order and draws.
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


def rate(step: int, steps: int) -> float:
    """Factor of the learning rate at `step` of `steps`, from 0: up to 1 over the first tenth, then down to 0."""
    warmup = -(-steps // 10)
    return min((step + 1) / warmup, (steps - step) / max(steps - warmup, 1))


def scored(model: RewardModel, groups: Sequence[LabelledGroup]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[B] float64 raw scores, [B] float64 labels, [B] int64 prompts, on the CPU."""
    score = model.score([ids for group in groups for ids in encoded(model, group)])
    return torch.tensor(score, dtype=torch.float64), *columns(groups)


def columns(groups: Sequence[LabelledGroup]) -> tuple[torch.Tensor, torch.Tensor]:
    """[B] float64 labels and [B] int64 prompts."""
    label = torch.tensor([label for group in groups for label in group.labels], dtype=torch.float64)
    return label, torch.tensor([number for number, group in enumerate(groups) for _ in group.labels])


def encoded(model: RewardModel, group: LabelledGroup) -> list[list[int]]:
    """Token ids of the completions with their prompt."""
    texts = zip(group.completions, group.ended, strict=True)
    return [model.encode(group.prompt, completion, ended)[0] for completion, ended in texts]


def parts(model: RewardModel, groups: Sequence[LabelledGroup]) -> Iterator[tuple[list[LabelledGroup], list[list[int]]]]:
    """`groups`, whole ones, in parts of at most `model.max_tokens` with padding, with the token ids of each part."""
    part: list[LabelledGroup] = []
    rows: list[list[int]] = []
    for group in groups:
        more = encoded(model, group)
        if part and len(rows + more) * max(map(len, rows + more)) > model.max_tokens:
            yield part, rows
            part, rows = [], []
        part.append(group)
        rows = rows + more
    if part:
        yield part, rows
