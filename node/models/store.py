"""The models on this machine.

    <home>/models/<quoted id>/model.json     what it is; a model exists when this does
    <home>/models/<quoted id>/...            its GGUF file, or its folder's files
    <home>/models/.partial/<quoted id>/      a download that is not finished
    <home>/models/.locks/<quoted id>         locked by the process that installs or removes it

A model is made whole in `.partial` and renamed into place, so that it is there or not there, never in part. Files from
the Hugging Face cache are hard links where the file system allows it, and cost their space once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from node.disk import delete, sync, try_lock
from node.errors import BusyError, UnknownModelError, UsageError
from node.models import catalog
from node.models.describe import describe

log = logging.getLogger("roost.models")

MANIFEST = "model.json"
MAX_NAME_BYTES = 240
WAIT_S = 0.1


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """`path` is the GGUF file or the folder. `sha256` is empty for folders. `pulled_at` is ISO 8601, UTC."""

    id: str
    path: Path
    size_bytes: int
    quantization: str
    architecture: str
    sha256: str
    pulled_at: str
    can_chat: bool


class ModelStore:
    def __init__(self, home: Path) -> None:
        self.root = home / "models"

    def list(self) -> list[InstalledModel]:
        """Every whole model, by id. What is something else, or has lost its file, is left out."""
        try:
            folders = sorted(self.root.iterdir())
        except OSError:
            return []
        found = [_read_manifest(folder) for folder in folders if not folder.name.startswith(".")]
        return sorted((model for model in found if model is not None), key=lambda model: model.id)

    def find(self, name: str) -> InstalledModel | None:
        """By id or alias; None when it is not installed."""
        model_id = catalog.canonical(name)
        try:
            model = _read_manifest(self._folder(model_id))
        except UsageError:
            return None
        return model if model is not None and model.id == model_id else None

    def resolve(self, name_or_path: str | Path) -> Path:
        """The file or folder of an installed model, or the path itself. Raises UnknownModelError with the cure."""
        name = str(name_or_path)
        installed = self.find(name)
        if installed is not None:
            return installed.path
        path = _existing_path(name)
        if path is not None:
            return path.absolute()
        if isinstance(name_or_path, Path) or _looks_like_path(name):
            raise UnknownModelError(f"There is no model at {name}.", "Check the path.")
        try:
            entry = catalog.lookup(name)
        except UnknownModelError as exc:
            also = tuple(model.id for model in self.list())
            raise UnknownModelError(f"There is no model '{name}'.", catalog.suggestion(name, also)) from exc
        raise UnknownModelError(f"The model '{entry.id}' is not installed.", f"Fetch it: cluster pull {entry.id}")

    def best(self) -> InstalledModel | None:
        """The model to serve when none is named: one that can chat before one that cannot, then the largest file, then
        the first by name. None when nothing is installed."""
        return min(self.list(), key=lambda model: (not model.can_chat, -model.size_bytes, model.id), default=None)

    def remove(self, name: str) -> int:
        """Remove a model and what is left of its downloads; returns the bytes that this frees. A file that the Hugging
        Face cache holds too stays there and counts as nothing.

        Raises UnknownModelError when there is nothing of that name, also for paths: files outside are not ours;
        BusyError while another process pulls it.
        """
        model_id = catalog.canonical(name)
        if self.find(name) is None and (_looks_like_path(name) or _existing_path(name)):
            raise UnknownModelError(f"{name} is not in the store {self.root}.", "Delete the file yourself.")
        folder, partial = self._folder(model_id), self._partial(model_id)
        if not folder.exists() and not partial.exists():
            also = tuple(model.id for model in self.list())
            raise UnknownModelError(f"The model '{name}' is not installed.", _installed_hint(also))

        def refuse() -> None:
            raise BusyError(f"The model '{model_id}' is just being pulled or removed.", "Wait for that, or stop it.")

        with self.lock(model_id, on_wait=refuse):
            return delete(folder) + delete(partial)

    @contextlib.contextmanager
    def lock(self, model_id: str, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
        """Held while a model is installed or removed. `on_wait` is called again and again while another has it."""
        path = self.root / ".locks" / self._folder(model_id).name
        _make_folder(path.parent)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not try_lock(fd):
                if on_wait is not None:
                    on_wait()
                time.sleep(WAIT_S)
            yield
        finally:
            os.close(fd)

    def partial(self, model_id: str) -> Path:
        """The folder for a download's pieces. It outlives failures, so that the next try goes on."""
        return _make_folder(self._partial(model_id))

    def install(self, model_id: str, staged: Path, file: str | None, sha256: str) -> InstalledModel:
        """Make the model of the whole folder `staged`, which lies in `partial` and is moved away. `file` is the name of
        its GGUF file, None for a folder of safetensors.

        Raises ModelFileError when it is no readable model.
        """
        facts = describe(staged if file is None else staged / file)
        model = {
            "id": model_id,
            "file": file,
            "size_bytes": facts.size_bytes,
            "quantization": facts.quantization,
            "architecture": facts.architecture,
            "sha256": sha256,
            "pulled_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "can_chat": facts.can_chat,
        }
        for path in staged.iterdir():
            sync(path)
        manifest = staged / MANIFEST
        manifest.write_text(json.dumps(model, indent=1), "utf-8")
        sync(manifest)
        sync(staged)
        folder = self._folder(model_id)
        delete(folder)
        staged.rename(folder)
        sync(self.root)
        delete(self._partial(model_id))
        installed = self.find(model_id)
        if installed is None:
            raise UnknownModelError(f"The model '{model_id}' vanished from {folder}.", "Pull it again.")
        return installed

    def _folder(self, model_id: str) -> Path:
        return self.root / _quoted(model_id)

    def _partial(self, model_id: str) -> Path:
        return self.root / ".partial" / _quoted(model_id)


def _quoted(model_id: str) -> str:
    """A file name that no other id has."""
    name = quote(model_id, safe="")
    if not name or name.startswith(".") or len(name) > MAX_NAME_BYTES:
        raise UsageError(f"'{model_id[:80]}' cannot be the name of a model.", "Use a shorter, plain name.")
    return name


def _existing_path(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except (OSError, ValueError, RuntimeError):
        # longer than any path, a zero byte, or the home of nobody
        return None


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name.endswith((".gguf", "/")) or name == "."


def _installed_hint(ids: tuple[str, ...]) -> str:
    return f"Installed: {', '.join(ids)}." if ids else "Nothing is installed."


def _read_manifest(folder: Path) -> InstalledModel | None:
    """None unless the folder is a whole model."""
    try:
        with (folder / MANIFEST).open("rb") as file:
            values: Any = json.loads(file.read(1 << 16))
        path = folder if values["file"] is None else folder / _plain_name(values["file"])
        if path.is_file() and path.stat().st_size != values["size_bytes"]:
            raise ValueError("the file has another size")
        if not path.exists():
            raise ValueError("the file is gone")
        fields = {name: values[name] for name in ("id", "quantization", "architecture", "sha256", "pulled_at")}
        if not all(isinstance(value, str) for value in fields.values()):
            raise ValueError("a field has the wrong type")
        size_bytes, can_chat = int(values["size_bytes"]), bool(values["can_chat"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as exc:
        log.warning("%s is not a usable model: %s.", folder, exc)
        return None
    return InstalledModel(path=path, size_bytes=size_bytes, can_chat=can_chat, **fields)


def _plain_name(name: str) -> str:
    if Path(name).name != name:
        raise ValueError("the file lies elsewhere")
    return name


def _make_folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise UsageError(f"The folder {path} cannot be made: {exc.strerror}.", "Give another --home.") from exc
    return path
