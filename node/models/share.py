"""Which bytes of a model a shard needs, and reading them for a node that does not have them.

The other node makes a sparse copy (`sparse.py`): files of the same names and sizes, with holes where its shard needs
nothing. It takes two rounds. First the manifest and its header ranges: with these the copy opens. Then `needed`, which
the other node works out by itself. That includes the kilobytes of every tensor that the model's hash is made of, so
that the copy has the same hash as the original, and a copy of other weights does not pass for it.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.arch import Architecture
from backends.weights.gguf_source import GGUFSource
from backends.weights.names import tensor_shapes
from backends.weights.open import open_source
from backends.weights.safetensors_source import INDEX, SafetensorsSource
from backends.weights.sampling import SAMPLE_BYTES
from backends.weights.source import WeightSource
from node.errors import DownloadError, ModelFileError, PlanError, UnsupportedModelError
from partitioner.plan import Shard

MERGE_GAP_BYTES = 64 << 10
"""Tensors of a shard that lie closer than this are fetched in one go."""
SAMPLE_GAP_BYTES = 4 << 10
PIECE_BYTES = 1 << 20
MAX_FILES = 64
MAX_FILE_BYTES = 1 << 44
MAX_HEADER_BYTES = 256 << 20
MAX_HEADER_RANGES = 1024
MAX_NAME_BYTES = 255

FOLDER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    INDEX,
)
"""What is read of a folder beside its weights."""

JOURNAL = "copy.journal"
"""Lies in the folder above a sparse copy's files."""

_HASH = re.compile(r"[0-9a-f]{64}")
_BAD_NAME = re.compile(r"[/\\\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Bytes `start` to `stop` (exclusive) of a file of the model, by its bare name."""

    file: str
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Manifest:
    """A model's files with their sizes in bytes, and the ranges that must be there before a copy opens.

    Checked when it is made, since it comes from another node: names are bare file names, ranges lie inside the files
    and do not overlap. Raises DownloadError.
    """

    model_hash: str
    files: tuple[tuple[str, int], ...]
    header: tuple[Range, ...]

    def __post_init__(self) -> None:
        if not _HASH.fullmatch(self.model_hash):
            raise _bad_manifest("its hash is not a SHA-256")
        if not 1 <= len(self.files) <= MAX_FILES:
            raise _bad_manifest(f"it has {len(self.files)} files, and 1 to {MAX_FILES} can be copied")
        for name, size_bytes in self.files:
            _check_name(name)
            if not 0 <= size_bytes <= MAX_FILE_BYTES:
                raise _bad_manifest(f"'{name}' has {size_bytes} bytes")
        if len({name.casefold() for name, _ in self.files}) != len(self.files):
            raise _bad_manifest("two of its files have one name")
        if len(self.header) > MAX_HEADER_RANGES:
            raise _bad_manifest(f"its header has {len(self.header)} ranges")
        for part in self.header:
            self.check(part)
        num_bytes = sum(part.num_bytes for part in self.header)
        if num_bytes > MAX_HEADER_BYTES:
            raise _bad_manifest(f"its header has {num_bytes >> 20} MiB, more than {MAX_HEADER_BYTES >> 20}")
        ordered = sorted(self.header)
        for before, after in itertools.pairwise(ordered):
            if before.file == after.file and after.start < before.stop:
                raise _bad_manifest(f"two ranges of '{after.file}' overlap")

    def check(self, part: Range) -> None:
        """Raises DownloadError unless the range is not empty and lies in one of the files."""
        size_bytes = dict(self.files).get(part.file)
        if size_bytes is None:
            raise _bad_manifest(f"it has no file '{part.file[:80]}'")
        if not 0 <= part.start < part.stop <= size_bytes:
            raise _bad_manifest(f"'{part.file}' has {size_bytes} bytes, none from {part.start} to {part.stop}")

    def to_json(self) -> dict[str, Any]:
        return {
            "model_hash": self.model_hash,
            "files": [[name, size_bytes] for name, size_bytes in self.files],
            "header": [[part.file, part.start, part.stop] for part in self.header],
        }

    @classmethod
    def from_json(cls, data: object) -> Manifest:
        """Raises DownloadError for anything else than what `to_json` makes."""
        match data:
            case {"model_hash": str(model_hash), "files": list(files), "header": list(header), **rest} if not rest:
                pass
            case _:
                raise _bad_manifest("it is not an object with a hash, files and a header")
        if len(files) > MAX_FILES or len(header) > MAX_HEADER_RANGES:
            raise _bad_manifest(f"it has {len(files)} files and {len(header)} ranges")
        if not all(_is_row(row, 1) for row in files) or not all(_is_row(row, 2) for row in header):
            raise _bad_manifest("a file is not a name with a size, or a range not a name with two numbers")
        return cls(model_hash, tuple((name, size) for name, size in files), tuple(Range(*row) for row in header))


def manifest(path: Path) -> Manifest:
    """Of a whole model on this machine: a GGUF file (any part of a split one) or a folder.

    Reads its header and the samples of its hash. Raises ModelFileError, UnsupportedModelError for what cannot be
    opened, DownloadError for what cannot be copied, such as a model of too many files.
    """
    paths = model_files(path)
    source = _open(path)
    try:
        files = tuple((file.name, file.stat().st_size) for file in paths.values())
        return Manifest(source.model_hash, files, tuple(_header_of(path, source)))
    except OSError as exc:
        raise _changed(path) from exc
    finally:
        source.close()


def model_files(path: Path) -> dict[str, Path]:
    """All that a copy of the model consists of, by bare name. Raises ModelFileError for a model that is a sparse copy
    itself: its holes read as zeros."""
    folder = path if path.is_dir() else path.parent
    if (folder.parent / JOURNAL).exists():
        raise ModelFileError(f"{path} holds only a part of its model.", "Ask a node that has pulled the whole model.")
    if not path.is_dir():
        return {file.name: file for file in GGUFSource.weight_files(path)}
    small = [path / name for name in FOLDER_FILES if (path / name).is_file()]
    return {file.name: file for file in (*small, *SafetensorsSource.weight_files(path))}


def needed(model: Path | WeightSource, shard: Shard) -> list[Range]:
    """All that a shard's node reads of a model: the header, the shard's tensors, and the samples of every other tensor
    that the hash is made of. Sorted, without overlaps.

    Raises PlanError for a shard of a model with another number of layers, and what `open_source` raises.
    """
    if isinstance(model, Path):
        source = _open(model)
        try:
            return needed(source, shard)
        finally:
            source.close()
    source = _native(model)
    if shard.num_layers != source.arch.num_layers:
        raise PlanError(
            f"A shard of a model with {shard.num_layers} layers was asked of {source.path}, which has "
            f"{source.arch.num_layers}.",
            "Plan again: the nodes mean different models.",
        )
    tensors = [Range(*span) for name in shard_tensors(source.arch, shard) for span in source.spans(name)]
    wanted = merge(_header_of(source.path, source) + tensors, MERGE_GAP_BYTES)
    return merge([*wanted, *_samples(source)], SAMPLE_GAP_BYTES)


def shard_tensors(arch: Architecture, shard: Shard) -> list[str]:
    """Canonical names of the tensors that a backend reads for a shard."""
    layers = {f"layers.{layer}" for layer in range(shard.start, shard.stop)}
    ends = {"embed"} if shard.is_first else set()
    if shard.is_last:
        ends |= {"norm", "embed" if arch.tied_embeddings else "head"}
    return [name for name in tensor_shapes(arch) if name in ends or name.rpartition(".")[0] in layers]


def merge(ranges: Iterable[Range], gap_bytes: int = 1) -> list[Range]:
    """Sorted and without empty ones; what is less than `gap_bytes` apart becomes one range."""
    merged: list[Range] = []
    for part in sorted(part for part in ranges if part.num_bytes > 0):
        last = merged[-1] if merged else None
        if last is not None and last.file == part.file and part.start < last.stop + gap_bytes:
            merged[-1] = Range(last.file, last.start, max(last.stop, part.stop))
        else:
            merged.append(part)
    return merged


def read(path: Path, file: str, start: int, stop: int) -> Iterator[bytes]:
    """Bytes `start` to `stop` of one of a model's files, in pieces of at most 1 MiB.

    `file`, `start` and `stop` come from another node and are checked before anything is read. Raises ModelFileError,
    while it reads too: when the file was changed meanwhile.
    """
    found = model_files(path).get(file)
    if found is None:
        raise ModelFileError(f"The model {path} has no file '{file[:80]}'.", "Ask for its manifest again.")
    try:
        size_bytes = found.stat().st_size
    except OSError as exc:
        raise _changed(path) from exc
    if not 0 <= start <= stop <= size_bytes:
        raise ModelFileError(
            f"{found} has {size_bytes} bytes, and {start} to {stop} were asked for.", "Ask for its manifest again."
        )
    return _pieces(found, start, stop)


def _pieces(path: Path, start: int, stop: int) -> Iterator[bytes]:
    try:
        with path.open("rb", buffering=0) as file:
            while start < stop:
                piece = os.pread(file.fileno(), min(PIECE_BYTES, stop - start), start)
                if not piece:
                    raise _changed(path)
                start += len(piece)
                yield piece
    except OSError as exc:
        raise ModelFileError(f"{path} cannot be read: {exc.strerror}.", "Check the disk and its permissions.") from exc


def _header_of(path: Path, source: GGUFSource | SafetensorsSource) -> list[Range]:
    """What must be there before `open_source`, `Tokenizer.load` and `ChatTemplate.load` work on a copy."""
    ranges = [Range(*span) for span in source.opening_spans()]
    if path.is_dir():
        small = [path / name for name in FOLDER_FILES if (path / name).is_file()]
        ranges += [Range(file.name, 0, file.stat().st_size) for file in small]
    return merge(ranges)


def _samples(source: GGUFSource | SafetensorsSource) -> Iterator[Range]:
    """What `sample_into` feeds the model's hash with: the first, middle and last kilobyte of every tensor."""
    for file in source.files:
        for tensor in file.tensors.values():
            last = max(0, tensor.num_bytes - SAMPLE_BYTES)
            for at in (0, last // 2, last):
                stop = min(tensor.num_bytes, at + SAMPLE_BYTES)
                yield Range(file.path.name, tensor.offset + at, tensor.offset + stop)


def _open(path: Path) -> GGUFSource | SafetensorsSource:
    return _native(open_source(path))


def _native(source: WeightSource) -> GGUFSource | SafetensorsSource:
    if not isinstance(source, GGUFSource | SafetensorsSource):
        raise UnsupportedModelError(
            f"Weights of the kind {type(source).__name__} cannot be copied in part.", "Pull the model on every node."
        )
    return source


def _check_name(name: str) -> None:
    try:
        num_bytes = len(name.encode())
    except UnicodeEncodeError as exc:
        raise _bad_manifest(f"the file name {name[:80]!r} is not Unicode") from exc
    if not 0 < num_bytes <= MAX_NAME_BYTES or name.startswith(".") or _BAD_NAME.search(name):
        raise _bad_manifest(f"{name[:80]!r} is not a plain file name")


def _is_row(row: object, num_numbers: int) -> bool:
    if not isinstance(row, list) or len(row) != 1 + num_numbers:
        return False
    return isinstance(row[0], str) and all(type(number) is int for number in row[1:])


def _bad_manifest(why: str) -> DownloadError:
    return DownloadError(
        f"The manifest of the model's files cannot be used: {why}.", "Pull the model on this node: cluster pull MODEL"
    )


def _changed(path: Path) -> ModelFileError:
    return ModelFileError(f"{path} was changed or removed while it was read.", "Load the model again.")
