"""Splits equal exhaustive search; placements fit, lose nothing, and say why in words."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pytest

from partitioner.model import ModelSpec
from partitioner.plan import Plan, PlanError, Prediction, Shard, Stage
from partitioner.profile import LinkProfile, NodeProfile
from partitioner.search import NoPlanError, Placement, place
from partitioner.split import rates, split
from tests.partitioner.toys import MIB, toy_node, toy_spec


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))


def is_held(spec: ModelSpec, nodes: Sequence[NodeProfile], sizes: tuple[int, ...], kv_tokens: int) -> bool:
    ends = list(itertools.accumulate(sizes, initial=0))
    shards = [Shard(a, b, spec.num_layers) for a, b in itertools.pairwise(ends)]
    return all(
        spec.need(shard) + spec.kv_bytes(shard, kv_tokens) <= node.budget_bytes
        for node, shard in zip(nodes, shards, strict=True)
    )


def exhaustive(spec: ModelSpec, nodes: Sequence[NodeProfile], kv_tokens: int) -> tuple[int, ...] | None:
    """The definition, tried on every way to cut."""
    known = [node.read_gbps for node in nodes if node.read_gbps is not None]
    mean = sum(known) / len(known) if known else 1.0
    found = []
    for sizes in compositions(spec.num_layers, len(nodes)):
        times, start = [], 0
        for node, size in zip(nodes, sizes, strict=True):
            num_bytes = sum(spec.layer_bytes[start : start + size])
            num_bytes += spec.head_bytes if start + size == spec.num_layers else 0
            times.append(int(num_bytes * 1000 / (mean if node.read_gbps is None else node.read_gbps)))
            start += size
        if is_held(spec, nodes, sizes, kv_tokens):
            found.append((max(times), sum(times), tuple(-size for size in sizes)))
    return tuple(-size for size in min(found)[2]) if found else None


def random_case(rng: random.Random) -> tuple[ModelSpec, list[NodeProfile], int]:
    """Small, with many ties and with memory that is often just too little. Layers of zero bytes are among them."""
    num_layers = rng.randint(1, 8)
    is_even = rng.random() < 0.4
    layers = (rng.randint(0, 6),) * num_layers if is_even else tuple(rng.randint(0, 6) for _ in range(num_layers))
    embed, head = rng.randint(0, 5), rng.randint(0, 5)
    spec = toy_spec(
        num_layers,
        layer_bytes=layers,
        kv_bytes_per_token=tuple(rng.randint(0, 1) for _ in range(num_layers)),
        embed_bytes=embed,
        head_bytes=head,
        tied_bytes=min(embed, head) if rng.random() < 0.5 else 0,
        scratch_bytes=rng.randint(0, 3),
        load_peak_bytes=rng.randint(0, 3),
    )
    speeds = [None, 1.0, 1.0, 2.0, 3.0, 0.7]
    nodes = [
        NodeProfile(f"n{i}", f"n{i}", rng.randint(0, rng.choice([40, 120])), rng.choice(speeds), 1)
        for i in range(rng.randint(1, min(5, num_layers + 1)))
    ]
    return spec, nodes, rng.choice([0, 0, 1, 33])


def test_splits_equal_exhaustive_search() -> None:
    rng = random.Random(20)
    num_found = num_refused = 0
    for _ in range(4000):
        spec, nodes, kv_tokens = random_case(rng)
        expected = exhaustive(spec, nodes, kv_tokens)
        assert split(spec, nodes, kv_tokens) == expected, (spec, nodes, kv_tokens)
        num_found, num_refused = num_found + (expected is not None), num_refused + (expected is None)
    assert min(num_found, num_refused) > 1000


def test_a_split_of_the_largest_model_ends() -> None:
    spec = toy_spec(1024, layer=1 << 59)
    nodes = [NodeProfile(f"n{i}", f"n{i}", (1 << 60) - 1, 1e-6 if i else 1e6, 1) for i in range(8)]
    assert split(spec, nodes, 1) is None
    nodes = [toy_node(f"n{i}", 1 << 30, 1.0 + i) for i in range(8)]
    sizes = split(toy_spec(1024), nodes, 1)
    assert sizes is not None and sum(sizes) == 1024 and list(sizes) == sorted(sizes)


def holds(spec: ModelSpec, nodes: Sequence[NodeProfile], placed: Placement) -> None:
    """Every layer once (the plan checks that itself), one at least each, all of it within every budget."""
    by_id, stages = {node.node: node for node in nodes}, placed.plan.decode
    assert placed.plan.prefill == stages and len({stage.node for stage in stages}) == len(stages)
    assert [stage.start for stage in stages] == [0, *(stage.stop for stage in stages[:-1])]
    assert stages[-1].stop == spec.num_layers
    sizes = tuple(stage.stop - stage.start for stage in stages)
    assert is_held(spec, [by_id[stage.node] for stage in stages], sizes, placed.kv_tokens)
    assert 1 <= placed.context <= min(spec.context_length, placed.kv_tokens)
    assert placed.plan.predicted == Prediction(placed.context)
    assert 1 <= len(placed.plan.reasons) <= 3


def test_no_placement_loses_a_layer_or_leaves_a_budget() -> None:
    rng = random.Random(21)
    seen: dict[str, int] = {}
    for _ in range(600):
        spec = toy_spec(rng.randint(1, 9), kv=rng.choice([1024, 40960]), tied_bytes=rng.choice([0, 50 * MIB]))
        speeds = [rng.choice([None, 5.0, 10.0, 20.0]) for _ in range(rng.randint(1, 5))]
        nodes = [toy_node(f"n{i}", rng.randint(50, 900), speed) for i, speed in enumerate(speeds)]
        mode: Literal["auto", "solo", "pipeline"] = rng.choice(["auto", "solo", "pipeline"])
        context = rng.choice([None, 100, 4096])
        holders = frozenset(rng.sample([node.node for node in nodes], rng.randint(0, 1)))
        kind: str = mode
        incumbent: Plan | None = None
        try:
            for _ in range(2):  # the second time beside itself
                placed = place(spec, nodes, mode=mode, context=context, holders=holders, incumbent=incumbent)
                holds(spec, nodes, placed)
                assert context in (None, placed.context)
                assert incumbent in (None, placed.plan) or placed.plan.decode == incumbent.decode
                kind, incumbent = f"{mode} {placed.plan.mode}", placed.plan
        except NoPlanError as exc:
            assert all(f"{node.name} " in exc.message for node in nodes)
        seen[kind] = seen.get(kind, 0) + 1
    assert set(seen) == {"auto", "solo", "pipeline", "auto solo", "auto pipeline", "solo solo", "pipeline solo",
                         "pipeline pipeline"}  # fmt: skip


def nodes_of(placed: Placement) -> list[str]:
    return [stage.node for stage in placed.plan.decode]


def layers_of(placed: Placement) -> list[int]:
    return [stage.stop - stage.start for stage in placed.plan.decode]


WHOLE_MIB = 4 * 100 + 50 + 50 + 20
"""The toy's weights and working memory; 2048 tokens of cache are 8 MiB more, 512 are 2."""


def test_auto_is_solo_as_long_as_it_fits_one() -> None:
    spec = toy_spec()
    fits = place(spec, [toy_node("a", WHOLE_MIB + 8), toy_node("b", 400)])
    assert (fits.plan.mode, nodes_of(fits), fits.context) == ("solo", ["a"], 2048)
    tight = place(spec, [toy_node("a", WHOLE_MIB + 7.9), toy_node("b", 400)])
    assert (tight.plan.mode, nodes_of(tight), tight.warnings) == ("pipeline", ["a", "b"], ())
    asked = place(spec, [toy_node("a", WHOLE_MIB + 7.9), toy_node("b", 400)], context=1024)
    assert (asked.plan.mode, asked.context) == ("solo", 1024)
    alone = place(spec, [toy_node("a", WHOLE_MIB + 2)])
    assert (alone.plan.mode, alone.context, alone.kv_tokens) == ("solo", 512, 512)
    with pytest.raises(NoPlanError, match="toy needs 522 MiB with a context of 512 tokens; a may use 522 MiB, too"):
        place(spec, [toy_node("a", WHOLE_MIB + 1.9)])


def test_the_best_node_alone_is_the_fastest_then_a_holder_then_the_larger_then_the_first() -> None:
    spec, big = toy_spec(), 1000

    def best(*nodes: NodeProfile, **options: Any) -> str:
        return nodes_of(place(spec, nodes, **options))[0]

    assert best(toy_node("a", big, 10), toy_node("b", big, 11), toy_node("c", 100, 50)) == "b"
    assert best(toy_node("a", big, None), toy_node("b", big, 0.1)) == "b"
    assert best(toy_node("a", big), toy_node("b", big), holders=frozenset("b")) == "b"
    assert best(toy_node("a", big), toy_node("b", big + 1)) == "b"
    assert best(toy_node("b", big), toy_node("a", big)) == "a"


def test_a_running_solo_stays_unless_another_is_much_faster() -> None:
    spec = toy_spec()
    incumbent = Plan.solo("a", 4, 2048, "It was alone.")
    for speed, expected in ((11.5, "a"), (11.6, "b")):
        placed = place(spec, [toy_node("a", 1000, 10.0), toy_node("b", 1000, speed)], incumbent=incumbent)
        assert nodes_of(placed) == [expected]
    assert (
        "stays on a" in place(spec, [toy_node("a", 1000), toy_node("b", 1000, 11)], incumbent=incumbent).plan.reasons[1]
    )
    unmeasured = [toy_node("a", 1000, None), toy_node("b", 1000, 99)]
    assert nodes_of(place(spec, unmeasured, incumbent=incumbent)) == ["a"]
    assert nodes_of(place(spec, [toy_node("a", 100), toy_node("b", 1000)], incumbent=incumbent)) == ["b"]
    other = Plan.solo("a", 5, 2048, "Another model.")
    assert nodes_of(place(spec, [toy_node("a", 1000, 10), toy_node("b", 1000, 11)], incumbent=other)) == ["b"]


def test_a_pipeline_has_as_few_nodes_as_hold_the_model() -> None:
    spec = toy_spec(8)
    nodes = [toy_node("a", 400, 10), toy_node("b", 500, 20), toy_node("c", 450, 30), toy_node("d", 600, 40)]
    placed = place(spec, nodes, context=1024)
    holds(spec, nodes, placed)
    assert (nodes_of(placed), layers_of(placed), placed.warnings) == (["d", "c"], [5, 3], ())
    assert len(nodes_of(place(spec, nodes[:3], context=1024))) == 3


def test_layers_follow_speed_and_memory() -> None:
    spec = toy_spec(30, head_bytes=0)
    fast, slow = toy_node("b", 3000, 40.0), toy_node("a", 3000, 20.0)
    placed = place(spec, [slow, fast], mode="pipeline")
    assert (nodes_of(placed), layers_of(placed)) == (["b", "a"], [20, 10])
    assert placed.plan.reasons == (
        "toy needs 3.68 GiB with a context of 23808 tokens, b may use 2.93 GiB and a 2.93 GiB: a pipeline of 2, as "
        "asked.",
        "Layers by measured decode speed and memory: b 40.0 GB/s 20 layers, a 20.0 GB/s 10 layers.",
    )
    assert layers_of(place(spec, [slow, toy_node("b", 1500, 40.0)], mode="pipeline", context=64)) == [14, 16]
    with_head = toy_spec(30, head_bytes=300 * MIB)
    assert layers_of(place(with_head, [slow, fast], mode="pipeline")) == [22, 8]


def test_the_first_stage_has_the_file_and_the_others_go_by_speed() -> None:
    spec = toy_spec(8)
    nodes = [toy_node("a", 500, 10), toy_node("b", 500, 30), toy_node("c", 500, 20), toy_node("d", 500, None)]
    assert nodes_of(place(spec, nodes, mode="pipeline")) == ["b", "c", "a", "d"]
    assert nodes_of(place(spec, nodes, mode="pipeline", holders=frozenset("ac"))) == ["c", "b", "a", "d"]


def test_another_order_is_taken_when_memory_does_not_allow_the_usual_one() -> None:
    spec = toy_spec(4, embed_bytes=400 * MIB, head_bytes=300 * MIB)
    nodes = [toy_node("a", 200, 30), toy_node("b", 700, 20), toy_node("c", 600, 10)]
    placed = place(spec, nodes, mode="pipeline", holders=frozenset("a"), context=64)
    assert nodes_of(placed) == ["b", "a", "c"]
    holds(spec, nodes, placed)


def test_a_running_pipeline_keeps_its_order_and_what_is_nearly_best() -> None:
    spec = toy_spec(8, head_bytes=0)
    stages = (Stage("a", 0, 4), Stage("b", 4, 8))
    incumbent = Plan("pipeline", 8, stages, stages, Prediction(2048))

    def again(a: float, b: float, budget: float = 700) -> Placement:
        nodes = [toy_node("a", budget, a), toy_node("b", 700, b)]
        return place(spec, nodes, context=1024, incumbent=incumbent, holders=frozenset("b"))

    kept = again(10, 11)
    assert (nodes_of(kept), layers_of(kept)) == (["a", "b"], [4, 4])
    moved = again(10, 20)
    assert (nodes_of(moved), layers_of(moved)) == (["a", "b"], [2, 6])
    near = again(10, 14)  # 3 and 5 are 12 % faster
    assert layers_of(near) == [4, 4]
    assert near.plan.reasons[1].startswith("Layers as they run now, within 15 % of the best: a 10.0 GB/s 4 layers")
    assert layers_of(again(10, 10, budget=400)) == [3, 5]


def test_a_running_group_stays_beside_one_that_is_little_faster() -> None:
    spec = toy_spec(8, head_bytes=0)
    stages = (Stage("a", 0, 4), Stage("b", 4, 8))
    incumbent = Plan("pipeline", 8, stages, stages, Prediction(2048))
    for speed, expected in ((11.0, {"a", "b"}), (20.0, {"a", "c"})):
        nodes = [toy_node("a", 700, 20), toy_node("b", 700, 10), toy_node("c", 700, speed)]
        assert set(nodes_of(place(spec, nodes, incumbent=incumbent))) == expected


def test_a_pipeline_that_was_asked_for_says_who_would_be_faster_alone() -> None:
    spec = toy_spec()
    placed = place(spec, [toy_node("n1", 1000, 20), toy_node("n2", 1000, 10)], mode="pipeline")
    assert placed.plan.mode == "pipeline"
    assert placed.warnings == ("A pipeline of 2 is slower for one stream than n1 alone.",)
    unmeasured = place(spec, [toy_node("n1", 1000, None), toy_node("n2", 1000, None)], mode="pipeline")
    assert unmeasured.warnings == placed.warnings
    # The fast node cannot hold it alone, and with its help the slow one is faster than without.
    assert place(spec, [toy_node("n1", 1000, 1), toy_node("n2", 400, 50)], mode="pipeline").warnings == ()


def test_measured_hops_count() -> None:
    spec = toy_spec()
    nodes = [toy_node("n1", 1000, 1), toy_node("n2", 400, 50)]
    links = [LinkProfile("n1", "n2", 2e6, 2e6, 1.0), LinkProfile("n2", "n1", 600.0, 700.0, 1.0)]
    placed = place(spec, nodes, mode="pipeline", links=links)
    assert placed.plan.reasons[2] == "2 of 2 hops are measured and add 1000.33 ms to a token."
    assert placed.warnings == ("A pipeline of 2 is slower for one stream than n1 alone.",)
    assert len(place(spec, nodes, mode="pipeline", links=links[:1]).plan.reasons) == 3


def test_who_takes_no_part_in_a_pipeline_is_told() -> None:
    few = place(toy_spec(2), [toy_node(n, 300) for n in ("a", "b", "c")], mode="pipeline")
    assert few.warnings == ("c takes no part: the model has only 2 layers; it may use 300 MiB.",)
    small = place(toy_spec(), [toy_node("a", 400), toy_node("b", 400), toy_node("c", 60)], mode="pipeline")
    assert small.warnings == ("c takes no part: no pipeline of all nodes fits; it may use 60.0 MiB.",)
    alone = place(toy_spec(), [toy_node("a", 1000)], mode="pipeline")
    assert (alone.plan.mode, alone.warnings) == ("solo", ("There is only one node: a serves toy alone.",))
    left = place(toy_spec(), [toy_node("a", 1000), toy_node("c", 60)], mode="pipeline")
    assert (left.plan.mode, left.warnings) == ("solo", ("No pipeline fits: a serves toy alone.",))


def test_the_context_is_that_of_the_tightest_stage() -> None:
    spec = toy_spec(4, kv=16384, head_bytes=0)  # 2 layers: 1 MiB of cache in 32 tokens
    roomy, tight = toy_node("a", 2000, 10), toy_node("b", 220 + 640, 10)
    placed = place(spec, [roomy, tight], mode="pipeline")
    assert layers_of(placed) == [2, 2] and (placed.context, placed.kv_tokens) == (640 // 2 * 32, 640 // 2 * 32)
    short = place(spec, [toy_node("a", 270 + 150, 10), toy_node("b", 220 + 100, 10)])
    assert (layers_of(short), short.context, short.kv_tokens) == ([2, 2], 3200, 3200)
    asked = place(spec, [roomy, tight], mode="pipeline", context=1000)
    assert (asked.context, asked.kv_tokens) == (1000, 4000)
    # Cut evenly there is no room for 8192 tokens, but uneven there is.
    uneven = place(spec, [toy_node("a", 2000, 10), toy_node("b", 120 + 130, 10)], mode="pipeline")
    assert (layers_of(uneven), uneven.context) == ([3, 1], 8192)


def test_many_nodes_are_searched_in_time() -> None:
    spec = toy_spec(80)
    nodes = [toy_node(f"n{i:02}", 2200 + 10 * i, 10.0 + i) for i in range(12)]
    placed = place(spec, nodes, context=4096)
    assert len(placed.plan.decode) == 4
    holds(spec, nodes, placed)
    every = place(spec, nodes, mode="pipeline")
    assert sorted(nodes_of(every)) == [node.node for node in nodes]


def test_no_plan_says_of_every_node_why() -> None:
    with pytest.raises(NoPlanError) as caught:
        place(toy_spec(), [toy_node("n1", 200), toy_node("n2", 100.5), toy_node("n3", 10)], context=1024)
    assert caught.value.message == (
        "toy needs 524 MiB with a context of 1024 tokens; n1 may use 200 MiB, n2 100 MiB and n3 10.0 MiB, too little "
        "for all of it. A pipeline of 3 needs 564 MiB, with 20.0 MiB of working memory on each node, and they have 310 "
        "MiB together."
    )
    assert "--context" in caught.value.cure
    with pytest.raises(NoPlanError, match="together, but no cut between layers fits"):
        place(toy_spec(2, layer=300 * MIB), [toy_node(n, 300) for n in "abc"], mode="pipeline", context=64)
    with pytest.raises(NoPlanError) as caught:
        place(toy_spec(), [toy_node("n1", 500), toy_node("n2", 500)], mode="solo")
    assert "pipeline" not in caught.value.message


@pytest.mark.parametrize("mode", ["tensor", "replicas", "split", "magic"])
def test_other_modes_name_those_that_work(mode: Any) -> None:
    with pytest.raises(NoPlanError, match=f"Mode '{mode}' cannot be planned yet. Use auto, solo or pipeline"):
        place(toy_spec(), [toy_node("a", 1000)], mode=mode)


def test_input_that_makes_no_sense() -> None:
    nodes = [toy_node("a", 1000), toy_node("a", 500)]
    with pytest.raises(PlanError, match="same id"):
        place(toy_spec(), nodes)
    with pytest.raises(NoPlanError, match="no node"):
        place(toy_spec(), [])
    with pytest.raises(NoPlanError, match="trained for a context of 32768 tokens, not 32769"):
        place(toy_spec(), nodes[:1], context=32769)
    with pytest.raises(PlanError, match="A context of 0 tokens"):
        place(toy_spec(), nodes[:1], context=0)


def test_rates_of_unmeasured_nodes() -> None:
    assert rates([toy_node("a", 1, 10), toy_node("b", 1, None), toy_node("c", 1, 20)]) == [10, 15, 20]
    assert rates([toy_node("a", 1, None)]) == [1.0]
