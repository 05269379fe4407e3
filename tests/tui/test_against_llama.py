"""`cluster bench --against llama` with the real llama-cpp-python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from node.bench_llama import Turn, take_turn
from node.errors import EngineError
from tests.tui.conftest import Cluster

pytest.importorskip("llama_cpp", reason="make test-all installs it")
pytestmark = pytest.mark.llama


def test_both_run_and_the_ratios_are_theirs(cluster: Cluster, tiny_model: Path) -> None:
    sizes = ("--threads", 1, "--prompt", 40, "--decode", 8, "--repeat", 2)
    shown = cluster.run("bench", tiny_model, "--json", "--against", "llama", *sizes)
    assert shown.returncode == 0, shown.stderr
    document = json.loads(shown.stdout)
    for name in ("prefill", "decode"):
        ours = document[f"{name}_tokens_per_s"]["runs"]
        theirs = document["llama"][f"{name}_tokens_per_s"]["runs"]
        assert document["ratio"][name]["runs"] == [a / b for a, b in zip(ours, theirs, strict=True)]
        assert len(theirs) == 2 and min(theirs) > 0


def test_a_file_that_llama_cpp_refuses_is_told(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    with pytest.raises(EngineError, match=r"llama\.cpp could not run broken\.gguf"):
        take_turn(Turn(str(broken), 1, (1, 2, 3), 2))
