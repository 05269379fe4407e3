"""The real command line as child processes, each test with a home of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models import tiny_arch, write_gguf

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


class RunningNode:
    """A `cluster up` child. Use as a context manager; it is killed at the end if it still lives."""

    def __init__(self, cluster: Cluster, *arguments: object, port: int | None = None) -> None:
        self.cluster = cluster
        self.port = port or free_port()
        self.api = f"http://127.0.0.1:{self.port}"
        self._log = (cluster.home / f"log-{self.port}").open("w+")
        self.process = subprocess.Popen(
            cluster.command("up", *arguments, "--api-port", self.port, "--threads", 1),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=cluster.env,
            cwd=cluster.home,
        )

    def wait_ready(self) -> str:
        """The ready line. Fails with the log when the process ends without one."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready "), self.log()
        return line.strip()

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def __enter__(self) -> RunningNode:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=TIMEOUT_S)
        self._log.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights that the CPU backend runs."""
    arch = tiny_arch("llama", head_dim=32, context_length=2048)
    return write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", arch, "Q4_0")
