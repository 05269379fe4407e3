"""Steps and their results as bytes, and back. No pickle: whatever comes is checked, and anything else is a FrameError.

A step's small fields are arrays of little-endian integers; the histories that sampling needs travel once a sequence.
Numbers of a header say how many entries of each kind follow.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from backends.base import Batch, Command, Drop, Fork, Span, Truncate
from node.dataplane.frames import FrameError, Header, Kind
from node.engine.sequence import Sampling, TokenLogprob
from node.worker import Sampled, SequenceStart, StageFailed, StepMessage

Message = StepMessage | Sampled | StageFailed

STEP = struct.Struct("<IIII")
"""Numbers of spans, tokens, commands and starts."""
SPAN = struct.Struct("<qqqq")
COMMAND = struct.Struct("<qqqq")
START = struct.Struct("<qIII")
"""Sequence, bytes of its sampling, tokens of its prompt and of its output."""
SAMPLED = struct.Struct("<II")
TOKEN = struct.Struct("<qqdi")
"""Sequence, token, its log-probability, and the number of alternatives that follow (-1: none were asked for)."""
TOP = struct.Struct("<qd")
FAILED = struct.Struct("<qI")

_FORK, _TRUNCATE, _DROP = range(3)
_SAMPLING_FIELDS = frozenset(field.name for field in fields(Sampling))


def encode(message: Message, deployment: int) -> tuple[Header, bytes, np.ndarray | None]:
    """The header, its meta and the array that follows it, if one does."""
    if isinstance(message, StepMessage):
        meta, x = _encode_step(message), message.x
        if x is None:
            return Header(Kind.STEP, deployment, message.step, len(meta)), meta, None
        body = np.ascontiguousarray(x)
        rows, cols = body.shape
        return Header(Kind.STEP, deployment, message.step, len(meta), rows, cols, body.dtype), meta, body
    if isinstance(message, Sampled):
        meta = _encode_sampled(message)
        return Header(Kind.SAMPLED, deployment, message.step, len(meta)), meta, None
    meta = message.error.encode("utf-8", "replace")[: 1 << 16]
    return Header(Kind.FAILED, deployment, message.step, len(meta)), meta, None


def decode(header: Header, meta: memoryview, body: np.ndarray | None) -> Message:
    """Raises FrameError. `body` is `[rows, cols]` as the header says; the message refers to it without a copy."""
    try:
        if header.kind is Kind.STEP:
            return _decode_step(header, _Reader(meta), body)
        if header.kind is Kind.SAMPLED:
            return _decode_sampled(header, _Reader(meta))
        if header.kind is Kind.FAILED:
            return StageFailed(header.step, bytes(meta).decode("utf-8", "replace"))
    except (struct.error, ValueError, TypeError, KeyError, OverflowError, RecursionError) as exc:
        raise FrameError(f"A frame cannot be read: {exc}.", "Run the same version on all nodes.") from exc
    raise FrameError(f"A frame of the kind {header.kind.name} came where a step was expected.")


class _Reader:
    """Takes a buffer apart from its start; what is missing at its end is a ValueError, what is left over too."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def take(self, num_bytes: int) -> memoryview:
        if num_bytes > len(self._data) - self._at:
            raise ValueError(f"{num_bytes} bytes are missing from a field")
        part = self._data[self._at : self._at + num_bytes]
        self._at += num_bytes
        return part

    def records(self, record: struct.Struct, count: int) -> list[tuple[Any, ...]]:
        return list(record.iter_unpack(self.take(record.size * count)))

    def one(self, record: struct.Struct) -> tuple[Any, ...]:
        return record.unpack(self.take(record.size))

    def tokens(self, count: int) -> np.ndarray:
        tokens = np.frombuffer(self.take(4 * count), "<i4")
        if count and tokens.min() < 0:
            raise ValueError("a token is negative")
        return tokens

    def finish(self) -> None:
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes are left over")


def _encode_step(message: StepMessage) -> bytes:
    batch = message.batch
    parts = [STEP.pack(len(batch.spans), len(batch.tokens), len(batch.commands), len(message.starts))]
    parts += [SPAN.pack(span.seq, span.start, span.count, span.num_logits) for span in batch.spans]
    parts.append(np.asarray(batch.tokens, "<i4").tobytes())
    parts += [COMMAND.pack(*_command_fields(command)) for command in batch.commands]
    for start in message.starts:
        sampling = json.dumps(asdict(start.sampling)).encode()
        parts.append(START.pack(start.seq, len(sampling), len(start.prompt), len(start.output)))
        parts += [sampling, _packed(start.prompt), _packed(start.output)]
    return b"".join(parts)


def _decode_step(header: Header, reader: _Reader, body: np.ndarray | None) -> StepMessage:
    num_spans, num_tokens, num_commands, num_starts = reader.one(STEP)
    spans = tuple(Span(*values) for values in reader.records(SPAN, num_spans))
    if any(span.count < 1 or span.start < 0 or not 0 <= span.num_logits <= span.count for span in spans):
        raise ValueError("a span makes no sense")
    tokens = reader.tokens(num_tokens).astype(np.int32)  # a copy: the buffer is used again, the batch may live on
    if sum(span.count for span in spans) != num_tokens or (body is not None and len(body) != num_tokens):
        raise ValueError("spans, tokens and hidden states differ in number")
    commands = tuple(_command(*values) for values in reader.records(COMMAND, num_commands))
    starts = tuple(_decode_start(reader) for _ in range(num_starts))
    reader.finish()
    return StepMessage(header.step, Batch(spans, tokens, commands), starts, body)


def _decode_start(reader: _Reader) -> SequenceStart:
    seq, sampling_bytes, num_prompt, num_output = reader.one(START)
    values = json.loads(bytes(reader.take(sampling_bytes)))
    if not isinstance(values, dict) or values.keys() != _SAMPLING_FIELDS:
        raise ValueError("the fields of a sampling are others")
    values["logit_bias"] = tuple((_whole(token), float(bias)) for token, bias in values["logit_bias"])
    for name in ("top_k", "seed"):
        _whole(values[name])
    if values["logprobs"] is not None:
        _whole(values["logprobs"])
    for name in _SAMPLING_FIELDS - {"top_k", "seed", "logprobs", "logit_bias"}:
        values[name] = float(values[name])
    prompt, output = reader.tokens(num_prompt), reader.tokens(num_output)
    return SequenceStart(seq, Sampling(**values), tuple(prompt.tolist()), tuple(output.tolist()))


def _encode_sampled(message: Sampled) -> bytes:
    parts = [SAMPLED.pack(len(message.tokens), len(message.failed))]
    for seq, token, logprob in message.tokens:
        top = logprob.top if logprob else ()
        parts.append(TOKEN.pack(seq, token, logprob.logprob if logprob else 0.0, len(top) if logprob else -1))
        parts += [TOP.pack(*one) for one in top]
    for seq, reason in message.failed:
        words = reason.encode("utf-8", "replace")[: 1 << 16]
        parts += [FAILED.pack(seq, len(words)), words]
    return b"".join(parts)


def _decode_sampled(header: Header, reader: _Reader) -> Sampled:
    num_tokens, num_failed = reader.one(SAMPLED)
    tokens, failed = [], []
    for _ in range(num_tokens):
        seq, token, value, num_top = reader.one(TOKEN)
        top = tuple(reader.records(TOP, max(0, num_top)))
        tokens.append((seq, token, TokenLogprob(token, value, top) if num_top >= 0 else None))
    for _ in range(num_failed):
        seq, num_bytes = reader.one(FAILED)
        failed.append((seq, bytes(reader.take(num_bytes)).decode("utf-8", "replace")))
    reader.finish()
    return Sampled(header.step, tuple(tokens), tuple(failed))


def _command_fields(command: Command) -> tuple[int, int, int, int]:
    if isinstance(command, Fork):
        return _FORK, command.src, command.dst, command.num_tokens
    if isinstance(command, Truncate):
        return _TRUNCATE, command.seq, command.num_tokens, 0
    return _DROP, command.seq, 0, 0


def _command(kind: int, a: int, b: int, c: int) -> Command:
    if kind == _FORK and c >= 0:
        return Fork(a, b, c)
    if kind == _TRUNCATE and b >= 0:
        return Truncate(a, b)
    if kind == _DROP:
        return Drop(a)
    raise ValueError("a cache command makes no sense")


def _packed(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, "<i4").tobytes()


def _whole(value: object) -> int:
    if type(value) is not int:
        raise ValueError("a whole number was expected")
    return value
