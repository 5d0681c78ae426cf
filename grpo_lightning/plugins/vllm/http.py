"""A `vllm serve` as a client sees it: JSON over HTTP."""

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, TypeVar
from urllib.parse import urlsplit

from grpo_lightning.policy.pretrained import first_line
from grpo_lightning.types import UsageError

T = TypeVar("T")

KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Seconds of silence, seconds between two probes, and lost probes after which a machine counts as dead."""


class ServerError(RuntimeError):
    """A server does not answer, or refuses.

    Args:
        message: What happened, with the server's address.
        status: HTTP's number for it, if there was an answer.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """One server. Each request has a connection of its own, so that threads may share the object.

    Args:
        url: Such as `http://node1:8000`.
        timeout: Longest silence in seconds. A process that ends is noticed at once, a machine after 40 seconds.

    Raises:
        UsageError: `url` is not the address of a server.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout
        try:
            parts = urlsplit(self.url)
            self._host, self._port, self._path = parts.hostname or "", parts.port, parts.path
        except ValueError:
            parts = None
        if parts is None or parts.scheme not in ("http", "https") or not self._host or parts.query:
            raise UsageError(f"model.engine.urls: {url!r} is no address; give one such as http://node1:8000")
        self._secure = parts.scheme == "https"
        self._open: set[socket.socket] = set()
        self._hung_up = False
        self._lock = threading.Lock()

    def get(self, path: str) -> Any:
        """What the server answers to GET."""
        with self._answer("GET", path, None) as answer:
            return _read(answer)

    def post(self, path: str, body: Any = None) -> Any:
        """What the server answers to POST with a body of JSON."""
        with self._answer("POST", path, body) as answer:
            return _read(answer)

    def events(self, path: str, body: Any) -> Iterator[Any]:
        """What the server sends after POST, piece by piece (server-sent events).

        Closing the iterator closes the connection, and vLLM ends the request.
        """
        with self._answer("POST", path, body) as answer:
            for line in answer:
                field, _, data = line.strip().partition(b": ")
                if data == b"[DONE]":
                    return
                if field == b"data":
                    yield json.loads(data)
            raise ServerError(f"{self.url}{path}: the answer ended early")

    @contextmanager
    def hung_up(self) -> Iterator[None]:
        """Ends all requests that other threads wait for, and those that they begin inside: they raise ServerError."""
        with self._lock:
            self._hung_up = True
            for connection in self._open:
                with suppress(OSError):  # the server was faster
                    connection.shutdown(socket.SHUT_RDWR)
        try:
            yield
        finally:
            self._hung_up = False

    @contextmanager
    def _answer(self, method: str, path: str, body: Any) -> Iterator[HTTPResponse]:
        kind = HTTPSConnection if self._secure else HTTPConnection
        connection = kind(self._host, self._port, timeout=self.timeout)
        opened: socket.socket | None = None
        try:
            connection.connect()
            # http.client lets go of it where the server closes the connection after the answer.
            opened = connection.sock
            with self._lock:
                if self._hung_up:
                    raise ServerError(f"{self.url}{path}: hung up")
                self._open.add(opened)
            _keep_alive(opened)
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._path + path, data, {"Content-Type": "application/json"})
            with connection.getresponse() as answer:
                if answer.status != 200:
                    raise ServerError(f"{self.url}{path}: {answer.status} {_reason(answer.read())}", answer.status)
                yield answer
        except TimeoutError as error:
            raise ServerError(f"{self.url}{path}: no answer within {self.timeout:g} s") from error
        except (OSError, HTTPException, json.JSONDecodeError) as error:
            raise ServerError(f"{self.url}{path}: no answer ({first_line(error)})") from error
        finally:
            # Before it is closed: `hung_up` must not meet another connection with its number.
            with self._lock:
                self._open.discard(opened)
            connection.close()


def everywhere(servers: Sequence[Server], ask: Callable[[Server], T]) -> list[T]:
    """Asks all servers at once; raises what the first of them raised."""
    with ThreadPoolExecutor(len(servers)) as pool:
        return list(pool.map(ask, servers))


def _read(answer: HTTPResponse) -> Any:
    """The answer; None where there is none."""
    text = answer.read()
    return json.loads(text) if text else None


def _reason(text: bytes) -> str:
    """What a server gives as the reason, in one line: vLLM has three ways to say it."""
    shown = text.decode(errors="replace")
    try:
        found = json.loads(shown)
        found = found.get("error", found.get("detail", shown))
        shown = str(found.get("message", found) if isinstance(found, dict) else found)
    except (ValueError, AttributeError):
        pass
    return " ".join(shown.split())[:300]


def _keep_alive(connection: socket.socket) -> None:
    """Lets the kernel ask a silent machine whether it is there."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
