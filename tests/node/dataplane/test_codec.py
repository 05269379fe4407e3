"""Every message comes back as it went; anything else that could be sent is refused in words."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.base import Batch, Drop, Fork, Span, Truncate
from node.dataplane.codec import decode, encode
from node.dataplane.frames import HEADER_BYTES, FrameError, Header, Kind
from node.engine.sequence import Sampling, TokenLogprob
from node.worker import Sampled, SequenceStart, StageFailed, StepMessage

ids = st.integers(0, 2**40)
tokens = st.integers(0, 2**31 - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)
samplings = st.builds(
    Sampling,
    temperature=floats,
    top_k=st.integers(0, 10**6),
    seed=st.integers(0, 2**64),
    logit_bias=st.lists(st.tuples(tokens, floats), max_size=3).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
)
starts = st.builds(
    SequenceStart, ids, samplings, st.lists(tokens, max_size=5).map(tuple), st.lists(tokens, max_size=5).map(tuple)
)
counts = st.integers(0, 2**40)
commands = st.builds(Fork, ids, ids, counts) | st.builds(Truncate, ids, counts) | st.builds(Drop, ids)
logprobs = st.builds(TokenLogprob, tokens, floats, st.lists(st.tuples(tokens, floats), max_size=3).map(tuple))


@st.composite
def steps(draw: Any) -> StepMessage:
    spans = []
    for _ in range(draw(st.integers(0, 4))):
        count = draw(st.integers(1, 5))
        spans.append(Span(draw(ids), draw(counts), count, draw(st.integers(0, count))))
    num_tokens = sum(span.count for span in spans)
    batch = Batch(
        tuple(spans),
        np.array(draw(st.lists(tokens, min_size=num_tokens, max_size=num_tokens)), np.int32),
        tuple(draw(st.lists(commands, max_size=3))),
    )
    x = np.arange(num_tokens * 3, dtype=np.float32).reshape(num_tokens, 3) if draw(st.booleans()) else None
    return StepMessage(draw(ids), batch, tuple(draw(st.lists(starts, max_size=2))), x)


sampled = st.builds(
    Sampled,
    ids,
    st.lists(st.tuples(ids, tokens, st.none() | logprobs), max_size=3).map(
        lambda some: tuple((seq, token, replace(lp, token=token) if lp else None) for seq, token, lp in some)
    ),
    st.lists(st.tuples(ids, st.text(max_size=20)), max_size=2).map(tuple),
)


def there_and_back(message: Any) -> Any:
    header, meta, body = encode(message, 7)
    packed = header.pack()
    assert len(packed) == HEADER_BYTES and header.meta_bytes == len(meta)
    assert header.body_bytes == (body.nbytes if body is not None else 0)
    return decode(Header.unpack(packed), memoryview(meta), body)


@given(steps())
def test_steps_come_back(message: StepMessage) -> None:
    back = there_and_back(message)
    assert (back.step, back.batch.spans, back.batch.commands) == (
        message.step,
        message.batch.spans,
        message.batch.commands,
    )
    assert back.batch.tokens.dtype == np.int32 and back.batch.tokens.tolist() == message.batch.tokens.tolist()
    assert back.starts == message.starts
    assert back.x is message.x or np.array_equal(back.x, message.x)


@given(sampled | st.builds(StageFailed, ids, st.text(max_size=50)))
def test_results_come_back(message: Sampled | StageFailed) -> None:
    assert there_and_back(message) == message


@given(steps() | sampled, st.data())
def test_a_truncated_or_longer_frame_is_refused(message: Any, data: st.DataObject) -> None:
    header, meta, body = encode(message, 7)
    cut = data.draw(st.integers(0, len(meta) - 1))
    for wrong in (meta[:cut], meta + b"\0"):
        with pytest.raises(FrameError):
            decode(header, memoryview(wrong), body)


@given(st.sampled_from([Kind.STEP, Kind.SAMPLED]), st.binary(max_size=200))
def test_garbage_is_a_message_or_a_frame_error(kind: Kind, data: bytes) -> None:
    try:
        message = decode(Header(kind, 1, 1, len(data)), memoryview(data), None)
    except FrameError:
        return
    assert isinstance(message, StepMessage | Sampled)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_a_garbage_header_is_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        Header.unpack(data)


@pytest.mark.parametrize(
    "values",
    [
        (b"Ro", 99, 0, 0, 0, 0, 0, 0, 0),
        (b"Ro", 3, 99, 0, 0, 0, 0, 0, 0),
        (b"Ro", 3, 0, 0, 0, 1, 1, 0, 0),
        (b"Ro", 3, 1, 0, 0, 2**32 - 1, 2**32 - 1, 0, 0),
        (b"Ro", 3, 0, 0, 0, 0, 0, 2**32 - 1, 0),
        (b"Ro", 3, 0, 0, 0, 0, 0, 0, 1),
    ],
)
def test_a_header_that_promises_too_much_or_nonsense_is_refused(values: tuple[Any, ...]) -> None:
    with pytest.raises(FrameError):
        Header.unpack(struct.pack("<2sBBIQIIII", *values))


def test_hidden_states_of_another_number_than_the_tokens_are_refused() -> None:
    batch = Batch((Span(1, 0, 2, 1),), np.array([1, 2], np.int32))
    header, meta, _ = encode(StepMessage(1, batch), 7)
    with pytest.raises(FrameError, match="differ in number"):
        decode(header, memoryview(meta), np.zeros((3, 4), np.float32))


def test_a_decode_step_takes_few_bytes_beside_its_hidden_states() -> None:
    batch = Batch((Span(1, 100, 1, 1),), np.array([5], np.int32))
    header, meta, body = encode(StepMessage(9, batch, (), np.zeros((1, 576), np.float32)), 7)
    assert HEADER_BYTES + len(meta) <= 96
    assert body is not None and header.body_bytes == body.nbytes == 576 * 4
    _, meta, _ = encode(Sampled(9, ((1, 5, None),)), 7)
    assert HEADER_BYTES + len(meta) <= 72
