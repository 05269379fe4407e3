"""Why a plan is as it is, and why there is none: plain words around the measured numbers."""

from __future__ import annotations

from collections.abc import Sequence

from partitioner.model import ModelSpec
from partitioner.plan import PlanError
from partitioner.profile import NodeProfile


class NoPlanError(PlanError):
    """No way to serve the model on these nodes as asked."""


def needs(spec: ModelSpec, context: int) -> str:
    return f"{spec.model} needs {size(spec.total_bytes(1, context))} with a context of {context} tokens"


def budgets(nodes: Sequence[NodeProfile]) -> str:
    """ "n1 may use 6.00 GiB, n2 7.50 GiB and n3 512 MiB"."""
    first, *others = nodes
    parts = [f"{first.name} may use {size(first.budget_bytes)}"]
    parts += [f"{node.name} {size(node.budget_bytes)}" for node in others]
    return parts[0] if not others else f"{', '.join(parts[:-1])} and {parts[-1]}"


def layers(nodes: Sequence[NodeProfile], sizes: Sequence[int], is_kept: bool) -> str:
    """Who holds how many layers, by which speeds."""
    parts = [
        f"{node.name} {'not measured' if node.read_gbps is None else f'{node.read_gbps:.1f} GB/s'} "
        f"{count} layer{'s' * (count != 1)}"
        for node, count in zip(nodes, sizes, strict=True)
    ]
    why = "Layers as they run now, within 15 % of the best" if is_kept else "Layers by measured decode speed and memory"
    return f"{why}: {', '.join(parts)}."


def left_out(spec: ModelSpec, node: NodeProfile, num_stages: int) -> str:
    is_short = num_stages == spec.num_layers
    why = f"the model has only {spec.num_layers} layers" if is_short else "no pipeline of all nodes fits"
    return f"{node.name} takes no part: {why}; it may use {size(node.budget_bytes)}."


def no_plan(spec: ModelSpec, nodes: Sequence[NodeProfile], tokens: int, num_stages: int) -> NoPlanError:
    """num_stages: nodes of the longest pipeline that was tried, 1 for none."""
    message = f"{needs(spec, tokens)}; {budgets(nodes)}, too little for all of it."
    if num_stages > 1:
        needed, total = spec.total_bytes(num_stages, tokens), sum(node.budget_bytes for node in nodes)
        fixed = size(spec.scratch_bytes + spec.load_peak_bytes)
        cause = "" if total < needed else ", but no cut between layers fits"
        message += (
            f" A pipeline of {num_stages} needs {size(needed)}, with {fixed} of working memory on each node, and they "
            f"have {size(total)} together{cause}."
        )
    return NoPlanError(message, "Use a smaller --context, quantization or model, raise --memory, or add a node.")


def size(num_bytes: int) -> str:
    """Three digits: "742 MiB", "8.10 GiB"."""
    value, unit = num_bytes / (1 << 20), "MiB"
    if value >= 1000:
        value, unit = value / 1024, "GiB"
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
