"""Float formats that NumPy lacks, and conversion to float32."""

from __future__ import annotations

import numpy as np


def bf16_to_float32(bits: np.ndarray) -> np.ndarray:
    """uint16 holding bfloat16, any shape, to float32: bfloat16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def as_float32(values: np.ndarray) -> np.ndarray:
    """A float32 array of its own, from float32, float16 or uint16 holding bfloat16."""
    return bf16_to_float32(values) if values.dtype == np.uint16 else values.astype(np.float32)
