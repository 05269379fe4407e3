"""What a running node answers on its Unix socket, to the command line of the same machine and user only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


class Controlled(Protocol):
    """The side of a node that the command line may touch."""

    def status(self) -> dict[str, Any]: ...

    def described_settings(self) -> dict[str, Any]: ...

    def request_stop(self, *, now: bool) -> None: ...


def create_local_app(node: Controlled) -> Starlette:
    def answer(make: Callable[[], dict[str, Any]]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> JSONResponse:
            return JSONResponse(make())

        return endpoint

    async def stop(request: Request) -> JSONResponse:
        node.request_stop(now=request.query_params.get("now") == "true")
        return JSONResponse({"stopping": True}, status_code=202)

    return Starlette(
        routes=[
            Route("/status", answer(node.status)),
            Route("/settings", answer(node.described_settings)),
            Route("/stop", stop, methods=["POST"]),
        ]
    )
