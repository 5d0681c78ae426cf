"""Objects in processes of their own: they keep their state, cost only themselves, and leave nothing behind."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import environment
from helpers.waiting import LIMIT, wait_until
from sandbox.test_pool import exists

from grpo_lightning.plugins.data.conversations.instances import STARTED_AT_ONCE, InstanceCall, Instances, Limits


class Counter:
    """Counts, and misbehaves when told to."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, number: int = 1) -> int:
        self.count += number
        return self.count

    def draw(self) -> float:
        import random

        return random.random()

    def fail(self) -> None:
        raise KeyError("no such thing")

    def hang(self) -> None:
        while True:
            pass

    def nap(self, seconds: float) -> str:
        import time

        time.sleep(seconds)
        return "awake"

    def die(self) -> None:
        os._exit(3)

    def leave(self) -> None:
        sys.exit(1)

    def answer(self, size: int) -> str:
        return "x" * size

    def hog(self, megabytes: int) -> int:
        return len(bytearray(megabytes * 2**20))

    def chatter(self) -> int:
        print("noise")
        os.write(1, b'{"status": "ok", "value": 666}\n')
        return self.add()

    def fork(self) -> int:
        os.fork()
        return self.add()

    def forge(self) -> int:
        for descriptor in range(3, 20):
            with contextlib.suppress(OSError):
                os.write(descriptor, b'{"status": "ok", "value": 666, "number": 0}\n')
        return self.add()

    def file(self) -> str:
        import tempfile

        handle, path = tempfile.mkstemp()
        os.close(handle)
        return path

    def child(self, leaves_group: bool) -> int:
        code = "import time; time.sleep(600)"
        return subprocess.Popen([sys.executable, "-c", code], start_new_session=leaves_group).pid

    async def later(self) -> str:
        return "awaited"

    def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def instances():
    instances = Instances(Counter(10), Limits(seconds=LIMIT, memory_limit_mb=256, max_answer_bytes=1000))
    yield instances
    instances.close()


def values(instances: Instances, *calls: InstanceCall) -> list[object]:
    return [outcome.value if outcome.status == "ok" else outcome.status for outcome in instances.call(calls)]


def test_each_has_a_state_of_its_own_and_random_numbers_of_its_seed(instances: Instances) -> None:
    instances.start(dict.fromkeys(range(5), 0))
    assert values(instances, *(InstanceCall(key, "add", [key]) for key in range(5))) == [10, 11, 12, 13, 14]
    assert values(instances, InstanceCall(4, "add", [1]), InstanceCall(0, "add", [5])) == [15, 15]
    instances.end([4])
    instances.start({4: 0})
    assert values(instances, InstanceCall(4, "add")) == [11]
    instances.start({10: 7, 11: 7, 12: 8})
    first, same, other = values(instances, *(InstanceCall(key, "draw") for key in range(10, 13)))
    assert first == same != other


def test_a_failure_costs_only_the_instance(instances: Instances) -> None:
    calls = [
        InstanceCall(1, "fail"),
        InstanceCall(2, "leave"),
        InstanceCall(3, "nothing"),
        InstanceCall(4, "hang", seconds=0.3),
        InstanceCall(5, "die"),
        InstanceCall(6, "hog", [2000]),
        InstanceCall(7, "answer", [5_000_000]),
    ]
    instances.start(dict.fromkeys(range(9), 0))
    failed = ["error", "error", "error", "timeout", "crash", "memory", "too_long"]
    assert values(instances, InstanceCall(0, "add"), *calls, InstanceCall(8, "add")) == [11, *failed, 11]
    after = [11, 11, 11, "crash", "crash", "crash", "crash"]
    assert values(instances, *(InstanceCall(key, "add") for key in range(9))) == [12, *after, 12]
    (outcome,) = instances.call([InstanceCall(0, "fail")])
    assert re.fullmatch(r"test_instances.py:\d+: KeyError: 'no such thing'", outcome.error)


def test_a_call_that_waits_may_take_longer_than_one_that_computes(instances: Instances) -> None:
    instances.start({0: 0, 1: 0})
    calls = [InstanceCall(0, "nap", [0.6], seconds=0.3), InstanceCall(1, "nap", [LIMIT], seconds=0.05)]
    assert values(instances, *calls) == ["awake", "timeout"]


def test_one_that_dies_is_noticed_whenever_it_was_started(instances: Instances) -> None:
    """So no other process holds its socket. More are started than one request starts."""
    instances.start(dict.fromkeys(range(2 * STARTED_AT_ONCE + 1), 0))
    for key in (0, STARTED_AT_ONCE - 1, STARTED_AT_ONCE, 2 * STARTED_AT_ONCE):
        assert values(instances, InstanceCall(key, "die", seconds=60.0)) == ["crash"]
    assert values(instances, InstanceCall(1, "add"), InstanceCall(2 * STARTED_AT_ONCE - 1, "add")) == [11, 11]


def test_an_answer_is_that_of_its_own_call(instances: Instances) -> None:
    """Neither a child that returns too, nor what else is written to the socket, is taken for another answer."""
    instances.start(dict.fromkeys(range(2), 0))
    assert values(instances, InstanceCall(0, "fork")) == [11]
    assert [*values(instances, InstanceCall(0, "add")), *values(instances, InstanceCall(0, "add"))] == [12, 13]
    # What it prints, and what is awaited.
    assert [values(instances, InstanceCall(1, name))[0] for name in ("chatter", "later")] == [11, "awaited"]
    assert values(instances, InstanceCall(0, "forge"), InstanceCall(1, "add")) == ["crash", 12]


@pytest.mark.parametrize("way", ["end", "hang", "close"])
def test_processes_and_files_end_with_it(instances: Instances, way: str) -> None:
    instances.start({0: 0, 1: 0})
    (path,) = values(instances, InstanceCall(0, "file"))
    (child,) = values(instances, InstanceCall(0, "child", [way != "end"]))
    (own,) = values(instances, InstanceCall(0, "pid"))
    assert isinstance(path, str) and isinstance(child, int) and isinstance(own, int)
    assert exists(child) and Path(path).exists()
    if way == "end":
        instances.end([0])
    elif way == "hang":
        assert values(instances, InstanceCall(0, "hang", seconds=0.1)) == ["timeout"]
    else:
        instances.close()
    assert not exists(child) and not exists(own) and not Path(path).exists()
    if way != "close":
        assert values(instances, InstanceCall(1, "add")) == [11]


def test_a_child_of_one_that_lives_is_left_alone(instances: Instances) -> None:
    instances.start({0: 0, 1: 0})
    (child,) = values(instances, InstanceCall(0, "child", [True]))
    instances.end([1])
    assert isinstance(child, int) and exists(child)


def test_after_the_first_process_is_lost_it_begins_anew(instances: Instances) -> None:
    instances.start({0: 0})
    os.kill(instances.load().process.pid, signal.SIGKILL)
    instances.start({1: 0})
    assert values(instances, InstanceCall(1, "add")) == ["crash"]
    instances.end([0])
    instances.start({1: 0})
    assert values(instances, InstanceCall(1, "add")) == [11]


PARENT = """
import sys, time
from grpo_lightning.plugins.data.conversations.instances import InstanceCall, Instances, Limits
from plugins.data.conversations.test_instances import Counter
instances = Instances(Counter(), Limits(seconds=600))
instances.start({0: 0, 1: 0})
pids = [o.value for o in instances.call([InstanceCall(0, "pid"), InstanceCall(1, "pid")])]
path = instances.call([InstanceCall(0, "file")])[0].value
print(*pids, path, flush=True)
instances.call([InstanceCall(0, "hang")])
"""


def test_nothing_is_left_when_the_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment())
    assert parent.stdout is not None
    *pids, path = parent.stdout.readline().split()
    parent.kill()
    parent.communicate()
    wait_until(lambda: not any(exists(int(pid)) for pid in pids) and not Path(path).parent.parent.exists())
