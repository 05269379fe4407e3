"""`Architecture` from GGUF metadata. What the keys mean, and their defaults, is as in llama.cpp's model loader."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from backends.arch import Architecture, RopeScaling
from backends.errors import ModelFileError, UnsupportedModelError
from backends.rope import yarn_attention_factor
from backends.weights.fields import FAMILIES, MAX_LAYERS, Fields, checked, unsupported_family

GEMMA3_27B_LAYERS = 62
"""The one Gemma 3 whose attention scale is not that of its head dimension; llama.cpp tells it by this number too."""

_NOT_IMPLEMENTED: dict[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attention.temperature_length": (0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_attn_factor": (-1.0, 1.0),
}


def gguf_architecture(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: np.ndarray | None,
    where: str,
) -> Architecture:
    """metadata, shapes: of one file; rope_factors: float32 `[head_dim / 2]`, its `rope_freqs.weight` if it has one.

    Raises ModelFileError for hyperparameters that are missing or make no sense, UnsupportedModelError for architectures
    and options that nothing here computes.
    """
    family = Fields(metadata, where).text("general.architecture")
    if family not in FAMILIES:
        raise unsupported_family(where, family)
    fields = Fields(metadata, where, f"{family}.")
    for name, neutral in _NOT_IMPLEMENTED.items():
        fields.refuse(name, *neutral)

    is_gemma = family == "gemma3"
    num_layers = fields.integer("block_count", high=MAX_LAYERS)
    d_model = fields.integer("embedding_length")
    num_heads = _same_in_every_layer(fields, "attention.head_count")
    num_kv_heads = _same_in_every_layer(fields, "attention.head_count_kv", num_heads)
    head_dim = fields.integer("attention.key_length", default=max(1, d_model // num_heads))
    fields.refuse("attention.value_length", head_dim)
    fields.refuse("rope.dimension_count", head_dim)
    windows = _windows(fields, family, num_layers)
    theta = fields.number("rope.freq_base", 1_000_000.0 if is_gemma else 10_000.0)
    local_theta = fields.number("rope.freq_base_swa", 10_000.0) if is_gemma else theta
    is_local = [is_gemma and window > 0 for window in windows]
    scale_dim = d_model / num_heads if is_gemma and num_layers == GEMMA3_27B_LAYERS else head_dim
    return checked(
        Architecture(
            family=family,
            num_layers=num_layers,
            d_model=d_model,
            d_ff=_same_in_every_layer(fields, "feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=_vocab_size(metadata, shapes, where),
            context_length=fields.integer("context_length", high=1 << 31),
            norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            windows=windows,
            rope_thetas=tuple(local_theta if local else theta for local in is_local),
            rope_scaled=tuple(not local for local in is_local),
            rope_scaling=_rope_scaling(fields, rope_factors),
            attention_scale=1 / math.sqrt(scale_dim),
            activation="gelu_tanh" if is_gemma else "silu",
            embedding_scale=math.sqrt(d_model) if is_gemma else 1.0,
            tied_embeddings="output.weight" not in shapes,
            qkv_bias="blk.0.attn_q.bias" in shapes,
            qk_norm=family in ("qwen3", "gemma3"),
            post_norms=is_gemma,
        ),
        where,
    )


def _same_in_every_layer(fields: Fields, name: str, default: int | None = None) -> int:
    value = fields.get(name)
    if isinstance(value, np.ndarray):
        if len(value) == 0 or np.any(value != value[0]):
            raise UnsupportedModelError(
                f"{fields.where}: {name} differs between layers, which is not implemented.",
                "Use the llama runner once installed: pip install 'roost[llama]'.",
            )
        return Fields({name: value[0].item()}, fields.where).integer(name)
    return fields.integer(name, default)


def _windows(fields: Fields, family: str, num_layers: int) -> tuple[int, ...]:
    name = "attention.sliding_window"
    if not fields.get(name):
        return (0,) * num_layers
    if family in ("qwen2", "qwen3"):
        fields.refuse(name)
    window = fields.integer(name, high=1 << 31)
    if family != "gemma3":
        return (window,) * num_layers
    pattern = fields.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        if len(pattern) != num_layers:
            raise ModelFileError(
                f"{fields.where}: the sliding window pattern names {len(pattern)} of {num_layers} layers.",
                "Convert or download the model again.",
            )
        return tuple(window if slides else 0 for slides in pattern.tolist())
    every = fields.integer("attention.sliding_window_pattern", 6, low=0, high=MAX_LAYERS)
    # llama.cpp: the last layer of each period sees everything; a period of 0 means that none slides.
    return tuple(window if every and i % every < every - 1 else 0 for i in range(num_layers))


def _rope_scaling(fields: Fields, factors: np.ndarray | None) -> RopeScaling | None:
    kind = fields.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        fields.refuse("rope.scaling.type")
    # Old files keep the factor of linear scaling under another name, and write 0 for none.
    key = "rope.scaling.factor" if fields.has("rope.scaling.factor") else "rope.scale_linear"
    factor = fields.number(key) if fields.get(key) and kind != "none" else 1.0
    if factors is not None:
        if kind == "yarn" or not np.all(np.isfinite(factors) & (factors > 0)):
            raise ModelFileError(f"{fields.where}: its rotary factors make no sense.", "Download the model again.")
        return RopeScaling("factors", factor, factors=tuple((factors.astype(np.float64) * factor).tolist()))
    if factor == 1.0:
        return None
    if kind == "linear":
        return RopeScaling("linear", factor)
    return RopeScaling(
        "yarn",
        factor,
        original_context=fields.integer(
            "rope.scaling.original_context_length", fields.integer("context_length", high=1 << 31), high=1 << 31
        ),
        attention_factor=yarn_attention_factor(factor) * fields.number("rope.scaling.attn_factor", 1.0),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _vocab_size(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str) -> int:
    shape = shapes.get("token_embd.weight", ())
    if len(shape) != 2:
        raise ModelFileError(f"{where} has no matrix token_embd.weight.", "Download the model again.")
    return shape[0]
