"""Tokenizers from Hugging Face folders, against `transformers` reading the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from node.errors import ModelFileError, UnsupportedModelError
from node.models.tokenizer import Tokenizer
from tests.node.models.vocabularies import TEXTS, save_folder, sentencepiece_pieces, write_byte_level_folder


def sentencepiece_core() -> tokenizers.Tokenizer:
    tokens, _, scores = sentencepiece_pieces()
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [
        (piece[:i], piece[i:])
        for piece in sorted(tokens[260:], key=lambda piece: -scores[vocab[piece]])
        for i in range(1, len(piece))
        if piece[:i] in vocab and piece[i:] in vocab
    ]
    core = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in tokens[:3]])
    return core


def equals_transformers(folder: Path, *, exact_texts: tuple[str, ...] = TEXTS) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ours = Tokenizer.load(folder)
    for text in exact_texts:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, special=True) == expected
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
    return ours


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_metaspace(tmp_path: Path, scheme: str) -> None:
    core = sentencepiece_core()
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    texts = ("the world", " the world", "<s>the world</s>the end", "the<s> the", "", "▁the", "漢字 world")
    if scheme == "never":
        # the decoder of this folder strips a space that nobody put there
        texts = tuple(text for text in texts if not text.startswith((" ", "▁")))
    ours = equals_transformers(save_folder(tmp_path / scheme, core), exact_texts=texts)
    assert ours.encode("the<s>") != [] and ours.control_ids.isdisjoint(ours.encode("the</s>"))


def test_the_older_form_with_a_prepending_normalizer(tmp_path: Path) -> None:
    core = sentencepiece_core()
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ours = equals_transformers(
        save_folder(tmp_path / "m", core, bos_token="<s>", eos_token={"content": "</s>"}, add_bos_token=True)
    )
    assert (ours.bos_id, ours.eos_id, ours.eos_ids, ours.add_bos) == (1, 2, {2}, True)
    # merges lead from "<", "s>" to "<s>" in vocabularies that list it; text must not get there
    assert ours.control_ids.isdisjoint(ours.encode("<s> x</s><unk>"))
    assert ours.decode(ours.encode("<s> x</s><unk>")) == "<s> x</s><unk>"


def test_merges_that_arrive_at_a_control_token_are_spelled_out(tmp_path: Path) -> None:
    vocab = {char: i for i, char in enumerate("<s>/x")} | {"s>": 5, "<s>": 6}
    core = tokenizers.Tokenizer(models.BPE(vocab, [("s", ">"), ("<", "s>")], byte_fallback=True))
    core.decoder = decoders.ByteFallback()
    core.add_special_tokens([AddedToken("<s>", normalized=False, special=True)])
    ours = Tokenizer.load(save_folder(tmp_path / "m", core))
    assert ours.encode("x<s>x", special=True) == [4, 6, 4]
    assert ours.encode("x<s>x") == [4, 0, 1, 2, 4]


def test_ends_of_a_turn_come_from_every_file(tmp_path: Path) -> None:
    folder = write_byte_level_folder(tmp_path / "m", digits=False)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert Tokenizer.load(folder).eos_ids == {0, 2, 7, 8, 9}


def test_a_template_processor_tells_that_bos_is_wanted(tmp_path: Path) -> None:
    folder = write_byte_level_folder(tmp_path / "m", digits=False)
    core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    core.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.add_bos
    assert tokenizer.encode_prompt("a") == [1, *tokenizer.encode("a")]


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    folder = write_byte_level_folder(tmp_path / "m", digits=False)
    core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.enable_truncation(2)
    core.enable_padding(length=50)
    core.save(str(folder / "tokenizer.json"))
    assert len(Tokenizer.load(folder).encode("zqzqzq")) == 6


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b"\xff" * 100, b'{"model": {"type": "BPE"}}', b"[" * 100000]
)
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelFileError, match="not a tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"[" * 100000])
def test_a_damaged_configuration_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = write_byte_level_folder(tmp_path / "m", digits=False)
    (folder / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ModelFileError, match="tokenizer_config"):
        Tokenizer.load(folder)


def test_other_kinds_of_tokenizers_are_refused(tmp_path: Path) -> None:
    core: Any = tokenizers.Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        Tokenizer.load(save_folder(tmp_path / "m", core))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelFileError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path / "empty")
