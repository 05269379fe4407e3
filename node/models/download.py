"""Fetching one file over HTTP: resumable, verified, with errors in words."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx

from node.errors import DownloadError

CHUNK_BYTES = 1 << 20
MAX_BARREN_TRIES = 5
"""Connections in a row that brought not one new byte before it gives up."""
MAX_TRIES = 100
TIMEOUT = httpx.Timeout(10.0, read=30.0)
SPARE_BYTES = 64 << 20

Stage = Literal["waiting", "downloading", "unpacking", "verifying"]


@dataclass(frozen=True, slots=True)
class Progress:
    """`done_bytes` of `total_bytes` (None while nobody knows) in the present stage; it never passes the total."""

    stage: Stage
    done_bytes: int = 0
    total_bytes: int | None = None


OnProgress = Callable[[Progress], None]


class Meter:
    """Adds up several files to one progress."""

    def __init__(self, on_progress: OnProgress, stage: Stage, total_bytes: int | None) -> None:
        self._on_progress = on_progress
        self._stage: Stage = stage
        self._total = total_bytes
        self._before = 0

    def at(self, done_bytes: int) -> None:
        """This many bytes of the present file are done."""
        done = self._before + done_bytes
        self._on_progress(Progress(self._stage, min(done, self._total) if self._total else done, self._total))

    def next_file(self, size_bytes: int) -> None:
        """The present file is whole and has this size."""
        self._before += size_bytes


def make_client(timeout: httpx.Timeout = TIMEOUT) -> httpx.Client:
    """Proxies and certificates come from the environment, as httpx reads it. Files arrive as they are stored."""
    return httpx.Client(
        timeout=timeout, follow_redirects=True, headers={"Accept-Encoding": "identity", "User-Agent": "roost"}
    )


def content_length(client: httpx.Client, url: str) -> int | None:
    """The file's size, if the server tells it."""
    try:
        answer = client.head(url)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    length = answer.headers.get("Content-Length", "")
    return int(length) if answer.is_success and length.isdigit() else None


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raises DownloadError unless the file system has room for this much and a little more."""
    free = shutil.disk_usage(folder).free
    if needed_bytes + SPARE_BYTES > free:
        raise DownloadError(
            f"{folder} has {free >> 20} MiB free, and {(needed_bytes + SPARE_BYTES) >> 20} MiB are needed.",
            "Make room (cluster rm MODEL), or give a --home on a larger disk.",
        )


def file_sha256(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """The digest in hexadecimal. `on_bytes` hears how far it got."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            if on_bytes is not None:
                on_bytes(done)
    return digest.hexdigest()


class Downloader:
    """`sleep` and `client` are there for tests."""

    def __init__(self, client: httpx.Client, sleep: Callable[[float], None] = time.sleep) -> None:
        self._client = client
        self._sleep = sleep

    def fetch(self, url: str, target: Path, *, sha256: str | None, on_bytes: Callable[[int], None]) -> None:
        """`url` to the file `target`. What an earlier try left in `target`.part is gone on with; when the whole then
        has the wrong digest, it is fetched once more from the start.

        Raises DownloadError; a file with the wrong digest is removed, an unfinished one stays.
        """
        part = target.with_name(f"{target.name}.part")
        was_resumed = part.exists()
        self._fetch_part(url, part, on_bytes)
        if sha256 is not None and file_sha256(part) != sha256:
            part.unlink()
            if was_resumed:
                return self.fetch(url, target, sha256=sha256, on_bytes=on_bytes)
            raise DownloadError(
                f"What came from {_shown(url)} is not the file that was promised: its SHA-256 differs.",
                "Try again; if it stays so, a proxy or mirror on the way changes files.",
            )
        part.replace(target)

    def _fetch_part(self, url: str, part: Path, on_bytes: Callable[[int], None]) -> None:
        barren, why = 0, ""
        for _ in range(MAX_TRIES):
            before = _size(part)
            try:
                if self._fetch_once(url, part, on_bytes):
                    return
                why = "the connection was cut"
            except httpx.TimeoutException:
                why = "the server stopped answering"
            except (httpx.TransportError, _TryAgain) as exc:
                why = str(exc) or type(exc).__name__
            except (httpx.HTTPError, httpx.InvalidURL) as exc:
                raise DownloadError(f"{_shown(url)} cannot be fetched: {exc}.", "Check the address.") from exc
            except OSError as exc:
                raise DownloadError(
                    f"{part} cannot be written: {exc.strerror}.", "Make room, or give another --home."
                ) from exc
            barren = 0 if _size(part) > before else barren + 1
            if barren >= MAX_BARREN_TRIES:
                break
            self._sleep(min(8.0, 0.5 * 2**barren))
        raise DownloadError(
            f"{_shown(url)} cannot be fetched: {why}.", "Check the network and try again: it goes on where it stopped."
        )

    def _fetch_once(self, url: str, part: Path, on_bytes: Callable[[int], None]) -> bool:
        """One connection. True when the file is whole."""
        have = _size(part)
        headers = {"Range": f"bytes={have}-"} if have else {}
        with self._client.stream("GET", url, headers=headers) as answer:
            start, total = _place(answer, have, url)
            if start < have and answer.status_code == 416:
                part.unlink()
                raise _TryAgain("the file on the server is shorter than what was here")
            if start == total:
                return True
            with part.open("r+b" if part.exists() else "wb") as file:
                file.truncate(start)
                file.seek(start)
                done = start
                for chunk in answer.iter_raw():
                    done += len(chunk)
                    if total is not None and done > total:
                        raise _TryAgain("the server sent more than it said")
                    file.write(chunk)
                    on_bytes(done)
        return total is None or done == total


class _TryAgain(Exception):
    """Worth another connection."""


def _place(answer: httpx.Response, have: int, url: str) -> tuple[int, int | None]:
    """Where the answer's bytes belong and how long the whole file is. (0, None) for a 416 that rejects what we have."""
    status, length = answer.status_code, answer.headers.get("Content-Length", "")
    if status == 206:
        unit, _, rest = answer.headers.get("Content-Range", "").partition(" ")
        span, _, total = rest.partition("/")
        if unit != "bytes" or not span.startswith(f"{have}-"):
            raise _TryAgain("the server sent another part than was asked for")
        return have, int(total) if total.isdigit() else None
    if status == 200:
        return 0, int(length) if length.isdigit() else None
    if status == 416:
        total = answer.headers.get("Content-Range", "").rpartition("/")[2]
        return (have, have) if total == str(have) else (0, None)
    if status in (408, 425, 429) or status >= 500:
        raise _TryAgain(f"the server answers {status} {answer.reason_phrase}")
    raise DownloadError(f"{_shown(url)} cannot be fetched: the server answers {status}.", _cure(status))


def _cure(status: int) -> str:
    if status in (401, 403):
        return "It needs credentials: log in (HF_TOKEN, or pip's index settings), or accept the model's terms first."
    return "The file is not there any more: check the name, or update Roost."


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _shown(url: str) -> str:
    """Without what may be secret."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return url.partition("?")[0]
    return str(parsed.copy_with(userinfo=b"", query=None))
