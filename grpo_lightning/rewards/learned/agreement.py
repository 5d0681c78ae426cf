"""How well a reward model agrees with the verifier that labels its completions."""

import math
from dataclasses import dataclass

from torch import Tensor
from torchmetrics.functional import mean_squared_error, pearson_corrcoef, spearman_corrcoef
from torchmetrics.functional.classification import binary_auroc, binary_calibration_error

from grpo_lightning.maths.metrics import RIGHT_ABOVE
from grpo_lightning.rewards.learned.loss import pairs


@dataclass(slots=True)
class Agreement:
    """B completions as the reward model and as the verifier see them, on the CPU. What is undefined is NaN."""

    probability: Tensor
    """[B] float64 σ(r), in which the order of r survives."""
    label: Tensor
    """[B] float64 what the verifier said, 0 to 1."""
    group: Tensor
    """[B] int64 prompt of each; the completions of a prompt come together."""

    @property
    def right(self) -> Tensor:
        """[B] int64, 1 where the verifier says so."""
        return (self.label > RIGHT_ABOVE).long()

    def pairwise(self) -> float:
        """Share of the pairs of a better and a worse completion of one prompt that r orders right; equal r is half.

        The mean over a prompt's pairs, then over prompts.
        """
        better, worse, weight = pairs(self.label, self.group)
        difference = self.probability[better] - self.probability[worse]
        right = (difference > 0).double() + 0.5 * (difference == 0).double()
        return float((weight * right).sum() / weight.sum())

    def auc(self) -> float:
        """Chance that a right completion has the larger r than a wrong one of any prompt."""
        both = 0 < int(self.right.sum()) < len(self.label)
        return float(binary_auroc(self.probability, self.right)) if both else math.nan

    def accuracy(self) -> float:
        """`pairwise`; where there are no pairs `auc`; without either label the share that σ(r) > 0.5 decides right."""
        for number in (self.pairwise(), self.auc()):
            if not math.isnan(number):
                return number
        return float(((self.probability > RIGHT_ABOVE).long() == self.right).double().mean())

    def brier(self) -> float:
        """Mean square of the probability's error."""
        return float(mean_squared_error(self.probability, self.label)) if len(self.label) else math.nan

    def ece(self) -> float:
        """Expected calibration error over 10 bins."""
        if not len(self.label):
            return math.nan
        return float(binary_calibration_error(self.probability, self.right, n_bins=10, norm="l1"))

    def spearman(self) -> float:
        """Rank correlation with the verifier."""
        if constant(self.probability) or constant(self.label):
            return math.nan
        return float(spearman_corrcoef(self.probability, self.label))

    def correlation(self, other: Tensor) -> float:
        """Pearson's correlation of r's probability with something else, such as the length."""
        if constant(self.probability) or constant(other):
            return math.nan
        return float(pearson_corrcoef(self.probability, other.double()))


def constant(values: Tensor) -> bool:
    """Whether there is nothing to correlate."""
    return len(values) < 2 or bool((values == values[0]).all())


def forgotten(best: dict[int, float], now: dict[int, float]) -> float:
    """The mean, over earlier iterations, of the best accuracy there ever was on them less the one now.

    Forgetting as in Chaudhry et al. (arXiv 1801.10112, Eq. 3). Never negative as `best` contains `now`; 0 without
    iterations.
    """
    losses = [max(best.get(iteration, accuracy), accuracy) - accuracy for iteration, accuracy in now.items()]
    return sum(losses) / len(losses) if losses else 0.0
