"""The oracle against transformers, family by family, from both file formats."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.arch import Architecture, RopeScaling
from backends.base import Batch, KVRoom, Span
from backends.reference import ReferenceBackend
from backends.rope import yarn_attention_factor
from backends.weights.open import open_source
from partitioner.plan import Shard
from tests.hf_models import hf_logits, hf_model, write_safetensors_model
from tests.models import random_weights, tiny_arch, write_gguf

NUM_TOKENS = 70
LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, original_context=32)
YARN = RopeScaling("yarn", 4.0, original_context=32, attention_factor=yarn_attention_factor(4.0))
LINEAR = RopeScaling("linear", 4.0)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tied_embeddings": True}),
    "llama, llama3 scaling": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500_000.0}),
    "llama, linear scaling": ("llama", {"rope_scaling": LINEAR}),
    "llama, yarn": ("llama", {"rope_scaling": YARN}),
    "llama, one kv head, small heads": ("llama", {"num_kv_heads": 1, "head_dim": 16}),
    "llama, no grouping": ("llama", {"num_kv_heads": 4}),
    "mistral": ("mistral", {}),
    "mistral, no window": ("mistral", {"window": 0}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied, yarn": ("qwen2", {"tied_embeddings": True, "rope_scaling": YARN, "rope_theta": 1_000_000.0}),
    "qwen3": ("qwen3", {}),
    "qwen3, tied": ("qwen3", {"tied_embeddings": True}),
    "gemma3": ("gemma3", {}),
    "gemma3, linear scaling": ("gemma3", {"rope_scaling": LINEAR, "num_layers": 6}),
}


def _tokens(arch: Architecture) -> np.ndarray:
    return np.random.default_rng(7).integers(0, arch.vocab_size, NUM_TOKENS).astype(np.int32)


def _logits(path: Path, tokens: np.ndarray) -> np.ndarray:
    source = open_source(path)
    runner = ReferenceBackend().load(Shard.whole(source.arch.num_layers), source, KVRoom.for_tokens(len(tokens)))
    return runner.step(Batch((Span(0, 0, len(tokens), len(tokens)),), tokens), None)


@pytest.mark.parametrize(("family", "overrides"), CASES.values(), ids=CASES)
def test_logits_agree_with_transformers(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    arch = tiny_arch(family, **overrides)
    weights = random_weights(arch, seed=3)
    tokens = _tokens(arch)
    wanted = hf_logits(hf_model(arch, weights), tokens)
    assert wanted.std() > 0.5, "the model is too flat to tell right from wrong"
    from_gguf = _logits(write_gguf(tmp_path / "x.gguf", arch, "F32", weights=weights), tokens)
    from_folder = _logits(write_safetensors_model(tmp_path / "hf", arch, weights), tokens)
    np.testing.assert_allclose(from_gguf, wanted, atol=2e-4, rtol=1e-4)
    np.testing.assert_allclose(from_folder, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_windows_matter_here(family: str, tmp_path: Path) -> None:
    """The comparison above would notice a missing window."""
    arch = tiny_arch(family)
    weights = random_weights(arch, seed=3)
    tokens = _tokens(arch)
    whole = dataclasses.replace(arch, windows=tuple(window and 10_000 for window in arch.windows))
    folder = write_safetensors_model(tmp_path / "hf", arch, weights)
    unlimited = hf_logits(hf_model(whole, weights), tokens)
    assert np.abs(_logits(folder, tokens) - unlimited).max() > 0.1


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K_M", "Q5_K_M", "F16", "BF16"])
def test_quantized_files_give_the_logits_of_their_dequantized_weights(quant: str, tmp_path: Path) -> None:
    """The gguf package dequantizes, transformers computes."""
    import gguf

    arch = tiny_arch("llama", d_model=256, d_ff=256, num_layers=2, num_heads=8)
    path = write_gguf(tmp_path / "x.gguf", arch, quant)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    weights = {}
    for name in random_weights(arch):
        tensor = stored[_gguf_name(name)]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if name.endswith((".q", ".k")):
            values = values.reshape(-1, arch.head_dim // 2, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        weights[name] = values
    tokens = _tokens(arch)
    wanted = hf_logits(hf_model(arch, weights), tokens)
    np.testing.assert_allclose(_logits(path, tokens), wanted, atol=5e-4, rtol=1e-4)


def _gguf_name(name: str) -> str:
    ends = {"embed": "token_embd", "norm": "output_norm", "head": "output"}
    parts = {
        "attn_norm": "attn_norm", "mlp_norm": "ffn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v",
        "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
    }  # fmt: skip
    if name in ends:
        return f"{ends[name]}.weight"
    _, layer, part = name.split(".")
    return f"blk.{layer}.{parts[part]}.weight"
