"""Text that may be shown: whole characters only, and nothing of a stop string, not even a part of one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class StreamDecoder(Protocol):
    """Token ids to text, a few at a time; it holds back bytes of a character that is not complete."""

    def push(self, ids: Iterable[int]) -> str: ...

    def flush(self) -> str: ...


class TextStream:
    """Decodes tokens and holds back what may yet become a stop string.

    `push` and `flush` return what may be shown now. `stopped` is the stop string that was met, if one was: the one that
    begins first, of those that begin there the one that is complete first. What follows it is dropped.
    """

    def __init__(self, decoder: StreamDecoder, stops: tuple[str, ...]) -> None:
        self._decoder = decoder
        self._stops = stops
        self._held = ""
        self.stopped: str | None = None

    def push(self, ids: Iterable[int]) -> str:
        return self._accept(self._decoder.push(ids))

    def flush(self) -> str:
        """The rest, once no token will follow."""
        shown = self._accept(self._decoder.flush())
        if self.stopped is None:
            shown += self._held
        self._held = ""
        return shown

    def _accept(self, text: str) -> str:
        if self.stopped is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        shown = ""
        while True:  # decide at the first place where a stop string begins, or may begin
            place = _first_beginning(self._held, self._stops)
            shown, self._held = shown + self._held[:place], self._held[place:]
            if not self._held:
                return shown
            complete = [stop for stop in self._stops if self._held.startswith(stop)]
            if complete:
                self.stopped = min(complete, key=len)
                self._held = ""
                return shown
            if any(stop.startswith(self._held) for stop in self._stops):
                return shown
            shown, self._held = shown + self._held[0], self._held[1:]


def _first_beginning(text: str, stops: tuple[str, ...]) -> int:
    """The first place from which a stop string is in `text`, whole or cut off by its end."""
    first = len(text)
    for stop in stops:
        found = text.find(stop)
        if 0 <= found < first:
            first = found
        for i in range(max(0, len(text) - len(stop) + 1), first):
            if stop.startswith(text[i:]):
                first = i
                break
    return first
