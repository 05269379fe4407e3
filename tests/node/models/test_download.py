"""One file over HTTP from a stand-in server that cuts, lies, stalls and refuses."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from node.errors import DownloadError
from node.models.download import (
    MAX_BARREN_TRIES,
    Downloader,
    Meter,
    Progress,
    check_space,
    content_length,
    file_sha256,
    make_client,
)
from tests.node.models.standin import Faults, StandIn

CONTENT = random.Random(0).randbytes(1_000_003)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server() -> Iterator[StandIn]:
    with StandIn(files={"/o.bin": CONTENT}) as server:
        yield server


class Fetch:
    """A download into a temporary folder, remembering what was reported and slept."""

    def __init__(self, folder: Path, server: StandIn, read_timeout_s: float = 5.0) -> None:
        self.target = folder / "o.bin"
        self.part = folder / "o.bin.part"
        self.seen: list[int] = []
        self.slept: list[float] = []
        self._server = server
        self._timeout = httpx.Timeout(5.0, read=read_timeout_s)

    def __call__(self, sha256: str | None = SHA256, path: str = "/o.bin") -> None:
        with make_client(self._timeout) as client:
            Downloader(client, self.slept.append).fetch(
                self._server.url + path, self.target, sha256=sha256, on_bytes=self.seen.append
            )


@pytest.fixture
def fetch(tmp_path: Path, server: StandIn) -> Fetch:
    return Fetch(tmp_path, server)


def test_a_whole_file(server: StandIn, fetch: Fetch) -> None:
    fetch()
    assert fetch.target.read_bytes() == CONTENT
    assert not fetch.part.exists()
    assert fetch.seen[-1] == len(CONTENT)
    assert fetch.seen == sorted(fetch.seen)
    assert server.gets("/o.bin") == [""]


def test_cut_connections_are_gone_on_with(server: StandIn, fetch: Fetch) -> None:
    server.faults = Faults(cut_after=300_000, num_cuts=3)
    fetch()
    assert fetch.target.read_bytes() == CONTENT
    assert server.gets("/o.bin") == ["", "bytes=300000-", "bytes=600000-", "bytes=900000-"]
    assert server.sent_bytes == len(CONTENT)
    assert len(fetch.slept) == 3


def test_a_part_of_an_earlier_run_is_gone_on_with(server: StandIn, fetch: Fetch) -> None:
    fetch.part.write_bytes(CONTENT[:777_777])
    fetch()
    assert fetch.target.read_bytes() == CONTENT
    assert server.gets("/o.bin") == ["bytes=777777-"]
    assert server.sent_bytes == len(CONTENT) - 777_777


def test_a_whole_part_costs_no_byte(server: StandIn, fetch: Fetch) -> None:
    fetch.part.write_bytes(CONTENT)
    fetch()
    assert fetch.target.read_bytes() == CONTENT
    assert server.sent_bytes == 0


def test_a_wrong_part_is_thrown_away(server: StandIn, fetch: Fetch) -> None:
    fetch.part.write_bytes(b"x" * 500)
    fetch()
    assert fetch.target.read_bytes() == CONTENT
    assert server.gets("/o.bin") == ["bytes=500-", ""]


def test_a_part_that_is_too_long_is_thrown_away(server: StandIn, fetch: Fetch) -> None:
    fetch.part.write_bytes(CONTENT + b"more")
    fetch()
    assert fetch.target.read_bytes() == CONTENT
    assert server.gets("/o.bin") == [f"bytes={len(CONTENT) + 4}-", ""]


def test_a_server_without_ranges_sends_all_again(server: StandIn, fetch: Fetch) -> None:
    server.faults = Faults(no_range=True)
    fetch.part.write_bytes(CONTENT[:600_000])
    fetch()
    assert fetch.target.read_bytes() == CONTENT
    assert server.sent_bytes == len(CONTENT)


def test_a_wrong_digest_removes_the_file(server: StandIn, fetch: Fetch) -> None:
    server.faults = Faults(corrupt=True)
    with pytest.raises(DownloadError, match="SHA-256 differs") as caught:
        fetch()
    assert caught.value.cure
    assert not fetch.target.exists()
    assert not fetch.part.exists()


@pytest.mark.parametrize(
    ("status", "words"), [(404, "answers 404"), (401, "answers 401"), (403, "answers 403"), (410, "answers 410")]
)
def test_refusals_are_final(server: StandIn, fetch: Fetch, status: int, words: str) -> None:
    server.faults = Faults(status=status, num_status=99)
    with pytest.raises(DownloadError, match=words) as caught:
        fetch()
    assert ("credentials" in caught.value.cure) == (status in (401, 403))
    assert len(server.requests) == 1
    assert fetch.slept == []


@pytest.mark.parametrize("status", [429, 500, 503])
def test_troubles_of_the_server_are_waited_for(server: StandIn, fetch: Fetch, status: int) -> None:
    server.faults = Faults(status=status, num_status=2)
    fetch()
    assert fetch.target.read_bytes() == CONTENT
    assert len(fetch.slept) == 2


def test_it_gives_up_in_the_end_and_keeps_what_it_has(server: StandIn, fetch: Fetch) -> None:
    fetch.part.write_bytes(CONTENT[:1000])
    server.faults = Faults(status=503, num_status=10**6)
    with pytest.raises(DownloadError, match=r"answers 503.*goes on where it stopped"):
        fetch()
    assert len(server.requests) == MAX_BARREN_TRIES
    assert fetch.part.read_bytes() == CONTENT[:1000]


def test_a_server_that_stalls(server: StandIn, tmp_path: Path) -> None:
    fetch = Fetch(tmp_path, server, read_timeout_s=0.1)
    server.faults = Faults(hang=True)
    with pytest.raises(DownloadError, match="stopped answering"):
        fetch()


def test_a_slow_server_is_fine(server: StandIn, fetch: Fetch) -> None:
    server.faults = Faults(delay_s=0.01)
    fetch()
    assert fetch.target.read_bytes() == CONTENT


def test_nobody_there(tmp_path: Path, server: StandIn) -> None:
    with make_client() as client, pytest.raises(DownloadError, match=r"http://127\.0\.0\.1:1/x cannot be fetched"):
        Downloader(client, lambda seconds: None).fetch(
            "http://user:secret@127.0.0.1:1/x?token=secret", tmp_path / "x", sha256=None, on_bytes=lambda done: None
        )


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/x", "http://[", "nonsense"])
def test_addresses_that_make_no_sense(tmp_path: Path, url: str) -> None:
    with make_client() as client, pytest.raises(DownloadError):
        Downloader(client, lambda seconds: None).fetch(url, tmp_path / "x", sha256=None, on_bytes=lambda done: None)


def test_sizes_are_asked_for(server: StandIn) -> None:
    with make_client() as client:
        assert content_length(client, f"{server.url}/o.bin") == len(CONTENT)
        assert content_length(client, f"{server.url}/none") is None
        assert content_length(client, "http://127.0.0.1:1/x") is None


def test_progress_never_passes_the_total() -> None:
    seen: list[Progress] = []
    meter = Meter(seen.append, "downloading", 100)
    meter.at(60)
    meter.next_file(60)
    meter.at(39)
    meter.at(70)
    assert [report.done_bytes for report in seen] == [60, 99, 100]
    assert {report.total_bytes for report in seen} == {100}


def test_disk_space_is_checked_first(tmp_path: Path) -> None:
    check_space(tmp_path, 1000)
    with pytest.raises(DownloadError, match="MiB free") as caught:
        check_space(tmp_path, 1 << 60)
    assert "rm" in caught.value.cure


def test_digests_report_how_far_they_got(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(CONTENT)
    seen: list[int] = []
    assert file_sha256(tmp_path / "f", seen.append) == SHA256
    assert seen[-1] == len(CONTENT)
