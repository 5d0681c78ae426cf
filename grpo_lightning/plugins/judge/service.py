"""A judge as its clients see it: an OpenAI-compatible server with limits, repetitions, and a cache on disk."""

import hashlib
import json
import math
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from pathlib import Path
from time import monotonic, time
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from grpo_lightning.sandbox.pool import Closed
from grpo_lightning.types import Status

MAX_REPLY = 1 << 20  # bytes
PASSING = {408, 409, 425, 429, 500, 502, 503, 504}
"""HTTP's numbers for what may pass: the request is repeated."""
LONGEST_PAUSE = 600.0  # seconds; a server that asks for more has failed


class Limit:
    """At most `amount` in any `period` of seconds, as the server counts.

    A request counts until a period after it ended, since nobody knows when in between it came there. A first one is
    allowed, whatever it costs.
    """

    def __init__(self, amount: float = math.inf, period: float = 60.0) -> None:
        self.amount, self.period = amount, period
        self.under_way = 0.0
        self.ended: deque[tuple[float, float]] = deque()

    def allows(self, cost: float) -> bool:
        """True if so much may begin now."""
        while self.ended and self.ended[0][0] <= monotonic():
            self.ended.popleft()
        used = self.under_way + sum(amount for _, amount in self.ended)
        return used == 0 or used + cost <= self.amount

    def end(self, cost: float, actual: float) -> None:
        """Ends what was begun for a cost, and turned out to cost `actual`."""
        self.under_way -= cost
        self.ended.append((monotonic() + self.period, actual))


@dataclass(slots=True)
class Reply:
    """What became of one request."""

    value: Any = None  # what was read from the text, if the status is `ok`
    text: str = ""  # what the judge wrote, or what went wrong
    status: str = Status.OK


class Unavailable(RuntimeError):
    """A server gave no reply. `again` is the least number of seconds until it may be asked again."""

    def __init__(self, message: str, again: float = 0.0, status: str = Status.ERROR) -> None:
        super().__init__(message)
        self.again, self.status = again, status


@dataclass(eq=False)
class Service:
    """A judge. A request is made once for equal bodies, and never again while the file of the cache is there.

    `requests` and `tokens` are limits per minute, None for none. Tokens are those that the server counts; before a
    reply they are estimated. `cache` is a file, empty for none. The environment variable `key_variable` has the key.
    """

    url: str
    concurrency: int
    requests: float | None
    tokens: float | None
    retries: int
    timeout: float
    cache: str
    key_variable: str
    lock: Any = field(default_factory=threading.Lock)
    closed: threading.Event = field(default_factory=threading.Event)
    quiet_until: float = 0.0  # the time before which the server wants no request

    def __post_init__(self) -> None:
        self.share(1)

    def share(self, num_ranks: int) -> None:
        """Divides the limits among the processes of a run."""
        self.limits = [Limit(), Limit()]
        if self.requests is not None:  # in seconds where there are many, so that they do not come all at once
            rate = self.requests / num_ranks
            self.limits[0] = Limit(max(1, rate // 60), 60 / rate * max(1, rate // 60))
        if self.tokens is not None:
            self.limits[1] = Limit(self.tokens / num_ranks)

    def ask(self, bodies: Sequence[dict[str, Any]], read: Callable[[int, str], Any]) -> list[Reply]:
        """The reply to each body. `read` gets its index and the text; where it raises ValueError nothing is kept."""
        self.closed.clear()
        keys = [hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest() for body in bodies]
        index = {key: keys.index(key) for key in keys}
        marks = ",".join("?" * len(index))
        known = self._stored(f"SELECT * FROM replies WHERE key IN ({marks})", *index)
        found = {key: read_by(read, index[key], text) for key, text in known}
        waiting = iter([key for key in index if key not in found])

        def work() -> None:
            for key in waiting:  # which all threads share
                if self.closed.is_set():
                    return
                try:
                    reply = self._reply(bodies[index[key]], index[key], read)
                    if reply.status == Status.OK:
                        self._stored("INSERT OR REPLACE INTO replies VALUES (?, ?)", key, reply.text)
                except Exception as error:  # a disk that is full
                    reply = Reply(None, f"{type(error).__name__}: {error}", Status.ERROR)
                found[key] = reply

        # A server that does not answer must not keep the program from ending.
        threads = [threading.Thread(target=work, name="grpo-judge", daemon=True) for _ in range(self.concurrency)]
        for thread in threads[: len(index) - len(found)]:
            thread.start()
        while len(found) < len(index):
            if self.closed.wait(0.01):
                raise Closed
        return [found[key] for key in keys]

    def _reply(self, body: dict[str, Any], index: int, read: Callable[[int, str], Any]) -> Reply:
        """The reply to a body, after as many repetitions as are allowed."""
        for attempt in range(self.retries + 1):
            try:
                return read_by(read, index, self._text(body))
            except Unavailable as error:
                failed = Reply(None, str(error), error.status)
                if error.again > LONGEST_PAUSE:
                    break
                self.quiet_until = max(self.quiet_until, monotonic() + error.again)
            if attempt < self.retries:
                self.closed.wait(min(60.0, 0.5 * 2**attempt))
        return failed

    def _text(self, body: dict[str, Any]) -> str:
        """The text of one reply, once the limits allow to ask for it."""
        data = json.dumps(body).encode()
        costs = [1.0, len(data) / 3 + body.get("max_tokens", 0)]
        while not self._begins(costs):
            if self.closed.wait(0.01):
                raise Unavailable("closed", math.inf)
        actual = [*costs]
        try:
            answer = json.loads(self._post(data))
            actual[1] = float(answer.get("usage", {}).get("total_tokens", costs[1]))
            text = str(answer["choices"][0]["message"]["content"])
            return text.encode(errors="replace").decode()  # no file takes half a character
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise Unavailable(f"not the reply of a chat: {type(error).__name__}: {error}") from error
        finally:
            with self.lock:
                for limit, *pair in zip(self.limits, costs, actual, strict=True):
                    limit.end(*pair)

    def _begins(self, costs: Sequence[float]) -> bool:
        """True if a request may be made now; it is under way then."""
        with self.lock:
            both = [*zip(self.limits, costs, strict=True)]
            allowed = monotonic() >= self.quiet_until and all(limit.allows(cost) for limit, cost in both)
            for limit, cost in both if allowed else ():
                limit.under_way += cost
            return allowed

    def _post(self, data: bytes) -> bytes:
        """The server's answer to a body, within the time."""
        key = os.environ.get(self.key_variable)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        deadline, text = monotonic() + self.timeout, b""
        try:
            with urlopen(Request(f"{self.url}/chat/completions", data, headers), timeout=self.timeout) as answer:
                while chunk := answer.read1(1 << 16):
                    text += chunk
                    if monotonic() > deadline:  # one that sends a byte now and then
                        raise TimeoutError
                    if len(text) > MAX_REPLY:
                        raise Unavailable(f"more than {MAX_REPLY} bytes", math.inf)
            return text
        except HTTPError as error:
            with error:
                told = f"HTTP {error.code} {error.read(300).decode(errors='replace')}"
            raise Unavailable(told, _retry_after(error) if error.code in PASSING else math.inf) from error
        except (OSError, HTTPException) as error:
            if isinstance(getattr(error, "reason", error), TimeoutError):
                raise Unavailable(f"no reply within {self.timeout:g} s", status=Status.TIMEOUT) from error
            raise Unavailable(f"no reply: {error}") from error

    def _stored(self, query: str, *values: str) -> list[tuple[str, str]]:
        """The rows that the cache has for a query."""
        if not self.cache:
            return []
        Path(self.cache).parent.mkdir(parents=True, exist_ok=True)
        with self.lock, sqlite3.connect(self.cache, timeout=60) as database:
            database.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, text TEXT)")
            return database.execute(query, values).fetchall()


def read_by(read: Callable[[int, str], Any], index: int, text: str) -> Reply:
    """A reply that was read; one that breaks a rule is `unparseable`."""
    try:
        return Reply(read(index, text), text)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        return Reply(None, f"{error}: {text[:300]!r}", Status.UNPARSEABLE)


def _retry_after(error: HTTPError) -> float:
    """The seconds that a header asks for: a number, or a date."""
    value = error.headers.get("Retry-After", "")
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time())
    return 0.0
