"""Architecture from GGUF metadata."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.arch import Architecture, RopeScaling
from backends.errors import ModelFileError, UnsupportedModelError
from backends.rope import yarn_attention_factor
from backends.weights.gguf_config import gguf_architecture
from backends.weights.gguf_source import GGUFSource
from tests.models import tiny_arch, write_gguf


def _metadata(family: str = "llama", without: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    """Keys of `changes` have __ for a dot."""
    values = {
        "block_count": 12,
        "context_length": 4096,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    found: dict[str, Any] = {f"{family}.{key}": value for key, value in values.items() if key not in without}
    return found | {"general.architecture": family}


def _arch(
    metadata: dict[str, Any], shapes: dict[str, tuple[int, ...]] | None = None, factors: np.ndarray | None = None
) -> Architecture:
    return gguf_architecture(metadata, {"token_embd.weight": (100, 64)} | (shapes or {}), factors, "x.gguf")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize(
    "scaling",
    [
        None,
        RopeScaling("linear", 8.0),
        RopeScaling("yarn", 4.0, original_context=128, attention_factor=yarn_attention_factor(4.0)),
    ],
    ids=["plain", "linear", "yarn"],
)
def test_what_was_written_is_read(family: str, scaling: RopeScaling | None, tmp_path: Path) -> None:
    arch = tiny_arch(family, rope_scaling=scaling)
    found = GGUFSource.open(write_gguf(tmp_path / "x.gguf", arch)).arch
    eps = float(np.float32(arch.norm_eps))
    # Mistral files say "llama".
    assert found == dataclasses.replace(arch, norm_eps=eps, family="llama" if family == "mistral" else family)


def test_defaults() -> None:
    arch = _arch(_metadata(without=("attention.head_count_kv",)))
    assert (arch.num_kv_heads, arch.head_dim, arch.vocab_size) == (4, 16, 100)
    assert arch.rope_thetas == (10_000.0,) * 12 and arch.windows == (0,) * 12
    assert arch.attention_scale == 0.25 and arch.embedding_scale == 1.0
    assert arch.tied_embeddings and not arch.qkv_bias and not arch.qk_norm and not arch.post_norms


def test_tensors_tell_about_head_and_biases() -> None:
    arch = _arch(_metadata("qwen2"), {"output.weight": (100, 64), "blk.0.attn_q.bias": (64,)})
    assert not arch.tied_embeddings and arch.qkv_bias


def test_gemma3_layers() -> None:
    arch = _arch(_metadata("gemma3", attention__sliding_window=512, attention__key_length=256, rope__freq_base=1e6))
    assert arch.windows == (512, 512, 512, 512, 512, 0) * 2
    assert arch.rope_thetas == (1e4, 1e4, 1e4, 1e4, 1e4, 1e6) * 2
    assert arch.rope_scaled == (False, False, False, False, False, True) * 2
    assert arch.attention_scale == 1 / 16 and arch.embedding_scale == 8.0
    assert arch.qk_norm and arch.post_norms and arch.activation == "gelu_tanh"


def test_gemma3_patterns_and_local_bases_that_newer_files_spell_out() -> None:
    window: dict[str, Any] = {"attention__sliding_window": 8}
    every_third = _arch(_metadata("gemma3", attention__sliding_window_pattern=3, **window))
    assert every_third.windows == (8, 8, 0) * 4
    flags = np.array([True, False] * 6)
    assert _arch(_metadata("gemma3", attention__sliding_window_pattern=flags, **window)).windows == (8, 0) * 6
    with pytest.raises(ModelFileError, match="names 3 of 12 layers"):
        _arch(_metadata("gemma3", attention__sliding_window_pattern=flags[:3], **window))
    assert _arch(_metadata("gemma3", rope__freq_base_swa=5e3, **window)).rope_thetas[0] == 5e3
    assert _arch(_metadata("gemma3")).windows == (0,) * 12


def test_gemma3_27b_scales_by_another_number() -> None:
    size: dict[str, Any] = {"embedding_length": 5376, "attention__head_count": 32, "attention__head_count_kv": 16}
    arch = _arch(_metadata("gemma3", block_count=62, attention__key_length=128, **size))
    assert arch.attention_scale == pytest.approx(1 / math.sqrt(168))
    assert _arch(_metadata("gemma3", attention__key_length=128, **size)).attention_scale == 1 / math.sqrt(128)


def test_rope_scaling_as_old_and_new_files_write_it() -> None:
    assert _arch(_metadata(rope__scale_linear=4.0)).rope_scaling == RopeScaling("linear", 4.0)
    assert _arch(_metadata(rope__scaling__factor=4.0)).rope_scaling == RopeScaling("linear", 4.0)
    assert _arch(_metadata(rope__scaling__type="none", rope__scaling__factor=4.0)).rope_scaling is None
    assert _arch(_metadata(rope__scaling__type="linear", rope__scaling__factor=0.0)).rope_scaling is None
    yarn = _arch(
        _metadata(
            rope__scaling__type="yarn",
            rope__scaling__factor=4.0,
            rope__scaling__attn_factor=0.5,
            rope__scaling__yarn_beta_fast=16.0,
        )
    ).rope_scaling
    assert yarn == RopeScaling(
        "yarn", 4.0, original_context=4096, attention_factor=yarn_attention_factor(4.0) / 2, beta_fast=16.0
    )
    factors = np.full(8, 2.0, np.float32)
    assert _arch(_metadata(rope__scaling__factor=4.0), factors=factors).rope_scaling == RopeScaling(
        "factors", 4.0, factors=(8.0,) * 8
    )


def test_the_same_number_for_every_layer_is_one_number() -> None:
    assert _arch(_metadata(attention__head_count_kv=np.full(12, 2, np.int32))).num_kv_heads == 2
    with pytest.raises(UnsupportedModelError, match="differs between layers"):
        _arch(_metadata(attention__head_count_kv=np.array([2] * 11 + [1])))


@pytest.mark.parametrize(
    "key",
    ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
     "attention.layer_norm_rms_epsilon"],
)  # fmt: skip
def test_missing_hyperparameters_are_named(key: str) -> None:
    with pytest.raises(ModelFileError, match=f"x.gguf lacks llama.{key}"):
        _arch(_metadata(without=(key,)))


@pytest.mark.parametrize(
    "changes",
    [
        {"block_count": 0},
        {"block_count": 1 << 31},
        {"block_count": "many"},
        {"block_count": 2.5},
        {"block_count": True},
        {"embedding_length": 1 << 40},
        {"attention__head_count": 0},
        {"attention__head_count": [4]},
        {"attention__head_count_kv": 3},
        {"attention__key_length": 15},
        {"attention__layer_norm_rms_epsilon": math.nan},
        {"attention__layer_norm_rms_epsilon": -1.0},
        {"rope__freq_base": math.inf},
        {"rope__freq_base": 0.0},
        {"rope__scaling__factor": -2.0},
        {"rope__scaling__type": 3},
    ],
    ids=str,
)
def test_hyperparameters_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError) as caught:
        _arch(_metadata(**changes))
    assert "x.gguf" in caught.value.message


@pytest.mark.parametrize(
    "changes",
    [
        {"expert_count": 8},
        {"attention__value_length": 8},
        {"rope__dimension_count": 8},
        {"final_logit_softcapping": 30.0},
        {"attn_logit_softcapping": 50.0},
        {"attention__scale": 0.5},
        {"logit_scale": 16.0},
        {"attention__causal": False},
        {"attention__temperature_scale": 0.1},
        {"rope__scaling__type": "longrope"},
    ],
    ids=str,
)
def test_options_that_nothing_here_computes_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        _arch(_metadata(**changes))
    assert caught.value.cure


def test_neutral_options_are_not_refused() -> None:
    _arch(_metadata(expert_count=0, rope__dimension_count=16, attention__causal=True, attention__value_length=16))


@pytest.mark.parametrize("family", ["phi3", "qwen3moe", "llama4", "gemma2"])
def test_other_architectures_are_refused_with_those_supported(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{family}' is not supported") as caught:
        _arch(_metadata(family))
    assert "llama, mistral, qwen2, qwen3, gemma3" in caught.value.cure


def test_metadata_without_an_architecture_is_malformed() -> None:
    with pytest.raises(ModelFileError, match=r"lacks general\.architecture"):
        _arch({})
