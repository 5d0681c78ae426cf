"""Encloses a program that nobody has read, and runs it. Nothing here knows what a test expects.

It takes read-only system folders and an empty one in memory as its root, in namespaces of its own. Stdin has requests,
lines of JSON, each answered by a line `{"status", "text"}`. The first is `[SOURCE, LIMITS]`; `refused` says that this
machine cannot enclose it, `error` that it cannot be compiled. Each that follows is `[WHAT, TEXT]`: runs it with TEXT as
its input (`run`), or one of its functions (`call`). Then nothing that the program has started is left.
"""

import contextlib
import ctypes
import glob
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from types import ModuleType
from typing import Any

NEW_ALL = 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
"""Namespaces of mounts, cgroups, names, IPC, users, processes, networks."""
READ_ONLY = struct.pack("4Q", 1 | 2 | 4, 0, 0, 0)  # of mount_setattr: read-only, no set-user-id, no devices
SYSTEM = ["/usr", "/bin", "/lib", "/lib32", "/lib64", "/sbin", "/etc/ld.so.cache", "/etc/alternatives"]
DEVICES = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
USER, NOBODY = 1000, 65534
PROCESSES, OPEN_FILES = 32, 64
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "x86_64": {
        "audit": 0xC000003E, "clone": 56, "socket": 41, "pivot_root": 155,
        "refused": [101, 310, 311, 272, 308, 321, 298, 323, 248, 249, 250, 304, 29, 319, 425, 426, 427, 438],
    },
    "aarch64": {
        "audit": 0xC00000B7, "clone": 220, "socket": 198, "pivot_root": 41,
        "refused": [117, 270, 271, 97, 268, 280, 241, 282, 217, 218, 219, 265, 194, 279, 425, 426, 427, 438],
    },
}  # fmt: skip
"""Numbers of system calls. Refused: others' memory and descriptors, namespaces, bpf, perf, keys, handles, shared memory,
io_uring."""
CLONE3, MOUNT_SETATTR = 435, 442
NUMBERS = ARCHITECTURES.get(os.uname().machine)
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


def read(path: str) -> str:
    """The text of a file."""
    with open(path, encoding="utf-8") as file:
        return file.read()


def write(path: str, text: str) -> None:
    """Writes a file."""
    with open(path, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)


def enter_namespaces() -> None:
    """Gives this process namespaces of its own, in which it is root."""
    user, group, is_root = os.geteuid(), os.getegid(), os.geteuid() == 0
    go, told = os.pipe()
    if is_root and not os.fork():  # only a process outside can map a second user
        os.read(go, 1)
        for kind in ("uid_map", "gid_map"):
            write(f"/proc/{os.getppid()}/{kind}", f"0 0 1\n{USER} {NOBODY} 1")
        os._exit(0)
    check(LIBC.unshare(NEW_ALL), "unshare")
    os.write(told, b".")
    if is_root:
        if os.wait()[1]:
            raise OSError("user ids cannot be mapped")
    else:
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{USER} {user} 1")
        write("/proc/self/gid_map", f"{USER} {group} 1")


def make_root(folder: str) -> None:
    """Leaves this process nothing but system folders and an empty `/work`, none of them writable."""
    assert NUMBERS
    mount("none", "/", flags=0x4000 | 0x40000)  # private, with all below
    mount("none", folder, "tmpfs", data="size=1m,mode=755")
    for path in dict.fromkeys([*SYSTEM, sys.base_prefix, *DEVICES]):
        there = folder + path
        if not os.path.exists(path) or os.path.exists(there):
            continue
        os.makedirs(os.path.dirname(there), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), there)
            continue
        os.mkdir(there) if os.path.isdir(path) else write(there, "")
        mount(path, there, flags=0x1000 | 0x4000)  # bind, with all below
        if path not in DEVICES:
            given = (-100, there.encode(), 0x8000, READ_ONLY, ctypes.c_size_t(len(READ_ONLY)))
            check(LIBC.syscall(MOUNT_SETATTR, *given), "mount_setattr")
    for prefix in {sys.base_prefix, "/usr", "/usr/local"}:  # what is installed may hold answers
        for path in glob.glob(f"{folder}{prefix}/lib/python3*/*-packages"):
            mount("none", path, "tmpfs", flags=1)
    os.mkdir(f"{folder}/work")
    if not os.path.exists(f"{folder}/tmp"):
        os.symlink("work", f"{folder}/tmp")
    os.chdir(folder)
    check(LIBC.syscall(NUMBERS["pivot_root"], b".", b"."), "pivot_root")
    check(LIBC.umount2(b".", 2), "umount2")
    os.chdir("/")


def filter_system_calls() -> None:
    """Refuses what no program needs: see `ARCHITECTURES`, new namespaces, and sockets of a network."""
    assert NUMBERS

    def line(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
        return struct.pack("HBBI", code, true, false, value)

    load, equal, at_least, has, give = 0x20, 0x15, 0x35, 0x45, 0x06
    refuse, absent, kill, allow = 0x50000 | 1, 0x50000 | 38, 0x80000000, 0x7FFF0000
    lines = [line(load, 4), line(equal, NUMBERS["audit"], 1), line(give, kill), line(load, 0)]
    lines += [line(at_least, 0x40000000, 0, 1), line(give, refuse)]  # the numbers of another ABI
    lines += [line(equal, CLONE3, 0, 1), line(give, absent)]  # `clone` is tried then
    for number in NUMBERS["refused"]:
        lines += [line(equal, number, 0, 1), line(give, refuse)]
    arguments = {"clone": line(has, NEW_ALL, 0, 1), "socket": line(equal, socket.AF_UNIX, 1, 0)}
    for name, fits in arguments.items():
        lines += [line(equal, NUMBERS[name], 0, 4), line(load, 16), fits, line(give, refuse), line(load, 0)]
    code = b"".join([*lines, line(give, allow)])
    text = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(text)))
    check(LIBC.prctl(38, 1, 0, 0, 0), "no_new_privs")
    check(LIBC.prctl(22, 2, program, 0, 0), "seccomp")


def drop_rights(memory_mb: int) -> None:
    """Takes from process 1 all but a folder in memory."""
    mount("none", "/work", "tmpfs", flags=2 | 4, data=f"size={memory_mb // 8}m,nr_inodes=4096,mode=777")
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
    check(LIBC.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)), "capset")
    os.chdir("/work")
    resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES, PROCESSES))


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
    if not isinstance(data, dict | list):
        return data
    ((kind, items),) = data.items()
    values = [value_of(one) for one in items]
    return complex(*values) if kind == "complex" else CONTAINERS[kind](values)


def call_function(code: Any) -> None:
    """Runs the program as a module, and prints what one of its functions returns or raises."""
    name, args, kwargs = value_of(json.loads(sys.stdin.read()))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    program = sys.modules["solution"] = ModuleType("solution")
    exec(code, vars(program))
    function = getattr(program, name)
    try:
        value = function(*args, **kwargs)
    except Exception as error:
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
        told = {"raised": kind.__name__, "text": f"{error}"[:1000]}
    else:
        told = {"value": plain(value)}
    print(json.dumps(told), file=answers, flush=True)
    os._exit(0)


def become(what: str, files: list[int], code: Any, limits: dict[str, Any]) -> None:
    """Turns this process into one of the program, which has three files and no other descriptors."""
    os.setsid()
    seconds, size = round(limits["seconds"]), file_size(limits)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    for target, one in enumerate(files):
        os.dup2(one, target)
    os.closerange(3, OPEN_FILES)
    if not limits["unsafe"]:
        filter_system_calls()
    if command := limits["build" if what == "build" else "command"]:
        os.execvp(command[0], command)
    sys.argv, sys.path = ["main.py"], [os.getcwd(), *sys.path]
    vars(sys.modules["builtins"]).update(exit=sys.exit, quit=sys.exit)
    if what == "call":
        call_function(code)
    program = sys.modules["__main__"] = ModuleType("__main__")
    exec(code, vars(program))
    sys.exit()


def file_size(limits: dict[str, Any]) -> int:
    """Bytes that a file, or an output, may have."""
    return int(max(1, limits["memory_mb"] // 64) << 20)


def run(what: str, text: str, code: Any, limits: dict[str, Any]) -> dict[str, str]:
    """Status of the program on an input, and what it printed; or what went wrong."""
    files = [os.memfd_create("file") for _ in range(3)]
    os.pwrite(files[0], text.encode("utf-8", "replace"), 0)
    if not (child := os.fork()):
        become(what, files, code, limits)
    exit_code, late = wait_for(child, 4 * limits["seconds"])
    out, err = (os.pread(one, file_size(limits), 0) for one in files[1:])
    for one in files:
        os.close(one)
    if late:
        return {"status": "timeout", "text": ""}
    if len(out) == file_size(limits):
        return {"status": "too_long", "text": ""}
    if exit_code:
        lines = err.decode("utf-8", "replace").strip().splitlines()
        return {"status": "error", "text": [f"exit {exit_code}", *lines][-1][:300]}
    return {"status": "ok", "text": out.decode("utf-8", "replace")}


def wait_for(child: int, seconds: float) -> tuple[int, bool]:
    """Exit code of a process, and whether it took too long. Then nothing that it has started is left."""
    handle, status = os.pidfd_open(child), 0
    late = not select.select([handle], [], [], seconds)[0]
    os.close(handle)
    with contextlib.suppress(ChildProcessError):
        while True:
            end_others()
            pid, ended = os.wait()
            status = ended if pid == child else status
    code = os.waitstatus_to_exitcode(status)
    return code, late or code == -signal.SIGXCPU


def end_others() -> None:
    """Kills all other processes of these namespaces; without any, the children of this process."""
    alone = os.getpid() == 1
    for pid in ["-1"] if alone else read(f"/proc/self/task/{os.getpid()}/children").split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def tell(answer: dict[str, str]) -> None:
    """Answers a request."""
    print(json.dumps(answer), flush=True)


def main() -> None:
    """Serves as process 1 of new namespaces, until its parent ends, or gets SIGTERM."""
    source, limits = json.loads(sys.stdin.readline())
    used, code = int(read("/proc/self/statm").split()[0]) * resource.getpagesize(), None
    most = used + (limits["memory_mb"] << 20)
    try:
        if not limits["unsafe"]:
            enter_namespaces()
            make_root(os.getcwd())
        if child := os.fork():
            signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
            os.waitpid(child, 0)
            return
        if not limits["unsafe"]:
            drop_rights(limits["memory_mb"])
        for kind, limit in ((resource.RLIMIT_AS, most), (resource.RLIMIT_NOFILE, OPEN_FILES), (resource.RLIMIT_CORE, 0)):
            resource.setrlimit(kind, (limit, limit))
        check(LIBC.prctl(1, signal.SIGKILL, 0, 0, 0), "end with the parent")
        check(LIBC.prctl(36, 1, 0, 0, 0), "orphans become children")
    except OSError as failure:
        return tell({"status": "refused", "text": str(failure)})
    os.environ.update(PATH="/usr/local/bin:/usr/bin:/bin", HOME=os.getcwd(), TMPDIR=os.getcwd(), LANG="C.UTF-8")
    write(limits["file"], source)
    answer = {"status": "ok", "text": ""}
    try:
        code = None if limits["command"] else compile(source, "main.py", "exec")
    except Exception as failure:
        answer = {"status": "error", "text": f"{type(failure).__name__}: {failure}"[:300]}
    if limits["build"]:
        answer = run("build", "", code, limits)
    tell(answer)
    while line := sys.stdin.readline():
        tell(run(*json.loads(line), code, limits))


if __name__ == "__main__":
    main()
