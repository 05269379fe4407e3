"""Tiny random models of `transformers`, from an `Architecture`, as the second opinion on every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from backends.arch import Architecture
from backends.weights.names import hf_name, tensor_shapes


def hf_config(arch: Architecture) -> Any:
    """The configuration that means the same as `arch`."""
    import transformers

    common: dict[str, Any] = {
        "hidden_size": arch.d_model,
        "intermediate_size": arch.d_ff,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "vocab_size": arch.vocab_size,
        "max_position_embeddings": arch.context_length,
        "rms_norm_eps": arch.norm_eps,
        "tie_word_embeddings": arch.tied_embeddings,
        "pad_token_id": None,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    window = max(arch.windows) or None
    layer_types = ["sliding_attention" if w else "full_attention" for w in arch.windows]
    rope = {"rope_theta": max(arch.rope_thetas)} | _scaling(arch)
    match arch.family:
        case "llama":
            config = transformers.LlamaConfig(**common, rope_parameters=rope)
        case "mistral":
            config = transformers.MistralConfig(**common, rope_parameters=rope, sliding_window=window)
        case "qwen2":
            windows = {"use_sliding_window": bool(window), "sliding_window": window, "layer_types": layer_types}
            config = transformers.Qwen2Config(**common, rope_parameters=rope, **windows)
        case "qwen3":
            windows = {"use_sliding_window": bool(window), "sliding_window": window, "layer_types": layer_types}
            config = transformers.Qwen3Config(**common, rope_parameters=rope, **windows)
        case _:
            config = transformers.Gemma3TextConfig(
                **common,
                query_pre_attn_scalar=round(arch.attention_scale**-2),
                sliding_window=window,
                layer_types=layer_types,
                rope_parameters={
                    "full_attention": rope,
                    "sliding_attention": {"rope_type": "default", "rope_theta": min(arch.rope_thetas)},
                },
            )
    config._attn_implementation = "eager"
    return config


def _scaling(arch: Architecture) -> dict[str, Any]:
    scaling = arch.rope_scaling
    if scaling is None:
        return {"rope_type": "default"}
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    if scaling.kind == "llama3":
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    return {
        "rope_type": "yarn",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_context,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
    }


def hf_model(arch: Architecture, weights: dict[str, np.ndarray]) -> Any:
    """A float32 causal LM with these weights (canonical names), eager attention."""
    import torch
    import transformers

    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_config(hf_config(arch), dtype=torch.float32).eval()
    state = {}
    for name, shape in tensor_shapes(arch).items():
        values = weights[name]
        if arch.family == "gemma3" and len(shape) == 1:
            values = values - np.float32(1)
        prefix = "" if name == "head" else "model."
        state[prefix + hf_name(name, arch.post_norms)] = torch.from_numpy(np.array(values))
    if arch.tied_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


def hf_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """float32 `[tokens, vocab]` of one whole sequence."""
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()


def write_safetensors_model(
    folder: Path,
    arch: Architecture,
    weights: dict[str, np.ndarray],
    dtype: str = "float32",
    max_shard_size: str = "5GB",
) -> Path:
    """Save `weights` the way transformers saves a model, without a tokenizer. dtype: float32, float16, bfloat16."""
    import torch

    model = hf_model(arch, weights).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder
