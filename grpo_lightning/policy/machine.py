"""The device or the ranks that an update runs on, and its optimizer."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn


class Machine(Protocol):
    """The device or the ranks that an update runs on. The trainer of Lightning has this interface."""

    def backward(self, objective: Tensor) -> None:
        """Adds the gradient of minus `objective`, which is a sum over ranks, to the weights' gradients."""

    def synced(self, is_last: bool) -> AbstractContextManager[None]:
        """Opens a context of forward and backward; ranks exchange gradients in the last context of an update."""

    def alone(self) -> Sequence[nn.Parameter] | None:
        """Returns the trained weights if several micro-batches may be computed at once; else None.

        None: with other ranks, on a GPU or with dropout.
        """

    @property
    def gradient_scale(self) -> float:
        """The factor that `backward` multiplies gradients by, and `step` divides them by; 1 except in float16.

        Without it small gradients would be 0 in float16.
        """

    @property
    def reduce(self) -> Callable[..., Any]:
        """A function that sums or maximises a tensor over ranks, by `reduce_op`."""

    def step(self) -> None:
        """Moves the weights along their gradients."""

    def skip(self, objective: Tensor, grad_norm: Tensor) -> None:
        """Counts an update that is not finite; too many in a row end the run."""
