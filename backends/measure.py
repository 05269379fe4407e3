"""Measures a device by running its own kernels."""

from __future__ import annotations

import numpy as np

from backends.cpu.library import address, kernels


def read_bandwidth(num_threads: int, *, num_bytes: int = 512 << 20, repeats: int = 5) -> list[float]:
    """Bytes per second of each of `repeats` sequential reads of `num_bytes` by `num_threads` threads.

    The buffer is far larger than any cache; the roof over every decode figure is the median.
    """
    seconds = np.empty(repeats, np.float64)
    if kernels().roost_measure_read(num_threads, num_bytes, repeats, address(seconds)):
        raise MemoryError(f"{num_bytes} bytes")
    return [num_bytes / s for s in seconds]
