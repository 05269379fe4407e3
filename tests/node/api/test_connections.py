"""Clients that wait, leave, crowd, call from elsewhere or talk garbage, over real sockets."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from node.api.guard import Access, is_local
from node.deployment import Deployments
from tests.node.api.conftest import Served, serving


@pytest.fixture
def held() -> Iterator[Served]:
    """A server whose model waits until told to go."""
    with serving(max_waiting=2, max_running=2) as one:
        one.go.clear()
        yield one


def connect(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def head(length: int) -> bytes:
    lines = ("POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    return "\r\n".join((*lines, f"Content-Length: {length}", "", "")).encode()


def send(sock: socket.socket, messages: list[dict[str, str]], **fields: Any) -> None:
    body = json.dumps({"model": "toy:1m", "messages": messages, **fields}).encode()
    sock.sendall(head(len(body)) + body)


def read_until(sock: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        more = sock.recv(65536)
        if not more:
            raise AssertionError(f"closed after {data!r}")
        data += more
    return data


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def leave(held: Served, sock: socket.socket, num_generations: int) -> None:
    """Close a connection, and return when the server has noticed: the engine, held in a step, has its cancellations."""
    inbox = held.engine._inbox
    before = inbox.qsize()
    sock.close()
    wait_for(lambda: inbox.qsize() >= before + num_generations)


def test_silence_is_filled_with_comments(held: Served) -> None:
    messages = held.say("slow", "w1 w2 ")
    with connect(held) as sock:
        send(sock, messages, stream=True)
        early = read_until(sock, b": ping")
        assert b'"role":"assistant"' in early
        assert b'"w1' not in early
        read_until(sock, b": ping")
        held.go.set()
        rest = read_until(sock, b"[DONE]")
    events = [line for line in rest.split(b"\n") if line.startswith(b"data: {")]
    text = "".join(json.loads(event[6:])["choices"][0]["delta"].get("content", "") for event in events)
    assert text == "w1 w2 "


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_in_prefill_frees_everything(held: Served, stream: bool) -> None:
    sock = connect(held)
    send(sock, held.say("leaver", "w1 " * 500), stream=stream)
    wait_for(lambda: held.runner.batches)
    leave(held, sock, 1)
    steps = len(held.runner.batches)
    held.go.set()
    held.wait_idle()
    assert len(held.runner.batches) <= steps + 1  # the step that was running, and none for this request after it
    assert held.engine.stats().decode_tokens == 0


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_while_queued_frees_everything(held: Served, stream: bool) -> None:
    first = [connect(held) for _ in range(2)]
    for i, sock in enumerate(first):
        send(sock, held.say(f"runs {i}", "w1 "))
    wait_for(lambda: held.engine.stats().running == 2 or len(held.runner.batches) == 1)
    sock = connect(held)
    send(sock, held.say("queued", "w1 " * 500), stream=stream)
    wait_for(lambda: held.engine.stats().waiting + held.engine.stats().running == 3)
    leave(held, sock, 1)
    held.go.set()
    for one in first:
        read_until(one, b'"finish_reason":"stop"')
        one.close()
    held.wait_idle()
    assert held.engine.stats().decode_tokens <= 4


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_ends_every_choice(held: Served, stream: bool) -> None:
    sock = connect(held)
    send(sock, held.say("three choices", "w1 " * 500), n=3, stream=stream)
    wait_for(lambda: held.engine.stats().running + held.engine.stats().waiting == 3)
    wait_for(lambda: held.runner.batches)
    leave(held, sock, 3)
    held.go.set()
    held.wait_idle()
    assert held.engine.stats().finished == 3
    assert held.engine.stats().decode_tokens == 0


def test_leaving_a_stream_frees_everything(served: Served) -> None:
    sock = connect(served)
    before = served.engine.stats()
    send(sock, served.say("streaming leaver", "w1 " * 600), stream=True)
    read_until(sock, b"w1")
    sock.close()
    served.wait_idle()
    assert served.engine.stats().finished == before.finished + 1


def test_a_client_that_does_not_read_delays_nobody(served: Served) -> None:
    slow = connect(served)
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    send(slow, served.say("never reads", "w1 " * 600), stream=True)
    with httpx.Client(base_url=served.url, timeout=20) as http:
        for _ in range(3):
            body = {"model": "toy:1m", "messages": served.say("quick", "w2 ")}
            assert http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == "w2 "
    slow.close()
    served.wait_idle()


def test_a_full_queue_says_when_to_come_back(held: Served) -> None:
    socks = [connect(held) for _ in range(4)]
    for i, sock in enumerate(socks):
        send(sock, held.say(f"crowd {i}", "w1 "))
    wait_for(lambda: held.engine.stats().running + held.engine.stats().waiting == 4)
    for stream in (True, False):
        body = {"model": "toy:1m", "messages": held.say("late", "w1 "), "stream": stream}
        answer = httpx.post(f"{held.url}/v1/chat/completions", json=body, timeout=10)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "queue_full"
    # several choices are all taken or none
    held.go.set()
    for sock in socks:
        assert b"w1" in read_until(sock, b'"finish_reason":"stop"')
        sock.close()
    held.wait_idle()
    answer = httpx.post(
        f"{held.url}/v1/chat/completions", json={"model": "toy:1m", "messages": held.say("n", "w1 "), "n": 5}
    )
    assert answer.status_code == 429
    held.wait_idle()


def test_loading_is_503_with_a_time(served: Served) -> None:
    served.deployments.loading.add("coming:7b")
    body = {"model": "coming:7b", "messages": [{"role": "user", "content": "x"}]}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body)
    served.deployments.loading.clear()
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1


def test_the_card_of_a_model_that_loads_is_503(served: Served) -> None:
    served.deployments.loading.add("org/coming:7b")
    try:
        answer = httpx.get(f"{served.url}/v1/models/org/coming:7b")
    finally:
        served.deployments.loading.clear()
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "model_loading"
    assert httpx.get(f"{served.url}/v1/models/org/coming:7b").status_code == 404


@pytest.mark.parametrize("stream", [True, False])
def test_a_drain_that_begins_while_the_prompt_is_rendered(
    served: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    messages, real = served.say("late for the drain", "w1 "), served.template.render
    deployment = served.deployments.all()[0]

    def draining(*args: Any, **options: Any) -> list[int]:
        deployment.state = "draining"
        return real(*args, **options)

    monkeypatch.setattr(served.template, "render", draining)
    before = served.engine.stats()
    try:
        body = {"model": "toy:1m", "messages": messages, "stream": stream}
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=body)
    finally:
        deployment.state = "ready"
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert "draining" in answer.json()["error"]["message"]
    assert served.engine.stats().finished == before.finished


def test_a_draining_model_is_still_described_and_reads_no_prompt(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[Any] = []
    monkeypatch.setattr(served.template, "render", lambda messages, **_: rendered.append(messages) or [1])
    deployment = served.deployments.all()[0]
    deployment.state = "draining"
    try:
        card = httpx.get(f"{served.url}/v1/models/org/toy")
        body = {"model": "toy:1m", "messages": [{"role": "user", "content": "x"}]}
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=body)
    finally:
        deployment.state = "ready"
    assert card.json()["id"] == "toy:1m"
    assert answer.status_code == 503
    assert rendered == []


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_an_upgrade_is_declined_in_silence(served: Served, caplog: pytest.LogCaptureFixture, protocol: str) -> None:
    headers = {"connection": "Upgrade", "upgrade": protocol, "sec-websocket-version": "13", "sec-websocket-key": "eA=="}
    assert httpx.get(f"{served.url}/v1/models", headers=headers).status_code == 200
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_health_and_root(served: Served) -> None:
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok", "models": ["toy:1m"], "loading": []}
    assert httpx.head(served.url).status_code == 200
    assert "Roost" in httpx.get(served.url).text
    deployment = served.deployments.all()[0]
    deployment.state = "draining"
    try:
        answer = httpx.get(f"{served.url}/health")
    finally:
        deployment.state = "ready"
    assert answer.status_code == 503
    assert answer.json() == {"status": "draining", "models": [], "loading": []}


def test_unnamed_deployments_say_so() -> None:
    from starlette.testclient import TestClient

    from node.api.app import create_app

    deployments = Deployments()
    client = TestClient(create_app(deployments), base_url="http://localhost")
    assert client.get("/health").json()["status"] == "no_model"
    deployments.loading.add("toy:1m")
    assert client.get("/health").status_code == 503
    assert client.get("/health").json()["status"] == "loading"
    assert client.get("/v1/models").json()["data"] == []


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"A" * 100_000,
    ],
)
def test_garbage_does_no_harm(served: Served, garbage: bytes) -> None:
    with connect(served) as sock:
        try:
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            answer = sock.recv(65536)
        except ConnectionError:
            answer = b""
    assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200"))
    assert httpx.get(f"{served.url}/health").status_code == 200


def test_a_body_cut_short_does_no_harm(served: Served) -> None:
    with connect(served) as sock:
        sock.sendall(head(500) + b'{"model":')
    assert httpx.get(f"{served.url}/health").status_code == 200
    served.wait_idle()


def test_names_of_this_machine_only(served: Served) -> None:
    for host in ("evil.example", "localhost.evil.example", "evil.example:7117", "127.0.0.1.nip.io"):
        answer = httpx.get(f"{served.url}/v1/models", headers={"host": host})
        assert answer.status_code == 403, host
        assert host in answer.json()["error"]["message"]
    for host in (
        "localhost",
        "LOCALHOST:7117",
        "api.localhost",
        "127.0.0.1:80",
        "[::1]:7117",
        "[::1]",
        "192.168.1.5:7117",
    ):
        assert httpx.get(f"{served.url}/v1/models", headers={"host": host}).status_code == 200, host
    assert not is_local("")
    assert not is_local("::ffff.example")


def test_keys_origins_and_sizes() -> None:
    access = Access(api_key="secret", origins=("http://page.example",), any_host=True, max_body_bytes=2000)
    with serving(access=access) as served:
        url = f"{served.url}/v1/models"
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "secrets"}, {"x-api-key": ""}):
            assert httpx.get(url, headers=headers).status_code == 401, headers
        for headers in ({"authorization": "Bearer secret"}, {"x-api-key": "secret", "host": "any.example"}):
            assert httpx.get(url, headers=headers).status_code == 200
        key = {"x-api-key": "secret", "content-type": "application/json"}
        chat = f"{served.url}/v1/chat/completions"
        assert httpx.post(chat, content=b" " * 3000, headers=key).status_code == 413
        assert httpx.post(chat, content=iter([b" " * 1500] * 2), headers=key).status_code == 413
        answer = httpx.get(url, headers={**key, "origin": "http://page.example"})
        assert answer.headers["access-control-allow-origin"] == "http://page.example"
        assert (
            "access-control-allow-origin" not in httpx.get(url, headers={**key, "origin": "http://x.example"}).headers
        )


def test_no_cors_unless_asked(served: Served) -> None:
    answer = httpx.get(f"{served.url}/v1/models", headers={"origin": "http://page.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_many_at_once(served: Served) -> None:
    answers: list[str] = []

    def ask(i: int) -> None:
        body = {"model": "toy:1m", "messages": served.say(f"many {i}", f"w{i} " * (i + 1))}
        answers.append(
            httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=30).json()["choices"][0]["message"][
                "content"
            ]
        )

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(answers) == sorted(f"w{i} " * (i + 1) for i in range(30))
