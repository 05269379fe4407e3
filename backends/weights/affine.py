"""Affine-quantized matrices as MLX stores them, to canonical groups of 32."""

from __future__ import annotations

import numpy as np

from backends.weights.floats import as_float32
from backends.weights.source import Affine

GROUP = 32


def unpack_bits(packed: np.ndarray, bits: int) -> np.ndarray:
    """Little-endian bit streams, uint8 `[rows, bytes]`, to uint8 codes `[rows, 8 · bytes / bits]`.

    A row must hold whole runs of eight codes.
    """
    if bits == 8:
        return np.array(packed)
    runs = packed.reshape(len(packed), -1, bits)
    codes = np.empty((*runs.shape[:2], 8), np.uint8)
    for i in range(8):
        byte, shift = divmod(i * bits, 8)
        window = runs[:, :, byte].astype(np.uint16)
        if shift + bits > 8:
            window |= runs[:, :, byte + 1].astype(np.uint16) << 8
        codes[:, :, i] = (window >> shift) & ((1 << bits) - 1)
    return codes.reshape(len(packed), -1)


def from_mlx(packed: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int, group: int) -> Affine:
    """packed: uint8 `[rows, cols · bits / 8]`; scales, biases: `[rows, cols / group]` in any float format, group a
    multiple of 32, whose scale and bias then serve several canonical groups."""
    repeat = group // GROUP
    scale = np.repeat(as_float32(scales), repeat, axis=1)
    bias = np.repeat(as_float32(biases), repeat, axis=1)
    return Affine(bits, GROUP, 0, unpack_bits(packed, bits), scale, bias)
