"""One TLS connection that two threads may use at once, one to send and one to receive.

OpenSSL's connections are not made for that, so the socket does not block and each call into it is made under a lock;
waiting happens outside of it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Callable

from node.dataplane.frames import HEADER_BYTES, Header
from node.dataplane.links import LinkClosed

ONE_RECORD_BYTES = 16 << 10
"""What one TLS record holds: a frame up to this size leaves in one piece."""
SEND_BYTES = 256 << 10
"""Given to OpenSSL at once: the receiving thread waits for its turn as long."""


class Channel:
    """Sends and receives whole frames. `num_sent` counts their bytes (without TLS's own)."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        """Takes over a connection whose handshake is done."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self._socket = sock
        self._tls = threading.Lock()  # around every call into OpenSSL
        self._sending = threading.Lock()  # one frame at a time
        self._header = bytearray(HEADER_BYTES)
        self.num_sent = 0

    def send(
        self, header: Header, meta: bytes = b"", body: memoryview | None = None, *, patience_s: float | None = None
    ) -> None:
        """Raises LinkClosed when it is closed, or `patience_s` seconds (None: any number) pass in which the other side
        takes nothing."""
        head = header.pack() + meta
        with self._sending:
            if body is None or len(head) + body.nbytes <= ONE_RECORD_BYTES:
                self._send_all(memoryview(head if body is None else head + body), patience_s)
            else:
                self._send_all(memoryview(head), patience_s)
                self._send_all(body, patience_s)

    def recv_header(self, *, patience_s: float) -> Header:
        """The next frame's. Raises LinkClosed after `patience_s` seconds without a byte, FrameError for garbage."""
        self.recv_into(memoryview(self._header), patience_s=patience_s)
        return Header.unpack(self._header)

    def recv_into(self, view: memoryview, *, patience_s: float) -> None:
        """Fill `view`. Raises LinkClosed."""
        at = 0
        while at < len(view):
            count = self._call(self._socket.recv_into, view[at:], patience_s, "silent")
            if not count:
                raise LinkClosed("The other side closed the link.")
            at += count

    def close(self) -> None:
        """Wakes whoever waits in it. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._tls:
            self._socket.close()

    def _send_all(self, view: memoryview, patience_s: float | None) -> None:
        view = view.cast("B") if view.nbytes else view
        at = 0
        while at < len(view):
            count = self._call(self._socket.send, view[at : at + SEND_BYTES], patience_s, "taking nothing")
            at += count
            self.num_sent += count

    def _call(
        self, operation: Callable[[memoryview], int], view: memoryview, patience_s: float | None, what: str
    ) -> int:
        """Bytes that OpenSSL took or gave, after waiting for as long as it has to."""
        while True:
            try:
                with self._tls:
                    return operation(view)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wants:
                self._wait(wants, patience_s, what)
            except (OSError, ValueError) as exc:
                raise LinkClosed(f"The link broke: {exc}.") from exc

    def _wait(self, wants: OSError, patience_s: float | None, what: str) -> None:
        kind = select.POLLOUT if isinstance(wants, ssl.SSLWantWriteError) else select.POLLIN
        try:
            poll = select.poll()
            poll.register(self._socket, kind)
            ready = poll.poll(None if patience_s is None else patience_s * 1000)
        except (OSError, ValueError) as exc:
            raise LinkClosed("The link is closed.") from exc
        if not ready:
            raise LinkClosed(f"The other side is {what} for {patience_s:.1f} s.")
