"""The oracle keeps the Runner contract: chunks, ragged batches, cache commands, shards, tiles, room."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import PAGE_TOKENS, Batch, Command, Drop, Fork, KVRoom, Span, Truncate
from backends.errors import BatchError, KVRoomError
from backends.reference import ReferenceBackend, ReferenceRunner
from backends.weights.open import open_source
from backends.weights.source import WeightSource
from partitioner.plan import Shard, split_evenly
from tests.models import tiny_arch, write_gguf

TOKENS = np.random.default_rng(5).integers(0, 320, 100).astype(np.int32)


def _assert_close(found: np.ndarray, wanted: np.ndarray, atol: float = 5e-5) -> None:
    """BLAS sums in another order for other shapes, so equality holds only nearly."""
    np.testing.assert_allclose(found, wanted, atol=atol, rtol=1e-4)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> WeightSource:
    arch = tiny_arch(request.param, num_layers=3 if request.param == "llama" else 7)
    return open_source(write_gguf(tmp_path_factory.mktemp("model") / "x.gguf", arch, "Q8_0"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> WeightSource:
    return open_source(write_gguf(tmp_path_factory.mktemp("model") / "x.gguf", tiny_arch("llama", num_layers=2)))


def _runner(source: WeightSource, num_pages: int = 64, shard: Shard | None = None) -> ReferenceRunner:
    return ReferenceBackend().load(shard or Shard.whole(source.arch.num_layers), source, KVRoom(num_pages))


def _step(runner: ReferenceRunner, *spans: tuple[int, int, int], commands: tuple[Command, ...] = ()) -> np.ndarray:
    """Each span (seq, start, stop) has the tokens of those positions in TOKENS; every row gives logits."""
    batch = Batch(
        tuple(Span(seq, start, stop - start, stop - start) for seq, start, stop in spans),
        np.concatenate([TOKENS[start:stop] for _, start, stop in spans]),
        commands,
    )
    return runner.step(batch, None)


@pytest.fixture(scope="module")
def whole(source: WeightSource) -> np.ndarray:
    return _step(_runner(source), (0, 0, 100))


@given(cuts=st.lists(st.integers(1, 99), max_size=5, unique=True))
@settings(max_examples=15, deadline=None)
def test_chunks_equal_the_whole(source: WeightSource, whole: np.ndarray, cuts: list[int]) -> None:
    runner = _runner(source)
    bounds = [0, *sorted(cuts), 100]
    rows = [_step(runner, (3, a, b)) for a, b in itertools.pairwise(bounds)]
    _assert_close(np.concatenate(rows), whole)


def test_ragged_batches_equal_sequences_alone(source: WeightSource, whole: np.ndarray) -> None:
    runner = _runner(source)
    _step(runner, (0, 0, 40), (1, 0, 7))
    rows = _step(runner, (1, 7, 8), (2, 0, 30), (0, 40, 90))
    _assert_close(rows, np.concatenate([whole[7:8], whole[:30], whole[40:90]]))


def test_forks_and_truncations_leave_the_source_alone(source: WeightSource, whole: np.ndarray) -> None:
    runner = _runner(source)
    _step(runner, (0, 0, 50))
    rows = _step(runner, (1, 33, 60), (0, 50, 60), commands=(Fork(0, 1, 33),))
    _assert_close(rows, np.concatenate([whole[33:60], whole[50:60]]))
    rows = _step(runner, (1, 5, 20), (0, 60, 70), commands=(Truncate(1, 5),))
    _assert_close(rows, np.concatenate([whole[5:20], whole[60:70]]))
    rows = _step(runner, (1, 20, 25), commands=(Drop(0), Drop(99)))
    _assert_close(rows, whole[20:25])
    _assert_close(_step(runner, (0, 0, 10)), whole[:10])


@pytest.mark.parametrize("num_stages", [2, 3])
def test_shards_in_a_row_equal_the_whole(source: WeightSource, whole: np.ndarray, num_stages: int) -> None:
    runners = [_runner(source, shard=shard) for shard in split_evenly(source.arch.num_layers, num_stages)]
    rows = []
    for start, stop in ((0, 64), (64, 65), (65, 100)):
        batch = Batch((Span(0, start, stop - start, 1),), TOKENS[start:stop])
        x = None
        for runner in runners:
            x = runner.step(batch, x)
            assert x.dtype == np.float32
        assert x is not None and x.shape == (1, source.arch.vocab_size)
        rows.append(x)
    _assert_close(np.concatenate(rows), whole[[63, 64, 99]])


def test_tiles_carry_a_sequence_to_another_runner(source: WeightSource, whole: np.ndarray) -> None:
    sender, receiver = _runner(source), _runner(source)
    _step(sender, (0, 0, 60))
    for layer in range(source.arch.num_layers):
        for start, stop in ((0, 32), (32, 60)):
            receiver.write_kv(4, sender.read_kv(0, layer, start, stop))
    tile = receiver.read_kv(4, 1, 10, 12)
    assert (tile.layer, tile.start, tile.stop, tile.head_start, tile.head_stop) == (1, 10, 12, 0, 2)
    assert tile.keys.dtype == np.float16 and tile.keys.shape == (2, 2, source.arch.head_dim)
    np.testing.assert_array_equal(tile.values, sender.read_kv(0, 1, 10, 12).values)
    _assert_close(_step(receiver, (4, 60, 70)), whole[60:70], atol=0.05)


def test_only_the_rows_asked_for_come_back(llama: WeightSource) -> None:
    runner = _runner(llama)
    batch = Batch((Span(0, 0, 4, 0), Span(1, 0, 6, 2)), np.concatenate([TOKENS[:4], TOKENS[:6]]))
    rows = runner.step(batch, None)
    _assert_close(rows, _step(_runner(llama), (0, 0, 6))[4:])


def test_an_empty_batch_applies_its_commands(llama: WeightSource) -> None:
    runner = _runner(llama)
    _step(runner, (0, 0, 4))
    rows = runner.step(Batch((), np.empty(0, np.int32), (Drop(0),)), None)
    assert rows.shape == (0, llama.arch.vocab_size)
    with pytest.raises(BatchError, match="no sequence 0"):
        runner.read_kv(0, 0, 0, 1)


def test_room_counts_pages_and_forks_share_them(llama: WeightSource) -> None:
    page = PAGE_TOKENS
    runner = _runner(llama, num_pages=3)
    _step(runner, (0, 0, page + 1))
    with pytest.raises(KVRoomError, match="has 3 pages, and 4 are needed"):
        _step(runner, (1, 0, page + 1))
    # The fork shares the full page, and takes one of its own for the other when it writes.
    _step(runner, (1, page + 1, page + 2), commands=(Fork(0, 1, page + 1),))
    with pytest.raises(KVRoomError):
        _step(runner, (2, 0, 1))
    rows = _step(runner, (2, 0, 1), commands=(Drop(1),))
    _assert_close(rows, _step(_runner(llama), (0, 0, 1)))


def test_a_refused_step_changes_nothing(llama: WeightSource) -> None:
    runner = _runner(llama, num_pages=2)
    _step(runner, (0, 0, 10))
    with pytest.raises(KVRoomError):
        _step(runner, (0, 10, 20), (1, 0, 64))
    _assert_close(_step(runner, (0, 10, 20)), _step(_runner(llama), (0, 0, 20))[10:])


def test_broken_batches_are_refused(llama: WeightSource) -> None:
    runner = _runner(llama)
    _step(runner, (0, 0, 8))
    two = TOKENS[:2]
    broken = [
        Batch((Span(0, 7, 2, 1),), two),
        Batch((Span(0, 9, 2, 1),), two),
        Batch((Span(1, 2, 2, 1),), two),
        Batch((Span(0, 8, 2, 3),), two),
        Batch((Span(0, 8, 0, 0), Span(1, 0, 2, 0)), two),
        Batch((Span(0, 8, 1, 1), Span(0, 9, 1, 1)), two),
        Batch((Span(0, 8, 3, 1),), two),
        Batch((Span(0, 8, 2, 1),), np.array([0, llama.arch.vocab_size], np.int32)),
        Batch((Span(0, 8, 2, 1),), np.array([-1, 0], np.int32)),
        Batch((), two[:0], (Fork(5, 6, 0),)),
        Batch((), two[:0], (Fork(0, 6, 9),)),
        Batch((), two[:0], (Fork(0, 0, 3),)),
        Batch((), two[:0], (Truncate(0, 9),)),
        Batch((), two[:0], (Truncate(5, 0),)),
    ]
    for batch in broken:
        with pytest.raises(BatchError):
            runner.step(batch, None)
    _assert_close(_step(runner, (0, 8, 10)), _step(_runner(llama), (0, 0, 10))[8:])


def test_hidden_of_another_shape_is_refused(llama: WeightSource) -> None:
    second = _runner(llama, shard=Shard(1, 2, 2))
    batch = Batch((Span(0, 0, 2, 1),), TOKENS[:2])
    for x in (None, np.zeros((3, llama.arch.d_model), np.float32), np.zeros((2, 5), np.float32)):
        with pytest.raises(BatchError):
            second.step(batch, x)


def test_tiles_that_do_not_belong_are_refused(llama: WeightSource, source: WeightSource) -> None:
    runner = _runner(llama, num_pages=1)
    _step(runner, (0, 0, 8))
    other = _runner(source)
    _step(other, (0, 0, 8))
    for call in (
        lambda: runner.write_kv(1, other.read_kv(0, 0, 0, 8)),
        lambda: runner.write_kv(1, runner.read_kv(0, 0, 4, 8)),
        lambda: runner.read_kv(0, 0, 4, 9),
        lambda: runner.read_kv(0, 2, 0, 8),
    ):
        with pytest.raises(BatchError):
            call()
    with pytest.raises(KVRoomError):
        runner.write_kv(1, runner.read_kv(0, 0, 0, 8))


def test_a_sequence_with_a_layer_missing_is_refused(llama: WeightSource) -> None:
    sender, receiver = _runner(llama), _runner(llama)
    _step(sender, (0, 0, 8))
    receiver.write_kv(0, sender.read_kv(0, 1, 0, 8))
    with pytest.raises(BatchError):
        _step(receiver, (0, 8, 9))


def test_memory_is_what_the_arrays_hold(llama: WeightSource) -> None:
    runner = _runner(llama)
    _step(runner, (0, 0, 10))
    arch = llama.arch
    assert runner.memory().kv_bytes == 10 * arch.num_layers * 2 * arch.kv_rows * 4
    runner.close()
    assert runner.memory().weights_bytes == 0
