"""What a chat template can render, found by rendering small conversations with it and looking for their words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from node.errors import ChatTemplateError
from node.models.messages import Capabilities

Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str]

USER = {"role": "user", "content": "uSeR1"}
REPLY = {"role": "assistant", "content": "rEpLy1"}
TOOL = {
    "type": "function",
    "function": {
        "name": "pRoBe",
        "description": "dEsC1",
        "parameters": {"type": "object", "properties": {"aRg1": {"type": "string", "description": "an argument"}}},
    },
}


def probe(render: Render, source: str) -> Capabilities:
    """`render(messages, tools)` raises ChatTemplateError where the template refuses."""
    typed = not _shows(_try(render, [USER]), "uSeR1") and _shows(_try(render, [_typed(USER)]), "uSeR1")

    def attempt(*messages: dict[str, Any], tools: list[dict[str, Any]] | None = None) -> str:
        return _try(render, [_typed(m) for m in messages] if typed else list(messages), tools)

    def says(role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": text}

    late = attempt(USER, REPLY, says("system", "sYs1"), says("user", "uSeR2"))
    early = attempt(says("system", "sYs1"), says("system", "sYs2"), USER)
    neighbours = attempt(USER, says("user", "uSeR2"), REPLY, says("assistant", "rEpLy2"), says("user", "uSeR3"))
    with_object = attempt(*_tool_turn({"aRg1": "vAl1"}, "call00001"))
    with_text = attempt(*_tool_turn('{"aRg1": "vAl1"}', "call00001"))
    text_ok = _shows(with_text, "pRoBe", '"aRg1"', "vAl1")
    object_ok = _shows(with_object, "pRoBe", "aRg1", "vAl1") and "{'aRg1'" not in with_object
    answered = with_text if text_ok else with_object
    long_id = attempt(*_tool_turn('{"aRg1": "vAl1"}' if text_ok else {"aRg1": "vAl1"}, "call_abcdefghijklmnop"))
    return Capabilities(
        system=_shows(attempt(says("system", "sYs1"), USER), "sYs1"),
        developer="developer" in source and _shows(attempt(says("developer", "dEv1"), USER), "dEv1"),
        late_system=_shows(early, "sYs1", "sYs2") and 0 <= late.find("rEpLy1") < late.find("sYs1") < late.find("uSeR2"),
        consecutive=_shows(neighbours, "uSeR1", "uSeR2", "rEpLy1", "rEpLy2", "uSeR3"),
        tools=_shows(attempt(USER, tools=[TOOL]), "pRoBe", "dEsC1"),
        tool_calls=text_ok or object_ok,
        tool_results=_shows(answered, "rEsUlT1") and (text_ok or object_ok),
        object_arguments=object_ok and not text_ok,
        typed_content=typed,
        short_call_ids=(text_ok or object_ok) and not _shows(long_id, "pRoBe", "vAl1"),
    )


def _tool_turn(arguments: Any, identity: str) -> list[dict[str, Any]]:
    call = {"id": identity, "type": "function", "function": {"name": "pRoBe", "arguments": arguments}}
    return [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": identity, "name": "pRoBe", "content": "rEsUlT1"},
        REPLY,
        {"role": "user", "content": "uSeR2"},
    ]


def _typed(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"content": [{"type": "text", "text": message["content"]}]}


def _shows(text: str, *words: str) -> bool:
    return all(word in text for word in words)


def _try(render: Render, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    """What comes out, nothing where the template refuses or fails."""
    try:
        return render(messages, tools)
    except ChatTemplateError:
        return ""
