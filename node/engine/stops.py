"""Text that may be shown: whole characters only, and nothing of a stop string, not even a part of one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class StreamDecoder(Protocol):
    """Token ids to text, a few at a time; it holds back bytes of a character that is not complete."""

    def push(self, ids: Iterable[int]) -> str: ...

    def flush(self) -> str: ...


def first_stop(text: str, stops: Iterable[str]) -> tuple[int, str] | None:
    """Where the stop string begins that is complete first (of those that end there the longest), and which it is."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return None
    end, _, stop = min(found)
    return end - len(stop), stop


class TextStream:
    """Decodes tokens and holds back what may yet become a stop string.

    `push` and `flush` return what may be shown now: in sum the text before the first stop string (see `first_stop`),
    however it was cut into tokens. `stopped` is the stop string that was met, if one was; what follows it is dropped.
    """

    def __init__(self, decoder: StreamDecoder, stops: tuple[str, ...]) -> None:
        self._decoder = decoder
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.stopped: str | None = None

    def push(self, ids: Iterable[int]) -> str:
        return self._accept(self._decoder.push(ids))

    def flush(self) -> str:
        """The rest, once no token will follow."""
        shown = self._accept(self._decoder.flush()) + self._held
        self._held = ""
        return shown

    def _accept(self, text: str) -> str:
        if self.stopped is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        met = first_stop(text, self._stops)
        if met is not None:
            place, self.stopped = met
            self._held = ""
            return text[:place]
        keep = self._num_open(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _num_open(self, text: str) -> int:
        """Characters at the end of `text` that begin a stop string."""
        for keep in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-keep:]
            if any(stop.startswith(end) for stop in self._stops):
                return keep
        return 0
