"""Real weights for the tests: fetched once, by the product's own code, into a cache outside the repository."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from node.models.pull import pull
from node.models.store import ModelStore


def cache_folder() -> Path:
    """`ROOST_TEST_CACHE`, or the platform's cache folder for "roost-tests"."""
    return Path(os.environ.get("ROOST_TEST_CACHE") or platformdirs.user_cache_path("roost-tests", appauthor=False))


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, 94 MiB: llama, 30 layers, byte-level BPE, a chat template."""
    return pull("smollm2:135m", ModelStore(cache_folder())).path


def gemma3() -> Path:
    """Gemma-3-270M, Q4_K_M, 241 MiB: gemma3, 18 layers, SentencePiece, no chat template."""
    return pull("gemma3:270m", ModelStore(cache_folder())).path
