"""The engine loop. One turn: hear what people want, decide a step, send it into the pipeline, take in what came out.

It runs in a thread of its own and keeps as many steps in flight as the pipeline has stages. Requests come in and events
go out by queue; nothing else is shared.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from backends.base import Span
from node.engine.checks import check_length, check_request
from node.engine.courier import Courier
from node.engine.generation import BlockingGeneration, Generation
from node.engine.live import Live
from node.engine.meter import Meter
from node.engine.pipeline import Pipeline, Result
from node.engine.scheduler import Limits, Scheduler, Step
from node.engine.sequence import Event, FinishReason, Request, Sequence
from node.engine.stops import StreamDecoder
from node.errors import LoadingError, QueueFullError
from node.worker import Sampled, StageFailed, StepMessage

log = logging.getLogger(__name__)

_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the start, and what is going on now. Rates are of the last ten seconds."""

    running: int
    waiting: int
    kv_pages_used: int
    kv_pages: int
    steps: int
    prefill_tokens: int
    decode_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    preemptions: int
    finished: int
    failed: int


class Engine:
    """Serves one deployment. `start` before the first request, `close` at the end."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        decoder_factory: Callable[..., StreamDecoder],
        limits: Limits,
        max_waiting: int = 64,
        vocab_size: int | None = None,
    ) -> None:
        """`vocab_size` is the number of logits; requests that name tokens beyond it are refused."""
        self.limits = limits
        self._pipeline = pipeline
        self._decoder_factory = decoder_factory
        self._max_open = limits.max_running + max_waiting
        self._vocab_size = vocab_size
        self._scheduler = Scheduler(limits, pipeline.num_stages)
        self._courier = Courier()
        self._inbox: queue.SimpleQueue[Live | None] = queue.SimpleQueue()
        self._live: dict[Sequence, Live] = {}
        self._in_flight: dict[int, Step] = {}
        self._is_recovering = False
        self._num_steps = self._num_prefilled = self._num_decoded = self._num_finished = self._num_failed = 0
        self._prefill_meter, self._decode_meter = Meter(), Meter()
        self._lock = threading.Lock()  # for the two below, and for what goes into the inbox before the end
        self._num_open = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._courier.start()
        self._thread.start()

    def submit(self, request: Request) -> Generation:
        """Queue a request; call it inside a running asyncio loop and iterate what it returns there.

        Raises ContextLengthError, RequestError, QueueFullError or LoadingError (closed).
        """
        generation = Generation(asyncio.get_running_loop(), self._courier)
        live = self._open(request, generation.put)
        generation.cancel_with(lambda: self._cancel(live))
        return generation

    def generate(self, request: Request) -> BlockingGeneration:
        """The same for callers without asyncio: blocks for each event. Leaving the loop early cancels."""
        generation = BlockingGeneration()
        live = self._open(request, generation.put)
        generation.cancel_with(lambda: self._cancel(live))
        return generation

    @property
    def num_waiting(self) -> int:
        return max(0, self._num_open - len(self._scheduler.running))

    def stats(self) -> EngineStats:
        now = time.monotonic()
        return EngineStats(
            running=len(self._scheduler.running),
            waiting=self.num_waiting,
            kv_pages_used=self._scheduler.pages_used,
            kv_pages=self.limits.num_pages,
            steps=self._num_steps,
            prefill_tokens=self._num_prefilled,
            decode_tokens=self._num_decoded,
            prefill_tokens_per_s=self._prefill_meter.rate(now),
            decode_tokens_per_s=self._decode_meter.rate(now),
            preemptions=self._scheduler.num_preemptions,
            finished=self._num_finished,
            failed=self._num_failed,
        )

    def close(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, give running ones `drain_s` seconds, cancel the rest, free everything. Idempotent."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        deadline = time.monotonic() + drain_s
        while self._num_open and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(0.02)
        self._inbox.put(None)
        if self._thread.ident is None:
            self._run()  # never started: it has nothing to do but to send everybody home
        else:
            self._thread.join()
        self._courier.close()
        self._pipeline.close()

    def _open(self, request: Request, put: Callable[[Event], None]) -> Live:
        check_request(request, self._vocab_size)
        check_length(request, self.limits.max_tokens)
        decoder = self._decoder_factory(continuing=True) if request.continuing else self._decoder_factory()
        live = Live(request, put, decoder)
        with self._lock:
            if self._is_closing:
                raise LoadingError("This node is shutting down.", "Send the request again in a moment.")
            if self._num_open >= self._max_open:
                raise QueueFullError(f"{self._num_open} requests are being served or wait already.", "Try again later.")
            self._num_open += 1
            self._inbox.put(live)
        return live

    def _cancel(self, live: Live) -> None:
        live.is_cancelled = True
        self._inbox.put(live)

    # The loop's own thread from here on.

    def _run(self) -> None:
        while self._listen():
            try:
                self._turn()
            except Exception as error:  # a fault of ours must reach the clients as an error, and not end the service
                log.exception("the engine loop failed")
                self._fail_all(f"The engine failed: {error}")
        for live in list(self._live.values()):
            self._finish(live, "cancelled")

    def _turn(self) -> None:
        self._is_recovering = self._is_recovering and bool(self._in_flight)
        is_full = self._is_recovering or len(self._in_flight) == self._pipeline.num_stages
        step = None if is_full else self._scheduler.schedule()
        if step is not None:
            self._send(step)
        if step is None or len(self._in_flight) == self._pipeline.num_stages:
            result = self._pipeline.recv(_POLL_S)
            if result is not None:
                self._take_in(result)

    def _listen(self) -> bool:
        """Take in requests and cancellations; waits when there is nothing else to do. False when it is time to stop."""
        is_idle = not (self._in_flight or self._live)
        while is_idle or not self._inbox.empty():
            live = self._inbox.get()
            if live is None:
                return False
            if not live.is_cancelled:
                live.sequence = self._scheduler.add(live.request)
                self._live[live.sequence] = live
            elif not live.is_finished:
                self._finish(live, "cancelled")
            is_idle = is_idle and not self._live
        return True

    def _send(self, step: Step) -> None:
        self._num_steps += 1
        now = time.monotonic()
        for sequence in step.sequences:
            self._live[sequence].sent(now)
        self._in_flight[self._num_steps] = step
        self._pipeline.send(StepMessage(self._num_steps, step.batch, step.starts))

    def _take_in(self, result: Result) -> None:
        step = self._in_flight.pop(result.step, None)
        if step is None:
            log.debug("step %d came back after its requests had failed", result.step)
        elif isinstance(result, StageFailed):
            self._lose(step, result)
        else:
            self._deliver(step, result)

    def _deliver(self, step: Step, result: Sampled) -> None:
        self._count(step)
        sampled = {seq: (token, logprob) for seq, token, logprob in result.tokens}
        failed = dict(result.failed)
        for sequence, span in _still_there(step):
            live = self._live[sequence]
            if span.seq in failed:
                self._finish(live, "error", failed[span.seq])
            elif span.seq in sampled:
                token, logprob = sampled[span.seq]
                self._scheduler.sampled(sequence, token)
                reason = live.token(token, logprob, is_full=sequence.is_full)
                if reason is not None:
                    self._finish(live, reason)
            else:
                live.progress(span.start + span.count)

    def _lose(self, step: Step, result: StageFailed) -> None:
        """A stage failed. Whoever was in that step ends with its error. But steps that were under way behind it build
        on what was lost and may fail for that alone: until all of those are back no other is sent, and who was in them
        is computed again."""
        self._scheduler.lost(step)
        for sequence, _ in reversed(list(_still_there(step))):
            if self._is_recovering:
                self._scheduler.restart(sequence)
            else:
                self._finish(self._live[sequence], "error", result.error)
        self._is_recovering = True

    def _finish(self, live: Live, reason: FinishReason, error: str = "") -> None:
        if live.sequence is not None:
            self._scheduler.remove(live.sequence)
            self._live.pop(live.sequence, None)
        if reason == "error":
            self._num_failed += 1
        else:
            self._num_finished += 1
        with self._lock:
            self._num_open -= 1
        live.finish(reason, error)

    def _fail_all(self, error: str) -> None:
        for step in self._in_flight.values():
            self._scheduler.lost(step)
        self._in_flight.clear()
        for live in list(self._live.values()):
            self._finish(live, "error", error)

    def _count(self, step: Step) -> None:
        num_prefilled = len(step.batch.tokens) - step.num_decodes
        now = time.monotonic()
        if step.num_decodes:
            self._num_decoded += step.num_decodes
            self._decode_meter.add(step.num_decodes, now)
        if num_prefilled:
            self._num_prefilled += num_prefilled
            self._prefill_meter.add(num_prefilled, now)


def _still_there(step: Step) -> Iterator[tuple[Sequence, Span]]:
    """Those of a step that were not cancelled or preempted meanwhile (who then come to the same token again)."""
    for sequence, span in zip(step.sequences, step.batch.spans, strict=True):
        if sequence.seq == span.seq:
            yield sequence, span
