"""The GGUF parser: what it reads, and how it refuses what is malformed."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.errors import ModelError, ModelFileError, UnsupportedModelError
from backends.weights import gguf_header
from backends.weights.gguf import GGUFFile
from tests.models import tiny_arch, write_gguf


def _string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _u32(key: str, value: int) -> bytes:
    return _string(key) + struct.pack("<II", 4, value)


def _tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return _string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def _file(
    values: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    values, tensors = values or [], tensors or []
    num_tensors, num_values = counts or (len(tensors), len(values))
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values) + b"".join(values) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


Opener = Callable[[bytes], GGUFFile]


@pytest.fixture
def opened(tmp_path: Path) -> Opener:
    def open_bytes(content: bytes) -> GGUFFile:
        path = tmp_path / "x.gguf"
        path.write_bytes(content)
        return GGUFFile.open(path)

    return open_bytes


def test_every_value_type_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -1)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -2)
    writer.add_int32("i32", -3)
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -4)
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("bool", True)
    writer.add_string("text", "Grüße 🦙")
    writer.add_array("strings", ["a", "", "ü"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("flags", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with GGUFFile.open(tmp_path / "x.gguf") as file:
        found = dict(file.metadata)
    wanted = {
        "u8": 255, "i8": -1, "u16": 65535, "i16": -2, "i32": -3, "u64": 2**64 - 1, "i64": -4, "f32": 0.5, "f64": 0.1,
        "bool": True, "text": "Grüße 🦙", "strings": ["a", "", "ü"],
    }  # fmt: skip
    assert {key: found[key] for key in wanted} == wanted
    assert found["bool"] is True
    assert found["numbers"].tolist() == [1, 2, 3]
    assert found["flags"].dtype == bool and found["flags"].tolist() == [True, False]
    assert found["general.architecture"] == "llama"


def test_arrays_are_decoded_once_and_counted_without_decoding(opened: Opener) -> None:
    array = _string("a") + struct.pack("<IIQ", 9, 8, 2) + _string("x") + _string("y")
    file = opened(_file([array, _u32("b", 7)]))
    assert (file.metadata.length("a"), file.metadata.length("b")) == (2, 1)
    assert file.metadata["a"] is file.metadata["a"]
    assert "c" not in file.metadata
    file.close()


def test_tensors_are_found_row_major(opened: Opener) -> None:
    data = np.arange(6, dtype=np.float32).tobytes()
    file = opened(_file(tensors=[_tensor("m", [3, 2])], data=data))
    tensor = file.tensors["m"]
    assert (tensor.shape, tensor.type.name, tensor.num_bytes) == ((2, 3), "F32", 24)
    assert file.raw(tensor).view(np.float32).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_are_read(opened: Opener, version: int) -> None:
    assert opened(_file([_u32("a", 1)], version=version)).metadata["a"] == 1


def test_alignment_is_honoured(opened: Opener) -> None:
    head = _file([_u32("general.alignment", 64)], [_tensor("m", [2])])
    head = head[: 24 + len(_u32("general.alignment", 64)) + len(_tensor("m", [2]))]
    file = opened(head + bytes(-len(head) % 64) + struct.pack("<2f", 1, 2))
    assert file.tensors["m"].offset % 64 == 0
    assert file.raw(file.tensors["m"]).view(np.float32).tolist() == [[1, 2]]


_F32S = bytes(128)
MALFORMED = {
    "not GGUF": b"MZ" + bytes(60),
    "too short for the magic": b"GG",
    "version 1": _file(version=1),
    "version 4": _file(version=4),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "absurd tensor count": _file(counts=(1 << 60, 0)),
    "absurd metadata count": _file(counts=(0, 1 << 60)),
    "more metadata than bytes": _file([_u32("a", 1)], counts=(0, 1000)),
    "key beyond the end": _file([struct.pack("<Q", 1 << 40)]),
    "key of 2^64 - 1 bytes": _file([struct.pack("<Q", 2**64 - 1)]),
    "key that is not UTF-8": _file([_string(b"\xff\xfe") + struct.pack("<II", 4, 1)]),
    "the same key twice": _file([_u32("a", 1), _u32("a", 2)]),
    "unknown value type": _file([_string("a") + struct.pack("<II", 13, 1)]),
    "string beyond the end": _file([_string("a") + struct.pack("<IQ", 8, 1 << 50)]),
    "string of 2^64 - 1 bytes": _file([_string("a") + struct.pack("<IQ", 8, 2**64 - 1)]),
    "nested array": _file([_string("a") + struct.pack("<IIQIQ", 9, 9, 1, 4, 0)]),
    "array of unknown type": _file([_string("a") + struct.pack("<IIQ", 9, 99, 0)]),
    "array beyond the end": _file([_string("a") + struct.pack("<IIQ", 9, 4, 1 << 61)]),
    "strings beyond the end": _file([_string("a") + struct.pack("<IIQ", 9, 8, 1 << 20)]),
    "too many strings": _file([_string("a") + struct.pack("<IIQ", 9, 8, 1 << 62)]),
    "string in an array beyond the end": _file([_string("a") + struct.pack("<IIQQQ", 9, 8, 2, 2**63, 0)]),
    "alignment 0": _file([_u32("general.alignment", 0)]),
    "alignment 12": _file([_u32("general.alignment", 12)]),
    "alignment 2^31": _file([_u32("general.alignment", 1 << 31)]),
    "alignment as text": _file([_string("general.alignment") + struct.pack("<I", 8) + _string("32")]),
    "no dimensions": _file(tensors=[_tensor("m", [])], data=_F32S),
    "five dimensions": _file(tensors=[_tensor("m", [1] * 5)], data=_F32S),
    "empty dimension": _file(tensors=[_tensor("m", [4, 0])], data=_F32S),
    "size overflows 64 bits": _file(tensors=[_tensor("m", [2**32, 2**32])], data=_F32S),
    "size overflows to something small": _file(tensors=[_tensor("m", [2**62, 2, 2, 2])], data=_F32S),
    "not whole blocks": _file(tensors=[_tensor("m", [33], kind=2)], data=_F32S),
    "not aligned": _file(tensors=[_tensor("m", [2], offset=8)], data=_F32S),
    "data beyond the end": _file(tensors=[_tensor("m", [64])], data=_F32S),
    "offset beyond the end": _file(tensors=[_tensor("m", [2], offset=1 << 62)], data=_F32S),
    "overlapping tensors": _file(tensors=[_tensor("m", [16]), _tensor("n", [2], offset=32)], data=_F32S),
    "the same bytes twice": _file(tensors=[_tensor("m", [2]), _tensor("n", [2])], data=_F32S),
    "the same name twice": _file(tensors=[_tensor("m", [2]), _tensor("m", [2], offset=32)], data=_F32S),
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
def test_malformed_files_are_refused(opened: Opener, content: bytes) -> None:
    with pytest.raises(ModelFileError) as caught:
        opened(content)
    assert caught.value.cure


def test_type_numbers_of_the_future_are_refused_by_name(opened: Opener) -> None:
    with pytest.raises(UnsupportedModelError, match="'m' has the type number 77"):
        opened(_file(tensors=[_tensor("m", [32], kind=77)], data=_F32S))


def test_the_number_of_strings_is_bounded_over_all_arrays(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "MAX_STRINGS", 3)
    two = struct.pack("<IIQ", 9, 8, 2) + _string("x") + _string("y")
    with pytest.raises(ModelFileError, match="'b' declares 2 strings"):
        opened(_file([_string("a") + two, _string("b") + two]))


def test_text_that_is_not_utf8_is_refused_when_asked_for(opened: Opener) -> None:
    file = opened(_file([_string("a") + struct.pack("<I", 8) + _string(b"\xff"), _u32("b", 1)]))
    assert file.metadata["b"] == 1
    with pytest.raises(ModelFileError, match="'a' is not valid UTF-8"):
        file.metadata["a"]


def test_missing_and_empty_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    for name in ("absent.gguf", "empty.gguf", "."):
        with pytest.raises(ModelFileError):
            GGUFFile.open(tmp_path / name)


def test_views_outlive_the_file(opened: Opener) -> None:
    file = opened(_file(tensors=[_tensor("m", [2])], data=struct.pack("<2f", 1, 2)))
    view = file.raw(file.tensors["m"]).view(np.float32)
    file.close()
    assert view.tolist() == [[1, 2]]


def _small_model(folder: Path) -> bytes:
    arch = tiny_arch("llama", num_layers=1, d_model=32, d_ff=32, head_dim=32, vocab_size=270)
    return write_gguf(folder / "small.gguf", arch).read_bytes()


def test_every_truncation_of_the_header_is_refused(tmp_path: Path) -> None:
    arch = tiny_arch("llama", num_layers=1, d_model=32, d_ff=32, head_dim=32, vocab_size=32)
    content = write_gguf(tmp_path / "small.gguf", arch, tokenizer=False).read_bytes()
    with GGUFFile.open(tmp_path / "small.gguf") as file:
        header_bytes = file.header_bytes
    assert header_bytes > 1000
    path = tmp_path / "cut.gguf"
    for length in (*range(header_bytes + 1), len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ModelFileError):
            GGUFFile.open(path)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_corrupted_headers_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.getbasetemp()
    original = folder / "small.gguf"
    content = bytearray(original.read_bytes() if original.exists() else _small_model(folder))
    header = 24 + data.draw(st.integers(0, 8000))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, header))
        patch = data.draw(st.binary(min_size=1, max_size=8))
        content[position : position + len(patch)] = patch
    path = folder / "corrupt.gguf"
    path.write_bytes(content)
    try:
        with GGUFFile.open(path) as file:
            for key in file.metadata:
                file.metadata[key]
            for tensor in file.tensors.values():
                assert file.raw(tensor).nbytes == tensor.num_bytes
    except ModelError as error:
        assert error.cure
