"""How fast a run goes, and how long it will take."""

from time import perf_counter


class Pace:
    """Measures the steps of one start of a run.

    Args:
        done: Steps that an earlier start has made.
        total: Steps of the run; None or a negative number: no end is known.
    """

    def __init__(self, done: int, total: int | None) -> None:
        self.first = self.done = done
        self.total = total
        self._started = self._latest = perf_counter()

    def step_ended(self) -> None:
        """Counts a step."""
        self.done += 1
        self._latest = perf_counter()

    @property
    def left(self) -> float | None:
        """Seconds until the last step will have ended, at the mean speed so far; None if that is not known."""
        if self.done == self.first or self.total is None or not has_end(self.total):
            return None
        per_step = (self._latest - self._started) / (self.done - self.first)
        return max(0.0, self._latest + per_step * (self.total - self.done) - perf_counter())


def has_end(total: int | None) -> bool:
    """Whether a run ends after `total` steps: Lightning's None and -1 set no end."""
    return total is not None and total >= 0


def counted(steps: int, total: int | None, between: str = "/") -> str:
    """`3/60`, or `3` for a run without a known end.

    Args:
        steps: Steps so far.
        total: Steps of the run; None or a negative number: no end is known.
        between: What stands between the two.
    """
    return f"{steps}{between}{total}" if has_end(total) else str(steps)


def duration(seconds: float) -> str:
    """`8.1 s`, `2 min 05 s`, `3 h 07 min`, `2 d 05 h`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, smaller, size in (("d", "h", 3600), ("h", "min", 60), ("min", "s", 1)):
        base = {"d": 24, "h": 60, "min": 60}[unit] * size
        if whole >= base:
            return f"{whole // base} {unit} {whole % base // size:02} {smaller}"
    return f"{whole} s"
