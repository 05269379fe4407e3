"""A node without the file computes the same bits from a sparse copy that holds its shard's bytes only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backends.base import Batch, KVRoom, Span
from backends.cpu.engine import CPUBackend
from backends.weights.open import open_source
from node.errors import RoostError
from node.models.share import Manifest, manifest, needed, read
from node.models.sparse import SparseCopy
from partitioner.plan import Shard
from tests.models import tiny_arch, write_gguf


def copied(path: Path, folder: Path, shard: Shard) -> tuple[SparseCopy, int]:
    """What a node does: the header first, then by its own reckoning the rest."""
    promised = Manifest.from_json(manifest(path).to_json())
    copy, num_bytes = SparseCopy(folder, promised), 0
    for ranges in (lambda: list(promised.header), lambda: needed(copy.path, shard)):
        for part in copy.missing(ranges()):
            at = part.start
            for data in read(path, part.file, part.start, part.stop):
                copy.write(part.file, at, data)
                at += len(data)
            num_bytes += part.num_bytes
        copy.flush()
    return copy, num_bytes


def step(path: Path, shard: Shard) -> bytes:
    source = open_source(path)
    runner = CPUBackend(1).load(shard, source, KVRoom.for_tokens(64))
    x = None if shard.is_first else np.random.default_rng(0).standard_normal((3, source.arch.d_model), np.float32)
    try:
        return runner.step(Batch((Span(0, 0, 3, 1),), np.array([5, 6, 7], np.int32)), x).tobytes()
    finally:
        runner.close()
        source.close()


@pytest.mark.parametrize("quantization", ["Q4_0", "Q4_K_M", "F16"])
@pytest.mark.parametrize("start, stop", [(0, 1), (0, 2), (1, 2)])
def test_a_shard_from_its_copy_gives_the_same_bits(tmp_path: Path, quantization: str, start: int, stop: int) -> None:
    arch = tiny_arch("llama", head_dim=32, context_length=128)
    path = write_gguf(tmp_path / "tiny.gguf", arch, quantization)
    shard = Shard(start, stop, arch.num_layers)
    copy, num_bytes = copied(path, tmp_path / "copies", shard)
    with copy:
        assert copy.missing(needed(copy.path, shard)) == []
        assert step(copy.path, shard) == step(path, shard)
    assert num_bytes <= path.stat().st_size
    with SparseCopy(tmp_path / "copies", manifest(path)) as again:  # what was written is known after a restart
        assert again.missing(needed(again.path, shard)) == []


@pytest.mark.parametrize("change", [{"files": [["../evil", 5]]}, {"files": []}, {"model_hash": "/"}, {"header": "x"}])
def test_a_hostile_manifest_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_arch("llama", head_dim=32, context_length=128), "Q4_0")
    with pytest.raises(RoostError):
        Manifest.from_json(manifest(path).to_json() | change)


def test_only_the_models_own_bytes_are_given_away(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_arch("llama", head_dim=32, context_length=128), "Q4_0")
    size = path.stat().st_size
    for file, start, stop in ((path.name, 0, size + 1), (path.name, -1, 5), ("../other", 0, 1)):
        with pytest.raises(RoostError):
            list(read(path, file, start, stop))
