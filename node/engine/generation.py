"""How events leave the engine's thread: into an asyncio loop, or to a caller that blocks."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator

from node.engine.courier import Courier
from node.engine.sequence import Event, Finished


class Generation:
    """An asynchronous iterator of events that ends after `Finished`. Dropping it does not cancel; `cancel` does."""

    def __init__(self, loop: asyncio.AbstractEventLoop, courier: Courier) -> None:
        self._loop = loop
        self._courier = courier
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._cancel: Callable[[], None] = lambda: None
        self._is_done = False

    def cancel_with(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel

    def cancel(self) -> None:
        """Stop it wherever it is. From any thread, any number of times; `Finished` follows."""
        if not self._is_done:
            self._cancel()

    def put(self, event: Event) -> None:
        """Called by the engine's thread."""
        self._courier.put(self._loop, self._queue, event)

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


class BlockingGeneration:
    """The same for a thread that waits: an iterator of events that ends after `Finished`. Dropping it cancels."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.put = self._queue.put  # the engine must not hold on to the generation, or dropping it would go unseen
        self._cancel: Callable[[], None] = lambda: None
        self._is_done = False

    def cancel_with(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel

    def cancel(self) -> None:
        """Stop it wherever it is. From any thread, any number of times; `Finished` follows."""
        if not self._is_done:
            self._cancel()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        if self._is_done:
            raise StopIteration
        event = self._queue.get()
        self._is_done = isinstance(event, Finished)
        return event

    def __del__(self) -> None:
        self.cancel()
