"""The loop: exact over any number of stages, fair to everybody, and alive after every kind of failure."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from backends.base import Batch, KVRoom
from backends.cpu.engine import CPUBackend
from backends.weights.open import open_source
from node.engine.engine import Engine
from node.engine.pipeline import pipeline_of
from node.engine.scheduler import Limits
from node.engine.sequence import Event, Finished, Request, Sampling
from node.errors import ContextLengthError, LoadingError, QueueFullError, RequestError
from partitioner.plan import split_evenly
from tests.fakes import (
    FakeTokenizer,
    Gate,
    HashRunner,
    ScriptedRunner,
    engine_of,
    hash_stages,
    last,
    request,
    text_of,
    tokens_of,
)
from tests.models import tiny_arch, write_gguf

VOCAB = 1257  # of the fake tokenizer that `engine_of` takes by default


def ask(engine: Engine, requests: list[Request]) -> list[list[int]]:
    """All at once; the tokens of each."""

    async def one(wanted: Request) -> list[Event]:
        return [event async for event in engine.submit(wanted)]

    async def everybody() -> list[list[Event]]:
        return await asyncio.gather(*(one(wanted) for wanted in requests))

    answers = asyncio.run(everybody())
    assert all(last(events).reason in ("stop", "length") for events in answers), [last(events) for events in answers]
    return [tokens_of(events) for events in answers]


def crowd(num: int, vocab_size: int, *, length: int = 90, answer: int = 25) -> list[Request]:
    rng = np.random.default_rng(num)
    samplings = [
        Sampling(temperature=0),
        Sampling(temperature=0.9, seed=5),
        Sampling(temperature=1.2, top_p=0.8, top_k=50, seed=6),
        Sampling(temperature=0.7, min_p=0.05, presence_penalty=1, repetition_penalty=1.2, seed=7),
    ]
    return [
        request(
            rng.integers(1, vocab_size, rng.integers(1, length)).tolist(),
            answer,
            id=str(i),
            sampling=samplings[i % len(samplings)],
        )
        for i in range(num)
    ]


def alone(requests: list[Request], make: Callable[[], list[HashRunner]]) -> list[list[int]]:
    with engine_of(make()) as engine:
        return [tokens_of(engine.generate(one)) for one in requests]


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_stages_chunks_and_company_change_nothing(num_stages: int) -> None:
    requests = crowd(12, VOCAB)

    def stages() -> list[HashRunner]:
        return hash_stages(num_stages, vocab_size=VOCAB)

    expected = alone(requests, lambda: hash_stages(1, vocab_size=VOCAB))
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    with engine_of(stages()) as engine:
        assert ask(engine, requests) == expected
    with engine_of(stages(), step_tokens=16, mixed_tokens=7, max_running=5) as engine:
        assert ask(engine, requests) == expected


@pytest.mark.parametrize("num_stages", [1, 3])
def test_want_of_room_changes_nothing(num_stages: int) -> None:
    requests = crowd(6, VOCAB, length=60, answer=80)
    expected = alone(requests, lambda: hash_stages(1, vocab_size=VOCAB))
    with engine_of(hash_stages(num_stages, vocab_size=VOCAB, num_pages=6)) as engine:
        assert ask(engine, requests) == expected
        stats = engine.stats()
    assert stats.preemptions > 0
    assert (stats.running, stats.waiting, stats.kv_pages_used, stats.failed) == (0, 0, 0, 0)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_cpu_backend_in_one_two_and_three_stages(family: str, tmp_path: Path) -> None:
    arch = tiny_arch(family)
    source = open_source(write_gguf(tmp_path / "tiny.gguf", arch, "Q4_K_M"))
    requests = crowd(8, arch.vocab_size)
    answers = []
    for num_stages, threads, step_tokens in ((1, 1, 512), (1, 2, 24), (2, 1, 40), (3, 1, 512)):
        shards = split_evenly(arch.num_layers, num_stages)
        runners = [CPUBackend(threads).load(shard, source, KVRoom(40)) for shard in shards]
        engine = Engine(
            pipeline_of(runners),
            decoder_factory=FakeTokenizer(str(i) for i in range(400)).decoder,
            limits=Limits(context=400, num_pages=40, step_tokens=step_tokens),
        )
        engine.start()
        answers.append(ask(engine, requests))
        engine.close()
    source.close()
    assert answers[1:] == answers[:-1]


def scripted(text: str, prompt: str = "p", **options: object) -> tuple[FakeTokenizer, ScriptedRunner, Request]:
    tokenizer = FakeTokenizer()
    ids = tuple(tokenizer.encode(prompt))
    runner = ScriptedRunner({ids: tokenizer.encode(text)}, vocab_size=tokenizer.vocab_size, **options)  # pyright: ignore
    return tokenizer, runner, request(ids, 1000, stop_tokens=frozenset({FakeTokenizer.END}))


def test_text_usage_and_end() -> None:
    tokenizer, runner, wanted = scripted("Grüße 🦜!", "prompt")
    with engine_of([runner], tokenizer=tokenizer) as engine:
        events = list(engine.generate(wanted))
    end = last(events)
    assert text_of(events) == "Grüße 🦜!"
    assert not any("\ufffd" in event.text for event in events if hasattr(event, "text"))  # pyright: ignore
    assert end.reason == "stop"
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (6, len("Grüße 🦜!".encode()) + 1)
    assert min(end.usage.queue_s, end.usage.prefill_s, end.usage.decode_s) >= 0


def test_stop_strings_and_lengths() -> None:
    tokenizer, runner, wanted = scripted("one two three")
    with engine_of([runner], tokenizer=tokenizer) as engine:
        events = list(engine.generate(dataclasses.replace(wanted, stop=("zzz", " thr"))))
        assert text_of(events) == "one two"
        assert (last(events).reason, last(events).stop_sequence) == ("stop", " thr")
        events = list(engine.generate(dataclasses.replace(wanted, max_tokens=5, stop=("tzz",))))
        assert text_of(events) == "one t"  # held back while it might have become a stop string
        assert last(events).reason == "length"


def test_the_end_of_the_text_may_complete_a_stop_string() -> None:
    tokenizer = FakeTokenizer()
    euro = tokenizer.encode("€")
    runner = ScriptedRunner({(1,): euro}, vocab_size=tokenizer.vocab_size)
    with engine_of([runner], tokenizer=tokenizer) as engine:
        events = list(engine.generate(request([1], 2, stop=("\ufffd",))))
        assert (text_of(events), last(events).reason, last(events).stop_sequence) == ("", "stop", "\ufffd")
        events = list(engine.generate(request([1], 2)))
        assert (text_of(events), last(events).reason) == ("\ufffd", "length")


def test_a_script_runs_over_three_stages() -> None:
    tokenizer = FakeTokenizer()
    scripts = {tuple(tokenizer.encode("p")): tokenizer.encode("three stages, one voice")}
    runners = [ScriptedRunner(scripts, vocab_size=257, stage=i, num_stages=3) for i in range(3)]
    with engine_of(runners, tokenizer=tokenizer) as engine:
        events = list(engine.generate(request(tokenizer.encode("p"), 100, stop_tokens=frozenset({tokenizer.END}))))
    assert text_of(events) == "three stages, one voice"
    assert len({runner.num_tokens for runner in runners}) == 1


def test_cancelling_frees_every_stage_with_the_next_step() -> None:
    gate = Gate()
    runners = hash_stages(2, vocab_size=VOCAB)
    runners[0].before = gate
    with engine_of(runners, step_tokens=16) as engine:
        leaving, staying = engine.generate(request([1] * 100, 5)), engine.generate(request([2] * 100, 5))
        gate.wait()
        leaving.cancel()
        gate.open()
        assert len(tokens_of(staying)) == 5
        assert last(list(leaving)).reason == "cancelled"
    for runner in runners:
        assert len(runner.pool.sequences()) == 1


def test_the_context_is_the_end() -> None:
    with engine_of([HashRunner(vocab_size=VOCAB)], context=50) as engine:
        events = list(engine.generate(request(range(1, 41), 1000)))
        assert last(events).reason == "length"
        assert len(tokens_of(events)) == 10
        with pytest.raises(ContextLengthError):
            engine.generate(request(range(1, 51), 5))
        with pytest.raises(RequestError):
            engine.generate(request([], 5))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def test_cancelling_in_every_phase() -> None:
    gate = Gate()
    runner = HashRunner(vocab_size=VOCAB, before=gate)
    ends: list[Event] = []
    with engine_of([runner], max_running=1, step_tokens=16) as engine:

        async def scenario() -> None:
            decoding = engine.submit(request(range(1, 5), 900, id="decoding"))
            await asyncio.to_thread(gate.wait)
            queued = engine.submit(request(range(1, 5), 900, id="queued"))
            queued.cancel()
            gate.let_one_go()
            await asyncio.to_thread(gate.wait)  # it decodes now
            decoding.cancel()
            decoding.cancel()
            gate.let_one_go()
            ends.append([event async for event in decoding][-1])
            ends.append([event async for event in queued][-1])
            prefilling = engine.submit(request(range(1, 100), 900, id="prefilling"))
            await asyncio.to_thread(gate.wait)
            prefilling.cancel()
            gate.let_one_go()
            ends.append([event async for event in prefilling][-1])
            gate.open()
            ends.append([event async for event in engine.submit(request([1, 2], 3))][-1])
            prefilling.cancel()  # after the end it does nothing

        asyncio.run(scenario())
        until(lambda: engine.stats().kv_pages_used == 0)
    assert [end.reason for end in ends if isinstance(end, Finished)] == [
        "cancelled",
        "cancelled",
        "cancelled",
        "length",
    ]
    assert sum(16 in [span.count for span in batch.spans] for batch in runner.batches) == 1  # one chunk, no more


def test_leaving_a_blocking_iteration_cancels() -> None:
    with engine_of([HashRunner(vocab_size=VOCAB)]) as engine:
        for _ in engine.generate(request([1, 2, 3], 900)):
            break
        engine.generate(request([1, 2, 3], 900))  # dropped before it was read at all
        until(lambda: engine.stats().finished == 2)
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.kv_pages_used) == (0, 0, 0)
        assert stats.decode_tokens < 1700


def test_a_full_queue_refuses() -> None:
    gate = Gate()
    with engine_of([HashRunner(vocab_size=VOCAB, before=gate)], max_running=2, max_waiting=1) as engine:
        iterations = [engine.generate(request([1, i], 2)) for i in range(1, 4)]
        with pytest.raises(QueueFullError):
            engine.generate(request([1, 9], 2))
        gate.open()
        assert all(len(tokens_of(list(one))) == 2 for one in iterations)
        assert len(tokens_of(engine.generate(request([1, 9], 2)))) == 2


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_failing_step_takes_only_its_own_with_it(num_stages: int) -> None:
    bad = 77

    def before(batch: Batch) -> None:
        if bad in batch.tokens:
            raise RuntimeError("the stage burnt down")

    expected = alone([request([5, 6, 7], 60)], lambda: hash_stages(1, vocab_size=VOCAB))[0]
    stages = hash_stages(num_stages, vocab_size=VOCAB)
    stages[-1].before = before
    with engine_of(stages, step_tokens=4) as engine:
        events = list(engine.generate(request([1, 2, bad, 3] * 5, 5)))
        assert last(events).reason == "error"
        assert "burnt down" in last(events).error
        for _ in range(2):
            assert tokens_of(engine.generate(request([5, 6, 7], 60))) == expected
        stats = engine.stats()
    assert (stats.failed, stats.kv_pages_used) == (1, 0)


def test_logits_that_are_no_numbers_end_one_request() -> None:
    class Broken(HashRunner):
        def logits(self, contents):  # pyright: ignore
            row = super().logits(contents)
            return np.full_like(row, np.nan) if contents[0] == self.absorb(13, None) else row

    with engine_of([Broken(vocab_size=VOCAB)]) as engine:
        events = list(engine.generate(request([13, 2], 5)))
        assert last(events).reason == "error"
        assert "not numbers" in last(events).error
        assert len(tokens_of(engine.generate(request([14, 2], 5)))) == 5


def test_closing_ends_everything() -> None:
    before = threading.active_count()
    gate = Gate()
    stages = hash_stages(3, vocab_size=VOCAB)
    stages[1].before = gate
    with engine_of(stages) as engine:
        iteration = engine.generate(request([1, 2, 3], 900))
        gate.wait()
        gate.open()
        engine.close()
        assert last(list(iteration)).reason == "cancelled"
        with pytest.raises(LoadingError, match="shutting down"):
            engine.generate(request([1], 1))
    assert threading.active_count() == before
    assert [stage.closed for stage in stages] == [1, 1, 1]


def test_many_threads_and_loops_at_once() -> None:
    requests = crowd(24, VOCAB, length=30, answer=10)
    expected = alone(requests, lambda: hash_stages(1, vocab_size=VOCAB))
    answers: dict[int, list[int]] = {}
    with engine_of(hash_stages(2, vocab_size=VOCAB)) as engine:

        def work(i: int) -> None:
            answers[i] = ask(engine, [requests[i]])[0] if i % 2 else tokens_of(engine.generate(requests[i]))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(requests))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        stats = engine.stats()
    assert [answers[i] for i in range(len(requests))] == expected
    assert stats.finished == len(requests)
    assert stats.decode_tokens == sum(len(tokens) - 1 for tokens in expected)
    assert stats.prefill_tokens == sum(len(one.prompt) for one in requests)
