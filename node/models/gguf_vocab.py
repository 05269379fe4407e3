"""Tokenizers from GGUF metadata: byte-level BPE ("gpt2") and SentencePiece BPE with byte fallback ("llama").

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The splitting rule of a byte-level vocabulary is only
named there (`tokenizer.ggml.pre`); the patterns behind the names are those of the models' own tokenizer.json files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from backends.weights.gguf import GGUFFile
from node.errors import ModelFileError, UnsupportedModelError
from node.models.vocab import END_NAMES, SPACE_MARK, ControlToken, SpacePrefix, Vocabulary, looks_like_control
from node.models.vocab_cache import VocabCache

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"


@dataclass(frozen=True, slots=True)
class SplitRule:
    """`patterns` split one after the other. `ignore_merges` takes a whole word that is a token as that token."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    nfc: bool = False


_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_PUNCTUATION}|{_SPACES}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)

SPLIT_RULES: dict[str, SplitRule] = {
    "default": SplitRule((_GPT2,)),
    "gpt-2": SplitRule((_GPT2,)),
    "smollm": SplitRule((r"\p{N}", _GPT2)),
    "starcoder": SplitRule((r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), SplitRule((_LLAMA3,), ignore_merges=True, adds_bos=True)),
    "smaug-bpe": SplitRule((_LLAMA3,)),
    "qwen2": SplitRule((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": SplitRule((_QWEN2,), nfc=True),
    "tekken": SplitRule((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "deepseek-coder": SplitRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    "deepseek-v3": SplitRule((r"\p{N}{1,3}", _CJK, _DEEPSEEK3)),
}


class _Fields:
    """Typed access to `tokenizer.ggml.*`. Everything that is not what it has to be is a ModelFileError."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path = path
        self._metadata = metadata

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        value = self._metadata.get(f"tokenizer.ggml.{name}", default)
        if value is not default and not isinstance(value, kind):
            raise self.malformed(f"tokenizer.ggml.{name} has the wrong type")
        return value

    def per_token(self, name: str, num_tokens: int) -> np.ndarray | None:
        values = self.get(name, np.ndarray)
        if values is not None and len(values) != num_tokens:
            raise self.malformed(f"tokenizer.ggml.{name} has {len(values)} entries for {num_tokens} tokens")
        return values

    def token_id(self, name: str, num_tokens: int) -> int | None:
        value = self.get(name, int)
        # 0xffffffff is how some converters write "none"
        if value is None or value == 0xFFFFFFFF:
            return None
        if not 0 <= value < num_tokens:
            raise self.malformed(f"tokenizer.ggml.{name} is {value} in a vocabulary of {num_tokens}")
        return value

    def malformed(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {what}.", "Download the file again, or use another conversion.")


def read_gguf_vocabulary(path: Path, cache: VocabCache) -> Vocabulary:
    """Raises ModelFileError, and UnsupportedModelError for kinds of tokenizers that are not known here."""
    with GGUFFile.open(path) as file:
        fields = _Fields(path, file.metadata)
        model = fields.get("model", str)
        tokens = fields.get("tokens", list)
        if not tokens or not isinstance(tokens[0], str):
            raise fields.malformed("it holds no vocabulary")
        types = fields.per_token("token_type", len(tokens))
        kinds = [NORMAL] * len(tokens) if types is None else types.tolist()
        controls = [
            ControlToken(i, text)
            for i, text in enumerate(tokens)
            if kinds[i] != NORMAL and text and _is_control(kinds[i], text)
        ]
        control_ids = frozenset(control.id for control in controls)
        user_defined = [i for i, kind in enumerate(kinds) if kind == USER_DEFINED and i not in control_ids]
        usable = [i for i, kind in enumerate(kinds) if kind != UNUSED and i not in control_ids]
        if model == "gpt2":
            rule = _split_rule(fields)
            core = _byte_level_core(fields, tokens, usable, user_defined, rule)
            space_prefix, adds_bos = SpacePrefix(), rule.adds_bos
        elif model == "llama":
            core = _sentencepiece_core(fields, tokens, kinds, usable, user_defined, cache)
            with_space = fields.get("add_space_prefix", bool, True)
            space_prefix, adds_bos = SpacePrefix("always" if with_space else "never"), True
        else:
            raise UnsupportedModelError(
                f"{path} has a tokenizer of the kind '{model}'; 'gpt2' and 'llama' are supported.",
                "Use a model of the Llama, Qwen, Mistral or Gemma 3 families.",
            )
        named_ends = [fields.token_id(f"{name}_token_id", len(tokens)) for name in ("eos", "eot", "eom")]
        ends = {i for i in named_ends if i is not None} | {c.id for c in controls if c.text in END_NAMES}
        bos_id = fields.token_id("bos_token_id", len(tokens))
        return Vocabulary(
            core=core,
            tokens=tokens,
            controls=controls,
            literal=control_ids.union(user_defined),
            byte_level=model == "gpt2",
            bos_id=bos_id,
            eos_id=named_ends[0],
            eos_ids=frozenset(ends),
            add_bos=bos_id is not None and fields.get("add_bos_token", bool, adds_bos),
            unk_id=fields.token_id("unknown_token_id", len(tokens)),
            space_prefix=space_prefix,
        )


def _is_control(kind: int, text: str) -> bool:
    return kind in (CONTROL, UNKNOWN) or (kind == USER_DEFINED and looks_like_control(text))


def _split_rule(fields: _Fields) -> SplitRule:
    name = fields.get("pre", str, "default")
    if name not in SPLIT_RULES:
        raise UnsupportedModelError(
            f"{fields.path} splits text by the rule '{name}', which is not known here.",
            f"Known rules: {', '.join(SPLIT_RULES)}. A safetensors folder with tokenizer.json works with any rule.",
        )
    return SPLIT_RULES[name]


def _byte_level_core(
    fields: _Fields, tokens: list[str], usable: list[int], user_defined: list[int], rule: SplitRule
) -> tokenizers.Tokenizer:
    vocab = {tokens[i]: i for i in usable}
    merges = []
    for merge in fields.get("merges", list, []):
        left, _, right = merge.partition(" ")
        # a merge of what is no token can never apply
        if left in vocab and right in vocab and left + right in vocab:
            merges.append((left, right))
    core = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=rule.ignore_merges))
    if rule.nfc:
        core.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    _add_user_defined(core, tokens, user_defined)
    return core


def _sentencepiece_core(
    fields: _Fields, tokens: list[str], kinds: list[int], usable: list[int], user_defined: list[int], cache: VocabCache
) -> tokenizers.Tokenizer:
    scores = fields.per_token("scores", len(tokens))
    if scores is None:
        raise fields.malformed("a SentencePiece vocabulary without scores")

    def build() -> tokenizers.Tokenizer:
        vocab = {tokens[i]: i for i in usable}
        pieces = {tokens[i] for i in usable if kinds[i] == NORMAL}
        order = np.argsort(-scores, kind="stable").tolist()
        merges = _merges_by_score([tokens[i] for i in order if kinds[i] == NORMAL], pieces, vocab)
        core = tokenizers.Tokenizer(models.BPE(vocab, merges, fuse_unk=True, byte_fallback=True))
        core.normalizer = normalizers.Replace(" ", SPACE_MARK)
        _add_user_defined(core, tokens, user_defined)
        return core

    return cache.load_or_build(
        ["sentencepiece", "\0".join(tokens).encode(), scores.tobytes(), np.array(kinds, np.int32).tobytes()], build
    )


def _merges_by_score(ordered: list[str], pieces: set[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best score first, as SentencePiece picks them (Kudo and Richardson
    2018); equal scores by the parts' ids, as `transformers` orders them."""
    merges: list[tuple[str, str]] = []
    for piece in ordered:
        if len(piece) == 2:
            if piece[0] in pieces and piece[1] in pieces:
                merges.append((piece[0], piece[1]))
            continue
        found = [
            (left, right)
            for i in range(1, len(piece))
            if (left := piece[:i]) in pieces and (right := piece[i:]) in pieces
        ]
        if len(found) > 1:
            found.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += found
    return merges


def _add_user_defined(core: tokenizers.Tokenizer, tokens: list[str], ids: list[int]) -> None:
    """These are found in any text, before it is split. Their ids come from the model's own vocabulary."""
    core.add_tokens([AddedToken(tokens[i], normalized=False, special=False) for i in ids if tokens[i]])
