"""Plans hold every layer exactly once, or do not come to be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitioner.plan import Plan, PlanError, Prediction, Shard, Stage, split_evenly


@given(num_layers=st.integers(1, 200), num_stages=st.integers(1, 200))
def test_even_splits_lose_nothing(num_layers: int, num_stages: int) -> None:
    if num_stages > num_layers:
        with pytest.raises(PlanError, match="cannot be cut"):
            split_evenly(num_layers, num_stages)
        return
    shards = split_evenly(num_layers, num_stages)
    assert [layer for shard in shards for layer in range(shard.start, shard.stop)] == list(range(num_layers))
    assert max(shard.size for shard in shards) - min(shard.size for shard in shards) <= 1
    assert [shard.is_first for shard in shards] == [True] + [False] * (num_stages - 1)
    assert [shard.is_last for shard in shards] == [False] * (num_stages - 1) + [True]


@pytest.mark.parametrize("bounds", [(0, 0), (3, 2), (-1, 2), (0, 5)])
def test_shards_lie_inside_their_model(bounds: tuple[int, int]) -> None:
    with pytest.raises(PlanError, match="does not exist"):
        Shard(*bounds, num_layers=4)


def plan(*stages: Stage, num_layers: int = 30) -> Plan:
    return Plan("pipeline", num_layers, stages, (Stage("a", 0, num_layers),), Prediction(8192))


def test_a_plan_as_json() -> None:
    mixed = plan(Stage("a", 0, 20, 0, 2), Stage("b", 0, 20, 1, 2), Stage("c", 20, 30))
    document = mixed.to_json()
    assert document == {
        "mode": "pipeline",
        "decode": [
            {"node": "a", "layers": [0, 20], "tensor": [0, 2]},
            {"node": "b", "layers": [0, 20], "tensor": [1, 2]},
            {"node": "c", "layers": [20, 30], "tensor": [0, 1]},
        ],
        "prefill": [{"node": "a", "layers": [0, 30], "tensor": [0, 1]}],
        "predicted": {"ttft_ms": None, "tpot_ms": None, "prompt": None, "context": 8192},
        "reasons": [],
    }
    assert tuple(Stage.from_json(stage) for stage in document["decode"]) == mixed.decode


@pytest.mark.parametrize(
    "stages",
    [
        (),
        (Stage("a", 0, 29),),
        (Stage("a", 0, 31),),
        (Stage("a", 0, 10), Stage("b", 11, 30)),
        (Stage("a", 0, 10), Stage("b", 9, 30)),
        (Stage("b", 10, 30), Stage("a", 0, 10)),
        (Stage("a", 0, 30, 0, 2),),
        (Stage("a", 0, 30, 1, 2), Stage("b", 0, 30, 0, 2)),
        (Stage("a", 0, 10, 0, 2), Stage("b", 0, 11, 1, 2), Stage("c", 11, 30)),
    ],
)
def test_layers_missing_doubled_or_out_of_order_are_refused(stages: tuple[Stage, ...]) -> None:
    with pytest.raises(PlanError, match="layers"):
        plan(*stages)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"node": "a", "layers": [0], "tensor": [0, 1]},
        {"node": "a", "layers": [0, 2.5], "tensor": [0, 1]},
        {"node": "a", "layers": [0, True], "tensor": [0, 1]},
        {"node": 7, "layers": [0, 2], "tensor": [0, 1]},
        {"node": "a", "layers": [2, 0], "tensor": [0, 1]},
        {"node": "a", "layers": [0, 2], "tensor": [1, 1]},
    ],
)
def test_stages_from_elsewhere_are_checked(data: dict[str, object]) -> None:
    with pytest.raises(PlanError):
        Stage.from_json(data)


def test_only_known_modes() -> None:
    stages = (Stage("a", 0, 3),)
    with pytest.raises(PlanError, match="not a mode"):
        Plan("magic", 3, stages, stages, Prediction(10))  # pyright: ignore[reportArgumentType]
