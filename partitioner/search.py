"""Who gets what: the first planner for several hosts. Solo where it fits, else a pipeline of as few nodes as hold it.

Times are those of reading the weights once, and of the hops where links were measured. What prefill, the cache and
several streams cost is not weighed yet, so no speed is promised (`Prediction` has none).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from partitioner import explain
from partitioner.context import SMALLEST_CONTEXT, SPACIOUS_CONTEXT, cache_room
from partitioner.explain import NoPlanError
from partitioner.model import ModelSpec, cumulative
from partitioner.plan import Mode, Plan, PlanError, Prediction, Shard, Stage
from partitioner.profile import LinkProfile, NodeProfile
from partitioner.split import rates, read_ps, split, stage_ps

ENOUGH_CONTEXT = 2048
"""Tokens that a place must have room for when nobody asked for a number; SMALLEST_CONTEXT when none has."""

GAIN = 1.15
"""A running plan stays unless another one is faster by more than this."""

EXACT_NODES = 8
"""Among more nodes than this, pipelines are sought among those with the most memory."""

PS_PER_US = 1_000_000
PS_PER_MS = 1_000_000_000
HIDDEN_BYTES, TOKEN_BYTES = 4, 4
"""A float32 of hidden, an int32 token."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A plan with its numbers: `context` tokens a sequence, `kv_tokens` of cache over all sequences on every stage."""

    plan: Plan
    context: int
    kv_tokens: int
    warnings: tuple[str, ...] = ()


def place(
    spec: ModelSpec,
    nodes: Sequence[NodeProfile],
    *,
    mode: Mode | Literal["auto"] = "auto",
    context: int | None = None,
    holders: frozenset[str] = frozenset(),
    incumbent: Plan | None = None,
    links: Sequence[LinkProfile] = (),
) -> Placement:
    """Where to run a model.

    context: tokens a sequence; None takes what fits. holders: ids of nodes that have the file. incumbent: the plan that
    runs now, which stays unless another is known to be more than 15 % faster. "auto" is solo where the model fits one
    node, else a pipeline of the fewest nodes; "pipeline" takes every node that can take part, "solo" one.
    Raises NoPlanError, which says of every node why it does not do, and PlanError for input that makes no sense.
    """
    if mode not in ("auto", "solo", "pipeline"):
        raise NoPlanError(f"Mode '{mode}' cannot be planned yet.", "Use auto, solo or pipeline.")
    if len({node.node for node in nodes}) != len(nodes):
        raise PlanError("Two of the nodes have the same id.", "Give each its own --home.")
    if not nodes:
        raise NoPlanError(f"There is no node to place {spec.model} on.", "Start one.")
    if context is not None and context < 1:
        raise PlanError(f"A context of {context} tokens holds nothing.", "Ask for more.")
    if context is not None and context > spec.context_length:
        raise NoPlanError(
            f"{spec.model} was trained for a context of {spec.context_length} tokens, not {context}.",
            f"Use --context {spec.context_length} or less.",
        )
    search = _Search(spec, tuple(nodes), mode, context, holders, _runs(incumbent, spec), links)
    for num_nodes, tokens in search.attempts():
        found = search.solo(tokens) if num_nodes == 1 else search.pipeline(num_nodes, tokens)
        if found is not None:
            return found
    tokens = search.floors()[-1]
    raise explain.no_plan(spec, nodes, tokens, 1 if mode == "solo" else min(len(nodes), spec.num_layers))


def shards_of(sizes: Sequence[int]) -> list[Shard]:
    """Shards of these many layers in order, together all of a model."""
    ends = cumulative(sizes)
    return [Shard(a, b, ends[-1]) for a, b in itertools.pairwise(ends)]


def _runs(plan: Plan | None, spec: ModelSpec) -> tuple[Stage, ...]:
    """Stages of the running plan; none when this search would not make such a plan of this model."""
    is_known = plan is not None and plan.num_layers == spec.num_layers and plan.mode in ("solo", "pipeline")
    return plan.decode if plan is not None and is_known else ()


@dataclass(frozen=True, slots=True)
class _Chain:
    """Nodes in order with the layers of each. `total_ps`: one token's way through, with the hops that were measured.
    `is_kept`: these are the running plan's layers."""

    nodes: tuple[NodeProfile, ...]
    sizes: tuple[int, ...]
    slowest_ps: int
    total_ps: int
    is_spacious: bool
    is_kept: bool


@dataclass(frozen=True, slots=True)
class _Search:
    spec: ModelSpec
    nodes: tuple[NodeProfile, ...]
    mode: str
    context: int | None
    holders: frozenset[str]
    runs: tuple[Stage, ...]
    links: Sequence[LinkProfile]

    def floors(self) -> list[int]:
        """Tokens of cache that must fit, the best first."""
        trained = self.spec.context_length
        wanted = (ENOUGH_CONTEXT, SMALLEST_CONTEXT) if self.context is None else (self.context,)
        return list(dict.fromkeys(min(trained, tokens) for tokens in wanted))

    def attempts(self) -> Iterator[tuple[int, int]]:
        """(number of nodes, tokens of cache that must fit), in the order of preference."""
        most = min(len(self.nodes), self.spec.num_layers)
        if self.mode == "solo":
            return itertools.product((1,), self.floors())
        if self.mode == "pipeline":
            return itertools.product(range(most, 0, -1), self.floors())
        return ((n, tokens) for tokens in self.floors() for n in range(1, most + 1))

    def solo(self, tokens: int) -> Placement | None:
        fitting = self._hold_all(tokens)
        if not fitting:
            return None
        best, why = fitting[0], []
        stays = next((node for node in fitting if [stage.node for stage in self.runs] == [node.node]), None)
        if stays is not None and _gain(stays.read_gbps, best.read_gbps) <= GAIN:
            best = stays
            if len(fitting) > 1:
                why = [f"It stays on {best.name}: no other node is measured to be more than 15 % faster."]
        elif best.read_gbps and len(fitting) > 1:
            why = [f"{best.name} reads {best.read_gbps:.1f} GB/s, the fastest of the {len(fitting)} that it fits."]
        fits = self.spec.room_tokens(Shard.whole(self.spec.num_layers), best.budget_bytes)
        context, kv_tokens = cache_room(fits, self.spec.context_length, self.context)
        reason = f"{explain.needs(self.spec, context)} and fits {best.name} alone: {explain.budgets([best])}."
        warnings = ()
        if self.mode == "pipeline":
            cause = "There is only one node" if len(self.nodes) == 1 else "No pipeline fits"
            warnings = (f"{cause}: {best.name} serves {self.spec.model} alone.",)
        stages = (Stage(best.node, 0, self.spec.num_layers),)
        plan = Plan("solo", self.spec.num_layers, stages, stages, Prediction(context), (reason, *why))
        return Placement(plan, context, kv_tokens, warnings)

    def _hold_all(self, tokens: int) -> list[NodeProfile]:
        """Nodes that hold the whole model and as much cache, the best first."""
        whole = Shard.whole(self.spec.num_layers)
        fitting = [node for node in self.nodes if self.spec.room_tokens(whole, node.budget_bytes) >= tokens]
        return sorted(fitting, key=self._rank)

    def _rank(self, node: NodeProfile) -> tuple[float, bool, int, str]:
        return -(node.read_gbps or 0), node.node not in self.holders, -node.budget_bytes, node.node

    def pipeline(self, num_nodes: int, tokens: int) -> Placement | None:
        """Fastest slowest stage among the groups of this many nodes; the running group stays if it comes near."""
        largest = sorted(self.nodes, key=lambda node: (-node.budget_bytes, self._rank(node)))
        groups = list(itertools.combinations(largest[: max(num_nodes, EXACT_NODES)], num_nodes))
        groups.sort(key=lambda group: -sum(rates(group)))
        needed = self.spec.total_bytes(num_nodes, tokens)
        best: _Chain | None = None
        stays: _Chain | None = None
        for group in groups:
            is_running = self._is_running(group)
            has_lost = best is not None and not is_running and self._must_lose(group, best)
            if has_lost or sum(node.budget_bytes for node in group) < needed:
                continue
            chain = self._chain(group, tokens)
            if chain is not None:
                stays = chain if is_running else stays
                best = chain if best is None or self._order(chain) < self._order(best) else best
        if best is None:
            return None
        if stays and stays.is_spacious >= best.is_spacious and stays.slowest_ps <= best.slowest_ps * GAIN:
            best = stays
        return self._placement(best)

    def _is_running(self, group: tuple[NodeProfile, ...]) -> bool:
        return {node.node for node in group} == {stage.node for stage in self.runs} and len(group) == len(self.runs)

    def _order(self, chain: _Chain) -> tuple[bool, int, int, bool, tuple[str, ...]]:
        ids = tuple(node.node for node in chain.nodes)
        return not chain.is_spacious, chain.slowest_ps, chain.total_ps, ids[0] not in self.holders, ids

    def _must_lose(self, group: tuple[NodeProfile, ...], best: _Chain) -> bool:
        """Even if the layers could be cut anywhere. (A tenth of a percent covers the rounding.)"""
        all_bytes = sum(self.spec.layer_bytes) + self.spec.head_bytes
        return best.is_spacious and read_ps(all_bytes, sum(rates(group))) > best.slowest_ps * 1.001

    def _chain(self, group: tuple[NodeProfile, ...], tokens: int) -> _Chain | None:
        """In the first order that memory allows, with room for a spacious context if it can be."""
        spacious = max(tokens, min(self.spec.context_length, SPACIOUS_CONTEXT)) if self.context is None else tokens
        for order in self._orders(group):
            for target in dict.fromkeys((spacious, tokens)):
                sizes = split(self.spec, order, target)
                if sizes is None:
                    continue
                kept = self._kept(order, sizes, target)
                times = stage_ps(self.spec, kept or sizes, rates(order))
                total = sum(times) + self._hops_ps(order)
                return _Chain(order, kept or sizes, max(times), total, target == spacious, kept is not None)
        return None

    def _kept(self, order: tuple[NodeProfile, ...], sizes: tuple[int, ...], tokens: int) -> tuple[int, ...] | None:
        """The running plan's layers of these nodes, where they still fit and the best ones would gain too little."""
        if [node.node for node in order] != [stage.node for stage in self.runs]:
            return None
        kept = tuple(stage.stop - stage.start for stage in self.runs)
        old, new = (max(stage_ps(self.spec, each, rates(order))) for each in (kept, sizes))
        return kept if self._room(order, kept) >= tokens and old <= new * GAIN else None

    def _room(self, nodes: tuple[NodeProfile, ...], sizes: tuple[int, ...]) -> int:
        """Tokens of cache that the tightest of the nodes has room for."""
        pairs = zip(nodes, shards_of(sizes), strict=True)
        return min(self.spec.room_tokens(shard, node.budget_bytes) for node, shard in pairs)

    def _orders(self, group: tuple[NodeProfile, ...]) -> Iterator[tuple[NodeProfile, ...]]:
        """The running order; a holder first, then by speed; then other first and last nodes, holders first again."""
        by_speed = sorted(group, key=lambda node: (-(node.read_gbps or 0), node.node))
        if self._is_running(group):
            by_id = {node.node: node for node in group}
            yield tuple(by_id[stage.node] for stage in self.runs)
        for first in sorted(by_speed, key=lambda node: node.node not in self.holders):
            for last in reversed([node for node in by_speed if node != first]):
                yield (first, *(node for node in by_speed if node not in (first, last)), last)

    def _hops_ps(self, order: tuple[NodeProfile, ...]) -> int:
        """Hidden from stage to stage, the token back to the first. Links that nobody measured count 0."""
        return sum(
            int(link.rtt_us_p50 / 2 * PS_PER_US) + read_ps(num_bytes, link.gbps / 8)
            for link, num_bytes in self._hops(order)
        )

    def _hops(self, order: tuple[NodeProfile, ...]) -> list[tuple[LinkProfile, int]]:
        """The measured links that a token takes, and its bytes there."""
        known = {(link.src, link.dst): link for link in self.links}
        hops = [(a.node, b.node, HIDDEN_BYTES * self.spec.d_model) for a, b in itertools.pairwise(order)]
        hops.append((order[-1].node, order[0].node, TOKEN_BYTES))
        return [(known[a, b], num_bytes) for a, b, num_bytes in hops if (a, b) in known]

    def _placement(self, chain: _Chain) -> Placement:
        spec, count = self.spec, len(chain.nodes)
        context, kv_tokens = cache_room(self._room(chain.nodes, chain.sizes), spec.context_length, self.context)
        asked = ", as asked" if self.mode == "pipeline" else ""
        reasons = [
            f"{explain.needs(spec, context)}, {explain.budgets(chain.nodes)}: a pipeline of {count}{asked}.",
            explain.layers(chain.nodes, chain.sizes, chain.is_kept),
        ]
        if hops := self._hops(chain.nodes):
            ms = self._hops_ps(chain.nodes) / PS_PER_MS
            reasons.append(f"{len(hops)} of {count} hops are measured and add {ms:.2f} ms to a token.")
        pairs = zip(chain.nodes, shards_of(chain.sizes), strict=True)
        stages = tuple(Stage(node.node, shard.start, shard.stop) for node, shard in pairs)
        plan = Plan("pipeline", spec.num_layers, stages, stages, Prediction(context), tuple(reasons))
        return Placement(plan, context, kv_tokens, tuple(self._warnings(chain)))

    def _warnings(self, chain: _Chain) -> Iterator[str]:
        """Of a pipeline that was asked for: who takes no part, and that one node alone would be faster."""
        if self.mode != "pipeline":
            return
        count = len(chain.nodes)
        yield from (explain.left_out(self.spec, node, count) for node in self.nodes if node not in chain.nodes)
        for best in self._hold_all(self.floors()[0])[:1]:
            alone = stage_ps(self.spec, [self.spec.num_layers], rates((best, *chain.nodes))[:1])[0]
            if chain.total_ps + count >= alone:  # each stage's time is rounded down
                yield f"A pipeline of {count} is slower for one stream than {best.name} alone."


def _gain(old: float | None, new: float | None) -> float:
    """How many times faster `new` is known to be; 1.0 unless both were measured."""
    return 1.0 if old is None or new is None else new / old
