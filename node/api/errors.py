"""Errors as HTTP: the status, the body that OpenAI's clients understand, and when to come back."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

from node.errors import (
    BusyError,
    ChatTemplateError,
    QueueFullError,
    RequestError,
    RoostError,
    UnknownModelError,
)

dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def described(error: RoostError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers of an error."""
    if isinstance(error, RequestError):
        return 400, body(str(error), "invalid_request_error", param=error.param, code=error.code), {}
    if isinstance(error, ChatTemplateError):
        return 400, body(str(error), "invalid_request_error", param="messages", code="chat_template"), {}
    if isinstance(error, UnknownModelError):
        return 404, body(str(error), "invalid_request_error", param="model", code="model_not_found"), {}
    if isinstance(error, BusyError):
        headers = {"Retry-After": str(error.retry_after_s)}
        if isinstance(error, QueueFullError):
            return 429, body(str(error), "rate_limit_error", code="queue_full"), headers
        return 503, body(str(error), "service_unavailable", code="model_loading"), headers
    return 500, body(str(error), "server_error", code="engine_error"), {}


def response(error: RoostError) -> Response:
    status, content, headers = described(error)
    return json_response(content, status, headers)


def internal() -> dict[str, Any]:
    return body("Something went wrong in the server; its log has the details.", "server_error")


def encoded(text: str) -> bytes:
    """UTF-8. Lone surrogates, which reach us through JSON escapes, have none and become question marks."""
    return text.encode("utf-8", "replace")


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    data = encoded(dumps(content))
    return Response(data, status, headers, media_type="application/json")
