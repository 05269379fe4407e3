"""The document of `cluster status --json`, from what the node holds. Numbers nobody measured are null."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node.config import Settings
from node.deployment import Deployment
from partitioner.plan import Plan

UNMEASURED = {"read_gbps": None, "prefill_flops": None, "step_overhead_us": None}


@dataclass(frozen=True, slots=True)
class Facts:
    """What the node knows of itself. `state` is "starting", "ready" or "draining"; memory in bytes."""

    node_id: str
    state: str
    backend: str
    budget_bytes: int
    used_bytes: int


def device_name() -> str:
    """The processor as its maker calls it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def document(
    settings: Settings,
    facts: Facts,
    deployments: Iterable[Deployment],
    loading: Iterable[str],
    requests: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """`loading` are models that cannot answer yet; `requests` maps a deployment's id to its counters."""
    node = {
        "id": facts.node_id,
        "name": settings.name,
        "address": settings.api_host,
        "state": facts.state,
        "backend": facts.backend,
        "device": f"{device_name()} ({settings.num_threads} threads)",
        "memory": {"budget": facts.budget_bytes, "used": facts.used_bytes},
        "profile": dict(UNMEASURED),
    }
    return {
        "self": facts.node_id,
        "api": settings.api_url,
        "nodes": [node],
        "links": [],
        "deployments": [
            {
                "model": deployment.id,
                "state": deployment.state,
                "plan": solo_plan(facts.node_id, deployment).to_json(),
                "requests": requests.get(deployment.id, {}),
            }
            for deployment in deployments
        ]
        + [{"model": model, "state": "loading", "plan": None, "requests": {}} for model in loading],
    }


def solo_plan(node_id: str, deployment: Deployment) -> Plan:
    return Plan.solo(node_id, deployment.arch.num_layers, deployment.context, "This is the only node.")
