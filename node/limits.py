"""What this process may use of the machine: cores and memory, the smallest of the hardware and its control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the machine or its tightest control group (`total`), and what could be had now (`available`).
    `source` says whose limit it is, for people."""

    total_bytes: int
    available_bytes: int
    source: str


def num_cores(root: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Cores this process may use: physical ones, fewer where an affinity mask or a CPU quota says so. At least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(psutil.cpu_count(logical=False) or allowed, allowed)
    for folder in _groups("cpu", root, membership):
        quota, period = _cpu_quota(folder)
        if quota > 0 and period > 0:
            cores = min(cores, max(1, quota // period))
    return max(1, cores)


def memory(root: Path = CGROUP, membership: Path = MEMBERSHIP) -> Memory:
    """What can be allocated without swapping or being killed for it."""
    machine = psutil.virtual_memory()
    tightest = Memory(machine.total, machine.available, "this machine")
    for folder in _groups("memory", root, membership):
        limit = _number(folder, "memory.max", "memory.limit_in_bytes")
        used = _number(folder, "memory.current", "memory.usage_in_bytes")
        if limit is None or used is None or limit >= machine.total:
            continue
        left = max(0, limit - used + _reclaimable(folder))
        if left < tightest.available_bytes:
            tightest = Memory(limit, left, f"the control group {folder}")
    return tightest


def _groups(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """This process's folder of a controller and those above it, for both versions of control groups."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        folder = top / path.lstrip("/")
        # a container sees its own group as the top of the tree while /proc names it from the host's
        yield from (parent for parent in (folder, *folder.parents) if parent == top or top in parent.parents)


def _number(folder: Path, *names: str) -> int | None:
    """What the first of these files says, version two's name before version one's."""
    for name in names:
        try:
            return int((folder / name).read_text())
        except (OSError, ValueError):
            continue
    return None


def _reclaimable(folder: Path) -> int:
    """Bytes of file cache that the kernel gives back on demand."""
    try:
        rows = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(rows.get("total_inactive_file", rows.get("inactive_file", 0)))


def _cpu_quota(folder: Path) -> tuple[int, int]:
    """(quota, period) in microseconds, zeros when there is none."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return (0, 0) if quota == "max" else (int(quota), int(period))
    except (OSError, ValueError):
        return _number(folder, "cpu.cfs_quota_us") or 0, _number(folder, "cpu.cfs_period_us") or 0
