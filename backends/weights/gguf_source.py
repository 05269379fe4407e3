"""Weights of a GGUF model, of one file or several parts, as a `WeightSource`."""

from __future__ import annotations

import contextlib
import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from backends.arch import Architecture
from backends.errors import ModelFileError, UnsupportedModelError
from backends.weights.floats import as_float32
from backends.weights.ggml_blocks import decode_blocks
from backends.weights.gguf import GGUFFile, GGUFTensor
from backends.weights.gguf_config import gguf_architecture
from backends.weights.names import gguf_name, tensor_shapes
from backends.weights.sampling import sample_into
from backends.weights.source import Affine, TensorInfo

_PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf$")
_MAX_PARTS = 1000
_ROPE_FACTORS = "rope_freqs.weight"
_DTYPES = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2"), "bf16": np.dtype("<u2")}


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a canonical tensor lies. `interleaved`: its rows are ordered for interleaved rotary embedding."""

    file: GGUFFile
    tensor: GGUFTensor
    interleaved: bool


class GGUFSource:
    """`files[0]` has the metadata; the tensors are those of all files."""

    def __init__(self, files: list[GGUFFile]) -> None:
        """Raises ModelFileError when tensors are missing or of other shapes than the metadata says,
        UnsupportedModelError for what no canonical form or architecture exists for."""
        self.path = files[0].path
        self.files = files
        where = str(self.path)
        held = {tensor.name: (file, tensor) for file in files for tensor in file.tensors.values()}
        if len(held) != sum(len(file.tensors) for file in files):
            raise ModelFileError(f"{where}: two of its parts hold the same tensor.", "Download the model again.")
        factors = None
        self._opening = [(file.path.name, 0, file.header_bytes) for file in files]
        if _ROPE_FACTORS in held:
            file, tensor = held.pop(_ROPE_FACTORS)
            factors = self._read_vector(file, tensor)
            self._opening.append((file.path.name, tensor.offset, tensor.offset + tensor.num_bytes))
        self.arch: Architecture = gguf_architecture(
            files[0].metadata, {name: tensor.shape for name, (_, tensor) in held.items()}, factors, where
        )
        self._stored = self._match(held)
        vocabulary = "tokenizer.ggml.tokens"
        if vocabulary in files[0].metadata and files[0].metadata.length(vocabulary) > self.arch.vocab_size:
            raise ModelFileError(f"{where} has more tokens than embeddings.", "Download or convert the model again.")

    @classmethod
    def open(cls, path: Path) -> GGUFSource:
        """Open a file, or all parts of one named `…-00001-of-00003.gguf`; any part will do."""
        with contextlib.ExitStack() as opened:
            files = [opened.enter_context(GGUFFile.open(part)) for part in cls.weight_files(path)]
            _check_parts(files)
            source = cls(files)
            opened.pop_all()
            return source

    @staticmethod
    def weight_files(path: Path) -> list[Path]:
        """The model's files in order, whether they exist or not. Raises ModelFileError for an impossible part name."""
        return _parts(path)

    def opening_spans(self) -> list[tuple[str, int, int]]:
        """What `open` reads: (file name, start, stop) in bytes."""
        return list(self._opening)

    def spans(self, name: str) -> list[tuple[str, int, int]]:
        """Where a tensor lies: (file name, start, stop) in bytes. Raises ModelFileError when there is none."""
        stored = self._get(name)
        start = stored.tensor.offset
        return [(stored.file.path.name, start, start + stored.tensor.num_bytes)]

    @property
    def model_hash(self) -> str:
        return self._model_hash

    @cached_property
    def _model_hash(self) -> str:
        """SHA-256 over the headers, the sizes and samples of every tensor (see `sampling.py`)."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(file.data[: file.header_bytes].tobytes())
            digest.update(len(file.data).to_bytes(8, "little"))
            for tensor in file.tensors.values():
                sample_into(digest, file.data[tensor.offset : tensor.offset + tensor.num_bytes])
        return digest.hexdigest()

    def names(self) -> list[str]:
        return list(self._stored)

    def has(self, name: str) -> bool:
        return name in self._stored

    def info(self, name: str) -> TensorInfo:
        tensor = self._get(name).tensor
        kind = tensor.type
        return TensorInfo(
            name, tensor.shape, kind.kind, tensor.num_bytes, kind.name, kind.bits, kind.group, kind.zero, kind.has_bias
        )

    def vector(self, name: str) -> np.ndarray:
        stored = self._get(name)
        values = self._read_vector(stored.file, stored.tensor)
        return values[self._neox_rows(0, len(values))] if stored.interleaved else values

    def matrix(self, name: str, start: int = 0, stop: int | None = None) -> Affine | np.ndarray:
        stored = self._get(name)
        tensor = stored.tensor
        rows = tensor.shape[0]
        stop = rows if stop is None else stop
        if len(tensor.shape) != 2 or not 0 <= start <= stop <= rows:
            raise ModelFileError(f"{self.path}: '{name}' has no rows {start} to {stop}.")
        raw = stored.file.raw(tensor)
        raw = raw[self._neox_rows(start, stop)] if stored.interleaved else raw[start:stop]
        if tensor.type.kind == "affine":
            return decode_blocks(tensor.type, raw)
        return raw.view(_DTYPES[tensor.type.kind])

    def close(self) -> None:
        for file in self.files:
            file.close()

    def _get(self, name: str) -> _Stored:
        if name not in self._stored:
            raise ModelFileError(f"{self.path} has no tensor '{name}'.", "Download or convert the model again.")
        return self._stored[name]

    def _read_vector(self, file: GGUFFile, tensor: GGUFTensor) -> np.ndarray:
        if tensor.type.kind not in _DTYPES or len(tensor.shape) != 1:
            raise UnsupportedModelError(
                f"{self.path}: the vector '{tensor.name}' is stored as {tensor.type.name} {list(tensor.shape)}.",
                "Convert the model with llama.cpp's own script, which keeps vectors in F32.",
            )
        return as_float32(file.raw(tensor)[0].view(_DTYPES[tensor.type.kind]))

    def _neox_rows(self, start: int, stop: int) -> np.ndarray:
        """The file's rows that are rows `start` to `stop` in half-rotation order. The file lists the dimensions of a
        head as 0, D/2, 1, D/2 + 1, …"""
        rows = np.arange(start, stop)
        head, dimension = np.divmod(rows, self.arch.head_dim)
        half, pair = np.divmod(dimension, self.arch.head_dim // 2)
        return head * self.arch.head_dim + 2 * pair + half

    def _match(self, held: dict[str, tuple[GGUFFile, GGUFTensor]]) -> dict[str, _Stored]:
        interleaved = ("q", "k", "q_bias", "k_bias") if self.arch.family in ("llama", "mistral") else ()
        stored = {}
        for name, shape in tensor_shapes(self.arch).items():
            theirs = gguf_name(name)
            if theirs not in held:
                raise ModelFileError(f"{self.path} has no tensor '{theirs}'.", "Download or convert the model again.")
            file, tensor = held.pop(theirs)
            if tensor.shape != shape:
                raise ModelFileError(
                    f"{self.path}: '{theirs}' is {list(tensor.shape)}, and the metadata says {list(shape)}.",
                    "Download or convert the model again.",
                )
            if not tensor.type.kind:
                raise UnsupportedModelError(
                    f"{self.path}: '{theirs}' is stored as {tensor.type.name}, which no native backend reads.",
                    "Use a Q4_0, Q4_K_M, Q5_K_M, Q6_K, Q8_0 or F16 file of this model, or the llama runner once "
                    "installed: pip install 'roost[llama]'.",
                )
            stored[name] = _Stored(file, tensor, name.rpartition(".")[2] in interleaved)
        if held:
            raise UnsupportedModelError(
                f"{self.path} holds tensors that the architecture {self.arch.family} does not have here, such as "
                f"'{min(held)}'.",
                "Use the llama runner once installed: pip install 'roost[llama]'.",
            )
        return stored


def _parts(path: Path) -> list[Path]:
    match = _PART_NAME.match(path.name)
    if match is None:
        return [path]
    stem, count = match[1], int(match[3])
    if not 1 <= count <= _MAX_PARTS:
        raise ModelFileError(f"{path} says it is one of {count} parts.", "Download the model again.")
    return [path.with_name(f"{stem}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]


def _check_parts(files: list[GGUFFile]) -> None:
    for i, file in enumerate(files):
        count = file.metadata.get("split.count", 0) or 1
        if count != len(files) or (count > 1 and file.metadata.get("split.no") != i):
            raise ModelFileError(
                f"{file.path} is part {file.metadata.get('split.no')} of {count} by its metadata, and part {i} of "
                f"{len(files)} by its name.",
                "Keep the parts together under the names they were downloaded with.",
            )
