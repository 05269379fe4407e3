"""The ggml tensor types: their ids, their block sizes, and which of them have a canonical form.

Source: `ggml.h` (ids) and `ggml-common.h` (blocks) of the ggml project.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GGMLType:
    """`block` weights are stored in `block_bytes` bytes. `kind` is "affine", "f32", "f16" or "bf16", or "" when there
    is no canonical form; `bits`, `group`, `zero` and `has_bias` are those of `Affine`."""

    name: str
    block: int
    block_bytes: int
    kind: str = ""
    bits: int = 0
    group: int = 0
    zero: int = 0
    has_bias: bool = False


def _affine(name: str, block: int, block_bytes: int, bits: int, group: int, zero: int, has_bias: bool) -> GGMLType:
    return GGMLType(name, block, block_bytes, "affine", bits, group, zero, has_bias)


GGML_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4, "f32"),
    1: GGMLType("F16", 1, 2, "f16"),
    2: _affine("Q4_0", 32, 18, bits=4, group=32, zero=8, has_bias=False),
    3: _affine("Q4_1", 32, 20, bits=4, group=32, zero=0, has_bias=True),
    6: _affine("Q5_0", 32, 22, bits=5, group=32, zero=16, has_bias=False),
    7: _affine("Q5_1", 32, 24, bits=5, group=32, zero=0, has_bias=True),
    8: _affine("Q8_0", 32, 34, bits=8, group=32, zero=128, has_bias=False),
    9: GGMLType("Q8_1", 32, 40),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: _affine("Q4_K", 256, 144, bits=4, group=32, zero=0, has_bias=True),
    13: _affine("Q5_K", 256, 176, bits=5, group=32, zero=0, has_bias=True),
    14: _affine("Q6_K", 256, 210, bits=6, group=16, zero=32, has_bias=False),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2, "bf16"),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
    41: GGMLType("Q1_0", 128, 18),
}
