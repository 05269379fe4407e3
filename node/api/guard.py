"""What stands before every request: who may call, from which page, and how much they may send."""

from __future__ import annotations

import ipaddress
import re
import secrets
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from node.api import errors

MAX_BODY_BYTES = 16 << 20
"""Text of millions of tokens. Parsed JSON takes up to thirty times its bytes."""

HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^\[\]:/@]+))(?::\d{1,5})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """`api_key`: required when set. `any_host`: take every Host header, for addresses that other machines use.

    Listening on loopback alone does not keep web pages out: one whose name is made to point to 127.0.0.1 (DNS
    rebinding) would be let in by the browser. Its requests carry that name as Host, and are refused.
    """

    api_key: str = ""
    any_host: bool = False
    origins: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES


class TooLarge(Exception):
    """The body grew beyond the limit while it was read."""


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(headers)
        if refusal is not None:
            status, message, code = refusal
            extra = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
            body = errors.body(message, "invalid_request_error", code=code)
            await errors.json_response(body, status, extra)(scope, receive, send)
            return
        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._access.max_body_bytes:
                raise TooLarge
            return message

        try:
            await self._app(scope, limited, send)
        except TooLarge:
            await self._too_large()(scope, receive, send)

    def _refusal(self, headers: Headers) -> tuple[int, str, str] | None:
        host = headers.get("host", "")
        if host and not self._access.any_host and not is_local(host):
            return 403, f"This server does not answer to the name '{host}'. Use 127.0.0.1 or localhost.", "host"
        if self._access.api_key and not self._has_key(headers):
            return 401, "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY'.", "invalid_api_key"
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length) > self._access.max_body_bytes:
            return 413, f"The body is larger than {self._access.max_body_bytes} bytes.", "body_too_large"
        return None

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = (token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
        key = self._access.api_key.encode()
        return any([secrets.compare_digest(one.encode("latin-1"), key) for one in given])

    def _too_large(self) -> ASGIApp:
        message = f"The body is larger than {self._access.max_body_bytes} bytes."
        return errors.json_response(errors.body(message, "invalid_request_error", code="body_too_large"), 413)


def is_local(host: str) -> bool:
    """Whether a Host header names an address, or this machine by a name that no other can claim."""
    match = HOST.fullmatch(host)
    if match is None:
        return False
    name = (match[1] or match[2]).lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
