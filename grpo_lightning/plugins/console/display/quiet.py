"""Silences messages of libraries that do not help a run."""

import logging
import re
import warnings

import transformers.utils.logging


def quieten() -> None:
    """Silences messages of warnings and loggers, each for the reason above its line."""
    # Lightning 2.6 uses a call that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec", category=FutureWarning)
    # The reference is meant to be in eval mode.
    warnings.filterwarnings("ignore", message="Found .* in eval mode at the start of training")
    # The loop logs numbers of all ranks.
    warnings.filterwarnings("ignore", message="It is recommended to use .self.log.*sync_dist")
    # An advertisement; devices, which the loop logs; the run's end, which the summary reports; the end of a step.
    noise = re.compile(
        r"litlogger|^(GPU|TPU|HPU) available:|^`Trainer.fit` stopped|batches will be used|^Trainer was sig"
    )
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda r: not noise.search(r.getMessage()))
    # Under SLURM: Lightning's requeueing, which the job script replaces.
    logging.getLogger("lightning.pytorch.trainer.connectors.signal_connector").setLevel(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
