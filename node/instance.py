"""At most one node a home folder. The kernel's file lock is the truth: it ends with its process, even by kill -9, so
there is no stale state to mistake for a running node. The pid in the file is for people and signals only.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

from node.disk import try_lock
from node.errors import UsageError

SOCKET_PATH_LIMIT = 100
"""Bytes: sun_path holds 108 on Linux and 104 on macOS, the ending zero included."""


def run_folder(home: Path) -> Path:
    return home / "run"


def socket_path(home: Path) -> Path:
    """Where the node listens for this machine's own command line."""
    return run_folder(home) / "control.sock"


def prepare_home(home: Path) -> None:
    """Make the home folder, for its owner's eyes only, and the run folder in it. Raises UsageError."""
    if len(os.fsencode(socket_path(home))) > SOCKET_PATH_LIMIT:
        raise UsageError(f"The path of the home folder {home} is too long for a socket.", "Give a shorter --home.")
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        run_folder(home).mkdir(mode=0o700, exist_ok=True)
        run_folder(home).chmod(0o700)
    except OSError as exc:
        raise UsageError(
            f"The home folder {home} cannot be used: {exc.strerror}.", "Give another --home, or set ROOST_HOME."
        ) from exc


class InstanceLock:
    """Held by the running node of one home. `holder` is the pid of whoever has it."""

    def __init__(self, home: Path) -> None:
        self._path = run_folder(home) / "node.lock"
        self._fd = -1

    def acquire(self) -> bool:
        """True if this process now is the node of its home, False if another is."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # a few tries: `holder` of some other process has the lock shared for an instant
        if not any(try_lock(fd) or time.sleep(0.02) for _ in range(5)):
            os.close(fd)
            return False
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd
        return True

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def holder(self) -> int | None:
        """The pid of the running node (0 in the instant before it wrote it), None when nobody runs."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            return None if try_lock(fd, fcntl.LOCK_SH) else int(os.pread(fd, 32, 0).strip() or b"0")
        finally:
            os.close(fd)

    def wait_released(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.holder() is not None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        return True

    def __enter__(self) -> InstanceLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
