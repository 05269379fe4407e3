"""Repacks a shard's canonical weights into the panels of `kernels/`, a slice of rows at a time."""

from __future__ import annotations

import ctypes

import numpy as np

from backends.cpu.library import KINDS, MATS, VECS, address
from backends.errors import ModelFileError, UnsupportedModelError
from backends.weights.source import Affine, TensorInfo, WeightSource
from partitioner.plan import Shard

_SLICE_BYTES = 32 << 20
"""Unpacked codes held at once: the load peak above the packed weights."""

_HALF_MAX = 60000.0

_HALF_SCALES = frozenset(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"))
"""File types whose scales are single float16 numbers: packed as they are."""


def pack_weights(library: ctypes.CDLL, model: int, shard: Shard, source: WeightSource) -> None:
    """Load all tensors of a shard. Raises ModelFileError, UnsupportedModelError or MemoryError."""
    arch = source.arch
    d, q, kv = arch.d_model, arch.q_rows, arch.kv_rows
    mats = {
        "q": (q, d),
        "k": (kv, d),
        "v": (kv, d),
        "o": (d, q),
        "gate": (arch.d_ff, d),
        "up": (arch.d_ff, d),
        "down": (d, arch.d_ff),
    }
    vecs = {"attn_norm": d, "mlp_norm": d}
    if arch.qkv_bias:
        vecs |= {"q_bias": q, "k_bias": kv, "v_bias": kv}
    if arch.qk_norm:
        vecs |= {"q_norm": arch.head_dim, "k_norm": arch.head_dim}
    if arch.post_norms:
        vecs |= {"attn_post_norm": d, "mlp_post_norm": d}

    if shard.is_first or (shard.is_last and arch.tied_embeddings):
        _pack_matrix(library, model, 0, "embed", source, "embed", (arch.vocab_size, d))
    if shard.is_last:
        _pack_vector(library, model, 0, "norm", source, "norm", d)
        if not arch.tied_embeddings:
            _pack_matrix(library, model, 0, "head", source, "head", (arch.vocab_size, d))
    for index, layer in enumerate(range(shard.start, shard.stop)):
        for slot, shape in mats.items():
            _pack_matrix(library, model, index, slot, source, f"layers.{layer}.{slot}", shape)
        for slot, size in vecs.items():
            _pack_vector(library, model, index, slot, source, f"layers.{layer}.{slot}", size)


def _pack_vector(
    library: ctypes.CDLL, model: int, layer: int, slot: str, source: WeightSource, name: str, size: int
) -> None:
    values = np.ascontiguousarray(source.vector(name), np.float32)
    if values.shape != (size,):
        raise ModelFileError(f"Tensor {name} has shape {values.shape}, but the model needs ({size},).")
    if library.roost_set_vec(model, layer, VECS.index(slot), address(values), size):
        raise MemoryError(name)


def _pack_matrix(
    library: ctypes.CDLL, model: int, layer: int, slot: str, source: WeightSource, name: str, shape: tuple[int, int]
) -> None:
    info = source.info(name)
    if info.shape != shape:
        raise ModelFileError(f"Tensor {name} has shape {info.shape}, but the model needs {shape}.")
    rows, cols = shape
    kind, group, symmetric = _format(info)
    step = max(16, _SLICE_BYTES // cols // 16 * 16)
    unit = _unit(source, name, rows, step) if info.kind == "affine" else 1.0
    at = MATS.index(slot)
    if library.roost_set_mat(model, layer, at, KINDS[kind], rows, cols, group, int(symmetric), unit):
        raise MemoryError(name)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        part = source.matrix(name, start, stop)
        scale = bias = None
        if isinstance(part, Affine):
            codes = np.ascontiguousarray(part.q, np.uint8)
            scale = np.ascontiguousarray(part.scale, np.float32)
            bias = None if part.bias is None else np.ascontiguousarray(part.bias, np.float32)
        else:
            codes = np.ascontiguousarray(part)
        library.roost_pack(model, layer, at, start, stop - start, address(codes), address(scale), address(bias))


def _format(info: TensorInfo) -> tuple[str, int, bool]:
    if info.kind != "affine":
        return info.kind, 32, False
    symmetric = not info.has_bias
    if symmetric and info.zero != 1 << (info.bits - 1):
        raise UnsupportedModelError(f"Tensor {info.name} is centred on {info.zero} in codes of {info.bits} bits.")
    if info.bits not in (4, 5, 6, 8) or ((info.group, info.bits, symmetric) != (16, 6, True) and info.group != 32):
        raise UnsupportedModelError(f"Tensor {info.name} has {info.bits} bits in groups of {info.group}.")
    return f"q{info.bits}", info.group, symmetric


def _unit(source: WeightSource, name: str, rows: int, step: int) -> float:
    """A power of two that brings scales into float16's best range when they do not lie in it already.

    Scales that are float16 in the file stay exactly what they are. Products of two (the K formats) may be tiny.
    """
    if source.info(name).stored_as in _HALF_SCALES:
        return 1.0
    largest = 0.0
    exact = True
    for start in range(0, rows, step):
        part = source.matrix(name, start, min(rows, start + step))
        if not isinstance(part, Affine):
            raise ModelFileError(f"Tensor {name} is described as quantized but is not.")
        for values in (part.scale, part.bias):
            if values is None or not values.size:
                continue
            if not np.isfinite(values).all():
                raise ModelFileError(f"Tensor {name} has a scale that is not a number.", "Fetch the file again.")
            largest = max(largest, float(np.abs(values).max()))
            with np.errstate(over="ignore"):
                exact = exact and bool((values.astype(np.float16).astype(np.float32) == values).all())
    if exact or largest == 0:
        return 1.0
    return float(2.0 ** np.ceil(np.log2(largest / _HALF_MAX)))
