"""A node that is not the head of its model, and heads for it: a real one, and one that says what a test wants said."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from node.api.app import create_app
from node.api.forward import Upstream
from node.api.guard import Access
from node.api.server import Server
from node.deployment import Deployments, RemoteDeployment
from node.ports import listen_unix
from tests.node.api.conftest import CONTEXT, Served, serving
from tests.node.api.test_connections import wait_for

CHAT = "/v1/chat/completions"
HELLO = {"model": "toy:1m", "messages": [{"role": "user", "content": "x"}]}
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class Entry:
    """A node whose only model lives elsewhere."""

    url: str
    upstream: Upstream
    deployments: Deployments
    loop: asyncio.AbstractEventLoop
    server: Server

    def lose(self, reason: str = "silent for 1.0 s") -> None:
        """As the one who watches the head does; returns when it is done."""
        done = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (self.upstream.lost(reason), done.set()))
        assert done.wait(10)

    def cut(self) -> None:
        """Drop its connections without a word, as a killed process does."""
        connections = self.server._server.server_state.connections
        self.loop.call_soon_threadsafe(lambda: [one.transport.abort() for one in connections])  # pyright: ignore


@contextmanager
def entering(
    base_url: str,
    *,
    uds: Path | None = None,
    listen: Path | None = None,
    internal: bool = False,
    access: Access | None = None,
    deployments: Deployments | None = None,
) -> Iterator[Entry]:
    """A node that forwards "toy:1m" to `base_url`, on a port of its own or on the Unix socket `listen`."""
    sock = listen_unix(listen) if listen else socket.create_server(("127.0.0.1", 0))
    started: list[Entry] = []
    ready = threading.Event()

    async def run() -> None:
        limits = httpx.Limits(max_connections=None)
        transport = httpx.AsyncHTTPTransport(uds=str(uds) if uds else None, limits=limits)
        async with httpx.AsyncClient(transport=transport) as client:
            upstream = Upstream(client, base_url, "n1")
            remote = RemoteDeployment("toy:1m", 1_700_000_000, CONTEXT, "n1", upstream, aliases=frozenset({"org/toy"}))
            held = Deployments([remote]) if deployments is None else deployments
            server = Server(create_app(held, access=access, internal=internal, ping_s=0.1), sock)
            url = "http://head" if listen else f"http://{address(sock)}"
            started.append(Entry(url, upstream, held, asyncio.get_running_loop(), server))
            ready.set()
            await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert ready.wait(10)
        yield started[0]
        wait_for(lambda: started[0].upstream.num_open == 0)
    finally:
        started[0].server.stop()
        thread.join(10)
        sock.close()
        assert not thread.is_alive()


@dataclass
class Pair:
    head: Served
    entry: Entry
    peers: Entry
    """The head's side for other nodes."""


@contextmanager
def pairing(folder: Path, **options: Any) -> Iterator[Pair]:
    """A head that peers reach by a Unix socket, and a node that forwards to it."""
    uds = folder / "head.sock"
    with (
        serving(**options) as head,
        entering("http://unused", listen=uds, internal=True, deployments=head.deployments) as peers,
        entering("http://n1.peer", uds=uds) as entry,
    ):
        yield Pair(head, entry, peers)
        head.go.set()


@dataclass
class Script:
    """A head that is not ours: says what it is told to. `requests` are what came, head and body."""

    url: str
    requests: list[tuple[bytes, bytes]] = field(default_factory=list)
    error: list[BaseException] = field(default_factory=list)


@contextmanager
def scripted(say: Callable[[socket.socket], None]) -> Iterator[Script]:
    """Takes connections one by one, reads one request from each, and has `say` answer it."""
    listener = socket.create_server(("127.0.0.1", 0))
    script = Script(f"http://{address(listener)}")

    def run() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock:
                sock.settimeout(20)
                try:
                    top = b""
                    while b"\r\n\r\n" not in top:
                        top += (more := sock.recv(65536))
                        if not more:
                            break
                    else:
                        top, body = top.split(b"\r\n\r\n", 1)
                        length = int(re.search(rb"(?i)content-length: (\d+)", top)[1])  # pyright: ignore
                        parts = [body]
                        while sum(map(len, parts)) < length:
                            parts.append(sock.recv(1 << 20))
                        script.requests.append((top, b"".join(parts)))
                        say(sock)
                except BaseException as exc:
                    script.error.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield script
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(20)
        assert not thread.is_alive()
        assert not script.error, script.error


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()
    return f"{host}:{port}"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def plain(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = (f"HTTP/1.1 {status}", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers)
    return "\r\n".join((*lines, "", "")).encode() + body


def reset(sock: socket.socket) -> None:
    """Ends it as a machine does whose process was killed with data unread."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def until_closed(sock: socket.socket) -> None:
    """Returns when the other side has gone."""
    with contextlib.suppress(ConnectionError):
        assert sock.recv(1) == b"", "the other side went on talking"


def same(data: bytes) -> bytes:
    """Without what differs between two answers to one question: names, dates, durations and comments."""
    data = re.sub(rb'"id":"[a-z]+-[0-9a-f]+"', b'"id":""', data)
    data = re.sub(rb'"created":\d+', b'"created":0', data)
    data = re.sub(rb'"timings":\{[^}]*\}', b'"timings":{}', data)
    return data.replace(b": ping\n\n", b"")


def ask(entry: Entry, body: Any = HELLO, **options: Any) -> httpx.Response:
    return httpx.post(f"{entry.url}{CHAT}", json=body, timeout=20, **options)


def lost_in(answer: httpx.Response, word: str = "was lost") -> None:
    """It is the error that tells a client to come back."""
    assert answer.status_code == 503, answer.text
    assert answer.headers["retry-after"] == "1"
    error = answer.json()["error"]
    assert error["type"] == "service_unavailable"
    assert word in error["message"] and "n1" in error["message"]
    assert error["message"].endswith("Send the request again in a moment.")
