"""A running node, and the one place where its parts are put together.

The order matters to users: the port first, so that a taken one is told in a moment; then the API, which answers 503
while the model loads; then the model; then the word that it is ready.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from node import status
from node.api.app import create_app
from node.api.guard import Access
from node.api.server import Server
from node.config import Settings, is_loopback
from node.deployment import Deployments
from node.instance import socket_path
from node.loading import Loaded
from node.local import create_local_app
from node.memory import budget
from node.ports import listen, listen_unix

log = logging.getLogger("roost")

DRAIN_S = 30.0
"""How long running answers may take to finish after the first signal."""

POLL_S = 0.05


class Node:
    """Serves one model until it is told to stop. Made and run in one event loop, by the holder of the home's lock."""

    def __init__(self, settings: Settings, model: str) -> None:
        """`model` is the name that clients may already ask for while it loads."""
        self.settings = settings
        self._model = model
        self._id = secrets.token_hex(6)
        self._budget_bytes = budget(settings.memory).num_bytes
        self._deployments = Deployments()
        self._deployments.loading.add(model)
        self._loaded: Loaded | None = None
        self._stop, self._stop_now = asyncio.Event(), asyncio.Event()

    async def run(self, load: Callable[[], Loaded], on_ready: Callable[[Loaded], None]) -> None:
        """Listen, `load` in a thread, call `on_ready`, serve, drain. Returns when it was told to stop.

        Raises PortInUseError, UsageError and what `load` raises.
        """
        api_socket = listen(self.settings.api_host, self.settings.api_port)
        local_socket = listen_unix(socket_path(self.settings.home))
        app = create_app(self._deployments, access=access_of(self.settings))
        servers = (Server(app, api_socket), Server(create_local_app(self), local_socket))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: self.request_stop(now=self._stop.is_set()))
        serving = [asyncio.create_task(server.serve()) for server in servers]
        serve_model = asyncio.create_task(self._serve_model(load, on_ready))
        try:
            await asyncio.wait({serve_model, *serving}, return_when=asyncio.FIRST_COMPLETED)
            for task in (serve_model, *serving):
                if task.done():
                    task.result()
        finally:
            for server in servers:
                server.stop()
            if self._loaded is not None:
                await asyncio.to_thread(self._loaded.deployment.engine.close)
            await asyncio.gather(*serving, return_exceptions=True)
            socket_path(self.settings.home).unlink(missing_ok=True)

    def request_stop(self, *, now: bool) -> None:
        """Drain and leave; with `now`, leave. Called in the loop's thread."""
        self._stop.set()
        if now:
            self._stop_now.set()

    def status(self) -> dict[str, Any]:
        """The document of `cluster status --json`."""
        loaded = self._loaded
        memory = loaded.runner.memory() if loaded else None
        facts = status.Facts(
            node_id=self._id,
            state="draining" if self._stop.is_set() else "ready" if loaded else "starting",
            backend=loaded.backend if loaded else self.settings.backend,
            budget_bytes=self._budget_bytes,
            used_bytes=memory.weights_bytes + memory.kv_bytes + memory.scratch_bytes if memory else 0,
        )
        deployments = self._deployments.local()
        requests = {deployment.id: asdict(deployment.engine.stats()) for deployment in deployments}
        return status.document(self.settings, facts, deployments, sorted(self._deployments.loading), requests)

    def described_settings(self) -> dict[str, Any]:
        """What this node was started with, and the model that this came to."""
        return {"settings": self.settings.model_dump(mode="json"), "model": self._model}

    async def _serve_model(self, load: Callable[[], Loaded], on_ready: Callable[[Loaded], None]) -> None:
        loading = in_thread(load)
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            log.info("stopped before %s was loaded", self._model)
            return
        self._loaded = loading.result()
        self._deployments.loading.clear()
        self._deployments.add(self._loaded.deployment)
        on_ready(self._loaded)
        await stopping
        await self._drain(self._loaded)

    async def _drain(self, loaded: Loaded) -> None:
        """Refuse new requests and wait for the running ones, but not for ever."""
        loaded.deployment.state = "draining"
        loop = asyncio.get_running_loop()
        deadline = loop.time() + DRAIN_S
        told = False
        while not self._stop_now.is_set() and loop.time() < deadline:
            stats = loaded.deployment.engine.stats()
            if not (stats.running or stats.waiting):
                return
            if not told:
                log.info("finishing %d requests; a second signal ends them", stats.running + stats.waiting)
                told = True
            await asyncio.sleep(POLL_S)


def access_of(settings: Settings) -> Access:
    """On loopback no key and local Host headers only; beyond it a key, and whatever name the machine goes by there."""
    return Access(api_key=settings.api_key or "", any_host=not is_loopback(settings.api_host), origins=settings.origins)


def in_thread(work: Callable[[], Loaded]) -> asyncio.Future[Loaded]:
    """Run `work` in a daemon thread, so that a process told to stop need not wait for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Loaded] = loop.create_future()

    def settle(result: Loaded | None, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error else future.set_result(result)  # pyright: ignore[reportArgumentType]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as exc:
            error = exc
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return future
