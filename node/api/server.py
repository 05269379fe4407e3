"""uvicorn inside somebody else's event loop, on a socket that already listens."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

GRACE_S = 5
"""Seconds for open connections when the server stops; the engine has ended its generations by then."""


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals belong to the node


class Server:
    """Serves `app` on `sock` from `serve()` until `stop()`."""

    def __init__(self, app: ASGIApp, sock: socket.socket) -> None:
        self._socket = sock
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            ws="none",
            log_level="error",  # its warnings are about what strangers send, with advice that helps nobody here
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=GRACE_S,
        )
        self._server = _Uvicorn(config)

    async def serve(self) -> None:
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        self._server.should_exit = True
