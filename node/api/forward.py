"""Requests for a model that another node is head of: sent there as they came, and the answer passed on as it comes.

The head reads and checks the request. Here nothing of it is known but the model's name. When the head dies, the client
is told so in the words that the head itself would have used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator

import httpx
from starlette.types import Message, Receive, Scope, Send

from node.api import errors
from node.errors import EngineError, LoadingError, RoostError

log = logging.getLogger(__name__)

FORWARDED = "x-roost-forwarded"
"""Marks a request that a node has passed on, so that it is not passed on again."""

CONNECT_S = 2.0
MAX_EVENT_BYTES = 16 << 20
"""Of a stream an unfinished event is kept in memory; no sound one comes near this."""

REQUEST_HEADERS = {b"content-type", b"accept", b"user-agent", b"x-request-id", b"x-client-request-id", b"x-title"}
REQUEST_PREFIX = b"x-stainless-"
"""What OpenAI's clients tell of themselves. Keys, cookies and the name we were called by are nobody else's business."""

RESPONSE_HEADERS = {b"content-type", b"content-length", b"cache-control", b"retry-after", b"x-accel-buffering"}


class Upstream:
    """The way to one head: `client` speaks to it, `base_url` is where its API begins, `node` is its name.

    `client` is made and closed by the caller, in the loop that serves; it should have no limit of connections, since
    each running answer holds one. An upstream that was lost stays so: a new head, or the same one back, is a new one.
    """

    def __init__(self, client: httpx.AsyncClient, base_url: str, node: str) -> None:
        self.node = node
        self.num_open = 0
        """Requests that are being answered now; a node that drains waits for them too."""
        self._client, self._base_url = client, httpx.URL(base_url)
        self._reason: str | None = None
        self._waits: set[asyncio.Timeout] = set()

    @property
    def is_lost(self) -> bool:
        return self._reason is not None

    def lost(self, reason: str) -> None:
        """The head is gone: what runs ends now with an error, what comes is refused. Called in the loop that serves."""
        if self._reason is not None:
            return
        self._reason = reason
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            wait.reschedule(now)

    def check(self) -> None:
        """Raises LoadingError when the head is gone."""
        if self._reason is not None:
            raise LoadingError(
                f"The node that served this model, {self.node}, is gone; it is being planned anew.",
                "Send the request again in a moment.",
            )

    async def send(self, method: str, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes) -> httpx.Response:
        """The head's answer, its body still to be read. Raises LoadingError when there is none."""
        url = self._base_url.copy_with(raw_path=self._base_url.raw_path.rstrip(b"/") + target)
        # a prompt may be read for minutes before the first byte; a dead head is told by `lost` and not by a clock
        timeout = httpx.Timeout(None, connect=CONNECT_S).as_dict()
        # not through build_request: it would add what the client learnt from other answers (cookies)
        request = httpx.Request(method, url, headers=headers, content=body, extensions={"timeout": timeout})
        async with self._waiting("before it answered"):
            return await self._client.send(request, stream=True, auth=None, follow_redirects=False)

    async def next_of(self, chunks: AsyncIterator[bytes]) -> bytes | None:
        """Bytes as they come, None at the proper end. Raises LoadingError when there will be no such end."""
        async with self._waiting("in the middle of its answer"):
            return await anext(chunks, None)

    @contextlib.asynccontextmanager
    async def _waiting(self, when: str) -> AsyncGenerator[None]:
        """Around anything that the head may never do. `lost` ends it."""
        if self._reason is not None:
            raise self._loss(when, self._reason)
        wait = asyncio.timeout(None)
        self._waits.add(wait)
        try:
            async with wait:
                yield
        except (httpx.HTTPError, OSError) as exc:  # TLS errors of an open connection are OSErrors
            silent = "it does not answer" if isinstance(exc, httpx.TimeoutException) else ""
            raise self._loss(when, self._reason or silent) from exc
        finally:
            self._waits.discard(wait)

    def _loss(self, when: str, reason: str) -> LoadingError:
        why = f" ({reason})" if reason else ""
        return LoadingError(f"The node {self.node} was lost {when}{why}.", "Send the request again in a moment.")


class Forwarded:
    """An ASGI response that is the head's. `body` is the request's, as it came."""

    def __init__(self, upstream: Upstream, body: bytes) -> None:
        self._upstream, self._body = upstream, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises LoadingError when the head is lost before it answered. A client that leaves ends it at once."""
        self._upstream.num_open += 1
        relay, leaving = asyncio.create_task(self._relay(scope, send)), asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({relay, leaving}, return_when=asyncio.FIRST_COMPLETED)
            with contextlib.suppress(OSError):  # how a server may say that the client has left
                relay.result() if relay.done() else leaving.result()
        finally:
            relay.cancel()
            leaving.cancel()
            await asyncio.gather(relay, leaving, return_exceptions=True)
            self._upstream.num_open -= 1

    async def _relay(self, scope: Scope, send: Send) -> None:
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        response = await self._upstream.send(scope["method"], target, request_headers(scope["headers"]), self._body)
        headers = [(name.lower(), value) for name, value in response.headers.raw if name.lower() in RESPONSE_HEADERS]
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        events, failure = Events() if is_stream else None, None
        try:
            await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
            async with contextlib.aclosing(response.aiter_raw()) as chunks:  # pyright: ignore[reportArgumentType]
                while (chunk := await self._upstream.next_of(chunks)) is not None:
                    whole = chunk if events is None else events.push(chunk)
                    if whole:
                        await send(_body(whole, more=True))
        except RoostError as error:
            failure = error
        finally:
            await response.aclose()
        if failure is None:
            await send(_body(bytes(events.rest) if events else b"", more=False))
            return
        log.warning("an answer was broken off: %s", failure)
        if is_stream:  # without a [DONE], as when an answer of our own fails
            await send(_body(errors.encoded(f"data: {errors.dumps(errors.described(failure)[1])}\n\n"), more=False))
        # else the server closes the connection, and the client sees that the body is not whole


class Events:
    """Cuts a stream after its last whole event."""

    def __init__(self) -> None:
        self.rest = bytearray()
        """The beginning of an event whose end has not come."""

    def push(self, data: bytes) -> bytes:
        """Whole events, none or several. Raises EngineError for one beyond all measure."""
        seen = max(0, len(self.rest) - 1)  # a blank line may come in two pieces
        self.rest += data
        end = self.rest.rfind(b"\n\n", seen) + 2
        if end < 2:
            if len(self.rest) > MAX_EVENT_BYTES:
                raise EngineError("The node that serves this model sent an event without an end.")
            return b""
        whole = bytes(self.rest[:end])
        del self.rest[:end]
        return whole


def request_headers(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Those that the head may see, and ours."""
    passed = [
        (name, value)
        for name, value in headers
        if (name in REQUEST_HEADERS or name.startswith(REQUEST_PREFIX)) and all(0x20 <= byte < 0x7F for byte in value)
    ]
    return [*passed, (b"accept-encoding", b"identity"), (FORWARDED.encode(), b"1")]


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
