"""A server of judges for tests: it follows a script, and notes when requests came."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from helpers.waiting import LIMIT
from tools.scripted_judge import Handler, served

Script = Callable[[int, dict[str, Any]], Any]
"""From the index of a request and its body to the text of a reply, to status, text and headers, or to `hang`."""


class Scripted:
    """What a server has seen."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.times: list[float] = []
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.url = ""
        self.last: dict[int, Any] = {}

    def most_within(self, seconds: float) -> int:
        """The most requests in any such time."""
        return max(sum(begin <= one < begin + seconds for one in self.times) for begin in self.times)


class ScriptedHandler(Handler):
    """Answers by the script."""

    seen: Scripted

    def reply(self, status: int, text: str, **headers: str) -> None:
        """Sends what the script says in place of the usual answer."""
        answer = type(self).seen.last.pop(threading.get_ident())
        if answer == "hang":
            self.send_response(200)
            self.end_headers()
            type(self).seen.over.wait(LIMIT)
        elif isinstance(answer, tuple):
            super().reply(answer[0], answer[1], **(answer[2] if len(answer) > 2 else {}))
        else:
            super().reply(status, text, **headers)


@contextmanager
def judging(script: Script) -> Iterator[Scripted]:
    """A server that follows a script, until the end."""
    seen = Scripted(script)

    def judge(body: dict[str, Any]) -> str:
        with seen.lock:
            seen.times.append(time.monotonic())
            seen.bodies.append(body)
            index = len(seen.times) - 1
        seen.last[threading.get_ident()] = answer = script(index, body)
        return answer if isinstance(answer, str) else ""

    server = served(judge, handler=type("Own", (ScriptedHandler,), {"seen": seen}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    seen.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield seen
    finally:
        seen.over.set()
        server.shutdown()
        server.server_close()
