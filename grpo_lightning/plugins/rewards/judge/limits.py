"""Limits on what is asked of a server in a minute."""

import math
import threading
from time import monotonic


class Limits:
    """At most so many requests and tokens per minute, as the server counts.

    A request counts until a minute after it ended, since nobody knows when in between it came there. One that costs
    more than a limit is made alone, and counts for as many minutes as it takes up.
    """

    period = 60.0  # seconds

    def __init__(self, requests: float, tokens: float) -> None:
        self.requests, self.tokens, self.quiet_until = requests, tokens, 0.0
        self.counted: dict[object, tuple[float, float]] = {}  # tokens of a request, and until when it counts
        self.lock = threading.Lock()

    def begin(self, request: object, tokens: float) -> bool:
        """Counts a request, unless it may not be made now."""
        with self.lock:
            now = monotonic()
            self.counted = {key: pair for key, pair in self.counted.items() if pair[1] > now}
            used = tokens + sum(pair[0] for pair in self.counted.values())
            fits = not self.counted or (len(self.counted) < self.requests and used <= self.tokens)
            if begins := fits and now >= self.quiet_until:
                self.counted[request] = tokens, math.inf
            return begins

    def end(self, request: object, tokens: float) -> None:
        """Tells what a request has cost, now that it has ended."""
        minutes = max(1.0, 1 / self.requests, tokens / self.tokens)
        with self.lock:
            self.counted[request] = tokens, monotonic() + self.period * minutes
