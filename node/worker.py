"""A stage at work: receive a step, run it, send it on; at the last stage sample and answer the head.

`Stage` is the work itself, `Worker` a thread that does it between two links. One process with one stage needs no
thread: the engine loop calls its `Stage` directly.
"""

from __future__ import annotations

import logging
import threading
from array import array
from dataclasses import dataclass

import numpy as np

from backends.base import Batch, Drop, Runner
from node.dataplane.links import Link, LinkClosed
from node.engine.sample import sample
from node.engine.sequence import Sampling, TokenLogprob
from node.errors import EngineError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """What the last stage must know to sample for `seq`. Sent once, with the step that starts or resumes it there."""

    seq: int
    sampling: Sampling
    prompt: tuple[int, ...]
    output: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepMessage:
    """One step on its way down the pipeline. `x` is None at the first stage."""

    step: int
    batch: Batch
    starts: tuple[SequenceStart, ...] = ()
    x: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """The end of a step: (sequence, token, its logprob if asked for) of every span that wanted one, and (sequence,
    reason) of those that could not be sampled."""

    step: int
    tokens: tuple[tuple[int, int, TokenLogprob | None], ...]
    failed: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class StageFailed:
    """A step that did not come through. The stage lives on; what the step carried is lost, its commands included."""

    step: int
    error: str


@dataclass(slots=True)
class _History:
    sampling: Sampling
    prompt: array[int]
    output: array[int]


class Stage:
    """One runner and, at the last stage, the histories that sampling needs."""

    def __init__(self, runner: Runner, *, is_last: bool) -> None:
        self._runner = runner
        self._is_last = is_last
        self._histories: dict[int, _History] = {}

    def handle(self, message: StepMessage | StageFailed) -> StepMessage | Sampled | StageFailed:
        if isinstance(message, StageFailed):
            return message  # an earlier stage failed: the news travels on to the head
        try:
            return self._step(message)
        except Exception as error:  # whatever a backend raises must end as words at the head, not as a dead thread
            log.exception("step %d failed", message.step)
            return StageFailed(message.step, str(error) or type(error).__name__)

    def _step(self, message: StepMessage) -> StepMessage | Sampled:
        batch = message.batch
        for command in batch.commands:
            if isinstance(command, Drop):
                self._histories.pop(command.seq, None)
        if self._is_last:
            for start in message.starts:
                self._histories[start.seq] = _History(
                    start.sampling, array("q", start.prompt), array("q", start.output)
                )
        out = self._runner.step(batch, message.x)
        if not self._is_last:
            return StepMessage(message.step, batch, message.starts, out)
        tokens, failed, row = [], [], 0
        for span in batch.spans:
            row += span.num_logits
            if span.num_logits:
                try:
                    tokens.append((span.seq, *self._sample(span.seq, out[row - 1])))
                except EngineError as error:  # one sequence's trouble is not its neighbours'
                    failed.append((span.seq, str(error)))
        return Sampled(message.step, tuple(tokens), tuple(failed))

    def _sample(self, seq: int, logits: np.ndarray) -> tuple[int, TokenLogprob | None]:
        h = self._histories[seq]
        token, logprob = sample(logits, h.sampling, h.prompt, h.output, len(h.prompt) + len(h.output))
        h.output.append(token)
        return token, logprob

    def close(self) -> None:
        self._runner.close()


class Worker(threading.Thread):
    """Carries messages from `inbound` through a stage to `outbound` until either is closed."""

    def __init__(self, stage: Stage, inbound: Link, outbound: Link, *, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._stage, self._inbound, self._outbound = stage, inbound, outbound

    def run(self) -> None:
        try:
            while True:
                self._outbound.send(self._stage.handle(self._inbound.recv()))
        except LinkClosed:
            log.debug("%s: link closed", self.name)
        finally:
            self._outbound.close()
