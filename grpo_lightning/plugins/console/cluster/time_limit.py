"""A limit on a run's time, for clusters with a wall clock."""

from datetime import timedelta
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Timer

from grpo_lightning.types import UsageError


class StepTimer(Timer):
    """Ends the run after the step in which the limit passes: the step is whole, saved, and can be resumed.

    Args:
        duration: The limit: `DD:HH:MM:SS`, a timedelta, or its arguments. It counts from this process's first step, so
            a resumed run has all of it.
    """

    def __init__(self, duration: str | timedelta | dict[str, int]) -> None:
        # By default Lightning checks after every update, which would cut the passes of a step short.
        try:
            super().__init__(duration, interval="epoch")
        except (MisconfigurationException, ValueError, TypeError) as error:
            raise UsageError(f"trainer.max_time={duration}: give DD:HH:MM:SS, e.g. 00:08:00:00 for 8 hours") from error

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: the time of an earlier process does not count."""
        return {}
