"""Measures of how well a reward model agrees with the verifier that labels its completions."""

import math
from dataclasses import dataclass

from torch import Tensor
from torchmetrics.functional import pearson_corrcoef
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
        right = 0.5 + 0.5 * (self.probability[better] - self.probability[worse]).sign()
        return float((weight * right).sum() / weight.sum())

    def auc(self) -> float:
        """The probability that a right completion has a larger r than a wrong one, of any prompt."""
        both = 0 < int(self.right.sum()) < len(self.label)
        return float(binary_auroc(self.probability, self.right)) if both else math.nan

    def accuracy(self) -> float:
        """`pairwise`; without pairs `auc`; if all are right or all wrong, the fraction that σ(r) > 0.5 classifies."""
        classified = float(((self.probability > RIGHT_ABOVE).long() == self.right).double().mean())
        return next(value for value in (self.pairwise(), self.auc(), classified) if not math.isnan(value))

    def brier(self) -> float:
        """The mean squared error of the probability."""
        return float((self.probability - self.label).square().mean())

    def ece(self) -> float:
        """The expected calibration error over 10 bins."""
        return float(binary_calibration_error(self.probability, self.right, n_bins=10, norm="l1"))

    def correlation(self, other: Tensor) -> float:
        """Pearson's correlation of σ(r) with another quantity, such as the length."""
        both = (self.probability, other.double())
        return math.nan if any(len(values.unique()) < 2 for values in both) else float(pearson_corrcoef(*both))
