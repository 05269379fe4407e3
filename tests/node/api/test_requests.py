"""Every field is honoured, harmless or refused in words; nothing that a client sends makes the server fail."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.api.requests import ChatRequest, CompletionRequest
from node.engine.generation import Generation
from node.engine.sequence import Request
from tests.node.api.conftest import Served

MESSAGES = [{"role": "user", "content": "hi"}]


def post(http: httpx.Client, path: str = "chat/completions", **fields: Any) -> httpx.Response:
    base = {"messages": MESSAGES} if path == "chat/completions" else {"prompt": "hi"}
    return http.post(f"/v1/{path}", json={"model": "toy:1m", **base, **fields})


def refused(answer: httpx.Response, param: str | None, *words: str, status: int = 400) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    for word in words:
        assert word in error["message"], error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": "2"}, "n"),
        ({"seed": 1.5}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream_options": []}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*MESSAGES, {"role": "user", "content": 3}]}, "messages[1].content"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"model": None}, "model"),
        ({"model": 7}, "model"),
        # known, and not supported here
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"verbosity": "low"}, "verbosity"),
    ],
)
def test_refused_in_words(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    refused(post(http, **fields), param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["x", 3]}, "prompt[1]"),
        ({"prompt": [1, 999999]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
    ],
)
def test_completions_refused_in_words(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    refused(post(http, "completions", **fields), param)


def test_harmless_and_unknown_fields_change_nothing(served: Served, http: httpx.Client) -> None:
    messages = served.say("harmless", "w1 ")
    answer = post(
        http, messages=messages, tools=[], tool_choice="none", response_format={"type": "text"}, store=False,
        service_tier="auto", user="me", metadata={"a": "b"}, prompt_cache_key="k", parallel_tool_calls=True,
        modalities=["text"], verbosity="medium", functions=[], audio=None, brand_new_field={"x": [1]},
        stream_options=None, stop=None, logit_bias=None, seed=None, n=None, temperature=None, max_tokens=None,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "w1 "
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert post(http, messages=messages, tools=tools, tool_choice="none").status_code == 200


def test_sampling_fields_reach_the_engine() -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "presence_penalty": 1, "frequency_penalty": -1,
        "repetition_penalty": 1.1, "seed": 7, "logit_bias": {"3": -100, "1": 2},
    }  # fmt: skip
    sampling = ChatRequest(model="m", messages=[], **fields).sampling(5, vocab_size=10)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.05)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.1)
    assert (sampling.seed, sampling.logit_bias, sampling.logprobs) == (7, ((1, 2.0), (3, -100.0)), 5)
    plain = [CompletionRequest(model="m", prompt="x", top_k=-1).sampling(None, vocab_size=10) for _ in range(2)]
    assert plain[0].temperature == plain[0].top_p == 1
    assert plain[0].top_k == 0
    assert plain[0].seed != plain[1].seed


@pytest.mark.parametrize("seed", [7, -(2**70), None])
def test_every_choice_draws_for_itself(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, seed: int | None
) -> None:
    seeds: list[int] = []
    submit = served.engine.submit

    def noting(request: Request) -> Generation:
        seeds.append(request.sampling.seed)
        return submit(request)

    monkeypatch.setattr(served.engine, "submit", noting)
    for _ in range(2):
        assert post(http, n=3, seed=seed, max_tokens=1).status_code == 200
    assert len(set(seeds[:3])) == 3
    if seed is None:
        assert len(set(seeds)) == 6
    else:
        assert seeds[:3] == seeds[3:]
        assert seeds[0] == seed


def test_template_options_reach_the_template(served: Served, http: httpx.Client) -> None:
    messages = served.say("options", "w1 ")
    assert post(http, messages=messages, chat_template_kwargs={"a": 1}, reasoning_effort="low").status_code == 200
    assert served.template.options == {"a": 1, "reasoning_effort": "low"}


def test_bodies_that_are_not_requests(http: httpx.Client) -> None:
    json_header = {"content-type": "application/json"}
    url = "/v1/chat/completions"
    for body in (b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"model": NaN'):
        refused(http.post(url, content=body, headers=json_header), None, "not JSON")
    for body in (b"[]", b'"x"', b"3", b"null"):
        refused(http.post(url, content=body, headers=json_header), None, "JSON object")
    form = {"content-type": "application/x-www-form-urlencoded"}
    refused(http.post(url, content=b"{}", headers=form), None, "application/json", status=415)
    refused(http.get(url), None, "does not take GET", status=405)
    refused(http.get("/v2/models"), None, "nothing at /v2/models", status=404)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_values_never_break_the_server(http: httpx.Client, data: st.DataObject) -> None:
    path, kind = data.draw(st.sampled_from([("chat/completions", ChatRequest), ("completions", CompletionRequest)]))
    names = st.sampled_from([*kind.model_fields, "unknown"])
    fields = data.draw(st.dictionaries(names, VALUES, max_size=3))
    body = {"model": "toy:1m", "messages": MESSAGES, "prompt": "x", "max_tokens": 2, **fields}
    import json

    answer = http.post(f"/v1/{path}", content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
