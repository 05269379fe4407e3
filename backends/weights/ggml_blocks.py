"""ggml quantization blocks to canonical `Affine` groups, exactly.

Blocks are taken apart with 64-bit words: eight codes an operation, words first in memory (`[words, blocks]`) so that
NumPy's inner loops run over many blocks. Layouts: `ggml-common.h` and `ggml-quants.c` of the ggml project.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from backends.weights.ggml_types import GGMLType
from backends.weights.source import Affine

CHUNK_BYTES = 1 << 18
"""Source bytes taken apart at a time, so that the intermediate words stay in cache."""

_LOW4 = np.uint64(0x0F0F0F0F0F0F0F0F)
_BIT4 = np.uint64(0x1010101010101010)
_BITS54 = np.uint64(0x3030303030303030)
_FLIP = np.uint64(0x8080808080808080)
_SHIFT = [np.uint64(n) for n in range(8)]
_SPREAD = (np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") << 4).view("<u8").ravel()
"""Eight bits to bit 4 of eight bytes."""

Decoder = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]


def decode_blocks(kind: GGMLType, raw: np.ndarray) -> Affine:
    """Rows of a quantized matrix, uint8 `[rows, bytes per row]`, as `Affine`. `kind.kind` must be "affine"."""
    rows, row_bytes = raw.shape
    cols = row_bytes // kind.block_bytes * kind.block
    q = np.empty((rows, cols), np.uint8)
    scale = np.empty((rows, cols // kind.group), np.float32)
    bias = np.empty((rows, cols // kind.group) if kind.has_bias else (0, 0), np.float32)
    blocks = raw.reshape(-1, kind.block_bytes)
    words = q.view(np.uint64).reshape(-1, kind.block // 8)
    scales = scale.reshape(-1, kind.block // kind.group)
    biases = bias.reshape(-1, kind.block // kind.group)
    decode, step = _DECODERS[kind.name], max(1, CHUNK_BYTES // kind.block_bytes)
    for start in range(0, len(blocks), step):
        part = slice(start, start + step)
        decode(np.ascontiguousarray(blocks[part]), words[part], scales[part], biases[part])
    return Affine(kind.bits, kind.group, kind.zero, q, scale, bias if kind.has_bias else None)


def _words(blocks: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Bytes `start` to `stop` of each block as uint64 `[words, blocks]`."""
    field = np.dtype(
        {"names": ["field"], "formats": [f"V{stop - start}"], "offsets": [start], "itemsize": blocks.shape[1]}
    )
    packed = np.ascontiguousarray(blocks.view(field)[:, 0]["field"])
    return np.ascontiguousarray(packed.view("<u8").reshape(len(blocks), -1).T)


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at byte `start` of each block, as float32 `[blocks, 1]`."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """`[w, blocks]` to `[2 w, blocks]`: all low halves, then all high halves."""
    return np.concatenate([packed & _LOW4, (packed >> _SHIFT[4]) & _LOW4])


def _q4_0(blocks: np.ndarray, q: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> None:
    scale[:] = _half(blocks, 0)
    q[:] = _nibbles(_words(blocks, 2, 18)).T


def _q4_1(blocks: np.ndarray, q: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> None:
    scale[:], bias[:] = _half(blocks, 0), _half(blocks, 2)
    q[:] = _nibbles(_words(blocks, 4, 20)).T


def _q5_0(blocks: np.ndarray, q: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> None:
    scale[:] = _half(blocks, 0)
    q[:] = (_nibbles(_words(blocks, 6, 22)) | _SPREAD[blocks[:, 2:6].T]).T


def _q5_1(blocks: np.ndarray, q: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> None:
    scale[:], bias[:] = _half(blocks, 0), _half(blocks, 2)
    q[:] = (_nibbles(_words(blocks, 8, 24)) | _SPREAD[blocks[:, 4:8].T]).T


def _q8_0(blocks: np.ndarray, q: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> None:
    scale[:] = _half(blocks, 0)
    q[:] = (_words(blocks, 2, 34) ^ _FLIP).T


def _k_scales(blocks: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> None:
    """Twelve bytes hold eight 6-bit scales and eight 6-bit minima, the last four of each in two pieces."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    high = np.concatenate([(third & 15) | (first >> 6 << 4), (third >> 4) | (second >> 6 << 4)], axis=1)
    np.multiply(np.concatenate([first & 63, high[:, :4]], axis=1), _half(blocks, 0), out=scale)
    np.multiply(np.concatenate([second & 63, high[:, 4:]], axis=1), -_half(blocks, 2), out=bias)


def _k_nibbles(packed: np.ndarray) -> np.ndarray:
    """Four runs of 32 bytes, `[16, blocks]`; each gives 32 low halves, then 32 high halves: `[4, 2, 4, blocks]`."""
    runs = packed.reshape(4, 1, 4, -1)
    return np.concatenate([runs & _LOW4, (runs >> _SHIFT[4]) & _LOW4], axis=1)


def _q4_k(blocks: np.ndarray, q: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> None:
    _k_scales(blocks, scale, bias)
    q[:] = _k_nibbles(_words(blocks, 16, 144)).reshape(32, -1).T


def _q5_k(blocks: np.ndarray, q: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> None:
    _k_scales(blocks, scale, bias)
    codes, fifth = _k_nibbles(_words(blocks, 48, 176)).reshape(8, 4, -1), _words(blocks, 16, 48)
    for bit in range(8):
        shifted = fifth << _SHIFT[4 - bit] if bit <= 4 else fifth >> _SHIFT[bit - 4]
        codes[bit] |= shifted & _BIT4
    q[:] = codes.reshape(32, -1).T


def _q6_k(blocks: np.ndarray, q: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> None:
    np.multiply(blocks[:, 192:208].view(np.int8), _half(blocks, 208), out=scale)
    # Two halves of 128 codes: 64 bytes of low nibbles, 32 bytes that hold the upper two bits of four codes each.
    low = _words(blocks, 0, 128).reshape(2, 1, 8, -1)
    codes = np.concatenate([low & _LOW4, (low >> _SHIFT[4]) & _LOW4], axis=1).reshape(2, 4, 4, -1)
    upper = _words(blocks, 128, 192).reshape(2, 4, -1)
    for quarter, shifted in enumerate((upper << _SHIFT[4], upper << _SHIFT[2], upper, upper >> _SHIFT[2])):
        codes[:, quarter] |= shifted & _BITS54
    q[:] = codes.reshape(32, -1).T


_DECODERS: dict[str, Decoder] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
