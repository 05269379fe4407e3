"""Frames: what a data link carries. A fixed header of 32 bytes, little-endian, then `meta` and `body`.

    offset  0  2s  magic "Ro"           8  u64  step               24  u32  bytes of meta
            2  u8  kind                16  u32  rows of body        28  u32  reserved, 0
            3  u8  dtype of body       20  u32  columns of body
            4  u32 deployment

`meta` are small fields (see `codec.py`); `body` is one array, whose bytes follow from its shape and dtype. All of it is
checked against bounds before memory is taken for it: a frame comes from another machine.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import numpy as np

from node.errors import RoostError

MAGIC = b"Ro"
HEADER = struct.Struct("<2sBBIQIIII")
HEADER_BYTES = HEADER.size
MAX_META_BYTES = 16 << 20
"""A prompt of a million tokens, as a sequence's history, is 4 MiB."""
MAX_BODY_BYTES = 256 << 20

DTYPES = (None, np.dtype("<f4"), np.dtype("<f2"), np.dtype("<u2"), np.dtype("<i4"), np.dtype("u1"))
"""By their number on the wire; u2 holds bfloat16 bits."""


class Kind(enum.IntEnum):
    BEAT = 1
    """I live. Sent when nothing else was for a while."""
    GOODBYE = 2
    """The last frame: why it ends."""
    STEP = 3
    SAMPLED = 4
    FAILED = 5


class FrameError(RoostError):
    """The other side sent what is no frame. The link is of no further use."""


@dataclass(frozen=True, slots=True)
class Header:
    """`deployment` and `step` mean what the kind says. A body of `rows` × `cols` of `dtype` (None: no body) follows."""

    kind: Kind
    deployment: int = 0
    step: int = 0
    meta_bytes: int = 0
    rows: int = 0
    cols: int = 0
    dtype: np.dtype | None = None

    @property
    def body_bytes(self) -> int:
        return self.rows * self.cols * self.dtype.itemsize if self.dtype is not None else 0

    def pack(self) -> bytes:
        number = DTYPES.index(self.dtype)
        return HEADER.pack(
            MAGIC, self.kind, number, self.deployment, self.step, self.rows, self.cols, self.meta_bytes, 0
        )

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Header:
        """Raises FrameError for anything that `pack` does not make."""
        magic, kind, number, deployment, step, rows, cols, meta_bytes, reserved = HEADER.unpack(data)
        if magic != MAGIC:
            raise FrameError("The other side does not speak Roost's data protocol.", "Check who listens on that port.")
        if reserved or number >= len(DTYPES) or kind not in _KINDS or (number == 0 and (rows or cols)):
            raise FrameError(f"A frame of an unknown kind came ({kind}, {number}).", "Run the same version on both.")
        header = cls(Kind(kind), deployment, step, meta_bytes, rows, cols, DTYPES[number])
        if meta_bytes > MAX_META_BYTES or header.body_bytes > MAX_BODY_BYTES:
            raise FrameError(f"A frame of {meta_bytes + header.body_bytes} bytes came, which is too large.")
        return header


_KINDS = frozenset(Kind)
