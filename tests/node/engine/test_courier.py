"""Events reach their loops in order, and a loop that is gone keeps nobody else from its events."""

from __future__ import annotations

import asyncio
import threading

from node.engine.courier import Courier
from node.engine.sequence import Delta, Event


def delta(i: int) -> Delta:
    return Delta(str(i), (i,))


def test_events_come_in_order_though_one_loop_is_closed() -> None:
    courier, before = Courier(), threading.active_count()
    closed = asyncio.new_event_loop()
    closed.close()

    async def listen() -> list[Event]:
        box, unread = asyncio.Queue[Event](), asyncio.Queue[Event]()
        for i in range(50):
            courier.put(closed, unread, delta(i))
            courier.put(asyncio.get_running_loop(), box, delta(i))
            if i == 10:
                courier.start()
        return [await box.get() for _ in range(50)]

    assert asyncio.run(listen()) == [delta(i) for i in range(50)]
    courier.close()
    assert threading.active_count() == before


def test_what_was_put_is_delivered_though_it_never_started() -> None:
    async def listen() -> Event:
        courier, box = Courier(), asyncio.Queue[Event]()
        courier.put(asyncio.get_running_loop(), box, delta(1))
        courier.close()
        return await box.get()

    assert asyncio.run(listen()) == delta(1)
