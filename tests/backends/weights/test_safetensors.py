"""The safetensors parser: what it reads, and how it refuses what is malformed."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.errors import ModelError, ModelFileError, UnsupportedModelError
from backends.weights.safetensors import MAX_HEADER_BYTES, SafetensorsFile


def _entry(shape: list[Any], start: Any, stop: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def _file(header: object, data: bytes = bytes(64), length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def _open(folder: Path, content: bytes) -> SafetensorsFile:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    return SafetensorsFile.open(path)


def test_files_of_the_reference_writer_are_read(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(4, dtype=np.float16),
        "c": np.arange(5, dtype=np.uint8),
        "d": np.empty((0, 3), np.int64),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile.open(tmp_path / "x.safetensors")
    assert set(file.tensors) == set(arrays)
    for name, array in arrays.items():
        tensor = file.tensors[name]
        assert (tensor.shape, tensor.num_bytes) == (array.shape, array.nbytes)
        assert file.raw(tensor).tobytes() == array.tobytes()
    assert [file.tensors[name].dtype for name in "abcd"] == ["F32", "F16", "U8", "I64"]
    view = file.raw(file.tensors["b"])
    file.close()
    assert view.tobytes() == arrays["b"].tobytes()


MALFORMED = {
    "shorter than its length field": b"\x02\x00",
    "header beyond the end": _file({}, b"", length=100),
    "header of 2^64 - 1 bytes": _file({}, length=2**64 - 1),
    "not JSON": _file(b"{nothing"),
    "not UTF-8": _file(b'{"\xff": 1}'),
    "not an object": _file([1, 2]),
    "nested a million times": _file(b'{"a":' + b"[" * 1_000_000),
    "a number of ten thousand digits": _file(b'{"a":' + b"9" * 10_000 + b"}"),
    "the same name twice": _file(b'{"a": {}, "a": {}}'),
    "entry that is no object": _file({"a": 3}),
    "no offsets": _file({"a": {"dtype": "F32", "shape": [1]}}),
    "three offsets": _file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}),
    "offsets as text": _file({"a": _entry([1], "0", "4")}),
    "dtype as number": _file({"a": _entry([1], 0, 4, dtype=3)}),
    "offsets backwards": _file({"a": _entry([1], 8, 4)}),
    "negative offset": _file({"a": _entry([1], -4, 0)}),
    "data beyond the end": _file({"a": _entry([17], 0, 68)}),
    "negative dimension": _file({"a": _entry([-1, -1], 0, 4)}),
    "dimension as float": _file({"a": _entry([1.0], 0, 4)}),
    "dimension as boolean": _file({"a": _entry([True], 0, 4)}),
    "size of another shape": _file({"a": _entry([2], 0, 4)}),
    "huge shape": _file({"a": _entry([2**62, 2**62], 0, 4)}),
    "too many dimensions": _file({"a": _entry([1] * 9, 0, 4)}),
    "overlap": _file({"a": _entry([4], 0, 16), "b": _entry([4], 12, 28)}),
    "the same bytes twice": _file({"a": _entry([4], 0, 16), "b": _entry([4], 0, 16)}),
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
def test_malformed_files_are_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ModelFileError) as caught:
        _open(tmp_path, content)
    assert caught.value.cure and len(caught.value.message) < 1000


def test_headers_are_bounded(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="header does not fit"):
        _open(tmp_path, _file(b" " * (MAX_HEADER_BYTES + 1)))


def test_types_of_the_future_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="'a' has the type 'F4_NEW'"):
        _open(tmp_path, _file({"a": _entry([1], 0, 4, dtype="F4_NEW")}))


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_corrupted_headers_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    header = {"a": _entry([2, 2], 0, 16), "b": _entry([8], 16, 32, "F16"), "__metadata__": {"format": "pt"}}
    content = bytearray(_file(header))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(content) - 1))
        patch = data.draw(st.binary(min_size=1, max_size=4))
        content[position : position + len(patch)] = patch
    del content[data.draw(st.integers(len(content) // 2, len(content))) :]
    try:
        file = _open(tmp_path_factory.getbasetemp(), bytes(content))
    except ModelError as error:
        assert error.cure
        return
    for tensor in file.tensors.values():
        assert len(file.raw(tensor)) == tensor.num_bytes
    file.close()
