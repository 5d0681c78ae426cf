"""A limit on what is asked of a server in a minute."""

from time import monotonic


class Limit:
    """At most `amount` per minute, as the server counts.

    A request counts until a minute after it ended, since nobody knows when in between it came there. One that costs
    more than the amount is made alone, and counts for as many minutes as it takes up.
    """

    period = 60.0  # seconds

    def __init__(self, amount: float) -> None:
        self.amount = amount
        self.under_way = 0.0
        self.ended: list[tuple[float, float]] = []

    def allows(self, cost: float) -> bool:
        """True if so much may begin now."""
        self.ended = [one for one in self.ended if one[0] > monotonic()]
        used = self.under_way + sum(amount for _, amount in self.ended)
        return used == 0 or used + cost <= self.amount

    def end(self, cost: float, actual: float) -> None:
        """Ends what was begun for a cost, and turned out to cost `actual`."""
        self.under_way -= cost
        self.ended.append((monotonic() + self.period * max(1.0, actual / self.amount), actual))
