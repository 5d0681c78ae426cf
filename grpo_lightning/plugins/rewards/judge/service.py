"""The client of a judge behind an OpenAI-compatible address, with limits, repetitions, and a cache on disk."""

import json
import math
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from time import monotonic, time
from typing import Any

from grpo_lightning.plugins.engines.http.http_client import Server, ServerError
from grpo_lightning.plugins.rewards.judge.limits import RateLimits
from grpo_lightning.sandbox.pool import Closed, Outcome
from grpo_lightning.types import Status, UsageError

BUSY = {408, 409, 425, 429}
"""HTTP's statuses of a server that is there and has too much to do."""
PASSING = BUSY | {0, 500, 502, 503, 504}
"""HTTP's statuses after which a request is repeated, since the reason may pass. 0 is no answer."""
LONGEST_PAUSE = 600.0
"""Seconds; a server that demands a longer pause has failed."""
MAX_REPLY = 1 << 24
"""Bytes; a reply is an object with a sentence and a number."""
LOOK_SECONDS = 0.02
"""Seconds between two looks of a waiting thread at the limits."""


class Service:
    """Requests to a judge. Equal requests are made once, and never again while the file of the cache is there.

    Args:
        url: The address before `/chat/completions`.
        concurrency: Largest number of requests at the same time.
        rates: Requests and tokens per minute, None for no limit. The server counts tokens; before its reply they are
            estimated.
        timeout: Longest silence in seconds.
        cache: The file that keeps replies; empty for none.
    """

    pauses = (0.5, 1.0, 2.0, 4.0, 8.0)
    """Seconds before the repetitions of a request."""

    def __init__(self, url: str, concurrency: int, rates: Sequence[float | None], timeout: float, cache: str) -> None:
        token = os.environ.get("JUDGE_API_KEY", "").strip()
        if not re.fullmatch("[!-~]*", token):
            raise UsageError(
                "JUDGE_API_KEY: the key holds a space, a line break or a letter that no key has: copy it anew"
            )
        self.server = Server(url, timeout, "url", token, MAX_REPLY)
        self.concurrency = concurrency
        self.rates = rates
        self.cache = cache
        self.writing = threading.Lock()
        self.closed = threading.Event()
        self.hung_up = ExitStack()
        self.turn = threading.Lock()
        """Held by the thread that waits for the limits; the other threads wait for it."""
        self.share(1)

    def share(self, num_ranks: int) -> None:
        """Divides the limits among the processes of a run."""
        self.limits = RateLimits(*((rate or math.inf) / num_ranks for rate in self.rates))

    def refusal(self, body: dict[str, Any]) -> str:
        """Makes a request once; returns the reason why the server does not answer, empty if it does or is busy."""
        self._open()
        try:
            self._kept(body, self._text)
        except ServerError as error:
            return "" if error.status in BUSY else str(error)
        except (sqlite3.Error, OSError) as error:
            return f"cache={self.cache}: {type(error).__name__}: {error}"
        return ""

    def ask(self, bodies: Sequence[dict[str, Any]]) -> list[Outcome]:
        """Returns the text of the reply to each body; status `error` or `timeout` if there is none."""
        self._open()
        keys = [self._key(body) for body in bodies]
        unique = dict(zip(keys, bodies, strict=True))
        with ThreadPoolExecutor(self.concurrency) as pool:
            try:
                outcomes = dict(zip(unique, pool.map(self._outcome, unique.values()), strict=True))
            except BaseException:
                self.close()
                raise
        return [outcomes[key] for key in keys]

    def _open(self) -> None:
        """Allows requests again after `close`."""
        self.closed.clear()
        self.hung_up.close()

    def close(self) -> None:
        """Ends all requests."""
        self.closed.set()
        self.hung_up.enter_context(self.server.hung_up())

    def _key(self, body: dict[str, Any]) -> str:
        """Returns the name of a reply in the cache: two servers may have a model of the same name."""
        return json.dumps([self.server.url, body], sort_keys=True)

    def _kept(self, body: dict[str, Any], request: Callable[[dict[str, Any]], str]) -> str:
        """Returns the text of a reply, from the cache or by a request, whose reply the cache keeps."""
        key = self._key(body)
        if rows := self._stored("SELECT text FROM replies WHERE key = ?", key):
            return rows[0][0]
        text = request(body)
        self._stored("INSERT OR REPLACE INTO replies VALUES (?, ?)", key, text)
        return text

    def _outcome(self, body: dict[str, Any]) -> Outcome:
        """Returns the text of a reply, or the reason why there is none."""
        try:
            return Outcome(Status.OK, self._kept(body, self._repeated))
        except ServerError as error:
            timed_out = isinstance(error.__cause__, TimeoutError)
            return Outcome(Status.TIMEOUT if timed_out else Status.ERROR, None, str(error))
        except (sqlite3.Error, OSError) as error:  # a disk that is full
            return Outcome(Status.ERROR, None, f"{type(error).__name__}: {error}")

    def _repeated(self, body: dict[str, Any]) -> str:
        """Returns the text of a reply, after as many repetitions as are allowed."""
        for pause in self.pauses:
            try:
                return self._text(body)
            except ServerError as error:
                seconds = seconds_of(error.retry_after)
                if error.status not in PASSING or seconds > LONGEST_PAUSE:
                    raise
                self.limits.quiet_until = max(self.limits.quiet_until, monotonic() + seconds)
            self.closed.wait(pause)
        return self._text(body)

    def _text(self, body: dict[str, Any]) -> str:
        """Returns the text of a reply, requested as soon as the limits allow it."""
        # Three characters per token: an estimate, until the server tells the number.
        request = object()
        tokens = len(str(body)) / 3 + body.get("max_tokens", 0)
        with self.turn:
            while self.closed.is_set() or not self.limits.begin(request, tokens):
                if self.closed.wait(LOOK_SECONDS):
                    raise Closed
        try:
            answer = self.server.post("/chat/completions", body)
            tokens = float((answer.get("usage") or {}).get("total_tokens", tokens))
            text = answer["choices"][0]["message"]["content"]
            if not isinstance(text, str):
                raise TypeError(f"its content is {json.dumps(text)[:80]}")
            return text.encode(errors="replace").decode()  # no file takes half a character
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ServerError(f"not the reply of a chat: {type(error).__name__}: {error}") from error
        finally:
            self.limits.end(request, tokens)

    def _stored(self, query: str, *values: str) -> list[tuple[str]]:
        """Runs a query on the cache; returns its rows."""
        # Reading makes no file: a run that is refused leaves none.
        if not self.cache or (query.startswith("SELECT") and not Path(self.cache).exists()):
            return []
        Path(self.cache).parent.mkdir(parents=True, exist_ok=True)
        with self.writing, closing(sqlite3.connect(self.cache, timeout=60)) as database, database:
            database.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, text TEXT)")
            return database.execute(query, values).fetchall()


def seconds_of(retry_after: str) -> float:
    """Returns the seconds until a header's number or date has passed; 0 if it has neither."""
    with suppress(ValueError):
        return float(retry_after)
    with suppress(ValueError):
        return parsedate_to_datetime(retry_after).timestamp() - time()
    return 0.0
