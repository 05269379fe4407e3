"""Built tokenizers kept as JSON, because deriving the merges of a large SentencePiece vocabulary takes seconds."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import tokenizers

log = logging.getLogger("roost.models")

FORMAT = f"roost-1 tokenizers-{tokenizers.__version__}"


class VocabCache:
    """One file a vocabulary: a line with the digest of what follows, then `tokenizers` JSON. A file that does not
    match its digest is made anew, and a folder that cannot be written costs only time."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def load_or_build(
        self, key: Sequence[str | bytes], build: Callable[[], tokenizers.Tokenizer]
    ) -> tokenizers.Tokenizer:
        """`key` is everything that the result depends on."""
        if self._folder is None:
            return build()
        path = self._folder / f"tokenizer-{_digest([FORMAT, *key])}.json"
        return _read(path) or _built(path, build)


def _read(path: Path) -> tokenizers.Tokenizer | None:
    try:
        digest, _, body = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if digest.decode("ascii", "replace") != _digest([body]):
        log.warning("The cached tokenizer %s is damaged; making it again.", path)
        return None
    return tokenizers.Tokenizer.from_buffer(body)


def _built(path: Path, build: Callable[[], tokenizers.Tokenizer]) -> tokenizers.Tokenizer:
    core = build()
    body = core.to_str().encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".tmp", delete=False) as file:
            try:
                file.write(_digest([body]).encode() + b"\n" + body)
                file.close()
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as exc:
        log.warning("The tokenizer could not be cached at %s: %s.", path, os.strerror(exc.errno or 0))
    return core


def _digest(parts: Sequence[str | bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.hexdigest()
