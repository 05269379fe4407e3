"""Control groups of both versions, as files in a folder."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from node import limits

MIB = 1 << 20


@pytest.fixture
def groups(tmp_path: Path):
    """Write files under a fake /sys/fs/cgroup; returns (root, membership)."""

    def make(membership: str, files: dict[str, str]) -> tuple[Path, Path]:
        root = tmp_path / "cgroup"
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "self").write_text(membership)
        return root, tmp_path / "self"

    return make


def test_version_two_limit_counts_reclaimable_cache_as_free(groups) -> None:
    root, own = groups(
        "0::/a/b\n",
        {
            "a/memory.max": f"{512 * MIB}\n",
            "a/memory.current": f"{300 * MIB}\n",
            "a/memory.stat": f"anon 1\ninactive_file {100 * MIB}\n",
            "a/b/memory.max": "max\n",
            "a/b/memory.current": "5\n",
        },
    )
    found = limits.memory(root, own)
    assert (found.total_bytes, found.available_bytes) == (512 * MIB, 312 * MIB)
    assert found.source.endswith("/a")


def test_version_one_limit(groups) -> None:
    root, own = groups(
        "4:memory:/job\n0::/\n",
        {"memory/job/memory.limit_in_bytes": f"{64 * MIB}", "memory/job/memory.usage_in_bytes": f"{80 * MIB}"},
    )
    assert limits.memory(root, own).available_bytes == 0


def test_a_container_that_sees_its_own_group_as_the_top(groups) -> None:
    root, own = groups("0::/docker/xyz\n", {"memory.max": f"{32 * MIB}", "memory.current": "0"})
    assert limits.memory(root, own).available_bytes == 32 * MIB


@pytest.mark.parametrize("limit", ["max", str(1 << 62), "what"])
def test_no_limit_leaves_the_machine(groups, limit: str) -> None:
    root, own = groups("0::/a\n", {"a/memory.max": limit, "a/memory.current": "1"})
    found = limits.memory(root, own)
    assert (found.total_bytes, found.source) == (psutil.virtual_memory().total, "this machine")


def test_without_control_groups(tmp_path: Path) -> None:
    assert limits.memory(tmp_path, tmp_path / "none").total_bytes == psutil.virtual_memory().total
    assert limits.num_cores(tmp_path, tmp_path / "none") >= 1


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        ("0::/a\n", {"a/cpu.max": "100000 100000\n"}),
        ("0::/a\n", {"a/cpu.max": "50000 100000\n"}),
        ("3:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "150000", "cpu/a/cpu.cfs_period_us": "100000"}),
    ],
)
def test_a_cpu_quota_of_less_than_two_is_one_core(groups, membership: str, files: dict[str, str]) -> None:
    assert limits.num_cores(*groups(membership, files)) == 1


def test_no_quota_changes_nothing(groups, tmp_path: Path) -> None:
    unlimited = groups("0::/a\n", {"a/cpu.max": "max 100000"})
    assert limits.num_cores(*unlimited) == limits.num_cores(tmp_path, tmp_path / "none")
