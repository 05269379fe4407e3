"""One walk over the header of a GGUF file that is not trusted.

Every count and length is checked against the bytes that are there before anything is allocated or looped over.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from backends.errors import ModelFileError, UnsupportedModelError
from backends.weights.ggml_types import GGML_TYPES, GGMLType

MAGIC = b"GGUF"
MAX_ENTRIES = 1 << 17
"""Metadata entries, and tensors, that one file may declare."""
MAX_STRINGS = 1 << 23
"""Elements of string arrays in one file; the largest vocabularies with their merges have about a tenth of this."""
MAX_NAME_BYTES = 1 << 16
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
BOOL, STRING, _ARRAY = 7, 8, 9
SCALARS = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """`shape` is row-major, the reverse of how the file lists it: a matrix is `(rows, cols)`. `offset` is absolute."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Value:
    """Which bytes hold a metadata value. For arrays, `type` is that of the elements and `count` their number."""

    type: int
    start: int
    stop: int
    count: int | None


class Header:
    """One walk over the header of a file. `position` is the next byte to read."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path, self.mapping = path, mapping
        self.size = len(mapping)
        self.position = 0
        self.strings_left = MAX_STRINGS
        self.version = 0
        self.alignment = 32
        self.values: dict[str, Value] = {}
        self.tensors: dict[str, GGUFTensor] = {}

    def read(self) -> Header:
        if self.mapping[:4] != MAGIC:
            raise ModelFileError(
                f"{self.path} is not a GGUF file.", "Give a .gguf file or a Hugging Face model folder."
            )
        self.position = 4
        self.version = self._u32()
        if self.version & 0xFFFF == 0:
            raise ModelFileError(f"{self.path} is a big-endian GGUF file.", "Use the usual little-endian file.")
        if self.version not in (2, 3):
            raise ModelFileError(
                f"{self.path} is GGUF version {self.version}; versions 2 and 3 are read.", "Use a newer conversion."
            )
        num_tensors, num_values = self._count("tensors"), self._count("metadata entries")
        for _ in range(num_values):
            self._metadata_entry()
        self._read_alignment()
        infos = [self._tensor_info() for _ in range(num_tensors)]
        self._place(infos)
        return self

    def _metadata_entry(self) -> None:
        key = self._name("metadata key")
        if key in self.values:
            raise self._malformed(f"the metadata key '{key}' appears twice")
        kind, count = self._u32(), None
        if kind == _ARRAY:
            kind, count = self._u32(), self._u64()
        start = self.position
        self._skip(kind, 1 if count is None else count, key)
        self.values[key] = Value(kind, start, self.position, count)

    def _skip(self, kind: int, count: int, key: str) -> None:
        if kind == STRING:
            if count > self.strings_left:
                raise self._malformed(f"'{key}' declares {count} strings")
            self.strings_left -= count
            self._skip_strings(count)
        elif kind in SCALARS:
            self._need(SCALARS[kind].itemsize * count)
            self.position += SCALARS[kind].itemsize * count
        else:
            raise self._malformed(f"'{key}' has the value type {kind}" + (", a nested array" if kind == _ARRAY else ""))

    def _skip_strings(self, count: int) -> None:
        # The hot loop of opening: vocabularies and merges are hundreds of thousands of strings.
        buffer, position, unpack = self.mapping, self.position, _U64.unpack_from
        self._need(8 * count)
        try:
            for _ in range(count):
                position += 8 + unpack(buffer, position)[0]
        except (struct.error, OverflowError) as exc:
            raise self._malformed("a string goes beyond the end of the file") from exc
        if position > self.size:
            raise self._malformed("a string goes beyond the end of the file")
        self.position = position

    def _read_alignment(self) -> None:
        value = self.values.get("general.alignment")
        if value is None:
            return
        if value.type != 4 or value.count is not None:
            raise self._malformed("general.alignment is not a 32-bit number")
        self.alignment = _U32.unpack_from(self.mapping, value.start)[0]
        if not 8 <= self.alignment <= MAX_ALIGNMENT or self.alignment & (self.alignment - 1):
            raise self._malformed(f"general.alignment is {self.alignment}")

    def _tensor_info(self) -> GGUFTensor:
        """`offset` is still relative to the data section."""
        name = self._name("tensor name")
        num_dimensions = self._u32()
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._malformed(f"the tensor '{name}' has {num_dimensions} dimensions")
        shape = tuple(reversed([self._u64() for _ in range(num_dimensions)]))
        type_id, offset = self._u32(), self._u64()
        if 0 in shape:
            raise self._malformed(f"the tensor '{name}' has an empty dimension")
        if type_id not in GGML_TYPES:
            raise UnsupportedModelError(
                f"{self.path}: the tensor '{name}' has the type number {type_id}, which is not known here.",
                "Use another quantization, for example Q4_K_M or Q8_0.",
            )
        kind = GGML_TYPES[type_id]
        if shape[-1] % kind.block:
            raise self._malformed(f"rows of '{name}' are not whole {kind.name} blocks")
        num_weights = 1
        for dimension in shape:
            num_weights *= dimension
        return GGUFTensor(name, shape, kind, offset, num_weights // kind.block * kind.block_bytes)

    def _place(self, infos: list[GGUFTensor]) -> None:
        base = -(-self.position // self.alignment) * self.alignment
        end, previous = base, ""
        for info in sorted(infos, key=lambda info: info.offset):
            start = base + info.offset
            if info.offset % self.alignment:
                raise self._malformed(f"the tensor '{info.name}' is not aligned")
            if start + info.num_bytes > self.size:
                raise ModelFileError(
                    f"{self.path} is truncated: the tensor '{info.name}' ends at byte {start + info.num_bytes}, "
                    f"the file at {self.size}.",
                    "Download the file again.",
                )
            if start < end:
                raise self._malformed(f"the tensors '{previous}' and '{info.name}' overlap")
            end, previous = start + info.num_bytes, info.name
        for info in infos:
            if info.name in self.tensors:
                raise self._malformed(f"the tensor '{info.name}' appears twice")
            self.tensors[info.name] = GGUFTensor(info.name, info.shape, info.type, base + info.offset, info.num_bytes)

    def _name(self, what: str) -> str:
        length = self._u64()
        if length > MAX_NAME_BYTES:
            raise self._malformed(f"a {what} is {length} bytes long")
        self._need(length)
        raw = self.mapping[self.position : self.position + length]
        self.position += length
        try:
            return raw.decode()
        except UnicodeDecodeError as exc:
            raise self._malformed(f"a {what} is not valid UTF-8") from exc

    def _count(self, what: str) -> int:
        count = self._u64()
        if count > MAX_ENTRIES:
            raise self._malformed(f"it declares {count} {what}")
        return count

    def _u32(self) -> int:
        self._need(4)
        self.position += 4
        return _U32.unpack_from(self.mapping, self.position - 4)[0]

    def _u64(self) -> int:
        self._need(8)
        self.position += 8
        return _U64.unpack_from(self.mapping, self.position - 8)[0]

    def _need(self, num_bytes: int) -> None:
        if num_bytes > self.size - self.position:
            raise ModelFileError(
                f"{self.path} is truncated: its header goes beyond the end of the file.", "Download the file again."
            )

    def _malformed(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path} is malformed: {what}.", "Download the file again from a source you trust.")
