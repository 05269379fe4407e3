"""What a plan is made of. Pure values: they know nothing of weights, sockets or threads."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from discovery.errors import RoostError


class PlanError(RoostError):
    """A plan that cannot be carried out as written."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Layers `start` to `stop` (exclusive) of a model that has `num_layers` of them, on one device."""

    start: int
    stop: int
    num_layers: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= self.num_layers:
            raise PlanError(
                f"A shard of layers {self.start} to {self.stop} does not exist in a model of {self.num_layers} layers.",
                "Give a range that is not empty and lies inside the model.",
            )

    @classmethod
    def whole(cls, num_layers: int) -> Shard:
        return cls(0, num_layers, num_layers)

    @property
    def is_first(self) -> bool:
        """It embeds tokens."""
        return self.start == 0

    @property
    def is_last(self) -> bool:
        """It has the output head and returns logits."""
        return self.stop == self.num_layers

    @property
    def size(self) -> int:
        return self.stop - self.start


def split_evenly(num_layers: int, num_stages: int) -> list[Shard]:
    """`num_stages` shards in order, none missing a layer, sizes differing by at most one."""
    if not 1 <= num_stages <= num_layers:
        raise PlanError(
            f"{num_layers} layers cannot be cut into {num_stages} stages.",
            f"Ask for 1 to {num_layers} stages.",
        )
    bounds = [num_layers * i // num_stages for i in range(num_stages + 1)]
    return [Shard(a, b, num_layers) for a, b in itertools.pairwise(bounds)]
