"""How long a test waits for what must happen."""

import os
import time
from collections.abc import Callable

LIMIT = float(os.environ.get("GRPO_TEST_LIMIT", "1200"))
"""Seconds after which a process, a thread or a file counts as lost: ten times the slowest wait on two quiet cores.

The limit of pytest-timeout, in pyproject.toml, is longer, so that the wait says what was lost. `.ci/run` sets both
lower for a machine it knows: a few lost processes must not use up its time."""


def wait_until(condition: Callable[[], object]) -> None:
    """Waits until `condition()` is true."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
