"""Models and nodes of a few numbers, for the planner's tests."""

from __future__ import annotations

from typing import Any

from partitioner.model import ModelSpec
from partitioner.profile import NodeProfile

MIB, GIB = 1 << 20, 1 << 30


def toy_spec(num_layers: int = 4, layer: int = 100 * MIB, kv: int = 1024, **overrides: Any) -> ModelSpec:
    """Layers of 100 MiB, embedding and head of 50, 10 of working memory and 10 of load peak."""
    values: dict[str, Any] = {
        "model": "toy",
        "model_hash": "h",
        "num_layers": num_layers,
        "layer_bytes": (layer,) * num_layers,
        "embed_bytes": 50 * MIB,
        "head_bytes": 50 * MIB,
        "tied_bytes": 0,
        "kv_bytes_per_token": (kv,) * num_layers,
        "scratch_bytes": 10 * MIB,
        "load_peak_bytes": 10 * MIB,
        "context_length": 32768,
        "d_model": 1024,
        "vocab_size": 1000,
    }
    return ModelSpec(**values | overrides)


def toy_node(node: str, budget_mib: float, read_gbps: float | None = 10.0) -> NodeProfile:
    return NodeProfile(node, node, int(budget_mib * MIB), read_gbps, 4)
