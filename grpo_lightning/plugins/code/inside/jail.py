"""Runs programs that nobody has read, each in namespaces of its own. Nothing here knows what a test expects.

`python jail.py DESCRIPTOR FOLDER LIMITS` makes a root of read-only system folders in memory, where FOLDER stands, and
copies itself for each message on the socket DESCRIPTOR that brings a socket along. A message without one ends the copy,
and all that it has started. LIMITS is JSON; `unsafe` leaves out namespaces and system call filter.

A copy is process 1 of its namespaces, and its socket brings JSON lines. The first is the program. Every later one is a
test, with the descriptors that it runs on, and is answered by a line `{"exit": CODE, "late": BOOL}`.
"""

import atexit
import builtins
import contextlib
import ctypes
import gc
import glob
import importlib
import json
import os
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any, NoReturn

NEW_MOUNTS, NEW_USERS = 0x20000, 0x10000000
NEW_ALL = NEW_MOUNTS | 0x2000000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000  # cgroups, names, IPC, ids, network
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
PRELOADED = "bisect collections copy functools heapq itertools math operator random re string typing"
NUMBERS = ARCHITECTURES.get(os.uname().machine)
LIBC = ctypes.CDLL(None, use_errno=True)
LENGTH = struct.Struct("=I")


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


def make_root(folder: str, readable: list[str]) -> None:
    """Leaves this process nothing but system folders, `readable` ones and an empty `/work`, none of them writable."""
    assert NUMBERS
    user, group, is_root = os.geteuid(), os.getegid(), os.geteuid() == 0
    go, told = os.pipe()
    if is_root and not os.fork():  # only a process outside can map a second user
        os.read(go, 1)
        for kind in ("uid_map", "gid_map"):
            Path(f"/proc/{os.getppid()}/{kind}").write_text(f"0 0 1\n{USER} {NOBODY} 1")
        os._exit(0)
    check(LIBC.unshare(NEW_USERS | NEW_MOUNTS), "unshare")
    os.write(told, b".")
    if is_root:
        if os.wait()[1]:
            raise OSError("user ids cannot be mapped")
    else:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{USER} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{USER} {group} 1")
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
        if os.path.isdir(path):
            os.mkdir(there)
        else:
            Path(there).touch()
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

    def jump(code: int, value: int, true: int, false: int) -> bytes:
        return struct.pack("HBBI", code, true, false, value)

    def give(value: int) -> bytes:
        return struct.pack("HBBI", 0x06, 0, 0, value)

    def load(offset: int) -> bytes:
        return struct.pack("HBBI", 0x20, 0, 0, offset)

    equal, at_least, has, refuse, allow = 0x15, 0x35, 0x45, 0x50000 | 1, 0x7FFF0000
    lines = [load(4), jump(equal, NUMBERS["audit"], 1, 0), give(0x80000000), load(0)]
    lines += [jump(at_least, 0x40000000, 0, 1), give(refuse)]  # the numbers of another ABI
    lines += [jump(equal, CLONE3, 0, 1), give(0x50000 | 38)]  # not implemented: `clone` is tried then
    for number in NUMBERS["refused"]:
        lines += [jump(equal, number, 0, 1), give(refuse)]
    lines += [
        jump(equal, NUMBERS["clone"], 0, 4),
        load(16),
        jump(has, NEW_ALL | NEW_USERS, 0, 1),
        give(refuse),
        load(0),
    ]
    lines += [jump(equal, NUMBERS["socket"], 0, 3), load(16), jump(equal, socket.AF_UNIX, 1, 0), give(refuse)]
    code = b"".join([*lines, give(allow)])
    text = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(text)))
    check(LIBC.prctl(38, 1, 0, 0, 0), "no_new_privs")
    check(LIBC.prctl(22, 2, program, 0, 0), "seccomp")


def enclose(limits: dict[str, Any]) -> None:
    """Takes from process 1 of new namespaces all that a program must not have."""
    mount("none", "/work", "tmpfs", flags=2 | 4, data=f"size={limits['folder_mb']}m,nr_inodes=4096,mode=777")
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
    header = struct.pack("Ii", 0x20080522, 0)
    check(LIBC.capset(header, bytes(24)), "capset")
    os.chdir("/work")
    resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"],) * 2)
    filter_system_calls()


def encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    """Plain data as JSON has it; of anything else, what `refer` says."""
    kind = type(value)
    if value is None or kind in (bool, float, str) or (kind is int and abs(value) < 1 << 63):
        return value
    if isinstance(value, int):
        return {"int": hex(value)}
    if isinstance(value, float | str):
        return str.__str__(value) if isinstance(value, str) else float.__float__(value)
    for items in (list, tuple, set, frozenset):
        if isinstance(value, items):
            return {items.__name__: [encode(one, refer) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(one, refer) for one in pair] for pair in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.decode("latin-1")}
    if isinstance(value, complex | Decimal):
        return {kind.__name__: str(value)}
    if isinstance(value, Fraction):
        return {"Fraction": [hex(value.numerator), hex(value.denominator)]}
    if callable(getattr(value, "tolist", None)):  # NumPy's numbers and arrays
        return encode(value.tolist(), refer)
    return {"ref": refer(value)}


READERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "bytes": lambda text: text.encode("latin-1"),
    "Fraction": lambda pair: Fraction(*(int(text, 16) for text in pair)),
    "complex": complex,
    "Decimal": Decimal,
}


def decode(data: Any, find: Callable[[Any], Any]) -> Any:
    """What `encode` has written. Raises ValueError, TypeError or the like for anything else."""
    if not isinstance(data, dict):
        if isinstance(data, list):
            raise ValueError("a bare list")
        return data
    ((kind, value),) = data.items()
    if kind == "ref":
        return find(value)
    if kind == "dict":
        return {decode(key, find): decode(one, find) for key, one in value}
    if kind in READERS:
        return READERS[kind](value)
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](decode(one, find) for one in value)


def answer_calls(code: Any) -> NoReturn:
    """Runs the program as a module, and answers what a test asks of its names: values and calls."""
    program = ModuleType("solution")
    sys.modules["solution"] = program
    objects: list[Any] = [program]
    requests, replies = os.fdopen(3, encoding="utf-8", closefd=False), os.fdopen(os.dup(3), "w", encoding="utf-8")

    def refer(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def find(key: int | str) -> Any:
        return objects[key] if isinstance(key, int) else getattr(program, key)

    def told(of: Any, name: str, args: Any = None, kwargs: Any = None) -> dict[str, Any]:
        if ended:
            return {"ended": ended}
        try:
            if name.startswith("__") and not hasattr(type(find(of)), name):
                raise TypeError(f"{type(find(of)).__name__!r} object has no {name}")
            value = getattr(find(of), name) if name else find(of)
            if args is not None:
                value = value(*decode(args, find), **decode(kwargs, find))
            return {"value": encode(value, refer)}
        except Exception as error:
            return {"raised": [kind.__name__ for kind in type(error).__mro__], "text": str(error)[:1000]}

    ended = ""
    try:
        exec(code, program.__dict__)
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"[:300]
    for line in requests:
        print(json.dumps(told(**json.loads(line))), file=replies, flush=True)
    os._exit(0)


def run_test(test: dict[str, Any], descriptors: list[int], code: Any) -> None:
    """Becomes the process of a test: a command, the program on its input, or as a module that is asked."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.setsid()
    asked = test.get("calls")
    null = os.open("/dev/null", os.O_RDWR)
    copies = [os.dup(one) for one in ([null] * 3 + descriptors if asked else descriptors)]  # above all that is replaced
    for target, one in enumerate(copies):
        os.dup2(one, target)
    os.closerange(len(copies), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if test.get("command"):
        os.execvp(test["command"][0], test["command"])
    sys.argv, sys.path[:0] = ["main.py"], [os.getcwd()]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    if asked:
        answer_calls(code)
    program = sys.modules["__main__"] = ModuleType("__main__")
    exec(code, program.__dict__)
    sys.stdout.flush()
    if threading.active_count() == 1 and not atexit._ncallbacks():
        os._exit(0)  # the rest of the interpreter's end takes as long as the rest of the process


def wait_for(child: int, seconds: float) -> dict[str, Any]:
    """How a test's process ended. Then nothing that it has started is left."""
    status, deadline = None, monotonic() + seconds
    while status is None and (left := deadline - monotonic()) > 0:
        signal.sigtimedwait({signal.SIGCHLD}, left)
        while reaped := reap(os.WNOHANG):
            status = reaped[1] if reaped[0] == child else status
    late = status is None
    end_others()
    while reaped := reap(0):
        status = reaped[1] if reaped[0] == child else status
        end_others()
    code = os.waitstatus_to_exitcode(status or 0)
    return {"exit": code, "late": late or code == -signal.SIGXCPU}


def reap(options: int) -> tuple[int, int] | None:
    """Process id and status of a child that has ended; None without one."""
    with contextlib.suppress(ChildProcessError):
        return next((pair for pair in [os.waitpid(-1, options)] if pair[0]), None)
    return None


def end_others() -> None:
    """Kills all other processes of these namespaces; without any, the children of this process."""
    if os.getpid() == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    else:
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)


def serve(channel: socket.socket, limits: dict[str, Any]) -> None:
    """Reads a program, and runs its tests."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    megabyte, seconds = 1 << 20, limits["seconds"]
    for kind, limit in {
        resource.RLIMIT_AS: limits["used"] + limits["memory_mb"] * megabyte,
        resource.RLIMIT_FSIZE: limits["file_mb"] * megabyte,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }.items():
        resource.setrlimit(kind, (limit, limit))
    code = None
    while message := receive(channel):
        request, descriptors = message
        reply: dict[str, Any] = {"exit": 0}
        if "source" in request:
            Path(request["file"]).write_text(request["source"], encoding="utf-8")
            try:
                code = None if request["command"] else compile(request["source"], "main.py", "exec")
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        else:
            child = os.fork()
            if not child:
                channel.close()
                resource.setrlimit(resource.RLIMIT_CPU, (round(seconds), round(seconds) + 1))
                return run_test(request, descriptors, code)
            for one in descriptors:
                os.close(one)
            reply = wait_for(child, request["wall"])
        channel.sendall(json.dumps(reply).encode() + b"\n")
    os._exit(0)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message, with its descriptors; None at the end."""
    data, descriptors, *_ = socket.recv_fds(channel, LENGTH.size, 8)
    if len(data) < LENGTH.size:
        return None
    (size,), text = LENGTH.unpack(data), b""
    while len(text) < size:
        if not (chunk := channel.recv(size - len(text))):
            return None
        text += chunk
    return json.loads(text), descriptors


def send(channel: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Sends a message with descriptors."""
    text = json.dumps(message).encode()
    socket.send_fds(channel, [LENGTH.pack(len(text))], descriptors)
    channel.sendall(text)


def copy(limits: dict[str, Any]) -> int:
    """The process id of a copy of this process, in namespaces of its own; 0 in the copy."""
    if limits["unsafe"]:
        return os.fork()
    assert NUMBERS
    flags = NEW_ALL | signal.SIGCHLD
    pid = check(LIBC.syscall(NUMBERS["clone"], ctypes.c_ulong(flags), 0, 0, 0, 0), "clone")
    if not pid:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    return pid


def become_copy(channel: socket.socket, limits: dict[str, Any], folder: str) -> None:
    """Serves as a copy, once it is enclosed."""
    if limits["unsafe"]:
        os.chdir(folder)
        LIBC.prctl(36, 1, 0, 0, 0)  # orphans become children
    else:
        enclose(limits)
    LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)  # at the end of its parent
    os.environ.clear()
    os.environ.update(PATH="/usr/local/bin:/usr/bin:/bin", HOME=os.getcwd(), TMPDIR=os.getcwd(), LANG="C.UTF-8")
    serve(channel, limits)


def main() -> None:
    """Copies this process until the socket ends."""
    control, folder, limits = socket.socket(fileno=int(sys.argv[1])), sys.argv[2], json.loads(sys.argv[3])
    sys.path += limits["readable"]
    for name in PRELOADED.split():
        importlib.import_module(name)
    gc.freeze()  # copies go on sharing memory, and end sooner
    limits["used"] = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    try:
        if not limits["unsafe"]:
            if NUMBERS is None:
                raise OSError(f"no table of system calls of {os.uname().machine}")
            make_root(folder, limits["readable"])
        answer = {"error": ""}
    except OSError as error:
        answer = {"error": str(error)}
    send(control, answer)
    pid = 0
    while message := receive(control):
        if pid:
            end(pid)
        pid = 0
        if message[1]:
            channel = socket.socket(fileno=message[1][0])
            if not (pid := copy(limits)):
                control.close()
                return become_copy(channel, limits, folder)
            channel.close()
        send(control, {"pid": pid})
    if pid:
        end(pid)


def end(pid: int) -> None:
    """Ends a copy; with process 1 of their namespaces the others end."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
