"""The RewardLoss family, functions that a reward model minimises, and its agreement with the verifier."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.functional import pearson_corrcoef
from torchmetrics.functional.classification import binary_auroc, binary_calibration_error

from grpo_lightning.maths.metrics import RIGHT_ABOVE
from grpo_lightning.plugins.rewards.learned.replay import LabelledGroup
from grpo_lightning.types import at_least, require


@dataclass(slots=True)
class LabelledBatchSize:
    """The size of the batch of one optimizer update of the reward model, over all of its micro-batches."""

    num_completions: int
    """The number of completions."""
    num_contested: int
    """The number of prompts with pairs of a better and a worse completion."""

    @classmethod
    def from_groups(cls, groups: Sequence[LabelledGroup]) -> "LabelledBatchSize":
        """Counts `groups`."""
        return cls(sum(map(len, groups)), sum(group.contested for group in groups))


class RewardLoss(ABC):
    """A loss of raw scores r. The losses of the micro-batches of a batch add up to the loss of the batch."""

    @abstractmethod
    def __call__(self, score: Tensor, label: Tensor, group: Tensor, batch: LabelledBatchSize) -> Tensor:
        """[] term of these completions in the loss of their batch.

        Args:
            score: [B] float32 raw scores.
            label: [B] float32 labels from 0 to 1.
            group: [B] int64 index of each completion's prompt; the completions of a prompt are adjacent.
            batch: Size of the whole batch.
        """


class BinaryCrossEntropy(RewardLoss):
    """-[y log σ(r) + (1-y) log(1-σ(r))], the mean over completions: σ(r) becomes the probability of being right.

    Use it where the size of the reward matters, not only the order of completions.
    """

    def __call__(self, score: Tensor, label: Tensor, group: Tensor, batch: LabelledBatchSize) -> Tensor:
        return F.binary_cross_entropy_with_logits(score, label, reduction="sum") / max(batch.num_completions, 1)


class BradleyTerry(RewardLoss):
    """-log σ(r_w - r_l) over the pairs of a better and a worse completion of one prompt.

    The mean over a prompt's pairs, then over the prompts that have pairs. Only differences of scores
    count, which is all that GRPO sees, so it can learn from preferences. σ(r) is then not a probability.

    Args:
        center: Coefficient of (r_w + r_l)², which keeps scores near 0.
    """

    def __init__(self, center: float = 0.01) -> None:
        at_least("center", center, 0, "BradleyTerry")
        self.center = center

    def __call__(self, score: Tensor, label: Tensor, group: Tensor, batch: LabelledBatchSize) -> Tensor:
        better, worse, weight = pairs(label, group)
        loss = -F.logsigmoid(score[better] - score[worse])
        loss = loss + self.center * (score[better] + score[worse]).square()
        return (weight * loss).sum() / max(batch.num_contested, 1)


class SumOf(RewardLoss):
    """The sum of losses, to learn probability and order at once.

    Args:
        losses: The terms.
    """

    def __init__(self, losses: list[RewardLoss]) -> None:
        require(bool(losses), "losses=[] of SumOf: give one or more")
        self.losses = losses

    def __call__(self, score: Tensor, label: Tensor, group: Tensor, batch: LabelledBatchSize) -> Tensor:
        return torch.stack([loss(score, label, group, batch) for loss in self.losses]).sum()


def pairs(label: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[P] rows of the better and [P] rows of the worse completion of each pair, and [P] weights of the pairs.

    The completions of a pair have one prompt. The weights sum to 1 over the pairs of each prompt.
    """
    pairs_by_prompt = []
    counts = torch.unique_consecutive(group, return_counts=True)[1].tolist()
    for rows in torch.arange(len(group), device=group.device).split(counts):
        better, worse = (label[rows, None] > label[rows]).nonzero(as_tuple=True)
        weight = torch.full((len(better),), 1 / max(len(better), 1)).to(label.device)
        pairs_by_prompt.append((rows[better], rows[worse], weight))
    better, worse, weight = map(torch.cat, zip(*pairs_by_prompt, strict=True))
    return better, worse, weight


def agreement(probability: Tensor, label: Tensor, group: Tensor, length: Tensor) -> dict[str, float]:
    """Returns how well a reward model agrees with the verifier on B completions, on the CPU. Undefined metrics are NaN.

    Args:
        probability: [B] float64 σ(r), which is monotone in r.
        label: [B] float64 value by the verifier, 0 to 1.
        group: [B] int64 index of each completion's prompt; the completions of a prompt are adjacent.
        length: [B] float64 number of tokens.
    """
    varies = min(len(probability.unique()), len(length.unique())) > 1
    return {
        "pairwise": pairwise(probability, label, group),
        "auc": auc(probability, label),
        "brier": float((probability - label).square().mean()),
        "ece": float(binary_calibration_error(probability, (label > RIGHT_ABOVE).long(), n_bins=10, norm="l1")),
        "length_correlation": float(pearson_corrcoef(probability, length)) if varies else math.nan,
        "verified": float(label.mean()),
        "overrated": float((probability - label).mean()),
    }


def pairwise(probability: Tensor, label: Tensor, group: Tensor) -> float:
    """Returns the fraction of pairs of a better and a worse completion that r orders correctly; equal r counts half.

    The mean over a prompt's pairs, then over prompts.
    """
    better, worse, weight = pairs(label, group)
    right = 0.5 + 0.5 * (probability[better] - probability[worse]).sign()
    return float((weight * right).sum() / weight.sum())


def auc(probability: Tensor, label: Tensor) -> float:
    """Returns the probability that a right completion has a larger r than a wrong one, of any prompt."""
    right = (label > RIGHT_ABOVE).long()
    return float(binary_auroc(probability, right)) if 0 < int(right.sum()) < len(right) else math.nan


def accuracy(probability: Tensor, label: Tensor, group: Tensor) -> float:
    """Returns `pairwise`; without pairs `auc`; without right or wrong ones the fraction that σ(r) > 0.5 classifies."""
    classified = float(((probability > RIGHT_ABOVE) == (label > RIGHT_ABOVE)).double().mean())
    candidates = (pairwise(probability, label, group), auc(probability, label), classified)
    return next(value for value in candidates if not math.isnan(value))
