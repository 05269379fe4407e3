"""What a person sees while a model is fetched."""

from __future__ import annotations

import sys

import pytest

from node.models.download import Progress
from tui import fetch

STEPS = [
    Progress("waiting"),
    Progress("downloading", 0, 1 << 20),
    Progress("downloading", 1 << 19, 1 << 20),
    Progress("downloading", 1 << 20, 1 << 20),
    Progress("verifying", 0, 1 << 20),
]


def test_off_a_terminal_a_line_a_stage_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with fetch.lines("m") as show:
        for step in STEPS:
            show(step)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["m: waiting", "m: downloading, 1.00 MiB", "m: verifying, 1.00 MiB"]


def test_on_a_terminal_a_bar_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with fetch.bar("m") as show:
        for step in STEPS:
            show(step)
    out, err = capsys.readouterr()
    assert out == "" and "m verifying" in err


def test_which_of_them_depends_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert not fetch.is_terminal(sys.stderr)
