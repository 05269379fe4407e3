"""What a stream promises byte for byte: order, identity, and how it ends when the answer does not."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import httpx
import openai
import pytest

from node.api import answers
from node.api.watch import Connection
from node.engine.sequence import TokenLogprob
from tests.node.api.conftest import Served, serving


def events_of(raw: str) -> list[Any]:
    """The data of each event, comments left out; fails on anything that is not an event."""
    assert raw.endswith("\n\n")
    events = []
    for block in raw.removesuffix("\n\n").split("\n\n"):
        if block == ": ping":
            continue
        assert block.startswith("data: "), block
        data = block.removeprefix("data: ")
        assert "\n" not in data
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


def stream(served: Served, path: str = "chat/completions", **body: Any) -> list[Any]:
    answer = httpx.post(f"{served.url}/v1/{path}", json={"model": "toy:1m", "stream": True, **body}, timeout=20)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer.content.decode())


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("include_usage", [True, False])
def test_the_order_of_a_chat_stream(served: Served, n: int, include_usage: bool) -> None:
    messages = served.say("order", "w1 w2 w3 ")
    *chunks, done = stream(served, messages=messages, n=n, stream_options={"include_usage": include_usage})
    assert done == "[DONE]"
    assert len({(one["id"], one["object"], one["created"], one["model"]) for one in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    for i in range(n):
        assert chunks[i]["choices"][0] == {
            "index": i, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None
        }  # fmt: skip
    if include_usage:
        usage = chunks.pop()
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 4 * n
        assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + 4 * n
        assert usage["timings"]["predicted_n"] == 4
        assert all(one["usage"] is None for one in chunks)
    else:
        assert not any("usage" in one for one in chunks)
    for i in range(n):
        mine = [one["choices"][0] for one in chunks if one["choices"][0]["index"] == i]
        assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert mine[-1]["delta"] == {}
        assert all(set(one["delta"]) == {"content"} for one in mine[1:-1])
        assert "".join(one["delta"]["content"] for one in mine[1:-1]) == "w1 w2 w3 "


@pytest.mark.parametrize("answer", ["w1 é w2 ", "🦜🦜", "w1 w2 w3 "])
def test_offsets_are_the_same_streamed_or_not(served: Served, answer: str) -> None:
    body = {"prompt": served.continue_with("offsets", answer), "logprobs": 1, "temperature": 0}
    whole = httpx.post(f"{served.url}/v1/completions", json={"model": "toy:1m", **body}).json()["choices"][0]
    chunks = [one["choices"][0] for one in stream(served, "completions", **body)[:-1]]
    told = [one["logprobs"] for one in chunks if one["logprobs"]]
    for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        assert [value for one in told for value in one[name]] == whole["logprobs"][name], name
    assert whole["text"] == "".join(one["text"] for one in chunks) == answer
    assert all(0 <= offset <= len(answer) for offset in whole["logprobs"]["text_offset"])


def test_legacy_alternatives_hold_the_chosen_token_and_the_likelier_of_two_names() -> None:
    class Texts:
        def token_text(self, token: int) -> str:
            return {1: "a", 2: "b"}.get(token, "\ufffd")

        def token_bytes(self, token: int) -> bytes:
            return b""

    rare = TokenLogprob(2, -9.0, ((1, -0.1), (7, -2.0), (8, -3.0)))
    part = TokenLogprob(8, -3.0, ((1, -0.1), (7, -2.0)))
    alone = TokenLogprob(1, -0.1)
    told = answers.completion_logprobs(Texts(), [rare, part, alone], [0, 1, 2])["top_logprobs"]
    assert told == [{"b": -9.0, "a": -0.1, "\ufffd": -2.0}, {"\ufffd": -3.0, "a": -0.1}, {"a": -0.1}]


def test_deltas_that_are_ready_together_are_written_together() -> None:
    """Fewer writes than chunks when the client's side is slower than the model, and not a byte different."""

    class Sink:
        def __init__(self) -> None:
            self.bodies: list[bytes] = []

        async def receive(self) -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        async def send(self, message: Any) -> None:
            if message["type"] == "http.response.body":
                self.bodies.append(message["body"])
                await asyncio.sleep(0.05)

    async def run(served: Served) -> Sink:
        from node.api import openai as surface
        from node.api.requests import ChatRequest, parse

        messages = served.say("burst", "w1 " * 200)
        request = parse(ChatRequest, {"model": "toy:1m", "messages": messages, "stream": True})
        sink = Sink()
        answer = surface.chat(served.deployments.get("toy:1m"), request, ping_s=5)
        await answer({"type": "http"}, sink.receive, sink.send)
        return sink

    with serving() as served:
        sink = asyncio.run(run(served))
    events = events_of(b"".join(sink.bodies).decode())
    texts = [one["choices"][0]["delta"].get("content", "") for one in events[:-1]]
    assert "".join(texts) == "w1 " * 200
    assert len(sink.bodies) < len(events) / 2


def test_a_stop_of_the_server_is_an_error_and_not_an_end() -> None:
    with serving() as served:
        messages = served.say("cut", "w1 " * 600)
        served.go.clear()
        stop = threading.Timer(0.3, lambda: (threading.Timer(0.1, served.go.set).start(), served.engine.close()))
        stop.start()
        events = stream(served, messages=messages)
        stop.join()
        assert "[DONE]" not in events
        assert events[-1]["error"]["type"] == "service_unavailable"
        assert not any(one["choices"][0]["finish_reason"] for one in events[:-1])


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_fault_of_ours_is_told_without_its_insides(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_stream: bool
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("a secret of the house")

    messages = served.say("fault", "w1 ")
    monkeypatch.setattr(answers.ChatChunks, "last", broken)
    monkeypatch.setattr(answers.Head, "whole", broken)
    body = {"model": "toy:1m", "messages": messages, "stream": is_stream}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body)
    assert "secret" not in answer.text
    assert "secret" in caplog.text
    if is_stream:
        events = events_of(answer.text)
        assert "[DONE]" not in events
        assert events[-1]["error"]["type"] == "server_error"
        with pytest.raises(openai.APIError), openai.OpenAI(base_url=f"{served.url}/v1", api_key="x") as client:
            list(client.chat.completions.create(model="toy:1m", messages=messages, stream=True))  # pyright: ignore
    else:
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
    monkeypatch.undo()
    served.wait_idle()


def test_a_fault_outside_of_answers_is_json_too(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.api.openai.model_card", lambda _: 1 / 0)
    answer = httpx.get(f"{served.url}/v1/models")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"


def test_pings_come_every_interval_and_never_after_the_end() -> None:
    sent: list[tuple[float, bytes]] = []
    end_blocks = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        if not message.get("more_body", True):
            await asyncio.wait_for(end_blocks.wait(), 5)  # a slow reader: the last write takes its time
        sent.append((time.monotonic(), message.get("body", b"")))

    async def run() -> None:
        async with Connection(receive, send, [], ping_s=0.05) as connection:
            await connection.start(200, ())
            connection.ping = b": ping\n\n"
            await asyncio.sleep(0.03)
            await connection.write(b"data: 1\n\n")
            await asyncio.sleep(0.5)
            asyncio.get_running_loop().call_later(0.2, end_blocks.set)
            await connection.write(b"data: 2\n\n", more=False)

    asyncio.run(run())
    bodies = [body for _, body in sent]
    assert bodies[:2] == [b"", b"data: 1\n\n"]
    assert bodies[-1] == b"data: 2\n\n"
    assert set(bodies[2:-1]) == {b": ping\n\n"}
    assert 2 <= len(bodies[2:-1]) <= 10
