"""Bodies and headers that were made to hurt: a clear refusal of bounded size, and the next request is served."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from node.api.guard import Access, is_local
from node.api.requests import EXTENSIONS, MAX_STOP_CHARS, ChatRequest, CompletionRequest
from tests.node.api.conftest import Served, serving

BASE = {"model": "toy:1m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
JSON = {"content-type": "application/json"}


def post(http: httpx.Client, path: str, body: bytes | dict[str, Any]) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body)
    return http.post(f"/v1/{path}", content=content, headers=JSON)


def refused(answer: httpx.Response, param: str | None) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text[:500]
    assert len(answer.content) < 1000
    error = json.loads(answer.content.decode("utf-8"))["error"]
    assert error["param"] == param, error
    assert len(error["message"]) < 250, error
    return error


@pytest.mark.parametrize(
    ("known", "kind"),
    [
        (chat_create_params.CompletionCreateParamsStreaming, ChatRequest),
        (completion_create_params.CompletionCreateParamsStreaming, CompletionRequest),
    ],
)
def test_every_parameter_of_the_official_client_is_decided(known: Any, kind: type[ChatRequest]) -> None:
    assert set(typing.get_type_hints(known)) <= set(kind.model_fields)
    assert not EXTENSIONS.keys() & kind.model_fields.keys()


@pytest.mark.parametrize("name", sorted(EXTENSIONS))
def test_extensions_of_other_servers_are_refused_unless_they_ask_for_nothing(http: httpx.Client, name: str) -> None:
    assert refused(post(http, "chat/completions", {**BASE, name: ["x"]}), name)["code"] == "unsupported_parameter"
    for harmless in (None, *EXTENSIONS[name]):
        assert post(http, "chat/completions", {**BASE, name: harmless}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": "x" * 1_000_000}, "store"),
        ({"audio": [[["x" * 1000] * 100] * 10] * 10}, "audio"),
        ({"audio": [["x" * 1000] * 10] * 10}, "audio"),
        ({"store": 0}, "store"),
        ({"logit_bias": {"x" * 1_000_000: 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x" * 1_000_000}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"stop": "x" * (MAX_STOP_CHARS + 1)}, "stop"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"messages": [{"role": "user", "content": [{"type": []}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": {}, "content": "x"}]}, "messages[0].role"),
    ],
)
def test_refusals_are_short(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    refused(post(http, "chat/completions", {**BASE, **fields}), param)


@pytest.mark.parametrize("fields", [{"tools": [{"type": "function"}]}, {"tool_choice": "required"}])
def test_tools_are_refused_in_a_way_that_programs_understand(http: httpx.Client, fields: dict[str, Any]) -> None:
    error = refused(post(http, "chat/completions", {**BASE, **fields}), next(iter(fields)))
    assert error["code"] == "unsupported_parameter"


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_what_python_takes_and_json_does_not(http: httpx.Client, constant: str) -> None:
    body = json.dumps(BASE)[:-1] + f', "metadata": {{"a": {constant}}}}}'
    error = refused(post(http, "chat/completions", body.encode()), None)
    assert error["code"] == "invalid_json"
    assert constant in error["message"]


def test_values_nested_as_deep_as_the_parser_goes(http: httpx.Client) -> None:
    for field in ("store", "tools", "stop", "logit_bias", "messages", "stream_options", "metadata", "unknown"):
        body = json.dumps({key: value for key, value in BASE.items() if key != field})[:-1]
        deep = f'{body}, "{field}": {"[" * 900}{"]" * 900}}}'
        answer = post(http, "chat/completions", deep.encode())
        assert answer.status_code in (200, 400), (field, answer.text[:200])
        assert len(answer.content) < 1500


@pytest.mark.parametrize("stream", [True, False])
def test_lone_surrogates_never_make_broken_utf8(http: httpx.Client, stream: bool) -> None:
    flag = json.dumps(stream)
    answer = post(http, "completions", f'{{"model":"\\ud800","prompt":"x","stream":{flag}}}'.encode())
    assert answer.status_code == 404
    assert "'?'" in json.loads(answer.content.decode("utf-8"))["error"]["message"]


def test_echo_of_a_lone_surrogate(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    real = served.tokenizer.encode_prompt
    monkeypatch.setattr(served.tokenizer, "encode_prompt", lambda text: real(text.encode("utf-8", "replace").decode()))
    for stream in (True, False):
        body = f'{{"model":"toy:1m","prompt":"a\\ud800","echo":true,"stream":{json.dumps(stream)}}}'
        answer = httpx.post(f"{served.url}/v1/completions", content=body, headers=JSON)
        assert answer.status_code == 200
        assert '"text":"a?' in answer.content.decode("utf-8")


def test_a_crowd_of_prompts_is_refused_before_any_is_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = served.tokenizer.encode_prompt
    monkeypatch.setattr(served.tokenizer, "encode_prompt", lambda text: read.append(text) or real(text))
    with httpx.Client(base_url=served.url) as http:
        for prompt, n in ((["x"] * 100_000, 1), (["x"] * 33, 2), (["x"] * 5, 13)):
            refused(post(http, "completions", {"model": "toy:1m", "prompt": prompt, "n": n}), "prompt")
        assert read == []
        answer = post(http, "completions", {"model": "toy:1m", "prompt": ["x"] * 32, "n": 2, "max_tokens": 1})
    assert len(answer.json()["choices"]) == 64


def test_the_overflow_names_the_field_that_overflows(http: httpx.Client) -> None:
    assert refused(post(http, "completions", {"model": "toy:1m", "prompt": "x" * 900}), "prompt")
    assert refused(post(http, "completions", {"model": "toy:1m", "prompt": [5] * 900, "stream": True}), "prompt")


def test_a_long_prompt_does_not_hold_the_others(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    entered, leave = threading.Event(), threading.Event()
    real = served.template.render

    def slow(messages: list[dict[str, Any]], **options: Any) -> list[int]:
        if messages[0]["content"] == "slow":
            entered.set()
            assert leave.wait(10)
        return real(messages, **options)

    slow_messages, quick = served.say("slow", "w1 "), served.say("quick one", "w2 ")
    monkeypatch.setattr(served.template, "render", slow)
    answers: list[int] = []

    def ask() -> None:
        body = {"model": "toy:1m", "messages": slow_messages}
        answers.append(httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=20).status_code)

    thread = threading.Thread(target=ask)
    thread.start()
    assert entered.wait(10)
    answer = httpx.post(f"{served.url}/v1/chat/completions", json={"model": "toy:1m", "messages": quick}, timeout=10)
    assert answer.json()["choices"][0]["message"]["content"] == "w2 "
    leave.set()
    thread.join(10)
    assert answers == [200]


def test_untyped_bodies_from_web_pages(served: Served) -> None:
    url, body = f"{served.url}/v1/chat/completions", json.dumps(BASE).encode()
    assert httpx.post(url, content=body).status_code == 200
    for headers in ({"origin": "http://page.example"}, {"origin": "null", "content-type": "text/plain"}):
        answer = httpx.post(url, content=body, headers=headers)
        assert answer.status_code == 415
        assert "application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "host", ["[[127.0.0.1", "127.0.0.1]", "[127.0.0.1", "a@127.0.0.1", "127.0.0.1/x", "1:2:3", ":80", "[]"]
)
def test_malformed_hosts_are_nobody(served: Served, host: str) -> None:
    assert not is_local(host)
    assert httpx.get(f"{served.url}/nope", headers={"host": host}).status_code in (400, 403)


@pytest.fixture(scope="module")
def open_to_all() -> Iterator[Served]:
    with serving(access=Access(api_key="schlüssel", any_host=True)) as one:
        yield one


def test_malformed_hosts_where_every_name_is_taken(open_to_all: Served) -> None:
    headers = {"host": "[[127.0.0.1", "x-api-key": "schlüssel".encode()}
    for path, status in (("/nope", 404), ("/v1/models/", 404), ("/v1/chat/completions/", 404)):
        answer = httpx.get(open_to_all.url + path, headers=headers)  # pyright: ignore[reportArgumentType]
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
    assert httpx.get(f"{open_to_all.url}/v1/chat/completions", headers=headers).status_code == 405  # pyright: ignore


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "bearer schlüssel".encode()}, 200),
        ({"authorization": b"Basic x", "x-api-key": "schlüssel".encode()}, 200),
        ({"authorization": "schlüssel".encode()}, 401),
        ({"authorization": "Basic schlüssel".encode()}, 401),
        ({"authorization": b"Bearer"}, 401),
    ],
)
def test_keys(open_to_all: Served, headers: dict[str, bytes], status: int) -> None:
    assert httpx.get(f"{open_to_all.url}/v1/models", headers=headers).status_code == status  # pyright: ignore


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
CONTENT_PARTS = st.fixed_dictionaries(
    {}, optional={"type": st.sampled_from(["text", "image_url", "refusal"]) | VALUES, "text": VALUES, "refusal": VALUES}
)
CALLS = st.fixed_dictionaries(
    {},
    optional={
        "id": VALUES,
        "type": VALUES,
        "function": st.fixed_dictionaries({}, optional={"name": VALUES, "arguments": VALUES}) | VALUES,
    },
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]) | VALUES},
    optional={
        "content": VALUES | st.lists(CONTENT_PARTS | VALUES, max_size=3),
        "tool_calls": VALUES | st.lists(CALLS | VALUES, max_size=2),
        "name": VALUES,
        "tool_call_id": VALUES,
    },
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(MESSAGES | VALUES, max_size=3))
def test_random_messages_never_break_the_server(http: httpx.Client, messages: list[Any]) -> None:
    answer = post(http, "chat/completions", {**BASE, "messages": messages})
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["param"].startswith("messages")
