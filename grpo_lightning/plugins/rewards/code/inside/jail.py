"""Encloses a program that nobody has read, and runs it. Nothing here knows what a test expects.

It takes read-only system folders and an empty one in memory as its root, in namespaces of its own. Stdin has requests,
lines of JSON, each answered by a line `[STATUS, TEXT]`. The first is `[SOURCE, LIMITS]`; `refused` says that this
machine cannot enclose it, `error` that it cannot be built. Each that follows is `[WHAT, TEXT, IS_NEW]`: runs it with
TEXT as its input (`run`), or one of its functions (`call`), or says which of some names it defines (`names`). `IS_NEW`
is true for the first request of a test. Then nothing that the program has started is left.

The limits are those of a program, not of each of its processes: process 1 adds up what they take. It counts the seconds
of CPU time, and those in which no process would run if it could. While the machine does other work neither passes.
"""

import contextlib
import ctypes
import glob
import json
import math
import os
import re
import resource
import select
import shutil
import signal
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any

NEW_ALL = 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
"""Namespaces of mounts, cgroups, names, IPC, users, processes, networks."""
READ_ONLY = struct.pack("4Q", 1 | 2 | 4, 0, 0, 0)  # of mount_setattr: read-only, no set-user-id, no devices
SYSTEM = ["/bin", "/lib", "/lib32", "/lib64", "/sbin", "/etc/ld.so.cache", "/etc/alternatives"]
INSTALLED = ["bin", "sbin", "lib", "lib32", "lib64", "libexec", "include"]
"""The folders of /usr, of /usr/local and of Python that programs see. Others, such as /usr/src, hold people's files."""
SHARED = [f"/usr/share/{name}" for name in ("zoneinfo", "java", "nodejs", "perl", "perl5")]
DEVICES = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
PATH = "/usr/local/bin:/usr/bin:/bin"
USER, NOBODY = 1000, 65534
PROCESSES = 32
OPEN_FILES = 64
PENDING_SIGNALS = 256
LOOK_SECONDS = 0.005
"""Seconds between two looks at what a program takes."""
MIB = 1 << 20
PIPES_MIB = 2  # that the pipes of a process may hold in the kernel: half of OPEN_FILES of 64 KiB
SOCKET_BYTES = 212_992  # that a socket may hold in the kernel
AUDIT, MOUNT_SETATTR = 0xC000003E, 442  # the architecture x86-64, and the number of a system call there
REFUSED = [
    *(41, 101, 310, 311, 312, 321, 298, 323, 438),  # sockets, others' memory and descriptors, bpf, perf
    *(248, 249, 250, 304, 425, 426, 427, 103),  # keys, handles, io_uring, the kernel's log
    *(29, 30, 31, 67, 64, 65, 66, 220, 68, 69, 70, 71),  # shared memory, semaphores and messages of System V
    *(240, 241, 242, 243, 244, 245, 319, 447),  # POSIX's messages, files in memory
    *(253, 254, 255, 294, 300, 301, 206, 188, 189, 190, 463),  # watches on files, asynchronous I/O, attributes
    *(141, 142, 144, 203, 251, 314),  # priorities, also those of process 1
]
"""System calls that no program needs: ways to others, and to memory of the kernel that belongs to no process."""
REFUSED_BY_ARGUMENT = [(302, 0, False, 0), (72, 1, True, 1031)]
"""Number, index of an argument, whether it must equal the value to be refused, and that value.

The limits of another process, and larger pipes."""
LIBC = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raises OSError where the result of a call of the C library is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """Mounts a file system."""
    given = [text.encode() for text in (source, target, kind)]
    check(LIBC.mount(*given, ctypes.c_ulong(flags), data.encode()), f"mount {target}")


def enter_namespaces() -> None:
    """Gives this process namespaces of its own, in which it may mount."""
    maps, is_root = {"setgroups": "deny"}, os.geteuid() == 0
    for kind, own in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
        maps[kind] = f"0 0 1\n{USER} {NOBODY} 1" if is_root else f"{USER} {own} 1"
    if is_root:
        os.setgroups([])
    go, told = os.pipe()
    if not os.fork():  # only a process outside can map a second user
        with contextlib.suppress(OSError):
            os.read(go, 1)
            for kind, text in maps.items():
                Path(f"/proc/{os.getppid()}/{kind}").write_text(text)
            os._exit(0)
        os._exit(1)
    check(LIBC.unshare(NEW_ALL), "unshare")
    os.write(told, b".")
    if os.wait()[1]:
        raise OSError("user ids cannot be mapped")


def make_root(folder: str, hidden: list[str]) -> None:
    """Leaves this process nothing but system folders and an empty `/box`, none of them writable.

    Folders in `hidden` are empty there, though they are inside of a system folder.
    """
    mount("none", "/", flags=0x4000 | 0x40000)  # private, with all below
    mount("none", folder, "tmpfs", data="size=1m,mode=755")
    prefixes = dict.fromkeys(["/usr", "/usr/local", sys.base_prefix])
    installed = [f"{prefix}/{name}" for prefix in prefixes for name in INSTALLED]
    shown = [path for path in [*SYSTEM, *installed, *SHARED] if os.path.exists(path)]
    for path in [*shown, *DEVICES]:
        there = folder + path
        if not os.path.exists(path) or os.path.exists(there):
            continue
        os.makedirs(os.path.dirname(there), exist_ok=True)
        os.mkdir(there) if os.path.isdir(path) else Path(there).touch()
        mount(path, there, flags=0x1000 | 0x4000)  # bind, with all below
        if path not in DEVICES:
            given = (-100, there.encode(), 0x8000, READ_ONLY, ctypes.c_size_t(len(READ_ONLY)))
            check(LIBC.syscall(MOUNT_SETATTR, *given), "mount_setattr")
    for prefix in prefixes:  # what is installed may hold answers
        for path in glob.glob(f"{folder}{prefix}/lib/python3*/*-packages"):
            mount("none", path, "tmpfs", flags=1)
    hide(folder, hidden, [os.path.realpath(path) for path in shown])
    os.mkdir(f"{folder}/box")
    if not os.path.exists(f"{folder}/tmp"):
        os.symlink("box", f"{folder}/tmp")
    os.chroot(folder)  # from here nobody without rights gets out, or into a new user namespace
    os.chdir("/")


def hide(folder: str, hidden: list[str], shown: list[str]) -> None:
    """Makes folders empty that are inside of a shown one. Raises OSError where Python itself would be hidden."""
    library = os.path.realpath(os.path.dirname(os.__file__))
    for path in map(os.path.realpath, hidden):
        is_inside = any(path == root or path.startswith(f"{root}/") for root in shown)
        if is_inside and (path in shown or f"{library}/".startswith(f"{path}/")):
            raise OSError(f"programs see {path}, a folder of the system: work in another, with the data outside of it")
        if is_inside and os.path.isdir(folder + path):
            mount("none", folder + path, "tmpfs", flags=1)


def filter_system_calls() -> None:
    """Refuses what no program needs, see `REFUSED`, and the numbers of other architectures."""
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    refuse, kill, allow = (give, 0, 0, 0x50001), (give, 0, 0, 0x80000000), (give, 0, 0, 0x7FFF0000)
    lines = [(load, 0, 0, 4), (equal, 1, 0, AUDIT), kill, (load, 0, 0, 0), (at_least, 0, 1, 0x40000000), refuse]
    for number in REFUSED:
        lines += [(equal, 0, 1, number), refuse]
    for number, index, is_equal, value in REFUSED_BY_ARGUMENT:
        compared = (equal, 0, 1, value) if is_equal else (equal, 1, 0, value)
        lines += [(equal, 0, 4, number), (load, 0, 0, 16 + 8 * index), compared, refuse, allow]
    text = b"".join(struct.pack("HBBI", *line) for line in [*lines, allow])
    address = ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p).value
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(text) // 8, address))
    check(LIBC.prctl(38, 1, 0, 0, 0), "no_new_privs")
    check(LIBC.prctl(22, 2, program, 0, 0), "seccomp")


def drop_rights(memory_mb: int) -> None:
    """Takes from process 1 all but a folder in memory."""
    mount("none", "/box", "tmpfs", flags=2 | 4, data=f"size={memory_mb // 8}m,nr_inodes=4096,mode=777")
    mount("none", "/", flags=0x20 | 0x1000 | 1)  # remount, of this mount alone, read-only
    if os.geteuid() == 0:
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
    check(LIBC.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)), "capset")
    os.chdir("/box")
    resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES, PROCESSES))


class Meter:
    """Adds up what the processes of a program take. It reads the machine's /proc, which the program does not see."""

    def __init__(self) -> None:
        self.folder = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        self.ticks = os.sysconf("SC_CLK_TCK")
        if not os.path.exists("/proc/thread-self/children"):
            raise OSError("/proc does not tell the children of a process")

    def read(self, path: str) -> str:
        """The beginning of a file; empty where its process has ended, or it may not be read."""
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDONLY, dir_fd=self.folder)
            try:
                return os.read(handle, 1 << 16).decode(errors="replace")
            finally:
                os.close(handle)
        return ""

    def threads(self, process: str) -> list[str]:
        """The threads of a process."""
        with contextlib.suppress(OSError):
            handle = os.open(f"{process}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.folder)
            try:
                return os.listdir(handle)
            finally:
                os.close(handle)
        return []

    def descendants(self) -> dict[str, list[str]]:
        """The fields of `/proc/PROCESS/stat` after the name, of all that this process has started and what that has."""
        fields_of: dict[str, list[str]] = {}
        waiting = self.read("thread-self/children").split()
        while waiting:
            process = waiting.pop()
            fields_of[process] = fields = self.read(f"{process}/stat").rpartition(")")[2].split()
            threads = [process] if fields[17:18] == ["1"] else self.threads(process)
            for thread in threads:
                waiting += self.read(f"{process}/task/{thread}/children").split()
                if thread != process and self.read(f"{process}/task/{thread}/stat").rpartition(") ")[2][:1] == "R":
                    fields[:1] = ["R"]
        return {process: fields for process, fields in fields_of.items() if len(fields) > 17}

    def cpu_seconds(self, fields_of: dict[str, list[str]]) -> float:
        """The CPU time that processes and the ended children of theirs have taken."""
        return sum(int(text) for fields in fields_of.values() for text in fields[11:15]) / self.ticks

    def takes_more(self, processes: Iterable[str], limit: int) -> bool:
        """Whether processes take more memory together than is allowed. Pages that they share count once."""
        # To find out which pages are shared takes time: it is done where they could matter.
        return sum(map(self.resident, processes)) > limit and sum(map(self.resident_share, processes)) > limit

    def resident(self, process: str) -> int:
        """The memory of a process in bytes, without files of the system."""
        return kilobytes(self.read(f"{process}/status"), "RssAnon|RssShmem|VmPTE")

    def resident_share(self, process: str) -> int:
        """The same, with a page that n processes share counted as 1/n."""
        shares = self.read(f"{process}/smaps_rollup")
        return kilobytes(shares, "Pss_Anon|Pss_Shmem") if shares else self.resident(process)

    def sockets(self) -> int:
        """The number of local sockets in this network namespace."""
        row = re.search(r"^UNIX\s+\d+\s+(\d+)", self.read("thread-self/net/protocols"), re.MULTILINE)
        return int(row[1]) if row else 0


def kilobytes(text: str, names: str) -> int:
    """The sum of some rows of a file such as `/proc/self/status`, in bytes."""
    return 1024 * sum(map(int, re.findall(rf"^(?:{names}):\s+(\d+) kB", text, re.MULTILINE)))


CONTAINERS: dict[str, Any] = {kind.__name__: kind for kind in (dict, list, tuple, set, frozenset, bytes, bytearray)}


def plain(value: Any) -> Any:
    """A value as JSON has it. Raises TypeError for one that is no number, text, bytes, list, tuple, dict or set."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    for name, kind in CONTAINERS.items():
        if isinstance(value, kind):
            return {name: [plain(one) for one in (value.items() if kind is dict else value)]}
    raise TypeError(f"a {type(value).__name__} is no plain value")


def value_of(data: Any) -> Any:
    """The value that `plain` wrote. Raises ValueError, TypeError or the like for anything else."""
    if data is None or isinstance(data, str | int | float):
        return data
    ((kind, items),) = data.items()
    values = [value_of(one) for one in items]
    return complex(*values) if kind == "complex" else CONTAINERS[kind](values)


def load(source: str) -> ModuleType:
    """Runs the program as a module."""
    program = sys.modules["solution"] = ModuleType("solution")
    exec(compile(source, "main.py", "exec"), vars(program))
    return program


def answer(what: str, source: str) -> None:
    """Prints what one of the program's functions returns or raises, or which of some names it defines."""
    request = json.loads(sys.stdin.read())
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    program = load(source)
    if what == "names":
        reply: Any = [name for name in request if name in vars(program)]
    else:
        reply = called(program, *value_of(request))
    print(json.dumps(reply), file=answers, flush=True)
    os._exit(0)


def called(program: ModuleType, name: str, args: Any, kwargs: Any) -> dict[str, Any]:
    """What a function of the program returns or raises, for `plain` values."""
    function = getattr(program, name)
    try:
        value = function(*args, **kwargs)
    except Exception as error:
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
        return {"raised": kind.__name__, "text": f"{error}"[:1000]}
    return {"value": plain(value)}


def become(what: str, files: list[int], source: str, limits: dict[str, Any]) -> None:
    """Turns this process into one of the program, which has three files and no other descriptors."""
    os.setsid()
    seconds = math.ceil(limits["seconds"])
    size = limits["file_bytes"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    for target, one in enumerate(files):
        os.dup2(one, target)
    os.closerange(3, OPEN_FILES)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    check(LIBC.prctl(4, 1, 0, 0, 0), "let process 1 see what this process takes")
    if not limits["unsafe"]:
        filter_system_calls()
    if command := limits.get(what):
        os.execvp(command[0], command)
    sys.argv, sys.path = ["main.py"], [os.getcwd(), *sys.path]
    vars(sys.modules["builtins"]).update(exit=sys.exit, quit=sys.exit)
    if what in ("call", "names"):
        answer(what, source)
    code = compile(source, "main.py", "exec")
    program = sys.modules["__main__"] = ModuleType("__main__")
    exec(code, vars(program))
    sys.exit()


class Jail:
    """Runs a program as often as it is asked to, and keeps it to its limits. It lives in process 1.

    A run may take `seconds` of CPU time, and wait as long. The runs of a test may take and wait twice as long together.
    """

    def __init__(self, source: str, limits: dict[str, Any], meter: Meter) -> None:
        self.source = source
        self.limits = limits
        self.meter = meter
        self.bytes_before = meter.resident("thread-self") + (limits["memory_mb"] << 20)
        self.seconds_left = math.inf

    def run(self, what: str, text: str, is_new: bool = True) -> tuple[str, str]:
        """Status of the program on an input, and what it printed; or what went wrong."""
        if is_new:
            self.seconds_left = 2 * self.limits["seconds"]
        file_bytes = self.limits["file_bytes"]
        files = [os.memfd_create("file") for _ in range(3)]
        os.pwrite(files[0], text.encode("utf-8", "replace"), 0)
        if not (child := os.fork()):
            become(what, files, self.source, self.limits)
        exit_code, status = self.wait_for(child, files)
        out, err = (os.pread(one, file_bytes, 0) for one in files[1:])
        for one in files:
            os.close(one)
        if status:
            return status, ""
        if len(out) == file_bytes:
            return "too_long", ""
        if exit_code:
            lines = err.decode("utf-8", "replace").strip().splitlines()
            return "error", [f"exit {exit_code}", *lines][-1][:300]
        return "ok", out.decode("utf-8", "replace")

    def wait_for(self, child: int, files: list[int]) -> tuple[int, str]:
        """Exit code of a process, and which limit it reached. Then nothing that it has started is left."""
        handle = os.pidfd_open(child)
        wait_status = 0
        status = ""
        waited = 0.0
        cpu_before = children_seconds()
        last_look = monotonic()
        while not status and not select.select([handle], [], [], LOOK_SECONDS)[0]:
            fields_of = self.meter.descendants()
            time_now = monotonic()
            if all(fields[0] != "R" for fields in fields_of.values()):
                # A look that comes late does not tell what has been before.
                waited += min(time_now - last_look, 10 * LOOK_SECONDS)
            last_look = time_now
            cpu = self.meter.cpu_seconds(fields_of) + children_seconds() - cpu_before
            if max(cpu, waited) > self.limits["seconds"] or cpu + waited > self.seconds_left:
                status = "timeout"
            elif self.meter.takes_more(fields_of, self.bytes_before - self.kernel_bytes(len(fields_of), files)):
                status = "memory"
        os.close(handle)
        alone = os.getpid() == 1
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        with contextlib.suppress(ChildProcessError):
            while True:
                for other in ["-1"] if alone else children.read_text().split():  # -1: all of these namespaces
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(other), signal.SIGKILL)
                pid, ended = os.wait()
                wait_status = ended if pid == child else wait_status
        self.seconds_left -= children_seconds() - cpu_before + waited
        exit_code = os.waitstatus_to_exitcode(wait_status)
        return exit_code, "timeout" if exit_code == -signal.SIGXCPU else status

    def kernel_bytes(self, num_processes: int, files: list[int]) -> int:
        """The memory that belongs to no process: files, and what pipes and sockets may hold."""
        files_bytes = sum(512 * os.fstat(file).st_blocks for file in files)
        if self.limits["unsafe"]:
            return files_bytes
        box = os.statvfs(".")
        files_bytes += (box.f_blocks - box.f_bfree) * box.f_frsize
        return files_bytes + SOCKET_BYTES * self.meter.sockets() + (PIPES_MIB << 20) * max(0, num_processes - 1)


def children_seconds() -> float:
    """The CPU time that children of this process have taken which have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def tell(status: str, text: str) -> None:
    """Answers a request."""
    print(json.dumps([status, text]), flush=True)


def enclose(limits: dict[str, Any]) -> bool:
    """Gives this process namespaces and limits. Returns False in the process outside of them, once all has ended."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    memory = used + (limits["memory_mb"] << 20)
    if not limits["unsafe"]:
        if os.uname().machine != "x86_64":
            raise OSError("system calls are filtered on x86-64 alone")
        enter_namespaces()
        make_root(os.getcwd(), limits["hidden"])
    if child := os.fork():
        signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
        os.waitpid(child, 0)
        return False
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which process 1 of a namespace does not get from inside
    if not limits["unsafe"]:
        drop_rights(limits["memory_mb"])
    amounts = {"AS": memory, "NOFILE": OPEN_FILES, "SIGPENDING": PENDING_SIGNALS, "CORE": 0}
    for kind, amount in amounts.items():
        set_limit(kind, amount)
    check(LIBC.prctl(1, signal.SIGKILL, 0, 0, 0), "end with the parent")
    check(LIBC.prctl(36, 1, 0, 0, 0), "orphans become children")
    os.environ.update(PATH=PATH, HOME=os.getcwd(), TMPDIR=os.getcwd(), LANG="C.UTF-8")
    for command in (limits["build"], limits["run"]):
        if command and "/" not in command[0] and not shutil.which(command[0]):
            raise OSError(f"there is no {command[0]} in {PATH}, where programs look for commands")
    return True


def set_limit(kind: str, amount: int) -> None:
    """Sets a limit of this process. Raises OSError where this machine allows less."""
    try:
        resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (amount, amount))
    except ValueError as error:
        hard = resource.getrlimit(getattr(resource, f"RLIMIT_{kind}"))[1]
        raise OSError(f"the limit {kind} of a program is {amount}, but `ulimit` allows {hard} here") from error


def main() -> None:
    """Serves as process 1 of new namespaces, until its parent ends, or gets SIGTERM."""
    source, limits = json.loads(sys.stdin.readline())
    try:
        meter = Meter()
        if not enclose(limits):
            return
    except OSError as error:
        return tell("refused", str(error))
    server = os.getpid()
    try:
        Path("main").write_text(source, errors="replace")
        jail = Jail(source, limits, meter)
        tell(*(jail.run("build", "") if limits["build"] else ("ok", "")))
        while line := sys.stdin.readline():
            tell(*jail.run(*json.loads(line)))
    except Exception as error:
        if os.getpid() != server:  # of the program, in a process of its own
            raise
        tell("refused", f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
