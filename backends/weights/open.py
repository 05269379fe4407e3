"""The front door of the weights: a path in, a `WeightSource` out."""

from __future__ import annotations

from pathlib import Path

from backends.errors import ModelFileError
from backends.weights.gguf_source import GGUFSource
from backends.weights.safetensors_source import SafetensorsSource
from backends.weights.source import WeightSource


def open_source(path: Path) -> WeightSource:
    """Open a GGUF file (any part of a split one) or a Hugging Face model folder.

    Raises ModelFileError for what is missing, truncated or malformed, UnsupportedModelError for architectures,
    quantizations and options that have no native form.
    """
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ModelFileError(
                f"The folder {path} has no config.json.",
                "Give a Hugging Face model folder, or the path of a GGUF file.",
            )
        return SafetensorsSource.open(path)
    if not path.exists():
        raise ModelFileError(f"{path} does not exist.", "Check the path, or pull the model by its name.")
    if path.suffix == ".safetensors":
        raise ModelFileError(f"{path} is only part of a model.", "Give the folder that also holds its config.json.")
    return GGUFSource.open(path)
