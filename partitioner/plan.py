"""What a plan is made of. Pure values: they know nothing of weights, sockets or threads."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

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


Mode = Literal["solo", "replicas", "pipeline", "tensor", "split"]


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers `start` to `stop` on one node, of which it holds part `rank` of `ranks` (tensor parallel; 0 of 1: all)."""

    node: str
    start: int
    stop: int
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop or not 0 <= self.rank < self.ranks:
            raise PlanError(
                f"{self} does not exist.", "Give a range of layers that is not empty, and a rank below the ranks."
            )

    def to_json(self) -> dict[str, Any]:
        return {"node": self.node, "layers": [self.start, self.stop], "tensor": [self.rank, self.ranks]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Stage:
        """Raises PlanError for anything else than what `to_json` makes."""
        try:
            (start, stop), (rank, ranks) = data["layers"], data["tensor"]
            values = (start, stop, rank, ranks)
            if not isinstance(data["node"], str) or any(type(value) is not int for value in values):
                raise TypeError("a name and whole numbers are needed")
            return cls(data["node"], *values)
        except (KeyError, TypeError, ValueError) as exc:
            raise PlanError(f"A stage cannot be read: {exc}.", "Its sender may run another version.") from exc


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan promises for a prompt of `prompt` tokens within `context`. None: nobody has measured enough."""

    context: int
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    prompt: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms, "prompt": self.prompt, "context": self.context}


@dataclass(frozen=True, slots=True)
class Plan:
    """Who runs which part of one model, for decode and for prefill, and why."""

    mode: Mode
    num_layers: int
    decode: tuple[Stage, ...]
    prefill: tuple[Stage, ...]
    predicted: Prediction
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise PlanError(f"'{self.mode}' is not a mode.", f"Modes are {', '.join(get_args(Mode))}.")
        for stages in (self.decode, self.prefill):
            check_cover(stages, self.num_layers)

    @classmethod
    def solo(cls, node: str, num_layers: int, context: int, reason: str) -> Plan:
        """All layers on one node, which prefills and decodes."""
        stages = (Stage(node, 0, num_layers),)
        return cls("solo", num_layers, stages, stages, Prediction(context), (reason,))

    def to_json(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "decode": [stage.to_json() for stage in self.decode],
            "prefill": [stage.to_json() for stage in self.prefill],
            "predicted": self.predicted.to_json(),
            "reasons": list(self.reasons),
        }


def check_cover(stages: tuple[Stage, ...], num_layers: int) -> None:
    """Raises PlanError unless the stages hold every layer once, in order, and each tensor group is complete.

    The shards of a group stand side by side, ranks rising. Layers that fall between two stages are how others have lost
    part of a model in silence.
    """
    at, i = 0, 0
    while i < len(stages):
        group = stages[i : i + stages[i].ranks]
        expected = [(stages[i].start, stages[i].stop, rank, stages[i].ranks) for rank in range(stages[i].ranks)]
        if [(s.start, s.stop, s.rank, s.ranks) for s in group] != expected or stages[i].start != at:
            raise PlanError(f"The stages {list(stages)} do not hold {num_layers} layers in order.", "Plan again.")
        at, i = stages[i].stop, i + len(group)
    if at != num_layers:
        raise PlanError(f"The stages hold {at} of {num_layers} layers.", "Plan again.")
