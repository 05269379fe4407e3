"""Canonical tensor names and shapes of an architecture, and what GGUF and Hugging Face files call the same tensors."""

from __future__ import annotations

from backends.arch import Architecture

_GGUF_ENDS = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
_GGUF_LAYER = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "o": "attn_output.weight",
    "attn_post_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "mlp_post_norm": "post_ffw_norm.weight",
}

_HF_ENDS = {"embed": "embed_tokens.weight", "norm": "norm.weight", "head": "lm_head.weight"}
_HF_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_HF_POST_NORMS = {
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}


def tensor_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every canonical tensor that a model of this architecture has, with its shape."""
    d, heads = arch.d_model, (arch.head_dim,)
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (d,),
        "q": (arch.q_rows, d),
        "k": (arch.kv_rows, d),
        "v": (arch.kv_rows, d),
    }
    if arch.qkv_bias:
        layer |= {"q_bias": (arch.q_rows,), "k_bias": (arch.kv_rows,), "v_bias": (arch.kv_rows,)}
    if arch.qk_norm:
        layer |= {"q_norm": heads, "k_norm": heads}
    layer["o"] = (d, arch.q_rows)
    if arch.post_norms:
        layer["attn_post_norm"] = (d,)
    layer |= {"mlp_norm": (d,), "gate": (arch.d_ff, d), "up": (arch.d_ff, d), "down": (d, arch.d_ff)}
    if arch.post_norms:
        layer["mlp_post_norm"] = (d,)

    shapes: dict[str, tuple[int, ...]] = {"embed": (arch.vocab_size, d)}
    for i in range(arch.num_layers):
        shapes |= {f"layers.{i}.{part}": shape for part, shape in layer.items()}
    shapes["norm"] = (d,)
    if not arch.tied_embeddings:
        shapes["head"] = (arch.vocab_size, d)
    return shapes


def gguf_name(name: str) -> str:
    """What a GGUF file calls the canonical tensor `name`."""
    if name in _GGUF_ENDS:
        return _GGUF_ENDS[name]
    _, layer, part = name.split(".")
    return f"blk.{layer}.{_GGUF_LAYER[part]}"


def hf_name(name: str, post_norms: bool) -> str:
    """What a Hugging Face file calls the canonical tensor `name`, below the prefix that its text model has.

    `lm_head` has no such prefix.
    """
    if name in _HF_ENDS:
        return _HF_ENDS[name]
    _, layer, part = name.split(".")
    renamed = _HF_LAYER | _HF_POST_NORMS if post_norms else _HF_LAYER
    return f"layers.{layer}.{renamed[part]}"
