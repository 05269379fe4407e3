"""Architecture from config.json, as today's and yesterday's transformers wrote it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from backends.arch import RopeScaling
from backends.errors import ModelFileError, UnsupportedModelError
from backends.rope import yarn_attention_factor
from backends.weights.hf_config import hf_architecture
from tests.hf_models import hf_config
from tests.models import tiny_arch


def _config(model_type: str = "llama", without: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    values = {
        "model_type": model_type,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    return {key: value for key, value in (values | changes).items() if key not in without}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("kind", ["plain", "linear", "llama3", "yarn"])
def test_what_transformers_writes_is_read(family: str, kind: str) -> None:
    scaling = {
        "plain": None,
        "linear": RopeScaling("linear", 8.0),
        "llama3": RopeScaling("llama3", 8.0, 1.0, 4.0, original_context=128),
        "yarn": RopeScaling("yarn", 4.0, original_context=128, attention_factor=yarn_attention_factor(4.0)),
    }[kind]
    arch = tiny_arch(family, rope_scaling=scaling, rope_theta=250_000.0)
    assert hf_architecture(hf_config(arch).to_dict(), "config.json") == arch


def test_defaults() -> None:
    arch = hf_architecture(_config(), "config.json")
    assert (arch.num_kv_heads, arch.head_dim) == (4, 16)
    assert arch.rope_thetas == (10_000.0,) * 6 and arch.windows == (0,) * 6
    assert not arch.tied_embeddings
    assert hf_architecture(_config("qwen3"), "config.json").head_dim == 128
    assert hf_architecture(_config("mistral"), "config.json").windows == (4096,) * 6
    assert hf_architecture(_config("mistral", sliding_window=None), "config.json").windows == (0,) * 6


def test_qwen_slides_in_its_upper_layers_if_told_to() -> None:
    window: dict[str, Any] = {"sliding_window": 32, "max_window_layers": 4}
    assert hf_architecture(_config("qwen2", use_sliding_window=True, **window), "c").windows == (0, 0, 0, 0, 32, 32)
    assert hf_architecture(_config("qwen2", **window), "c").windows == (0,) * 6


def test_gemma3_as_it_was_published() -> None:
    """The 4B model's configuration leaves most numbers to the class."""
    text = {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    arch = hf_architecture({"model_type": "gemma3", "text_config": text}, "config.json")
    assert (arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.vocab_size) == (8, 4, 256, 262208)
    assert arch.windows == ((1024,) * 5 + (0,)) * 5 + (1024,) * 4
    assert arch.rope_thetas[:6] == (1e4, 1e4, 1e4, 1e4, 1e4, 1e6)
    assert arch.rope_scaling == RopeScaling("linear", 8.0)
    assert arch.tied_embeddings and arch.attention_scale == 1 / 16
    assert arch.embedding_scale == pytest.approx(math.sqrt(2560))


def test_gemma3_27b_names_its_own_attention_scale() -> None:
    arch = hf_architecture(_config("gemma3_text", head_dim=128, query_pre_attn_scalar=168), "config.json")
    assert arch.attention_scale == pytest.approx(1 / math.sqrt(168))
    pattern = hf_architecture(_config("gemma3_text", sliding_window_pattern=2, sliding_window=8), "config.json")
    assert pattern.windows == (8, 0) * 3


def test_llama3_as_it_was_published() -> None:
    scaling = {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }  # fmt: skip
    arch = hf_architecture(_config(rope_theta=500000.0, rope_scaling=scaling), "config.json")
    assert arch.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, original_context=8192)
    assert arch.rope_thetas[0] == 500_000.0


def test_yarn_with_every_field() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 16, "beta_slow": 2}
    yarn = hf_architecture(_config("qwen2", rope_scaling=scaling), "c").rope_scaling
    assert yarn == RopeScaling(
        "yarn", 4.0, original_context=1024, attention_factor=yarn_attention_factor(4.0), beta_fast=16.0, beta_slow=2.0
    )
    more = scaling | {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}
    yarn = hf_architecture(_config("qwen2", rope_scaling=more), "c").rope_scaling
    assert yarn is not None and not yarn.truncate
    assert yarn.attention_factor == pytest.approx(yarn_attention_factor(4.0) / yarn_attention_factor(4.0, 0.5))
    given = hf_architecture(_config("qwen2", rope_scaling=scaling | {"attention_factor": 1.5}), "c").rope_scaling
    assert given is not None and given.attention_factor == 1.5


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": None},
        {"hidden_size": 64.0},
        {"hidden_size": "64"},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": True},
        {"num_key_value_heads": 3},
        {"head_dim": 7},
        {"rms_norm_eps": 0},
        {"rms_norm_eps": "small"},
        {"rope_theta": math.nan},
        {"tie_word_embeddings": 1},
        {"rope_scaling": 3},
        {"rope_scaling": {"rope_type": "linear"}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
        {"model_type": "gemma3_text", "layer_types": ["full_attention"]},
        {"model_type": "gemma3_text", "layer_types": "full_attention"},
    ],
    ids=str,
)
def test_configurations_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json") as caught:
        hf_architecture(_config(**changes), "config.json")
    assert caught.value.cure


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "phi3"},
        {"model_type": None},
        {"model_type": ["llama"]},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
        {"partial_rotary_factor": 0.5},
        {"num_local_experts": 8},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"type": "longrope", "factor": 2.0}},
        {"model_type": "gemma3_text", "final_logit_softcapping": 30.0},
        {"model_type": "gemma3_text", "use_bidirectional_attention": True},
        {"model_type": "gemma3_text", "layer_types": ["chunked_attention"] * 6},
        {"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
    ],
    ids=str,
)
def test_options_that_nothing_here_computes_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"config\.json") as caught:
        hf_architecture(_config(**changes), "config.json")
    assert caught.value.cure
