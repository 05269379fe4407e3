"""A model being served: the weights' description, its text side and the engine loop that runs it; or the way to the
node that has these.

The API room sees models only through this. `node/node.py` makes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from node.errors import LoadingError, UnknownModelError

if TYPE_CHECKING:
    from backends.arch import Architecture
    from node.api.forward import Upstream
    from node.engine.engine import Engine
    from node.models.chat import ChatTemplate
    from node.models.tokenizer import Tokenizer

State = Literal["loading", "ready", "failed", "draining"]


@dataclass(slots=True)
class Deployment:
    """One served model. `context` is what is served (prompt and answer together), not what was trained."""

    id: str
    created: int
    context: int
    arch: Architecture
    tokenizer: Tokenizer
    chat: ChatTemplate
    engine: Engine
    state: State = "ready"
    aliases: frozenset[str] = field(default_factory=frozenset)

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    def check_ready(self) -> None:
        """Raises LoadingError unless it takes requests."""
        if self.state != "ready":
            raise LoadingError(f"The model '{self.id}' is {self.state}.", "Try again in a moment.")


@dataclass(slots=True)
class RemoteDeployment:
    """A model whose head is another node, called `node` in words. Requests for it go there through `upstream`."""

    id: str
    created: int
    context: int
    node: str
    upstream: Upstream
    state: State = "ready"
    aliases: frozenset[str] = field(default_factory=frozenset)

    @property
    def is_ready(self) -> bool:
        return self.state == "ready" and not self.upstream.is_lost

    def check_ready(self) -> None:
        """Raises LoadingError unless its head takes requests, as far as we know."""
        self.upstream.check()
        if self.state != "ready":
            raise LoadingError(f"The model '{self.id}' is {self.state} on {self.node}.", "Try again in a moment.")


AnyDeployment = Deployment | RemoteDeployment


class Deployments:
    """The models that this node answers for, by name. Filled by the node, read by the API."""

    def __init__(self, deployments: Iterable[AnyDeployment] = ()) -> None:
        self._by_id = {deployment.id: deployment for deployment in deployments}
        self.loading: set[str] = set()

    def add(self, deployment: AnyDeployment) -> None:
        """Replaces one of the same id, of either kind."""
        self.loading.discard(deployment.id)
        self._by_id[deployment.id] = deployment

    def remove(self, model_id: str) -> AnyDeployment | None:
        return self._by_id.pop(model_id, None)

    def all(self) -> list[AnyDeployment]:
        return list(self._by_id.values())

    def local(self) -> list[Deployment]:
        """Those whose engine runs here."""
        return [one for one in self._by_id.values() if isinstance(one, Deployment)]

    def get(self, name: str) -> AnyDeployment:
        """One that takes requests. Raises LoadingError while it does not, UnknownModelError when nobody serves it."""
        deployment = self.find(name)
        deployment.check_ready()
        return deployment

    def find(self, name: str) -> AnyDeployment:
        """One in whatever state. Raises LoadingError before there is one, UnknownModelError when nobody serves it."""
        for deployment in self._by_id.values():
            if name == deployment.id or name in deployment.aliases:
                return deployment
        if self.loading and (not name or name in self.loading):
            raise LoadingError(f"The model '{name}' is being loaded.", "Try again in a moment.", retry_after_s=2)
        served = ", ".join(sorted(self._by_id)) or "none yet"
        raise UnknownModelError(f"The model '{name}' is not served here.", f"Served models: {served}.")
