"""Encloses a program that nobody has read, and runs it. Nothing here knows what a test expects.

`python jail.py CHANNEL LIMITS` reads the program from stdin, and takes read-only system folders and an empty one in
memory as its root, in namespaces of its own. LIMITS is JSON; `unsafe` leaves out namespaces and the filter of system
calls. CHANNEL is a socket of packets. The first that goes out is `{"refused": WHY, "error": WHY}`: the machine cannot
enclose it, or it cannot be compiled. Each that then comes in is `build`, `run` or `calls`, with the descriptors of a
process. When that has ended, with all that it has started, the answer is `{"exit": CODE, "late": BOOL}`.
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
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import ModuleType
from typing import Any, NoReturn

NEW_ALL = 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
"""Namespaces of mounts, cgroups, names, IPC, users, processes, networks."""
READ_ONLY = struct.pack("4Q", 1 | 2 | 4, 0, 0, 0)  # of mount_setattr: read-only, no set-user-id, no devices
USER, NOBODY = 1000, 65534
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "x86_64": {
        "audit": 0xC000003E, "clone": 56, "socket": 41, "pivot_root": 155,
        "refused": [101, 310, 311, 272, 308, 321, 298, 323, 248, 249, 250, 304, 425, 426, 427, 438],
    },
    "aarch64": {
        "audit": 0xC00000B7, "clone": 220, "socket": 198, "pivot_root": 41,
        "refused": [117, 270, 271, 97, 268, 280, 241, 282, 217, 218, 219, 265, 425, 426, 427, 438],
    },
}  # fmt: skip
"""Numbers of system calls. Refused: others' memory and descriptors, namespaces, bpf, perf, keys, handles, io_uring."""
CLONE3, MOUNT_SETATTR = 435, 442
NUMBERS = ARCHITECTURES.get(os.uname().machine)
LIBC = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    """The result of a call of the C library; raises OSError where it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


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
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def make_root(folder: str, readable: list[str]) -> None:
    """Leaves this process nothing but system folders, `readable` ones and an empty `/work`, none of them writable."""
    assert NUMBERS
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
    mount("none", "/", flags=0x4000 | 0x40000)  # private, with all below
    mount("none", folder, "tmpfs", data="size=1m,mode=755")
    devices = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
    system = ["/usr", "/bin", "/lib", "/lib32", "/lib64", "/sbin", "/etc/ld.so.cache", "/etc/alternatives"]
    for path in dict.fromkeys([*system, sys.base_prefix, *devices, *readable]):
        there = folder + path
        if not os.path.exists(path) or os.path.exists(there):
            continue
        os.makedirs(os.path.dirname(there), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), there)
            continue
        os.mkdir(there) if os.path.isdir(path) else write(there, "")
        mount(path, there, flags=0x1000 | 0x4000)  # bind, with all below
        if path not in devices:
            given = (-100, there.encode(), 0x8000, READ_ONLY, ctypes.c_size_t(len(READ_ONLY)))
            check(LIBC.syscall(MOUNT_SETATTR, *given), "mount_setattr")
    for prefix in {sys.base_prefix, "/usr", "/usr/local"}:  # what is installed may hold answers
        for path in glob.glob(f"{folder}{prefix}/lib/python3*/*-packages"):
            if path.removeprefix(folder) not in readable:
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


def enclose(limits: dict[str, Any], used: int) -> None:
    """Takes from process 1 all that a program must not have. The interpreter itself has used some memory."""
    if not limits["unsafe"]:
        mount("none", "/work", "tmpfs", flags=2 | 4, data=f"size={limits['folder_mb']}m,nr_inodes=4096,mode=777")
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(USER, USER, USER)
            os.setresuid(USER, USER, USER)
        check(LIBC.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)), "capset")
        os.chdir("/work")
        resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"],) * 2)
        filter_system_calls()
    for kind, most in {
        resource.RLIMIT_AS: used + (limits["memory_mb"] << 20),
        resource.RLIMIT_FSIZE: limits["file_mb"] << 20,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }.items():
        resource.setrlimit(kind, (most, most))
    check(LIBC.prctl(1, signal.SIGKILL, 0, 0, 0), "end with the parent")
    check(LIBC.prctl(36, 1, 0, 0, 0), "orphans become children")
    os.environ.update(PATH="/usr/local/bin:/usr/bin:/bin", HOME=os.getcwd(), TMPDIR=os.getcwd(), LANG="C.UTF-8")


LEAVES: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    str: (str.__str__, str),
    int: (hex, lambda text: int(text, 16)),
    float: (float.__float__, float),
    complex: (str, complex),
    bytes: (lambda value: value.decode("latin-1"), lambda text: text.encode("latin-1")),
    bytearray: (lambda value: value.decode("latin-1"), lambda text: bytearray(text, "latin-1")),
    Decimal: (str, Decimal),
    Fraction: (lambda value: [hex(value.numerator), hex(value.denominator)],
               lambda pair: Fraction(*(int(text, 16) for text in pair))),
}  # fmt: skip
"""Plain data, with what makes JSON of it, and what reads that."""
CONTAINERS = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
READERS = {kind.__name__: read for kind, (_, read) in LEAVES.items()}


def encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    """Plain data as JSON has it; of anything else, what `refer` says."""
    if value is None or type(value) in (bool, str, float):
        return value
    for kind, (write, _) in LEAVES.items():
        if isinstance(value, kind):
            return {kind.__name__: write(value)}
    for name, container in CONTAINERS.items():
        if isinstance(value, container):
            return {name: [encode(one, refer) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(one, refer) for one in pair] for pair in value.items()]}
    if callable(getattr(value, "tolist", None)):  # NumPy's numbers and arrays
        return encode(value.tolist(), refer)
    return {"ref": refer(value)}


def decode(data: Any, find: Callable[[Any], Any]) -> Any:
    """What `encode` has written. Raises ValueError, TypeError or the like for anything else."""
    if isinstance(data, list):
        raise ValueError("a bare list")
    if not isinstance(data, dict):
        return data
    ((kind, value),) = data.items()
    if kind == "ref":
        return find(value)
    if kind == "dict":
        return {decode(key, find): decode(one, find) for key, one in value}
    if kind in READERS:
        return READERS[kind](value)
    return CONTAINERS[kind](decode(one, find) for one in value)


def answer_calls(code: Any) -> NoReturn:
    """Runs the program as a module, and answers what a test asks of its names: values and calls."""
    program = sys.modules["solution"] = ModuleType("solution")
    objects: list[Any] = [program]
    requests, replies = os.fdopen(3, encoding="utf-8", closefd=False), os.fdopen(os.dup(3), "w", encoding="utf-8")

    def refer(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def find(key: int | str) -> Any:
        return objects[key] if isinstance(key, int) else getattr(program, key)

    def told(of: Any, name: str, args: Any = None, kwargs: Any = None) -> dict[str, Any]:
        try:
            value = find(of)
            if name.startswith("__") and not hasattr(type(value), name):
                raise TypeError(f"{type(value).__name__!r} object has no {name}")
            value = getattr(value, name) if name else value
            if args is not None:
                value = value(*decode(args, find), **decode(kwargs, find))
            return {"value": encode(value, refer)}
        except Exception as error:
            return {"raised": [kind.__name__ for kind in type(error).__mro__], "text": str(error)[:1000]}

    ended = {}
    try:
        exec(code, program.__dict__)
    except Exception as error:
        ended = {"ended": f"{type(error).__name__}: {error}"[:300]}
    for line in requests:
        print(json.dumps(ended or told(**json.loads(line))), file=replies, flush=True)
    os._exit(0)


def become(what: str, descriptors: list[int], code: Any, limits: dict[str, Any]) -> None:
    """Turns this process into that of a test. Its descriptors become 0, 1, 2 and so on, and no other stays."""
    os.setsid()
    seconds = round(limits["seconds"])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    for target, one in enumerate([os.dup(one) for one in descriptors]):  # copies lie above all that is replaced
        os.dup2(one, target)
    os.closerange(len(descriptors), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    command = limits["build" if what == "build" else "command"]
    if command:
        os.execvp(command[0], command)
    sys.argv, sys.path = ["main.py"], [os.getcwd(), *sys.path, *limits["readable"]]
    vars(sys.modules["builtins"]).update(exit=sys.exit, quit=sys.exit)
    if what == "calls":
        answer_calls(code)
    program = sys.modules["__main__"] = ModuleType("__main__")
    exec(code, program.__dict__)


def wait_for(child: int, seconds: float) -> dict[str, Any]:
    """How a test's process ended. Then nothing that it has started is left."""
    handle, status = os.pidfd_open(child), 0
    late = not select.select([handle], [], [], seconds)[0]
    os.close(handle)
    while True:
        end_others()
        try:
            pid, ended = os.wait()
        except ChildProcessError:
            break
        status = ended if pid == child else status
    code = os.waitstatus_to_exitcode(status)
    return {"exit": code, "late": late or code == -signal.SIGXCPU}


def end_others() -> None:
    """Kills all other processes of these namespaces; without any, the children of this process."""
    alone = os.getpid() == 1
    for pid in ["-1"] if alone else read(f"/proc/self/task/{os.getpid()}/children").split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def main() -> None:
    """Serves as process 1 of new namespaces, until its parent ends, or gets SIGTERM."""
    channel, limits = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    source, error, code = read("/proc/self/fd/0"), "", None
    used = int(read("/proc/self/statm").split()[0]) * resource.getpagesize()
    try:
        if not limits["unsafe"]:
            make_root(os.getcwd(), limits["readable"])
        if child := os.fork():
            channel.close()
            signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
            os.waitpid(child, 0)
            return
        enclose(limits, used)
        write(limits["file"], source)
    except OSError as failure:
        channel.send(json.dumps({"refused": str(failure), "error": ""}).encode())
        return
    try:
        code = None if limits["command"] else compile(source, "main.py", "exec")
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"[:500]
    channel.send(json.dumps({"refused": "", "error": error}).encode())
    while True:
        what, descriptors, *_ = socket.recv_fds(channel, 16, 4)
        if not what:
            os._exit(0)
        if not (child := os.fork()):
            channel.close()
            become(what.decode(), descriptors, code, limits)
            return
        for one in descriptors:
            os.close(one)
        channel.send(json.dumps(wait_for(child, limits["wall"])).encode())


if __name__ == "__main__":
    main()
