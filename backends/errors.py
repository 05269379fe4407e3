"""Errors of the arithmetic room. The whole tree is drawn in `node/errors.py`."""

from discovery.errors import RoostError


class ModelError(RoostError):
    """A model that cannot be used."""


class ModelFileError(ModelError):
    """A weight, config or tokenizer file that is missing, truncated, malformed or hostile."""


class UnsupportedModelError(ModelError):
    """A well-formed model that no backend here can run: architecture, quantization or option."""


class KVRoomError(RoostError):
    """The key/value cache has no room left for what was asked."""


class BatchError(RoostError):
    """A batch that breaks the Runner contract (positions with holes, unknown sequences). A bug in the caller."""
