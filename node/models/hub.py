"""Model files from the Hugging Face hub, through its own library: the cache that other tools share (HF_HOME), and
HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE, mean here what they mean there."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from node.errors import DownloadError, UnsupportedModelError
from node.models.catalog import HubFile
from node.models.download import Meter, OnProgress, check_space

REACH_TIMEOUT_S = 3.0
FOLDER_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "Q5_K_M", "Q5_K_S", "Q6_K", "Q8_0", "BF16", "F16", "F32")
"""Quantizations in the order in which one is taken from a repository that has several."""

_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


class HubFetcher:
    """`endpoint` and `cache_dir` are the library's own when None."""

    def __init__(self, endpoint: str | None = None, cache_dir: Path | None = None) -> None:
        self._endpoint = endpoint
        self._cache_dir = cache_dir

    def fetch(self, source: HubFile, folder: Path, on_progress: OnProgress) -> str | None:
        """Put the model into the empty `folder`. Returns its file's name, None when it is a folder of safetensors.

        Raises DownloadError, quickly when the hub is out of reach; UnsupportedModelError for files cut into pieces.
        """
        cached = self._from_cache(source)
        if cached is None:
            self._reach()
        file = source.file if cached else self._choose(source)
        if file is None:
            self._translated(source, lambda: self._fetch_folder(source, folder, on_progress))
            return None
        if _SPLIT.search(file):
            raise UnsupportedModelError(
                f"{source.repo} has {file} in several pieces.", "Name a file of one piece: hf:owner/repo:file"
            )
        path = cached or self._translated(source, lambda: self._fetch_file(source.repo, file, folder, on_progress))
        name = Path(file).name
        link(path, folder / name)
        return name

    def forget(self, source: HubFile, folder: Path, name: str) -> None:
        """Drop a file that is not what it should be, from the cache as well."""
        (folder / name).unlink(missing_ok=True)
        cached = self._from_cache(source)
        if cached is not None:
            cached.resolve().unlink(missing_ok=True)
            cached.unlink(missing_ok=True)

    def _from_cache(self, source: HubFile) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        if source.file is None or not source.file.endswith(".gguf"):
            return None
        found = try_to_load_from_cache(source.repo, source.file, cache_dir=self._cache_dir)
        return Path(found) if isinstance(found, str) else None

    def _reach(self) -> None:
        """The library tries for minutes; people without a way to the hub should not wait for that."""
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            raise DownloadError("The Hugging Face hub is switched off (HF_HUB_OFFLINE).", "Unset it to use the hub.")
        endpoint = self._endpoint or constants.ENDPOINT
        failure: list[Exception | None] = []

        def knock() -> None:
            try:
                httpx.head(endpoint, timeout=REACH_TIMEOUT_S)
                failure.append(None)
            except (httpx.HTTPError, httpx.InvalidURL, OSError) as exc:
                failure.append(exc)

        # resolving a name has no timeout of its own
        thread = threading.Thread(target=knock, daemon=True, name="roost-hub-probe")
        thread.start()
        thread.join(REACH_TIMEOUT_S + 1)
        if failure != [None]:
            why = str(failure[0]) if failure else "no answer"
            raise DownloadError(
                f"The Hugging Face hub at {endpoint} is out of reach ({why}).",
                "Check the network; HF_ENDPOINT names a mirror.",
            ) from (failure[0] if failure else None)

    def _choose(self, source: HubFile) -> str | None:
        if source.file is not None and source.file.endswith(".gguf"):
            return source.file
        from huggingface_hub import HfApi

        info = self._translated(source, lambda: HfApi(endpoint=self._endpoint).model_info(source.repo))
        return choose_file(source, [file.rfilename for file in info.siblings or ()])

    def _fetch_file(self, repo: str, file: str, folder: Path, on_progress: OnProgress) -> Path:
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

        metadata = get_hf_file_metadata(hf_hub_url(repo, file, endpoint=self._endpoint), timeout=10)
        check_space(folder, metadata.size or 0)
        bar = _reporting_bar(Meter(on_progress, "downloading", metadata.size))
        return Path(hf_hub_download(repo, file, endpoint=self._endpoint, cache_dir=self._cache_dir, tqdm_class=bar))

    def _fetch_folder(self, source: HubFile, folder: Path, on_progress: OnProgress) -> None:
        from huggingface_hub import HfApi, hf_hub_download

        info = HfApi(endpoint=self._endpoint).model_info(source.repo, files_metadata=True)
        wanted = [
            file
            for file in info.siblings or ()
            if "/" not in file.rfilename and any(Path(file.rfilename).match(pattern) for pattern in FOLDER_FILES)
        ]
        total = sum(file.size or 0 for file in wanted)
        check_space(folder, total)
        meter = Meter(on_progress, "downloading", total or None)
        for file in wanted:
            path = hf_hub_download(
                source.repo,
                file.rfilename,
                revision=info.sha,
                endpoint=self._endpoint,
                cache_dir=self._cache_dir,
                tqdm_class=_reporting_bar(meter),
            )
            meter.next_file(Path(path).stat().st_size)
            link(Path(path), folder / file.rfilename)

    def _translated(self, source: HubFile, action: Callable[[], Any]) -> Any:
        """The library's errors in our words."""
        from huggingface_hub import errors

        what = f"{source.repo}{'/' + source.file if source.file else ''}"
        try:
            return action()
        except errors.GatedRepoError as exc:
            raise DownloadError(
                f"{what} is only for people who accepted its terms.",
                "Accept them on its page of the hub, and set HF_TOKEN.",
            ) from exc
        except errors.RepositoryNotFoundError as exc:
            raise DownloadError(
                f"The hub has no {source.repo}, or not for you.", "Check the name; private ones need HF_TOKEN."
            ) from exc
        except (errors.EntryNotFoundError, errors.RevisionNotFoundError) as exc:
            raise DownloadError(f"The hub has no {what}.", "Check the file's name.") from exc
        except errors.HFValidationError as exc:
            raise DownloadError(f"{source.repo} is no repository name.", "Write hf:owner/repo.") from exc
        except DownloadError:
            raise
        except Exception as exc:  # its HTTP library has changed before, and its errors with it
            if getattr(getattr(exc, "response", None), "status_code", 0) in (401, 403):
                raise DownloadError(
                    f"The hub does not let you have {what}.", "Set HF_TOKEN to a token that may read it."
                ) from exc
            if isinstance(exc, OSError) or type(exc).__module__.startswith(("httpx", "requests", "huggingface_hub")):
                raise DownloadError(
                    f"{what} could not be fetched from the hub: {str(exc)[:300] or type(exc).__name__}.",
                    "Try again: it goes on where it stopped.",
                ) from exc
            raise


def choose_file(source: HubFile, files: list[str]) -> str | None:
    """The GGUF file to take of a repository's, None for a repository of safetensors. Raises DownloadError."""
    ggufs = [file for file in files if file.endswith(".gguf") and "mmproj" not in file.lower()]
    if source.file is not None:
        tagged = [file for file in ggufs if source.file.lower() in file.lower()]
        if len(tagged) == 1:
            return tagged[0]
        raise DownloadError(
            f"{source.repo} has {len(tagged)} files that '{source.file}' may mean.",
            f"Name one: {', '.join(tagged or ggufs)[:600]}",
        )
    if not ggufs:
        if "config.json" in files and any(file.endswith(".safetensors") for file in files):
            return None
        raise DownloadError(f"{source.repo} holds no model that Roost reads.", "It takes GGUF and safetensors.")
    whole = [file for file in ggufs if not _SPLIT.search(file)] or ggufs
    return min(whole, key=lambda file: (_rank(file), len(file), file))


def _rank(file: str) -> int:
    name = file.upper().replace("-", "_").replace(".", "_")
    return next((i for i, kind in enumerate(PREFERRED) if f"_{kind}_GGUF" in name), len(PREFERRED))


def link(path: Path, target: Path) -> None:
    """Another name for a cached file; a copy where the file system has no hard links."""
    source = path.resolve()
    try:
        os.link(source, target)
    except OSError:
        try:
            shutil.copyfile(source, target)
        except OSError as exc:
            raise DownloadError(f"{target} cannot be written: {exc.strerror}.", "Make room and try again.") from exc


def _reporting_bar(meter: Meter) -> Any:
    """The library reports progress to a tqdm class of one's choice."""
    from tqdm.auto import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._done = int(kwargs.get("initial") or 0)
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self._done += int(n or 0)
            meter.at(self._done)
            return super().update(n)

    return Bar
