"""Vocabularies in GGUF files: splitting rules, merges from scores, refusals, the cache of built tokenizers."""

from __future__ import annotations

import json
import logging
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.errors import ModelFileError, UnsupportedModelError
from node.models.gguf_vocab import SPLIT_RULES
from node.models.tokenizer import Tokenizer
from tests.node.models.vocabularies import (
    CONTROL,
    NORMAL,
    TEXTS,
    UNUSED,
    USER_DEFINED,
    byte_level_tokens,
    sentencepiece_pieces,
    write_byte_level,
    write_sentencepiece,
    write_vocabulary,
)

MIXED = st.lists(st.one_of(st.sampled_from(TEXTS), st.text(max_size=8)), max_size=4).map("".join)


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    """How the rule splits ASCII text."""
    return [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in _core(tokenizer).pre_tokenize_str(text)]


def _core(tokenizer: Tokenizer) -> Any:
    return tokenizer._core.pre_tokenizer


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "I'll 1234 a\n\n b", ["I", "'ll", " 1234", " a", "\n\n", " b"]),
        ("default", "x  12", ["x", " ", " 12"]),
        ("smollm", "x 1234", ["x", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "I'LL 12345\n\n x", ["I", "'LL", " ", "123", "45", "\n\n", " x"]),
        ("qwen2", "I'll 123 (a)\n", ["I", "'ll", " ", "1", "2", "3", " (", "a", ")\n"]),
        ("tekken", "HelloWorld 12/\n", ["Hello", "World", " ", "1", "2", "/\n"]),
        ("deepseek-coder", "a 12\nb!", ["a", " ", "1", "2", "\n", "b", "!"]),
        ("deepseek-v3", "x=1234 .foo", ["x", "=", "123", "4", " .", "foo"]),
    ],
)
def test_splitting_rules(tmp_path: Path, pre: str, text: str, expected: list[str]) -> None:
    assert words(Tokenizer.load(write_byte_level(tmp_path / "v.gguf", pre)), text) == expected


def test_qwen2_equals_transformers(tmp_path: Path) -> None:
    from transformers import Qwen2Tokenizer

    tokens, merges = byte_level_tokens()
    theirs = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)}, merges=[tuple(merge.split(" ")) for merge in merges]
    )
    ours = Tokenizer.load(write_byte_level(tmp_path / "v.gguf", "qwen2"))

    @given(MIXED)
    @settings(max_examples=200, deadline=None)
    def same(text: str) -> None:
        assert ours.encode(text) == theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    same()


@pytest.mark.llama
@pytest.mark.parametrize("pre", [name for name in SPLIT_RULES if name not in ("default", "tekken")])
def test_splitting_rules_equal_llama_cpp(tmp_path: Path, pre: str) -> None:
    # Not "default", where llama.cpp has a rule of its own for files of unknown make, nor "tekken", whose pattern it
    # approximates.
    llama_cpp = pytest.importorskip("llama_cpp")
    path = write_byte_level(tmp_path / "v.gguf", pre)
    ours, theirs = Tokenizer.load(path), llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    nfc = SPLIT_RULES[pre].nfc

    @given(MIXED)
    @settings(max_examples=200, deadline=None)
    def same(text: str) -> None:
        # llama.cpp leaves out the normalization of Qwen's tokenizer.json
        text = unicodedata.normalize("NFC", text) if nfc else text
        assert ours.encode(text) == theirs.tokenize(text.encode(), add_bos=False, special=False)

    same()


def test_whole_words_win_over_merges_where_the_rule_says_so(tmp_path: Path) -> None:
    tokens, merges = byte_level_tokens()
    tokens = [*tokens, "zqzq"]
    types = [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3)
    fields: dict[str, Any] = {"merges": merges, "bos_token_id": 1, "eos_token_id": 2}
    for pre, expected in (("llama-bpe", 1), ("gpt-2", 4)):
        path = write_vocabulary(tmp_path / f"{pre}.gguf", "gpt2", tokens, types, pre=pre, **fields)
        assert len(Tokenizer.load(path).encode("zqzq")) == expected
    assert Tokenizer.load(tmp_path / "llama-bpe.gguf").add_bos
    assert not Tokenizer.load(tmp_path / "gpt-2.gguf").add_bos


def test_sentencepiece_equals_transformers(tmp_path: Path) -> None:
    import tokenizers
    from tokenizers import AddedToken, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    tokens, types, scores = sentencepiece_pieces()
    vocab = {token: i for i, token in enumerate(tokens)}
    # straight from the definition: every pair of pieces that makes a piece, by the piece's score
    merges = [
        (piece[:i], piece[i:])
        for piece in sorted(vocab, key=lambda piece: -scores[vocab[piece]])
        for i in sorted(range(1, len(piece)), key=lambda i: (vocab.get(piece[:i], 0), vocab.get(piece[i:], 0)))
        if types[vocab[piece]] == NORMAL
        if all(part in vocab and types[vocab[part]] == NORMAL for part in (piece[:i], piece[i:]))
    ]
    core = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in tokens[:4]])
    theirs = PreTrainedTokenizerFast(tokenizer_object=core)
    ours = Tokenizer.load(write_sentencepiece(tmp_path / "v.gguf"))

    @given(MIXED)
    @settings(max_examples=200, deadline=None)
    def same(text: str) -> None:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, special=True) == expected
        if not any(ord(c) >= 0xDC80 for c in text):
            assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)

    same()


@pytest.mark.llama
@pytest.mark.parametrize("space", [True, False])
def test_sentencepiece_equals_llama_cpp(tmp_path: Path, space: bool) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    path = write_sentencepiece(tmp_path / "v.gguf", add_space_prefix=space)
    ours, theirs = Tokenizer.load(path), llama_cpp.Llama(str(path), vocab_only=True, verbose=False)

    @given(MIXED)
    @settings(max_examples=200, deadline=None)
    def same(text: str) -> None:
        # llama.cpp merges "<", "s", ">" to the control token <s>; here no text becomes one
        text = text.replace("<", "(")
        for special in (True, False):
            assert ours.encode(text, special=special) == theirs.tokenize(text.encode(), add_bos=False, special=special)

    same()


def test_kinds_of_tokens(tmp_path: Path) -> None:
    tokens, merges = byte_level_tokens()
    more = ["<think>", "<|tool|>", "[PAD1]"]
    types = [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3) + [USER_DEFINED, USER_DEFINED, UNUSED]
    path = write_vocabulary(tmp_path / "v.gguf", "gpt2", tokens + more, types, merges=merges, pre="qwen2")
    tokenizer = Tokenizer.load(path)
    think, tool = len(tokens), len(tokens) + 1
    assert tokenizer.encode("a<think>b") == [*tokenizer.encode("a"), think, *tokenizer.encode("b")]
    assert tokenizer.decode([think]) == "<think>"
    # named like a control token, and taken for one although the file calls it user-defined
    assert tool in tokenizer.control_ids
    assert tool not in tokenizer.encode("<|tool|>")
    assert tokenizer.encode("[PAD1]", special=True) == tokenizer.encode("[PAD1]")
    assert tokenizer.vocab_size == len(tokens) + 3
    assert tokenizer.bos_id is None
    assert not tokenizer.add_bos


def test_unknown_kinds_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'klingon'.*smollm"):
        Tokenizer.load(write_byte_level(tmp_path / "pre.gguf", "klingon"))
    with pytest.raises(UnsupportedModelError, match="'rwkv'"):
        Tokenizer.load(write_vocabulary(tmp_path / "kind.gguf", "rwkv", ["a"], [NORMAL]))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"bos_token_id": 10**6}, "bos_token_id is 1000000"),
        ({"eos_token_id": "two"}, "eos_token_id has the wrong type"),
        ({"merges": [1, 2]}, "merges has the wrong type"),
        ({"add_bos_token": 1}, "add_bos_token has the wrong type"),
        ({"token_type": [1, 1]}, "token_type has 2 entries"),
    ],
)
def test_malformed_metadata_is_refused(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    tokens, merges = byte_level_tokens()
    path = tmp_path / "v.gguf"
    if "token_type" in fields:
        tokens_of = write_vocabulary(path, "gpt2", tokens, fields["token_type"], merges=merges)
    else:
        tokens_of = write_byte_level(path, **fields)
    with pytest.raises(ModelFileError, match=words):
        Tokenizer.load(tokens_of)


def test_a_file_without_a_vocabulary_or_scores_is_refused(tmp_path: Path) -> None:
    tokens, types, _ = sentencepiece_pieces()
    with pytest.raises(ModelFileError, match="without scores"):
        Tokenizer.load(write_vocabulary(tmp_path / "a.gguf", "llama", tokens, types))
    with pytest.raises(ModelFileError, match="300 characters"):
        Tokenizer.load(
            write_vocabulary(tmp_path / "b.gguf", "gpt2", ["<" * 300, "a"], [CONTROL, NORMAL], merges=["a a"])
        )
    with pytest.raises(ModelFileError):
        Tokenizer.load(tmp_path / "missing.gguf")


def test_the_cache_gives_the_same_tokenizer_and_survives_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, cache = write_sentencepiece(tmp_path / "v.gguf"), tmp_path / "cache" / "deep"
    fresh = [Tokenizer.load(path).encode(text) for text in TEXTS]

    def check() -> None:
        tokenizer = Tokenizer.load(path, cache)
        assert [tokenizer.encode(text) for text in TEXTS] == fresh

    check()
    (file,) = cache.iterdir()
    good = file.read_bytes()
    check()
    assert file.read_bytes() == good
    for damaged in (b"", good[:-1], good[: len(good) // 2], b"x" + good, good.replace(b"world", b"wrold")):
        file.write_bytes(damaged)
        with caplog.at_level(logging.WARNING):
            check()
        assert "damaged" in caplog.text
        assert file.read_bytes() == good
    assert json.loads(good.partition(b"\n")[2])["model"]["type"] == "BPE"
    assert [entry.name for entry in cache.iterdir()] == [file.name]


def test_another_vocabulary_has_another_cache_file(tmp_path: Path) -> None:
    _, _, scores = sentencepiece_pieces()
    Tokenizer.load(write_sentencepiece(tmp_path / "a.gguf"), tmp_path / "cache")
    Tokenizer.load(write_sentencepiece(tmp_path / "b.gguf", scores=[2 * score for score in scores]), tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("not a folder")
    tokenizer = Tokenizer.load(write_sentencepiece(tmp_path / "v.gguf"), tmp_path / "file" / "cache")
    assert tokenizer.decode(tokenizer.encode("the world")) == "the world"
    assert "could not be cached" in caplog.text
