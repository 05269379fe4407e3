"""A head that dies, stops or talks nonsense while a request is forwarded to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from node.api import forward
from node.api.forward import Events, Forwarded, Upstream
from node.deployment import Deployment, Deployments, RemoteDeployment
from node.errors import EngineError, LoadingError, UnknownModelError
from tests.node.api.conftest import CONTEXT, Served
from tests.node.api.forwarding import (
    CHAT,
    HELLO,
    SSE,
    Entry,
    Pair,
    address,
    ask,
    chunk,
    entering,
    lost_in,
    pairing,
    plain,
    reset,
    scripted,
    until_closed,
)
from tests.node.api.test_connections import wait_for
from tests.node.api.test_streams import events_of


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Pair]:
    """The head's model waits until told to go."""
    with pairing(tmp_path, max_running=4) as one:
        one.head.go.clear()
        yield one


def broken_off(raw: str) -> list[Any]:
    """The sound events of a stream whose last one is an error."""
    *events, last = events_of(raw)
    assert last["error"]["type"] == "service_unavailable"
    assert "n1 was lost in the middle of its answer" in last["error"]["message"]
    assert "[DONE]" not in events
    return events


# ---- heads that die


@pytest.mark.parametrize("stream", [True, False])
def test_a_head_lost_before_it_answered(stream: bool) -> None:
    with scripted(until_closed) as head, entering(head.url) as entry:
        answers: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda: answers.append(ask(entry, HELLO | {"stream": stream}))) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: entry.upstream.num_open == 3 and head.requests)
        start = time.monotonic()
        entry.lose("silent for 1.0 s")
        entry.lose("told twice")
        for thread in threads:
            thread.join(10)
        assert time.monotonic() - start < 1
        assert len(answers) == 3
        for answer in answers:
            lost_in(answer, "was lost before it answered (silent for 1.0 s)")
        lost_in(ask(entry, HELLO | {"stream": stream, "user": "later"}), "is gone; it is being planned anew")
        host, port = head.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as own:  # whatever came before it has been read when it is
            own.sendall(b"POST / HTTP/1.1\r\nContent-Length: 4\r\n\r\nlast")
            wait_for(lambda: head.requests[-1][1] == b"last")
        came = [body for _, body in head.requests[:-1]]
        assert 1 <= len(came) <= 3 and not any(b"later" in body for body in came)
        health = httpx.get(f"{entry.url}/health")
        assert (health.status_code, health.json()) == (503, {"status": "loading", "models": [], "loading": []})
        assert httpx.get(f"{entry.url}/v1/models/toy:1m").status_code == 200


@pytest.mark.parametrize("end", ["lost", "cut"])
def test_a_head_that_dies_in_mid_stream(held: Pair, end: str) -> None:
    body = {"model": "toy:1m", "messages": held.head.say("dies", "w1 " * 500), "stream": True}
    inbox = held.head.engine._inbox
    with httpx.stream("POST", f"{held.entry.url}{CHAT}", json=body, timeout=20) as answer:
        parts = answer.iter_text()
        text = next(parts)
        wait_for(lambda: held.head.engine.stats().running == 1)
        before, start = inbox.qsize(), time.monotonic()
        if end == "lost":
            held.entry.lose()
        else:
            held.peers.cut()
        text += "".join(parts)
        assert time.monotonic() - start < 1
    assert [one["choices"][0]["delta"] for one in broken_off(text)] == [{"role": "assistant", "content": ""}]
    wait_for(lambda: inbox.qsize() > before)  # the head, which lives on here, cancels the work
    held.head.go.set()
    held.head.wait_idle()
    assert held.head.engine.stats().decode_tokens <= 1


def test_the_openai_client_is_told_of_the_loss(held: Pair) -> None:
    messages: Any = held.head.say("told", "w1 " * 500)
    with openai.OpenAI(base_url=f"{held.entry.url}/v1", api_key="k", max_retries=0, timeout=20) as client:
        stream = client.chat.completions.create(model="toy:1m", messages=messages, stream=True)
        assert next(stream).choices[0].delta.role == "assistant"
        held.entry.lose()
        with pytest.raises(openai.APIError, match="n1 was lost"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="planned anew"):
            client.chat.completions.create(model="toy:1m", messages=messages)


@contextlib.contextmanager
def answering(say: Callable[[socket.socket], None]) -> Iterator[tuple[Entry, httpx.Response]]:
    """An entry, and the answer that it passes on from a head that says this."""
    with (
        scripted(say) as head,
        entering(head.url) as entry,
        httpx.stream("POST", f"{entry.url}{CHAT}", json=HELLO, timeout=10) as answer,
    ):
        yield entry, answer


@pytest.mark.parametrize("end", ["closed", "reset", "lost", "garbage"])
def test_half_an_event_is_dropped(end: str) -> None:
    ready, go = threading.Event(), threading.Event()

    def say(sock: socket.socket) -> None:
        sock.sendall(SSE + chunk(b'data: {"a":1}\n\ndata: {"b":2}\n') + chunk(b'\ndata: {"c":'))
        ready.set()
        assert go.wait(10)
        if end == "reset":
            reset(sock)
        elif end == "garbage":
            sock.sendall(b"no chunk\r\n")
        elif end == "lost":
            until_closed(sock)

    with answering(say) as (entry, answer):
        parts, text = answer.iter_text(), ""
        while '{"b":2}\n\n' not in text:
            text += next(parts)
        if end == "lost":
            entry.lose()
        go.set()
        text += "".join(parts)
    assert broken_off(text) == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize("end", ["closed", "lost"])
@pytest.mark.parametrize("counted", [True, False])
def test_a_document_cut_short_never_looks_whole(end: str, counted: bool) -> None:
    sent = threading.Event()
    document = b"[" + b"1," * 1000 + b"1]"
    typed = SSE.replace(b"text/event-stream", b"application/json")

    def say(sock: socket.socket) -> None:
        sock.sendall(plain(document)[:-3] if counted else typed + chunk(document))
        sent.set()
        if end == "lost":
            until_closed(sock)

    with answering(say) as (entry, answer):
        assert answer.status_code == 200
        assert sent.wait(10)
        if end == "lost":
            entry.lose()
        with pytest.raises(
            httpx.RemoteProtocolError, match="without sending complete" if counted else "incomplete chunked"
        ):
            answer.read()


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nContent-", b"\x16\x03\x01 not HTTP\r\n\r\n"])
def test_a_head_that_ends_without_an_answer(said: bytes) -> None:
    with scripted(lambda sock: sock.sendall(said)) as head, entering(head.url) as entry:
        lost_in(ask(entry), "was lost before it answered")
        assert not entry.upstream.is_lost  # only who watches the node can say so
    assert len(head.requests) == 1


def test_a_head_that_stops_while_it_is_sent_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stopped, entering(f"http://{address(stopped)}") as entry:
        answers: list[httpx.Response] = []
        body = HELLO | {"pad": "x" * (12 << 20)}
        thread = threading.Thread(target=lambda: answers.append(ask(entry, body)))
        thread.start()
        wait_for(lambda: entry.upstream._waits)
        start = time.monotonic()
        entry.lose("it does not move")
        thread.join(10)
        assert time.monotonic() - start < 1
        lost_in(answers[0], "(it does not move)")


def test_an_event_without_end_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def say(sock: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):
            sock.sendall(SSE + chunk(b"data: 1\n\n"))
            for _ in range(100):
                sock.sendall(chunk(b"data: " + b"x" * 65536))
            raise AssertionError("all of it was taken")

    monkeypatch.setattr(forward, "MAX_EVENT_BYTES", 1 << 18)
    with scripted(say) as head, entering(head.url) as entry:
        events = events_of(ask(entry).text)
    assert events[0] == 1
    assert "without an end" in events[1]["error"]["message"]


def test_a_head_that_does_not_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        url = f"http://{address(sock)}"
    with entering(url) as entry:
        lost_in(ask(entry))


def test_a_head_that_takes_no_connection_is_waited_for_two_seconds() -> None:
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # the queue is full after one or two
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        with entering(f"http://{address(full)}") as entry:
            start = time.monotonic()
            lost_in(ask(entry), "it does not answer")
            assert 1.5 < time.monotonic() - start < 4


# ---- the parts alone


def test_however_a_stream_is_cut_its_events_are_whole() -> None:
    data = b"data: 1\n\n: ping\n\ndata: 22\n\ndata: 3"
    whole = data[: data.rindex(b"\n\n") + 2]
    for size in range(1, len(data) + 1):
        events, out = Events(), b""
        for at in range(0, len(data), size):
            out += (more := events.push(data[at : at + size]))
            assert not more or more.endswith(b"\n\n")
        assert out == whole
        assert events.rest == b"data: 3"


def test_an_event_beyond_all_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "MAX_EVENT_BYTES", 10)
    events = Events()
    assert events.push(b"0123456789") == b""
    with pytest.raises(EngineError):
        events.push(b"0")


def test_deployments_of_both_kinds(served: Served) -> None:
    local = served.deployments.local()[0]
    upstream = Upstream(httpx.AsyncClient(), "http://n1", "n1")
    remote = RemoteDeployment("toy:1m", 1, CONTEXT, "n1", upstream, aliases=frozenset({"far/toy"}))
    deployments = Deployments([local])
    deployments.loading.add("toy:1m")
    deployments.add(remote)
    assert deployments.all() == [remote]
    assert deployments.local() == []
    assert not deployments.loading
    assert deployments.get("far/toy") is remote
    with pytest.raises(UnknownModelError):
        deployments.get("org/toy")
    remote.state = "draining"
    assert deployments.find("toy:1m") is remote
    assert not remote.is_ready
    with pytest.raises(LoadingError, match="'toy:1m' is draining on n1"):
        deployments.get("toy:1m")
    deployments.add(local)
    assert isinstance(deployments.get("org/toy"), Deployment)
    assert deployments.remove("toy:1m") is local


def test_a_lost_head_serves_nothing_whatever_its_state() -> None:
    async def run() -> None:
        async with httpx.AsyncClient() as client:
            upstream = Upstream(client, "http://n1", "n1")
            remote = RemoteDeployment("toy:1m", 1, CONTEXT, "n1", upstream)
            assert remote.is_ready
            remote.check_ready()
            upstream.lost("gone")
            assert not remote.is_ready
            with pytest.raises(LoadingError, match="planned anew"):
                remote.check_ready()

    asyncio.run(run())


def test_errors_of_open_connections_and_clients_that_cannot_be_written_to() -> None:
    """What TLS and some servers raise, which plain sockets under uvicorn never do."""

    class Broken(httpx.AsyncByteStream):
        def __init__(self, error: Exception | None) -> None:
            self.error = error

        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            if self.error is not None:
                raise self.error

    async def run(error: Exception | None, refuse_at: int) -> list[bytes]:
        typed = {"content-type": "text/event-stream"}
        transport = httpx.MockTransport(lambda _: httpx.Response(200, headers=typed, stream=Broken(error)))
        sent: list[bytes] = []

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if len(sent) == refuse_at:
                raise ConnectionResetError
            sent.append(message.get("body", b""))

        async with httpx.AsyncClient(transport=transport) as client:
            upstream = Upstream(client, "http://n1", "n1")
            scope = {"method": "POST", "raw_path": CHAT.encode(), "query_string": b"", "headers": []}
            await Forwarded(upstream, b"{}")(scope, receive, send)
            assert upstream.num_open == 0
        return sent

    *_, last = asyncio.run(run(ssl.SSLError("bad record"), 9))
    assert b"n1 was lost in the middle of its answer" in last
    for error in (None, ssl.SSLError("bad record")):
        for refuse_at in (0, 1, 2):
            assert len(asyncio.run(run(error, refuse_at))) == refuse_at
