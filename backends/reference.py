"""The float32 oracle: the `Runner` contract in plain NumPy, for tests and `cluster verify`.

Everything is written the way the definitions read: weights dequantized to float32, float32 keys and values kept per
sequence as plain arrays, one span after another. Nothing here is fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from backends.arch import Architecture
from backends.base import PAGE_TOKENS, Array, Batch, Command, Drop, Fork, KVRoom, MemoryUse, Span, Support, Truncate
from backends.errors import BatchError, KVRoomError
from backends.kv import KVTile
from backends.rope import inverse_frequencies
from backends.weights.floats import as_float32
from backends.weights.names import tensor_shapes
from backends.weights.source import Affine, WeightSource
from partitioner.plan import Shard

_ROWS_AT_A_TIME = 4096


class ReferenceBackend:
    name = "reference"

    def supports(self, arch: Architecture) -> Support:
        return Support(True)

    def load(self, shard: Shard, source: WeightSource, room: KVRoom) -> ReferenceRunner:
        return ReferenceRunner(shard, source, room)


class _Sequence:
    """keys, values: `[tokens, kv_heads, head_dim]` per layer of the shard. `pages` stands for the room they occupy:
    forks share pages until one of them writes."""

    def __init__(self, num_layers: int, kv_shape: tuple[int, int]) -> None:
        self.length = 0
        self.keys = [np.empty((0, *kv_shape), np.float32) for _ in range(num_layers)]
        self.values = [np.empty((0, *kv_shape), np.float32) for _ in range(num_layers)]
        self.pages: list[object] = []

    def fork(self, num_tokens: int) -> _Sequence:
        other = _Sequence(0, (0, 0))
        other.keys, other.values, other.pages = list(self.keys), list(self.values), list(self.pages)
        other.truncate(num_tokens)
        return other

    def truncate(self, num_tokens: int) -> None:
        self.length = num_tokens
        self.keys = [keys[:num_tokens] for keys in self.keys]
        self.values = [values[:num_tokens] for values in self.values]
        del self.pages[-(-num_tokens // PAGE_TOKENS) :]

    def grown_pages(self, start: int, stop: int, shared: set[int]) -> list[object]:
        """The pages after tokens `start` to `stop` are written: those touched are its own, the others stay."""
        pages: list[object] = list(self.pages)
        for i in range(start // PAGE_TOKENS, -(-stop // PAGE_TOKENS)):
            if i == len(pages):
                pages.append(object())
            elif id(pages[i]) in shared:
                pages[i] = object()
        return pages


class ReferenceRunner:
    """One shard. See `backends.base.Runner` for the contract."""

    def __init__(self, shard: Shard, source: WeightSource, room: KVRoom) -> None:
        self.arch, self.shard, self.room, self.model_hash = source.arch, shard, room, source.model_hash
        self._weights = {name: _load(source, name) for name in _names(source.arch, shard)}
        self._rope = [inverse_frequencies(self.arch, layer) for layer in range(shard.start, shard.stop)]
        self._sequences: dict[int, _Sequence] = {}

    def step(self, batch: Batch, x: Array | None) -> Array:
        self._check_shapes(batch, x)
        for command in batch.commands:
            self._apply(command)
        self._reserve(batch.spans)
        if self.shard.is_first:
            hidden = self._weights["embed"][batch.tokens] * np.float32(self.arch.embedding_scale)
        else:
            hidden = np.array(x, np.float32)
        for layer in range(self.shard.start, self.shard.stop):
            hidden = self._layer(layer, hidden, batch.spans)
        for span in batch.spans:
            self._sequences[span.seq].length += span.count
        if not self.shard.is_last:
            return hidden
        head = self._weights["embed" if self.arch.tied_embeddings else "head"]
        return self._norm(hidden[_logit_rows(batch.spans)], "norm") @ head.T

    def read_kv(self, seq: int, layer: int, start: int, stop: int) -> KVTile:
        sequence, index = self._get(seq), self._index(layer)
        if not 0 <= start < stop <= len(sequence.keys[index]):
            raise BatchError(f"Sequence {seq} has no tokens {start} to {stop} in layer {layer}.")
        keys = sequence.keys[index][start:stop].astype(np.float16)
        values = sequence.values[index][start:stop].astype(np.float16)
        return KVTile(self.model_hash, layer, start, stop, 0, self.arch.num_kv_heads, keys, values)

    def write_kv(self, seq: int, tile: KVTile) -> None:
        index = self._index(tile.layer)
        shape = (tile.stop - tile.start, tile.head_stop - tile.head_start, self.arch.head_dim)
        if tile.model_hash != self.model_hash:
            raise BatchError("A KV tile of another model came.")
        if not 0 <= tile.head_start < tile.head_stop <= self.arch.num_kv_heads:
            raise BatchError(f"There are no KV heads {tile.head_start} to {tile.head_stop}.")
        if tile.stop <= tile.start or tile.keys.shape != shape or tile.values.shape != shape:
            raise BatchError(f"A KV tile of shape {tile.keys.shape} came where {shape} belongs.")
        sequence = self._sequences.get(seq) or self._new_sequence()
        if not 0 <= tile.start <= len(sequence.keys[index]):
            raise BatchError(f"A KV tile starts at {tile.start}, after a hole in sequence {seq}.")
        pages = sequence.grown_pages(tile.start, tile.stop, self._shared_pages())
        self._check_room({seq: pages})
        self._sequences[seq] = sequence
        sequence.pages, sequence.length = pages, max(sequence.length, tile.stop)
        for cache, new in ((sequence.keys, tile.keys), (sequence.values, tile.values)):
            grown = np.zeros(
                (max(tile.stop, len(cache[index])), self.arch.num_kv_heads, self.arch.head_dim), np.float32
            )
            grown[: len(cache[index])] = cache[index]
            grown[tile.start : tile.stop, tile.head_start : tile.head_stop] = new
            cache[index] = grown

    def memory(self) -> MemoryUse:
        weights = sum(weight.nbytes for weight in self._weights.values())
        kv = sum(array.nbytes for s in self._sequences.values() for array in (*s.keys, *s.values))
        return MemoryUse(weights_bytes=weights, kv_bytes=kv)

    def close(self) -> None:
        self._weights.clear()
        self._sequences.clear()

    def _layer(self, layer: int, x: np.ndarray, spans: Iterable[Span]) -> np.ndarray:
        w, arch, at = self._weights, self.arch, f"layers.{layer}."
        a = self._norm(x, f"{at}attn_norm")
        q, k, v = (a @ w[at + part].T + w.get(f"{at}{part}_bias", np.float32(0)) for part in "qkv")
        q, k, v = (rows.reshape(len(x), rows.shape[1] // arch.head_dim, arch.head_dim) for rows in (q, k, v))
        if arch.qk_norm:
            q, k = self._norm(q, f"{at}q_norm"), self._norm(k, f"{at}k_norm")
        a = self._attention(layer, q, k, v, spans) @ w[f"{at}o"].T
        x = x + (self._norm(a, f"{at}attn_post_norm") if arch.post_norms else a)
        m = self._norm(x, f"{at}mlp_norm")
        activation = _silu if arch.activation == "silu" else _gelu_tanh
        m = (activation(m @ w[f"{at}gate"].T) * (m @ w[f"{at}up"].T)) @ w[f"{at}down"].T
        return x + (self._norm(m, f"{at}mlp_post_norm") if arch.post_norms else m)

    def _attention(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, spans: Iterable[Span]) -> np.ndarray:
        """q `[T, heads, head_dim]`, k and v `[T, kv_heads, head_dim]`; appends to the caches. Returns `[T, q_rows]`."""
        index, out, row = self._index(layer), [], 0
        for span in spans:
            part, row = slice(row, row + span.count), row + span.count
            positions = np.arange(span.start, span.start + span.count)
            sequence = self._sequences[span.seq]
            keys = np.concatenate([sequence.keys[index], self._rotate(index, k[part], positions)])
            values = np.concatenate([sequence.values[index], v[part]])
            sequence.keys[index], sequence.values[index] = keys, values
            out.append(self._attend(layer, self._rotate(index, q[part], positions), keys, values, positions))
        return np.concatenate(out) if out else np.empty((0, self.arch.q_rows), np.float32)

    def _attend(
        self, layer: int, q: np.ndarray, keys: np.ndarray, values: np.ndarray, positions: np.ndarray
    ) -> np.ndarray:
        arch, window = self.arch, self.arch.windows[layer]
        # [kv_heads, heads of the group, queries, head_dim] against [kv_heads, 1, head_dim, keys]
        queries = q.reshape(len(q), arch.num_kv_heads, -1, arch.head_dim).transpose(1, 2, 0, 3)
        scores = queries @ keys.transpose(1, 2, 0)[:, None] * np.float32(arch.attention_scale)
        distance = positions[:, None] - np.arange(len(keys))
        is_seen = (distance >= 0) & ((distance < window) if window else True)
        scores = np.where(is_seen, scores, np.float32(-np.inf))
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        return (scores @ values.transpose(1, 0, 2)[:, None]).transpose(2, 0, 1, 3).reshape(len(q), -1)

    def _rotate(self, index: int, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Rotary embedding in half-rotation order: x `[tokens, heads, head_dim]`."""
        frequencies, factor = self._rope[index]
        angles = positions[:, None].astype(np.float64) * frequencies
        cos, sin = ((f(angles) * factor).astype(np.float32)[:, None] for f in (np.cos, np.sin))
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self.arch.norm_eps))
        return x * scale * self._weights[name]

    def _apply(self, command: Command) -> None:
        match command:
            case Fork(src, dst, num_tokens):
                source = self._get(src)
                if dst in self._sequences:
                    raise BatchError(f"Sequence {dst}, the target of a fork, exists.")
                if not 0 <= num_tokens <= source.length:
                    raise BatchError(f"Sequence {src} has {source.length} tokens, not {num_tokens} to fork.")
                self._sequences[dst] = source.fork(num_tokens)
            case Truncate(seq, num_tokens):
                if not 0 <= num_tokens <= self._get(seq).length:
                    raise BatchError(f"Sequence {seq} cannot be truncated to {num_tokens} tokens.")
                self._sequences[seq].truncate(num_tokens)
            case Drop(seq):
                self._sequences.pop(seq, None)

    def _reserve(self, spans: Iterable[Span]) -> None:
        """Make the sequences of all spans, and take their pages, or change nothing."""
        shared, sequences, pages = self._shared_pages(), {}, {}
        for span in spans:
            sequence = self._sequences.get(span.seq) or self._new_sequence()
            if span.seq in sequences:
                raise BatchError(f"Sequence {span.seq} appears twice in a batch.")
            if any(len(keys) != span.start for keys in sequence.keys):
                raise BatchError(
                    f"Sequence {span.seq} has {sequence.length} tokens, and a span starts at {span.start}."
                )
            sequences[span.seq] = sequence
            pages[span.seq] = sequence.grown_pages(span.start, span.start + span.count, shared)
        self._check_room(pages)
        self._sequences |= sequences
        for seq, sequence in sequences.items():
            sequence.pages = pages[seq]

    def _check_room(self, changed: dict[int, list[object]]) -> None:
        kept = [sequence.pages for seq, sequence in self._sequences.items() if seq not in changed]
        num_pages = len({id(page) for pages in (*kept, *changed.values()) for page in pages})
        if num_pages > self.room.num_pages:
            raise KVRoomError(f"The KV cache has {self.room.num_pages} pages, and {num_pages} are needed.")

    def _shared_pages(self) -> set[int]:
        seen: set[int] = set()
        return {id(p) for s in self._sequences.values() for p in s.pages if id(p) in seen or seen.add(id(p))}

    def _check_shapes(self, batch: Batch, x: Array | None) -> None:
        for span in batch.spans:
            if span.count < 1 or not 0 <= span.num_logits <= span.count:
                raise BatchError(f"{span} asks for {span.num_logits} logits of {span.count} tokens.")
        if not self.shard.is_first:
            if x is None or x.shape != (batch.num_tokens, self.arch.d_model):
                raise BatchError(f"Hidden of another shape came for {batch.num_tokens} tokens of {self.arch.d_model}.")
        elif batch.tokens.shape != (batch.num_tokens,):
            raise BatchError(f"The batch has {batch.tokens.shape} tokens, its spans {batch.num_tokens}.")
        elif batch.num_tokens and not 0 <= batch.tokens.min() <= batch.tokens.max() < self.arch.vocab_size:
            raise BatchError(f"A token lies outside the vocabulary of {self.arch.vocab_size}.")

    def _new_sequence(self) -> _Sequence:
        return _Sequence(self.shard.size, (self.arch.num_kv_heads, self.arch.head_dim))

    def _get(self, seq: int) -> _Sequence:
        if seq not in self._sequences:
            raise BatchError(f"There is no sequence {seq}.")
        return self._sequences[seq]

    def _index(self, layer: int) -> int:
        if not self.shard.start <= layer < self.shard.stop:
            raise BatchError(f"Layer {layer} is not in layers {self.shard.start} to {self.shard.stop}.")
        return layer - self.shard.start


def _names(arch: Architecture, shard: Shard) -> list[str]:
    """Canonical names of the tensors that a shard needs."""
    wanted = {f"layers.{layer}" for layer in range(shard.start, shard.stop)}
    names = [name for name in tensor_shapes(arch) if name.rpartition(".")[0] in wanted]
    if shard.is_first or (shard.is_last and arch.tied_embeddings):
        names.append("embed")
    if shard.is_last:
        names += ["norm"] if arch.tied_embeddings else ["norm", "head"]
    return names


def _load(source: WeightSource, name: str) -> np.ndarray:
    """A whole tensor as float32."""
    shape = source.info(name).shape
    if len(shape) == 1:
        return source.vector(name)
    out = np.empty(shape, np.float32)
    for start in range(0, shape[0], _ROWS_AT_A_TIME):
        stop = min(start + _ROWS_AT_A_TIME, shape[0])
        rows = source.matrix(name, start, stop)
        out[start:stop] = rows.dequantize() if isinstance(rows, Affine) else as_float32(rows)
    return out


def _logit_rows(spans: Iterable[Span]) -> list[int]:
    rows, end = [], 0
    for span in spans:
        end += span.count
        rows += range(end - span.num_logits, end)
    return rows


def _silu(x: np.ndarray) -> np.ndarray:
    # exp overflows to infinity for very negative x, and the quotient is then the right limit, 0.
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return np.float32(0.5) * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)))
