"""Measures of how well a reward model agrees with the verifier that labels its completions."""

import math
from dataclasses import dataclass

from torch import Tensor
from torchmetrics.functional import mean_squared_error, pearson_corrcoef, spearman_corrcoef
from torchmetrics.functional.classification import binary_auroc, binary_calibration_error

from grpo_lightning.maths.metrics import RIGHT_ABOVE
from grpo_lightning.plugins.learned.loss import pairs


@dataclass(slots=True)
class Agreement:
    """The judgements of B completions by reward model and verifier, on the CPU. An undefined measure is NaN."""

    probability: Tensor
    """[B] float64 σ(r), which is monotone in r."""
    label: Tensor
    """[B] float64 value by the verifier, 0 to 1."""
    group: Tensor
    """[B] int64 index of each completion's prompt; the completions of a prompt are adjacent."""

    @property
    def right(self) -> Tensor:
        """[B] int64, 1 where the verifier judges the completion right, else 0."""
        return (self.label > RIGHT_ABOVE).long()

    def pairwise(self) -> float:
        """The fraction of pairs of a better and a worse completion that r orders correctly; equal r counts half.

        The mean over a prompt's pairs, then over prompts.
        """
        better, worse, weight = pairs(self.label, self.group)
        difference = self.probability[better] - self.probability[worse]
        right = (difference > 0).double() + 0.5 * (difference == 0).double()
        return float((weight * right).sum() / weight.sum())

    def auc(self) -> float:
        """The probability that a right completion has a larger r than a wrong one, of any prompt."""
        both = 0 < int(self.right.sum()) < len(self.label)
        return float(binary_auroc(self.probability, self.right)) if both else math.nan

    def accuracy(self) -> float:
        """`pairwise`; without pairs `auc`; if all are right or all wrong, the fraction that σ(r) > 0.5 classifies."""
        for number in (self.pairwise(), self.auc()):
            if not math.isnan(number):
                return number
        return float(((self.probability > RIGHT_ABOVE).long() == self.right).double().mean())

    def brier(self) -> float:
        """The mean squared error of the probability."""
        return float(mean_squared_error(self.probability, self.label)) if len(self.label) else math.nan

    def ece(self) -> float:
        """The expected calibration error over 10 bins."""
        if not len(self.label):
            return math.nan
        return float(binary_calibration_error(self.probability, self.right, n_bins=10, norm="l1"))

    def spearman(self) -> float:
        """Spearman's rank correlation with the verifier."""
        if constant(self.probability) or constant(self.label):
            return math.nan
        return float(spearman_corrcoef(self.probability, self.label))

    def correlation(self, other: Tensor) -> float:
        """Pearson's correlation of σ(r) with another quantity, such as the length."""
        if constant(self.probability) or constant(other):
            return math.nan
        return float(pearson_corrcoef(self.probability, other.double()))


def constant(values: Tensor) -> bool:
    """Whether all values are equal, so that no correlation exists."""
    return len(values) < 2 or bool((values == values[0]).all())


def forgotten(best: dict[int, float], now: dict[int, float]) -> float:
    """Forgetting: the mean over earlier iterations of the best accuracy so far minus the accuracy now.

    As in Chaudhry et al. (arXiv 1801.10112, Eq. 3), but never negative, as the best includes the present. Without
    iterations it is 0.
    """
    losses = [max(best.get(iteration, accuracy), accuracy) - accuracy for iteration, accuracy in now.items()]
    return sum(losses) / len(losses) if losses else 0.0
