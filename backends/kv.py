"""The KV tile: keys and values of one layer for a run of tokens, in the layout that every backend reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class KVTile:
    """Tokens `start` to `stop` and KV heads `head_start` to `head_stop` of one layer (global index).

    keys, values: `[tokens, kv_heads, head_dim]` float16, RoPE applied, half-rotation (NeoX) order. Independent of how
    either side is sharded: a receiver takes the layers and heads that it owns.
    """

    model_hash: str
    layer: int
    start: int
    stop: int
    head_start: int
    head_stop: int
    keys: np.ndarray
    values: np.ndarray
