"""GGUF models as a WeightSource: names, ranges, row order, parts, and what it refuses."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.errors import ModelFileError, UnsupportedModelError
from backends.weights.gguf_source import GGUFSource
from backends.weights.names import tensor_shapes
from backends.weights.source import Affine
from tests.models import random_weights, tiny_arch, write_gguf

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3"]


def _dense(values: Affine | np.ndarray) -> np.ndarray:
    return values.dequantize() if isinstance(values, Affine) else values


def _rewrite(
    source: Path, target: Path, rename: Mapping[str, str | None] | None = None, extra: dict[str, Any] | None = None,
    part: tuple[int, int] | None = None,
) -> Path:  # fmt: skip
    """Copy a GGUF file with tensors renamed (None drops one) or added, or only one part (i of n) of its tensors."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture" and (part is None or part[0] == 0):
            sub_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type)
    if part is not None:
        writer.add_uint16("split.no", part[0])
        writer.add_uint16("split.count", part[1])
    for i, tensor in enumerate(reader.tensors):
        name = (rename or {}).get(tensor.name, tensor.name)
        if name is not None and (part is None or i % part[1] == part[0]):
            writer.add_tensor(name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_comes_back_as_it_was(family: str, tmp_path: Path) -> None:
    arch = tiny_arch(family)
    weights = random_weights(arch)
    source = GGUFSource.open(write_gguf(tmp_path / "x.gguf", arch, "F32", weights=weights))
    assert source.names() == list(tensor_shapes(arch)) == list(weights)
    for name, wanted in weights.items():
        found = source.vector(name) if wanted.ndim == 1 else source.matrix(name)
        np.testing.assert_array_equal(_dense(found), wanted, err_msg=name)
        info = source.info(name)
        assert (info.name, info.shape, info.kind, info.num_bytes) == (name, wanted.shape, "f32", wanted.nbytes)


def test_kinds_say_how_to_read_a_matrix(tmp_path: Path) -> None:
    arch = tiny_arch("qwen2")
    weights = random_weights(arch)
    for quant, dtype in (("F16", np.float16), ("BF16", np.uint16), ("F32", np.float32)):
        source = GGUFSource.open(write_gguf(tmp_path / f"{quant}.gguf", arch, quant, weights=weights))
        matrix = source.matrix("layers.0.gate")
        assert source.info("layers.0.gate").kind == quant.lower()
        assert isinstance(matrix, np.ndarray) and matrix.dtype == dtype
    source = GGUFSource.open(write_gguf(tmp_path / "q.gguf", arch, "Q4_1", weights=weights))
    info = source.info("layers.0.gate")
    assert (info.kind, info.stored_as, info.bits, info.group, info.zero, info.has_bias) == (
        "affine", "Q4_1", 4, 32, 0, True,
    )  # fmt: skip
    assert info.num_bytes == 128 * 64 // 32 * 20


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_ranges_of_rows_are_rows_of_the_whole(
    family: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / f"ranges-{family}.gguf"
    if not path.exists():
        write_gguf(path, tiny_arch(family), "Q5_0")
    source = GGUFSource.open(path)
    name = data.draw(st.sampled_from(["embed", "head", *(f"layers.1.{part}" for part in ("q", "k", "v", "o", "down"))]))
    rows = source.info(name).shape[0]
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    whole, part = source.matrix(name), source.matrix(name, start, stop)
    assert isinstance(whole, Affine) and isinstance(part, Affine)
    np.testing.assert_array_equal(part.q, whole.q[start:stop])
    np.testing.assert_array_equal(part.scale, whole.scale[start:stop])


def test_rows_out_of_range_and_unknown_names_are_refused(tmp_path: Path) -> None:
    source = GGUFSource.open(write_gguf(tmp_path / "x.gguf", tiny_arch("llama")))
    for start, stop in ((0, 65), (-1, 3), (5, 4)):
        with pytest.raises(ModelFileError):
            source.matrix("layers.0.o", start, stop)
    for call in (source.info, source.vector, source.matrix):
        with pytest.raises(ModelFileError, match=r"no tensor 'layers\.3\.q'"):
            call("layers.3.q")
    with pytest.raises(ModelFileError):
        source.matrix("norm")
    assert not source.has("layers.0.q_bias") and source.has("layers.0.q")


def test_missing_tensors_and_wrong_shapes_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", tiny_arch("llama"))
    with pytest.raises(ModelFileError, match=r"no tensor 'blk\.1\.ffn_up\.weight'"):
        GGUFSource.open(_rewrite(path, tmp_path / "missing.gguf", {"blk.1.ffn_up.weight": None}))
    swapped = {"blk.1.ffn_up.weight": "blk.1.ffn_down.weight", "blk.1.ffn_down.weight": "blk.1.ffn_up.weight"}
    with pytest.raises(ModelFileError, match=r"is \[64, 128\], and the metadata says \[128, 64\]"):
        GGUFSource.open(_rewrite(path, tmp_path / "swapped.gguf", swapped))
    with pytest.raises(ModelFileError, match=r"no matrix token_embd\.weight"):
        GGUFSource.open(_rewrite(path, tmp_path / "blind.gguf", {"token_embd.weight": None}))


def test_a_vocabulary_beyond_the_embeddings_is_refused(tmp_path: Path) -> None:
    tokens = {"tokenizer.ggml.tokens": [str(i) for i in range(321)]}
    with pytest.raises(ModelFileError, match="more tokens than embeddings"):
        GGUFSource.open(write_gguf(tmp_path / "x.gguf", tiny_arch("llama"), metadata=tokens))


def test_tensors_that_nothing_would_use_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", tiny_arch("llama"))
    extra = {"blk.0.attn_output.bias": np.zeros(64, np.float32)}
    with pytest.raises(UnsupportedModelError, match=r"attn_output\.bias"):
        GGUFSource.open(_rewrite(path, tmp_path / "extra.gguf", extra=extra))


def test_types_without_a_canonical_form_are_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", tiny_arch("llama"), "Q4_0")
    content = bytearray(path.read_bytes())
    name = b"blk.1.ffn_up.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8
    assert content[at] == gguf.GGMLQuantizationType.Q4_0
    content[at] = gguf.GGMLQuantizationType.IQ4_NL
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=r"'blk\.1\.ffn_up\.weight' is stored as IQ4_NL") as caught:
        GGUFSource.open(path)
    assert "roost[llama]" in caught.value.cure and "Q4_K_M" in caught.value.cure


def test_rotary_factors_reach_the_architecture(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", tiny_arch("llama"))
    factors = np.linspace(1, 8, 16, dtype=np.float32)
    source = GGUFSource.open(_rewrite(path, tmp_path / "scaled.gguf", extra={"rope_freqs.weight": factors}))
    assert source.arch.rope_scaling is not None
    assert source.arch.rope_scaling.kind == "factors"
    assert source.arch.rope_scaling.factors == tuple(factors.tolist())
    for bad in (factors[:-1], -factors, np.full(16, np.nan, np.float32)):
        with pytest.raises(ModelFileError):
            GGUFSource.open(_rewrite(path, tmp_path / "bad.gguf", extra={"rope_freqs.weight": bad}))


def test_parts_are_one_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", tiny_arch("llama"))
    parts = [_rewrite(path, tmp_path / f"m-0000{i + 1}-of-00003.gguf", part=(i, 3)) for i in range(3)]
    whole = GGUFSource.open(path)
    for part in parts:
        source = GGUFSource.open(part)
        assert source.arch == whole.arch
        for name in source.names():
            if len(source.info(name).shape) == 2:
                np.testing.assert_array_equal(_dense(source.matrix(name)), _dense(whole.matrix(name)))
    parts[1].rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(ModelFileError, match="00002-of-00003"):
        GGUFSource.open(parts[0])


def test_parts_under_wrong_names_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", tiny_arch("llama"))
    part = _rewrite(path, tmp_path / "alone.gguf", part=(0, 3))
    with pytest.raises(ModelFileError, match="of 3 by its metadata"):
        GGUFSource.open(part)
    shutil.copy(path, tmp_path / "m-00001-of-00001.gguf")
    assert GGUFSource.open(tmp_path / "m-00001-of-00001.gguf").arch == GGUFSource.open(path).arch
    for number in ("00000", "99999"):
        with pytest.raises(ModelFileError, match="parts"):
            GGUFSource.open(tmp_path / f"m-00001-of-{number}.gguf")


def test_the_hash_is_that_of_the_weights(tmp_path: Path) -> None:
    arch = tiny_arch("llama")
    path = write_gguf(tmp_path / "x.gguf", arch, seed=1)
    shutil.copy(path, tmp_path / "copy.gguf")
    source = GGUFSource.open(path)
    assert source.model_hash == GGUFSource.open(tmp_path / "copy.gguf").model_hash
    assert len(source.model_hash) == 64
    others = [
        write_gguf(tmp_path / "seed.gguf", arch, seed=2),
        write_gguf(tmp_path / "metadata.gguf", arch, seed=1, metadata={"general.name": "Another"}),
        write_gguf(tmp_path / "quant.gguf", arch, "Q4_1", seed=1),
    ]
    changed = bytearray(path.read_bytes())
    changed[source.files[0].tensors["blk.2.ffn_down.weight"].offset] ^= 1
    (tmp_path / "changed.gguf").write_bytes(changed)
    hashes = {GGUFSource.open(other).model_hash for other in (path, *others, tmp_path / "changed.gguf")}
    assert len(hashes) == 5
