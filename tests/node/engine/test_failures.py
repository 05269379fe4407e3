"""What fails takes only its own with it: the others' tokens stay exact, and every stage's books stay in step."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterable

import pytest

from backends.base import Batch
from node.engine.engine import Engine
from node.engine.pipeline import Result
from node.engine.scheduler import Limits
from node.engine.sequence import Event, Request
from node.worker import Stage, StageFailed, StepMessage
from tests.fakes import FakeTokenizer, HashRunner, engine_of, hash_stages, last, request, tokens_of

VOCAB = 1257


class InTurn:
    """Several stages without threads: a step runs through all of them when it is received, so every run is the same."""

    def __init__(self, runners: list[HashRunner]) -> None:
        self.num_stages = len(runners)
        self._stages = [Stage(runner, is_last=runner.is_last) for runner in runners]
        self._sent: deque[StepMessage] = deque()

    def send(self, message: StepMessage) -> None:
        self._sent.append(message)

    def recv(self, timeout: float | None = None) -> Result | None:
        message: StepMessage | Result | None = self._sent.popleft() if self._sent else None
        for stage in self._stages:
            if isinstance(message, StepMessage | StageFailed):
                message = stage.handle(message)
        assert not isinstance(message, StepMessage)
        return message

    def close(self) -> None:
        for stage in self._stages:
            stage.close()


def in_turn(runners: list[HashRunner], **limits: int) -> Engine:
    return Engine(
        InTurn(runners),
        decoder_factory=FakeTokenizer(str(i) for i in range(1000)).decoder,
        limits=Limits(context=1024, num_pages=runners[0].pool.num_blocks, **limits),
    )


def exact(requests: Iterable[Request]) -> list[list[int]]:
    with engine_of(hash_stages(1, vocab_size=VOCAB)) as engine:
        return [tokens_of(engine.generate(one)) for one in requests]


def test_steps_behind_a_failure_are_computed_again() -> None:
    streams = [request([5, 6, i], 60, id=str(i)) for i in (1, 2)]
    bad = request([3] * 100, 5, id="bad")
    runners = hash_stages(3, vocab_size=VOCAB)
    engine = in_turn(runners, mixed_tokens=10)
    opened: list[Iterable[Event]] = []

    def fail_on_the_first_chunk(batch: Batch) -> None:
        if len(runners[1].batches) == 20:
            opened.append(engine.generate(bad))
        if any(span.start == 0 and span.count == 10 for span in batch.spans):
            raise RuntimeError("a bit flipped")

    runners[1].before = fail_on_the_first_chunk
    iterations = [engine.generate(one) for one in streams]
    engine.start()
    ends = [list(events) for events in iterations]
    bad_end = last(list(opened[0]))
    stats = engine.stats()
    engine.close()
    assert (bad_end.reason, bad_end.error) == ("error", "a bit flipped")
    # one stream was in the step that failed, the other in one behind it
    assert sorted(last(events).reason for events in ends) == ["error", "length"]
    for events, tokens in zip(ends, exact(streams), strict=True):
        got = tokens_of(events)
        assert got == (tokens if last(events).reason == "length" else tokens[: len(got)])
    assert (stats.failed, stats.finished, stats.kv_pages_used) == (2, 1, 0)
    assert sum(span.start == 0 for batch in runners[0].batches for span in batch.spans) == 4  # one came twice


@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("seed", range(4))
def test_stages_that_fail_now_and_then(stage: int, seed: int) -> None:
    rng = random.Random(seed)
    requests = [request([rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 80))], 30) for _ in range(20)]
    expected = exact(requests)
    runners = hash_stages(3, vocab_size=VOCAB, num_pages=12)

    def fail_now_and_then(batch: Batch) -> None:
        if rng.random() < 0.01:
            raise RuntimeError("the dice said so")

    runners[stage].before = fail_now_and_then
    engine = in_turn(runners, step_tokens=32, mixed_tokens=9, max_running=6)
    iterations = [engine.generate(one) for one in requests]
    engine.start()
    ends = [list(events) for events in iterations]
    runners[stage].before = None
    assert tokens_of(engine.generate(requests[0])) == expected[0]
    assert tokens_of(engine.generate(requests[1])) == expected[1]
    stats = engine.stats()
    engine.close()
    failed = 0
    for events, tokens in zip(ends, expected, strict=True):
        got = tokens_of(events)
        if last(events).reason == "error":
            failed += 1
            assert last(events).error == "the dice said so"
            assert got == tokens[: len(got)]
        else:
            assert got == tokens
    assert 0 < failed < len(requests)
    assert (stats.failed, stats.kv_pages_used) == (failed, 0)
    for runner in runners:  # the last request's alone: all before it was dropped everywhere
        assert len(runner.pool.sequences()) == 1


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_stage_that_always_fails_ends_everybody(num_stages: int) -> None:
    def fail(batch: Batch) -> None:
        raise RuntimeError("no power")

    runners = hash_stages(num_stages, vocab_size=VOCAB)
    runners[-1].before = fail
    engine = in_turn(runners, step_tokens=32, max_running=3)
    iterations = [engine.generate(request([i] * 40, 5)) for i in range(1, 9)]
    engine.start()
    for events in iterations:
        end = last(list(events))
        assert (end.reason, end.error) == ("error", "no power")
    engine.close()


def test_a_decoder_that_fails_ends_its_requests_and_not_the_service() -> None:
    class Broken:
        def push(self, ids: Iterable[int]) -> str:
            raise ValueError("no such piece")

        flush = push  # pyright: ignore

    class Tokenizer(FakeTokenizer):
        broken = True

        def decoder(self):  # pyright: ignore
            return Broken() if self.broken else super().decoder()

    tokenizer = Tokenizer(str(i) for i in range(1000))
    with engine_of([HashRunner(vocab_size=VOCAB)], tokenizer=tokenizer) as engine:
        end = last(list(engine.generate(request([1, 2], 5))))
        assert end.reason == "error"
        assert "no such piece" in end.error
        tokenizer.broken = False
        assert len(tokens_of(engine.generate(request([1, 2], 5)))) == 5


def test_a_client_whose_loop_ended_harms_nobody() -> None:
    with engine_of([HashRunner(vocab_size=VOCAB)]) as engine:

        async def leave_without_a_word() -> None:
            engine.submit(request([1, 2, 3], 400))

        expected = tokens_of(engine.generate(request([4, 5], 30)))
        asyncio.run(leave_without_a_word())
        assert tokens_of(engine.generate(request([4, 5], 30))) == expected


@pytest.mark.parametrize("num_stages", [1, 2])
def test_an_engine_that_never_started_sends_everybody_home(num_stages: int) -> None:
    runners = hash_stages(num_stages, vocab_size=VOCAB)
    with engine_of(runners) as engine:
        pass
    engine = Engine(InTurn(runners), decoder_factory=FakeTokenizer().decoder, limits=Limits(context=64, num_pages=4))
    iteration = engine.generate(request([1, 2], 5))
    engine.close()
    engine.close()
    assert last(list(iteration)).reason == "cancelled"
    assert [runner.closed for runner in runners] == [2] * num_stages


def test_draining_lets_what_runs_finish() -> None:
    with engine_of([HashRunner(vocab_size=VOCAB)]) as engine:
        iteration = engine.generate(request([1, 2], 50))
        engine.close(drain_s=20)
        events = list(iteration)
    assert last(events).reason == "length"
    assert len(tokens_of(events)) == 50
