"""What is told how an exploration step goes, while it goes."""

from collections.abc import Mapping


class Observer:
    """Follows an exploration step: `GRPOLoop.observers.append(...)`. A progress bar is one."""

    def exploring(self, num_completions: int) -> None:
        """A step, or another round of it, begins to sample so many completions on this rank."""

    def explored(self, num_completions: int) -> None:
        """So many more of these completions have ended."""

    def rewarded(self, mean: float) -> None:
        """The mean reward of the step, over all ranks, is known."""

    def reported(self, metrics: Mapping[str, float]) -> None:
        """The step has ended, validation included; these are its own metrics, over all ranks."""
