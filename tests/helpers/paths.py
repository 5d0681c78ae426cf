"""Where things are, and the environment of a process that a test starts."""

import os
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
DATA = Path(os.environ.get("GRPO_TEST_DATA", "")) if os.environ.get("GRPO_TEST_DATA") else TESTS / "no_data"
"""Larger data sets, which are not part of the repository: GSM8K and collections of answers."""

needs_gsm8k = pytest.mark.skipif(
    not (DATA / "gsm8k").exists(), reason="set GRPO_TEST_DATA to a folder with gsm8k/ to run it"
)
needs_math_cases = pytest.mark.skipif(
    not (DATA / "math_cases").exists(), reason="set GRPO_TEST_DATA to a folder with math_cases/ to run it"
)


def environment(*folders: Path, **more: str) -> dict[str, str]:
    """The environment for a process that imports the package, these helpers and what is in `folders`."""
    paths = [*map(str, folders), str(TESTS), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | more
