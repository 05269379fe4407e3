"""`Architecture` from a Hugging Face `config.json`. Defaults are those of the family's class in transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from backends.arch import Architecture, RopeScaling
from backends.errors import ModelFileError, UnsupportedModelError
from backends.rope import yarn_attention_factor
from backends.weights.fields import FAMILIES, MAX_LAYERS, Fields, checked, unsupported_family

_MAX_CONTEXT = 1 << 31
# Published Gemma 3 configurations leave out what the class fills in; those of the other families are complete.
_GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_NOT_IMPLEMENTED: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "use_bidirectional_attention": (False,),
    "num_experts": (0,),
    "num_local_experts": (0,),
}
_ACTIVATIONS = {"gemma3": "gelu_pytorch_tanh"}


def hf_architecture(config: Mapping[str, Any], where: str) -> Architecture:
    """Raises ModelFileError for a configuration that lacks something or makes no sense, UnsupportedModelError for
    architectures, quantizations and options that nothing here computes."""
    model_type = config.get("model_type")
    values = dict(config)
    if model_type == "gemma3" and isinstance(config.get("text_config"), dict):
        values |= config["text_config"]
    family = "gemma3" if model_type in ("gemma3", "gemma3_text") else model_type
    if family not in FAMILIES:
        raise unsupported_family(where, model_type)
    is_gemma = family == "gemma3"
    if is_gemma:
        values = _GEMMA3_DEFAULTS | {name: value for name, value in values.items() if value is not None}
    fields = Fields(values, where)
    _refuse_quantization(config, where)
    for name, neutral in _NOT_IMPLEMENTED.items():
        fields.refuse(name, *neutral)
    fields.refuse("hidden_activation" if is_gemma else "hidden_act", _ACTIVATIONS.get(family, "silu"))

    d_model = fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", 128 if family == "qwen3" else max(1, d_model // num_heads))
    windows = _windows(fields, values, family, num_layers)
    is_local = [is_gemma and window > 0 for window in windows]
    theta, local_theta, scaling = _rope(fields, is_gemma)
    scale_dim = fields.number("query_pre_attn_scalar") if is_gemma else head_dim
    return checked(
        Architecture(
            family=family,
            num_layers=num_layers,
            d_model=d_model,
            d_ff=fields.integer("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            vocab_size=fields.integer("vocab_size"),
            context_length=fields.integer("max_position_embeddings", high=_MAX_CONTEXT),
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            windows=windows,
            rope_thetas=tuple(local_theta if local else theta for local in is_local),
            rope_scaled=tuple(not local for local in is_local),
            rope_scaling=scaling,
            attention_scale=1 / math.sqrt(scale_dim),
            activation="gelu_tanh" if is_gemma else "silu",
            embedding_scale=math.sqrt(d_model) if is_gemma else 1.0,
            tied_embeddings=fields.flag("tie_word_embeddings", False),
            qkv_bias=family == "qwen2",
            qk_norm=family in ("qwen3", "gemma3"),
            post_norms=is_gemma,
        ),
        where,
    )


def _refuse_quantization(config: Mapping[str, Any], where: str) -> None:
    """MLX's affine groups are read; they are described in `quantization`, and again in `quantization_config`."""
    mlx = config.get("quantization")
    if isinstance(mlx, dict):
        Fields(mlx, where).refuse("mode", "affine")
        return
    other = config.get("quantization_config")
    if other is not None:
        method = other.get("quant_method") if isinstance(other, dict) else None
        raise UnsupportedModelError(
            f"{where}: the weights are quantized with {str(method)[:40]}, which no native backend reads.",
            "Use the unquantized model, an MLX-quantized copy, or its GGUF file.",
        )


def _windows(fields: Fields, values: Mapping[str, Any], family: str, num_layers: int) -> tuple[int, ...]:
    if family == "llama" or (family in ("qwen2", "qwen3") and not fields.flag("use_sliding_window", False)):
        return (0,) * num_layers
    if not fields.has("sliding_window"):
        # Null says that there is none; an absent field stands for the class's default.
        if family != "mistral" or "sliding_window" in values:
            return (0,) * num_layers
        window = 4096
    else:
        window = fields.integer("sliding_window", high=_MAX_CONTEXT)
    types = fields.get("layer_types")
    if types is None:
        types = _default_layer_types(fields, family, num_layers)
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelFileError(f"{fields.where}: layer_types does not name {num_layers} layers.", "Download it again.")
    for kind in types:
        if kind not in ("sliding_attention", "full_attention"):
            Fields({"layer_types": kind}, fields.where).refuse("layer_types")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _default_layer_types(fields: Fields, family: str, num_layers: int) -> list[str]:
    if family == "mistral":
        slides = [True] * num_layers
    elif family == "gemma3":
        key = "sliding_window_pattern" if fields.has("sliding_window_pattern") else "_sliding_window_pattern"
        every = fields.integer(key, 6, high=MAX_LAYERS)
        slides = [(i + 1) % every != 0 for i in range(num_layers)]
    else:
        first = fields.integer("max_window_layers", 28, low=0, high=MAX_LAYERS)
        slides = [i >= first for i in range(num_layers)]
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _rope(fields: Fields, is_gemma: bool) -> tuple[float, float, RopeScaling | None]:
    """Rotary base of full and of sliding layers, and the scaling of the full ones."""
    theta = fields.number("rope_theta", 1_000_000.0 if is_gemma else 10_000.0)
    local_theta = fields.number("rope_local_base_freq", 10_000.0)
    params = _mapping(fields, "rope_parameters") or _mapping(fields, "rope_scaling")
    if is_gemma and ("full_attention" in params or "sliding_attention" in params):
        nested = Fields(params, fields.where)
        local = Fields(_mapping(nested, "sliding_attention"), fields.where)
        local.refuse("rope_type", "default")
        local_theta = local.number("rope_theta", local_theta)
        params = _mapping(nested, "full_attention")
    rope = Fields(params, fields.where)
    theta = rope.number("rope_theta", theta)
    return theta, local_theta, _scaling(rope, fields.integer("max_position_embeddings", high=_MAX_CONTEXT))


def _scaling(rope: Fields, context_length: int) -> RopeScaling | None:
    key = "rope_type" if rope.has("rope_type") else "type"
    kind = rope.text(key, "default")
    rope.refuse("partial_rotary_factor", 1.0)
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        rope.refuse(key)
    factor = rope.number("factor")
    if kind == "linear":
        return RopeScaling("linear", factor)
    original = rope.integer("original_max_position_embeddings", context_length, high=_MAX_CONTEXT)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise ModelFileError(f"{rope.where}: low_freq_factor is not below high_freq_factor.", "Download it again.")
        return RopeScaling("llama3", factor, low, high, original)
    attention_factor = yarn_attention_factor(factor)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        attention_factor = yarn_attention_factor(factor, rope.number("mscale"))
        attention_factor /= yarn_attention_factor(factor, rope.number("mscale_all_dim"))
    return RopeScaling(
        "yarn",
        factor,
        original_context=original,
        attention_factor=rope.number("attention_factor", attention_factor),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
    )


def _mapping(fields: Fields, name: str) -> dict[str, Any]:
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ModelFileError(f"{fields.where}: {name} is not an object.", "Download the model again.")
    return value
