"""The command line's side of the Unix socket that a running node listens on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from node.errors import NodeNotRunningError
from node.instance import InstanceLock, socket_path


class NodeClient:
    """Talks to the node of one home folder. Raises NodeNotRunningError when there is none, or it does not answer."""

    def __init__(self, home: Path, timeout_s: float = 5.0) -> None:
        self._home = home
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(socket_path(home))), base_url="http://node", timeout=timeout_s
        )

    def status(self) -> dict[str, Any]:
        """The document of `cluster status --json`."""
        return self._call("GET", "/status")

    def settings(self) -> dict[str, Any]:
        """The settings that the node was started with."""
        return self._call("GET", "/settings")

    def stop(self, *, now: bool = False) -> None:
        """Ask it to drain and leave, or to leave at once. Returns before it has left."""
        self._call("POST", "/stop", params={"now": str(now).lower()})

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> NodeClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _call(self, method: str, path: str, **kwargs: Any) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, **kwargs)
            response.raise_for_status()
            return response.json()
        except (httpx.HTTPError, ValueError) as exc:
            raise self._absent() from exc

    def _absent(self) -> NodeNotRunningError:
        pid = InstanceLock(self._home).holder()
        if pid is None:
            return NodeNotRunningError(f"No node runs with the home folder {self._home}.", "Start one: cluster up")
        return NodeNotRunningError(
            f"The node (pid {pid}) does not answer on {socket_path(self._home)}.",
            "It may be starting or stopping; try again in a moment, or end it: cluster down --now",
        )
