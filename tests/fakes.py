"""Stand-ins for models and tokenizers, small enough to predict. They run under the real engine loop.

`ScriptedRunner` plays given answers back. `HashRunner` is a model whose every logit depends on the whole history, so
that any mistake in chunking, paging or order changes its output. Both hold their callers to the Runner contract, and
both come as stages of a pipeline.
"""

from __future__ import annotations

import codecs
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from backends.base import PAGE_TOKENS, Array, Batch, Drop, Fork, MemoryUse, Span
from backends.errors import BatchError
from backends.kv import KVTile
from backends.pool import BlockPool
from node.engine.engine import Engine
from node.engine.pipeline import pipeline_of
from node.engine.scheduler import Limits
from node.engine.sequence import Delta, Event, Finished, Request, Sampling
from node.engine.stops import StreamDecoder

GREEDY = Sampling(temperature=0.0)


class FakeRunner:
    """One stage. `before` is called with every batch before anything happens: it may wait, or raise.

    Hidden is `[T, 1]` float32 of integers that float32 holds exactly. `batches` are all steps that came, failed ones
    too. `closed` counts calls of `close`.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        stage: int = 0,
        num_stages: int = 1,
        num_pages: int = 64,
        before: Callable[[Batch], None] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.pool = BlockPool(num_pages, PAGE_TOKENS)
        self.before = before
        self.batches: list[Batch] = []
        self.closed = 0
        self._contents: dict[int, list[tuple[int, ...]]] = {}

    @property
    def num_tokens(self) -> int:
        return sum(batch.num_tokens for batch in self.batches)

    def step(self, batch: Batch, x: Array | None) -> Array:
        self.batches.append(batch)
        if self.before is not None:
            self.before(batch)
        values = self._checked(batch, x)
        for command in batch.commands:
            self.pool.apply(command)
            if isinstance(command, Fork):
                self._contents[command.dst] = self._contents[command.src][: command.num_tokens]
            elif isinstance(command, Drop):
                self._contents.pop(command.seq, None)
            else:
                del self._contents[command.seq][command.num_tokens :]
        self.pool.extend_all(batch.spans)
        out, wanted, row = [], [], 0
        for span in batch.spans:
            contents = self._contents.setdefault(span.seq, [])
            for value in values[row : row + span.count]:
                contents.append(self.absorb(value, contents[-1] if contents else None))
                out.append(contents[-1][-1])
            row += span.count
            stops = range(len(contents) - span.num_logits + 1, len(contents) + 1)
            wanted += [self.logits(contents[:stop]) for stop in stops] if self.is_last else []
        if not self.is_last:
            return np.array(out, np.float32).reshape(-1, 1)
        return np.array(wanted, np.float32).reshape(-1, self.vocab_size)

    def absorb(self, value: int, before: tuple[int, ...] | None) -> tuple[int, ...]:
        """What the stage keeps for one token; the last of it is handed on. `value` came in, `before` is what it keeps
        for the token before."""
        return (value,)

    def logits(self, contents: Sequence[tuple[int, ...]]) -> Array:
        """`[vocab]` for the token that follows those kept."""
        raise NotImplementedError

    def _checked(self, batch: Batch, x: Array | None) -> list[int]:
        for span in batch.spans:
            if span.count < 1 or not 0 <= span.num_logits <= span.count:
                raise BatchError(f"{span} is no span.")
        if batch.tokens.dtype != np.int32 or batch.tokens.shape != (batch.num_tokens,):
            raise BatchError(f"{batch.num_tokens} tokens were announced, {batch.tokens.shape} came.")
        if self.is_first != (x is None):
            raise BatchError("Hidden goes to every stage but the first.")
        if x is None:
            if any(not 0 <= token < self.vocab_size for token in batch.tokens):
                raise BatchError(f"A token lies outside the vocabulary of {self.vocab_size}.")
            return batch.tokens.tolist()
        if x.shape != (batch.num_tokens, 1) or x.dtype != np.float32:
            raise BatchError(f"Hidden of shape {x.shape} came for {batch.num_tokens} tokens.")
        return [int(value) for value in x[:, 0]]

    def read_kv(self, seq: int, layer: int, start: int, stop: int) -> KVTile:
        raise BatchError("A fake has no keys and values.")

    def write_kv(self, seq: int, tile: KVTile) -> None:
        raise BatchError("A fake has no keys and values.")

    def memory(self) -> MemoryUse:
        return MemoryUse()

    def close(self) -> None:
        self.closed += 1


class ScriptedRunner(FakeRunner):
    """Answers each prompt of `scripts` with its tokens, then with `end` for ever. Other prompts get `end` at once.

    Of several prompts that a sequence begins with, the longest counts. A mapping may grow while the runner works.
    """

    def __init__(
        self,
        scripts: Mapping[tuple[int, ...], Sequence[int]],
        *,
        vocab_size: int,
        end: int = 0,
        stage: int = 0,
        num_stages: int = 1,
        num_pages: int = 64,
        before: Callable[[Batch], None] | None = None,
    ) -> None:
        super().__init__(vocab_size=vocab_size, stage=stage, num_stages=num_stages, num_pages=num_pages, before=before)
        self.scripts = scripts
        self.end = end

    def logits(self, contents: Sequence[tuple[int, ...]]) -> Array:
        row = np.zeros(self.vocab_size, np.float32)
        row[self._next(tuple(token for (token,) in contents))] = 30.0
        return row

    def _next(self, tokens: tuple[int, ...]) -> int:
        begun = [prompt for prompt in self.scripts if tokens[: len(prompt)] == prompt]
        if not begun:
            return self.end
        prompt = max(begun, key=len)
        answer, at = self.scripts[prompt], len(tokens) - len(prompt)
        return answer[at] if at < len(answer) else self.end


class HashRunner(FakeRunner):
    """Pseudo-random logits that depend on every token before, in its place, and on the stages in their order."""

    def __init__(
        self,
        *,
        vocab_size: int = 101,
        stage: int = 0,
        num_stages: int = 1,
        num_layers: int = 6,
        num_pages: int = 64,
        before: Callable[[Batch], None] | None = None,
    ) -> None:
        super().__init__(vocab_size=vocab_size, stage=stage, num_stages=num_stages, num_pages=num_pages, before=before)
        self.layers = range(num_layers * stage // num_stages, num_layers * (stage + 1) // num_stages)

    def absorb(self, value: int, before: tuple[int, ...] | None) -> tuple[int, ...]:
        states = []
        for i, layer in enumerate(self.layers):
            value = _mix(value * 31 + layer + (before[i] * 131 if before else 0))
            states.append(value)
        return tuple(states)

    def logits(self, contents: Sequence[tuple[int, ...]]) -> Array:
        ids = np.arange(self.vocab_size, dtype=np.int64)
        return ((ids * 7919 + contents[-1][-1] * 104729) % 10007 / 1000).astype(np.float32)


def _mix(x: int) -> int:
    """20 bits, so that float32 carries them exactly."""
    x = (x * 0x9E3779B1 + 0x7F4A7C15) & 0xFFFFFFFF
    return (x ^ (x >> 13)) & 0xFFFFF


def hash_stages(num_stages: int, **options: Any) -> list[HashRunner]:
    return [HashRunner(stage=i, num_stages=num_stages, **options) for i in range(num_stages)]


class Gate:
    """Given as `before`, it holds a runner at the beginning of each step until the test lets it go on."""

    def __init__(self) -> None:
        self._arrived, self._allowed = threading.Semaphore(0), threading.Semaphore(0)
        self._is_open = False

    def __call__(self, batch: Batch) -> None:
        self._arrived.release()
        if not self._is_open and not self._allowed.acquire(timeout=20):
            raise TimeoutError("the test left a step at the gate")

    def wait(self) -> None:
        """Until a step (one more than in the waits before) stands at the gate, or went through."""
        assert self._arrived.acquire(timeout=20), "no step came"

    def let_one_go(self) -> None:
        self._allowed.release()

    def open(self) -> None:
        self._is_open = True
        self._allowed.release()


class FakeTokenizer:
    """Id 0 ends, 1 to 256 are single bytes, the rest are the given `words`. Unknown text is spelled in bytes, so any
    character beyond ASCII comes in several tokens."""

    END = 0

    def __init__(self, words: Iterable[str] = ()) -> None:
        self.words = list(words)
        self._ids = {word: 257 + i for i, word in enumerate(self.words)}
        self._pieces = [b""] + [bytes([i]) for i in range(256)] + [word.encode() for word in self.words]
        self.vocab_size = len(self._pieces)

    def encode(self, text: str) -> list[int]:
        """The longest known word at each place, else its next character in bytes."""
        ids: list[int] = []
        while text:
            word = max((word for word in self.words if word and text.startswith(word)), key=len, default="")
            ids += [self._ids[word]] if word else [1 + byte for byte in text[0].encode()]
            text = text[len(word) or 1 :]
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self._pieces[i] for i in ids).decode("utf-8", "replace")

    def decoder(self) -> StreamDecoder:
        return _FakeDecoder(self._pieces)


class _FakeDecoder:
    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(self._pieces[i] for i in ids))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


@contextmanager
def engine_of(
    runners: Sequence[FakeRunner],
    *,
    tokenizer: FakeTokenizer | None = None,
    max_waiting: int = 64,
    context: int = 1024,
    **limits: int,
) -> Iterator[Engine]:
    """A started engine over `runners`, closed at the end."""
    decoder_factory = tokenizer.decoder if tokenizer else FakeTokenizer(str(i) for i in range(1000)).decoder
    engine = Engine(
        pipeline_of(runners),
        decoder_factory=decoder_factory,
        limits=Limits(context=context, num_pages=runners[0].pool.num_blocks, **limits),
        max_waiting=max_waiting,
    )
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


def request(prompt: Iterable[int], max_tokens: int = 16, *, id: str = "r", **fields: object) -> Request:
    """Greedy unless told otherwise."""
    fields.setdefault("sampling", GREEDY)
    return Request(id=id, prompt=tuple(prompt), max_tokens=max_tokens, **fields)  # pyright: ignore[reportArgumentType]


def tokens_of(events: Iterable[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.tokens]


def text_of(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def last(events: Sequence[Event]) -> Finished:
    end = events[-1]
    assert isinstance(end, Finished), end
    assert not any(isinstance(event, Finished) for event in events[:-1])
    return end


def span_of(batch: Batch, seq: int) -> Span | None:
    return next((span for span in batch.spans if span.seq == seq), None)
