"""Encloses a program that nobody has read, and runs it. Nothing here knows what a test expects.

It takes read-only system folders and an empty one in memory as its root, in namespaces of its own. Stdin has requests,
lines of JSON, each answered by a line `[STATUS, TEXT]`. The first is `[SOURCE, LIMITS]`; `refused` says that this
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
import struct
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

NEW_ALL = 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
"""Namespaces of mounts, cgroups, names, IPC, users, processes, networks."""
READ_ONLY = struct.pack("4Q", 1 | 2 | 4, 0, 0, 0)  # of mount_setattr: read-only, no set-user-id, no devices
SYSTEM = ["/usr", "/bin", "/lib", "/lib32", "/lib64", "/sbin", "/etc/ld.so.cache", "/etc/alternatives"]
DEVICES = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
USER, NOBODY = 1000, 65534
PROCESSES, OPEN_FILES = 32, 64
AUDIT, MOUNT_SETATTR = 0xC000003E, 442  # the architecture x86-64, and the number of a system call there
REFUSED = [41, 101, 310, 311, 321, 298, 323, 248, 249, 250, 304, 29, 319, 425, 426, 427, 438]
"""Sockets, others' memory and descriptors, bpf, perf, keys, handles, shared memory, io_uring."""
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


def make_root(folder: str) -> None:
    """Leaves this process nothing but system folders and an empty `/box`, none of them writable."""
    mount("none", "/", flags=0x4000 | 0x40000)  # private, with all below
    mount("none", folder, "tmpfs", data="size=1m,mode=755")
    for path in dict.fromkeys([*SYSTEM, sys.base_prefix, *DEVICES]):
        there = folder + path
        if not os.path.exists(path) or os.path.exists(there):
            continue
        os.makedirs(os.path.dirname(there), exist_ok=True)
        os.mkdir(there) if os.path.isdir(path) else Path(there).touch()
        mount(path, there, flags=0x1000 | 0x4000)  # bind, with all below
        if path not in DEVICES:
            given = (-100, there.encode(), 0x8000, READ_ONLY, ctypes.c_size_t(len(READ_ONLY)))
            check(LIBC.syscall(MOUNT_SETATTR, *given), "mount_setattr")
    for prefix in {sys.base_prefix, "/usr", "/usr/local"}:  # what is installed may hold answers
        for path in glob.glob(f"{folder}{prefix}/lib/python3*/*-packages"):
            mount("none", path, "tmpfs", flags=1)
    os.mkdir(f"{folder}/box")
    if not os.path.exists(f"{folder}/tmp"):
        os.symlink("box", f"{folder}/tmp")
    os.chroot(folder)  # from here nobody without rights gets out, or into a new user namespace
    os.chdir("/")


def filter_system_calls() -> None:
    """Refuses what no program needs, see `REFUSED`, and the numbers of other architectures."""
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    refuse, kill, allow = (give, 0, 0, 0x50001), (give, 0, 0, 0x80000000), (give, 0, 0, 0x7FFF0000)
    lines = [(load, 0, 0, 4), (equal, 1, 0, AUDIT), kill, (load, 0, 0, 0), (at_least, 0, 1, 0x40000000), refuse]
    for number in REFUSED:
        lines += [(equal, 0, 1, number), refuse]
    text = b"".join(struct.pack("HBBI", *line) for line in [*lines, allow])
    address = ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p).value
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(text) // 8, address))
    check(LIBC.prctl(38, 1, 0, 0, 0), "no_new_privs")
    check(LIBC.prctl(22, 2, program, 0, 0), "seccomp")


def drop_rights(memory_mb: int) -> None:
    """Takes from process 1 all but a folder in memory."""
    mount("none", "/box", "tmpfs", flags=2 | 4, data=f"size={memory_mb // 8}m,nr_inodes=4096,mode=777")
    if os.geteuid() == 0:
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
    check(LIBC.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)), "capset")
    os.chdir("/box")
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
    if data is None or isinstance(data, str | int | float):
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
    seconds, size = round(limits["seconds"]), limits["file_bytes"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    for target, one in enumerate(files):
        os.dup2(one, target)
    os.closerange(3, OPEN_FILES)
    if not limits["unsafe"]:
        filter_system_calls()
    if command := limits.get(what):
        os.execvp(command[0], command)
    sys.argv, sys.path = ["main.py"], [os.getcwd(), *sys.path]
    vars(sys.modules["builtins"]).update(exit=sys.exit, quit=sys.exit)
    if what == "call":
        call_function(code)
    program = sys.modules["__main__"] = ModuleType("__main__")
    exec(code, vars(program))
    sys.exit()


def run(code: Any, limits: dict[str, Any], what: str, text: str) -> tuple[str, str]:
    """Status of the program on an input, and what it printed; or what went wrong."""
    files = [os.memfd_create("file") for _ in range(3)]
    os.pwrite(files[0], text.encode("utf-8", "replace"), 0)
    if not (child := os.fork()):
        become(what, files, code, limits)
    exit_code, late = wait_for(child, 4 * limits["seconds"])
    out, err = (os.pread(one, limits["file_bytes"], 0) for one in files[1:])
    for one in files:
        os.close(one)
    if late:
        return "timeout", ""
    if len(out) == limits["file_bytes"]:
        return "too_long", ""
    if exit_code:
        lines = err.decode("utf-8", "replace").strip().splitlines()
        return "error", [f"exit {exit_code}", *lines][-1][:300]
    return "ok", out.decode("utf-8", "replace")


def wait_for(child: int, seconds: float) -> tuple[int, bool]:
    """Exit code of a process, and whether it took too long. Then nothing that it has started is left."""
    handle, status = os.pidfd_open(child), 0
    late = not select.select([handle], [], [], seconds)[0]
    os.close(handle)
    alone, children = os.getpid() == 1, Path(f"/proc/self/task/{os.getpid()}/children")
    with contextlib.suppress(ChildProcessError):
        while True:
            for other in ["-1"] if alone else children.read_text().split():  # -1: all of these namespaces
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(other), signal.SIGKILL)
            pid, ended = os.wait()
            status = ended if pid == child else status
    code = os.waitstatus_to_exitcode(status)
    return code, late or code == -signal.SIGXCPU


def tell(status: str, text: str) -> None:
    """Answers a request."""
    print(json.dumps([status, text]), flush=True)


def main() -> None:
    """Serves as process 1 of new namespaces, until its parent ends, or gets SIGTERM."""
    source, limits = json.loads(sys.stdin.readline())
    used, code = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize(), None
    most = used + (limits["memory_mb"] << 20)
    try:
        if not limits["unsafe"]:
            if os.uname().machine != "x86_64":
                raise OSError("system calls are filtered on x86-64 alone")
            enter_namespaces()
            make_root(os.getcwd())
        if child := os.fork():
            signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
            os.waitpid(child, 0)
            return
        if not limits["unsafe"]:
            drop_rights(limits["memory_mb"])
        for kind, amount in (("AS", most), ("NOFILE", OPEN_FILES), ("CORE", 0)):
            resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (amount, amount))
        check(LIBC.prctl(1, signal.SIGKILL, 0, 0, 0), "end with the parent")
        check(LIBC.prctl(36, 1, 0, 0, 0), "orphans become children")
    except OSError as failure:
        return tell("refused", str(failure))
    os.environ.update(PATH="/usr/local/bin:/usr/bin:/bin", HOME=os.getcwd(), TMPDIR=os.getcwd(), LANG="C.UTF-8")
    Path("main").write_text(source, errors="replace")
    answer = "ok", ""
    try:
        if limits["build"]:
            answer = run(code, limits, "build", "")
        elif not limits["run"]:
            code = compile(source, "main.py", "exec")
    except Exception as failure:
        answer = "error", f"{type(failure).__name__}: {failure}"[:300]
    tell(*answer)
    while line := sys.stdin.readline():
        tell(*run(code, limits, *json.loads(line)))


if __name__ == "__main__":
    main()
