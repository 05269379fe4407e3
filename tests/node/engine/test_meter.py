from __future__ import annotations

from node.engine.meter import WINDOW_S, Meter


def test_the_rate_is_that_of_the_last_whole_seconds() -> None:
    meter = Meter()
    assert meter.rate(0.0) == 0
    for tenth in range(100, 400):
        meter.add(3, tenth / 10)
    assert meter.rate(39.95) == 30
    assert meter.rate(35.0) < 30, "seconds to come do not count"
    meter.add(1000, 40.1)
    assert meter.rate(40.2) == 30, "a second counts when it is over"
    assert meter.rate(41.0) == 30 * (WINDOW_S - 1) / WINDOW_S + 1000 / WINDOW_S
    assert meter.rate(60.0) == 0
    meter.add(5, 72.0)
    assert meter.rate(73.0) == 5 / WINDOW_S
