"""What `cluster up` says when a node runs here already."""

from __future__ import annotations

import sys
import time
from typing import Any

from node.config import Settings, flag_of
from node.errors import NodeNotRunningError, UsageError
from node.instance import InstanceLock
from node.models.store import ModelStore
from tui.announce import ready_line
from tui.choose import reference
from tui.client import NodeClient
from tui.output import note

WAIT_S = 120.0
IGNORED = frozenset({"home", "headless", "model"})


def greet(wanted: Settings, lock: InstanceLock) -> None:
    """Say that it runs, once it can answer. Raises UsageError when it was started with other settings."""
    pid = lock.holder()
    with NodeClient(wanted.home) as client:
        running = first_answer(client, lock)
        if other := differences(wanted, running):
            raise UsageError(
                f"A node already runs here (pid {pid}) with other settings: {', '.join(other)}.",
                "Stop it first (cluster down), or give this one another --home and --api-port.",
            )
        model = served_model(client, lock)
    note(f"already running (pid {pid})")
    print(ready_line(model, wanted.api_url))
    sys.stdout.flush()


def differences(wanted: Settings, running: dict[str, Any]) -> list[str]:
    """What of `wanted` the running node does otherwise. No model named is any model."""
    theirs = running["settings"]
    found = [
        f"{flag_of(field)} {theirs[field]}"
        for field, value in wanted.model_dump(mode="json").items()
        if field not in IGNORED and theirs.get(field) != value
    ]
    if wanted.model is not None and reference(wanted.model, ModelStore(wanted.home)) != running["model"]:
        found.insert(0, f"model {running['model']}")
    return found


def first_answer(client: NodeClient, lock: InstanceLock) -> dict[str, Any]:
    """Its settings; a node that just started takes a moment to listen."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return client.settings()
        except NodeNotRunningError:
            if lock.holder() is None or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def served_model(client: NodeClient, lock: InstanceLock) -> str:
    deadline = time.monotonic() + WAIT_S
    while True:
        ready = [d["model"] for d in client.status()["deployments"] if d["state"] == "ready"]
        if ready:
            return ready[0]
        if time.monotonic() > deadline:
            raise NodeNotRunningError(
                f"The node here (pid {lock.holder()}) is still loading.", "cluster status shows when it is ready."
            )
        time.sleep(0.2)
