"""The engine loop. One turn: hear what people want, decide a step, send it into the pipeline, take in what came out.

It runs in a thread of its own and keeps as many steps in flight as the pipeline has stages. Requests come in and events
go out by queue; nothing else is shared.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from node.engine.generation import Generation, blocking_events
from node.engine.live import Live
from node.engine.pipeline import Pipeline, Result
from node.engine.scheduler import Limits, Scheduler, Step, check_length
from node.engine.sequence import Event, Finished, Request
from node.engine.stops import StreamDecoder
from node.errors import EngineError, QueueFullError, RequestError
from node.worker import Sampled, StageFailed, StepMessage

log = logging.getLogger(__name__)

_IDLE_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the start, and what is going on now."""

    running: int
    waiting: int
    kv_pages_used: int
    kv_pages: int
    steps: int
    prefill_tokens: int
    decode_tokens: int
    preemptions: int
    finished: int
    failed: int


class Engine:
    """Serves one deployment. `start` before the first request, `close` at the end."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        decoder_factory: Callable[[], StreamDecoder],
        limits: Limits,
        max_waiting: int = 64,
    ) -> None:
        self.limits = limits
        self._pipeline = pipeline
        self._decoder_factory = decoder_factory
        self._max_open = limits.max_running + max_waiting
        self._scheduler = Scheduler(limits)
        self._inbox: queue.SimpleQueue[Live | None] = queue.SimpleQueue()
        self._live: dict[int, Live] = {}  # by id() of the scheduler's sequence
        self._in_flight: deque[tuple[int, Step, tuple[int, ...]]] = deque()
        self._lock = threading.Lock()
        self._num_open = 0
        self._steps = self._prefill_tokens = self._decode_tokens = self._finished = self._failed = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> Generation:
        """Queue a request; call it inside a running asyncio loop and iterate what it returns there.

        Raises ContextLengthError, RequestError, QueueFullError or EngineError (closed).
        """
        generation = Generation.in_running_loop()
        live = self._open(request, generation.put)
        generation.cancel_with(lambda: self._cancel(live))
        return generation

    def generate(self, request: Request) -> Iterator[Event]:
        """The same for callers without asyncio: blocks for each event. Leaving the loop early cancels."""
        put, events = blocking_events()
        live = self._open(request, put)
        return events(lambda: self._cancel(live))

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        with self._lock:
            queued = self._num_open - len(scheduler.running) - len(scheduler.waiting)
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + max(0, queued),
            kv_pages_used=scheduler.pages_used,
            kv_pages=self.limits.num_pages,
            steps=self._steps,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            preemptions=scheduler.num_preemptions,
            finished=self._finished,
            failed=self._failed,
        )

    def close(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, give running ones `drain_s` seconds, cancel the rest, free everything."""
        self._closing = True
        deadline = time.monotonic() + drain_s
        while self._num_open and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(0.02)
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()
        self._pipeline.close()

    def _open(self, request: Request, put: Callable[[Event], None]) -> Live:
        if not request.prompt:
            raise RequestError("The prompt is empty.", "Send at least one token.", param="prompt")
        if request.max_tokens < 1:
            raise RequestError(f"max_tokens is {request.max_tokens}.", "Ask for at least one.", param="max_tokens")
        check_length(request, self.limits)
        live = Live(request, put, self._decoder_factory())
        with self._lock:
            if self._closing:
                raise EngineError("The engine is shutting down.", "Send the request again in a moment.")
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
        step = self._scheduler.schedule() if len(self._in_flight) < self._pipeline.num_stages else None
        if step is not None:
            self._send(step)
        if self._in_flight and (step is None or len(self._in_flight) == self._pipeline.num_stages):
            result = self._pipeline.recv(_IDLE_POLL_S)
            if result is not None:
                self._take_in(result)

    def _listen(self) -> bool:
        """Take in requests and cancellations; waits when there is nothing else to do. False when it is time to stop."""
        is_idle = not (self._in_flight or self._scheduler.running or self._scheduler.waiting)
        while is_idle or not self._inbox.empty():
            live = self._inbox.get()
            if live is None:
                return False
            if live.is_cancelled:
                if not live.is_finished:
                    self._finish(live, "cancelled")
            else:
                live.sequence = self._scheduler.add(live.request)
                self._live[id(live.sequence)] = live
            is_idle = is_idle and not self._scheduler.waiting
        return True

    def _send(self, step: Step) -> None:
        self._steps += 1
        now = time.monotonic()
        for sequence in step.sequences:
            self._live[id(sequence)].sent_first(now)
        self._in_flight.append((self._steps, step, tuple(sequence.seq for sequence in step.sequences)))
        self._pipeline.send(StepMessage(self._steps, step.batch, step.starts))

    def _take_in(self, result: Result) -> None:
        number, step, seqs = self._in_flight.popleft()
        if result.step != number:
            raise EngineError(f"Step {result.step} came back where step {number} was due.", "Please report it.")
        if isinstance(result, StageFailed):
            for sequence, seq in zip(step.sequences, seqs, strict=True):
                if sequence.seq == seq:
                    self._finish(self._live[id(sequence)], "error", result.error)
            return
        self._count(step)
        self._deliver(result, step, seqs)

    def _deliver(self, result: Sampled, step: Step, seqs: tuple[int, ...]) -> None:
        sampled = {seq: (token, logprob) for seq, token, logprob in result.tokens}
        for sequence, seq, span in zip(step.sequences, seqs, step.batch.spans, strict=True):
            if sequence.seq != seq:
                continue  # cancelled, or preempted: it will be computed again, to the same token
            live = self._live[id(sequence)]
            if seq not in sampled:
                live.progress(span.start + span.count)
                continue
            token, logprob = sampled[seq]
            self._scheduler.sampled(sequence, token)
            reason = live.token(token, logprob, is_full=sequence.is_full)
            if reason:
                self._finish(live, reason)

    def _finish(self, live: Live, reason: str, error: str = "") -> None:
        if live.sequence is not None:
            self._scheduler.remove(live.sequence)
            self._live.pop(id(live.sequence), None)
        self._failed += reason == "error"
        self._finished += reason != "error"
        with self._lock:
            self._num_open -= 1
        live.finish(Finished(reason, live.usage(), live.text.stopped, error))  # pyright: ignore[reportArgumentType]

    def _fail_all(self, error: str) -> None:
        self._in_flight.clear()
        for live in list(self._live.values()):
            self._finish(live, "error", error)

    def _count(self, step: Step) -> None:
        for sequence, span in zip(step.sequences, step.batch.spans, strict=True):
            if span.count == 1 and span.start >= sequence.num_prompt:
                self._decode_tokens += 1
            else:
                self._prefill_tokens += span.count
