"""One dataclass that describes a decoder. Engines read it; they never ask which family a model came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched; `backends/rope.py` does it.

    "linear" divides all of them by `factor`, "factors" each by its own of `factors` (`head_dim / 2` numbers: how GGUF
    stores llama3), "llama3" and "yarn" are as in transformers' `modeling_rope_utils`, from the fields named there.
    `attention_factor` multiplies cosine and sine (yarn). `truncate` rounds yarn's correction range to whole dimensions.
    """

    kind: Literal["linear", "llama3", "yarn", "factors"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder-only transformer.

    `windows[i]` is the sliding window of layer i in tokens (a token sees itself and `window - 1` before it), 0 for full
    attention. `rope_thetas[i]` is that layer's rotary base (see `backends/rope.py`); `rope_scaling` applies to the
    layers whose `rope_scaled[i]` is true. Rotary order is always half-rotation (NeoX): sources permute weights that
    come in another order. `family` is one of "llama", "mistral", "qwen2", "qwen3" and "gemma3".
    """

    family: str
    num_layers: int
    d_model: int
    d_ff: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    windows: tuple[int, ...]
    rope_thetas: tuple[float, ...]
    rope_scaled: tuple[bool, ...]
    rope_scaling: RopeScaling | None
    attention_scale: float
    activation: Activation
    embedding_scale: float
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    post_norms: bool

    @property
    def q_rows(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, num_layers: int | None = None) -> int:
        """float16 keys and values of `num_layers` layers (all of them by default)."""
        return (self.num_layers if num_layers is None else num_layers) * 2 * self.kv_rows * 2
