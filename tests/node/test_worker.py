"""A stage and its worker: what goes in, what comes out, and that neither dies of a failing runner."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from backends.base import Batch, Drop, Span
from node.dataplane.links import LinkClosed, LocalLink
from node.engine.sample import sample
from node.engine.sequence import Sampling
from node.worker import Sampled, SequenceStart, Stage, StageFailed, StepMessage, Worker
from tests.fakes import GREEDY, FakeRunner, HashRunner, ScriptedRunner, hash_stages

DRAWN = Sampling(temperature=1.0, seed=5, repetition_penalty=1.3, logprobs=2)


def batch(*spans: tuple[int, int, int, int], tokens: list[int], commands: tuple[Drop, ...] = ()) -> Batch:
    return Batch(tuple(Span(*span) for span in spans), np.array(tokens, np.int32), commands)


def test_the_last_stage_keeps_the_history_by_itself() -> None:
    prompt, output = (3, 1, 4), []
    stage, runner = Stage(HashRunner(), is_last=True), HashRunner()
    starts = (SequenceStart(7, DRAWN, prompt, ()),)
    fed, at = list(prompt), 0
    for step in range(6):
        b = batch((7, at, len(fed), 1), tokens=fed)
        result = stage.handle(StepMessage(step, b, starts))
        expected = sample(runner.step(b, None)[0], DRAWN, prompt, output, len(prompt) + len(output))
        assert result == Sampled(step, ((7, *expected),))
        output.append(expected[0])
        at, fed, starts = at + len(fed), [expected[0]], ()


def test_a_sequence_resumes_with_the_history_it_is_given() -> None:
    prompt = (3, 1, 4)
    whole = [*prompt, 11, 12]
    stage, runner = Stage(HashRunner(), is_last=True), HashRunner()
    b = batch((2, 0, 5, 1), tokens=whole)
    result = stage.handle(StepMessage(0, b, (SequenceStart(2, DRAWN, prompt, (11, 12)),)))
    assert result == Sampled(0, ((2, *sample(runner.step(b, None)[0], DRAWN, prompt, [11, 12], 5)),))


def test_only_the_last_row_of_a_span_is_sampled() -> None:
    stage = Stage(ScriptedRunner({(1,): [5, 6, 7], (2,): [8, 9]}, vocab_size=20), is_last=True)
    starts = (SequenceStart(0, GREEDY, (1,), ()), SequenceStart(1, GREEDY, (2,), ()))
    b = batch((0, 0, 3, 2), (1, 0, 2, 1), (2, 0, 1, 0), tokens=[1, 5, 6, 2, 8, 3])
    assert stage.handle(StepMessage(0, b, starts)) == Sampled(0, ((0, 7, None), (1, 9, None)))


def test_a_failing_runner_is_told_to_the_head_and_the_stage_lives_on() -> None:
    def fail_once(b: Batch) -> None:
        if len(runner.batches) == 1:
            raise ValueError("the matrix is on fire")

    runner = ScriptedRunner({(1,): [5]}, vocab_size=9, before=fail_once)
    stage = Stage(runner, is_last=True)
    message = StepMessage(0, batch((0, 0, 1, 1), tokens=[1]), (SequenceStart(0, GREEDY, (1,), ()),))
    assert stage.handle(message) == StageFailed(0, "the matrix is on fire")
    assert stage.handle(message) == Sampled(0, ((0, 5, None),))


def test_an_error_without_words_is_told_by_its_name() -> None:
    def fail(b: Batch) -> None:
        raise MemoryError

    stage = Stage(HashRunner(before=fail), is_last=True)
    assert stage.handle(StepMessage(4, batch((0, 0, 1, 0), tokens=[1]))) == StageFailed(4, "MemoryError")


def test_a_failure_passes_through_later_stages() -> None:
    stage = Stage(HashRunner(), is_last=True)
    assert stage.handle(StageFailed(3, "gone")) == StageFailed(3, "gone")


def test_logits_that_are_no_numbers_cost_nobody_else_a_token() -> None:
    class Poisoned(FakeRunner):
        def logits(self, contents: object) -> np.ndarray:
            return np.array([np.nan, 0.0] if contents == [(1,)] else [0.0, 9.0], np.float32)

    stage = Stage(Poisoned(vocab_size=2), is_last=True)
    starts = tuple(SequenceStart(seq, GREEDY, (token,), ()) for seq, token in ((0, 0), (1, 1), (2, 0)))
    result = stage.handle(StepMessage(0, batch((0, 0, 1, 1), (1, 0, 1, 1), (2, 0, 1, 1), tokens=[0, 1, 0]), starts))
    assert isinstance(result, Sampled)
    assert result.tokens == ((0, 1, None), (2, 1, None))
    assert [seq for seq, _ in result.failed] == [1]
    assert "not numbers" in result.failed[0][1]


def test_workers_join_stages_into_a_pipeline() -> None:
    whole = Stage(HashRunner(), is_last=True)
    links = [LocalLink() for _ in range(4)]
    workers = [
        Worker(Stage(runner, is_last=runner.is_last), links[i], links[i + 1], name=f"stage-{i}")
        for i, runner in enumerate(hash_stages(3))
    ]
    for worker in workers:
        worker.start()
    starts = (SequenceStart(0, DRAWN, (1, 2, 3), ()),)
    for message in (
        StepMessage(0, batch((0, 0, 2, 0), tokens=[1, 2])),
        StepMessage(1, batch((0, 2, 1, 1), (1, 0, 2, 0), tokens=[3, 8, 9]), starts),
    ):
        links[0].send(message)
        assert links[-1].recv(timeout=20) == whole.handle(message)
    links[0].close()
    for worker in workers:
        worker.join(timeout=20)
        assert not worker.is_alive()
    with pytest.raises(LinkClosed):
        links[-1].recv()


def test_messages_can_cross_a_wire() -> None:
    b = batch((0, 0, 1, 1), tokens=[1], commands=(Drop(3),))
    step = StepMessage(0, b, (SequenceStart(0, DRAWN, (1,), (2,)),), np.ones((1, 4), np.float32))
    copy = pickle.loads(pickle.dumps(step))
    assert (copy.step, copy.starts, copy.batch.spans, copy.batch.commands) == (0, step.starts, b.spans, b.commands)
    assert copy.x.tolist() == [[1.0] * 4] and np.array_equal(copy.batch.tokens, b.tokens)
    for message in (Sampled(1, ((0, 5, None),), ((1, "no"),)), StageFailed(2, "words")):
        assert pickle.loads(pickle.dumps(message)) == message
