"""What every source of vocabularies hands to `Tokenizer`, and the facts about token names that they share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import tokenizers

from node.errors import ModelFileError

MAX_CONTROL_CHARS = 256
"""Longest control token accepted; real ones have a tenth of it."""

END_NAMES = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|end_of_text|>",
        "<|end_of_turn|>",
        "<|endoftext|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<eos>",
        "</s>",
        "<|EOT|>",
        "<EOT>",
        "<｜end▁of▁sentence｜>",
    }
)
"""Control tokens that end a turn in some family. Files often name just one of them as their end of sequence."""

TURN_NAMES = frozenset(
    {
        "<start_of_turn>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<start_of_image>",
        "<end_of_image>",
        "[INST]",
        "[/INST]",
    }
)

SPACE_MARK = "▁"
"""How SentencePiece vocabularies write a space."""


@dataclass(frozen=True, slots=True)
class SpacePrefix:
    """Where a space goes before text: nowhere, before the first piece only, or after every control token as well.
    `unless_present` leaves text alone that begins with a space already."""

    where: Literal["never", "first", "always"] = "never"
    unless_present: bool = False


@dataclass(frozen=True, slots=True)
class ControlToken:
    """`strip_left` and `strip_right`: the token swallows whitespace on that side of it."""

    id: int
    text: str
    strip_left: bool = False
    strip_right: bool = False


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer in parts.

    core:       encodes plain text; it must not be able to produce a control token from their names in the text
    tokens:     every token's text as the file writes it, by id; "" where an id has none
    literal:    ids whose text stands for itself (control and user-defined), not in the byte-level alphabet
    eos_id:     the one that the file calls its end of sequence; `eos_ids` are all that end a turn
    byte_level: the alphabet of GPT-2's byte-level BPE; otherwise SentencePiece's, with `<0xNN>` bytes
    """

    core: tokenizers.Tokenizer
    tokens: list[str]
    controls: list[ControlToken]
    literal: frozenset[int]
    byte_level: bool
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]
    add_bos: bool
    unk_id: int | None = None
    space_prefix: SpacePrefix = field(default_factory=SpacePrefix)

    def __post_init__(self) -> None:
        for control in self.controls:
            if not 0 < len(control.text) <= MAX_CONTROL_CHARS:
                raise ModelFileError(
                    f"The control token {control.id} has {len(control.text)} characters; up to "
                    f"{MAX_CONTROL_CHARS} are accepted.",
                    "Use the model's original tokenizer.",
                )


def looks_like_control(text: str) -> bool:
    """Whether an added token steers turns although its file does not call it special, as several converters forget.
    Not "</s>": in Gemma's vocabulary that is an HTML tag."""
    return (
        text in TURN_NAMES
        or (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith("<｜") and text.endswith("｜>"))
        or (text.startswith("<unused") and text.endswith(">"))
    )


def byte_alphabet() -> dict[str, int]:
    """Byte by the character that stands for it in byte-level BPE (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet |= {chr(0x100 + i): byte for i, byte in enumerate(others)}
    return alphabet
