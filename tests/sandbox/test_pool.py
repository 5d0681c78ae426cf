"""Worker processes: limits, losses, and nothing left behind."""

import os
import pickle
import re
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic

import pytest
from helpers.paths import ROOT
from helpers.waiting import LIMIT, wait_until

from grpo_lightning.rewards.format import FormatReward
from grpo_lightning.rewards.function import FunctionReward
from grpo_lightning.sandbox.pool import Closed, LoadError, WorkerPool
from grpo_lightning.types import FinishReason, Prompt, Question, Sample

FUNCTIONS = """
import os, subprocess, sys, time
from pathlib import Path

def double(x): return 2 * x
def attribute(sample): return sample.text.upper()
def pid(_): return os.getpid()
def wait_for(path, started):
    Path(started).write_text(str(os.getpid()))
    while not Path(path).exists(): time.sleep(0.01)
    return "done"
def die(_): os._exit(3)
def hang(x):
    while x: pass
    return x
def sleep(seconds):
    time.sleep(seconds)
    return "awake"
def note_and_hang(path):
    with open(path, "a") as file: file.write("x")
    while True: pass
def hang_in_c(x): return 7 ** (10 ** 9 * x) % 2
def hog(megabytes): return len(bytearray(megabytes * 2**20))
def complain(_): raise KeyError("no such thing")
def leave(_): sys.exit(1)
def chatter(x):
    print('{"status": "ok", "value": 666}')
    os.write(1, b"noise\\n")
    sys.stdin.read()
    return x
def fork(n):
    if n == 2: os.fork()
    return n
def forge(x):
    for descriptor in range(3, 20) if x else ():
        try: os.write(descriptor, b'{"status": "ok", "value": 666, "number": 1}\\n')
        except OSError: pass
    return x
def leave_things(report, end):
    import tempfile
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    handle, file = tempfile.mkstemp()
    Path(report).write_text(f"{child.pid} {file}")
    if end == "die": os._exit(1)
    while end == "hang": pass
def write(path, megabytes):
    with open(path, "wb") as file: file.truncate(megabytes * 2**20)
def surrogate(_): return ["\\ud83d", {"a": "b\\udcff"}]
def fail_with(text): raise ValueError(text)
def arrays(_):
    import numpy
    return [numpy.float32(0.5), numpy.arange(2)]
def environment(_):
    return [os.environ["SYMPY_GROUND_TYPES"], os.environ["CUDA_VISIBLE_DEVICES"], "torch" in sys.modules]
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    path = tmp_path_factory.mktemp("functions") / "functions_for_workers.py"
    path.write_text(FUNCTIONS)
    return lambda name: f"{path}:{name}"


@pytest.fixture(scope="module")
def pool():
    pool = WorkerPool(num_workers=2, timeout=LIMIT, memory_limit_mb=256, cpu_seconds=1.0)
    yield pool
    pool.close()


def statuses(outcomes):
    return [outcome.status for outcome in outcomes]


def values(outcomes):
    return [outcome.value for outcome in outcomes]


def exists(pid: int) -> bool:
    """Returns whether a process runs. A zombie that nobody reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second if it ends between opening and reading
        return False


def test_outcomes_come_in_the_order_of_the_tasks(pool, functions):
    outcomes = pool.map(functions("double"), [[i] for i in range(50)])
    assert values(outcomes) == [2 * i for i in range(50)]
    assert {*statuses(outcomes)} == {"ok"}
    assert pool.map(functions("double"), []) == []


def test_each_form_of_a_path_finds_the_function_and_a_dict_is_one_argument(pool, functions):
    for name in ("textwrap.dedent", "textwrap:dedent"):
        assert pool.map(name, [["  a"]])[0].value == "a"
    assert pool.map(functions("attribute"), [{"text": "abc"}])[0].value == "ABC"


def test_each_failure_costs_its_own_task_only(pool, functions):
    assert statuses(pool.map(functions("hang"), [[0], [1], [0], [0]])) == ["ok", "timeout", "ok", "ok"]
    assert statuses(pool.map(functions("hog"), [[1], [1000], [1]])) == ["ok", "memory", "ok"]
    assert statuses(pool.map(functions("die"), [[1], [1]])) == ["crash", "crash"]
    outcomes = pool.map(functions("complain"), [[1]]) + pool.map(functions("leave"), [[1]])
    assert statuses(outcomes) == ["error", "error"]
    assert re.fullmatch(r"functions_for_workers.py:\d+: KeyError: 'no such thing'", outcomes[0].error)
    assert outcomes[1].error.endswith(": SystemExit: 1")
    assert pool.map(functions("double"), [[21]])[0].value == 42


def test_processor_time_has_its_own_limit(functions, tmp_path):
    pool = WorkerPool(num_workers=1, timeout=LIMIT, cpu_seconds=0.3)
    assert statuses(pool.map(functions("hang"), [[1], [0]])) == ["timeout", "ok"]
    assert pool.map(functions("hang_in_c"), [[1]])[0].status == "timeout"
    assert pool.map(functions("note_and_hang"), [[str(tmp_path / "note")]])[0].status == "timeout"
    assert (tmp_path / "note").read_text() == "x"  # once: it would hang again
    assert pool.map(functions("sleep"), [[0.4]])[0].value == "awake"
    pool.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda seconds: FormatReward("a+b", timeout=seconds)._pool,
        lambda seconds: FunctionReward("a.b", timeout=seconds)._pool,
        lambda seconds: FunctionReward("a.b", timeout=seconds, concurrency=2)._pool,
    ],
)
def test_rewards_count_cpu_seconds(make):
    """A wall-clock limit would make a reward depend on what else the machine does."""
    assert make(3.0).cpu_seconds == 3.0 and make(3.0).timeout >= 30.0


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell the children of a process")
def test_a_worker_that_the_machine_does_not_run_loses_no_reward():
    reward = FormatReward("a+b", timeout=0.1)
    prompt = Prompt(0, "Q", [1], Question("Q", ""))
    completion = Sample(prompt, "aab", [1], FinishReason.STOP)
    assert reward([completion]).status == ["ok"]
    (worker,) = reward._pool._running
    pid = int(Path(f"/proc/{worker.process.pid}/task/{worker.process.pid}/children").read_text())
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor() as threads:
        scored = threads.submit(reward, [completion])
        # The task is under way for longer than it may compute.
        wait_until(lambda: worker.job == 0 and monotonic() > worker.deadline - reward._pool.timeout + 0.5)
        os.kill(pid, signal.SIGCONT)
        assert scored.result(LIMIT).status == ["ok"]
    reward.close()


def test_a_late_worker_is_ended_even_in_c_and_replaced_at_once(functions):
    pool = WorkerPool(num_workers=2, timeout=0.3)
    pool.load(functions("hang_in_c"))
    lost = {worker.process.pid for worker in pool._running}
    assert pool.map(functions("hang_in_c"), [[1]])[0].status == "timeout"
    assert pool._running
    assert lost.isdisjoint(worker.process.pid for worker in pool._running)
    pool.close()


def test_a_fork_has_workers_of_its_own(pool, functions):
    pids = {*values(pool.map(functions("pid"), [[0]] * 4))}
    child = os.fork()
    if child == 0:
        try:
            pool.close()
            value = pool.map(functions("double"), [[21]])[0].value
            pool.close()
        finally:
            os._exit(0 if value == 42 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert pids & {*values(pool.map(functions("pid"), [[0]] * 4))}


def test_prints_and_reads_of_a_task_do_not_reach_the_protocol(pool, functions):
    assert values(pool.map(functions("chatter"), [[1], [2]])) == [1, 2]


def test_an_answer_belongs_to_its_task(functions):
    """Neither a child that returns too, nor what else is written where the answers go, is taken for another's."""
    pool = WorkerPool(num_workers=1, timeout=20)
    for _ in range(2):
        assert values(pool.map(functions("fork"), [[n] for n in range(8)])) == [*range(8)]
    outcomes = pool.map(functions("forge"), [[0], [1], [0], [0]])
    assert [(o.status, o.value) for o in outcomes] == [("ok", 0), ("crash", None), ("ok", 0), ("ok", 0)]
    pool.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell the children of a process")
@pytest.mark.parametrize("end", ["close", "hang", "die"])
def test_processes_and_files_end_with_the_worker(functions, tmp_path, end):
    report = tmp_path / "report"
    pool = WorkerPool(num_workers=1, timeout=LIMIT, cpu_seconds=0.5)
    (outcome,) = pool.map(functions("leave_things"), [[str(report), end]])
    assert outcome.status == {"close": "ok", "hang": "timeout", "die": "crash"}[end]
    pool.close()
    child, file = report.read_text().split()
    assert not exists(int(child)) and not Path(file).parent.exists()


def test_a_file_is_no_larger_than_memory_may_be(pool, functions, tmp_path):
    outcomes = pool.map(functions("write"), [[str(tmp_path / "file"), megabytes] for megabytes in (2, 300)])
    assert outcomes[0].status == "ok" and "File too large" in outcomes[1].error


def test_lone_surrogates_become_question_marks_and_arrays_lists(pool, functions):
    assert pool.map(functions("surrogate"), [[0]])[0].value == ["?", {"a": "b?"}]
    assert pool.map(functions("fail_with"), [["\udcff"]])[0].error.endswith("ValueError: ?")
    assert pool.map(functions("arrays"), [[0]])[0].value == [0.5, [0, 1]]


def test_the_environment_is_lean(pool, functions):
    assert pool.map(functions("environment"), [[0]])[0].value == ["python", "", False]


def test_a_worker_killed_from_outside_costs_nothing(functions, tmp_path):
    pool = WorkerPool(num_workers=1, timeout=60)
    started, go = tmp_path / "started", tmp_path / "go"

    with ThreadPoolExecutor() as threads:
        mapped = threads.submit(pool.map, functions("wait_for"), [[str(go), str(started)]] * 2)
        wait_until(lambda: started.exists() and started.read_text())
        os.kill(int(started.read_text()), signal.SIGKILL)
        go.touch()
        assert values(mapped.result(LIMIT)) == ["done", "done"]
    (idle,) = pool.map(functions("pid"), [[0]])
    os.kill(idle.value, signal.SIGKILL)
    assert pool.map(functions("double"), [[4]])[0].value == 8
    pool.close()


def test_from_several_threads_at_once(pool, functions):
    with ThreadPoolExecutor(4) as threads:
        mapped = threads.map(lambda k: pool.map(functions("double"), [[k], [k + 1]]), range(4))
        assert [*map(values, mapped)] == [[2 * k, 2 * k + 2] for k in range(4)]


def test_close_ends_a_map_in_another_thread(functions, tmp_path):
    pool = WorkerPool(num_workers=1, timeout=600)
    started = tmp_path / "started"
    with ThreadPoolExecutor() as threads:
        mapped = threads.submit(pool.map, functions("wait_for"), [[str(tmp_path / "never"), str(started)]] * 2)
        wait_until(lambda: started.exists() and started.read_text())
        pool.close()
        pool.close()
        with pytest.raises(Closed):
            mapped.result(LIMIT)
    assert not exists(int(started.read_text()))
    assert pool.map(functions("double"), [[4]])[0].value == 8
    pool.close()


def test_a_dropped_pool_leaves_no_process(functions):
    pool = WorkerPool(num_workers=1)
    pid = pool.map(functions("pid"), [[0]])[0].value
    del pool
    assert not exists(pid)


def test_nothing_survives_a_killed_parent(functions, tmp_path):
    started = tmp_path / "started"
    script = (
        "from grpo_lightning.sandbox.pool import WorkerPool\n"
        f"WorkerPool(2, 1.0).map({functions('wait_for')!r}, [['never', {str(started)!r}]])"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    wait_until(lambda: started.exists() and started.read_text())
    worker = int(started.read_text())
    parent.kill()
    parent.wait()
    wait_until(lambda: not exists(worker))


@pytest.mark.parametrize("name", ["no_such_module.f", "textwrap:no_such_function", "os.sep"])
def test_a_function_that_cannot_be_loaded(pool, name):
    with pytest.raises(LoadError, match=name):
        pool.load(name)
    with pytest.raises(LoadError, match=name):
        pool.map(name, [[1]])


def test_pickles_without_its_processes(functions):
    pool = WorkerPool(num_workers=1, timeout=3.0, memory_limit_mb=99, cpu_seconds=2.0)
    pool.load(functions("double"))
    copy = pickle.loads(pickle.dumps(pool))
    assert (copy.num_workers, copy.timeout, copy.memory_limit_mb, copy.cpu_seconds) == (1, 3.0, 99, 2.0)
    assert copy.map(functions("double"), [[3]])[0].value == 6
    pool.close()
    copy.close()


def test_descriptors_above_1023(functions):
    """`select.select` refuses them; the end of a worker must be seen there, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 2048 if hard == resource.RLIM_INFINITY else min(2048, hard)
    if limit < 1200:
        pytest.skip(f"this machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    pool = WorkerPool(2, timeout=LIMIT, cpu_seconds=0.3)
    try:
        while opened[-1] < 1100:
            opened.append(os.dup(opened[0]))
        assert values(pool.map(functions("double"), [[n] for n in range(4)])) == [2 * n for n in range(4)]
        assert all(worker.socket.fileno() > 1023 for worker in pool._running)
        assert statuses(pool.map(functions("hang"), [[0], [1]])) == ["ok", "timeout"]
        assert statuses(pool.map(functions("die"), [[1]])) == ["crash"]
    finally:
        pool.close()
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
