"""Small vocabularies for tests, as GGUF files without tensors and as Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from node.models.vocab import byte_alphabet

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

TEXTS = (
    "Hello world, it's a don't-care; WE'LL see I'M here",
    "  leading,  double  and trailing   ",
    "def f(x):\n    return {'a': [x + 1, 0x1F]}  # 100%\n\n\nclass A:\n\tpass\r\n",
    "1234567890 3.14 1,000,000 ½ Ⅷ ٣٤ x²",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 ❤️",
    "漢字かな交じり文です。 한국어 텍스트",
    "مرحبا بالعالم — שלום",
    "e\u0301 a\u0308\u0323 \u0301lone",
    "\x00\x01\x1f\x7f\x80 control",
    "<|im_end|>\n<|im_start|>system <eos> </s> <s> [INST] <unused7> <0x41>",
    "\u3000wide\u00a0nbsp\u2028line\ufeffbom",
    " " * 40,
    "\t\t\t\n\n\n\n \n \t",
    "\n" * 35,
    "a" * 300,
    "“quotes”… naïve Ünïcödé ＦＵＬＬ ﬁ",
    "",
    " ",
    "\U0010ffff\ue000\ud7ff",
)


def write_vocabulary(path: Path, model: str, tokens: list[str], types: list[int], **fields: Any) -> Path:
    """A GGUF file with nothing but a tokenizer. `fields` are keys below tokenizer.ggml (or tokenizer, for
    chat_template); architecture "llama"."""
    writer = gguf.GGUFWriter(path, fields.pop("arch", "llama"))
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, value in fields.items():
        full = f"tokenizer.{key}" if key == "chat_template" else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        else:
            writer.add_array(full, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_tokens() -> tuple[list[str], list[str]]:
    """Tokens and merges trained on `TEXTS`; the first three tokens are `SPECIALS`."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(SPECIALS), initial_alphabet=sorted(byte_alphabet()), show_progress=False
    )
    core.train_from_iterator([text for text in TEXTS if "<|" not in text] * 3, trainer)
    state = json.loads(core.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    return tokens, [merge if isinstance(merge, str) else " ".join(merge) for merge in state["merges"]]


def write_byte_level(path: Path, pre: str = "gpt-2", **fields: Any) -> Path:
    tokens, merges = byte_level_tokens()
    types = [CONTROL] * len(SPECIALS) + [NORMAL] * (len(tokens) - len(SPECIALS))
    defaults = {"bos_token_id": 1, "eos_token_id": 2, "merges": merges, "pre": pre}
    return write_vocabulary(path, "gpt2", tokens, types, **(defaults | fields))


def write_byte_level_folder(folder: Path, *, digits: bool, **config: Any) -> Path:
    """The same vocabulary as tokenizer.json, put together with the `tokenizers` library's own parts."""
    tokens, merges = byte_level_tokens()
    core = tokenizers.Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [tuple(merge.split(" ")) for merge in merges])
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level]) if digits else byte_level
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return save_folder(folder, core, **({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"} | config))


def save_folder(folder: Path, core: tokenizers.Tokenizer, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def sentencepiece_pieces() -> tuple[list[str], list[int], list[float]]:
    """Tokens, types and scores: specials, 256 bytes, characters, and joined pieces with falling scores."""
    tokens, types = ["<unk>", "<s>", "</s>", "<|tag|>"], [UNKNOWN, CONTROL, CONTROL, USER_DEFINED]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    types += [BYTE] * 256
    joined = "▁t he ▁the er in ing ▁w or wor ld world ▁world ll Hell o▁ lo el ▁a nd ▁and ▁▁ re ret urn 12 123 no ▁no"
    pieces = [*joined.split(), *sorted({char for text in TEXTS[:7] for char in text if ord(char) > 32} | {"▁"})]
    pieces = [piece for piece in dict.fromkeys(pieces) if piece not in tokens]
    tokens += pieces
    types += [NORMAL] * len(pieces)
    scores = [0.0] * 260 + [-float(rank) for rank in range(1, len(pieces) + 1)]
    return tokens, types, scores


def write_sentencepiece(path: Path, **fields: Any) -> Path:
    tokens, types, scores = sentencepiece_pieces()
    defaults = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "scores": scores}
    return write_vocabulary(path, "llama", tokens, types, **(defaults | fields))
