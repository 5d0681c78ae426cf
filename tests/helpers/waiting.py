"""How long a test waits for what must happen."""

import time
from collections.abc import Callable

LIMIT = 1200.0
"""Seconds after which a process, a thread or a file counts as lost: ten times the slowest wait on two quiet cores.

The limit of pytest-timeout, in pyproject.toml, is longer, so that the wait says what was lost."""


def wait_until(condition: Callable[[], object]) -> None:
    """Waits until `condition()` is true."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
