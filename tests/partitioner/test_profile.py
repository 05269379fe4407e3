"""Profiles come from other nodes: what is no measurement is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitioner.plan import PlanError
from partitioner.profile import LinkProfile, NodeProfile
from tests.partitioner.test_model import json_values, texts

NODE = NodeProfile("a1", "attic", 8 << 30, 40.1, 8)
LINK = LinkProfile("a1", "b2", 210.0, 400.0, 0.94)

speeds = st.floats(1e-6, 1e6)
nodes = st.builds(NodeProfile, texts, texts, st.integers(0, (1 << 60) - 1), st.none() | speeds, st.integers(1, 4096))
links = st.tuples(texts, texts, st.floats(0, 1e9), st.floats(0, 1e9), speeds).map(
    lambda t: LinkProfile(t[0], t[1], min(t[2], t[3]), max(t[2], t[3]), t[4])
)


@given(nodes, links)
def test_json_there_and_back(node: NodeProfile, link: LinkProfile) -> None:
    assert NodeProfile.from_json(json.loads(json.dumps(node.to_json()))) == node
    assert LinkProfile.from_json(json.loads(json.dumps(link.to_json()))) == link


@pytest.mark.parametrize("profile", [NODE, LINK])
@given(json_values, st.integers(0, 4))
def test_garbage_is_refused_or_harmless(profile: NodeProfile | LinkProfile, value: Any, index: int) -> None:
    field = list(profile.to_json())[index]
    for document in (value, profile.to_json() | {field: value}):
        try:
            found = type(profile).from_json(document)
        except PlanError:
            continue
        assert found.to_json() == document


@pytest.mark.parametrize(
    "change",
    [
        {"node": ""},
        {"name": None},
        {"name": "x" * 513},
        {"budget_bytes": -1},
        {"budget_bytes": 1.5},
        {"budget_bytes": 1 << 60},
        {"read_gbps": 0},
        {"read_gbps": -3.0},
        {"read_gbps": float("nan")},
        {"read_gbps": float("inf")},
        {"read_gbps": True},
        {"read_gbps": "fast"},
        {"read_gbps": 10**400},
        {"threads": 0},
        {"threads": 4097},
        {"more": 1},
    ],
)
def test_no_such_node(change: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as caught:
        NodeProfile.from_json(NODE.to_json() | change)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "change",
    [
        {"src": ""},
        {"dst": 1},
        {"rtt_us_p50": -1.0},
        {"rtt_us_p50": float("nan")},
        {"rtt_us_p50": 500.0},
        {"rtt_us_p95": 200.0},
        {"rtt_us_p95": float("inf")},
        {"gbps": 0},
        {"gbps": False},
        {"more": 1},
    ],
)
def test_no_such_link(change: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        LinkProfile.from_json(LINK.to_json() | change)


def test_missing_fields_are_named() -> None:
    with pytest.raises(PlanError, match="A node's profile lacks node, name, budget_bytes, read_gbps, threads"):
        NodeProfile.from_json({})
    with pytest.raises(PlanError, match="A link's profile is not a JSON object"):
        LinkProfile.from_json([LINK.to_json()])


def test_a_speed_may_be_a_whole_number() -> None:
    assert NodeProfile.from_json(NODE.to_json() | {"read_gbps": 40}).read_gbps == 40
