"""What clients send: what is taken, what is refused and by which name."""

from __future__ import annotations

from typing import Any

import pytest

from node.errors import RequestError
from node.models.messages import Capabilities, fit_messages, read_messages


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("x", "x"),
        (None, ""),
        ("", ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}, "c"], "a\nb\nc"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ('{"json": 1}', '{"json": 1}'),
    ],
)
def test_contents(content: Any, text: str) -> None:
    assert read_messages([{"role": "user", "content": content}]) == [{"role": "user", "content": text}]


def test_absent_content() -> None:
    assert read_messages([{"role": "assistant"}]) == [{"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([1], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x"}, {"role": "function", "content": "x"}], "messages[1].role"),
        ([{"role": "user", "content": 1}], "messages[0].content"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content"),
        ([{"role": "user", "content": [1]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
         "messages[0].content[1]"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "name": 3}], "messages[0].name"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function.name"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}],
         "messages[0].tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
def test_refusals_name_the_parameter(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_messages(messages)
    assert caught.value.param == param


def turn(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    return read_messages([{"role": "assistant", "tool_calls": [{"id": "i", "function": function}]}])


@pytest.mark.parametrize(
    ("sent", "as_text", "as_object"),
    [('{"a":  1}', '{"a":  1}', {"a": 1}), (None, "{}", {}), ("", "{}", {}), ({"a": 1}, '{"a": 1}', {"a": 1})],
)
def test_arguments_become_what_the_template_takes(sent: Any, as_text: str, as_object: dict[str, Any]) -> None:
    text, parsed = (
        fit_messages(turn(sent), Capabilities(tool_calls=True, object_arguments=needed))[0] for needed in (False, True)
    )
    assert text["tool_calls"][0]["function"]["arguments"] == as_text
    assert parsed["tool_calls"][0]["function"]["arguments"] == as_object


@pytest.mark.parametrize("sent", ["{", "[1]", '"x"', "[" * 100000])
def test_arguments_that_are_no_object_are_refused_where_one_is_needed(sent: str) -> None:
    with pytest.raises(RequestError) as caught:
        fit_messages(turn(sent), Capabilities(tool_calls=True, object_arguments=True))
    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"
    assert fit_messages(turn(sent), Capabilities(tool_calls=True))[0]["tool_calls"]


def test_calls_are_written_out_where_the_template_has_no_place_for_them() -> None:
    messages = read_messages(
        [
            {
                "role": "assistant",
                "content": "Let me see.",
                "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "i", "content": '{"a": 1}'},
        ]
    )
    assert fit_messages(messages, Capabilities()) == [
        {"role": "assistant", "content": 'Let me see.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'},
        {"role": "user", "content": '<tool_response>\n{"a": 1}\n</tool_response>'},
    ]


def test_only_system_text() -> None:
    messages = read_messages([{"role": "system", "content": "s"}])
    assert fit_messages(messages, Capabilities()) == [{"role": "system", "content": "s"}]
    no_system = Capabilities(system=False, late_system=False)
    assert fit_messages(messages, no_system) == [{"role": "user", "content": "s"}]
    empty = read_messages([{"role": "system", "content": ""}])
    assert fit_messages(empty, no_system) == [{"role": "user", "content": ""}]


def test_short_ids_are_stable_and_match() -> None:
    messages = [
        *turn("{}"),
        *read_messages([{"role": "tool", "tool_call_id": "i", "content": "r"}]),
    ]
    made, answered = fit_messages(messages, Capabilities(tool_calls=True, tool_results=True, short_call_ids=True))
    identity = made["tool_calls"][0]["id"]
    assert identity == answered["tool_call_id"]
    assert len(identity) == 9
    assert identity.isalnum()
