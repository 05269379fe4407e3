"""Stop the running node: it finishes the answers it is giving, then leaves. With --now it leaves at once."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Annotated

import typer

from node.config import resolve_home
from node.errors import NodeNotRunningError
from node.instance import InstanceLock
from tui.client import NodeClient
from tui.options import Home
from tui.output import note

WAIT_S = 60.0


def command(
    home: Home = None,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for running answers.")] = False,
) -> None:
    folder = resolve_home(home)
    lock = InstanceLock(folder)
    pid = lock.holder()
    if pid is None:
        note("no node is running")
        return
    try:
        with NodeClient(folder) as client:
            client.stop(now=now)
    except NodeNotRunningError:
        # It holds the lock, so the pid is its own, but the socket is silent: it is starting, stopping or stuck.
        with contextlib.suppress(ProcessLookupError):
            for _ in range(2 if now else 1):
                os.kill(pid, signal.SIGTERM)
    if not lock.wait_released(WAIT_S):
        raise NodeNotRunningError(
            f"The node (pid {pid}) is still finishing its answers.", "Wait, or end them: cluster down --now"
        )
    note("stopped")
