"""Streaming detokenization: the same text as all at once, and never half a character."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.models.tokenizer import Tokenizer
from tests.node.models.vocabularies import TEXTS, write_byte_level, write_sentencepiece


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("vocab") / "v.gguf"
    return Tokenizer.load(write_byte_level(path) if request.param == "bytes" else write_sentencepiece(path))


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_any_chunking_gives_the_whole_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(
        st.one_of(
            st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30),
            st.sampled_from(TEXTS).map(tokenizer.encode),
        )
    )
    decoder, text, position = tokenizer.decoder(), "", 0
    while position < len(ids):
        count = data.draw(st.integers(0, 4))
        text += decoder.push(ids[position : position + count])
        position += count
    assert text + decoder.flush() == tokenizer.decode(ids)


@given(st.text(max_size=30))
@settings(deadline=None)
def test_a_character_comes_whole_and_with_its_last_byte(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    decoder, shown, raw = tokenizer.decoder(continuing=True), "", b""
    for token in ids:
        shown += decoder.push([token])
        raw += tokenizer.token_bytes(token)
        assert shown == raw.decode("utf-8", "ignore")
    assert decoder.flush() == ""


def test_an_unfinished_character_is_shown_at_the_end_only(tokenizer: Tokenizer) -> None:
    ids = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) in (b"\xf0", b"\x9f", b"\x99")]
    decoder = tokenizer.decoder()
    by_bytes = {tokenizer.token_bytes(i): i for i in ids}
    assert decoder.push([by_bytes[b"\xf0"]]) == ""
    assert decoder.push([by_bytes[b"\x9f"], by_bytes[b"\x99"]]) == ""
    assert decoder.flush() == "\ufffd"


def test_an_invalid_byte_does_not_hold_back_what_follows(tokenizer: Tokenizer) -> None:
    broken = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xf0")
    decoder = tokenizer.decoder(continuing=True)
    assert decoder.push([broken]) == ""
    assert decoder.push(tokenizer.encode("w")).endswith("w")


def test_the_first_space_belongs_to_a_continuation(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_sentencepiece(tmp_path / "v.gguf"))
    ids = tokenizer.encode("the world")
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == b" the world"
    assert tokenizer.decode(ids) == "the world"
    assert tokenizer.decoder(continuing=True).push(ids) == " the world"
    prompt, rest = ids[:1], ids[1:]
    assert tokenizer.decode(prompt) + tokenizer.decoder(continuing=True).push(rest) == tokenizer.decode(ids)


def test_control_tokens_are_left_out_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a"), tokenizer.bos_id or 0, *tokenizer.encode_pieces(["x"])]
    assert tokenizer.token_text(tokenizer.bos_id or 0) not in tokenizer.decode(ids)
    assert tokenizer.token_text(tokenizer.bos_id or 0) in tokenizer.decode(ids, skip_special=False)
