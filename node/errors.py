"""Every error a user can meet, in one tree. Each says what happened, to what, and what to do.

RoostError                          discovery/errors.py
├── UsageError                      a flag, variable or configuration value that makes no sense    exit 2
├── PortInUseError                  something else listens there                                   exit 1
├── NodeNotRunningError             a command that needs a running node found none                 exit 1
├── MemoryShortageError             weights, cache and scratch do not fit                          exit 1
├── ModelError                      backends/errors.py
│   ├── ModelFileError              missing, truncated, malformed or hostile file                  exit 1
│   ├── UnsupportedModelError       no backend here runs it                                        exit 1
│   ├── UnknownModelError           no such name in the catalog or on disk                         404
│   ├── DownloadError               the model could not be fetched                                 exit 1
│   └── ChatTemplateError           the template is broken, or refuses these messages              400
├── RequestError                    a request that can never succeed as sent                       400
│   └── ContextLengthError          prompt and answer do not fit the context                       400
├── BusyError                       it would succeed later                                         Retry-After
│   ├── QueueFullError              too many requests wait already                                 429
│   └── LoadingError                the model is being loaded or re-planned                        503
├── KVRoomError                     backends/errors.py
├── BatchError                      backends/errors.py
├── PlanError                       partitioner/plan.py
│   └── NoPlanError                 partitioner/explain.py: no way to run it on these nodes        exit 1
├── TokenError                      discovery/token.py: no secret that Roost made                  exit 2
├── IdentityError                   discovery/identity.py: a key or certificate cannot be used     exit 1
└── EngineError                     a stage failed in the middle of a request                      500
"""

from __future__ import annotations

from backends.errors import BatchError, KVRoomError, ModelError, ModelFileError, UnsupportedModelError
from discovery.errors import RoostError
from partitioner.plan import PlanError

__all__ = [
    "BatchError",
    "BusyError",
    "ChatTemplateError",
    "ContextLengthError",
    "DownloadError",
    "EngineError",
    "KVRoomError",
    "LoadingError",
    "MemoryShortageError",
    "ModelError",
    "ModelFileError",
    "NodeNotRunningError",
    "PlanError",
    "PortInUseError",
    "QueueFullError",
    "RequestError",
    "RoostError",
    "UnknownModelError",
    "UnsupportedModelError",
    "UsageError",
]


class UsageError(RoostError):
    """A flag, environment variable or configuration value that makes no sense."""


class PortInUseError(RoostError):
    """Another program listens on the address that was asked for."""


class NodeNotRunningError(RoostError):
    """A command that talks to a running node found none."""


class MemoryShortageError(RoostError):
    """Weights, cache and scratch would not fit the memory budget."""


class UnknownModelError(ModelError):
    """No such model in the catalog, in the store or on disk."""


class DownloadError(ModelError):
    """A model could not be fetched, or what came was not what was promised."""


class ChatTemplateError(ModelError):
    """A chat template that does not compile, or that refuses the messages."""


class RequestError(RoostError):
    """A request that can never succeed as sent. `param` names the offending field, `code` the machine-readable kind."""

    def __init__(self, message: str, cure: str = "", *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, cure)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """The prompt does not fit the context that is served."""

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
            f"{num_tokens} tokens.",
            "Please reduce the length of the messages.",
            param="messages",
            code="context_length_exceeded",
        )
        self.num_tokens = num_tokens
        self.limit = limit


class BusyError(RoostError):
    """It would succeed later: `retry_after_s` seconds from now is a sensible guess."""

    def __init__(self, message: str, cure: str = "", *, retry_after_s: int = 1) -> None:
        super().__init__(message, cure)
        self.retry_after_s = retry_after_s


class QueueFullError(BusyError):
    """Too many requests wait already."""


class LoadingError(BusyError):
    """The model is being loaded or re-planned."""


class EngineError(RoostError):
    """A stage failed while it worked on a request."""
