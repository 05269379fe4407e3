"""The Runner contract, once for every backend: subclass `Conformance` and say how to make the backend.

Logits are compared with the float32 oracle within `tolerance` (mean KL divergence, nats). A backend that promises batch
invariance (`exact`) must also give the same bits however the work was cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from backends.base import Backend, Batch, Command, Drop, Fork, KVRoom, Runner, Span, Truncate
from backends.errors import BatchError, KVRoomError
from backends.kv import KVTile
from backends.reference import ReferenceBackend
from backends.weights.open import open_source
from backends.weights.source import WeightSource
from partitioner.plan import Shard, split_evenly
from tests.models import tiny_arch, write_gguf

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
QUANTS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "F32")
LENGTH = 150
TOKENS = np.random.default_rng(5).integers(0, 320, LENGTH).astype(np.int32)


def step(
    runner: Runner, *spans: tuple[int, int, int], commands: tuple[Command, ...] = (), x: np.ndarray | None = None
) -> np.ndarray:
    """Each span (seq, start, stop) carries the tokens of those positions in TOKENS; every row gives logits."""
    batch = Batch(
        tuple(Span(seq, start, stop - start, stop - start) for seq, start, stop in spans),
        np.concatenate([TOKENS[start:stop] for _, start, stop in spans] or [TOKENS[:0]]),
        commands,
    )
    return runner.step(batch, x)


def divergence(ours: np.ndarray, oracle: np.ndarray) -> float:
    """Mean KL divergence of rows of logits, in nats."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64) - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    p, q = log_softmax(oracle), log_softmax(ours)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


class Conformance:
    exact = False
    tolerance = 2e-4

    def backend(self) -> Backend:
        raise NotImplementedError("a subclass says which backend")

    @pytest.fixture(scope="class", params=FAMILIES)
    @classmethod
    def source(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WeightSource]:
        path = tmp_path_factory.mktemp("model") / "tiny.gguf"
        source = open_source(write_gguf(path, tiny_arch(request.param), "Q8_0"))
        yield source
        source.close()

    @pytest.fixture(scope="class")
    @classmethod
    def oracle(cls, source: WeightSource) -> np.ndarray:
        runner = ReferenceBackend().load(Shard.whole(source.arch.num_layers), source, KVRoom(16))
        return step(runner, (0, 0, LENGTH))

    def runner(self, source: WeightSource, shard: Shard | None = None, num_pages: int = 64) -> Runner:
        return self.backend().load(shard or Shard.whole(source.arch.num_layers), source, KVRoom(num_pages))

    def same(self, a: np.ndarray, b: np.ndarray) -> None:
        if self.exact:
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, atol=2e-3, rtol=2e-3)

    def test_agrees_with_the_oracle(self, source: WeightSource, oracle: np.ndarray) -> None:
        logits = step(self.runner(source), (0, 0, LENGTH))
        assert logits.dtype == np.float32
        assert logits.shape == oracle.shape
        assert divergence(logits, oracle) == pytest.approx(0, abs=self.tolerance)

    @pytest.mark.parametrize("quant", QUANTS)
    def test_every_quantization(self, quant: str, tmp_path: Path) -> None:
        arch = tiny_arch("llama", d_model=256, d_ff=512, num_layers=2)
        source = open_source(write_gguf(tmp_path / "tiny.gguf", arch, quant))
        oracle = step(ReferenceBackend().load(Shard.whole(2), source, KVRoom(16)), (0, 0, LENGTH))
        logits = step(self.runner(source), (0, 0, LENGTH))
        is_float = quant in ("F16", "BF16", "F32")  # no codes, no rounding of activations: only sums and float16 KV
        assert divergence(logits, oracle) == pytest.approx(0, abs=1e-5 if is_float else self.tolerance)

    def test_chunks_equal_the_whole(self, source: WeightSource) -> None:
        whole = step(self.runner(source), (0, 0, LENGTH))
        for cuts in ((1, 2, 3, 40), (31, 32, 33), (64, 65, 149), tuple(range(1, LENGTH))):
            runner = self.runner(source)
            bounds = [0, *cuts, LENGTH]
            rows = [step(runner, (7, a, b)) for a, b in itertools.pairwise(bounds)]
            self.same(np.concatenate(rows), whole)

    def test_ragged_batches_equal_sequences_alone(self, source: WeightSource) -> None:
        whole = step(self.runner(source), (0, 0, LENGTH))
        runner = self.runner(source)
        first = step(runner, (3, 0, 40), (9, 0, 1), (4, 0, 100))
        second = step(runner, (4, 100, 101), (3, 40, 90), (9, 1, 2))
        self.same(first[:40], whole[:40])
        self.same(first[40:41], whole[:1])
        self.same(first[41:], whole[:100])
        self.same(second[0], whole[100])
        self.same(second[1:51], whole[40:90])
        self.same(second[51], whole[1])

    def test_only_the_rows_asked_for(self, source: WeightSource) -> None:
        whole = step(self.runner(source), (0, 0, LENGTH))
        batch = Batch((Span(1, 0, 20, 0), Span(2, 0, 30, 1), Span(3, 0, 10, 4)), TOKENS[np.r_[0:20, 0:30, 0:10]])
        logits = self.runner(source).step(batch, None)
        assert logits.shape == (5, source.arch.vocab_size)
        self.same(logits, whole[[29, 6, 7, 8, 9]])
        none = self.runner(source).step(Batch((Span(1, 0, 20, 0),), TOKENS[:20]), None)
        assert none.shape == (0, source.arch.vocab_size)

    def test_fork_truncate_drop(self, source: WeightSource) -> None:
        whole = step(self.runner(source), (0, 0, LENGTH))
        runner = self.runner(source)
        step(runner, (0, 0, 100))
        for n in (1, 31, 32, 33, 77, 100):  # a fork goes on as if it had been alone, and so does its source
            seq = 1000 + n
            self.same(step(runner, (seq, n, n + 3), commands=(Fork(0, seq, n),)), whole[n : n + 3])
        self.same(step(runner, (0, 100, 110)), whole[100:110])
        self.same(step(runner, (0, 50, 60), commands=(Truncate(0, 50),)), whole[50:60])
        self.same(step(runner, (1077, 80, 90)), whole[80:90])
        self.same(step(runner, (0, 0, 5), commands=(Drop(0), Drop(555))), whole[:5])

    def test_a_fork_is_not_disturbed_by_its_source(self, source: WeightSource) -> None:
        whole = step(self.runner(source), (0, 0, LENGTH))
        runner = self.runner(source)
        step(runner, (0, 0, 40))
        other = (TOKENS[::-1].copy())[:20]
        runner.step(Batch((Span(1, 40, 20, 20),), other, (Fork(0, 1, 40),)), None)  # writes into the shared page
        self.same(step(runner, (0, 40, 60)), whole[40:60])

    def test_pages_come_back(self, source: WeightSource) -> None:
        runner = self.runner(source, num_pages=5)
        for seq in range(12):
            step(runner, (seq, 0, 150), commands=(Drop(seq - 1),))

    def test_no_room_changes_nothing(self, source: WeightSource) -> None:
        whole = step(self.runner(source), (0, 0, LENGTH))
        runner = self.runner(source, num_pages=3)
        step(runner, (0, 0, 60))
        with pytest.raises(KVRoomError):
            step(runner, (1, 0, 50))
        with pytest.raises(KVRoomError):
            step(runner, (0, 60, 62), (1, 0, 33))
        self.same(step(runner, (0, 60, 62), (1, 0, 32)), np.concatenate([whole[60:62], whole[:32]]))

    def test_broken_batches_are_refused(self, source: WeightSource) -> None:
        runner = self.runner(source)
        step(runner, (0, 0, 10))
        with pytest.raises(BatchError):
            step(runner, (0, 12, 13))
        with pytest.raises(BatchError):
            step(runner, (0, 5, 6))
        with pytest.raises(BatchError):
            step(runner, (0, 10, 11), (0, 11, 12))
        with pytest.raises(BatchError):
            runner.step(Batch((Span(0, 10, 2, 1),), TOKENS[:1]), None)
        with pytest.raises(BatchError):
            runner.step(Batch((Span(0, 10, 1, 1),), np.array([source.arch.vocab_size], np.int32)), None)
        with pytest.raises(BatchError):
            step(runner, commands=(Fork(0, 5, 11),))
        step(runner, (0, 10, 11))

    @pytest.mark.parametrize("num_stages", [2, 3])
    def test_a_pipeline_equals_the_whole(self, source: WeightSource, num_stages: int) -> None:
        whole = step(self.runner(source), (0, 0, LENGTH))
        stages = [self.runner(source, shard) for shard in split_evenly(source.arch.num_layers, num_stages)]
        for start, stop in ((0, 70), (70, 71), (71, LENGTH)):
            x = None
            for stage in stages:
                x = step(stage, (0, start, stop), x=x)
            self.same(x, whole[start:stop])
        with pytest.raises(BatchError):
            step(stages[1], (9, 0, 3), x=np.zeros((2, source.arch.d_model), np.float32))

    def test_tiles_carry_a_sequence_over(self, source: WeightSource) -> None:
        whole = step(self.runner(source), (0, 0, LENGTH))
        sender, receiver = self.runner(source), self.runner(source)
        step(sender, (0, 0, 100))
        for start, stop in ((0, 32), (32, 45), (45, 100)):
            for layer in range(source.arch.num_layers):
                tile = sender.read_kv(0, layer, start, stop)
                assert tile.keys.shape == (stop - start, source.arch.num_kv_heads, source.arch.head_dim)
                receiver.write_kv(4, tile)
        self.same(step(receiver, (4, 100, 120)), whole[100:120])

    def test_tiles_that_do_not_fit_are_refused(self, source: WeightSource) -> None:
        runner = self.runner(source)
        step(runner, (0, 0, 40))
        tile = runner.read_kv(0, 0, 0, 10)
        for start, stop in ((0, 41), (5, 5), (-1, 3)):
            with pytest.raises(BatchError):
                runner.read_kv(0, 0, start, stop)
        with pytest.raises(BatchError):
            runner.read_kv(0, source.arch.num_layers, 0, 1)
        with pytest.raises(BatchError):  # it would leave a hole
            runner.write_kv(1, KVTile(tile.model_hash, 0, 3, 13, 0, tile.head_stop, tile.keys, tile.values))
        with pytest.raises(BatchError):
            runner.write_kv(1, KVTile("another", 0, 0, 10, 0, tile.head_stop, tile.keys, tile.values))
        with pytest.raises(BatchError):
            runner.write_kv(1, KVTile(tile.model_hash, 0, 0, 9, 0, tile.head_stop, tile.keys, tile.values))
