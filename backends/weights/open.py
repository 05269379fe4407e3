"""The front door of the weights: a path in, a `WeightSource` out."""

from __future__ import annotations

from pathlib import Path

from backends.errors import ModelFileError
from backends.weights.gguf_source import GGUFSource
from backends.weights.source import WeightSource


def open_source(path: Path) -> WeightSource:
    """Open a GGUF file (any part of a split one) or a Hugging Face model folder.

    Raises ModelFileError for what is missing, truncated or malformed, UnsupportedModelError for architectures,
    quantizations and options that have no native form.
    """
    if not path.exists():
        raise ModelFileError(f"{path} does not exist.", "Check the path, or pull the model by its name.")
    return GGUFSource.open(path)
