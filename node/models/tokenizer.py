"""Text to tokens and back.

Two promises beyond the model's own rules. Text encodes to ordinary tokens only, whatever control tokens it names,
unless the caller asks for them (`special=True`). Decoding goes by a table of bytes, so that one token costs one look-up
and a stream never shows half a character.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from node.models.gguf_vocab import read_gguf_vocabulary
from node.models.hf_vocab import read_hf_vocabulary
from node.models.vocab import SPACE_MARK, ControlToken, Vocabulary, byte_alphabet
from node.models.vocab_cache import VocabCache


class Tokenizer:
    """One model's vocabulary. Safe to use from several threads.

    `eos_id` is the file's end of sequence, `eos_ids` holds every token that ends a turn, `control_ids` every token that
    text cannot produce. `vocab_size` counts the ids; a model may have padding rows beyond it, which decode to nothing.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._core = vocabulary.core
        self._tokens = vocabulary.tokens
        self._prefix = vocabulary.space_prefix
        self.controls = ControlScanner(vocabulary.controls)
        self.control_ids = frozenset(control.id for control in vocabulary.controls)
        self._forbidden = self.control_ids - {vocabulary.unk_id}
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.eos_ids = vocabulary.eos_ids
        self.add_bos = vocabulary.add_bos
        self._bytes = _ByteTable(vocabulary)

    @classmethod
    def load(cls, path: Path, cache: Path | None = None) -> Tokenizer:
        """From a GGUF file, or a folder with tokenizer.json. `cache` is a folder for what is slow to build.

        Raises ModelFileError for what is missing or malformed, UnsupportedModelError for unknown kinds.
        """
        if path.is_dir():
            return cls(read_hf_vocabulary(path))
        return cls(read_gguf_vocabulary(path, VocabCache(cache)))

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`. Names of control tokens in it are text like any other, unless `special`."""
        return self.encode_pieces(self.controls.split(text) if special else [text])

    def encode_prompt(self, text: str, *, special: bool = True) -> list[int]:
        """A whole prompt as /v1/completions takes it: control tokens that it names are meant (fill-in-the-middle and
        hand-written chat formats need them), and it starts with BOS where the model wants that."""
        ids = self.encode(text, special=special)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_pieces(self, pieces: Iterable[str | ControlToken]) -> list[int]:
        """Plain text and control tokens in order."""
        ids: list[int] = []
        is_first = True
        for piece in pieces:
            if isinstance(piece, ControlToken):
                ids.append(piece.id)
            elif piece:
                ids += self._encode_plain(self._with_prefix(piece, is_first))
            is_first = False
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of a whole sequence; bytes that are not UTF-8 become U+FFFD."""
        decoder = self.decoder(skip_special=skip_special)
        return decoder.push(ids) + decoder.flush()

    def decoder(self, *, continuing: bool = False, skip_special: bool = True) -> StreamDecoder:
        """A decoder for one sequence. `continuing`: it goes on after other text (a completion's prompt), so that the
        space which some vocabularies put before the first word is kept."""
        return StreamDecoder(self, strip_space=self._prefix.where != "never" and not continuing, skip=skip_special)

    def token_text(self, token: int) -> str:
        """One token as people read it; U+FFFD where it is only part of a character."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """What the token adds to the text; nothing for ids beyond the vocabulary (padding)."""
        return self._bytes[token]

    def _with_prefix(self, text: str, is_first: bool) -> str:
        wanted = self._prefix.where == "always" or (self._prefix.where == "first" and is_first)
        if not wanted or (self._prefix.unless_present and text.startswith((" ", SPACE_MARK))):
            return text
        return f" {text}"

    def _encode_plain(self, text: str) -> list[int]:
        # lone surrogates reach us through JSON escapes and have no UTF-8
        # a batch of one: unlike `encode`, it lets other threads run while it works on a long text
        ids = self._core.encode_batch_fast([_without_surrogates(text)], add_special_tokens=False)[0].ids
        if self._forbidden.isdisjoint(ids):
            return ids
        return [part for token in ids for part in (self._spelled(token) if token in self._forbidden else (token,))]

    def _spelled(self, token: int) -> list[int]:
        """Tokens for the name of a control token that merges arrived at: one character at a time."""
        spelled = [part for char in self._tokens[token] for part in self._core.encode(char).ids]
        return [part for part in spelled if part not in self._forbidden]


class StreamDecoder:
    """Turns one sequence's tokens into text as they come. A character appears when its last byte has."""

    def __init__(self, tokenizer: Tokenizer, *, strip_space: bool, skip: bool) -> None:
        self._tokenizer = tokenizer
        self._strip_space = strip_space
        self._skipped = tokenizer.control_ids if skip else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        raw = b"".join([self._tokenizer.token_bytes(token) for token in ids if token not in self._skipped])
        if self._strip_space and raw:
            self._strip_space = False
            raw = raw.removeprefix(b" ")
        return self._utf8.decode(raw)

    def flush(self) -> str:
        """What is left when no token follows: U+FFFD for a character that never got its last byte."""
        return self._utf8.decode(b"", final=True)


class ControlScanner:
    """Finds the names of control tokens in text, leftmost first and the longest of those that start there."""

    def __init__(self, controls: Sequence[ControlToken]) -> None:
        self._by_text = {control.text: control for control in controls}
        self._lengths: dict[str, list[int]] = {}
        for text in self._by_text:
            self._lengths.setdefault(text[0], []).append(len(text))
        for first, lengths in self._lengths.items():
            self._lengths[first] = sorted(set(lengths), reverse=True)
        self._starts = re.compile(f"[{re.escape(''.join(self._lengths))}]") if self._lengths else None

    def __iter__(self) -> Iterator[ControlToken]:
        return iter(self._by_text.values())

    def find(self, text: str, *, overlapping: bool = False) -> Iterator[tuple[int, int, ControlToken]]:
        """(start, stop, token) of the names in `text`, in order. Unless `overlapping`, none begins inside another."""
        position = 0
        while self._starts is not None and (candidate := self._starts.search(text, position)):
            start = candidate.start()
            position = start + 1
            for length in self._lengths[text[start]]:
                control = self._by_text.get(text[start : start + length])
                if control is not None:
                    position = start + (1 if overlapping else len(control.text))
                    yield start, start + len(control.text), control
                    break

    def split(self, text: str) -> list[str | ControlToken]:
        """Text and the control tokens that it names, in order; empty text is left out."""
        pieces: list[str | ControlToken] = []
        position, strip_next = 0, False
        for start, stop, control in self.find(text):
            before = text[position:start]
            before = before.lstrip() if strip_next else before
            before = before.rstrip() if control.strip_left else before
            pieces += [before, control] if before else [control]
            position, strip_next = stop, control.strip_right
        rest = text[position:].lstrip() if strip_next else text[position:]
        return [*pieces, rest] if rest else pieces


def _without_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


class _ByteTable:
    """What each token adds to the text, worked out when it is first asked for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = vocabulary.tokens
        self._literal = vocabulary.literal
        self._alphabet = {ord(char): byte for char, byte in byte_alphabet().items()} if vocabulary.byte_level else None
        self._known: list[bytes | None] = [None] * len(vocabulary.tokens)

    def __getitem__(self, token: int) -> bytes:
        if not 0 <= token < len(self._known):
            return b""
        known = self._known[token]
        if known is None:
            known = self._known[token] = self._spell(token)
        return known

    def _spell(self, token: int) -> bytes:
        text = self._tokens[token]
        if self._alphabet is None:
            byte = None if token in self._literal else _BYTE.fullmatch(text)
            return bytes([int(byte[1], 16)]) if byte else text.replace(SPACE_MARK, " ").encode()
        if token in self._literal:
            return text.encode()
        try:
            return text.translate(self._alphabet).encode("latin-1")
        except UnicodeEncodeError:
            # a few vocabularies list whole words outside the alphabet
            return text.encode()


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
