"""A `vllm serve` as a client sees it: JSON over HTTP."""

import json
import re
import socket
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from grpo_lightning.policy.pretrained import first_line
from grpo_lightning.types import UsageError

# Seconds of silence, seconds between two probes, and lost probes after which a machine counts as dead.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


MAX_BYTES = 1 << 30  # of an answer
MAX_REASON = 1 << 16  # bytes of the reason that a server gives for a refusal


class ServerError(RuntimeError):
    """A server does not answer, or refuses: `status` is HTTP's number for it, if there was an answer."""

    def __init__(self, message: str, status: int = 0, retry_after: str = "") -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class Server:
    """One server. Each request has a connection of its own, so that threads may share the object.

    `timeout` is the longest silence in seconds. A process that ends is noticed at once, a machine after 40 seconds.
    An answer may have `max_bytes`. No message shows `token`, which the server gets as `Authorization`.
    """

    def __init__(
        self, url: str, timeout: float, key: str = "model.engine.urls", token: str = "", max_bytes: int = MAX_BYTES
    ) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout
        self.max_bytes = max_bytes
        self._token = token
        if "@" in url:
            raise UsageError(f"{key}: an address with an @ may hold a password, which logs would show: leave it out")
        try:
            parts = urlsplit(self.url)
            self._host, self._port, self._path = parts.hostname or "", parts.port, parts.path
            is_host = bool(self._host.encode("idna"))
        except ValueError:
            parts = urlsplit("")
            is_host = False
        is_path = re.fullmatch("[!-~]*", parts.path) and not parts.query and not parts.fragment
        if parts.scheme not in ("http", "https") or not is_host or not is_path:
            # What stands behind a question mark may be a key.
            shown = re.split("[?#]", url)[0]
            raise UsageError(f"{key}: {shown!r} is no address; give one such as http://node1:8000")
        self._secure = parts.scheme == "https"
        self._open: set[socket.socket] = set()
        self._hung_up = 0  # threads that want nothing of it now
        self._lock = threading.Lock()

    def get(self, path: str) -> Any:
        """The server's answer to GET."""
        return self.post(path, method="GET")

    def post(self, path: str, body: Any = None, method: str = "POST") -> Any:
        """The server's answer to POST with a body of JSON."""
        with self._answer(method, path, body) as answer:
            text = answer.read(self.max_bytes + 1)
            if len(text) > self.max_bytes:
                raise ServerError(f"{self.url}{path}: the answer has more than {self.max_bytes} bytes")
            return self._read(text, path) if text else None

    def events(self, path: str, body: Any) -> Generator[Any, None, None]:
        """Yields the answer to POST piece by piece (server-sent events).

        Closing the iterator closes the connection, and vLLM ends the request.
        """
        with self._answer("POST", path, body) as answer:
            for line in answer:
                field, _, data = line.strip().partition(b": ")
                if data == b"[DONE]":
                    return
                if field == b"data":
                    yield self._read(data, path)
            raise ServerError(f"{self.url}{path}: the answer ended early")

    def _read(self, text: bytes, path: str) -> Any:
        """The value of JSON."""
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            start = self._shown(text[:100].decode(errors="replace"))
            raise ServerError(f"{self.url}{path}: the answer is no JSON: {' '.join(start.split())!r}") from error

    def _shown(self, text: str) -> str:
        """A text of the server, which may repeat the token, without it."""
        return text.replace(self._token, "***") if self._token else text

    @contextmanager
    def hung_up(self) -> Iterator[None]:
        """Ends all requests that other threads wait for, and those that they begin inside: they raise ServerError."""
        with self._lock:
            self._hung_up += 1
            for connection in self._open:
                with suppress(OSError):  # the server was faster
                    connection.shutdown(socket.SHUT_RDWR)
        try:
            yield
        finally:
            with self._lock:
                self._hung_up -= 1

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
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):  # not on every system
                    opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            data = None if body is None else json.dumps(body).encode()
            headers = {"Content-Type": "application/json"}
            if self._token:
                headers["Authorization"] = f"Bearer {self._token}"
            connection.request(method, self._path + path, data, headers)
            with connection.getresponse() as answer:
                if answer.status != 200:
                    reason = self._shown(_reason(answer.read(MAX_REASON)))
                    told = f"{self.url}{path}: {answer.status} {reason}"
                    raise ServerError(told, answer.status, answer.headers.get("Retry-After", ""))
                yield answer
        except TimeoutError as error:
            raise ServerError(f"{self.url}{path}: no answer within {self.timeout:g} s") from error
        except (OSError, HTTPException) as error:
            raise ServerError(f"{self.url}{path}: no answer ({self._shown(first_line(error))})") from error
        except (ValueError, TypeError) as error:
            # Of the request: such an error may quote the headers.
            raise ServerError(f"{self.url}{path}: it cannot be asked ({type(error).__name__})") from None
        finally:
            # Before it is closed: `hung_up` must not meet another connection with its number.
            with self._lock:
                self._open.discard(opened)
            connection.close()


def everywhere(servers: Sequence[Server], ask: Callable[[Server], object]) -> dict[Server, Exception]:
    """Asks all servers at once; returns what those raised that did not do it."""

    def answer(server: Server) -> Exception | None:
        try:
            ask(server)
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        found = zip(servers, pool.map(answer, servers), strict=True)
        return {server: error for server, error in found if error is not None}


def _reason(text: bytes) -> str:
    """The reason that a server gives, in one line: vLLM has three ways to say it."""
    shown: Any = text.decode(errors="replace")
    with suppress(ValueError, AttributeError):
        answer = json.loads(shown)
        shown = answer.get("error", answer.get("detail", shown))
        shown = shown.get("message", shown)
    return " ".join(str(shown).split())[:300]
