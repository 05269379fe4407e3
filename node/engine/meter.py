"""How many tokens per second went through lately."""

from __future__ import annotations

WINDOW_S = 10


class Meter:
    """Counts in buckets of a second. One thread adds; others may read and see a moment's counts missing at worst."""

    def __init__(self) -> None:
        self._buckets = [(-1, 0)] * (WINDOW_S + 1)  # (second, count); the present second is not full yet

    def add(self, count: int, now: float) -> None:
        second = int(now)
        at = second % len(self._buckets)
        begun, total = self._buckets[at]
        self._buckets[at] = (second, count + (total if begun == second else 0))

    def rate(self, now: float) -> float:
        """Per second, over the last `WINDOW_S` whole seconds."""
        second = int(now)
        return sum(count for begun, count in self._buckets if second - WINDOW_S <= begun < second) / WINDOW_S
