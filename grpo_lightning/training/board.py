"""The default logger: TensorBoard, with the curves to read first at the top."""

import re
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger

from grpo_lightning.types import FIRST_LOOK

CURVES = {
    r"reward/mean": "1 reward",
    r"val/(?P<shown>avg@\d+)": "2 val ",
    r"val/(?P<shown>pass@1)": "3 val ",
    r"rollout/length_mean": "4 length",
    r"policy/entropy": "5 entropy",
}
"""The metrics in that group, as regular expressions, and what they are called there."""


class Board(TensorBoardLogger):
    """A TensorBoardLogger that logs five curves twice: TensorBoard sorts by name, and would open on `optim/`.

    The copies are the first group of the tabs Time Series and Scalars, and the columns of the tab HPARAMS.
    """

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Logs the metrics, and the copies."""
        super().log_metrics({**metrics, **copies(metrics)}, step)


def copies(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the metrics that are in the first group, by their names there."""
    found = {}
    for name, value in metrics.items():
        for pattern, title in CURVES.items():
            if match := re.fullmatch(pattern, name):
                found[f"{FIRST_LOOK}/{title}{match.groupdict().get('shown', '')}"] = value
    return found
