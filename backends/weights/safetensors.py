"""A parser for safetensors files, by mmap. The file is not trusted: nothing outside it is ever read.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from backends.errors import ModelFileError, UnsupportedModelError
from backends.weights.files import map_file, parse_json, release

MAX_HEADER_BYTES = 16 << 20
_MAX_DIMENSIONS = 8
_ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """`offset` is absolute; `dtype` is the file's own name for it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class SafetensorsFile:
    """One open file. Views made from `data` outlive `close`."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self._mapping = mapping
        self.data = np.frombuffer(mapping, np.uint8)
        length = int.from_bytes(mapping[:8], "little")
        if len(mapping) < 8 or length > min(MAX_HEADER_BYTES, len(mapping) - 8):
            raise self._malformed("its header does not fit")
        self.header_bytes = 8 + length
        header = parse_json(mapping[8 : self.header_bytes], path)
        header.pop("__metadata__", None)
        self.tensors = {name: self._tensor(name, entry) for name, entry in header.items()}
        end = self.header_bytes
        for tensor in sorted(self.tensors.values(), key=lambda tensor: (tensor.offset, tensor.num_bytes)):
            if tensor.offset < end:
                raise self._malformed(f"the tensor '{tensor.name}' overlaps another one")
            end = tensor.offset + tensor.num_bytes

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """Raises ModelFileError for a file that is missing or malformed."""
        mapping = map_file(path)
        try:
            return cls(path, mapping)
        except BaseException:
            release(mapping)
            raise

    def raw(self, tensor: SafeTensor) -> np.ndarray:
        """The tensor's bytes, uint8, a read-only view of the file."""
        return self.data[tensor.offset : tensor.offset + tensor.num_bytes]

    def close(self) -> None:
        """Unmap the file, now or when the last view of it is gone."""
        self.data = np.empty(0, np.uint8)
        release(self._mapping)

    def _tensor(self, name: str, entry: object) -> SafeTensor:
        match entry:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)]}:
                pass
            case _:
                raise self._malformed(f"the entry of '{name}' is not one of a tensor")
        if len(shape) > _MAX_DIMENSIONS or not all(type(size) is int and size >= 0 for size in shape):
            raise self._malformed(f"the tensor '{name}' has an impossible shape")
        if dtype not in _ITEM_BYTES:
            raise UnsupportedModelError(
                f"{self.path}: the tensor '{name}' has the type '{dtype[:20]}', which is not known here.",
                "Use the model in BF16, F16 or F32, or its GGUF file.",
            )
        if not 0 <= start <= stop <= len(self.data) - self.header_bytes:
            raise ModelFileError(
                f"{self.path} is truncated: the tensor '{name}' goes beyond its end.", "Download the file again."
            )
        if prod(shape) * _ITEM_BYTES[dtype] != stop - start:
            raise self._malformed(f"the size of '{name}' is not that of its shape")
        return SafeTensor(name, dtype, tuple(shape), self.header_bytes + start, stop - start)

    def _malformed(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path} is malformed: {what}.", "Download the file again from a source you trust.")
