"""The CPU backend: one C call per shard and step, weights repacked once for the kernels in `kernels/`."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np

from backends.arch import Architecture
from backends.base import (
    PAGE_TOKENS,
    Array,
    Batch,
    Drop,
    Fork,
    KVRoom,
    MemoryUse,
    Support,
    Truncate,
)
from backends.cpu.library import Config, Step, address, kernels
from backends.cpu.packing import pack_weights
from backends.errors import BatchError, KVRoomError, UnsupportedModelError
from backends.kv import KVTile
from backends.pool import BlockPool
from backends.rope import inverse_frequencies
from backends.weights.source import WeightSource
from partitioner.plan import Shard


def default_threads() -> int:
    """Physical cores that this process may use: hyper-threads share the units that the kernels keep busy."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


class CPUBackend:
    """Runs any `Architecture` whose sizes are multiples of 32, with weights of any canonical form."""

    name = "cpu"

    def __init__(self, num_threads: int | None = None, *, isa: str = "auto", library: Path | None = None) -> None:
        self.num_threads = num_threads or default_threads()
        self.isa = isa
        self.library = library

    def supports(self, arch: Architecture) -> Support:
        for what, size in (("d_model", arch.d_model), ("d_ff", arch.d_ff), ("head_dim", arch.head_dim)):
            if size % 32:
                return Support(False, f"{what} is {size}, and the CPU kernels work on groups of 32.")
        if arch.num_heads % arch.num_kv_heads:
            return Support(False, f"{arch.num_heads} heads do not divide among {arch.num_kv_heads} KV heads.")
        return Support(True)

    def load(self, shard: Shard, source: WeightSource, room: KVRoom) -> CPURunner:
        support = self.supports(source.arch)
        if not support.ok:
            raise UnsupportedModelError(f"The CPU backend cannot run this model: {support.reason}")
        return CPURunner(self, shard, source, room)


class CPURunner:
    """One shard in memory. See `backends.base.Runner` for the contract."""

    def __init__(self, backend: CPUBackend, shard: Shard, source: WeightSource, room: KVRoom) -> None:
        arch = source.arch
        self.arch, self.shard, self.model_hash = arch, shard, source.model_hash
        self._lib = kernels(backend.library)
        self._pool = BlockPool(room.num_pages, PAGE_TOKENS)
        config = Config(
            num_layers=shard.size, d_model=arch.d_model, d_ff=arch.d_ff, num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads, head_dim=arch.head_dim, vocab_size=arch.vocab_size,
            activation=int(arch.activation == "gelu_tanh"), has_embedding=int(shard.is_first),
            has_head=int(shard.is_last), post_norms=int(arch.post_norms), num_threads=backend.num_threads,
            norm_eps=arch.norm_eps, attention_scale=arch.attention_scale, embedding_scale=arch.embedding_scale,
        )  # fmt: skip
        self._model = self._lib.roost_new(ctypes.byref(config), backend.isa.encode())
        if not self._model:
            known = self._lib.roost_has_isa(backend.isa.encode())
            raise (
                MemoryError("threads or scratch")
                if known
                else UnsupportedModelError(f"This CPU has no '{backend.isa}' instructions.", "Use 'auto'.")
            )
        try:
            self._set_layers()
            pack_weights(self._lib, self._model, shard, source)
            if self._lib.roost_set_room(self._model, room.num_pages):
                raise MemoryError(f"{room.num_pages} KV pages")
        except BaseException:
            self.close()
            raise

    def _set_layers(self) -> None:
        tables: dict[tuple[float, bool], int] = {}
        for index, layer in enumerate(range(self.shard.start, self.shard.stop)):
            key = (self.arch.rope_thetas[layer], self.arch.rope_scaled[layer])
            if key not in tables:
                frequencies, factor = inverse_frequencies(self.arch, layer)
                frequencies = np.ascontiguousarray(frequencies, np.float32)
                tables[key] = self._lib.roost_add_rope(self._model, address(frequencies), factor)
                if tables[key] < 0:
                    raise UnsupportedModelError("The CPU backend takes at most four rotary frequency tables.")
            self._lib.roost_set_layer(self._model, index, self.arch.windows[layer], tables[key])

    @property
    def isa(self) -> str:
        """Instruction set in use."""
        return self._lib.roost_isa(self._model).decode()

    def step(self, batch: Batch, x: Array | None) -> Array:
        self._check(batch, x)
        for command in batch.commands:
            self._pool.apply(command)
        for source, target in self._pool.extend_all(batch.spans):
            self._lib.roost_copy_page(self._model, source, target)
        spans = batch.spans
        tables = [np.asarray(self._pool.blocks(span.seq), np.int32) for span in spans]
        starts = np.array([span.start for span in spans], np.int32)
        counts = np.array([span.count for span in spans], np.int32)
        offsets = np.zeros(len(spans), np.int32)
        np.cumsum([len(table) for table in tables[:-1]], out=offsets[1:])
        pages = np.concatenate(tables) if tables else np.zeros(0, np.int32)
        rows, end = [], 0
        for span in spans:
            end += span.count
            rows.extend(range(end - span.num_logits, end))
        logit_rows = np.array(rows, np.int32)
        if self.shard.is_last:
            out = np.empty((len(rows), self.arch.vocab_size), np.float32)
        else:
            out = np.empty((batch.num_tokens, self.arch.d_model), np.float32)
        tokens = np.ascontiguousarray(batch.tokens, np.int32) if self.shard.is_first else None
        hidden = None if self.shard.is_first or x is None else np.ascontiguousarray(x, np.float32)
        step = Step(
            batch.num_tokens, len(spans), len(rows), address(tokens), address(hidden), address(starts),
            address(counts), address(offsets), address(pages), address(logit_rows), address(out),
        )  # fmt: skip
        if self._lib.roost_step(self._model, ctypes.byref(step)):
            raise KVRoomError(
                f"There is no memory for a step of {batch.num_tokens} tokens.", "Use a smaller context or chunk size."
            )
        return out

    def _check(self, batch: Batch, x: Array | None) -> None:
        if self._model is None:
            raise BatchError("This runner is closed.")
        for span in batch.spans:
            if span.count < 1 or not 0 <= span.num_logits <= span.count:
                raise BatchError(f"{span} asks for {span.num_logits} logits of {span.count} tokens.")
        if self.shard.is_first:
            tokens = np.asarray(batch.tokens)
            if tokens.shape != (batch.num_tokens,):
                raise BatchError(f"The batch has {tokens.shape} tokens, its spans {batch.num_tokens}.")
            if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.arch.vocab_size:
                raise BatchError(f"A token lies outside the vocabulary of {self.arch.vocab_size}.")
        elif x is None or x.shape != (batch.num_tokens, self.arch.d_model):
            shape = None if x is None else x.shape
            raise BatchError(f"Hidden of shape {shape} came for {batch.num_tokens} tokens of {self.arch.d_model}.")

    def apply(self, command: Fork | Truncate | Drop) -> None:
        """Apply one cache command without a step."""
        self._pool.apply(command)

    def read_kv(self, seq: int, layer: int, start: int, stop: int) -> KVTile:
        if not 0 <= start < stop <= self._pool.length(seq):
            raise BatchError(f"Sequence {seq} has {self._pool.length(seq)} tokens, not {start} to {stop}.")
        shape = (stop - start, self.arch.num_kv_heads, self.arch.head_dim)
        keys, values = np.empty(shape, np.float16), np.empty(shape, np.float16)
        self._copy_kv(seq, layer, start, stop, False, keys, values)
        return KVTile(self.model_hash, layer, start, stop, 0, self.arch.num_kv_heads, keys, values)

    def write_kv(self, seq: int, tile: KVTile) -> None:
        shape = (tile.stop - tile.start, self.arch.num_kv_heads, self.arch.head_dim)
        heads = (tile.head_start, tile.head_stop)
        if tile.model_hash != self.model_hash:
            raise BatchError("A KV tile of another model came.")
        if tile.keys.shape != shape or tile.values.shape != shape or heads != (0, self.arch.num_kv_heads):
            raise BatchError(f"A KV tile of shape {tile.keys.shape}, heads {heads}, came where {shape} fits.")
        length = self._pool.length(seq) if seq in self._pool.sequences() else 0
        if not 0 <= tile.start <= length:
            raise BatchError(f"A KV tile starts at {tile.start}, but sequence {seq} has {length} tokens.")
        for source, target in self._pool.reserve(seq, tile.start, tile.stop):
            self._lib.roost_copy_page(self._model, source, target)
        keys = np.ascontiguousarray(tile.keys, np.float16)
        values = np.ascontiguousarray(tile.values, np.float16)
        self._copy_kv(seq, tile.layer, tile.start, tile.stop, True, keys, values)

    def _copy_kv(self, seq: int, layer: int, start: int, stop: int, store: bool, keys: Array, values: Array) -> None:
        if not self.shard.start <= layer < self.shard.stop:
            raise BatchError(f"Layer {layer} is not in layers {self.shard.start} to {self.shard.stop}.")
        pages = np.asarray(self._pool.blocks(seq), np.int32)
        self._lib.roost_kv(
            self._model,
            layer - self.shard.start,
            address(pages),
            start,
            stop,
            int(store),
            address(keys),
            address(values),
        )

    def memory(self) -> MemoryUse:
        return MemoryUse(
            weights_bytes=self._lib.roost_weight_bytes(self._model),
            kv_bytes=self._lib.roost_kv_bytes(self._model),
            scratch_bytes=self._lib.roost_scratch_bytes(self._model),
        )

    def close(self) -> None:
        if self._model is not None:
            self._lib.roost_free(self._model)
            self._model = None
