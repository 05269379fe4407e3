"""What a plan has to know of a model: bytes, from metadata alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from partitioner.context import PAGE_TOKENS, whole_pages
from partitioner.plan import PlanError, Shard

MAX_LAYERS = 1024
MAX_COUNT = 1 << 60
MAX_TEXT = 512


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Bytes of a model's parts as a node holds them, and the shape of what travels. Raises PlanError for nonsense.

    layer_bytes, kv_bytes_per_token: one number a layer: packed weights; keys and values of a token
    embed_bytes:                     the first stage holds them
    head_bytes:                      the last stage holds them: norm and head, or norm and a copy of a tied embedding
    tied_bytes:                      of these, what a shard that is first and last holds once (0: nothing is tied)
    scratch_bytes, load_peak_bytes:  any shard: while it runs; while it loads, then given back
    context_length:                  tokens the model was trained for
    """

    model: str
    model_hash: str
    num_layers: int
    layer_bytes: tuple[int, ...]
    embed_bytes: int
    head_bytes: int
    tied_bytes: int
    kv_bytes_per_token: tuple[int, ...]
    scratch_bytes: int
    load_peak_bytes: int
    context_length: int
    d_model: int
    vocab_size: int

    def __post_init__(self) -> None:
        for name in ("model", "model_hash"):
            check_text(name, getattr(self, name))
        check_count("num_layers", self.num_layers, 1, MAX_LAYERS)
        for name in ("layer_bytes", "kv_bytes_per_token"):
            values = getattr(self, name)
            if not isinstance(values, tuple) or len(values) != self.num_layers:
                raise PlanError(f"{name} is not {self.num_layers} numbers, one a layer.", CURE)
            for value in values:
                check_count(name, value)
        for name in ("embed_bytes", "head_bytes", "tied_bytes", "scratch_bytes", "load_peak_bytes"):
            check_count(name, getattr(self, name))
        for name in ("context_length", "d_model", "vocab_size"):
            check_count(name, getattr(self, name), 1)
        if self.tied_bytes > min(self.embed_bytes, self.head_bytes):
            raise PlanError(f"tied_bytes is {self.tied_bytes}, more than the embedding or the head.", CURE)

    def weights_bytes(self, shard: Shard) -> int:
        """Packed weights of a shard. Raises PlanError for a shard of another model."""
        self._check(shard)
        ends = self.embed_bytes * shard.is_first + self.head_bytes * shard.is_last
        tied = self.tied_bytes * (shard.is_first and shard.is_last)
        return sum(self.layer_bytes[shard.start : shard.stop]) + ends - tied

    def kv_bytes(self, shard: Shard, num_tokens: int) -> int:
        """Whole pages of cache for `num_tokens` tokens. Raises PlanError for a shard of another model."""
        self._check(shard)
        return whole_pages(num_tokens) * sum(self.kv_bytes_per_token[shard.start : shard.stop])

    def need(self, shard: Shard) -> int:
        """All that a shard takes beside its cache: weights, working memory, and the peak while it loads."""
        return self.weights_bytes(shard) + self.scratch_bytes + self.load_peak_bytes

    def total_bytes(self, num_nodes: int, num_tokens: int) -> int:
        """All that `num_nodes` nodes need together for the model and `num_tokens` tokens of cache."""
        whole = Shard.whole(self.num_layers)
        fixed = num_nodes * (self.scratch_bytes + self.load_peak_bytes) + (self.tied_bytes if num_nodes > 1 else 0)
        return self.weights_bytes(whole) + self.kv_bytes(whole, num_tokens) + fixed

    def room_tokens(self, shard: Shard, budget_bytes: int) -> int:
        """Tokens of cache, whole pages, that a budget leaves room for beside a shard; -1 when the shard does not fit.
        A model without any cache has room for eight of its contexts."""
        free, page = budget_bytes - self.need(shard), self.kv_bytes(shard, PAGE_TOKENS)
        if free < 0:
            return -1
        return free // page * PAGE_TOKENS if page else whole_pages(8 * self.context_length)

    def to_json(self) -> dict[str, Any]:
        document = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in document.items()}

    @classmethod
    def from_json(cls, data: object) -> ModelSpec:
        """Raises PlanError for anything else than what `to_json` makes."""
        values = take_fields("A model's description", data, [field.name for field in fields(cls)])
        for name in ("layer_bytes", "kv_bytes_per_token"):
            if not isinstance(values[name], list) or len(values[name]) > MAX_LAYERS:
                raise PlanError(f"{name} is not a list of at most {MAX_LAYERS} numbers.", CURE)
            values[name] = tuple(values[name])
        return cls(**values)

    def _check(self, shard: Shard) -> None:
        if shard.num_layers != self.num_layers:
            raise PlanError(
                f"{self.model} has {self.num_layers} layers, but a shard of a model of {shard.num_layers} came.",
                "Plan again.",
            )


CURE = "Its sender may run another version."


def cumulative(values: Sequence[int]) -> list[int]:
    """Sums of the first 0, 1, … all values."""
    return list(itertools.accumulate(values, initial=0))


def take_fields(what: str, data: object, names: list[str]) -> dict[str, Any]:
    """A document's fields, which must be these and no others. Raises PlanError."""
    if not isinstance(data, Mapping):
        raise PlanError(f"{what} is not a JSON object.", CURE)
    missing = [name for name in names if name not in data]
    if missing or len(data) != len(names):
        problem = f"lacks {', '.join(missing)}" if missing else "has fields that are not known"
        raise PlanError(f"{what} {problem}.", CURE)
    return {name: data[name] for name in names}


def check_text(name: str, value: object) -> None:
    """Raises PlanError unless it is a text of 1 to MAX_TEXT characters."""
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_TEXT:
        raise PlanError(f"{name} is not a text of 1 to {MAX_TEXT} characters.", CURE)


def check_count(name: str, value: object, smallest: int = 0, largest: int = MAX_COUNT - 1) -> None:
    """Raises PlanError unless it is a whole number from `smallest` to `largest`."""
    if type(value) is not int or not smallest <= value <= largest:
        raise PlanError(f"{name} is not a whole number from {smallest} to {largest}.", CURE)


def check_number(name: str, value: object, smallest: float, largest: float) -> None:
    """Raises PlanError unless it is a finite number from `smallest` to `largest`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not smallest <= value <= largest:
        raise PlanError(f"{name} is not a number from {smallest:g} to {largest:g}.", CURE)
