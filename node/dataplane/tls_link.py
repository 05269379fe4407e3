"""A `Link` over a TLS connection: steps and results between machines, with a pulse in both directions.

A side that has nothing to say sends a beat every `BEAT_S`. One from which nothing comes for `DEAD_S` is dead, whatever
TCP thinks: a stopped process and a cut cable look the same. What comes in waits in a short queue; when that is full
nothing more is read, and the sender's own sends wait for as long as the other side's pulse is heard.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from typing import Any

import numpy as np

from node.dataplane.channel import Channel
from node.dataplane.codec import Message, decode, encode
from node.dataplane.frames import FrameError, Header, Kind
from node.dataplane.links import LinkClosed

log = logging.getLogger(__name__)

BEAT_S = 0.2
DEAD_S = 0.8
DEPTH = 4
"""Messages that wait to be received. A pipeline has fewer steps than that on their way to one stage."""
GOODBYE_S = 0.2


class TLSLink:
    """Carries messages of one deployment both ways. Bodies are received into buffers that are used again: the array of
    a message is valid until the next `recv`."""

    def __init__(self, channel: Channel, deployment: int, *, name: str, depth: int = DEPTH) -> None:
        self.name = name
        self._channel, self._deployment = channel, deployment
        self._queue: queue.Queue[Message | None] = queue.Queue(depth)
        self._buffers = [bytearray() for _ in range(depth + 2)]  # waiting ones, the one in use, the one being filled
        self._next_buffer = 0
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._read, name=f"{name}-read", daemon=True),
            threading.Thread(target=self._beat, name=f"{name}-beat", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_sent(self) -> int:
        """Bytes of frames, beats included."""
        return self._channel.num_sent

    @property
    def reason(self) -> str | None:
        """Why it is closed, None while it is open."""
        return self._reason

    def send(self, message: Any) -> None:
        """Returns when the operating system has it; waits while the other side is slow but alive. Raises LinkClosed."""
        header, meta, body = encode(message, self._deployment)
        self._send(header, meta, body.data if body is not None else None)

    def recv(self, timeout: float | None = None) -> Any:
        """What came before the end is still delivered. Raises LinkClosed with the reason."""
        try:
            message = self._queue.get(timeout=timeout) if not self._closed.is_set() else self._queue.get_nowait()
        except queue.Empty:
            if self._closed.is_set():
                raise LinkClosed(self._reason or "The link is closed.") from None
            return None
        if message is None:
            raise LinkClosed(self._reason or "The link is closed.")
        return message

    def close(self, reason: str = "") -> None:
        """Tell the other side why, if it still listens, and end. Idempotent."""
        self._end(reason or "The link was closed.", tell=reason)

    def _send(self, header: Header, meta: bytes = b"", body: memoryview | None = None) -> None:
        if self._reason is not None:
            raise LinkClosed(self._reason)
        try:
            self._channel.send(header, meta, body)
        except LinkClosed as exc:
            self._end(str(exc))
            raise LinkClosed(self._reason or str(exc)) from exc

    def _end(self, reason: str, *, tell: str | None = None) -> None:
        """The first reason stays. It is set before the other side is told: its answer may be to hang up."""
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
        self._closed.set()
        if tell is not None:
            words = tell.encode()[:1000]
            with contextlib.suppress(LinkClosed):
                self._channel.send(Header(Kind.GOODBYE, meta_bytes=len(words)), words, patience_s=GOODBYE_S)
        self._channel.close()
        with contextlib.suppress(queue.Full):  # then whoever receives has something else to take first
            self._queue.put_nowait(None)
        log.debug("%s: %s", self.name, reason)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            with contextlib.suppress(LinkClosed):
                self._send(Header(Kind.BEAT))

    def _read(self) -> None:
        try:
            while True:
                self._take(self._channel.recv_header(patience_s=DEAD_S))
        except (LinkClosed, FrameError) as exc:
            self._end(str(exc))

    def _take(self, header: Header) -> None:
        if header.kind is Kind.BEAT:
            return
        meta = memoryview(bytearray(header.meta_bytes))
        self._channel.recv_into(meta, patience_s=DEAD_S)
        if header.kind is Kind.GOODBYE:
            raise LinkClosed(bytes(meta).decode("utf-8", "replace") or "The other side closed the link.")
        if header.deployment != self._deployment:
            raise FrameError(f"A frame of deployment {header.deployment} came on {self._deployment}'s link.")
        message = decode(header, meta, self._body(header))
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(message, timeout=BEAT_S)
                return

    def _body(self, header: Header) -> np.ndarray | None:
        if header.dtype is None:
            return None
        self._next_buffer = (self._next_buffer + 1) % len(self._buffers)
        if len(self._buffers[self._next_buffer]) < header.body_bytes:
            self._buffers[self._next_buffer] = bytearray(header.body_bytes)
        view = memoryview(self._buffers[self._next_buffer])[: header.body_bytes]
        self._channel.recv_into(view, patience_s=DEAD_S)
        return np.frombuffer(view, header.dtype).reshape(header.rows, header.cols)
