"""The Hugging Face client library against a stand-in of the hub on loopback."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.errors import DownloadError, UnsupportedModelError
from node.models.catalog import HubFile
from node.models.download import Progress
from node.models.hub import HubFetcher, choose_file
from tests.node.models.standin import Faults, StandIn

CONTENT = random.Random(0).randbytes(300_000)
SOURCE = HubFile("owner/model-GGUF", "model-Q8_0.gguf")


@pytest.fixture
def server() -> Iterator[StandIn]:
    with StandIn(files={"/": b""}) as server:
        server.add_hub_file(SOURCE.repo, "model-Q8_0.gguf", CONTENT)
        yield server


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    (tmp_path / "staged").mkdir()
    return tmp_path / "staged"


def hub(server: StandIn, tmp_path: Path) -> HubFetcher:
    return HubFetcher(server.url, tmp_path / "hub")


def test_a_file_comes_through_the_shared_cache(server: StandIn, tmp_path: Path, staged: Path) -> None:
    seen: list[Progress] = []
    assert hub(server, tmp_path).fetch(SOURCE, staged, seen.append) == "model-Q8_0.gguf"
    file = staged / "model-Q8_0.gguf"
    assert file.read_bytes() == CONTENT
    assert seen[-1] == Progress("downloading", len(CONTENT), len(CONTENT))
    assert all(report.done_bytes <= len(CONTENT) for report in seen)
    # one copy on disk, under two names
    assert file.stat().st_nlink == 2
    again = tmp_path / "again"
    again.mkdir()
    num_requests = len(server.requests)
    hub(server, tmp_path).fetch(SOURCE, again, seen.append)
    assert len(server.requests) == num_requests
    assert (again / "model-Q8_0.gguf").samefile(file)


def test_the_file_is_found_by_its_quantization(server: StandIn, tmp_path: Path, staged: Path) -> None:
    server.add_hub_file(SOURCE.repo, "model-Q4_K_M.gguf", b"smaller")
    assert hub(server, tmp_path).fetch(HubFile(SOURCE.repo), staged, lambda p: None) == "model-Q4_K_M.gguf"
    (staged / "model-Q4_K_M.gguf").unlink()
    assert hub(server, tmp_path).fetch(HubFile(SOURCE.repo, "q8_0"), staged, lambda p: None) == "model-Q8_0.gguf"


def test_a_folder_of_safetensors(server: StandIn, tmp_path: Path, staged: Path) -> None:
    for name in ("config.json", "tokenizer.json", "a.safetensors", "README.md", "pickle.bin"):
        server.add_hub_file("owner/model", name, name.encode())
    seen: list[Progress] = []
    assert hub(server, tmp_path).fetch(HubFile("owner/model"), staged, seen.append) is None
    assert {path.name for path in staged.iterdir()} == {"config.json", "tokenizer.json", "a.safetensors"}
    assert (staged / "config.json").read_text() == "config.json"
    assert seen[-1].done_bytes == seen[-1].total_bytes


def test_a_wrong_file_is_forgotten_everywhere(server: StandIn, tmp_path: Path, staged: Path) -> None:
    fetcher = hub(server, tmp_path)
    name = fetcher.fetch(SOURCE, staged, lambda p: None)
    assert name is not None
    fetcher.forget(SOURCE, staged, name)
    assert list(staged.iterdir()) == []
    assert not any(path.is_file() and path.stat().st_size == len(CONTENT) for path in (tmp_path / "hub").rglob("*"))


def test_names_that_the_hub_does_not_know(server: StandIn, tmp_path: Path, staged: Path) -> None:
    with pytest.raises(DownloadError, match=r"The hub has no owner/model-GGUF/none\.gguf"):
        hub(server, tmp_path).fetch(HubFile(SOURCE.repo, "none.gguf"), staged, lambda p: None)
    with pytest.raises(DownloadError, match="The hub has no owner/none"):
        hub(server, tmp_path).fetch(HubFile("owner/none"), staged, lambda p: None)


def test_gated_and_private_ones(server: StandIn, tmp_path: Path, staged: Path) -> None:
    server.faults = Faults(status=403, num_status=99)
    with pytest.raises(DownloadError, match="accepted its terms") as caught:
        hub(server, tmp_path).fetch(SOURCE, staged, lambda p: None)
    assert "HF_TOKEN" in caught.value.cure
    server.faults = Faults(status=401, num_status=99)
    with pytest.raises(DownloadError) as caught:
        hub(server, tmp_path).fetch(SOURCE, staged, lambda p: None)
    assert "HF_TOKEN" in caught.value.cure


def test_out_of_reach_is_told_quickly(tmp_path: Path, staged: Path) -> None:
    with pytest.raises(DownloadError, match="out of reach") as caught:
        HubFetcher("http://127.0.0.1:1", tmp_path / "hub").fetch(SOURCE, staged, lambda p: None)
    assert "HF_ENDPOINT" in caught.value.cure


def test_a_hub_that_hangs_is_out_of_reach(
    server: StandIn, tmp_path: Path, staged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.models.hub.REACH_TIMEOUT_S", 0.1)
    server.faults = Faults(hang=True)
    with pytest.raises(DownloadError, match="out of reach"):
        hub(server, tmp_path).fetch(SOURCE, staged, lambda p: None)


def test_offline_uses_the_cache_alone(
    server: StandIn, tmp_path: Path, staged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE"):
        hub(server, tmp_path).fetch(SOURCE, staged, lambda p: None)
    assert server.requests == []


FILES = [
    "README.md",
    "m-Q8_0.gguf",
    "m-Q4_K_M.gguf",
    "m-Q2_K.gguf",
    "mmproj-f16.gguf",
    "big-Q4_K_M-00001-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("asked", "files", "chosen"),
    [
        (None, FILES, "m-Q4_K_M.gguf"),
        ("q8_0", FILES, "m-Q8_0.gguf"),
        (None, ["a.Q8_0.gguf", "a.Q4_1.gguf"], "a.Q4_1.gguf"),
        (None, ["strange.gguf", "a.F16.gguf"], "a.F16.gguf"),
        (None, ["config.json", "model.safetensors"], None),
    ],
)
def test_which_file_is_taken(asked: str | None, files: list[str], chosen: str | None) -> None:
    assert choose_file(HubFile("o/r", asked), files) == chosen


@pytest.mark.parametrize(("asked", "files"), [("Q4_K_M", FILES), ("Q3", FILES), (None, ["README.md"]), (None, [])])
def test_what_cannot_be_chosen(asked: str | None, files: list[str]) -> None:
    with pytest.raises(DownloadError):
        choose_file(HubFile("o/r", asked), files)


def test_files_in_pieces_are_refused(server: StandIn, tmp_path: Path, staged: Path) -> None:
    name = "big-Q4_K_M-00001-of-00002.gguf"
    server.add_hub_file("owner/big", name, b"x")
    with pytest.raises(UnsupportedModelError, match="several pieces"):
        hub(server, tmp_path).fetch(HubFile("owner/big"), staged, lambda p: None)
