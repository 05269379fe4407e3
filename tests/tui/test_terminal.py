"""On a pseudo terminal: the conversation, and the summary of `up`."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.tui.conftest import TIMEOUT_S, Cluster, free_port


class Terminal:
    def __init__(self, cluster: Cluster, *arguments: object, **env: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            cluster.command(*arguments),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=cluster.env | {"TERM": "xterm", "COLUMNS": "100"} | env,
            cwd=cluster.home,
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def read_some(self) -> None:
        """Wait for anything."""
        while not self.seen:
            self.seen += os.read(self.master, 1).decode("utf-8", "replace")

    def read_until(self, *marks: str) -> str:
        """What came since the last call, up to and with the marks in order."""
        for mark in marks:
            while mark not in self.seen:
                assert select.select([self.master], [], [], TIMEOUT_S)[0], f"{mark!r} is not in {self.seen!r}"
                self.seen += os.read(self.master, 4096).decode("utf-8", "replace")
            before, _, self.seen = self.seen.partition(mark)
        return before


@contextmanager
def terminal(cluster: Cluster, *arguments: object, **env: str) -> Iterator[Terminal]:
    opened = Terminal(cluster, *arguments, **env)
    try:
        yield opened
    finally:
        if opened.process.poll() is None:
            opened.process.kill()
        opened.process.wait(TIMEOUT_S)
        os.close(opened.master)


def test_a_conversation(cluster: Cluster, tiny_model: Path) -> None:
    with terminal(cluster, "run", tiny_model, "--max-tokens", 3, "--temperature", 0) as shell:
        shell.read_until("/bye or Ctrl-D leaves", ">>> ")
        shell.type("hello\n")
        shell.read_until("hello", "\n", ">>> ")
        shell.type("/what\n")
        shell.read_until("/bye or Ctrl-D leaves", ">>> ")
        shell.type(f"{'long ' * 700}\n")
        shell.read_until("error:", "maximum context length", ">>> ")
        shell.type("/clear\n")
        shell.read_until(">>> ")
        shell.type("/bye\n")
        assert shell.process.wait(TIMEOUT_S) == 0


def test_ctrl_c_stops_an_answer_and_not_the_conversation(cluster: Cluster, tiny_model: Path) -> None:
    with terminal(cluster, "run", tiny_model, "--temperature", 0) as shell:
        shell.read_until(">>> ")
        shell.type("hello\n")
        shell.read_until("hello", "\n")
        shell.read_some()
        shell.process.send_signal(signal.SIGINT)
        shell.read_until("stopped", ">>> ")
        shell.type("\x04")
        assert shell.process.wait(TIMEOUT_S) == 0


def test_up_shows_where_to_point_an_agent(cluster: Cluster, tiny_model: Path) -> None:
    port = free_port()
    with terminal(cluster, "up", tiny_model, "--api-port", port, "--threads", 1) as shell:
        shell.read_until("tiny is ready", f"http://127.0.0.1:{port}/v1", "OPENAI_BASE_URL=", "cluster run tiny")
        assert cluster.run("down").returncode == 0
        assert shell.process.wait(TIMEOUT_S) == 0


def test_no_color_is_heard(cluster: Cluster) -> None:
    for env, coloured in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
        with terminal(cluster, "status", **env) as shell:
            assert ("\x1b[" in shell.read_until("cluster up")) is coloured
