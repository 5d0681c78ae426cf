"""The device or the ranks that an update runs on, and its optimizer."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn


class Machine(Protocol):
    """What an update needs of the device or the ranks that it runs on: Lightning's trainer is one."""

    def backward(self, objective: Tensor) -> None:
        """Adds the gradient of minus `objective`, which is a sum over ranks, to those of the weights."""

    def synced(self, is_last: bool) -> AbstractContextManager[None]:
        """A context of forward and backward; ranks exchange gradients in the last one."""

    def alone(self) -> Sequence[nn.Parameter] | None:
        """The trained weights, if several packs may be passed at once; None with other ranks, a GPU or dropout."""

    @property
    def scale(self) -> float:
        """What `backward` multiplies gradients by, and `step` divides them by, so that float16 loses none; else 1."""

    @property
    def reduce(self) -> Callable[..., Any]:
        """Sums or maximises a tensor over ranks, by `reduce_op`."""

    def step(self) -> None:
        """Moves the weights along their gradients."""

    def skip(self, objective: Tensor, grad_norm: Tensor) -> None:
        """Counts an update that is not finite; too many in a row end the run."""
