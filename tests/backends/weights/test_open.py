"""One door for every kind of model, and words for everything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.errors import ModelFileError
from backends.weights.gguf_source import GGUFSource
from backends.weights.open import open_source
from backends.weights.safetensors_source import SafetensorsSource
from tests.hf_models import write_safetensors_model
from tests.models import random_weights, tiny_arch, write_gguf


def test_both_kinds_are_opened(tmp_path: Path) -> None:
    arch = tiny_arch("qwen3")
    assert isinstance(open_source(write_gguf(tmp_path / "x.gguf", arch)), GGUFSource)
    folder = write_safetensors_model(tmp_path / "folder", arch, random_weights(arch))
    assert isinstance(open_source(folder), SafetensorsSource)
    with pytest.raises(ModelFileError, match="only part of a model"):
        open_source(folder / "model.safetensors")


def test_everything_else_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "text.gguf").write_text("hello, world, this is not a model\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "listing").mkdir()
    (tmp_path / "listing" / "config.json").write_text("[]")
    wanted = {
        "absent.gguf": "does not exist",
        "empty.gguf": "is empty",
        "text.gguf": "is not a GGUF file",
        "folder": r"has no config\.json",
        "listing": "does not hold a JSON object",
    }
    for name, words in wanted.items():
        with pytest.raises(ModelFileError, match=words) as caught:
            open_source(tmp_path / name)
        assert str(tmp_path / name) in caught.value.message
        assert caught.value.cure


def test_huge_configurations_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b" " * ((16 << 20) + 1))
    with pytest.raises(ModelFileError, match="larger than 16 MiB"):
        open_source(tmp_path)
