from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.errors import UsageError
from node.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [("1", 1), (512, 512), ("8GiB", 8 << 30), ("8g", 8 << 30), ("8GB", 8_000_000_000), (" 1.5 MiB ", 3 << 19)],
)
def test_sizes_are_read(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "8XB", "1e9", "8 GiB extra", "0x10", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.98 KiB"), (1536, "1.50 KiB"), (742 << 20, "742 MiB"), (3 << 50, "3072 TiB")],
)
def test_sizes_are_written(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(0, 1 << 50))
def test_what_is_written_reads_back_within_half_a_percent_or_so(count: int) -> None:
    assert abs(parse_bytes(format_bytes(count)) - count) <= 0.006 * count
