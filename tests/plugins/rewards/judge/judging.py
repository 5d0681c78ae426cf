"""A server of judges for tests: it follows a script, and notes when requests came."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any

from helpers.waiting import LIMIT

from examples.code.scripted_judge import Handler

Script = Callable[[int, dict[str, Any]], Any]
"""From the index of a request and its body to the text of a reply, to status, text and headers, or to `hang`."""


@dataclass
class Scripted:
    """What a server has seen."""

    url: str
    times: list[float] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    """The header `Authorization` of each request that has one."""

    def most_within(self, seconds: float) -> int:
        """The most requests in any such time."""
        return max(sum(begin <= one < begin + seconds for one in self.times) for begin in self.times)


@contextmanager
def judging(script: Script) -> Iterator[Scripted]:
    """A server that follows a script, until the end."""
    lock, over = threading.Lock(), threading.Event()

    class Own(Handler):
        def answer(self, body: dict[str, Any]) -> None:
            with lock:
                seen.times.append(time.monotonic())
                seen.bodies.append(body)
                seen.keys += self.headers.get_all("Authorization") or []
                index = len(seen.times) - 1
            told = script(index, body)
            if told == "hang":
                self.send_response(200)
                self.end_headers()
                over.wait(LIMIT)
            elif isinstance(told, str):
                self.chat(body, told)
            else:
                status, text, *headers = told
                self.reply(status, text, **dict(*headers))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Own)
    server.daemon_threads = True
    seen = Scripted(f"http://127.0.0.1:{server.server_address[1]}/v1")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield seen
    finally:
        over.set()
        server.shutdown()
        server.server_close()
