"""Rotary frequencies against transformers, which defines the scalings."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from backends.arch import RopeScaling
from backends.rope import inverse_frequencies, yarn_attention_factor
from tests.hf_models import hf_config
from tests.models import tiny_arch

SCALINGS = {
    "linear": RopeScaling("linear", 8.0),
    "llama3": RopeScaling("llama3", 32.0, 1.0, 4.0, original_context=64),
    "yarn": RopeScaling("yarn", 4.0, original_context=128, attention_factor=yarn_attention_factor(4.0)),
    "yarn, narrow": RopeScaling(
        "yarn", 4.0, original_context=128, attention_factor=yarn_attention_factor(4.0), beta_fast=3.0, beta_slow=2.0
    ),
}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("head_dim", [32, 128])
def test_scalings_agree_with_transformers(scaling: RopeScaling, head_dim: int) -> None:
    arch = tiny_arch("llama", rope_scaling=scaling, head_dim=head_dim, rope_theta=500_000.0)
    wanted, wanted_factor = ROPE_INIT_FUNCTIONS[scaling.kind](hf_config(arch), "cpu")
    frequencies, factor = inverse_frequencies(arch, 0)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, wanted.numpy(), rtol=1e-5)
    assert factor == pytest.approx(wanted_factor)


def test_no_scaling_is_the_plain_definition() -> None:
    frequencies, factor = inverse_frequencies(tiny_arch("llama", head_dim=32, rope_theta=10_000.0), 1)
    np.testing.assert_allclose(frequencies, 10_000.0 ** (-np.arange(16) / 16), rtol=1e-6)
    assert factor == 1.0


def test_gemma_scales_only_the_layers_that_see_everything() -> None:
    plain = tiny_arch("gemma3", num_layers=6)
    scaled = dataclasses.replace(plain, rope_scaling=RopeScaling("linear", 8.0))
    for layer in range(5):
        np.testing.assert_array_equal(inverse_frequencies(scaled, layer)[0], inverse_frequencies(plain, layer)[0])
        assert inverse_frequencies(scaled, layer)[0][1] == pytest.approx(10_000.0 ** (-1 / 16))
    np.testing.assert_allclose(
        inverse_frequencies(scaled, 5)[0] * 8, np.float32(1e6) ** (-np.arange(16) / 16), rtol=1e-5
    )


def test_factors_divide_each_frequency() -> None:
    factors = tuple(float(i + 1) for i in range(16))
    arch = tiny_arch("llama", rope_scaling=RopeScaling("factors", 1.0, factors=factors))
    plain = inverse_frequencies(dataclasses.replace(arch, rope_scaling=None), 0)[0]
    np.testing.assert_allclose(inverse_frequencies(arch, 0)[0] * np.array(factors), plain, rtol=1e-6)
