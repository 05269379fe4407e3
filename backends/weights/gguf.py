"""A parser for GGUF files (versions 2 and 3, little-endian), lazy and by mmap.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Opening a file walks its header once and remembers
where each value lies (`gguf_header.py`); values are decoded when somebody asks.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from backends.errors import ModelFileError
from backends.weights.files import map_file, release
from backends.weights.gguf_header import BOOL, SCALARS, STRING, GGUFTensor, Header, Value

_U64 = struct.Struct("<Q")


class Metadata(Mapping[str, Any]):
    """Metadata by key. Scalars come as Python values, numeric arrays as NumPy arrays, string arrays as `list[str]`;
    arrays are decoded at the first access and kept. Raises ModelFileError for text that is not UTF-8."""

    def __init__(self, path: Path, data: np.ndarray, values: dict[str, Value]) -> None:
        self._path = path
        self._data = data
        self._values = values
        self._decoded: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._decoded:
            value = self._values[key]
            try:
                self._decoded[key] = _decode(self._data, value)
            except UnicodeDecodeError as exc:
                raise ModelFileError(
                    f"{self._path}: the metadata '{key}' is not valid UTF-8.", "Download the file again."
                ) from exc
        return self._decoded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def length(self, key: str) -> int:
        """Elements of an array, without decoding it; 1 for anything else. Raises KeyError."""
        count = self._values[key].count
        return 1 if count is None else count


class GGUFFile:
    """One open file. `header_bytes` is where tensor data may begin; views made from `data` outlive `close`."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self._mapping = mapping
        self.data = np.frombuffer(mapping, np.uint8)
        header = Header(path, mapping).read()
        self.version, self.alignment = header.version, header.alignment
        self.header_bytes = header.position
        self.metadata = Metadata(path, self.data, header.values)
        self.tensors = header.tensors

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Raises ModelFileError for a file that is missing or malformed, UnsupportedModelError for one that uses
        tensor types made after this was written."""
        mapping = map_file(path)
        try:
            return cls(path, mapping)
        except BaseException:
            release(mapping)
            raise

    def raw(self, tensor: GGUFTensor) -> np.ndarray:
        """The tensor's bytes, uint8 `[rows, bytes per row]`, a read-only view of the file."""
        rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
        return self.data[tensor.offset : tensor.offset + tensor.num_bytes].reshape(rows, -1)

    def close(self) -> None:
        """Unmap the file, now or when the last view of it is gone."""
        self.data = np.empty(0, np.uint8)
        self.metadata = Metadata(self.path, self.data, {})
        release(self._mapping)

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _decode(data: np.ndarray, value: Value) -> Any:
    raw = data[value.start : value.stop]
    if value.type == STRING:
        texts = _decode_strings(raw.tobytes())
        return texts[0] if value.count is None else texts
    array = raw.copy().view(SCALARS[value.type])
    if value.type == BOOL:
        array = array.astype(bool)
    return array[0].item() if value.count is None else array


def _decode_strings(raw: bytes) -> list[str]:
    texts, position, unpack = [], 0, _U64.unpack_from
    while position < len(raw):
        start = position + 8
        position = start + unpack(raw, position)[0]
        texts.append(raw[start:position].decode())
    return texts
