"""Tiny (and, for benchmarks, big) models with random weights, written as GGUF files that a whole server can run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType

from backends.arch import Architecture
from backends.rope import inverse_frequencies
from backends.weights.names import gguf_name, tensor_shapes

_K_FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What llama.cpp's quantizer writes where rows are not whole K blocks."""
_K_M = {"Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K"}
_K_M_BIGGER = ("embed", "head", "v", "down")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TOKENIZER_TEXT = (
    "The quick brown fox jumps over the lazy dog, and a small model says hello to the world of many machines. "
    "def main(): return [token for token in range(100) if token % 2 == 0] # this and that, here and there\n"
)


def tiny_arch(family: str = "llama", **overrides: Any) -> Architecture:
    """A small `Architecture` of a family ("llama", "mistral", "qwen2", "qwen3", "gemma3"): grouped heads everywhere, a
    sliding window of 8 in mistral and gemma3 (every sixth layer of gemma3 is full), rows of 64 weights.

    `num_layers`, `rope_theta`, `window` and every field of `Architecture` can be given; per-layer fields follow.
    """
    is_gemma = family == "gemma3"
    num_layers = overrides.pop("num_layers", 7 if is_gemma else 3)
    window = overrides.pop("window", 8 if family in ("mistral", "gemma3") else 0)
    theta = overrides.pop("rope_theta", 1_000_000.0 if is_gemma else 10_000.0)
    d_model = overrides.get("d_model", 64)
    head_dim = overrides.get("head_dim", 32)
    is_local = [is_gemma and window > 0 and i % 6 < 5 for i in range(num_layers)]
    arch = Architecture(
        family=family,
        num_layers=num_layers,
        d_model=d_model,
        d_ff=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        vocab_size=320,
        context_length=512,
        norm_eps=1e-5,
        windows=tuple(window if local or not is_gemma else 0 for local in is_local),
        rope_thetas=tuple(10_000.0 if local else theta for local in is_local),
        rope_scaled=tuple(not local for local in is_local),
        rope_scaling=None,
        attention_scale=1 / math.sqrt(head_dim),
        activation="gelu_tanh" if is_gemma else "silu",
        embedding_scale=math.sqrt(d_model) if is_gemma else 1.0,
        tied_embeddings=is_gemma,
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "gemma3"),
        post_norms=is_gemma,
    )
    return dataclasses.replace(arch, **overrides)


def random_weights(arch: Architecture, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 weights by canonical name."""
    return {
        name: _random_floats(name, shape, np.random.default_rng([seed, i]))
        for i, (name, shape) in enumerate(tensor_shapes(arch).items())
    }


def write_gguf(
    path: Path,
    arch: Architecture,
    quant: str = "Q4_0",
    seed: int = 0,
    weights: Mapping[str, np.ndarray] | None = None,
    metadata: Mapping[str, object] | None = None,
    tokenizer: bool = True,
) -> Path:
    """Write a model: from `weights` (canonical names), else random. Matrices are stored as `quant`, vectors as F32.

    quant: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, or the mixtures Q4_K_M, Q5_K_M. K types are
    only made at random. metadata: more entries (int, float, bool, str, list), which win over those made from `arch`.
    """
    writer = gguf.GGUFWriter(path, "llama" if arch.family == "mistral" else arch.family)
    _add_hyperparameters(writer, arch)
    if tokenizer:
        _add_tokenizer(writer, arch.vocab_size)
    for key, value in (metadata or {}).items():
        for part in writer.kv_data:
            part.pop(key, None)
        _add_value(writer, key, value)

    makers: list[Callable[[], np.ndarray]] = []
    factors = _rope_factors(arch)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
        makers.append(lambda: factors)
    for i, (name, shape) in enumerate(tensor_shapes(arch).items()):
        kind = _stored_type(name, shape, quant)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        byte_shape = (*shape[:-1], shape[-1] // block * block_bytes)
        writer.add_tensor_info(gguf_name(name), byte_shape, np.dtype(np.uint8), math.prod(byte_shape), raw_dtype=kind)
        makers.append(_maker(arch, name, shape, kind, np.random.default_rng([seed, i]), weights))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for make in makers:
        writer.write_tensor_data(make())
    writer.close()
    return path


def random_blocks(kind: GGMLType, num_blocks: int, sigma: float, rng: np.random.Generator) -> np.ndarray:
    """Valid random blocks whose weights have about the standard deviation `sigma`: uint8 `[blocks, block bytes]`."""
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    spread, centre, scale_at, bias_at = _BLOCK_STATISTICS[kind.name]
    scale = (sigma / spread * rng.uniform(0.5, 1.5, num_blocks)).astype(np.float16)
    blocks[:, scale_at : scale_at + 2] = scale.view(np.uint8).reshape(-1, 2)
    if bias_at:
        bias = (scale.astype(np.float32) * centre).astype(np.float16)
        blocks[:, bias_at : bias_at + 2] = bias.view(np.uint8).reshape(-1, 2)
    return blocks


_BLOCK_STATISTICS: dict[str, tuple[float, float, int, int]] = {
    # weights per unit of scale: standard deviation, bias that centres them; byte of scale and of bias (0: none)
    "Q4_0": (4.6, 0, 0, 0),
    "Q4_1": (4.6, -7.5, 0, 2),
    "Q5_0": (9.2, 0, 0, 0),
    "Q5_1": (9.2, -15.5, 0, 2),
    "Q8_0": (74, 0, 0, 0),
    "Q4_K": (256, 7.5, 0, 2),
    "Q5_K": (512, 15.5, 0, 2),
    "Q6_K": (1370, 0, 208, 0),
}


def _stored_type(name: str, shape: tuple[int, ...], quant: str) -> GGMLType:
    if len(shape) == 1:
        return GGMLType.F32
    if quant in _K_M:
        quant = "Q6_K" if name.rpartition(".")[2] in _K_M_BIGGER else _K_M[quant]
    if shape[1] % gguf.GGML_QUANT_SIZES[GGMLType[quant]][0]:
        quant = _K_FALLBACK[quant]
    return GGMLType[quant]


def _maker(
    arch: Architecture,
    name: str,
    shape: tuple[int, ...],
    kind: GGMLType,
    rng: np.random.Generator,
    weights: Mapping[str, np.ndarray] | None,
) -> Callable[[], np.ndarray]:
    def make() -> np.ndarray:
        if weights is None and kind.name in _BLOCK_STATISTICS:
            num_blocks = math.prod(shape) // gguf.GGML_QUANT_SIZES[kind][0]
            return random_blocks(kind, num_blocks, _sigma(name, shape), rng).reshape(shape[0], -1)
        values = _random_floats(name, shape, rng) if weights is None else weights[name].astype(np.float32)
        if arch.family in ("llama", "mistral") and name.rpartition(".")[2] in ("q", "k", "q_bias", "k_bias"):
            values = values.reshape(-1, 2, arch.head_dim // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
        return gguf.quants.quantize(values, kind).view(np.uint8)

    return make


def _random_floats(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    values = rng.standard_normal(shape, np.float32)
    if len(shape) == 2:
        return values * np.float32(_sigma(name, shape))
    return values * np.float32(0.1) + np.float32(0.0 if name.endswith("bias") else 1.0)


def _sigma(name: str, shape: tuple[int, ...]) -> float:
    return (3 if name in ("embed", "head") else 1) / math.sqrt(shape[1])


def _rope_factors(arch: Architecture) -> np.ndarray | None:
    if arch.rope_scaling is None or arch.rope_scaling.kind not in ("llama3", "factors"):
        return None
    plain = dataclasses.replace(arch, rope_scaling=None)
    return inverse_frequencies(plain, 0)[0] / inverse_frequencies(arch, 0)[0]


def _add_hyperparameters(writer: gguf.GGUFWriter, arch: Architecture) -> None:
    writer.add_name("Tiny random")
    writer.add_block_count(arch.num_layers)
    writer.add_context_length(arch.context_length)
    writer.add_embedding_length(arch.d_model)
    writer.add_feed_forward_length(arch.d_ff)
    writer.add_head_count(arch.num_heads)
    writer.add_head_count_kv(arch.num_kv_heads)
    writer.add_key_length(arch.head_dim)
    writer.add_value_length(arch.head_dim)
    writer.add_rope_dimension_count(arch.head_dim)
    writer.add_layer_norm_rms_eps(arch.norm_eps)
    writer.add_rope_freq_base(arch.rope_thetas[-1] if arch.rope_scaled[-1] else max(arch.rope_thetas))
    if any(arch.windows):
        writer.add_sliding_window(max(arch.windows))
    scaling = arch.rope_scaling
    if scaling is not None and scaling.kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling.kind))
        writer.add_rope_scaling_factor(scaling.factor)
        if scaling.kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(scaling.original_context)


@cache
def _trained_tokenizer(vocab_size: int) -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE with at most `vocab_size` tokens, specials first."""
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator([_TOKENIZER_TEXT] * 4, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].__getitem__), [" ".join(pair) for pair in model["merges"]]


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    tokens, merges = _trained_tokenizer(min(vocab_size, 400))
    unused = [f"<|unused_{i}|>" for i in range(len(tokens), vocab_size)]
    types = [gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS)
    types += [gguf.TokenType.NORMAL] * (len(tokens) - len(SPECIAL_TOKENS)) + [gguf.TokenType.UNUSED] * len(unused)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens + unused)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_value(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(f"no GGUF type for {key} = {value!r}")
