"""A model's numbers add up, and nothing else than numbers comes in from outside."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitioner.model import MAX_LAYERS, ModelSpec
from partitioner.plan import PlanError, Shard
from tests.partitioner.toys import MIB, toy_spec

SPEC = toy_spec(3, layer_bytes=(1, 10, 100), kv_bytes_per_token=(1, 2, 4), embed_bytes=1000, head_bytes=20000)
TIED = toy_spec(3, layer_bytes=(1, 10, 100), embed_bytes=1000, head_bytes=1002, tied_bytes=1000)


@pytest.mark.parametrize(("start", "stop", "expected"), [(0, 3, 21111), (0, 1, 1001), (1, 2, 10), (1, 3, 20110)])
def test_weights_of_a_shard(start: int, stop: int, expected: int) -> None:
    assert SPEC.weights_bytes(Shard(start, stop, 3)) == expected
    assert SPEC.need(Shard(start, stop, 3)) == expected + 20 * MIB


@pytest.mark.parametrize(("start", "stop", "expected"), [(0, 3, 1113), (0, 2, 1011), (1, 2, 10), (2, 3, 1102)])
def test_a_tied_embedding_is_held_once_by_one_node_and_twice_by_two(start: int, stop: int, expected: int) -> None:
    assert TIED.weights_bytes(Shard(start, stop, 3)) == expected


def test_nodes_together_need_their_working_memory_each_and_the_tied_copy() -> None:
    shards = [Shard(0, 1, 3), Shard(1, 3, 3)]
    for spec in (SPEC, TIED):
        apart = sum(spec.need(shard) + spec.kv_bytes(shard, 33) for shard in shards)
        assert spec.total_bytes(2, 33) == apart
        assert spec.total_bytes(1, 33) == spec.need(Shard.whole(3)) + spec.kv_bytes(Shard.whole(3), 33)


def test_cache_comes_in_pages() -> None:
    assert SPEC.kv_bytes(Shard(1, 3, 3), 32) == 32 * 6
    assert SPEC.kv_bytes(Shard(1, 3, 3), 33) == 64 * 6
    assert SPEC.kv_bytes(Shard(1, 3, 3), 0) == 0


def test_room_beside_a_shard() -> None:
    shard = Shard(0, 2, 3)
    assert SPEC.room_tokens(shard, SPEC.need(shard) - 1) == -1
    assert SPEC.room_tokens(shard, SPEC.need(shard)) == 0
    assert SPEC.room_tokens(shard, SPEC.need(shard) + 32 * 3 - 1) == 0
    assert SPEC.room_tokens(shard, SPEC.need(shard) + 32 * 3) == 32
    assert toy_spec(3, kv=0).room_tokens(shard, 10000 * MIB) == 8 * 32768


def test_a_shard_of_another_model_is_refused() -> None:
    for call in (lambda: SPEC.weights_bytes(Shard(0, 1, 4)), lambda: SPEC.kv_bytes(Shard(0, 1, 2), 1)):
        with pytest.raises(PlanError, match="toy has 3 layers"):
            call()


counts = st.integers(0, (1 << 60) - 1)
texts = st.text(min_size=1, max_size=40)


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    n = draw(st.integers(1, 12))
    embed, head = draw(counts), draw(counts)
    return ModelSpec(
        draw(texts), draw(texts), n, tuple(draw(st.lists(counts, min_size=n, max_size=n))), embed, head,
        draw(st.integers(0, min(embed, head))), tuple(draw(st.lists(counts, min_size=n, max_size=n))), draw(counts),
        draw(counts), draw(counts) | 1, draw(counts) | 1, draw(counts) | 1,
    )  # fmt: skip


@given(specs())
def test_json_there_and_back(spec: ModelSpec) -> None:
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(json_values, st.sampled_from(sorted(SPEC.to_json())))
def test_garbage_is_refused_or_harmless(value: Any, field: str) -> None:
    for document in (value, SPEC.to_json() | {field: value}):
        try:
            found = ModelSpec.from_json(document)
        except PlanError:
            continue
        assert found.to_json() == document


@pytest.mark.parametrize(
    "change",
    [
        {"model": ""},
        {"model": "x" * 513},
        {"model_hash": 7},
        {"num_layers": 0},
        {"num_layers": 4},
        {"num_layers": True},
        {"num_layers": 3.0},
        {"layer_bytes": [1, 2]},
        {"layer_bytes": [1, 2, -1]},
        {"layer_bytes": [1, 2, 1 << 60]},
        {"layer_bytes": [1, 2, True]},
        {"layer_bytes": "abc"},
        {"layer_bytes": {"0": 1, "1": 1, "2": 1}},
        {"kv_bytes_per_token": [0.5, 1, 1]},
        {"kv_bytes_per_token": None},
        {"embed_bytes": -1},
        {"tied_bytes": 1001},
        {"scratch_bytes": float("nan")},
        {"context_length": 0},
        {"d_model": 10**400},
        {"more": 1},
    ],
)
def test_nonsense_is_refused_in_words(change: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as caught:
        ModelSpec.from_json(SPEC.to_json() | change)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("field", sorted(SPEC.to_json()))
def test_a_missing_field_is_named(field: str) -> None:
    document = SPEC.to_json()
    del document[field]
    with pytest.raises(PlanError, match=f"lacks {field}"):
        ModelSpec.from_json(document)


def test_too_many_layers_are_refused() -> None:
    many = [0] * (MAX_LAYERS + 1)
    document = SPEC.to_json() | {"num_layers": len(many), "layer_bytes": many, "kv_bytes_per_token": many}
    with pytest.raises(PlanError, match="at most 1024"):
        ModelSpec.from_json(document)
    with pytest.raises(PlanError, match="from 1 to 1024"):
        toy_spec(MAX_LAYERS + 1)
    assert toy_spec(MAX_LAYERS).num_layers == MAX_LAYERS
