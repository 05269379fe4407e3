"""Where weights come from: one lazy source per model, in canonical names and canonical forms.

Canonical names (i is the global layer index):

    embed                     [vocab, d_model]
    layers.i.attn_norm        [d_model]            layers.i.mlp_norm        [d_model]
    layers.i.q  .k  .v        [rows, d_model]      layers.i.q_bias .k_bias .v_bias   (qkv_bias)
    layers.i.q_norm .k_norm   [head_dim] (qk_norm)
    layers.i.o                [d_model, q_rows]
    layers.i.attn_post_norm   layers.i.mlp_post_norm   [d_model] (post_norms)
    layers.i.gate  .up        [d_ff, d_model]      layers.i.down            [d_model, d_ff]
    norm                      [d_model]
    head                      [vocab, d_model]     (absent when embeddings are tied: use embed)

Matrices are row-major, one row per output. Rotary order is NeoX, norm weights are ready to multiply with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from backends.arch import Architecture


@dataclass(frozen=True, slots=True)
class Affine:
    """Rows of a quantized matrix: `w = scale · (q - zero) + bias`, one scale (and bias) per group of inputs.

    q:     uint8 `[rows, cols]`, unpacked codes of `bits` bits
    scale: float32 `[rows, cols / group]`
    bias:  float32 `[rows, cols / group]`, or None for symmetric formats, whose codes are centred on `zero`
    """

    bits: int
    group: int
    zero: int
    q: np.ndarray
    scale: np.ndarray
    bias: np.ndarray | None

    def dequantize(self) -> np.ndarray:
        """float32 `[rows, cols]`."""
        rows, cols = self.q.shape
        grouped = self.q.reshape(rows, cols // self.group, self.group).astype(np.float32) - self.zero
        w = grouped * self.scale[:, :, None]
        if self.bias is not None:
            w += self.bias[:, :, None]
        return w.reshape(rows, cols)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor without reading it. `kind` is "affine", "f32", "f16" or "bf16"; `bits`, `group`, `zero`
    and `has_bias` describe affine ones. `num_bytes` is its size in the file; `stored_as` the file's own type name."""

    name: str
    shape: tuple[int, ...]
    kind: str
    num_bytes: int
    stored_as: str
    bits: int = 0
    group: int = 0
    zero: int = 0
    has_bias: bool = False


class WeightSource(Protocol):
    """One model's weights. Reading a tensor touches only its own bytes of the file.

    Raises ModelFileError for what is missing or malformed, UnsupportedModelError for quantizations that have no
    canonical form.
    """

    @property
    def arch(self) -> Architecture: ...

    @property
    def model_hash(self) -> str:
        """Identifies the weights: equal on two nodes only if their files are."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Raises ModelFileError when the model has no such tensor."""
        ...

    def has(self, name: str) -> bool: ...

    def names(self) -> list[str]: ...

    def vector(self, name: str) -> np.ndarray:
        """A one-dimensional tensor as float32."""
        ...

    def matrix(self, name: str, start: int = 0, stop: int | None = None) -> Affine | np.ndarray:
        """Rows `start` to `stop` of a matrix: `Affine`, or float32/float16 arrays, or uint16 holding bfloat16 bits
        (`info(name).kind` tells which). Read big matrices some thousand rows at a time: fresh memory for unpacked codes
        costs more than unpacking them."""
        ...

    def close(self) -> None: ...
