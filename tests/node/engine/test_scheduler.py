"""The scheduler as a pure function: what it emits is valid at every stage, fair, within its budget, and never stuck."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import PAGE_TOKENS, Drop
from backends.pool import BlockPool
from node.engine.scheduler import Limits, Scheduler, Step
from node.engine.sequence import Request, Sequence
from node.errors import ContextLengthError


def request(num_prompt: int, max_tokens: int = 8, name: str = "r") -> Request:
    return Request(id=name, prompt=tuple(range(num_prompt)), max_tokens=max_tokens)


def answer(scheduler: Scheduler, step: Step) -> list[Sequence]:
    """Sample a token for each span that wants one; finish those that are full. Returns the finished."""
    done = []
    for sequence, span in zip(step.sequences, step.batch.spans, strict=True):
        if span.num_logits and sequence.seq == span.seq:
            scheduler.sampled(sequence, 1)
            if sequence.is_full:
                scheduler.remove(sequence)
                done.append(sequence)
    return done


class Stage:
    """What a stage's cache would say to each batch: the same books, kept from the batches alone."""

    def __init__(self, limits: Limits) -> None:
        self.pool = BlockPool(limits.num_pages, PAGE_TOKENS)
        self.started: set[int] = set()

    def take(self, step: Step) -> None:
        for command in step.batch.commands:
            self.pool.apply(command)
        self.pool.extend_all(step.batch.spans)  # raises for holes, doubles and want of room
        self.started |= {start.seq for start in step.starts}
        assert len(step.batch.tokens) == step.batch.num_tokens
        for sequence, span in zip(step.sequences, step.batch.spans, strict=True):
            if span.num_logits:
                assert span.seq in self.started, "nobody told the last stage how to sample"
            at = sum(one.count for one in step.batch.spans[: step.batch.spans.index(span)])
            expected = sequence.tokens[span.start : span.start + span.count]
            assert step.batch.tokens[at : at + span.count].tolist() == expected


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_comes_every_batch_is_valid_and_everybody_ends(data: st.DataObject) -> None:
    limits = Limits(
        context=data.draw(st.integers(20, 300)),
        num_pages=data.draw(st.integers(1, 9)),
        step_tokens=data.draw(st.integers(8, 64)),
        mixed_tokens=data.draw(st.integers(4, 8)),
        max_running=data.draw(st.integers(1, 6)),
        max_prefills=data.draw(st.integers(1, 3)),
    )
    depth = data.draw(st.integers(1, 3))
    scheduler, stage = Scheduler(limits, depth), Stage(limits)
    open_now: list[Sequence] = []
    flight: deque[Step] = deque()
    arrivals = data.draw(st.lists(st.tuples(st.integers(1, 250), st.integers(1, 60)), max_size=8))
    ended = 0
    for turn in range(4000):
        if arrivals and (turn % 3 == 0 or not open_now):
            num_prompt, max_tokens = arrivals.pop()
            try:
                open_now.append(scheduler.add(request(num_prompt, max_tokens)))
            except ContextLengthError:
                assert num_prompt + 1 > limits.max_tokens
                ended += 1
        if open_now and data.draw(st.integers(0, 60)) == 0:
            scheduler.remove(open_now.pop(data.draw(st.integers(0, len(open_now) - 1))))
            ended += 1
        step = scheduler.schedule() if len(flight) < depth else None
        if step is not None:
            stage.take(step)
            assert step.batch.num_tokens <= limits.step_tokens + limits.max_running
            assert len(scheduler.running) <= limits.max_running
            flight.append(step)
        if flight and (step is None or len(flight) == depth):
            for sequence in answer(scheduler, flight.popleft()):
                assert len(sequence.tokens) == sequence.limit
                open_now.remove(sequence)
                ended += 1
        if not (arrivals or open_now or flight):
            break
        assert step or flight or not open_now or turn < 3999, "nothing can be sent, and nothing is under way"
    assert not (scheduler.running or scheduler.waiting)
    assert scheduler.pages_used == 0


def test_decodes_never_wait_for_a_prompt() -> None:
    scheduler = Scheduler(Limits(context=4000, num_pages=200, step_tokens=128, mixed_tokens=16))
    streams = [scheduler.add(request(3, 200)) for _ in range(3)]
    while not all(sequence.is_decoding for sequence in streams):
        answer(scheduler, scheduler.schedule())  # pyright: ignore[reportArgumentType]
    scheduler.add(request(1000, 5))
    for _ in range(40):
        step = scheduler.schedule()
        assert step is not None
        assert {id(one) for one in streams} <= {id(one) for one in step.sequences}
        assert step.batch.num_tokens <= 3 + 16
        answer(scheduler, step)


def test_a_prompt_alone_gets_the_whole_step() -> None:
    scheduler = Scheduler(Limits(context=4000, num_pages=200, step_tokens=128, mixed_tokens=16))
    scheduler.add(request(300))
    counts = []
    for _ in range(3):
        step = scheduler.schedule()
        assert step is not None
        counts.append(step.batch.num_tokens)
        answer(scheduler, step)
    assert counts == [128, 128, 44]


def test_prompts_share_a_step_and_a_short_one_is_not_held_up() -> None:
    scheduler = Scheduler(Limits(context=4000, num_pages=200, step_tokens=120, max_prefills=3))
    long, other, short = (scheduler.add(request(n)) for n in (1000, 900, 10))
    step = scheduler.schedule()
    assert step is not None
    taken = {sequence.num_prompt: span.count for sequence, span in zip(step.sequences, step.batch.spans, strict=True)}
    assert taken == {1000: 40, 900: 40, 10: 10}
    answer(scheduler, step)
    assert short.is_decoding
    assert not long.is_decoding and not other.is_decoding


def test_admission_is_in_order_of_arrival() -> None:
    scheduler = Scheduler(Limits(context=300, num_pages=10, max_running=8))
    first, big, small = scheduler.add(request(100)), scheduler.add(request(250)), scheduler.add(request(5))
    scheduler.schedule()
    assert scheduler.running == [first]  # the big one does not fit beside it, and the small one does not overtake
    assert list(scheduler.waiting) == [big, small]
    scheduler.remove(first)
    scheduler.schedule()
    assert scheduler.running[0] is big


def test_the_youngest_gives_way_and_starts_again_with_its_history() -> None:
    scheduler = Scheduler(Limits(context=200, num_pages=3, step_tokens=64))
    old, young = scheduler.add(request(30, 60)), scheduler.add(request(30, 60))
    stage = Stage(scheduler.limits)
    while not scheduler.num_preemptions:
        step = scheduler.schedule()
        assert step is not None
        stage.take(step)
        answer(scheduler, step)
    assert scheduler.running == [old]
    assert list(scheduler.waiting) == [young]
    assert young.seq == -1
    num_tokens = len(young.tokens)
    assert num_tokens > 30
    while old in scheduler.running:
        step = scheduler.schedule()
        assert step is not None
        stage.take(step)
        answer(scheduler, step)
    step = scheduler.schedule()
    assert step is not None
    stage.take(step)
    assert step.sequences == (young,)
    assert step.batch.spans[0].start == 0
    assert step.batch.spans[0].count == num_tokens
    assert [(start.prompt, len(start.output)) for start in step.starts] == [(young.request.prompt, num_tokens - 30)]


def test_drops_of_a_lost_step_go_again() -> None:
    scheduler = Scheduler(Limits(context=200, num_pages=10))
    gone, stays = scheduler.add(request(4)), scheduler.add(request(4))
    first = scheduler.schedule()
    assert first is not None
    scheduler.remove(gone)
    scheduler.sampled(stays, 1)
    lost = scheduler.schedule()
    assert lost is not None
    assert lost.batch.commands == (Drop(0),)
    scheduler.lost(lost)
    scheduler.restart(stays)
    again = scheduler.schedule()
    assert again is not None
    assert set(again.batch.commands) == {Drop(0), Drop(1)}
    assert [(span.seq, span.start, span.count) for span in again.batch.spans] == [(2, 0, 5)]


def test_a_removed_sequence_is_dropped_with_the_next_step() -> None:
    scheduler = Scheduler(Limits(context=200, num_pages=10))
    gone, stays = scheduler.add(request(40)), scheduler.add(request(40))
    first = scheduler.schedule()
    assert first is not None
    seq = gone.seq
    scheduler.remove(gone)
    scheduler.sampled(stays, 1)
    step = scheduler.schedule()
    assert step is not None
    assert step.batch.commands == (Drop(seq),)
    assert step.sequences == (stays,)
    waiting = scheduler.add(request(5))
    scheduler.remove(waiting)
    assert not scheduler.waiting


@pytest.mark.parametrize(
    ("num_stages", "num_streams", "sizes"), [(3, 6, {2}), (2, 5, {3, 2}), (3, 1, {1}), (1, 6, {6})]
)
def test_streams_take_turns_so_that_every_stage_has_work(num_stages: int, num_streams: int, sizes: set[int]) -> None:
    scheduler = Scheduler(Limits(context=500, num_pages=100), num_stages)
    streams = [scheduler.add(request(2, 100)) for _ in range(num_streams)]
    flight: deque[Step] = deque()
    turns = dict.fromkeys(streams, 0)
    for turn in range(60):
        step = scheduler.schedule() if len(flight) < num_stages else None
        if step is not None:
            flight.append(step)
        if step is None or len(flight) == num_stages:
            done = flight.popleft()
            answer(scheduler, done)
            if turn >= 20:  # the prompts came together; the streams have spread by now
                assert len(done.sequences) in sizes
                for sequence in done.sequences:
                    turns[sequence] += 1
    assert min(turns.values()) > 0
    assert max(turns.values()) - min(turns.values()) <= 1


@pytest.mark.parametrize(("num_prompt", "fits"), [(99, True), (100, False), (5000, False)])
def test_a_prompt_needs_room_for_one_token_of_answer(num_prompt: int, fits: bool) -> None:
    scheduler = Scheduler(Limits(context=100, num_pages=50))
    if fits:
        assert scheduler.add(request(num_prompt, 50)).limit == 100
        return
    with pytest.raises(ContextLengthError, match="maximum context length is 100 tokens"):
        scheduler.add(request(num_prompt))
