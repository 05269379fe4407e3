"""The HTTP API as an ASGI application. Surfaces are thin: parse, ask the deployment's engine, write what it says."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from node.api import errors, openai
from node.api.forward import FORWARDED, Forwarded
from node.api.guard import Access, Guard, TooLarge
from node.api.requests import ChatRequest, CompletionRequest, parse
from node.deployment import Deployment, Deployments
from node.errors import LoadingError, RequestError, RoostError, UnknownModelError

log = logging.getLogger(__name__)

PING_S = 1.0


def create_app(
    deployments: Deployments, *, access: Access | None = None, ping_s: float = PING_S, internal: bool = False
) -> Starlette:
    """The API over `deployments`, which may change while it runs.

    `internal` is for other nodes, which reach it by addresses that only they know and have shown who they are: any
    host and no key unless `access` says otherwise, and what they passed on is not passed on again.
    """
    access = access or Access(any_host=internal)

    async def chat(request: Request, data: Any) -> ASGIApp:
        return await elsewhere(request, data) or await here(ChatRequest, openai.chat, data)

    async def completions(request: Request, data: Any) -> ASGIApp:
        return await elsewhere(request, data) or await here(CompletionRequest, openai.completions, data)

    async def here(
        kind: type[ChatRequest | CompletionRequest], answer: Callable[..., openai.Answer], data: Any
    ) -> ASGIApp:
        request = parse(kind, data)
        deployment = deployments.get(request.model)
        # a long prompt takes seconds to become tokens; streams go on meanwhile
        return await asyncio.to_thread(answer, deployment, request, ping_s=ping_s)

    async def elsewhere(request: Request, data: Any) -> Forwarded | None:
        """The answer of another node when that is the model's head. It checks what else is in the request."""
        name = data.get("model") if isinstance(data, dict) else None
        if not isinstance(name, str):
            return None
        is_forwarded = internal and FORWARDED in request.headers
        try:
            deployment = deployments.find(name)
        except LoadingError:
            return None
        except UnknownModelError as exc:
            if is_forwarded:
                raise _moved(name) from exc
            return None
        if isinstance(deployment, Deployment):
            return None
        if is_forwarded:
            raise _moved(name)
        deployment.check_ready()
        return Forwarded(deployment.upstream, await request.body())

    async def models(request: Request) -> Response:
        cards = [openai.model_card(one) for one in deployments.all()]
        return errors.json_response({"object": "list", "data": cards})

    async def model(request: Request) -> Response:
        return errors.json_response(openai.model_card(deployments.find(request.path_params["name"])))

    async def health(request: Request) -> Response:
        ready = [one.id for one in deployments.all() if one.is_ready]
        content = {"status": _status(deployments), "models": ready, "loading": sorted(deployments.loading)}
        return errors.json_response(content, 200 if ready else 503, {} if ready else {"Retry-After": "1"})

    async def root(request: Request) -> Response:
        return PlainTextResponse("Roost is running. The API is under /v1.\n")

    middleware = [Middleware(Guard, access)]
    if access.origins:
        cors = Middleware(CORSMiddleware, allow_origins=access.origins, allow_methods=["*"], allow_headers=["*"])
        middleware.insert(0, cors)
    app = Starlette(
        routes=[
            Route("/", root, methods=["GET", "HEAD"]),
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/chat/completions", Json(chat), methods=["POST"]),
            Route("/v1/completions", Json(completions), methods=["POST"]),
        ],
        middleware=middleware,
        exception_handlers={HTTPException: _http_error, RoostError: _roost_error, Exception: _internal_error},
    )
    app.router.redirect_slashes = False  # clients do not follow a redirected POST
    return app


class Json:
    """An endpoint that takes a JSON body and gives an ASGI response."""

    def __init__(self, handle: Callable[[Request, Any], Awaitable[ASGIApp]]) -> None:
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def noting(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            request = Request(scope, receive)
            response = await self._handle(request, await _json(request))
            await response(scope, receive, noting)
        except ClientDisconnect:
            log.debug("the client left before its request was read")
        except (HTTPException, TooLarge):
            raise  # others know what to say
        except RoostError as error:
            if started:
                raise
            await errors.response(error)(scope, receive, send)
        except Exception:
            if started:
                raise
            log.exception("%s %s failed", scope["method"], scope["path"])
            await errors.json_response(errors.internal(), 500)(scope, receive, send)


def _status(deployments: Deployments) -> str:
    """What /health calls it: "ok", or what is going on instead."""
    models = deployments.all()
    if any(one.is_ready for one in models):
        return "ok"
    # one whose head was lost a moment ago may still be called ready
    states = ["loading" if one.state == "ready" else one.state for one in models]
    return "loading" if deployments.loading else next(iter(states), "no_model")


def _moved(name: str) -> LoadingError:
    """Nodes disagree for a moment about who serves a model."""
    return LoadingError(f"The model '{name}' is being planned anew.", "Send the request again in a moment.")


async def _json(request: Request) -> Any:
    """Untyped bodies are taken from programs but not from web pages, which may send those anywhere without asking."""
    untyped = "" if "origin" in request.headers else "application/json"
    kind = request.headers.get("content-type", untyped).partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, f"The body is {kind or 'of no stated type'}. Send it as application/json.")
    try:
        return json.loads(await request.body(), parse_constant=_no_json)
    except (ValueError, RecursionError) as exc:
        raise RequestError(f"The body is not JSON: {exc}.", "Check its syntax.", code="invalid_json") from exc


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON value")


async def _http_error(request: Request, exc: Exception) -> Response:
    status = exc.status_code if isinstance(exc, HTTPException) else 500
    told = {
        404: f"There is nothing at {request.scope['path']}. The API is under /v1.",
        405: f"{request.scope['path']} does not take {request.method}.",
    }
    detail = exc.detail if isinstance(exc, HTTPException) else ""
    body = errors.body(told.get(status, detail), "invalid_request_error", code="not_found" if status == 404 else None)
    headers = dict(exc.headers or {}) if isinstance(exc, HTTPException) else {}
    return errors.json_response(body, status, headers)


async def _internal_error(request: Request, exc: Exception) -> Response:
    return errors.json_response(errors.internal(), 500)


async def _roost_error(request: Request, exc: Exception) -> Response:
    if not isinstance(exc, RoostError):
        raise exc
    return errors.response(exc)
