"""The CPU backend keeps the contract, and its bits depend on nothing but the sequence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import Batch, Drop, KVRoom, Span
from backends.cpu.engine import CPUBackend
from backends.cpu.library import instruction_sets
from backends.errors import UnsupportedModelError
from backends.weights.open import open_source
from backends.weights.source import WeightSource
from partitioner.plan import Shard
from tests.backends.conformance import LENGTH, TOKENS, Conformance, divergence, step
from tests.models import tiny_arch, write_gguf


class TestCPU(Conformance):
    exact = True
    tolerance = 1e-2  # activations are rounded to 8 bits, which these peaked toys amplify

    def backend(self) -> CPUBackend:
        return CPUBackend(2)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> WeightSource:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return open_source(write_gguf(path, tiny_arch(request.param), "Q4_K_M"))


@pytest.fixture(scope="module")
def whole(source: WeightSource) -> np.ndarray:
    return step(CPUBackend(1).load(Shard.whole(source.arch.num_layers), source, KVRoom(64)), (0, 0, LENGTH))


@settings(max_examples=25, deadline=None)
@given(data=st.data(), threads=st.integers(1, 4))
def test_random_schedules_give_the_same_bits(
    source: WeightSource, whole: np.ndarray, data: st.DataObject, threads: int
) -> None:
    """Up to four sequences over the same tokens, cut anywhere, in any company, on any number of threads."""
    runner = CPUBackend(threads).load(Shard.whole(source.arch.num_layers), source, KVRoom(64))
    done = dict.fromkeys(range(data.draw(st.integers(1, 4))), 0)
    for _ in range(30):
        spans = []
        for seq, start in done.items():
            count = min(LENGTH - start, data.draw(st.sampled_from([0, 1, 1, 2, 7, 33, 64])))
            if count:
                spans.append((seq, start, start + count))
        if not spans:
            continue
        logits = step(runner, *spans)
        for seq, start, stop in spans:
            np.testing.assert_array_equal(logits[: stop - start], whole[start:stop])
            logits = logits[stop - start :]
            done[seq] = stop
    runner.close()


@pytest.mark.parametrize("isa", instruction_sets())
def test_every_instruction_set_of_this_machine(source: WeightSource, whole: np.ndarray, isa: str) -> None:
    runner = CPUBackend(2, isa=isa).load(Shard.whole(source.arch.num_layers), source, KVRoom(64))
    assert runner.isa == isa
    assert divergence(step(runner, (0, 0, LENGTH)), whole) < 2e-3  # plain C has no fused multiply-add on x86


def test_an_unknown_instruction_set_is_refused(source: WeightSource) -> None:
    with pytest.raises(UnsupportedModelError, match="no 'mmx'"):
        CPUBackend(1, isa="mmx").load(Shard.whole(source.arch.num_layers), source, KVRoom(1))


def test_sizes_that_are_not_whole_groups_are_refused() -> None:
    assert not CPUBackend(1).supports(tiny_arch("llama", head_dim=80)).ok
    assert CPUBackend(1).supports(tiny_arch("llama", head_dim=96)).ok


def test_a_long_context_is_split_the_same_way_alone_and_in_prefill(source: WeightSource) -> None:
    tokens = np.resize(TOKENS, 1200)
    runner = CPUBackend(3).load(Shard.whole(source.arch.num_layers), source, KVRoom(100))
    whole = runner.step(Batch((Span(0, 0, 1200, 10),), tokens), None)
    runner.step(Batch((Span(1, 0, 1190, 0),), tokens[:1190], (Drop(0),)), None)
    for i in range(10):
        row = runner.step(Batch((Span(1, 1190 + i, 1, 1),), tokens[1190 + i : 1191 + i]), None)
        np.testing.assert_array_equal(row[0], whole[i])


def test_memory_is_told(source: WeightSource) -> None:
    runner = CPUBackend(1).load(Shard.whole(source.arch.num_layers), source, KVRoom(10))
    step(runner, (0, 0, 10))
    use = runner.memory()
    arch = source.arch
    assert use.kv_bytes == 10 * 32 * arch.kv_bytes_per_token()
    file_bytes = sum(source.info(name).num_bytes for name in source.names() if len(source.info(name).shape) == 2)
    assert file_bytes <= use.weights_bytes <= 1.2 * file_bytes
    assert use.scratch_bytes > 0
