"""Encloses a program that nobody has read, and runs it. Nothing here knows what a test expects.

The program's root is an empty folder in memory with read-only system folders, in namespaces of its own. Stdin has
requests, lines of JSON. Each is answered by a line `[STATUS, TEXT]`. The first request is `[SOURCE, LIMITS]`; `refused`
says that this machine cannot enclose the program, `error` that it cannot be built. Each later request is
`[WHAT, TEXT, IS_NEW]`: it runs the program with TEXT as its input (`run`), or one of its functions (`call`), or finds
out which names of a list it defines (`names`). `IS_NEW` is true for the first request of a test. After each request no
process that the program has started is left.

The limits hold for a program, not for each of its processes: process 1 adds up what they take. It counts the seconds of
CPU time, and the seconds in which no process would run if it could. While the machine does other work neither passes.
"""

import builtins
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
"""Seconds between two looks at the CPU time and memory of a program."""
MIB = 1 << 20
PIPES_BYTES = 2 * MIB
"""The bytes that the pipes of a process may hold in the kernel: half of OPEN_FILES of 64 KiB."""
SOCKET_BYTES = 212_992
"""The bytes that a socket may hold in the kernel."""

# ----- Linux's numbers, under their names in its headers

CLONE_NEW_ALL = (
    0x20000  # CLONE_NEWNS: mounts
    | 0x2000000  # CLONE_NEWCGROUP
    | 0x4000000  # CLONE_NEWUTS: the name of the machine
    | 0x8000000  # CLONE_NEWIPC: System V's and POSIX's messages
    | 0x10000000  # CLONE_NEWUSER
    | 0x20000000  # CLONE_NEWPID
    | 0x40000000  # CLONE_NEWNET
)
"""The kinds of namespaces that `unshare` makes new."""
MS_RDONLY = 1
MS_NOSUID_NODEV = 2 | 4
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
SYS_MOUNT_SETATTR = 442
AT_FDCWD = -100
AT_RECURSIVE = 0x8000
MOUNT_ATTR_READ_ONLY = struct.pack("4Q", MS_RDONLY | MS_NOSUID_NODEV, 0, 0, 0)
"""The `struct mount_attr` of a read-only mount without set-user-id and devices. Its flags have the values of MS_*."""
AUDIT_ARCH_X86_64 = 0xC000003E
X32_SYSCALL_BIT = 0x40000000
BPF_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS: reads a word of `struct seccomp_data`
BPF_JUMP_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
BPF_JUMP_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
BPF_RETURN = 0x06  # BPF_RET | BPF_K
REFUSE = (BPF_RETURN, 0, 0, 0x50001)  # SECCOMP_RET_ERRNO | EPERM
KILL = (BPF_RETURN, 0, 0, 0x80000000)  # SECCOMP_RET_KILL_PROCESS
ALLOW = (BPF_RETURN, 0, 0, 0x7FFF0000)  # SECCOMP_RET_ALLOW
REFUSED_CALLS = """
sockets, the memory and the descriptors of others, bpf, perf:
    socket=41 ptrace=101 process_vm_readv=310 process_vm_writev=311 kcmp=312 bpf=321 perf_event_open=298
    userfaultfd=323 pidfd_getfd=438
keys, handles, io_uring, the kernel's log:
    add_key=248 request_key=249 keyctl=250 open_by_handle_at=304 io_uring_setup=425 io_uring_enter=426
    io_uring_register=427 syslog=103
shared memory, semaphores and messages of System V:
    shmget=29 shmat=30 shmctl=31 shmdt=67 semget=64 semop=65 semctl=66 semtimedop=220 msgget=68 msgsnd=69
    msgrcv=70 msgctl=71
POSIX's messages, files in memory:
    mq_open=240 mq_unlink=241 mq_timedsend=242 mq_timedreceive=243 mq_notify=244 mq_getsetattr=245
    memfd_create=319 memfd_secret=447
watches on files, asynchronous I/O, attributes:
    inotify_init=253 inotify_add_watch=254 inotify_rm_watch=255 inotify_init1=294 fanotify_init=300
    fanotify_mark=301 io_setup=206 setxattr=188 lsetxattr=189 fsetxattr=190 setxattrat=463
priorities, also those of process 1:
    setpriority=141 sched_setparam=142 sched_setscheduler=144 sched_setaffinity=203 ioprio_set=251
    sched_setattr=314
"""
"""System calls of x86-64 that no program needs: ways to others, and to kernel memory that belongs to no process."""
REFUSED_BY_ARGUMENT = [
    (302, 0, False, 0),  # prlimit64: the limits of another process
    (72, 1, True, 1031),  # fcntl with F_SETPIPE_SZ: larger pipes
]
"""Number of a system call, index of an argument, whether it must equal the value to be refused, and that value."""
LIBC = ctypes.CDLL(None, use_errno=True)


def check(result: int, purpose: str) -> None:
    """Raises OSError where the result of a call of the C library is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{purpose}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """Mounts a file system."""
    names = [text.encode() for text in (source, target, kind)]
    check(LIBC.mount(*names, ctypes.c_ulong(flags), data.encode()), f"mount {target}")


def enter_namespaces() -> None:
    """Gives this process namespaces of its own, in which it may mount."""
    # Inside, root stays root and has a second user without rights beside it; any other user becomes that one.
    is_root = os.geteuid() == 0
    maps = {"setgroups": "deny"}
    for kind, outer_id in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
        maps[kind] = f"0 0 1\n{USER} {NOBODY} 1" if is_root else f"{USER} {outer_id} 1"
    if is_root:
        os.setgroups([])

    # Only a process outside can map a second user: a child, which waits until the namespaces are there.
    read_end, write_end = os.pipe()
    if not os.fork():
        with contextlib.suppress(OSError):
            os.read(read_end, 1)
            for kind, text in maps.items():
                Path(f"/proc/{os.getppid()}/{kind}").write_text(text)
            os._exit(0)
        os._exit(1)
    check(LIBC.unshare(CLONE_NEW_ALL), "unshare")
    os.write(write_end, b".")
    if os.wait()[1]:
        raise OSError("user ids cannot be mapped")


def make_root(folder: str, hidden: list[str]) -> None:
    """Leaves this process nothing but system folders and an empty `/box`, none of them writable.

    Folders in `hidden` are empty there, though they are inside of a system folder.
    """
    # The new root is an empty file system in memory. No mount below is seen outside of the namespaces.
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("none", folder, "tmpfs", data="size=1m,mode=755")

    # The folders of the system are bound into it, read-only.
    prefixes = dict.fromkeys(["/usr", "/usr/local", sys.base_prefix])
    installed = [f"{prefix}/{name}" for prefix in prefixes for name in INSTALLED]
    shown = [path for path in [*SYSTEM, *installed, *SHARED] if os.path.exists(path)]
    for path in [*shown, *DEVICES]:
        target = folder + path
        if not os.path.exists(path) or os.path.exists(target):
            continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.mkdir(target) if os.path.isdir(path) else Path(target).touch()
        mount(path, target, flags=MS_BIND | MS_REC)
        if path not in DEVICES:
            attributes = MOUNT_ATTR_READ_ONLY, ctypes.c_size_t(len(MOUNT_ATTR_READ_ONLY))
            result = LIBC.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, target.encode(), AT_RECURSIVE, *attributes)
            check(result, "mount_setattr")

    # Installed packages and the hidden folders may hold answers.
    for prefix in prefixes:
        for path in glob.glob(f"{folder}{prefix}/lib/python3*/*-packages"):
            mount("none", path, "tmpfs", flags=MS_RDONLY)
    hide(folder, hidden, [os.path.realpath(path) for path in shown])
    os.mkdir(f"{folder}/box")
    if not os.path.exists(f"{folder}/tmp"):
        os.symlink("box", f"{folder}/tmp")

    # From here nobody without rights gets out, or into a new user namespace.
    os.chroot(folder)
    os.chdir("/")


def hide(folder: str, hidden: list[str], shown: list[str]) -> None:
    """Makes folders empty that are inside of a shown one. Raises OSError where Python itself would be hidden."""
    library = os.path.realpath(os.path.dirname(os.__file__))
    for path in map(os.path.realpath, hidden):
        is_inside = any(path == root or path.startswith(f"{root}/") for root in shown)
        if is_inside and (path in shown or f"{library}/".startswith(f"{path}/")):
            raise OSError(f"programs see {path}, a folder of the system: work in another, with the data outside of it")
        if is_inside and os.path.isdir(folder + path):
            mount("none", folder + path, "tmpfs", flags=MS_RDONLY)


def filter_system_calls() -> None:
    """Refuses the system calls of `REFUSED_CALLS` and `REFUSED_BY_ARGUMENT`, and the numbers of other architectures.

    A filter is a program for seccomp. Each instruction is a code, how many instructions to skip if a comparison holds
    and if it does not, and a value: of `BPF_LOAD` the place in `struct seccomp_data`, which has the number of the
    system call at 0, the architecture at 4, and the arguments, of eight bytes each, from 16 on.
    """
    # Other architectures end the process; x32, whose calls have the same numbers with one more bit, gets an error.
    instructions = [
        (BPF_LOAD, 0, 0, 4),
        (BPF_JUMP_EQUAL, 1, 0, AUDIT_ARCH_X86_64),
        KILL,
        (BPF_LOAD, 0, 0, 0),
        (BPF_JUMP_AT_LEAST, 0, 1, X32_SYSCALL_BIT),
        REFUSE,
    ]
    for number in re.findall(r"=(\d+)", REFUSED_CALLS):
        instructions += [(BPF_JUMP_EQUAL, 0, 1, int(number)), REFUSE]
    # Where the number is another one, the four instructions behind it are skipped.
    for call, index, is_equal, value in REFUSED_BY_ARGUMENT:
        skips = (0, 1) if is_equal else (1, 0)
        compared = (BPF_JUMP_EQUAL, *skips, value)
        instructions += [(BPF_JUMP_EQUAL, 0, 4, call), (BPF_LOAD, 0, 0, 16 + 8 * index), compared, REFUSE, ALLOW]

    # `struct sock_filter` of each instruction, and `struct sock_fprog` of all.
    text = b"".join(struct.pack("HBBI", *instruction) for instruction in [*instructions, ALLOW])
    address = ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p).value
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(text) // 8, address))
    set_process(38, 1, "no_new_privs")  # PR_SET_NO_NEW_PRIVS
    check(LIBC.prctl(22, 2, program, 0, 0), "seccomp")  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def set_process(option: int, value: int, purpose: str) -> None:
    """Sets an attribute of this process by `prctl`."""
    check(LIBC.prctl(option, value, 0, 0, 0), purpose)


def drop_rights(memory_mb: int) -> None:
    """Takes from process 1 all but a folder in memory."""
    mount("none", "/box", "tmpfs", flags=MS_NOSUID_NODEV, data=f"size={memory_mb // 8}m,nr_inodes=4096,mode=777")
    mount("none", "/", flags=MS_REMOUNT | MS_BIND | MS_RDONLY)  # of this mount alone
    if os.geteuid() == 0:
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
    # Version 3 of Linux's capabilities, of this process: none.
    check(LIBC.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)), "capset")
    os.chdir("/box")
    resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES, PROCESSES))


class Meter:
    """Adds up the CPU time and memory of a program's processes, by the machine's /proc, which it does not see."""

    def __init__(self) -> None:
        self.folder = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        self.ticks = os.sysconf("SC_CLK_TCK")
        if not os.path.exists("/proc/thread-self/children"):
            raise OSError("/proc does not tell the children of a process")

    def read(self, path: str) -> str:
        """Returns the beginning of a file; empty where its process has ended, or it may not be read."""
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDONLY, dir_fd=self.folder)
            try:
                return os.read(handle, 1 << 16).decode(errors="replace")
            finally:
                os.close(handle)
        return ""

    def threads(self, process: str) -> list[str]:
        """Returns the threads of a process."""
        with contextlib.suppress(OSError):
            handle = os.open(f"{process}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.folder)
            try:
                return os.listdir(handle)
            finally:
                os.close(handle)
        return []

    def descendants(self) -> dict[str, list[str]]:
        """Returns the fields of `/proc/PROCESS/stat` after the name, of each descendant of this process.

        A process counts as running if one of its threads runs.
        """
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
        """Returns the CPU time that processes and their ended children have taken: fields 14 to 17 of `stat`."""
        return sum(int(text) for fields in fields_of.values() for text in fields[11:15]) / self.ticks

    def takes_more(self, processes: Iterable[str], limit: int) -> bool:
        """Tells whether processes take more memory together than is allowed. Pages that they share count once."""
        # To find out which pages are shared takes time: it is done where they could matter.
        return sum(map(self.resident, processes)) > limit and sum(map(self.resident_share, processes)) > limit

    def resident(self, process: str) -> int:
        """Returns the memory of a process in bytes, without files of the system."""
        return kilobytes(self.read(f"{process}/status"), "RssAnon|RssShmem|VmPTE")

    def resident_share(self, process: str) -> int:
        """Returns the memory of a process in bytes; a page that n processes share counts as 1/n."""
        shares = self.read(f"{process}/smaps_rollup")
        return kilobytes(shares, "Pss_Anon|Pss_Shmem") if shares else self.resident(process)

    def sockets(self) -> int:
        """Returns the number of local sockets in this network namespace."""
        row = re.search(r"^UNIX\s+\d+\s+(\d+)", self.read("thread-self/net/protocols"), re.MULTILINE)
        return int(row[1]) if row else 0


def kilobytes(text: str, names: str) -> int:
    """Returns the sum of some rows of a file such as `/proc/self/status`, in bytes."""
    return 1024 * sum(map(int, re.findall(rf"^(?:{names}):\s+(\d+) kB", text, re.MULTILINE)))


CONTAINERS: dict[str, Any] = {kind.__name__: kind for kind in (dict, list, tuple, set, frozenset, bytes, bytearray)}


def plain(value: Any) -> Any:
    """Returns a value as JSON. Raises TypeError unless it is a number, text, bytes, list, tuple, dict or set."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    for name, kind in CONTAINERS.items():
        if isinstance(value, kind):
            return {name: [plain(item) for item in (value.items() if kind is dict else value)]}
    raise TypeError(f"a {type(value).__name__} is no plain value")


def value_of(data: Any) -> Any:
    """Returns the value that `plain` wrote. Raises ValueError, TypeError or the like for anything else."""
    if data is None or isinstance(data, str | int | float):
        return data
    ((kind, items),) = data.items()
    values = [value_of(item) for item in items]
    return complex(*values) if kind == "complex" else CONTAINERS[kind](values)


def load(source: str) -> ModuleType:
    """Runs the program as a module."""
    program = sys.modules["solution"] = ModuleType("solution")
    exec(compile(source, "main.py", "exec"), vars(program))
    return program


def answer(what: str, source: str) -> None:
    """Prints what one of the program's functions returns or raises, or which of some names it defines."""
    request = json.loads(sys.stdin.read())
    # What the program prints is no answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    program = load(source)
    if what == "names":
        reply: Any = [name for name in request if name in vars(program)]
    else:
        reply = call(program, *value_of(request))
    print(json.dumps(reply), file=answers, flush=True)
    os._exit(0)


def call(program: ModuleType, name: str, args: Any, kwargs: Any) -> dict[str, Any]:
    """Calls a function of the program; returns its value, or the exception of Python's that it raised."""
    function = getattr(program, name)
    try:
        value = function(*args, **kwargs)
    except Exception as error:
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
        return {"raised": kind.__name__, "text": f"{error}"[:1000]}
    return {"value": plain(value)}


def become(what: str, files: list[int], source: str, limits: dict[str, Any]) -> None:
    """Turns this process into one of the program, which has three files and no other descriptors."""
    # Limits of this process alone; `Jail` keeps the program to its limits.
    os.setsid()
    seconds = math.ceil(limits["seconds"])
    size = limits["file_bytes"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    for target, file in enumerate(files):
        os.dup2(file, target)
    os.closerange(3, OPEN_FILES)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    set_process(4, 1, "let process 1 see what this process takes")  # PR_SET_DUMPABLE
    if not limits["unsafe"]:
        filter_system_calls()

    # From here this is the program: a command, a request for names or a function, or a script.
    if command := limits.get(what):
        os.execvp(command[0], command)
    sys.argv = ["main.py"]
    sys.path.insert(0, os.getcwd())
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    if what in ("call", "names"):
        answer(what, source)
    code = compile(source, "main.py", "exec")
    program = sys.modules["__main__"] = ModuleType("__main__")
    exec(code, vars(program))
    sys.exit()


class Jail:
    """Runs a program once per request, within its limits. It lives in process 1.

    A run may take `seconds` of CPU time, and wait as long. The runs of a test may take and wait twice as long together.
    """

    def __init__(self, source: str, limits: dict[str, Any], meter: Meter) -> None:
        self.source = source
        self.limits = limits
        self.meter = meter
        self.bytes_before = meter.resident("thread-self") + limits["memory_mb"] * MIB
        self.seconds_left = math.inf

    def run(self, what: str, text: str, is_new: bool = True) -> tuple[str, str]:
        """Returns the status of the program on an input, and the text that it printed or what went wrong."""
        if is_new:
            self.seconds_left = 2 * self.limits["seconds"]
        file_bytes = self.limits["file_bytes"]
        files = [os.memfd_create("file") for _ in range(3)]
        os.pwrite(files[0], text.encode("utf-8", "replace"), 0)
        if not (child := os.fork()):
            become(what, files, self.source, self.limits)
        exit_code, status = self.wait_for(child, files)
        output, errors = (os.pread(file, file_bytes, 0) for file in files[1:])
        for file in files:
            os.close(file)
        if status:
            return status, ""
        if len(output) == file_bytes:
            return "too_long", ""
        if exit_code:
            lines = errors.decode("utf-8", "replace").strip().splitlines()
            return "error", [f"exit {exit_code}", *lines][-1][:300]
        return "ok", output.decode("utf-8", "replace")

    def wait_for(self, child: int, files: list[int]) -> tuple[int, str]:
        """Returns the exit code of a process, and which limit it reached. Then nothing that it has started is left."""
        handle = os.pidfd_open(child)
        wait_status = 0
        status = ""
        waited = 0.0
        cpu_before = children_seconds()
        last_look = monotonic()
        while not status and not select.select([handle], [], [], LOOK_SECONDS)[0]:
            # Seconds in which no process would run if it could. A look that comes late does not tell what was before.
            fields_of = self.meter.descendants()
            time_now = monotonic()
            if all(fields[0] != "R" for fields in fields_of.values()):
                waited += min(time_now - last_look, 10 * LOOK_SECONDS)
            last_look = time_now

            # The limits of this run, and of all runs of its test.
            cpu = self.meter.cpu_seconds(fields_of) + children_seconds() - cpu_before
            if max(cpu, waited) > self.limits["seconds"] or cpu + waited > self.seconds_left:
                status = "timeout"
            elif self.meter.takes_more(fields_of, self.bytes_before - self.kernel_bytes(len(fields_of), files)):
                status = "memory"
        os.close(handle)

        # All that it has started ends, until this process has no children: process 1 may kill all others, by -1.
        is_process_1 = os.getpid() == 1
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        with contextlib.suppress(ChildProcessError):
            while True:
                for process in ["-1"] if is_process_1 else children.read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(process), signal.SIGKILL)
                pid, process_status = os.wait()
                wait_status = process_status if pid == child else wait_status
        self.seconds_left -= children_seconds() - cpu_before + waited
        exit_code = os.waitstatus_to_exitcode(wait_status)
        return exit_code, "timeout" if exit_code == -signal.SIGXCPU else status

    def kernel_bytes(self, num_processes: int, files: list[int]) -> int:
        """Returns the bytes of memory that belong to no process: files, and what pipes and sockets may hold."""
        files_bytes = sum(512 * os.fstat(file).st_blocks for file in files)
        if self.limits["unsafe"]:
            return files_bytes
        box = os.statvfs(".")
        files_bytes += (box.f_blocks - box.f_bfree) * box.f_frsize
        return files_bytes + SOCKET_BYTES * self.meter.sockets() + PIPES_BYTES * max(0, num_processes - 1)


def children_seconds() -> float:
    """Returns the CPU seconds of the children of this process that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def tell(status: str, text: str) -> None:
    """Answers a request."""
    print(json.dumps([status, text]), flush=True)


def enclose(limits: dict[str, Any]) -> bool:
    """Gives this process namespaces and limits. Returns False in the process outside of them, once all has ended."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + limits["memory_mb"] * MIB
    if not limits["unsafe"]:
        if os.uname().machine != "x86_64":
            raise OSError("system calls are filtered on x86-64 alone")
        enter_namespaces()
        make_root(os.getcwd(), limits["hidden"])

    # The first process that starts in a new namespace of processes is process 1 there. This one waits outside for it.
    if child := os.fork():
        signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
        os.waitpid(child, 0)
        return False

    # Process 1 gives up what it does not need.
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which process 1 of a namespace does not get from inside
    if not limits["unsafe"]:
        drop_rights(limits["memory_mb"])
    for kind, amount in (("AS", memory), ("NOFILE", OPEN_FILES), ("SIGPENDING", PENDING_SIGNALS), ("CORE", 0)):
        set_limit(kind, amount)
    set_process(1, signal.SIGKILL, "end with the parent")  # PR_SET_PDEATHSIG
    set_process(36, 1, "orphans become children")  # PR_SET_CHILD_SUBREAPER

    # Where programs find commands, and may write.
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
