"""The compiled kernels, loaded with ctypes. Structures mirror `kernels/model.h`; their sizes are checked at load."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_size_t, c_void_p
from pathlib import Path

import numpy as np

from discovery.errors import RoostError

MATS = ("embed", "head", "q", "k", "v", "o", "gate", "up", "down")
VECS = (
    "norm", "attn_norm", "mlp_norm", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm",
    "attn_post_norm", "mlp_post_norm",
)  # fmt: skip
KINDS = {"q4": 1, "q5": 2, "q6": 3, "q8": 4, "f16": 5, "bf16": 6, "f32": 7}


class KernelsError(RoostError):
    """The compiled kernels are missing or do not belong to this version."""


class Config(ctypes.Structure):
    _fields_ = (
        *[(name, c_int32) for name in (
            "num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim", "vocab_size",
            "activation", "has_embedding", "has_head", "post_norms", "num_threads",
        )],
        *[(name, c_float) for name in ("norm_eps", "attention_scale", "embedding_scale")],
    )  # fmt: skip


class Step(ctypes.Structure):
    _fields_ = (
        *[(name, c_int32) for name in ("num_tokens", "num_spans", "num_logits")],
        *[(name, c_void_p) for name in (
            "tokens", "hidden", "start", "count", "page_offset", "pages", "logit_rows", "out",
        )],
    )  # fmt: skip


_SIGNATURES = {
    "roost_new": (c_void_p, [POINTER(Config), c_char_p]),
    "roost_free": (None, [c_void_p]),
    "roost_isa": (c_char_p, [c_void_p]),
    "roost_has_isa": (c_char_p, [c_char_p]),
    "roost_set_mat": (c_int, [c_void_p] + [c_int] * 7 + [c_float]),
    "roost_pack": (None, [c_void_p, c_int, c_int, c_int, c_int, c_void_p, c_void_p, c_void_p]),
    "roost_set_vec": (c_int, [c_void_p, c_int, c_int, c_void_p, c_int]),
    "roost_set_layer": (None, [c_void_p, c_int, c_int, c_int]),
    "roost_add_rope": (c_int, [c_void_p, c_void_p, c_float]),
    "roost_set_room": (c_int, [c_void_p, c_int]),
    "roost_copy_page": (None, [c_void_p, c_int, c_int]),
    "roost_kv": (None, [c_void_p, c_int, c_void_p, c_int, c_int, c_int, c_void_p, c_void_p]),
    "roost_step": (c_int, [c_void_p, POINTER(Step)]),
    "roost_weight_bytes": (c_size_t, [c_void_p]),
    "roost_kv_bytes": (c_size_t, [c_void_p]),
    "roost_scratch_bytes": (c_size_t, [c_void_p]),
    "roost_measure_read": (c_int, [c_int, c_size_t, c_int, c_void_p]),
    "roost_sizeof_config": (c_size_t, []),
    "roost_sizeof_step": (c_size_t, []),
}


@functools.cache
def kernels(path: Path | None = None) -> ctypes.CDLL:
    """The kernel library, `path` or the installed one. Raises KernelsError."""
    if path is None:
        spec = importlib.util.find_spec("backends.cpu._kernels")
        if spec is None or spec.origin is None:
            raise KernelsError("The CPU kernels were not compiled.", "Run `make install` (it needs a C compiler).")
        path = Path(spec.origin)
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as exc:
        raise KernelsError(f"The CPU kernels in {path} cannot be used: {exc}.", "Run `make install` again.") from exc
    if library.roost_sizeof_config() != ctypes.sizeof(Config) or library.roost_sizeof_step() != ctypes.sizeof(Step):
        raise KernelsError(f"The CPU kernels in {path} belong to another version.", "Run `make install` again.")
    return library


def address(array: np.ndarray | None) -> int | None:
    """Where a C-contiguous array begins; None stays NULL."""
    return None if array is None else array.ctypes.data


def instruction_sets(path: Path | None = None) -> list[str]:
    """Those that this machine can run, best first."""
    library = kernels(path)
    return [name for name in ("avx512", "avx2", "neon", "portable") if library.roost_has_isa(name.encode())]
