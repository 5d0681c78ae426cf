"""A client of servers that speak JSON over HTTP, such as `vllm serve`."""

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

KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Seconds of silence, seconds between two probes, and lost probes after which a machine counts as dead."""
MAX_BYTES = 1 << 30
"""Most bytes of an answer."""
MAX_REASON = 1 << 16
"""Most bytes of the reason that a server gives for a refusal."""


class ServerError(RuntimeError):
    """A server does not answer, or refuses.

    Args:
        message: The error in one sentence.
        status: HTTP's number; 0 without an answer.
        retry_after: The answer's `Retry-After`.
    """

    def __init__(self, message: str, status: int = 0, retry_after: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class Server:
    """A server. Every request opens a new connection, so that threads may share the object.

    Args:
        url: Its address, such as `http://node1:8000`.
        timeout: Longest silence in seconds. A process that ends is noticed at once, a machine after 40 s.
        key: The setting that `url` is from, for messages.
        token: The value of `Authorization`, which no message shows; empty for none.
        max_bytes: Most bytes of an answer.
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
            address = urlsplit(self.url)
            self._host = address.hostname or ""
            self._port = address.port
            self._path = address.path
            is_host = bool(self._host.encode("idna"))
        except ValueError:
            address = urlsplit("")
            is_host = False
        is_path = re.fullmatch("[!-~]*", address.path) and not address.query and not address.fragment
        if address.scheme not in ("http", "https") or not is_host or not is_path:
            # A query may hold a key.
            shown = re.split("[?#]", url)[0]
            raise UsageError(f"{key}: {shown!r} is no address; give one such as http://node1:8000")
        self._is_secure = address.scheme == "https"
        self._open: set[socket.socket] = set()
        """The sockets of running requests."""
        self._hung_up = 0
        """Number of `hung_up` contexts that are open."""
        self._lock = threading.Lock()

    def get(self, path: str) -> Any:
        """Returns the server's answer to GET."""
        return self.post(path, method="GET")

    def post(self, path: str, body: Any = None, method: str = "POST") -> Any:
        """Returns the server's answer to POST with a body of JSON; None if it is empty."""
        with self._answer(method, path, body) as answer:
            text = answer.read(self.max_bytes + 1)
            if len(text) > self.max_bytes:
                raise ServerError(f"{self.url}{path}: the answer has more than {self.max_bytes} bytes")
            return self._read(text, path) if text else None

    def events(self, path: str, body: Any) -> Generator[Any, None, None]:
        """Yields the answers to POST as they come (server-sent events).

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
        """Returns the value of an answer in JSON."""
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            start = self._shown(text[:100].decode(errors="replace"))
            raise ServerError(f"{self.url}{path}: the answer is no JSON: {' '.join(start.split())!r}") from error

    def _shown(self, text: str) -> str:
        """Returns a text of the server with the token hidden, which the server may repeat."""
        return text.replace(self._token, "***") if self._token else text

    @contextmanager
    def hung_up(self) -> Iterator[None]:
        """A context that ends all requests of other threads, running or begun inside: they raise ServerError."""
        with self._lock:
            self._hung_up += 1
            for connection in self._open:
                # The server may have closed it already.
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        try:
            yield
        finally:
            with self._lock:
                self._hung_up -= 1

    @contextmanager
    def _answer(self, method: str, path: str, body: Any) -> Iterator[HTTPResponse]:
        """A context with the answer to a request. Raises ServerError for any status but 200, and without an answer."""
        kind = HTTPSConnection if self._is_secure else HTTPConnection
        connection = kind(self._host, self._port, timeout=self.timeout)
        opened: socket.socket | None = None
        try:
            connection.connect()
            # `connection.sock` is None once the server has closed the connection after its answer.
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
                    message = f"{self.url}{path}: {answer.status} {reason}"
                    raise ServerError(message, answer.status, answer.headers.get("Retry-After", ""))
                yield answer
        except TimeoutError as error:
            raise ServerError(f"{self.url}{path}: no answer within {self.timeout:g} s") from error
        except (OSError, HTTPException) as error:
            raise ServerError(f"{self.url}{path}: no answer ({self._shown(first_line(error))})") from error
        except (ValueError, TypeError) as error:
            # The request itself is wrong. Such an error may quote the headers, so it is not shown.
            raise ServerError(f"{self.url}{path}: it cannot be asked ({type(error).__name__})") from None
        finally:
            # Before it is closed: afterwards another connection may get its number, which `hung_up` would end.
            with self._lock:
                self._open.discard(opened)
            connection.close()


def everywhere(servers: Sequence[Server], ask: Callable[[Server], object]) -> dict[Server, Exception]:
    """Calls `ask` for all servers at once. Returns the errors that it raised, by server."""

    def answer(server: Server) -> Exception | None:
        try:
            ask(server)
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        errors = zip(servers, pool.map(answer, servers), strict=True)
        return {server: error for server, error in errors if error is not None}


def _reason(text: bytes) -> str:
    """Returns the reason that a server gives, in one line: from JSON in any of vLLM's three forms, or the text."""
    shown: Any = text.decode(errors="replace")
    with suppress(ValueError, AttributeError):
        answer = json.loads(shown)
        shown = answer.get("error", answer.get("detail", shown))
        shown = shown.get("message", shown)
    return " ".join(str(shown).split())[:300]
