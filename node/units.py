"""Sizes and times as people write and read them."""

from __future__ import annotations

import re

from node.errors import UsageError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """Bytes of "8GiB", "8G" (binary), "8GB" (decimal) or a plain number. Raises UsageError."""
    match = _SIZE.fullmatch(str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise UsageError(f"'{text}' is not a size.", 'Write it like "8GiB", "512MiB" or a number of bytes.')
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_bytes(count: float) -> str:
    """`count` bytes with three significant digits: "742 MiB", "1.46 GiB"."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1000 or unit == "TiB":
            break
        size /= 1024
    digits = 0 if unit == "B" or size >= 100 else 1 if size >= 10 else 2
    return f"{size:.{digits}f} {unit}"
