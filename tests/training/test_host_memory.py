"""Whether a process keeps the memory that it freed, counted in page faults of a process of its own."""

import os
import platform
import subprocess
import sys

import pytest
from helpers.paths import ROOT

from grpo_lightning.training import host_memory

PROGRAM = """
import resource, sys
from grpo_lightning.training import host_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def update():
    for _ in range(2):
        blocks = [bytearray(16 * 2**20) for _ in range(6)]
        del blocks

if sys.argv[1] == "keep":
    assert host_memory.keep_freed() is (sys.argv[2] == "possible")
update()
before = faults()
update()
print(faults() - before)
host_memory.give_back()
before = faults()
update()
print(faults() - before)
"""

PAGES = 6 * 16 * 2**20 // 4096
"""In the six blocks."""


def faults(*arguments: str, **environment: str) -> tuple[int, int]:
    """Page faults of allocating the blocks twice: again, and after the memory was given back."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    output = subprocess.run(
        command, env=clean | environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    again, given_back = output.stdout.split()
    return int(again), int(given_back)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_kept_until_it_is_given_back() -> None:
    again, given_back = faults("keep", "possible")
    assert again < PAGES // 10
    assert PAGES // 2 < given_back < 2 * PAGES


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert not host_memory.keep_freed()
    host_memory.give_back()
