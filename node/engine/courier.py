"""Carries events from the engine's thread to the event loops of clients."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from typing import NamedTuple

from node.engine.sequence import Event

log = logging.getLogger(__name__)


class Parcel(NamedTuple):
    loop: asyncio.AbstractEventLoop
    box: asyncio.Queue[Event]
    event: Event


class Courier:
    """A thread between the engine and the loops. Waking a loop takes a system call, at which Python hands the
    interpreter to that loop; the engine would get it back only when the loop is done, at every token. `put` does not
    wait: the courier runs while the engine is inside its step."""

    def __init__(self) -> None:
        self._parcels: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, loop: asyncio.AbstractEventLoop, box: asyncio.Queue[Event], event: Event) -> None:
        self._parcels.put(Parcel(loop, box, event))

    def close(self) -> None:
        """Deliver what was put, and end."""
        self._parcels.put(None)
        if self._thread.ident is None:
            self._run()
        else:
            self._thread.join()

    def _run(self) -> None:
        is_open = True
        while is_open:
            parcels = [self._parcels.get()]
            while not self._parcels.empty():
                parcels.append(self._parcels.get())
            by_loop: dict[asyncio.AbstractEventLoop, list[Parcel]] = {}
            for parcel in parcels:
                if parcel is None:
                    is_open = False
                else:
                    by_loop.setdefault(parcel.loop, []).append(parcel)
            for loop, its in by_loop.items():
                try:
                    loop.call_soon_threadsafe(_deliver, its)
                except RuntimeError:
                    log.debug("%d events came for clients whose loop is closed", len(its))


def _deliver(parcels: list[Parcel]) -> None:
    for parcel in parcels:
        parcel.box.put_nowait(parcel.event)
