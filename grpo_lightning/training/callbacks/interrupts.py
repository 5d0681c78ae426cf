"""SIGTERM, SIGUSR1 and Ctrl-C: the running step ends and is saved before the run stops."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from lightning.pytorch.utilities.rank_zero import rank_zero_only

SUSPENDED = 75
"""Exit code of a run that SIGUSR1 has ended: to be continued. EX_TEMPFAIL of sysexits.h."""
EXIT_CODE = 128 + signal.SIGINT
"""The exit code that a shell expects of a program that Ctrl-C has ended."""


class Interrupts:
    """Notes SIGTERM, SIGUSR1 and Ctrl-C; a second Ctrl-C ends the program at once, with exit code 130.

    SIGUSR1 is what a cluster sends some time before a job's end: the exit code tells the job script to requeue.

    Args:
        saved: Returns a few words on what the checkpoint holds by now.
    """

    def __init__(self, saved: Callable[[], str]) -> None:
        self.terminated = self.pressed = self.suspended = False
        self._saved = saved

    @property
    def asked(self) -> bool:
        """Whether the run is to stop after this step."""
        return self.terminated or self.pressed or self.suspended

    @property
    def name(self) -> str:
        """What has asked, for messages."""
        return "Ctrl-C" if self.pressed else "SIGUSR1" if self.suspended else "SIGTERM"

    @property
    def exit_code(self) -> int | None:
        """The exit code of a program that was asked to stop; None is that of any run that ends well."""
        return EXIT_CODE if self.pressed else SUSPENDED if self.suspended else None

    def agree(self, anyone: Callable[[bool], bool]) -> bool:
        """Whether any rank was asked, which all ranks know afterwards. Every rank must call it.

        Args:
            anyone: Returns whether its argument is true on any rank.
        """
        if not anyone(self.asked):
            return False
        self.pressed, self.suspended = anyone(self.pressed), anyone(self.suspended)
        return True

    def listen(self) -> None:
        """Handles the signals until the end of the fit, when Lightning restores the earlier handlers."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)
            signal.signal(signal.SIGINT, self._on_sigint)
            if hasattr(signal, "SIGUSR1"):  # Windows has none
                # Lightning's own under SLURM would save in the middle of a step.
                signal.signal(signal.SIGUSR1, self._on_sigusr1)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        self.terminated = True

    def _on_sigusr1(self, signum: int, frame: FrameType | None) -> None:
        self.suspended = True

    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:
        if self.pressed:
            write_line(f"Ctrl-C again: stopped at once; {self._saved()}")
            raise SystemExit(EXIT_CODE)
        self.pressed = True
        write_line("Ctrl-C: this step will be finished and saved; press it again to stop at once")


def write_line(message: str) -> None:
    """Writes a line of its own, on rank 0. A signal may come in the middle of a print, so `print` cannot be used."""
    if getattr(rank_zero_only, "rank", 0) in (0, None):
        os.write(2, f"\n{message}\n".encode())
