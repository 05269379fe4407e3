"""Hugging Face and MLX folders as a WeightSource."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from backends.arch import Architecture
from backends.errors import ModelFileError, UnsupportedModelError
from backends.weights.affine import unpack_bits
from backends.weights.floats import as_float32
from backends.weights.safetensors_source import SafetensorsSource
from backends.weights.source import Affine
from tests.hf_models import write_safetensors_model
from tests.models import random_weights, tiny_arch

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3"]


def _edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def _edit_weights(folder: Path, edit: Callable[[dict[str, np.ndarray]], None]) -> None:
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    edit(weights)
    safetensors.numpy.save_file(weights, folder / "model.safetensors")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders as transformers writes them, one per family."""
    folder = tmp_path_factory.mktemp("saved")
    for family in ("llama", "gemma3"):
        arch = tiny_arch(family)
        write_safetensors_model(folder / family, arch, random_weights(arch))
    return lambda family: folder / family


@pytest.fixture
def llama(saved: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(saved("llama"), tmp_path / "llama"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tensor_comes_back_as_it_was(family: str, dtype: str, tmp_path: Path) -> None:
    arch = tiny_arch(family)
    weights = random_weights(arch)
    source = SafetensorsSource.open(write_safetensors_model(tmp_path, arch, weights, dtype))
    assert source.arch == arch
    assert source.names() == list(weights)
    kind = "f32" if dtype == "float32" else "bf16"
    tolerance = 1e-6 if dtype == "float32" else 2**-7
    for name, wanted in weights.items():
        found = source.vector(name) if wanted.ndim == 1 else source.matrix(name)
        assert isinstance(found, np.ndarray)
        np.testing.assert_allclose(as_float32(found), wanted, rtol=tolerance, atol=tolerance, err_msg=name)
        assert (source.info(name).shape, source.info(name).kind) == (wanted.shape, kind)


def test_several_files_are_one_model(saved: Callable[[str], Path], tmp_path: Path) -> None:
    arch = tiny_arch("llama")
    folder = write_safetensors_model(tmp_path / "many", arch, random_weights(arch), max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    one, many = SafetensorsSource.open(saved("llama")), SafetensorsSource.open(folder)
    for name in one.names():
        if one.arch and len(one.info(name).shape) == 2:
            np.testing.assert_array_equal(many.matrix(name, 3, 17), one.matrix(name, 3, 17))
    sorted(folder.glob("*.safetensors"))[1].unlink()
    with pytest.raises(ModelFileError, match="cannot be read: No such file"):
        SafetensorsSource.open(folder)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b.safetensors"])
def test_an_index_cannot_lead_elsewhere(name: str, llama: Path) -> None:
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ModelFileError):
        SafetensorsSource.open(llama)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_a_malformed_index_is_refused(index: str, llama: Path) -> None:
    (llama / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelFileError, match=r"index\.json"):
        SafetensorsSource.open(llama)


def test_a_folder_of_other_weights_is_refused(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match=r"no \.safetensors files") as caught:
        SafetensorsSource.open(llama)
    assert "Convert" in caught.value.cure


def test_missing_tensors_and_wrong_shapes_are_refused(llama: Path) -> None:
    _edit_config(llama, intermediate_size=96)
    with pytest.raises(ModelFileError, match=r"is \[128, 64\], and config\.json says \[96, 64\]"):
        SafetensorsSource.open(llama)
    _edit_config(llama, intermediate_size=128, num_hidden_layers=4)
    with pytest.raises(ModelFileError, match=r"no tensor 'model\.layers\.3\.input_layernorm\.weight'"):
        SafetensorsSource.open(llama)
    _edit_config(llama, num_hidden_layers=2)
    with pytest.raises(UnsupportedModelError, match=r"such as 'model\.layers\.2\."):
        SafetensorsSource.open(llama)


def test_types_without_a_canonical_form_are_refused_by_name(llama: Path) -> None:
    def spoil(weights: dict[str, np.ndarray]) -> None:
        weights["model.layers.0.mlp.up_proj.weight"] = np.zeros((128, 64), np.int8)

    _edit_weights(llama, spoil)
    with pytest.raises(UnsupportedModelError, match=r"'model\.layers\.0\.mlp\.up_proj\.weight' is stored as I8"):
        SafetensorsSource.open(llama)


def test_tied_models_may_carry_a_copy_of_the_head(llama: Path) -> None:
    _edit_config(llama, tie_word_embeddings=True)
    source = SafetensorsSource.open(llama)
    assert not source.has("head")


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma3_inside_a_multimodal_model(saved: Callable[[str], Path], tmp_path: Path, prefix: str) -> None:
    folder = Path(shutil.copytree(saved("gemma3"), tmp_path / "multimodal"))
    text = json.loads((folder / "config.json").read_text())
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 8}}
    (folder / "config.json").write_text(json.dumps(config))

    def rename(weights: dict[str, np.ndarray]) -> None:
        for name in list(weights):
            weights[prefix + name.removeprefix("model.")] = weights.pop(name)
        weights["vision_tower.embed.weight"] = np.zeros(3, np.float32)

    _edit_weights(folder, rename)
    plain, found = SafetensorsSource.open(saved("gemma3")), SafetensorsSource.open(folder)
    assert found.arch == plain.arch
    np.testing.assert_array_equal(found.matrix("layers.2.q"), plain.matrix("layers.2.q"))
    np.testing.assert_array_equal(found.vector("layers.2.q_norm"), plain.vector("layers.2.q_norm"))


def test_unaligned_tensors_come_back_aligned(llama: Path) -> None:
    path = llama / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    path.write_bytes((length + 3).to_bytes(8, "little") + content[8 : 8 + length] + b"   " + content[8 + length :])
    matrix = SafetensorsSource.open(llama).matrix("layers.0.q")
    assert isinstance(matrix, np.ndarray) and matrix.flags.aligned
    np.testing.assert_allclose(matrix, random_weights(tiny_arch("llama"))["layers.0.q"], rtol=1e-6)


def test_the_hash_is_that_of_the_weights(saved: Callable[[str], Path], llama: Path) -> None:
    original = SafetensorsSource.open(saved("llama")).model_hash
    assert SafetensorsSource.open(llama).model_hash == original
    _edit_config(llama, rope_theta=5.0, rope_parameters=None)
    changed_config = SafetensorsSource.open(llama).model_hash
    _edit_weights(llama, lambda weights: weights["model.layers.1.mlp.down_proj.weight"].__setitem__((0, 0), 9.0))
    assert len({original, changed_config, SafetensorsSource.open(llama).model_hash}) == 3


def _mlx_quantize(values: np.ndarray, bits: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed uint32, scales and biases: little-endian bit streams, as `mlx.core.quantize` lays them out."""
    grouped = values.reshape(len(values), -1, group)
    biases = grouped.min(axis=-1)
    scales = (grouped.max(axis=-1) - biases) / ((1 << bits) - 1)
    codes = np.rint((grouped - biases[..., None]) / scales[..., None]).astype(np.uint8).reshape(values.shape)
    stream = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits].reshape(len(values), -1)
    packed = np.packbits(stream, axis=1, bitorder="little").view(np.uint32)
    return packed, scales.astype(np.float16), biases.astype(np.float16)


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_bits_are_unpacked_in_order(bits: int) -> None:
    codes = np.random.default_rng(0).integers(0, 1 << bits, (3, 64)).astype(np.uint8)
    stream = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits].reshape(3, -1)
    np.testing.assert_array_equal(unpack_bits(np.packbits(stream, axis=1, bitorder="little"), bits), codes)


def _quantize_folder(folder: Path, arch: Architecture, bits: int, group: int) -> dict[str, np.ndarray]:
    """Quantize every matrix of a folder in place; returns what each dequantizes to, by MLX's definition."""
    dense: dict[str, np.ndarray] = {}

    def quantize(weights: dict[str, np.ndarray]) -> None:
        for name in [name for name, values in weights.items() if values.ndim == 2]:
            values = weights.pop(name)
            base = name.removesuffix("weight")
            packed, scales, biases = _mlx_quantize(values, bits, group)
            weights |= {name: packed, f"{base}scales": scales, f"{base}biases": biases}
            codes = unpack_bits(packed.view(np.uint8), bits).reshape(len(values), -1, group).astype(np.float32)
            restored = scales.astype(np.float32)[..., None] * codes + biases.astype(np.float32)[..., None]
            assert np.abs(restored.reshape(values.shape) - values).max() < 0.25
            dense[name] = restored.reshape(values.shape)

    _edit_weights(folder, quantize)
    mlx = {"group_size": group, "bits": bits}
    _edit_config(folder, quantization=mlx, quantization_config=mlx)
    return dense


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (4, 32), (5, 64), (6, 32), (8, 64)])
def test_mlx_models_are_affine(bits: int, group: int, llama: Path) -> None:
    dense = _quantize_folder(llama, tiny_arch("llama"), bits, group)
    source = SafetensorsSource.open(llama)
    whole = source.matrix("layers.1.down")
    assert isinstance(whole, Affine)
    np.testing.assert_array_equal(whole.dequantize(), dense["model.layers.1.mlp.down_proj.weight"])
    part = source.matrix("embed", 7, 9)
    assert isinstance(part, Affine)
    np.testing.assert_array_equal(part.dequantize(), dense["model.embed_tokens.weight"][7:9])
    info = source.info("embed")
    assert (info.kind, info.bits, info.group, info.zero, info.has_bias, info.shape) == (
        "affine", bits, 32, 0, True, (320, 64),
    )  # fmt: skip
    assert info.num_bytes == 320 * (64 * bits // 8 + 2 * 2 * 64 // group)


def test_mlx_layouts_that_do_not_fit_are_refused(llama: Path) -> None:
    _quantize_folder(llama, tiny_arch("llama"), 4, 64)
    spoiled = llama.with_name("spoiled")

    def refused(change: Callable[[dict[str, np.ndarray]], None], error: type[Exception]) -> None:
        shutil.rmtree(spoiled, ignore_errors=True)
        shutil.copytree(llama, spoiled)
        _edit_weights(spoiled, change)
        with pytest.raises(error):
            SafetensorsSource.open(spoiled)

    base = "model.layers.0.mlp.up_proj."
    packed, scales = np.zeros((128, 8), np.uint32), np.ones((128, 1), np.float16)
    refused(lambda w: w.update({f"{base}weight": packed[:, :4]}), UnsupportedModelError)
    refused(lambda w: w.update({f"{base}weight": packed[:64]}), ModelFileError)
    refused(lambda w: w.update({f"{base}weight": packed.astype(np.float32)}), ModelFileError)
    refused(lambda w: w.update({f"{base}scales": scales[:64]}), ModelFileError)
    refused(lambda w: w.update({f"{base}scales": scales[:, :0]}), ModelFileError)
    refused(lambda w: w.update({f"{base}biases": scales.astype(np.int8)}), UnsupportedModelError)
    refused(lambda w: (w.pop(f"{base}biases"), None)[1], ModelFileError)


def test_mlx_modes_other_than_affine_are_refused(llama: Path) -> None:
    _edit_config(llama, quantization={"group_size": 32, "bits": 4, "mode": "mxfp4"})
    with pytest.raises(UnsupportedModelError, match="mxfp4"):
        SafetensorsSource.open(llama)


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8"])
def test_other_quantizations_are_refused_by_name(method: str, llama: Path) -> None:
    _edit_config(llama, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(UnsupportedModelError, match=method) as caught:
        SafetensorsSource.open(llama)
    assert "GGUF" in caught.value.cure
