"""The rule of what fits, on numbers small enough to check by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.arch import Architecture
from backends.base import PAGE_TOKENS, KVRoom
from backends.cpu.engine import CPUBackend
from backends.weights.open import open_source
from backends.weights.source import TensorInfo
from node import limits
from node.errors import MemoryShortageError, UsageError
from node.memory import Budget, Need, budget, estimate, packed_bytes, plan, plan_shard, spec, unpacked_bytes
from partitioner import model as partitioner_model
from partitioner.model import ModelSpec
from partitioner.plan import Shard
from partitioner.profile import NodeProfile
from partitioner.search import NoPlanError, place
from tests.models import tiny_arch, write_gguf

MIB, GIB = 1 << 20, 1 << 30

ARCH = Architecture(
    family="llama",
    num_layers=4,
    d_model=64,
    d_ff=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=256,
    context_length=65536,
    norm_eps=1e-5,
    windows=(0,) * 4,
    rope_thetas=(1e4,) * 4,
    rope_scaled=(False,) * 4,
    rope_scaling=None,
    attention_scale=0.125,
    activation="silu",
    embedding_scale=1.0,
    tied_embeddings=True,
    qkv_bias=False,
    qk_norm=False,
    post_norms=False,
)
PER_TOKEN = 4 * 2 * 2 * 64 * 2
NEED = Need(weights_bytes=100 * MIB, scratch_bytes=20 * MIB, load_peak_bytes=8 * MIB)


def room(tokens: int) -> Budget:
    return Budget(NEED.total + tokens * PER_TOKEN, "a test")


def affine(rows: int, cols: int, bits: int, group: int = 32, has_bias: bool = True) -> TensorInfo:
    return TensorInfo("w", (rows, cols), "affine", 0, "Q", bits=bits, group=group, has_bias=has_bias)


@pytest.mark.parametrize(
    ("info", "packed", "unpacked"),
    [
        (affine(16, 32, 4), 256 + 16 * 4, 512 + 16 * 8),
        (affine(17, 33, 4), 32 * 64 // 2 + 64 * 4, 561 + 17 * 8),
        (affine(16, 64, 8, has_bias=False), 1024 + 32 * 2, 1024 + 32 * 4),
        (affine(16, 32, 6, group=16, has_bias=False), 384 + 16 * 4, 512 + 32 * 4),
        (TensorInfo("w", (3, 5), "bf16", 30, "BF16"), 30, 60),
        (TensorInfo("n", (7,), "f32", 28, "F32"), 28, 28),
    ],
)
def test_bytes_of_a_tensor(info: TensorInfo, packed: int, unpacked: int) -> None:
    assert (packed_bytes(info), unpacked_bytes(info)) == (packed, unpacked)


def test_the_trained_context_where_there_is_room() -> None:
    found = plan(ARCH, NEED, room(2 * 4 * ARCH.context_length), None, "m")
    assert (found.context, found.kv_tokens, found.reason) == (65536, 4 * 65536, "as trained")
    assert found.kv_bytes == 4 * 65536 * PER_TOKEN


def test_half_of_what_is_left_where_there_is_less() -> None:
    found = plan(ARCH, NEED, room(40960), None, "m")
    assert (found.context, found.kv_tokens, found.reason) == (20480, 20480, "what fits memory")


def test_all_of_it_for_the_first_8192_tokens() -> None:
    assert plan(ARCH, NEED, room(10000), None, "m").context == 8192
    assert plan(ARCH, NEED, room(1000), None, "m").context == 992


def test_a_short_trained_context_is_not_stretched() -> None:
    short = dataclasses.replace(ARCH, context_length=256)
    assert plan(short, NEED, room(1 << 20), None, "m").context == 256
    with pytest.raises(UsageError, match="trained for a context of 256 tokens, not 257"):
        plan(short, NEED, room(1 << 20), 257, "m")


def test_a_shortage_has_the_numbers_and_a_context_that_fits() -> None:
    with pytest.raises(MemoryShortageError) as caught:
        plan(ARCH, NEED, room(1024), 4096, "tiny")
    assert caught.value.message == (
        "tiny with a context of 4096 tokens needs 136 MiB (weights 100 MiB, cache 8.00 MiB, working memory 28.0 MiB) "
        "and may use 130 MiB (a test)."
    )
    assert "--context 1024" in caught.value.cure
    with pytest.raises(MemoryShortageError) as caught:
        plan(ARCH, NEED, Budget(MIB, "a test"), None, "tiny")
    assert "--context" not in caught.value.cure


@given(st.integers(0, 4 * GIB), st.one_of(st.none(), st.integers(16, 65536)), st.integers(512, 65536))
def test_no_plan_leaves_the_budget(free: int, context: int | None, trained: int) -> None:
    allowed = Budget(free, "a test")
    arch = dataclasses.replace(ARCH, context_length=trained)
    try:
        found = plan(arch, NEED, allowed, context, "m")
    except (MemoryShortageError, UsageError):
        return
    pages = -(-found.kv_tokens // PAGE_TOKENS)
    assert NEED.total + pages * PAGE_TOKENS * PER_TOKEN <= free
    assert found.context <= min(trained, found.kv_tokens)
    assert context is None or found.context == context


def test_the_budget_is_never_more_than_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "memory", lambda: limits.Memory(16 * GIB, 10 * GIB, "this machine"))
    assert budget(4 * GIB) == Budget(4 * GIB, "--memory")
    assert budget(12 * GIB).num_bytes == 10 * GIB
    assert budget(None).num_bytes == 10 * GIB - int(16 * GIB * 0.05)
    monkeypatch.setattr(limits, "memory", lambda: limits.Memory(GIB, 100 * MIB, "this machine"))
    assert budget(None).num_bytes == 0


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_K_M", "F16", "F32"])
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("qwen2", False), ("gemma3", True)])
def test_a_spec_tells_what_every_shard_takes(tmp_path: Path, family: str, tied: bool, quant: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_arch(family, tied_embeddings=tied, vocab_size=352), quant)
    source = open_source(path)
    try:
        found, last = spec(source, "tiny"), source.arch.num_layers
        vectors = {
            name: packed_bytes(source.info(name)) for name in source.names() if len(source.info(name).shape) == 1
        }
        assert found.weights_bytes(Shard.whole(last)) == estimate(source).weights_bytes
        for start, stop in ((0, last), (0, 1), (1, 2), (last - 1, last)):
            shard = Shard(start, stop, last)
            runner = CPUBackend(1).load(shard, source, KVRoom(3))
            used = runner.memory()
            runner.close()
            # The runner counts its matrices; norms and biases are some vectors beside them.
            layers = tuple(f"layers.{i}." for i in range(start, stop))
            beside = sum(
                n for name, n in vectors.items() if name.startswith(layers) or (name == "norm" and shard.is_last)
            )
            assert used.weights_bytes == pytest.approx(found.weights_bytes(shard) - beside, rel=0.01)
            assert used.kv_bytes == found.kv_bytes(shard, 3 * PAGE_TOKENS)
            assert used.scratch_bytes <= found.scratch_bytes
    finally:
        source.close()


def toy(arch: Architecture = ARCH) -> ModelSpec:
    """A model that takes NEED and PER_TOKEN."""
    return ModelSpec(
        "m", "h", 4, (20 * MIB,) * 4, 10 * MIB, 10 * MIB, 0, (PER_TOKEN // 4,) * 4, NEED.scratch_bytes,
        NEED.load_peak_bytes, arch.context_length, arch.d_model, arch.vocab_size,
    )  # fmt: skip


@given(st.integers(0, GIB), st.one_of(st.none(), st.integers(16, 65536)), st.integers(1, 65536))
def test_the_planner_for_several_nodes_has_the_same_rule(free: int, context: int | None, trained: int) -> None:
    assert partitioner_model.PAGE_TOKENS == PAGE_TOKENS
    arch = dataclasses.replace(ARCH, context_length=trained)
    node = NodeProfile("a", "a", NEED.total + free, None, 1)
    try:
        mine = plan(arch, NEED, Budget(node.budget_bytes, "a test"), context, "m")
    except (MemoryShortageError, UsageError):
        with pytest.raises(NoPlanError):
            place(toy(arch), [node], context=context)
        return
    found = place(toy(arch), [node], context=context)
    assert (found.context, found.kv_tokens) == (mine.context, mine.kv_tokens)


def test_a_placed_shard_is_held_against_the_memory_that_there_is() -> None:
    first = Shard(0, 1, 4)
    needed = (10 + 20 + 20 + 8) * MIB + 1024 * PER_TOKEN // 4
    found = plan_shard(toy(), first, Budget(needed, "a test"), 512, 1024)
    assert (found.context, found.kv_tokens, found.kv_bytes) == (512, 1024, 1024 * PER_TOKEN // 4)
    assert found.need == Need(30 * MIB, 20 * MIB, 8 * MIB)
    with pytest.raises(MemoryShortageError) as caught:
        plan_shard(toy(), first, Budget(needed - 1, "a test"), 512, 1024)
    assert caught.value.message == (
        "Layers 0 to 1 of m with 1024 tokens of cache need 58.5 MiB (weights 30.0 MiB, cache 512 KiB, working memory "
        "28.0 MiB) and may use 58.5 MiB (a test)."
    )
