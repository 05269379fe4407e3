"""What the command line promises before any model is involved."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.tui.conftest import ROOT, Cluster
from tui.cli import COMMANDS

HEAVY = (
    "numpy",
    "pydantic",
    "starlette",
    "uvicorn",
    "tokenizers",
    "httpx",
    "rich",
    "jinja2",
    "huggingface_hub",
    "psutil",
)


def loaded_by(arguments: str) -> set[str]:
    """Top-level packages that a command line imports, counted in a fresh interpreter."""
    code = (
        f"import contextlib, io, sys, tui.cli\n"
        f"with contextlib.redirect_stdout(io.StringIO()): assert tui.cli.main({arguments}) == 0\n"
        f"print(*{{name.split('.')[0] for name in sys.modules}})"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(child.stdout.split())


def test_help_loads_nothing_heavy() -> None:
    assert loaded_by("['--help']") & set(HEAVY) == set()
    assert loaded_by("['up', '--help']") & {"numpy", "starlette", "tokenizers", "httpx", "rich"} == set()


def test_help_names_every_command(cluster: Cluster) -> None:
    for arguments in (["--help"], []):
        shown = cluster.run(*arguments)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert all(f"  {name} " in shown.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(cluster: Cluster, name: str) -> None:
    shown = cluster.run(name, "--help")
    assert shown.returncode == 0
    assert shown.stdout.startswith(f"Usage: cluster {name}") and "--home DIR" in shown.stdout


def test_up_offers_the_settings_that_work_with_their_defaults(cluster: Cluster) -> None:
    text = " ".join(cluster.run("up", "--help").stdout.split())
    for flag in ("--name", "--api-host", "--api-port", "--backend", "--threads", "--memory", "--context", "--mode"):
        assert flag in text
    assert "Port the API listens on. [default: 7117]" in text
    assert "--peer" not in text and "--token" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frobnicate"], "No such command 'frobnicate'"),
        (["up", "--colour"], "No such option: --colour"),
        (["up", "--api-port", "http"], "--api-port"),
        (["up", "--api-port", "70000"], "--api-port = 70000"),
        (["up", "--mode", "tensor"], "--mode tensor is not available yet"),
        (["up", "--backend", "cuda"], "--backend cuda is not available yet"),
        (["up", "--peer", "host"], "--peer is not available yet"),
        (["up", "--interface", "eth0"], "--interface is not available yet"),
        (["up", "--peer-port", "7118"], "--peer-port is not available yet"),
        (["up", "--token", "secret"], "--token is not available yet"),
        (["up", "--memory", "lots"], "'lots' is not a size"),
        (["run"], "Missing argument"),
        (["rm"], "Missing argument"),
    ],
)
def test_misuse_is_told_in_words_and_exits_with_2(cluster: Cluster, arguments: list[str], words: str) -> None:
    shown = cluster.run(*arguments)
    assert (shown.returncode, shown.stdout) == (2, "")
    first, *rest = shown.stderr.splitlines()
    assert first.startswith("error: ") and words in first
    assert rest and rest[0].startswith("hint: ")


def test_a_bad_variable_is_misuse_too(cluster: Cluster) -> None:
    shown = cluster.run("up", ROOST_THREADS="many")
    assert shown.returncode == 2 and "ROOST_THREADS = 'many'" in shown.stderr


def test_status_and_down_without_a_node(cluster: Cluster) -> None:
    for arguments in (["status"], ["status", "--json"]):
        shown = cluster.run(*arguments)
        assert (shown.returncode, shown.stdout) == (1, "")
        assert "hint: Start one: cluster up" in shown.stderr
    down = cluster.run("down")
    assert (down.returncode, down.stderr) == (0, "no node is running\n")


def test_version(cluster: Cluster) -> None:
    assert cluster.run("--version").stdout.startswith("roost ")


def test_a_reader_that_leaves_is_no_error(cluster: Cluster) -> None:
    with subprocess.Popen(
        cluster.command("--help"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=cluster.env
    ) as child:
        assert child.stdout and child.stderr
        child.stdout.close()
        assert child.stderr.read() == b""
