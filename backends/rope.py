"""Rotary position embedding: the frequencies of a layer, scaled as its architecture says.

Definitions: transformers' `modeling_rope_utils` (linear, llama3) and https://arxiv.org/abs/2309.00071 (yarn).
"""

from __future__ import annotations

import math

import numpy as np

from backends.arch import Architecture, RopeScaling


def inverse_frequencies(arch: Architecture, layer: int) -> tuple[np.ndarray, float]:
    """Radians per position of each rotary pair, float32 `[head_dim / 2]`, and the factor on cosine and sine.

    Pair i is dimensions i and `i + head_dim / 2` (NeoX order) of layer `layer` (global index).
    """
    theta = arch.rope_thetas[layer]
    frequencies = theta ** -(np.arange(0, arch.head_dim, 2, dtype=np.float64) / arch.head_dim)
    scaling = arch.rope_scaling
    if scaling is None or not arch.rope_scaled[layer]:
        return frequencies.astype(np.float32), 1.0
    if scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling.kind == "factors":
        frequencies = frequencies / np.asarray(scaling.factors, np.float64)
    elif scaling.kind == "llama3":
        frequencies = _llama3(frequencies, scaling)
    else:
        frequencies = _yarn(frequencies, scaling, theta)
    return frequencies.astype(np.float32), scaling.attention_factor


def _llama3(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Short wavelengths stay, long ones are divided by the factor, those between are blended."""
    turns = scaling.original_context * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def _yarn(frequencies: np.ndarray, scaling: RopeScaling, theta: float) -> np.ndarray:
    dims = 2 * len(frequencies)

    def dimension_of(turns: float) -> float:
        return dims * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    interpolated = np.clip((np.arange(len(frequencies)) - low) / (high - low), 0.0, 1.0)
    return frequencies * (1 - interpolated + interpolated / scaling.factor)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """The paper's `0.1 ln(s) + 1`, with the multiplier that some configurations add."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
