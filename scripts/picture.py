"""Draw the README's picture from a real session: start a node on a terminal, ask it something, stop it.

Run as `python scripts/picture.py docs/terminal.svg` inside the environment; it fetches the default model into a home
folder of its own.
"""

from __future__ import annotations

import io
import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 100, 30
PATIENCE_S = 180.0
MODEL = "smollm2:135m"
STOP_HINT = b"cluster down"
"""The end of what `up` shows."""


class Terminal:
    """A child on a pseudo terminal."""

    def __init__(self, arguments: list[str], env: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        self._child = subprocess.Popen(arguments, stdin=slave, stdout=slave, stderr=slave, env=env, close_fds=True)
        os.close(slave)

    def read_until(self, *marks: bytes) -> str:
        """Everything up to the last of the marks, which come in order, or up to the end of the child."""
        output, start = b"", 0
        for mark in marks or (None,):
            while mark is None or output.find(mark, start) < 0:
                try:
                    output += os.read(self._master, 4096)
                except OSError:  # Linux: the other side is closed
                    if mark is not None:
                        raise SystemExit(f"{mark!r} never came: {output!r}") from None
                    break
            start = len(output) if mark is None else output.find(mark, start) + len(mark)
        return output[:start].decode("utf-8", "replace").replace("\r\n", "\n")

    def wait(self) -> None:
        self._child.wait(PATIENCE_S)
        os.close(self._master)


def main() -> None:
    target = Path(sys.argv[1])
    cluster = str(Path(sys.executable).with_name("cluster"))
    console = Console(record=True, width=COLUMNS, height=ROWS, file=io.StringIO(), force_terminal=True)

    def show(command: str, output: str) -> None:
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        console.print(Text.from_ansi(output.rstrip("\n")))

    with tempfile.TemporaryDirectory(prefix="roost-") as home:
        env = os.environ | {"ROOST_HOME": home, "COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm-256color"}
        subprocess.run([cluster, "pull", MODEL], env=env, check=True)
        node = Terminal([cluster, "up"], env)
        show("cluster up", node.read_until(STOP_HINT, b"\n", b"\n"))
        for line in (
            f"cluster run {MODEL} 'Name three primary colours.' --temperature 0",
            "cluster status",
            "cluster down",
        ):
            terminal = Terminal([cluster, *shlex.split(line)[1:]], env)
            show(line, terminal.read_until())
            terminal.wait()
        node.read_until()
        node.wait()
    # no fonts from the network: the picture is shown with what is there
    target.write_text(re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="roost"), flags=re.DOTALL), "utf-8")


if __name__ == "__main__":
    main()
