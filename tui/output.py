"""What commands print: facts on stdout, everything else on stderr, colour and bars only where a person looks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import IO, Any

from discovery.errors import RoostError


def is_terminal(stream: IO[str]) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def styled(text: str, code: str, stream: IO[str]) -> str:
    """`text` in an ANSI style, unless the stream is no terminal or NO_COLOR is set."""
    if not is_terminal(stream) or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{code}m{text}\x1b[0m"


def print_error(message: str, hint: str = "") -> None:
    print(f"{styled('error:', '1;31', sys.stderr)} {message}", file=sys.stderr)
    if hint:
        print(f"{styled('hint:', '1;36', sys.stderr)} {hint}", file=sys.stderr)


def print_roost_error(error: RoostError) -> None:
    print_error(error.message, error.cure)


def note(text: str) -> None:
    """A word to the person who waits: never data."""
    print(text, file=sys.stderr, flush=True)


def print_json(document: Any) -> None:
    """One document on stdout."""
    print(json.dumps(document, indent=2, ensure_ascii=False), flush=True)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns as wide as their widest cell, two spaces apart."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
