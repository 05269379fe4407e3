"""A cheap fingerprint of tensor contents."""

from __future__ import annotations

from typing import Protocol

import numpy as np

SAMPLE_BYTES = 1024


class Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


def sample_into(digest: Digest, data: np.ndarray) -> None:
    """Feed a digest the first, the middle and the last kilobyte of a tensor's bytes.

    Together with names, shapes, types and sizes this tells apart any two models in practice: other weights differ in
    every tensor. It does not prove that a file is intact; the SHA-256 of a download does.
    """
    middle = max(0, (len(data) - SAMPLE_BYTES) // 2)
    for start in (0, middle, max(0, len(data) - SAMPLE_BYTES)):
        digest.update(data[start : start + SAMPLE_BYTES].tobytes())
