"""One node a home, whatever became of the one before."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from node.errors import UsageError
from node.instance import InstanceLock, prepare_home, run_folder, socket_path

HOLD = """
import sys, time
from pathlib import Path
from node.instance import InstanceLock
print(InstanceLock(Path(sys.argv[1])).acquire(), flush=True)
time.sleep(60)
"""


def test_only_one_holds_it(tmp_path: Path) -> None:
    prepare_home(tmp_path)
    first, second = InstanceLock(tmp_path), InstanceLock(tmp_path)
    assert first.holder() is None
    assert first.acquire()
    assert not second.acquire()
    assert second.holder() == os.getpid()
    assert not second.wait_released(0)
    first.release()
    assert second.holder() is None and second.wait_released(0)
    assert second.acquire()
    second.release()


def test_a_killed_holder_leaves_nothing_behind(tmp_path: Path) -> None:
    prepare_home(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child, child.stdout:
        assert child.stdout.readline() == "True\n"
        lock = InstanceLock(tmp_path)
        assert lock.holder() == child.pid
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert lock.holder() is None
    with lock:
        assert lock.acquire()


def test_a_new_home_is_private(tmp_path: Path) -> None:
    home = tmp_path / "a" / "home"
    prepare_home(home)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (home, run_folder(home))] == [0o700, 0o700]


def test_an_open_run_folder_is_closed_again(tmp_path: Path) -> None:
    run_folder(tmp_path).mkdir(mode=0o755)
    prepare_home(tmp_path)
    assert stat.S_IMODE(run_folder(tmp_path).stat().st_mode) == 0o700


def test_homes_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too long for a socket"):
        prepare_home(tmp_path / ("x" * 100))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be used"):
        prepare_home(tmp_path / "file")
    assert socket_path(tmp_path).parent == run_folder(tmp_path)
