"""Tokenizers from a Hugging Face model folder: tokenizer.json, with what tokenizer_config.json, config.json and
generation_config.json say about its special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from node.errors import ModelFileError, UnsupportedModelError
from node.models.vocab import END_NAMES, SPACE_MARK, ControlToken, SpacePrefix, Vocabulary, looks_like_control

MAX_CONFIG_BYTES = 32 << 20


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} when the file is missing. Raises ModelFileError."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelFileError(f"{path} has more than {MAX_CONFIG_BYTES} bytes.", "Download it again.")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as exc:
        raise ModelFileError(f"{path} is not readable JSON: {exc}.", "Download it again.") from exc
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} is not a JSON object.", "Download it again.")
    return value


def read_hf_vocabulary(folder: Path) -> Vocabulary:
    """Raises ModelFileError, and UnsupportedModelError for kinds of tokenizers that are not known here."""
    core = _read_core(folder / "tokenizer.json")
    config = read_json(folder / "tokenizer_config.json")
    added = core.get_added_tokens_decoder()
    by_text = core.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(by_text.values(), default=-1) + 1)
    for text, i in by_text.items():
        tokens[i] = text
    controls = [
        ControlToken(i, token.content, token.lstrip, token.rstrip)
        for i, token in sorted(added.items())
        if token.content and (token.special or looks_like_control(token.content))
    ]
    byte_level = _is_byte_level(folder, core)
    bos_id = by_text.get(_token_name(config.get("bos_token")))
    unk_id = by_text.get(_token_name(config.get("unk_token")))
    ends = _end_ids(folder, config, by_text)
    adds_bos = bos_id is not None and core.encode("", add_special_tokens=True).ids[:1] == [bos_id]
    core.post_processor = None  # type: ignore[assignment]
    # whatever is no special token to the library is found in any text
    core.add_special_tokens([added[control.id] for control in controls])
    core.encode_special_tokens = True
    return Vocabulary(
        core=core,
        tokens=tokens,
        controls=controls,
        literal=frozenset(added),
        byte_level=byte_level,
        bos_id=bos_id,
        eos_id=by_text.get(_token_name(config.get("eos_token"))),
        eos_ids=frozenset(i for i in ends if i < len(tokens))
        | {control.id for control in controls if control.text in END_NAMES},
        add_bos=bos_id is not None and (adds_bos or config.get("add_bos_token") is True),
        unk_id=unk_id,
        space_prefix=_take_space_prefix(core),
    )


def _read_core(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelFileError(
            f"{path.parent} has no tokenizer.json.", "Use a folder with the fast tokenizer's file, or a GGUF file."
        )
    try:
        core = tokenizers.Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as exc:  # the library has no error types of its own, and its panics are BaseExceptions
        raise ModelFileError(f"{path} is not a tokenizer: {exc}.", "Download it again.") from exc
    core.no_truncation()
    core.no_padding()
    return core


def _state(component: Any) -> dict[str, Any]:
    return {} if component is None else json.loads(component.__getstate__())


def _steps(state: dict[str, Any], children: str) -> list[dict[str, Any]]:
    """The members of a component that may be a sequence of others."""
    return state.get(children, []) if state.get("type") == "Sequence" else [state] if state else []


def _is_byte_level(folder: Path, core: tokenizers.Tokenizer) -> bool:
    kinds = {step.get("type") for step in _steps(_state(core.decoder), "decoders")}
    if "ByteLevel" in kinds:
        return True
    if kinds & {"ByteFallback", "Metaspace"}:
        return False
    raise UnsupportedModelError(
        f"{folder} has a tokenizer that decodes by {', '.join(sorted(map(str, kinds))) or 'no rule'}.",
        "Byte-level BPE and SentencePiece with byte fallback are supported.",
    )


def _take_space_prefix(core: tokenizers.Tokenizer) -> SpacePrefix:
    """Move the rule for a leading space out of the tokenizer: text is encoded in pieces here, and the library would
    take each for a beginning."""
    prefix = SpacePrefix()
    normalizer, splitter = _state(core.normalizer), _state(core.pre_tokenizer)
    kept = [step for step in _steps(normalizer, "normalizers") if step != {"type": "Prepend", "prepend": SPACE_MARK}]
    if len(kept) < len(_steps(normalizer, "normalizers")):
        prefix = SpacePrefix("always")
        normalizer = {"type": "Sequence", "normalizers": kept}
    for step in _steps(splitter, "pretokenizers"):
        if step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            prefix = SpacePrefix(step.get("prepend_scheme", "always"), unless_present=True)
            step["prepend_scheme"] = "never"
    if prefix.where != "never":
        empty = {"type": "BPE", "vocab": {}, "merges": []}
        parts = {"version": "1.0", "added_tokens": [], "model": empty, "post_processor": None, "decoder": None}
        parts |= {"truncation": None, "padding": None}
        parts |= {"normalizer": normalizer or None, "pre_tokenizer": splitter or None}
        rebuilt = tokenizers.Tokenizer.from_str(json.dumps(parts))
        core.normalizer, core.pre_tokenizer = rebuilt.normalizer, rebuilt.pre_tokenizer  # type: ignore[assignment]
    return prefix


def _token_name(value: Any) -> str:
    """Special tokens are written as text or as objects with `content`."""
    name = value.get("content") if isinstance(value, dict) else value
    return name if isinstance(name, str) else ""


def _end_ids(folder: Path, config: dict[str, Any], by_text: dict[str, int]) -> set[int]:
    ends = {by_text[name] for name in (_token_name(config.get("eos_token")),) if name in by_text}
    for file in ("generation_config.json", "config.json"):
        value = read_json(folder / file).get("eos_token_id")
        ends |= {i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int) and i >= 0}
    return ends
