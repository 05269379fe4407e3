"""What a model file or folder says of itself, without loading it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from backends.weights.gguf import GGUFFile
from node.errors import ModelFileError
from node.models.hf_vocab import read_json

FILE_TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S"},
    **{12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 32: "BF16"},
}
"""`general.file_type` of GGUF files (llama.cpp's `llama_ftype`)."""


@dataclass(frozen=True, slots=True)
class Description:
    """`can_chat`: it brings a chat template."""

    architecture: str
    quantization: str
    size_bytes: int
    can_chat: bool


def describe(path: Path) -> Description:
    """Of a GGUF file or a Hugging Face folder. Raises ModelFileError for anything else."""
    return _describe_folder(path) if path.is_dir() else _describe_gguf(path)


def _describe_gguf(path: Path) -> Description:
    with GGUFFile.open(path) as file:
        sizes: Counter[str] = Counter()
        for tensor in file.tensors.values():
            sizes[tensor.type.name] += tensor.num_bytes
        stored = FILE_TYPES.get(file.metadata.get("general.file_type", -1))
        common = sizes.most_common(1)
        return Description(
            architecture=str(file.metadata.get("general.architecture", "unknown")),
            quantization=stored or (common[0][0] if common else "unknown"),
            size_bytes=path.stat().st_size,
            can_chat="tokenizer.chat_template" in file.metadata,
        )


def _describe_folder(folder: Path) -> Description:
    config = read_json(folder / "config.json")
    weights = list(folder.glob("*.safetensors"))
    if not config or not weights:
        raise ModelFileError(
            f"{folder} is not a model: it has no {'safetensors files' if config else 'config.json'}.",
            "Give a .gguf file, or a folder with config.json, tokenizer.json and safetensors.",
        )
    quantization = config.get("quantization")
    if isinstance(quantization, dict) and "bits" in quantization:
        stored = f"{quantization['bits']}-bit"
    else:
        stored = str(config.get("dtype") or config.get("torch_dtype") or "unknown")
    return Description(
        architecture=str(config.get("model_type", "unknown")),
        quantization={"bfloat16": "BF16", "float16": "F16", "float32": "F32"}.get(stored, stored),
        size_bytes=sum(file.stat().st_size for file in folder.iterdir() if file.is_file()),
        can_chat=(folder / "chat_template.jinja").is_file()
        or bool(read_json(folder / "tokenizer_config.json").get("chat_template")),
    )
