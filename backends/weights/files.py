"""Opening files that are not trusted: mapping them, and reading JSON, with every failure in words."""

from __future__ import annotations

import contextlib
import json
import mmap
from pathlib import Path
from typing import Any

from backends.errors import ModelFileError

MAX_JSON_BYTES = 16 << 20


def map_file(path: Path) -> mmap.mmap:
    """Map a whole file for reading. Raises ModelFileError when it is missing, unreadable or empty."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as exc:
        raise ModelFileError(f"{path} is empty.", "Download the file again.") from exc
    except OSError as exc:
        raise _unreadable(path, exc) from exc


def release(mapping: mmap.mmap) -> None:
    """Unmap a file, or leave that to the last view of it."""
    with contextlib.suppress(BufferError):
        mapping.close()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size. Raises ModelFileError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_BYTES + 1)
    except OSError as exc:
        raise _unreadable(path, exc) from exc
    if len(raw) > MAX_JSON_BYTES:
        raise ModelFileError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB.", "Download the file again.")
    return parse_json(raw, path)


def parse_json(raw: bytes, path: Path) -> dict[str, Any]:
    """A JSON object without duplicate keys. Raises ModelFileError."""
    try:
        value = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as exc:
        raise ModelFileError(f"{path}: malformed JSON: {exc}.", "Download the file again.") from exc
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} does not hold a JSON object.", "Download the file again.")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def _unreadable(path: Path, exc: OSError) -> ModelFileError:
    return ModelFileError(f"{path} cannot be read: {exc.strerror or exc}.", "Check the path and its permissions.")
