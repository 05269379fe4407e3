"""How events leave the engine's thread: into an asyncio loop, or to a caller that blocks."""

from __future__ import annotations

import asyncio
import logging
import queue
from collections.abc import AsyncIterator, Callable, Iterator

from node.engine.sequence import Event, Finished

log = logging.getLogger(__name__)


class Generation:
    """An asynchronous iterator of events that ends after `Finished`. Dropping it does not cancel; `cancel` does."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._cancel: Callable[[], None] = lambda: None
        self._is_done = False

    @classmethod
    def in_running_loop(cls) -> Generation:
        return cls(asyncio.get_running_loop())

    def cancel_with(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel

    def cancel(self) -> None:
        """Stop it wherever it is. From any thread, any number of times; `Finished` follows."""
        if not self._is_done:
            self._cancel()

    def put(self, event: Event) -> None:
        """Called by the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)
        except RuntimeError:
            log.debug("an event came for a client whose loop is closed")

    def ready(self) -> list[Event]:
        """Events that wait already, without waiting for more: for writers that send several at once."""
        events = []
        while not self._queue.empty():
            events.append(self._noted(self._queue.get_nowait()))
        return events

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if self._is_done:
            raise StopAsyncIteration
        return self._noted(await self._queue.get())

    def _noted(self, event: Event) -> Event:
        self._is_done = self._is_done or isinstance(event, Finished)
        return event


def blocking_events() -> tuple[Callable[[Event], None], Callable[[Callable[[], None]], Iterator[Event]]]:
    """Where the engine puts events, and how a thread reads them: it blocks for each, and cancels when left early."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def read(cancel: Callable[[], None]) -> Iterator[Event]:
        event: Event | None = None
        try:
            while not isinstance(event, Finished):
                event = events.get()
                yield event
        finally:
            if not isinstance(event, Finished):
                cancel()

    return events.put, read
