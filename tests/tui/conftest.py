"""The real command line as child processes, each test with a home of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60


class Cluster:
    """`cluster` with one home folder. Environment variables of the developer do not leak in."""

    def __init__(self, home: Path) -> None:
        self.home = home
        kept = {key: value for key, value in os.environ.items() if not key.startswith("ROOST_")}
        self.env = kept | {"ROOST_HOME": str(home), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}

    def command(self, *arguments: object) -> list[str]:
        return [sys.executable, "-m", "tui.cli", *map(str, arguments)]

    def run(self, *arguments: object, input: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            input=input,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=self.env | env,
            cwd=self.home,
        )


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    # not tmp_path: a socket's path may have some hundred bytes only
    home = Path(tempfile.mkdtemp(prefix="roost-"))
    yield Cluster(home)
    shutil.rmtree(home)
