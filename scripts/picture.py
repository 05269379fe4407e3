"""Draw the README's picture from a real session: start a node on a terminal, ask it something, stop it.

Run as `python scripts/picture.py docs/terminal.svg [MODEL]` inside the environment; it uses its own home folder, and
MODEL (a name or a path) where the default one is not wanted.
"""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 92, 30
PATIENCE_S = 180.0
READY = b"ready"


class Terminal:
    """A child on a pseudo terminal, and what it wrote."""

    def __init__(self, arguments: list[str], env: dict[str, str]) -> None:
        self.output = b""
        self._master, slave = pty.openpty()
        self._child = subprocess.Popen(arguments, stdin=slave, stdout=slave, stderr=slave, env=env, close_fds=True)
        os.close(slave)

    def read_until(self, mark: bytes | None) -> str:
        """Everything up to the mark's line, or up to the end of the child."""
        deadline = time.monotonic() + PATIENCE_S
        while mark is None or mark not in self.output:
            if time.monotonic() > deadline:
                raise SystemExit(f"nothing like {mark!r} came")
            try:
                part = os.read(self._master, 4096)
            except OSError:  # Linux: the other side is closed
                break
            if not part:
                break
            self.output += part
        return self.output.decode("utf-8", "replace").replace("\r\n", "\n")

    def wait(self) -> None:
        self._child.wait(PATIENCE_S)
        os.close(self._master)


def main() -> None:
    target, model = Path(sys.argv[1]), sys.argv[2:3]
    cluster = str(Path(sys.executable).with_name("cluster"))
    console = Console(record=True, width=COLUMNS, height=ROWS, file=io.StringIO(), force_terminal=True)

    def show(command: str, output: str) -> None:
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        console.print(Text.from_ansi(output.rstrip("\n")))

    with tempfile.TemporaryDirectory(prefix="roost-") as home:
        env = os.environ | {"ROOST_HOME": home, "COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm-256color"}
        node = Terminal([cluster, "up", *model], env)
        show("cluster up", node.read_until(READY))
        served = model or ["smollm2:135m"]
        question = "Name three primary colours."
        for shown, arguments in (
            (f'cluster run smollm2:135m "{question}"', ["run", *served, question]),
            ("cluster status", ["status"]),
            ("cluster down", ["down"]),
        ):
            terminal = Terminal([cluster, *arguments], env)
            show(shown, terminal.read_until(None))
            terminal.wait()
        node.read_until(None)
        node.wait()
    target.write_text(console.export_svg(title="roost"), "utf-8")


if __name__ == "__main__":
    main()
