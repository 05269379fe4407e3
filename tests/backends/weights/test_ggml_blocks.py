"""Every block type against the dequantizers of the gguf package, to the bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from backends.weights.ggml_blocks import CHUNK_BYTES, decode_blocks
from backends.weights.ggml_types import GGML_TYPES, GGMLType
from tests.models import random_blocks

AFFINE = {kind.name: kind for kind in GGML_TYPES.values() if kind.kind == "affine"}


def _raw(kind: GGMLType, rows: int, blocks_per_row: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    blocks = random_blocks(gguf.GGMLQuantizationType[kind.name], rows * blocks_per_row, 1.0, rng)
    return blocks.reshape(rows, -1)


def test_sizes_agree_with_the_gguf_package() -> None:
    wanted = {int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert {i: (kind.name, kind.block, kind.block_bytes) for i, kind in GGML_TYPES.items()} == wanted


@pytest.mark.parametrize("kind", AFFINE.values(), ids=AFFINE)
def test_dequantized_values_are_exact(kind: GGMLType) -> None:
    raw = _raw(kind, rows=7, blocks_per_row=3)
    affine = decode_blocks(kind, raw)
    wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.name])
    np.testing.assert_array_equal(affine.dequantize(), wanted)
    assert affine.q.shape == wanted.shape
    assert affine.scale.shape == (7, wanted.shape[1] // kind.group)
    assert int(affine.q.max()) < 1 << affine.bits
    assert (affine.bits, affine.group, affine.zero) == (kind.bits, kind.group, kind.zero)
    assert (affine.bias is not None) == kind.has_bias


@pytest.mark.parametrize("kind", AFFINE.values(), ids=AFFINE)
def test_chunks_do_not_show(kind: GGMLType) -> None:
    blocks_per_row = 2
    rows = 2 * CHUNK_BYTES // kind.block_bytes // blocks_per_row + 1
    raw = _raw(kind, rows, blocks_per_row, seed=1)
    whole = decode_blocks(kind, raw)
    tail = decode_blocks(kind, raw[-3:])
    np.testing.assert_array_equal(whole.q[-3:], tail.q)
    np.testing.assert_array_equal(whole.scale[-3:], tail.scale)
    np.testing.assert_array_equal(whole.dequantize(), gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.name]))


@pytest.mark.parametrize("kind", AFFINE.values(), ids=AFFINE)
def test_no_rows_are_no_rows(kind: GGMLType) -> None:
    affine = decode_blocks(kind, np.empty((0, 2 * kind.block_bytes), np.uint8))
    assert affine.q.shape == (0, 2 * kind.block)
