"""A sparse copy of a model: its files in full size, with holes where nothing was fetched.

    <folder>/<model hash>/files/...       names and sizes of the original
    <folder>/<model hash>/copy.journal    which ranges are there
    <folder>/.locks/<model hash>          locked by the process that writes

The journal has a line a range, added after the data is safe on the disk, each with a checksum: what a killed process
left in the middle is not believed and is fetched again.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import logging
import os
import threading
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

from backends.weights.open import open_source
from node.disk import delete, sync, try_lock
from node.errors import BusyError, DownloadError
from node.models.download import check_space
from node.models.share import JOURNAL, Manifest, Range, merge, needed
from partitioner.plan import Shard

log = logging.getLogger("roost.models")

FORMAT = "roost-copy-1"
COMMIT_BYTES = 64 << 20
"""Data written between two syncs: what a crash costs."""
BLOCK_BYTES = 4 << 10
"""What the ends of a range take on the disk beside its bytes."""


class SparseCopy:
    """Write it, `check` it, close it; then `path` is what `open_source` takes. Threads may write at the same time.

    Made anew when what lies there is a copy of other files. Raises BusyError while somebody else writes the same copy,
    DownloadError when the disk refuses.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self.root = folder / manifest.model_hash
        self._files = {name: self.root / "files" / name for name, _ in manifest.files}
        self._names = [name for name, _ in manifest.files]
        self._guard = threading.Lock()
        self._open: dict[str, int] = {}
        self._pending: list[Range] = []
        with _disk(self.root):
            self._lock = _locked(folder, manifest.model_hash)
        try:
            with _disk(self.root):
                self._resume()
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> Path:
        """The GGUF file (the first part of several), or the folder."""
        return self.root / "files" if "config.json" in self._files else self._files[self._names[0]]

    def missing(self, ranges: Iterable[Range]) -> list[Range]:
        """What of these is not there yet, sorted. Raises DownloadError for a range outside the files."""
        wanted = merge(ranges)
        for part in wanted:
            self.manifest.check(part)
        with self._guard:
            return [
                Range(part.file, start, stop)
                for part in wanted
                for start, stop in self._there[part.file].holes(part.start, part.stop)
            ]

    def check_space(self, ranges: Iterable[Range]) -> int:
        """Bytes of `ranges` that are missing. Raises DownloadError, with the numbers, when the disk lacks the room."""
        missing = self.missing(ranges)
        num_bytes = sum(part.num_bytes for part in missing)
        with _disk(self.root):
            check_space(self.root, num_bytes + 2 * BLOCK_BYTES * len(missing))
        return num_bytes

    def write(self, file: str, start: int, data: bytes | memoryview) -> None:
        """Put bytes in their place. Raises DownloadError when they belong nowhere or the disk is full."""
        view = memoryview(data).cast("B")
        if not len(view):
            return
        part = Range(file, start, start + len(view))
        self.manifest.check(part)
        if file not in self._open:
            raise DownloadError(f"The copy {self.root} is closed and takes no more data.")
        with _disk(self.root):
            while view:
                done = os.pwrite(self._open[file], view, part.stop - len(view))
                view = view[done:]
            with self._guard:
                self._there[file].add(part.start, part.stop)
                self._pending.append(part)
                if sum(pending.num_bytes for pending in self._pending) >= COMMIT_BYTES:
                    self._commit()

    def flush(self) -> None:
        """Make sure that a crash does not lose what was written. Raises DownloadError."""
        with _disk(self.root), self._guard:
            self._commit()

    def check(self, shard: Shard) -> None:
        """Make sure that all a shard needs is there, and that it is the model it is said to be. Flushes.

        Raises DownloadError; when it is another model, what was fetched is thrown away first.
        """
        self.flush()
        source = open_source(self.path)
        try:
            missing = self.missing(needed(source, shard))
            model_hash = source.model_hash
        finally:
            source.close()
        if missing:
            num_bytes = sum(part.num_bytes for part in missing)
            raise DownloadError(f"{num_bytes} bytes of the copy {self.root} are still missing.", "Fetch it again.")
        if model_hash != self.manifest.model_hash:
            with _disk(self.root), self._guard:
                self._make_anew()
            raise DownloadError(
                f"What was fetched into {self.root} is not the model that was promised: its hash differs.",
                "Fetch it again; if it stays so, pull the model on this node.",
            )

    def remove(self) -> None:
        """Give back the disk space, and close."""
        with _disk(self.root), self._guard:
            self._pending.clear()
            self._close_files()
            delete(self.root)
        self.close()

    def close(self) -> None:
        """Flush, and let others write."""
        try:
            with _disk(self.root), self._guard:
                self._commit()
        finally:
            self._close_files()
            lock, self._lock = self._lock, -1
            if lock >= 0:
                os.close(lock)

    def __enter__(self) -> SparseCopy:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _resume(self) -> None:
        there = self._read_journal()
        if there is None:
            self._make_anew()
            return
        self._there = there
        self._open_files()
        self._write_journal()

    def _make_anew(self) -> None:
        self._close_files()
        self._pending.clear()
        delete(self.root)
        (self.root / "files").mkdir(parents=True)
        self._there = {name: _Spans() for name in self._names}
        self._open_files()
        for name, size_bytes in self.manifest.files:
            os.ftruncate(self._open[name], size_bytes)
            os.fsync(self._open[name])
        sync(self.root / "files")
        self._write_journal()

    def _open_files(self) -> None:
        for name, path in self._files.items():
            self._open[name] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def _close_files(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _commit(self) -> None:
        """Data first, then the lines that say so."""
        if not self._pending:
            return
        for name in {part.file for part in self._pending}:
            os.fsync(self._open[name])
        lines = b"".join(self._line(part) for part in merge(self._pending))
        with (self.root / JOURNAL).open("ab") as journal:
            journal.write(lines)
            journal.flush()
            os.fsync(journal.fileno())
        self._pending.clear()

    def _line(self, part: Range) -> bytes:
        body = b"%d %d %d" % (self._names.index(part.file), part.start, part.stop)
        return b"%s %08x\n" % (body, zlib.crc32(body))

    def _title(self) -> bytes:
        digest = hashlib.sha256(json.dumps(self.manifest.files).encode()).hexdigest()
        return f"{FORMAT} {digest}".encode()

    def _write_journal(self) -> None:
        """All of it, in as few lines as there are ranges."""
        parts = [Range(name, *span) for name, spans in self._there.items() for span in spans]
        new = self.root / f"{JOURNAL}.new"
        with new.open("wb") as journal:
            journal.write(self._title() + b"\n" + b"".join(map(self._line, parts)))
            journal.flush()
            os.fsync(journal.fileno())
        new.replace(self.root / JOURNAL)
        sync(self.root)

    def _read_journal(self) -> dict[str, _Spans] | None:
        """None unless a copy of just these files lies there."""
        try:
            title, *lines = (self.root / JOURNAL).read_bytes().split(b"\n")
            sizes = {name: path.stat(follow_symlinks=False).st_size for name, path in self._files.items()}
        except FileNotFoundError:
            return None
        if title != self._title() or sizes != dict(self.manifest.files):
            log.info("%s is a copy of other files; making it anew.", self.root)
            return None
        there = {name: _Spans() for name in self._names}
        for line in lines:
            part = self._parse(line)
            if part is not None:
                there[part.file].add(part.start, part.stop)
        return there

    def _parse(self, line: bytes) -> Range | None:
        body, _, checksum = line.rpartition(b" ")
        if checksum != b"%08x" % zlib.crc32(body):
            return None
        try:
            index, start, stop = map(int, body.split())
            part = Range(self._names[index], start, stop)
            self.manifest.check(part)
        except (ValueError, IndexError, DownloadError):
            return None
        return part


class _Spans:
    """Spans of one file, sorted, none touching another."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._stops, strict=True)

    def add(self, start: int, stop: int) -> None:
        first = bisect.bisect_left(self._stops, start)
        last = bisect.bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def holes(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """What of `start` to `stop` no span covers."""
        index = bisect.bisect_right(self._stops, start)
        for a, b in zip(self._starts[index:], self._stops[index:], strict=True):
            if a >= stop:
                break
            if a > start:
                yield start, a
            start = b
        if start < stop:
            yield start, stop


@contextlib.contextmanager
def _disk(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise DownloadError(
            f"The copy {root} cannot be written: {exc.strerror or exc}.",
            "Make room (cluster rm MODEL), or give a --home on a larger disk.",
        ) from exc


def _locked(folder: Path, model_hash: str) -> int:
    """A descriptor that holds the lock until it is closed."""
    locks = folder / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    fd = os.open(locks / model_hash, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.ExitStack() as opened:
        opened.callback(os.close, fd)
        if not try_lock(fd):
            raise BusyError(f"The copy {folder / model_hash} is just being written.", "Wait for that, or stop it.")
        opened.pop_all()
    return fd
