"""Token for token against `transformers` and on the real vocabularies, and the promises about control tokens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.weights.gguf import GGUFFile
from node.models.tokenizer import ControlScanner, Tokenizer
from node.models.vocab import ControlToken
from tests.node.models.vocabularies import SPECIALS, TEXTS, write_byte_level, write_byte_level_folder

ANY_TEXT = st.text(max_size=60)
MIXED = st.lists(
    st.one_of(st.sampled_from([*TEXTS, *SPECIALS, "<|im_", "end|>", " ", "\n", "7", "é", "▁"]), st.text(max_size=5)),
    max_size=6,
).map("".join)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_path)


@pytest.fixture(scope="module")
def gemma3(gemma3_path: Path, tokenizer_cache: Path) -> Tokenizer:
    return Tokenizer.load(gemma3_path, tokenizer_cache)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level_folder(tmp_path_factory.mktemp("hf") / "model", digits=True)


def test_gguf_equals_transformers_on_a_small_vocabulary(folder: Path, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    ours = Tokenizer.load(write_byte_level(tmp_path / "small.gguf", "smollm"))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))

    @given(MIXED | ANY_TEXT)
    @settings(max_examples=300, deadline=None)
    def same(text: str) -> None:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, special=True) == expected
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
        assert ours.decode(expected, skip_special=False) == theirs.decode(expected)
        plain = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ours.encode(text) == plain

    same()


def test_a_folder_gives_the_same_tokens_as_the_gguf_file(folder: Path, tmp_path: Path) -> None:
    from_folder, from_gguf = Tokenizer.load(folder), Tokenizer.load(write_byte_level(tmp_path / "small.gguf", "smollm"))
    for text in TEXTS:
        for special in (False, True):
            assert from_folder.encode(text, special=special) == from_gguf.encode(text, special=special)
    assert from_folder.eos_ids == from_gguf.eos_ids == {0, 2}
    assert from_folder.bos_id == from_gguf.bos_id == 1
    assert from_folder.vocab_size == from_gguf.vocab_size


@pytest.mark.real_model
@pytest.mark.slow
def test_smollm2_equals_transformers(smollm2: Tokenizer, smollm2_path: Path) -> None:
    # transformers reads GGUF without `tokenizer.ggml.pre`: it does not split numbers into digits, as the model's own
    # tokenizer.json does. Put right here, everything else is its own.
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    backend = theirs.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), backend.pre_tokenizer])
    for text in TEXTS:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert theirs.decode(expected) == smollm2.decode(expected, skip_special=False)
        if not any(control.text in text for control in smollm2.controls):
            assert smollm2.encode(text) == smollm2.encode(text, special=True) == expected


def known_bytes(tokenizer: Tokenizer) -> set[int]:
    """Bytes that have a token of their own."""
    raws = map(tokenizer.token_bytes, range(tokenizer.vocab_size))
    return {raw[0] for raw in raws if len(raw) == 1}


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_every_text_comes_back(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    known = known_bytes(tokenizer)

    @given(ANY_TEXT | MIXED)
    @settings(max_examples=150, deadline=None)
    def comes_back(text: str) -> None:
        # SmolLM2 has no token for some bytes (0x04, 0xf1, ...), and SentencePiece writes a space as U+2581
        text = "".join(c for c in text if c != "▁" and known.issuperset(c.encode()))
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special=False) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()

    comes_back()


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_text_never_becomes_a_control_token(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    names = [control.text for control in tokenizer.controls]
    assert tokenizer.control_ids.isdisjoint(tokenizer.encode(" ".join(names)))
    assert tokenizer.control_ids.isdisjoint(tokenizer.encode("".join(names)))
    for control in list(tokenizer.controls)[:200]:
        assert control.id not in tokenizer.encode(control.text)
        assert tokenizer.encode(control.text, special=True) == [control.id]
        assert tokenizer.decode(tokenizer.encode(control.text)) == control.text


@pytest.mark.real_model
def test_what_the_real_files_say(smollm2: Tokenizer, gemma3: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_id, smollm2.add_bos) == (49152, 1, 2, False)
    assert smollm2.eos_ids == {0, 2}
    assert smollm2.encode("<|im_start|>user\nHi 42<|im_end|>", special=True) == [*(1, 4093, 198, 26843, 216, 36, 34, 2)]
    assert (gemma3.vocab_size, gemma3.bos_id, gemma3.eos_id, gemma3.add_bos) == (262144, 2, 1, True)
    # <eos> and <end_of_turn>, not the HTML tag </s>
    assert gemma3.eos_ids == {1, 106}
    assert gemma3.encode_prompt("Hi <b>") == [2, 10979, 236743, 200]
    assert gemma3.encode("a  b\n\n\n" + " " * 40) == [236746, 138, 236763, 109, 167, 145]


@pytest.mark.real_model
@pytest.mark.llama
@pytest.mark.parametrize("path_name", ["smollm2_path", "gemma3_path"])
def test_real_vocabularies_equal_llama_cpp(
    path_name: str, request: pytest.FixtureRequest, tokenizer_cache: Path
) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    path: Path = request.getfixturevalue(path_name)
    ours = Tokenizer.load(path, tokenizer_cache)
    theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    known = known_bytes(ours)

    @given(MIXED | ANY_TEXT)
    @settings(max_examples=500, deadline=None)
    def same(text: str) -> None:
        # llama.cpp takes Gemma's HTML tag </s> for a control token, by its name; and bytes without a token keep their
        # neighbours from merging there, but not in the models' own tokenizers
        text = "".join(c for c in text.replace("</s>", "") if known.issuperset(c.encode()))
        for special in (False, True):
            expected = theirs.tokenize(text.encode(), add_bos=False, special=special)
            assert ours.encode(text, special=special) == expected

    same()


def test_a_prompt_gets_one_bos(tmp_path: Path) -> None:
    with_bos = Tokenizer.load(write_byte_level(tmp_path / "bos.gguf", add_bos_token=True))
    assert with_bos.encode_prompt("a")[0] == 1
    assert with_bos.encode_prompt("<|im_start|>a").count(1) == 1
    assert with_bos.encode("a") == with_bos.encode_prompt("a")[1:]
    assert with_bos.encode_prompt("<|im_end|>", special=False)[1:] == with_bos.encode("<|im_end|>")
    without = Tokenizer.load(write_byte_level(tmp_path / "no.gguf", add_bos_token=False))
    assert without.encode_prompt("a") == with_bos.encode("a")


def test_ids_beyond_the_vocabulary_are_padding(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_byte_level(tmp_path / "small.gguf"))
    assert tokenizer.decode([tokenizer.vocab_size, tokenizer.vocab_size + 1000]) == ""
    assert tokenizer.token_bytes(-1) == b""


def test_lone_surrogates_from_json_become_question_marks(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_byte_level(tmp_path / "small.gguf"))
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


def test_token_bytes_of_half_a_character(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_byte_level(tmp_path / "small.gguf"))
    ids = tokenizer.encode("\U0010abcd")
    assert [tokenizer.token_bytes(i) for i in ids] == [b"\xf4", b"\x8a", b"\xaf", b"\x8d"]
    assert [tokenizer.token_text(i) for i in ids] == ["\ufffd"] * 4


@given(st.lists(st.sampled_from(["<a>", "<ab>", "<a", "b>", "<", "x", " "]), max_size=12).map("".join))
def test_the_scanner_takes_the_leftmost_longest_name(text: str) -> None:
    scanner = ControlScanner([ControlToken(1, "<a>"), ControlToken(2, "<ab>"), ControlToken(3, "<a")])
    expected = [(m.start(), m.end()) for m in re.finditer("<ab>|<a>|<a", text)]
    assert [(start, stop) for start, stop, _ in scanner.find(text)] == expected
    pieces = scanner.split(text)
    assert "".join(piece if isinstance(piece, str) else piece.text for piece in pieces) == text


def test_control_tokens_that_swallow_spaces() -> None:
    scanner = ControlScanner([ControlToken(1, "<l>", strip_left=True), ControlToken(2, "<r>", strip_right=True)])
    pieces = [p if isinstance(p, str) else p.id for p in scanner.split("a <l> b <r>  c <r> ")]
    assert pieces == ["a", 1, " b ", 2, "c ", 2]


@pytest.mark.real_model
def test_opening_decodes_no_more_than_it_needs(smollm2_path: Path) -> None:
    with GGUFFile.open(smollm2_path) as file:
        assert file.metadata.length("tokenizer.ggml.tokens") == 49152
