"""What is told how an exploration step goes, while it goes."""

from collections.abc import Mapping

from grpo_lightning.training.step import Step


class Observer:
    """Follows an exploration step: `GRPOLoop.observers.append(...)`. A progress bar is one."""

    def exploring(self, num_completions: int) -> None:
        """A step, or another round of it, begins to sample so many completions on this rank."""

    def explored(self, num_completions: int) -> None:
        """So many more of these completions have ended."""

    def rewarded(self, mean: float) -> None:
        """The mean reward of the step, over all ranks, is known."""

    def prepared(self, step: Step) -> None:
        """The packs of the step are there; its first update comes next. What is done here is not timed as the step's.

        Every rank is told at the same moment, so forwards of a sharded policy may be made, as many on each rank.
        """

    def updated(self, step: Step) -> None:
        """The step's last update has been made, or was ended by a stop rule. The packs are still there.

        Every rank is told at the same moment. Validation comes later.
        """

    def reported(self, metrics: Mapping[str, float]) -> None:
        """The step has ended, validation included; these are its own metrics, over all ranks."""
