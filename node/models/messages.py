"""OpenAI messages made into what a chat template takes.

Two steps. `read_messages` checks what a client sent and reduces it to plain values, the same for every model.
`fit_messages` then rewrites what this model's template cannot render, by its `Capabilities`. It goes through the
messages in order and never lets a later one change how an earlier one is written (apart from joining neighbours of one
role), so that the prefix of a conversation stays the prefix when it grows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from node.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Content parts that are text, and the field that holds it."""

EXTRA_FIELDS = ("name", "reasoning_content", "thinking", "tool_call_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a template renders faithfully; `probe.py` finds out."""

    system: bool = True
    developer: bool = False
    late_system: bool = True
    consecutive: bool = True
    tools: bool = False
    tool_calls: bool = False
    tool_results: bool = False
    object_arguments: bool = False
    typed_content: bool = False
    short_call_ids: bool = False


def read_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Raises RequestError that names the parameter."""
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("'messages' has to be a list with at least one message.", param="messages")
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _read_message(message: Any, param: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"'{param}' is not an object.", param=param)
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"'{param}.role' is {role!r}.", f"Roles are {', '.join(ROLES)}.", param=f"{param}.role")
    read: dict[str, Any] = {"role": role, "content": _read_content(message.get("content"), f"{param}.content")}
    for field in EXTRA_FIELDS:
        if message.get(field) is not None:
            if not isinstance(message[field], str):
                raise RequestError(f"'{param}.{field}' has to be text.", param=f"{param}.{field}")
            read[field] = message[field]
    calls = message.get("tool_calls")
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise RequestError(
                f"'{param}.tool_calls' has to be a list, in an assistant message.", param=f"{param}.tool_calls"
            )
        read["tool_calls"] = [_read_call(call, f"{param}.tool_calls[{j}]") for j, call in enumerate(calls)]
    return read


def _read_content(content: Any, param: str) -> str:
    """Text of a content field. The parts of a list are joined by line breaks. Nothing is parsed, JSON or not."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"'{param}' has to be text or a list of parts.", param=param)
    return "\n".join(_read_part(part, f"{param}[{j}]") for j, part in enumerate(content))


def _read_part(part: Any, param: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise RequestError(
            f"'{param}' is of the type {kind!r}; this model reads text only.",
            "Leave it out, or use a model that takes it.",
            param=param,
        )
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError(f"'{param}.{TEXT_PARTS[kind]}' has to be text.", param=f"{param}.{TEXT_PARTS[kind]}")
    return text


def _read_call(call: Any, param: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"'{param}.function.name' is missing.", param=f"{param}.function.name")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = "{}"
    if not isinstance(arguments, str | dict):
        raise RequestError(f"'{param}.function.arguments' has to be JSON text.", param=f"{param}.function.arguments")
    identity = call.get("id")
    return {
        "id": identity if isinstance(identity, str) else "",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def fit_messages(messages: list[dict[str, Any]], can: Capabilities) -> list[dict[str, Any]]:
    """`messages` as `read_messages` returns them. Raises RequestError for arguments that a template needs parsed and
    that are not a JSON object."""
    fitted = [_fit_tools(message, can, f"messages[{i}]") for i, message in enumerate(messages)]
    fitted = _fit_system(fitted, can)
    if not can.consecutive:
        fitted = _merge_neighbours(fitted)
    if can.typed_content:
        fitted = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in fitted]
    return fitted


def _fit_tools(message: dict[str, Any], can: Capabilities, param: str) -> dict[str, Any]:
    if message["role"] == "tool":
        if can.tool_results:
            return message | _short_id(message, "tool_call_id", can)
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if "tool_calls" not in message:
        return message
    calls = message["tool_calls"]
    if not can.tool_calls:
        written = [f"<tool_call>\n{json.dumps(_plain_call(call), ensure_ascii=False)}\n</tool_call>" for call in calls]
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        return rest | {"content": "\n".join(filter(None, [message["content"], *written]))}
    fitted = []
    for j, call in enumerate(calls):
        arguments = call["function"]["arguments"]
        if can.object_arguments:
            arguments = _as_object(arguments, f"{param}.tool_calls[{j}].function.arguments")
        elif isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = call["function"] | {"arguments": arguments}
        fitted.append(call | {"function": function} | _short_id(call, "id", can))
    return message | {"tool_calls": fitted}


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        parsed = arguments
    return {"name": call["function"]["name"], "arguments": parsed}


def _as_object(arguments: str | dict[str, Any], param: str) -> dict[str, Any]:
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as exc:
        raise RequestError(f"'{param}' is not JSON: {exc}.", param=param) from exc
    if not isinstance(parsed, dict):
        raise RequestError(f"'{param}' is not a JSON object.", param=param)
    return parsed


def _short_id(holder: dict[str, Any], field: str, can: Capabilities) -> dict[str, str]:
    """Mistral's templates take call ids of nine letters and digits only."""
    identity = holder.get(field, "")
    if not can.short_call_ids or (len(identity) == 9 and identity.isalnum()):
        return {}
    return {field: hashlib.sha256(identity.encode()).hexdigest()[:9]}


def _fit_system(messages: list[dict[str, Any]], can: Capabilities) -> list[dict[str, Any]]:
    """System text where the template takes it. What may not stand late, or not at all, becomes part of a user turn at
    its own place, marked as what it is; several leading ones become one."""
    messages = [m | {"role": "system"} if m["role"] == "developer" and not can.developer else m for m in messages]
    if can.late_system:
        return messages
    num_leading = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages))
    leading, rest = messages[:num_leading], messages[num_leading:]
    text = "\n\n".join(m["content"] for m in leading if m["content"])
    rest = [
        {"role": "user", "content": f"System: {m['content']}"} if m["role"] in ("system", "developer") else m
        for m in rest
    ]
    if not text:
        return rest or [{"role": "user", "content": ""}]
    if can.system:
        return [leading[0] | {"content": text}, *rest]
    if rest and rest[0]["role"] == "user":
        return [rest[0] | {"content": f"{text}\n\n{rest[0]['content']}"}, *rest[1:]]
    return [{"role": "user", "content": text}, *rest]


def _merge_neighbours(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    merged: list[dict[str, Any]] = []
    for message in messages:
        last = merged[-1] if merged else None
        plain = message["role"] in ("user", "assistant") and "tool_calls" not in message
        if last is not None and plain and last["role"] == message["role"] and "tool_calls" not in last:
            merged[-1] = last | {"content": "\n\n".join(filter(None, [last["content"], message["content"]]))}
        else:
            merged.append(message)
    return merged
