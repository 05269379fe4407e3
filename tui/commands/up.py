"""Serve a model at one local OpenAI-compatible address: the named one, else the best installed one, else the default,
which is fetched. Runs until it gets SIGINT or SIGTERM, or `cluster down`."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer

from node.config import Settings, load
from node.instance import InstanceLock, prepare_home
from tui.options import (
    ApiHost,
    ApiPort,
    Backend,
    Context,
    Home,
    Interface,
    Memory,
    Mode,
    Model,
    Name,
    Origins,
    Peer,
    PeerPort,
    Threads,
    Token,
)
from tui.output import is_terminal


def command(
    model: Model = None,
    name: Name = None,
    api_host: ApiHost = None,
    api_port: ApiPort = None,
    origins: Origins = None,
    backend: Backend = None,
    threads: Threads = None,
    memory: Memory = None,
    context: Context = None,
    mode: Mode = None,
    headless: Annotated[bool, typer.Option("--headless", help="Print the ready line even on a terminal.")] = False,
    peer: Peer = None,
    interface: Interface = None,
    peer_port: PeerPort = None,
    token: Token = None,
    home: Home = None,
) -> None:
    flags = {field: value for field, value in locals().items() if field not in ("home", "headless")}
    settings, _ = load(flags | {"headless": headless or None}, home)
    prepare_home(settings.home)
    with InstanceLock(settings.home) as lock:
        if lock.acquire():
            serve(settings)
        else:
            from tui.running import greet

            greet(settings, lock)


def serve(settings: Settings) -> None:
    """Be the node of this home until told to stop."""
    from node.loading import Loaded, load_deployment
    from node.models.store import ModelStore
    from node.node import Node
    from tui.announce import log_to_stderr, ready_line, show_summary
    from tui.choose import chosen_model, fetched_model

    log_to_stderr()
    store = ModelStore(settings.home)
    on_terminal = is_terminal(sys.stdout) and not settings.headless

    def ready(loaded: Loaded) -> None:
        if on_terminal:
            show_summary(settings, loaded)
        else:
            print(ready_line(loaded.deployment.id, settings.api_url), flush=True)

    async def live() -> None:
        node = Node(settings, chosen_model(settings, store))
        await node.run(lambda: load_deployment(settings, fetched_model(settings, store), store), ready)

    asyncio.run(live())
