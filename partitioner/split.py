"""Where to cut the layers, exactly: the slowest stage as fast as memory lets it be.

Times are whole picoseconds of reading a stage's weights once (the head's too, for the last stage): integers, so that
sums and ties are what they look like.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from partitioner.context import whole_pages
from partitioner.model import ModelSpec, cumulative
from partitioner.profile import NodeProfile

PS_PER_BYTE_AT_1_GBPS = 1000


def rates(nodes: Sequence[NodeProfile]) -> list[float]:
    """Read speeds in GB/s. Nodes that nobody measured get the mean of the others; all 1.0 when none was measured."""
    known = [node.read_gbps for node in nodes if node.read_gbps is not None]
    mean = sum(known) / len(known) if known else 1.0
    return [mean if node.read_gbps is None else node.read_gbps for node in nodes]


def read_ps(num_bytes: int, gbps: float) -> int:
    """Picoseconds for `num_bytes` at `gbps` · 10^9 bytes a second."""
    return int(num_bytes * PS_PER_BYTE_AT_1_GBPS / gbps)


def stage_ps(spec: ModelSpec, sizes: Sequence[int], speeds: Sequence[float]) -> list[int]:
    """Time of each stage when they hold `sizes` layers in order and read at `speeds` GB/s, one step of one token."""
    found, start = [], 0
    for size, speed in zip(sizes, speeds, strict=True):
        stop = start + size
        head = spec.head_bytes if stop == spec.num_layers else 0
        found.append(read_ps(sum(spec.layer_bytes[start:stop]) + head, speed))
        start = stop
    return found


def split(spec: ModelSpec, nodes: Sequence[NodeProfile], kv_tokens: int) -> tuple[int, ...] | None:
    """Layers of each node in this order, at least one each; None when memory lets no split be.

    The slowest stage is as fast as can be, then the sum of all is as small as can be, then earlier stages hold more.
    Memory: weights and cache of `kv_tokens` tokens, working memory, load peak, embedding and head at the ends.
    Dynamic programming over (stage, first layer), once for the slowest stage and once for the sum within it.
    """
    cut = _Cut(spec, nodes, kv_tokens)
    if not cut.is_possible():
        return None
    slowest = max(stage_ps(spec, cut.solve(max, None), cut.speeds))
    return cut.solve(int.__add__, slowest)


class _Cut:
    def __init__(self, spec: ModelSpec, nodes: Sequence[NodeProfile], kv_tokens: int) -> None:
        tokens = whole_pages(kv_tokens)
        self.num_layers, self.num_stages = spec.num_layers, len(nodes)
        self.read = cumulative(spec.layer_bytes)
        self.held = cumulative(
            tuple(w + tokens * kv for w, kv in zip(spec.layer_bytes, spec.kv_bytes_per_token, strict=True))
        )
        self.speeds, self.head_bytes = rates(nodes), spec.head_bytes
        self.room = [node.budget_bytes - spec.scratch_bytes - spec.load_peak_bytes for node in nodes]
        self.room[0] -= spec.embed_bytes
        self.room[-1] -= spec.head_bytes
        if len(nodes) == 1:
            self.room[0] += spec.tied_bytes

    def stops(self, stage: int, start: int) -> range:
        """Where memory lets a stage stop that starts at layer `start`, with a layer for each stage after it."""
        after = self.num_stages - 1 - stage
        furthest = bisect_right(self.held, self.held[start] + self.room[stage]) - 1 if self.room[stage] >= 0 else start
        return range(start + 1 if after else self.num_layers, min(furthest, self.num_layers - after) + 1)

    def is_possible(self) -> bool:
        starts = {0}
        for stage in range(self.num_stages):
            starts = {stop for start in starts for stop in self.stops(stage, start)}
        return bool(starts)

    def solve(self, join: Callable[[int, int], int], limit: int | None) -> tuple[int, ...]:
        """The layers of each stage that make the least of `join` over the stages' times, none above `limit`. There must
        be such a split."""
        rest: dict[int, int] = {self.num_layers: 0}
        choices: list[dict[int, int]] = []
        for stage in reversed(range(self.num_stages)):
            row: dict[int, int] = {}
            choice: dict[int, int] = {}
            head = self.head_bytes if stage == self.num_stages - 1 else 0
            speed = self.speeds[stage]
            for start in range(stage, self.num_layers) if stage else (0,):
                best, before = None, self.read[start] - head
                for stop in self.stops(stage, start):
                    time = read_ps(self.read[stop] - before, speed)
                    bound = best if limit is None else limit
                    if bound is not None and time > bound:
                        break  # times only rise from here
                    if stop in rest and (best is None or join(time, rest[stop]) <= best):
                        best = row[start] = join(time, rest[stop])
                        choice[start] = stop
            rest = row
            choices.append(choice)
        sizes, start = [], 0
        for choice in reversed(choices):
            sizes.append(choice[start] - start)
            start = choice[start]
        return tuple(sizes)
