"""Limits on the requests and tokens that a server gets in a minute."""

import math
import threading
from time import monotonic


class RateLimits:
    """Counts requests and their tokens, so that no minute has more of them than the server allows.

    A request counts until a minute after it ended, since nobody knows when in between the server counted it. A request
    that costs more than a limit is made alone, and counts for as many minutes as it takes up.
    """

    period = 60.0
    """Seconds for which the limits are."""

    def __init__(self, requests: float, tokens: float) -> None:
        self.requests = requests
        self.tokens = tokens
        self.quiet_until = 0.0
        self.counted: dict[object, tuple[float, float]] = {}
        """Tokens of each request, and the time until which it counts."""
        self.lock = threading.Lock()

    def begin(self, request: object, tokens: float) -> bool:
        """Counts a request and returns True; returns False if it may not be made now."""
        with self.lock:
            time_now = monotonic()
            self.counted = {key: pair for key, pair in self.counted.items() if pair[1] > time_now}
            used = tokens + sum(pair[0] for pair in self.counted.values())
            fits = not self.counted or (len(self.counted) < self.requests and used <= self.tokens)
            if begins := fits and time_now >= self.quiet_until:
                self.counted[request] = tokens, math.inf
            return begins

    def end(self, request: object, tokens: float) -> None:
        """Counts the tokens that a request has cost, now that it has ended."""
        minutes = max(1.0, 1 / self.requests, tokens / self.tokens)
        with self.lock:
            self.counted[request] = tokens, monotonic() + self.period * minutes
