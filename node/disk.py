"""What is done to folders and files so that a crash or a second process finds them whole."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is safe on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def try_lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Take a file lock (exclusive, or LOCK_SH) without waiting. It ends with the descriptor."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def delete(folder: Path) -> int:
    """Rename, then delete: a folder is gone at once or not at all. Returns the bytes that no other name keeps."""
    if not folder.exists() and not folder.is_symlink():
        return 0
    trash = Path(tempfile.mkdtemp(prefix=".trash-", dir=folder.parent))
    folder.rename(trash / folder.name)
    freed = 0
    for path in trash.rglob("*"):
        status = path.lstat()
        if path.is_file() and not path.is_symlink() and status.st_nlink == 1:
            freed += status.st_size
    # also what a killed process left
    for leftover in folder.parent.glob(".trash-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    return freed
