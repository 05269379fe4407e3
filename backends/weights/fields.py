"""Typed reading of hyperparameters that come from a file, and the checks that every architecture must pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from backends.arch import Architecture
from backends.errors import ModelFileError, UnsupportedModelError

MAX_LAYERS = 1024
MAX_SIZE = 1 << 24
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")


class Fields:
    """Hyperparameters under `prefix`, read with their types. `where` names the file in errors.

    A missing field without a default, and one of another type or out of range, raise ModelFileError. A null is missing.
    """

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self._values, self.where, self._prefix = values, where, prefix

    def get(self, name: str) -> Any:
        """The value as it is, or None."""
        return self._values.get(self._prefix + name)

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def integer(self, name: str, default: int | None = None, low: int = 1, high: int = MAX_SIZE) -> int:
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._odd(name, value, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._odd(name, value, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._required(name, default)
        if not isinstance(value, bool):
            raise self._odd(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._required(name, default)
        if not isinstance(value, str):
            raise self._odd(name, value, "text")
        return value

    def refuse(self, name: str, *neutral: object) -> None:
        """Raise UnsupportedModelError if a field that changes the arithmetic is set to anything but a neutral value."""
        value = self.get(name)
        is_neutral = np.ndim(value) == 0 and any(value == harmless for harmless in neutral)
        if value is not None and not is_neutral:
            raise UnsupportedModelError(
                f"{self.where}: this model sets {self._prefix}{name} to {_shown(value)}, which is not implemented.",
                "Use a model without it, or the llama runner once installed: pip install 'roost[llama]'.",
            )

    def _required(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelFileError(f"{self.where} lacks {self._prefix}{name}.", "Convert or download the model again.")
        return value

    def _odd(self, name: str, value: object, wanted: str) -> ModelFileError:
        return ModelFileError(
            f"{self.where}: {self._prefix}{name} is {_shown(value)}, not {wanted}.",
            "Convert or download the model again.",
        )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"


def unsupported_family(where: str, family: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{where}: the architecture {_shown(family)} is not supported.",
        f"Supported are {', '.join(FAMILIES)}; others run with the llama runner: pip install 'roost[llama]'.",
    )


def checked(arch: Architecture, where: str) -> Architecture:
    """Return `arch` if its numbers fit together. Raises ModelFileError."""
    complaint = ""
    if arch.num_heads % arch.num_kv_heads:
        complaint = f"{arch.num_heads} heads cannot share {arch.num_kv_heads} key/value heads"
    elif arch.head_dim % 2:
        complaint = f"the head dimension {arch.head_dim} is odd"
    elif not len(arch.windows) == len(arch.rope_thetas) == len(arch.rope_scaled) == arch.num_layers:
        complaint = f"its layer types are not those of {arch.num_layers} layers"
    elif arch.rope_scaling and arch.rope_scaling.factors and len(arch.rope_scaling.factors) != arch.head_dim // 2:
        complaint = f"{len(arch.rope_scaling.factors)} rotary factors do not fit heads of {arch.head_dim}"
    if complaint:
        raise ModelFileError(f"{where}: {complaint}.", "Convert or download the model again.")
    return arch
