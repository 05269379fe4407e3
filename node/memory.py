"""Whether a model fits before anything of it is loaded. The default context is the planner's rule:
`partitioner/context.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.arch import Architecture
from backends.base import PAGE_TOKENS
from backends.weights.source import TensorInfo, WeightSource
from node import limits
from node.errors import MemoryShortageError, UsageError
from node.units import format_bytes
from partitioner.context import FULL_CONTEXTS, SMALLEST_CONTEXT, cache_room
from partitioner.model import ModelSpec
from partitioner.plan import Shard

MIB = 1 << 20
STEP_TOKENS = 512
"""Tokens of the largest step: scratch is sized for them."""

RESERVE_BYTES = 256 * MIB
RESERVE_SHARE = 0.05
PROCESS_BYTES = 64 * MIB
"""Tokenizer, template and the endpoint's own buffers."""

LOAD_SLICE_BYTES = 32 * MIB
LOAD_COPIES = 4
"""A matrix is unpacked in slices of this size while it loads, and some steps of that hold copies."""

PANEL_ROWS, PANEL_COLS = 16, 32
"""The CPU kernels pack quantized matrices in panels: see backends/cpu/kernels/common.h."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that may be used, and whose limit that is."""

    num_bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of a loaded model without its cache. `load_peak_bytes` is needed while it loads, then given back."""

    weights_bytes: int
    scratch_bytes: int
    load_peak_bytes: int

    @property
    def total(self) -> int:
        return self.weights_bytes + self.scratch_bytes + self.load_peak_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What will be served: `context` tokens a sequence, `kv_tokens` of cache over all sequences."""

    context: int
    kv_tokens: int
    need: Need
    kv_bytes: int
    budget: Budget
    reason: str


def budget(limit_bytes: int | None) -> Budget:
    """What --memory allows, or what is free less a reserve for the rest of the machine. Never more than is free."""
    machine = limits.memory()
    if limit_bytes is not None and limit_bytes <= machine.available_bytes:
        return Budget(limit_bytes, "--memory")
    if limit_bytes is not None:
        return Budget(machine.available_bytes, f"what is free on {machine.source}")
    reserve = max(RESERVE_BYTES, int(machine.total_bytes * RESERVE_SHARE))
    return Budget(max(0, machine.available_bytes - reserve), f"what is free on {machine.source}, less a reserve")


def estimate(source: WeightSource) -> Need:
    """From the tensors' shapes and formats alone."""
    infos = [source.info(name) for name in source.names()]
    arch = source.arch
    row = 4 * (4 * arch.d_model + 2 * (arch.q_rows + arch.kv_rows) + 3 * arch.d_ff)
    scratch = STEP_TOKENS * row + FULL_CONTEXTS * arch.vocab_size * 8 + PROCESS_BYTES
    peak = LOAD_COPIES * min(LOAD_SLICE_BYTES, max(map(unpacked_bytes, infos), default=0))
    return Need(sum(map(packed_bytes, infos)), scratch, peak)


def spec(source: WeightSource, model_id: str) -> ModelSpec:
    """What the planner has to know of a model, from the tensors' shapes and formats alone.

    The last stage of a model whose embeddings are tied holds a copy of them; a shard of all layers holds them once.
    """
    arch, need = source.arch, estimate(source)
    layers = [0] * arch.num_layers
    for name in source.names():
        if name.startswith("layers."):
            layers[int(name.split(".")[1])] += packed_bytes(source.info(name))
    embed, norm = (packed_bytes(source.info(name)) for name in ("embed", "norm"))
    return ModelSpec(
        model=model_id,
        model_hash=source.model_hash,
        num_layers=arch.num_layers,
        layer_bytes=tuple(layers),
        embed_bytes=embed,
        head_bytes=norm + (embed if arch.tied_embeddings else packed_bytes(source.info("head"))),
        tied_bytes=embed if arch.tied_embeddings else 0,
        kv_bytes_per_token=(arch.kv_bytes_per_token(1),) * arch.num_layers,
        scratch_bytes=need.scratch_bytes,
        load_peak_bytes=need.load_peak_bytes,
        context_length=arch.context_length,
        d_model=arch.d_model,
        vocab_size=arch.vocab_size,
    )


def packed_bytes(info: TensorInfo) -> int:
    """Bytes of a tensor in the kernels' layout: codes, float16 scales and biases, whole panels."""
    if len(info.shape) != 2 or info.kind != "affine":
        width = 4 if len(info.shape) != 2 or info.kind == "f32" else 2
        return width * _count(info.shape)
    rows, cols = (-(-size // unit) * unit for size, unit in zip(info.shape, (PANEL_ROWS, PANEL_COLS), strict=True))
    groups = rows * cols // PANEL_COLS
    return rows * cols * info.bits // 8 + groups * 2 * (PANEL_COLS // info.group + info.has_bias)


def unpacked_bytes(info: TensorInfo) -> int:
    """Bytes of a tensor as it comes from its source: codes of a byte, float32 scales and biases."""
    if info.kind != "affine":
        return 4 * _count(info.shape)
    count = _count(info.shape)
    return count + count // info.group * 4 * (1 + info.has_bias)


def plan(arch: Architecture, need: Need, allowed: Budget, context: int | None, name: str) -> MemoryPlan:
    """Raises MemoryShortageError with the numbers, or UsageError for a context that the model was not trained for."""
    per_token = arch.kv_bytes_per_token()
    fits = max(0, allowed.num_bytes - need.total) // (per_token * PAGE_TOKENS) * PAGE_TOKENS
    if context is not None and context > arch.context_length:
        raise UsageError(
            f"{name} was trained for a context of {arch.context_length} tokens, not {context}.",
            f"Use --context {arch.context_length} or less.",
        )
    wanted = context or min(arch.context_length, SMALLEST_CONTEXT)
    if fits < wanted:
        raise _shortage(name, need, allowed, wanted, per_token, fits)
    served, kv_tokens = cache_room(fits, arch.context_length, context)
    reason = (
        "as asked" if context is not None else "as trained" if served == arch.context_length else "what fits memory"
    )
    return MemoryPlan(served, kv_tokens, need, kv_tokens * per_token, allowed, reason)


def plan_shard(model: ModelSpec, shard: Shard, allowed: Budget, context: int, kv_tokens: int) -> MemoryPlan:
    """Whether a shard of a placed model still fits this node. Raises MemoryShortageError with the numbers."""
    need = Need(model.weights_bytes(shard), model.scratch_bytes, model.load_peak_bytes)
    cache = model.kv_bytes(shard, kv_tokens)
    if need.total + cache > allowed.num_bytes:
        raise MemoryShortageError(
            f"Layers {shard.start} to {shard.stop} of {model.model} with {kv_tokens} tokens of cache need "
            f"{_numbers(need, cache, allowed)}.",
            "Use a smaller --context or model, close other programs, or raise --memory.",
        )
    return MemoryPlan(context, kv_tokens, need, cache, allowed, "as placed")


def _shortage(name: str, need: Need, allowed: Budget, context: int, per_token: int, fits: int) -> MemoryShortageError:
    cache = context * per_token
    smaller = f"Use --context {fits}, or a" if fits >= SMALLEST_CONTEXT else "Use a"
    return MemoryShortageError(
        f"{name} with a context of {context} tokens needs {_numbers(need, cache, allowed)}.",
        f"{smaller} smaller quantization or model, close other programs, or raise --memory.",
    )


def _numbers(need: Need, cache: int, allowed: Budget) -> str:
    """What is needed, part by part, and what may be used."""
    return (
        f"{format_bytes(need.total + cache)} (weights {format_bytes(need.weights_bytes)}, cache {format_bytes(cache)}, "
        f"working memory {format_bytes(need.scratch_bytes + need.load_peak_bytes)}) and may use "
        f"{format_bytes(allowed.num_bytes)} ({allowed.source})"
    )


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
