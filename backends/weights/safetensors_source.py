"""Weights of a Hugging Face or MLX model folder (`config.json` and `.safetensors` files) as a `WeightSource`."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from backends.arch import Architecture
from backends.errors import ModelFileError, UnsupportedModelError
from backends.weights.affine import GROUP, from_mlx
from backends.weights.files import read_json
from backends.weights.floats import as_float32
from backends.weights.hf_config import hf_architecture
from backends.weights.names import hf_name, tensor_shapes
from backends.weights.safetensors import SafeTensor, SafetensorsFile
from backends.weights.sampling import sample_into
from backends.weights.source import Affine, TensorInfo

_TEXT_PREFIXES = ("model.", "language_model.model.", "model.language_model.")
_OTHER_MODALITIES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
# Copies of tied embeddings, and frequencies that old files carry along.
_NOT_NEEDED = ("lm_head.weight", "lm_head.scales", "lm_head.biases", "rotary_emb.inv_freq")
INDEX = "model.safetensors.index.json"
_MAX_FILES = 1000
_FLOATS = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_CURE = "Download or convert the model again."


@dataclass(frozen=True, slots=True)
class _Located:
    file: SafetensorsFile
    tensor: SafeTensor

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Bytes of rows of a matrix, uint8 `[rows, bytes per row]`."""
        return self.file.raw(self.tensor).reshape(self.tensor.shape[0], -1)[start:stop]

    def floats(self, start: int, stop: int) -> np.ndarray:
        # The format does not promise alignment, and kernels want it.
        return np.require(self.rows(start, stop).view(_FLOATS[self.tensor.dtype]), requirements="A")


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a canonical tensor lies. `scales` and `biases` are those of an MLX-quantized matrix of `bits` bits with
    `group` weights a group."""

    weight: _Located
    shape: tuple[int, ...]
    scales: _Located | None = None
    biases: _Located | None = None
    bits: int = 0
    group: int = 0


class SafetensorsSource:
    """`config` is the folder's `config.json`, `files` its open weight files."""

    def __init__(self, path: Path, config: dict[str, Any], files: list[SafetensorsFile]) -> None:
        """Raises ModelFileError when tensors are missing or of other shapes than the configuration says,
        UnsupportedModelError for what no canonical form or architecture exists for."""
        self.path, self.files = path, files
        self.arch: Architecture = hf_architecture(config, str(path / "config.json"))
        held = {tensor.name: _Located(file, tensor) for file in files for tensor in file.tensors.values()}
        if len(held) != sum(len(file.tensors) for file in files):
            raise ModelFileError(f"{path}: two of its files hold the same tensor.", _CURE)
        self._stored = self._match(held)

    @classmethod
    def open(cls, path: Path) -> SafetensorsSource:
        """Open a folder."""
        config = read_json(path / "config.json")
        with contextlib.ExitStack() as opened:
            files = []
            for file in cls.weight_files(path):
                files.append(SafetensorsFile.open(file))
                opened.callback(files[-1].close)
            source = cls(path, config, files)
            opened.pop_all()
            return source

    @staticmethod
    def weight_files(path: Path) -> list[Path]:
        """The folder's weight files in a fixed order. Raises ModelFileError when it has none or a bad index."""
        return [path / name for name in _weight_files(path)]

    def opening_spans(self) -> list[tuple[str, int, int]]:
        """What `open` reads of the weight files: (file name, start, stop) in bytes. JSON files are read whole."""
        return [(file.path.name, 0, file.header_bytes) for file in self.files]

    def spans(self, name: str) -> list[tuple[str, int, int]]:
        """Where a tensor lies, with its scales and biases: (file name, start, stop) in bytes.

        Raises ModelFileError when there is none.
        """
        stored = self._get(name)
        parts = [part for part in (stored.weight, stored.scales, stored.biases) if part is not None]
        return [(p.file.path.name, p.tensor.offset, p.tensor.offset + p.tensor.num_bytes) for p in parts]

    @property
    def model_hash(self) -> str:
        return self._model_hash

    @cached_property
    def _model_hash(self) -> str:
        """SHA-256 over the architecture, the headers, the sizes and samples of every tensor (see `sampling.py`)."""
        digest = hashlib.sha256(repr(self.arch).encode())
        for file in self.files:
            digest.update(file.data[: file.header_bytes].tobytes())
            digest.update(len(file.data).to_bytes(8, "little"))
            for tensor in file.tensors.values():
                sample_into(digest, file.raw(tensor))
        return digest.hexdigest()

    def names(self) -> list[str]:
        return list(self._stored)

    def has(self, name: str) -> bool:
        return name in self._stored

    def info(self, name: str) -> TensorInfo:
        stored = self._get(name)
        parts = [part for part in (stored.weight, stored.scales, stored.biases) if part is not None]
        num_bytes = sum(part.tensor.num_bytes for part in parts)
        if stored.scales is None:
            dtype = stored.weight.tensor.dtype
            return TensorInfo(name, stored.shape, dtype.lower(), num_bytes, dtype)
        label = f"MLX {stored.bits}-bit, groups of {stored.group}"
        return TensorInfo(name, stored.shape, "affine", num_bytes, label, stored.bits, GROUP, 0, has_bias=True)

    def vector(self, name: str) -> np.ndarray:
        stored = self._get(name)
        values = as_float32(stored.weight.floats(0, stored.shape[0]).ravel())
        # Gemma stores how much a norm weight differs from one.
        return values + np.float32(1) if self.arch.post_norms and name.endswith("norm") else values

    def matrix(self, name: str, start: int = 0, stop: int | None = None) -> Affine | np.ndarray:
        stored = self._get(name)
        stop = stored.shape[0] if stop is None else stop
        if len(stored.shape) != 2 or not 0 <= start <= stop <= stored.shape[0]:
            raise ModelFileError(f"{self.path}: '{name}' has no rows {start} to {stop}.")
        if stored.scales is None or stored.biases is None:
            return stored.weight.floats(start, stop)
        return from_mlx(
            stored.weight.rows(start, stop),
            stored.scales.floats(start, stop),
            stored.biases.floats(start, stop),
            stored.bits,
            stored.group,
        )

    def close(self) -> None:
        for file in self.files:
            file.close()

    def _get(self, name: str) -> _Stored:
        if name not in self._stored:
            raise ModelFileError(f"{self.path} has no tensor '{name}'.", _CURE)
        return self._stored[name]

    def _match(self, held: dict[str, _Located]) -> dict[str, _Stored]:
        prefix = next((p for p in _TEXT_PREFIXES if f"{p}embed_tokens.weight" in held), None)
        if prefix is None:
            raise ModelFileError(f"{self.path} has no tensor 'model.embed_tokens.weight'.", _CURE)
        head_prefix = "language_model." if prefix == "language_model.model." else ""
        stored = {}
        for name, shape in tensor_shapes(self.arch).items():
            theirs = (head_prefix if name == "head" else prefix) + hf_name(name, self.arch.post_norms)
            if theirs not in held:
                raise ModelFileError(f"{self.path} has no tensor '{theirs}'.", _CURE)
            stored[name] = self._stored_as(theirs, shape, held)
        rest = [n for n in held if not n.endswith(_NOT_NEEDED) and not n.startswith(_OTHER_MODALITIES)]
        if rest:
            raise UnsupportedModelError(
                f"{self.path} holds tensors that the architecture {self.arch.family} does not have here, such as "
                f"'{min(rest)}'.",
                "Use a GGUF file of this model with the llama runner: pip install 'roost[llama]'.",
            )
        return stored

    def _stored_as(self, theirs: str, shape: tuple[int, ...], held: dict[str, _Located]) -> _Stored:
        weight = held.pop(theirs)
        base = theirs.removesuffix("weight")
        scales, biases = held.pop(f"{base}scales", None), held.pop(f"{base}biases", None)
        if scales is None or biases is None or len(shape) != 2:
            self._check(weight, shape)
            return _Stored(weight, shape)
        rows, cols = shape
        if weight.tensor.dtype != "U32" or len(weight.tensor.shape) != 2 or len(scales.tensor.shape) != 2:
            raise ModelFileError(f"{self.path}: '{theirs}' is not packed as MLX packs.", _CURE)
        bits, odd_bits = divmod(weight.tensor.shape[1] * 32, cols)
        group, odd_group = divmod(cols, max(1, scales.tensor.shape[1]))
        if odd_bits or odd_group or bits not in (4, 5, 6, 8) or group not in (32, 64, 128):
            raise UnsupportedModelError(
                f"{self.path}: '{theirs}' has {bits} bits in groups of {group}, which no native backend reads.",
                "Use a 4-, 5-, 6- or 8-bit model with groups of 32, 64 or 128.",
            )
        self._check(scales, (rows, cols // group))
        self._check(biases, (rows, cols // group))
        if weight.tensor.shape[0] != rows:
            raise ModelFileError(f"{self.path}: '{theirs}' has {weight.tensor.shape[0]} rows, not {rows}.", _CURE)
        return _Stored(weight, shape, scales, biases, bits, group)

    def _check(self, located: _Located, shape: tuple[int, ...]) -> None:
        tensor = located.tensor
        if tensor.shape != shape:
            raise ModelFileError(
                f"{self.path}: '{tensor.name}' is {list(tensor.shape)}, and config.json says {list(shape)}.", _CURE
            )
        if tensor.dtype not in _FLOATS:
            raise UnsupportedModelError(
                f"{self.path}: '{tensor.name}' is stored as {tensor.dtype}, which no native backend reads.",
                "Use the model in BF16, F16 or F32, an MLX-quantized copy, or its GGUF file.",
            )


def _weight_files(path: Path) -> list[str]:
    """Names of the folder's weight files, in a fixed order."""
    if (path / INDEX).exists():
        weight_map = read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelFileError(f"{path / INDEX} has no weight_map.", _CURE)
        names = sorted(set(weight_map.values()))
    else:
        names = sorted(found.name for found in path.glob("model*.safetensors"))
    if not names:
        raise ModelFileError(
            f"{path} has no .safetensors files.", "Convert its weights to safetensors, or give a GGUF file."
        )
    if len(names) > _MAX_FILES or any(PurePath(name).name != name or "\\" in name for name in names):
        raise ModelFileError(f"{path / INDEX} names files outside its folder, or too many.", _CURE)
    return names
