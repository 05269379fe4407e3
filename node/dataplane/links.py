"""How stages reach each other. A link is one-way, ordered and loses nothing while it is open."""

from __future__ import annotations

import queue
from typing import Any, Protocol

from node.errors import EngineError


class LinkClosed(EngineError):
    """The other end is gone."""


class Link(Protocol):
    def send(self, message: Any) -> None:
        """Raises LinkClosed."""
        ...

    def recv(self, timeout: float | None = None) -> Any:
        """The next message; None when `timeout` seconds (forever by default) bring none. Raises LinkClosed."""
        ...

    def close(self) -> None: ...


class LocalLink:
    """A link inside one process: nothing is copied."""

    _END = object()

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closed = False

    def send(self, message: Any) -> None:
        if self._closed:
            raise LinkClosed("The link is closed.")
        self._queue.put(message)

    def recv(self, timeout: float | None = None) -> Any:
        try:
            message = self._queue.get(timeout=timeout)
        except queue.Empty:
            return None
        if message is self._END:
            self._queue.put(message)  # for whoever else waits
            raise LinkClosed("The link is closed.")
        return message

    def close(self) -> None:
        self._closed = True
        self._queue.put(self._END)
