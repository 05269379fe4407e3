"""While an answer is being made: keep the connection alive, and stop the work when nobody listens any more."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from starlette.types import Message, Receive, Send

from node.engine.generation import Generation
from node.engine.sequence import Event, Finished


class Connection:
    """One client's side of an answer. Used as a context manager around the work; leaving it cancels what still runs."""

    def __init__(self, receive: Receive, send: Send, generations: Sequence[Generation], *, ping_s: float) -> None:
        self._receive, self._send = receive, send
        self._generations = generations
        self._ping_s = ping_s
        self._sent_at = time.monotonic()
        self.ping: bytes | None = None
        self.is_gone = False

    async def __aenter__(self) -> Connection:
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watcher
        self._cancel()

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        await self._message({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        if not more:
            self.ping = None  # nothing may follow the end, not even while a slow reader delays it
        await self._message({"type": "http.response.body", "body": data, "more_body": more})

    async def _message(self, message: Message) -> None:
        if self.is_gone:
            return
        try:
            await self._send(message)
        except OSError:  # how a server may say that the client has left
            self._leave()
        self._sent_at = time.monotonic()

    async def _watch(self) -> None:
        listening = asyncio.ensure_future(self._receive())
        try:
            while not self.is_gone:
                quiet_s = time.monotonic() - self._sent_at
                if self.ping is not None and quiet_s >= self._ping_s:
                    await self.write(self.ping)
                    continue
                wait_s = self._ping_s if self.ping is None else self._ping_s - quiet_s
                done, _ = await asyncio.wait({listening}, timeout=wait_s)
                if done:
                    if listening.result()["type"] == "http.disconnect":
                        self._leave()
                        return
                    listening = asyncio.ensure_future(self._receive())
        finally:
            listening.cancel()

    def _leave(self) -> None:
        self.is_gone = True
        self._cancel()

    def _cancel(self) -> None:
        for generation in self._generations:
            generation.cancel()


async def merged(generations: Sequence[Generation]) -> AsyncGenerator[list[tuple[int, Event]], None]:
    """Events of all generations as (index, event), those that are ready together in one list, to the last."""
    if len(generations) == 1:
        async for event in generations[0]:
            yield [(0, event), *((0, more) for more in generations[0].ready())]
        return
    queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

    async def pump(index: int, generation: Generation) -> None:
        async for event in generation:
            queue.put_nowait((index, event))

    pumps = [asyncio.create_task(pump(i, generation)) for i, generation in enumerate(generations)]
    try:
        left = len(generations)
        while left:
            events = [await queue.get()]
            while not queue.empty():
                events.append(queue.get_nowait())
            left -= sum(isinstance(event, Finished) for _, event in events)
            yield events
    finally:
        for task in pumps:
            task.cancel()


def submitted(submit: Sequence[Callable[[], Generation]]) -> list[Generation]:
    """All of them, or none: when one is refused, those before it are cancelled."""
    generations: list[Generation] = []
    try:
        for one in submit:
            generations.append(one())
    except BaseException:
        for generation in generations:
            generation.cancel()
        raise
    return generations
