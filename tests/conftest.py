"""Fixtures that every room's tests may use."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from node.errors import RoostError
from tests import weights


def fetched(fetch: Callable[[], Path]) -> Path:
    try:
        return fetch()
    except RoostError as exc:
        pytest.fail(f"The real weights that this test needs cannot be had. {exc}", pytrace=False)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return fetched(weights.smollm2)


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    return fetched(weights.gemma3)


@pytest.fixture(scope="session")
def tokenizer_cache() -> Path:
    """A folder for `Tokenizer.load`, kept between runs: deriving Gemma's merges takes seconds."""
    return weights.cache_folder() / "tokenizers"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests against llama.cpp run where it is installed; compiling it is what `make test-all` is for."""
    if importlib.util.find_spec("llama_cpp") is not None:
        return
    left_out = [item for item in items if item.get_closest_marker("llama")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("llama")]
