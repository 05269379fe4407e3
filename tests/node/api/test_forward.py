"""Requests that enter at a node which is not the model's head, over real sockets."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from node.api.guard import Access
from tests.node.api.conftest import CONTEXT, serving
from tests.node.api.forwarding import (
    CHAT,
    HELLO,
    SSE,
    Pair,
    ask,
    chunk,
    entering,
    pairing,
    plain,
    same,
    scripted,
    until_closed,
)
from tests.node.api.test_connections import connect, read_until, send, wait_for


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pairing(tmp_path_factory.mktemp("pair")) as one:
        yield one


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Pair]:
    """The head's model waits until told to go."""
    with pairing(tmp_path, max_running=4) as one:
        one.head.go.clear()
        yield one


# ---- what the head says arrives


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_chat_is_what_the_head_says(pair: Pair, stream: bool, n: int) -> None:
    messages = pair.head.say(f"equal {stream} {n}", "w1 wörld 🦜 " + "w2 " * 40)
    body = {"model": "org/toy", "messages": messages, "stream": stream, "n": n, "logprobs": True, "temperature": 0}
    own = [httpx.post(f"{pair.head.url}{CHAT}", json=body, timeout=20) for _ in range(2)][1]  # its prefix is kept now
    answer = ask(pair.entry, body)
    assert answer.status_code == own.status_code == 200
    if n == 1:
        assert same(answer.content) == same(own.content)
    else:
        # choices run side by side: whose event comes first is chance
        assert sorted(same(answer.content).split(b"\n\n")) == sorted(same(own.content).split(b"\n\n"))
    for name in ("content-type", "cache-control", "x-accel-buffering"):
        assert answer.headers.get(name) == own.headers.get(name)
    assert ("content-length" in answer.headers) is not stream


@pytest.mark.parametrize("stream", [True, False])
def test_completions_are_what_the_head_says(pair: Pair, stream: bool) -> None:
    prompt = pair.head.continue_with("once upon", " a time é")
    body = {"model": "toy:1m", "prompt": prompt, "stream": stream, "echo": True, "max_tokens": 20}
    own = [httpx.post(f"{pair.head.url}/v1/completions", json=body, timeout=20) for _ in range(2)][1]
    answer = httpx.post(f"{pair.entry.url}/v1/completions", json=body, timeout=20)
    assert answer.status_code == 200
    assert same(answer.content) == same(own.content)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "warm"},
        {"messages": "none"},
        {"messages": [{"role": "user", "content": "y" * (CONTEXT + 1)}]},
        {"n": 1000, "stream": True},
        {"guided_regex": "a+"},
    ],
)
def test_refusals_of_the_head_arrive_unchanged(pair: Pair, fields: dict[str, Any]) -> None:
    own = httpx.post(f"{pair.head.url}{CHAT}", json=HELLO | fields)
    answer = ask(pair.entry, HELLO | fields)
    assert answer.status_code == own.status_code == 400
    assert answer.content == own.content


def test_what_the_entry_refuses_by_itself(pair: Pair) -> None:
    assert ask(pair.entry, HELLO | {"model": "other:1m"}).status_code == 404
    assert ask(pair.entry, HELLO | {"model": 7}).status_code == 400
    assert ask(pair.entry, {"messages": []}).json()["error"]["code"] == "missing_required_parameter"
    assert ask(pair.entry, ["toy:1m"]).status_code == 400
    url = f"{pair.entry.url}{CHAT}"
    for content in (b'{"model": "toy:1m"', b"\xff\xfe", b"[" * 100_000, b""):
        assert httpx.post(url, content=content).json()["error"]["code"] == "invalid_json"
    assert httpx.post(url, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    assert httpx.get(url).status_code == 405


def test_the_openai_client_notices_nothing(pair: Pair) -> None:
    messages: Any = pair.head.say("client", "Grüße w1 w2 ")
    with openai.OpenAI(base_url=f"{pair.entry.url}/v1", api_key="k", max_retries=0, timeout=20) as client:
        whole = client.chat.completions.create(model="toy:1m", messages=messages)
        assert whole.choices[0].message.content == "Grüße w1 w2 "
        chunks = list(client.chat.completions.create(model="toy:1m", messages=messages, stream=True))
        assert "".join(one.choices[0].delta.content or "" for one in chunks) == "Grüße w1 w2 "
        assert [one.id for one in client.models.list()] == ["toy:1m"]
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="toy:1m", messages=messages, temperature=99)
        assert refused.value.param == "temperature"
    assert pair.entry.upstream.num_open == 0


def test_remote_models_are_described_like_others(pair: Pair) -> None:
    for path in ("/v1/models", "/v1/models/toy:1m", "/v1/models/org/toy", "/health"):
        own, answer = httpx.get(pair.head.url + path), httpx.get(pair.entry.url + path)
        assert answer.status_code == own.status_code == 200
        assert answer.content == own.content


def test_many_at_once(pair: Pair) -> None:
    answers: dict[int, str] = {}

    def one(i: int) -> None:
        body = {"model": "toy:1m", "messages": pair.head.say(f"many {i}", f"w{i} " * (i + 1))}
        answers[i] = ask(pair.entry, body).json()["choices"][0]["message"]["content"]

    threads = [threading.Thread(target=one, args=(i,)) for i in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == {i: f"w{i} " * (i + 1) for i in range(30)}


def test_events_arrive_one_by_one() -> None:
    seen = threading.Event()

    def say(sock: socket.socket) -> None:
        sock.sendall(SSE + chunk(b"data: 1\n\ndata: "))
        assert seen.wait(10)
        sock.sendall(chunk(b"2\n") + chunk(b"\ndata: 3") + b"0\r\n\r\n")

    with (
        scripted(say) as head,
        entering(head.url) as entry,
        httpx.stream("POST", f"{entry.url}{CHAT}", json=HELLO, timeout=10) as answer,
    ):
        parts = answer.iter_raw()
        assert next(parts) == b"data: 1\n\n"
        seen.set()
        rest = b"".join(parts)
    assert rest == b"data: 2\n\ndata: 3"  # at its proper end a stream is passed on to the last byte


def test_large_bodies_both_ways() -> None:
    large = json.dumps(HELLO | {"pad": "é" * (3 << 20)}, ensure_ascii=False).encode()

    def say(sock: socket.socket) -> None:
        sock.sendall(plain(b"[" + b"1," * (4 << 20) + b"1]"))

    with scripted(say) as head, entering(head.url) as entry:
        answer = httpx.post(f"{entry.url}{CHAT}", content=large, headers={"content-type": "application/json"})
        assert answer.content == b"[" + b"1," * (4 << 20) + b"1]"
        assert httpx.post(f"{entry.url}{CHAT}", content=b" " * (17 << 20)).status_code == 413
    assert [body for _, body in head.requests] == [large]


# ---- what is passed on, and what is not


def test_secrets_stay_here_and_the_rest_is_as_it_came() -> None:
    def say(sock: socket.socket) -> None:
        sock.sendall(plain(b"{}", "429 Too Many", "Retry-After: 7", "Set-Cookie: a=b", "Server: s", "X-Inside: 1"))

    body = b'{ "messages" :[], "model":"nobody", "model": "toy:1m" }'
    headers = {
        "authorization": "Bearer k-secret",
        "x-api-key": "k-secret",
        "cookie": "c-secret",
        "origin": "http://o-secret.example",
        "x-forwarded-for": "f-secret",
        "x-roost-forwarded": "h-secret",
        "content-type": "application/json; charset=utf-8",
        "accept": "text/event-stream",
        "user-agent": "agent/1",
        "x-stainless-lang": "python",
        "x-stainless-odd": "tab\tinside",
    }
    access = Access(api_key="k-secret")
    with scripted(say) as head, entering(f"{head.url}/peer/", access=access) as entry:
        for _ in range(2):
            answer = httpx.post(f"{entry.url}{CHAT}?a=%0d%0aB:%20c&d=/../%2e", content=body, headers=headers)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
            assert not {"set-cookie", "server", "x-inside"} & set(answer.headers)
        assert ask(entry).status_code == 401
    assert len(head.requests) == 2
    for top, came in head.requests:
        assert came == body
        first, *lines = top.decode().split("\r\n")
        assert first == "POST /peer/v1/chat/completions?a=%0d%0aB:%20c&d=/../%2e HTTP/1.1"
        assert "secret" not in top.decode()
        passed = dict(line.lower().split(": ", 1) for line in lines)
        assert passed.pop("host") == head.url.removeprefix("http://")
        assert passed == {
            "content-type": "application/json; charset=utf-8",
            "accept": "text/event-stream",
            "user-agent": "agent/1",
            "x-stainless-lang": "python",
            "accept-encoding": "identity",
            "x-roost-forwarded": "1",
            "content-length": str(len(body)),
        }


def test_two_nodes_that_take_each_other_for_the_head(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    with (
        entering("http://a.peer", uds=a, listen=b, internal=True) as second,
        entering("http://b.peer", uds=b, listen=a, internal=True) as first,
        entering("http://b.peer", uds=b) as entry,
    ):
        for model in ("toy:1m", "org/toy"):
            answer = ask(entry, HELLO | {"model": model})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "is being planned anew" in answer.json()["error"]["message"]
        second.deployments.remove("toy:1m")
        answer = ask(entry)
        assert answer.status_code == 503
        assert "is being planned anew" in answer.json()["error"]["message"]
        second.deployments.loading.add("toy:1m")
        assert "is being loaded" in ask(entry).json()["error"]["message"]
        assert first.upstream.num_open == second.upstream.num_open == 0


def test_the_mark_means_nothing_to_the_public(pair: Pair) -> None:
    marked = {"x-roost-forwarded": "1"}
    assert ask(pair.entry, headers=marked).status_code == 200
    assert ask(pair.entry, HELLO | {"model": "other"}, headers=marked).status_code == 404


def test_peers_need_no_key_and_call_by_any_name(tmp_path: Path) -> None:
    with (
        serving(access=Access(api_key="k")) as head,
        entering("http://x", listen=tmp_path / "s", internal=True, deployments=head.deployments),
        httpx.Client(transport=httpx.HTTPTransport(uds=str(tmp_path / "s"))) as peer,
    ):
        assert peer.post(f"http://any.example{CHAT}", json=HELLO, headers={"x-roost-forwarded": "1"}).is_success
        assert peer.get("http://any.example/v1/models").is_success
        assert httpx.get(f"{head.url}/v1/models").status_code == 401


# ---- clients that leave or do not read


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_ends_the_work_at_the_head(held: Pair, stream: bool) -> None:
    sock = connect(held.entry)  # pyright: ignore[reportArgumentType]
    send(sock, held.head.say("leaver", "w1 " * 500), stream=stream, n=2)
    wait_for(lambda: held.head.runner.batches and held.head.engine.stats().running == 2)
    inbox = held.head.engine._inbox
    before = inbox.qsize()
    sock.close()
    wait_for(lambda: inbox.qsize() >= before + 2)
    held.head.go.set()
    held.head.wait_idle()
    assert held.head.engine.stats().finished == 2
    assert held.head.engine.stats().decode_tokens <= 2


def test_leaving_a_stream_ends_the_work_at_the_head(pair: Pair) -> None:
    before = pair.head.engine.stats()
    sock = connect(pair.entry)  # pyright: ignore[reportArgumentType]
    send(sock, pair.head.say("streaming leaver", "w1 " * 600), stream=True)
    read_until(sock, b"w1")
    sock.close()
    pair.head.wait_idle()
    assert pair.head.engine.stats().finished == before.finished + 1


def test_a_client_that_does_not_read_stops_the_head_and_nobody_else() -> None:
    sent: list[int] = []
    stuck = threading.Event()

    def say(sock: socket.socket) -> None:
        sock.settimeout(1)
        sock.sendall(SSE)
        with pytest.raises(TimeoutError):
            for _ in range(1000):
                sock.sendall(chunk(b"data: %s\n\n" % (b"x" * 65536)))
                sent.append(65536)
        stuck.set()
        sock.settimeout(20)
        until_closed(sock)

    with scripted(say) as head, entering(head.url) as entry:
        slow = connect(entry)  # pyright: ignore[reportArgumentType]
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        send(slow, HELLO["messages"], stream=True)  # pyright: ignore[reportArgumentType]
        wait_for(lambda: sent)
        assert httpx.get(f"{entry.url}/health").status_code == 200
        assert stuck.wait(20)
        assert entry.upstream.num_open == 1
        slow.close()
        wait_for(lambda: entry.upstream.num_open == 0)
    assert 0 < sum(sent) < 32 << 20
