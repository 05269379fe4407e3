"""The contract between the engine loop and whatever computes: one `Backend` per device kind, one `Runner` per shard.

A step is one forward pass over a ragged `Batch`. Sequences are named by small integers that mean the same in every
stage of a pipeline; blocks and pages never leave a backend.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from partitioner.context import PAGE_TOKENS

if TYPE_CHECKING:
    from backends.arch import Architecture
    from backends.kv import KVTile
    from backends.weights.source import WeightSource
    from partitioner.plan import Shard

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Fork:
    """Sequence `dst` (which must not exist) starts with the first `num_tokens` tokens of `src`."""

    src: int
    dst: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Truncate:
    """Forget all but the first `num_tokens` tokens of `seq`."""

    seq: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget `seq` altogether. Dropping a sequence that does not exist is allowed: losses make that happen."""

    seq: int


Command = Fork | Truncate | Drop


@dataclass(frozen=True, slots=True)
class Span:
    """`count` tokens of `seq` at positions `start`… A sequence exists from its first span at position 0 (or a `Fork`)
    to its `Drop`; `start` must be its present length. The last `num_logits` rows of the span are returned as logits.
    """

    seq: int
    start: int
    count: int
    num_logits: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Spans of one step, each sequence at most once. `commands` are applied in order before the step.

    tokens: int32 `[T]`, T the sum of all counts; only the first stage reads them.
    """

    spans: tuple[Span, ...]
    tokens: Array
    commands: tuple[Command, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(span.count for span in self.spans)

    @property
    def num_logits(self) -> int:
        return sum(span.num_logits for span in self.spans)


@dataclass(frozen=True, slots=True)
class KVRoom:
    """How much a runner's cache has to hold: `num_pages` pages of `PAGE_TOKENS` tokens, over all sequences."""

    num_pages: int

    @classmethod
    def for_tokens(cls, num_tokens: int) -> KVRoom:
        return cls(-(-num_tokens // PAGE_TOKENS))


@dataclass(frozen=True, slots=True)
class Support:
    """Whether a backend can run an architecture; if not, `reason` says why and what to do instead."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes a runner holds: packed weights, KV pages, scratch."""

    weights_bytes: int = 0
    kv_bytes: int = 0
    scratch_bytes: int = 0
    details: dict[str, int] = field(default_factory=dict)


class Runner(Protocol):
    """One loaded shard. Callers are single-threaded."""

    def step(self, batch: Batch, x: Array | None) -> Array:
        """Run one step.

        x: None at the first stage, else float32 hidden `[T, d_model]` from the stage before.
        Returns float32 logits `[batch.num_logits, vocab]` at the last stage, hidden `[T, d_model]` at the others. The
        array belongs to the caller.
        Raises KVRoomError (nothing was changed beyond the commands) or BatchError.
        """
        ...

    def read_kv(self, seq: int, layer: int, start: int, stop: int) -> KVTile:
        """Keys and values of one layer (global index) for tokens `start` to `stop` of `seq`."""
        ...

    def write_kv(self, seq: int, tile: KVTile) -> None:
        """Store a tile. `seq` grows to `tile.stop` if it was shorter; every layer must be given before it is used."""
        ...

    def memory(self) -> MemoryUse: ...

    def close(self) -> None: ...


class Backend(Protocol):
    name: str

    def supports(self, arch: Architecture) -> Support: ...

    def load(self, shard: Shard, source: WeightSource, room: KVRoom) -> Runner:
        """Load one shard. Raises UnsupportedModelError, ModelFileError or MemoryError; never half-runs."""
        ...
