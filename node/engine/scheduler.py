"""Who takes part in the next step. Pure: ints in, a batch out, no clock and no tensors but the batch's tokens.

Continuous batching: each step carries one token of decoding sequences and chunks of prompts. While somebody decodes,
chunks are small (`mixed_tokens`), so that a new prompt slows streams down but never stops them. Several prompts share a
step's budget evenly, the oldest first. In a pipeline of several stages the decoding sequences take turns, so that every
stage has some of them to work on.

Requests are admitted in order of arrival while their prompt fits the cache; when decoding runs out of room, the
youngest sequence gives its room up and is computed again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from backends.base import PAGE_TOKENS, Batch, Command, Drop, Span
from backends.pool import BlockPool
from node.engine.checks import check_length
from node.engine.sequence import Request, Sequence
from node.errors import KVRoomError
from node.worker import SequenceStart


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """context: prompt and answer together. num_pages: KV room, the same at every stage. step_tokens: most tokens of a
    step. mixed_tokens: most prompt tokens of a step while somebody decodes. max_prefills: prompts that share a step.
    """

    context: int
    num_pages: int
    step_tokens: int = 512
    mixed_tokens: int = 96
    max_running: int = 16
    max_prefills: int = 4

    @property
    def max_tokens(self) -> int:
        """What one sequence can hold at most."""
        return min(self.context, self.num_pages * PAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class Step:
    """A step as decided: what goes down the pipeline, and which sequences took part, in the order of its spans.
    `num_decodes` of its tokens continue an answer, the others are prompts (or are computed again)."""

    batch: Batch
    starts: tuple[SequenceStart, ...]
    sequences: tuple[Sequence, ...]
    num_decodes: int


class Scheduler:
    def __init__(self, limits: Limits, num_stages: int = 1) -> None:
        self.limits = limits
        self.num_stages = num_stages
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._pool = BlockPool(limits.num_pages, PAGE_TOKENS)  # mirrors the room at every stage
        self._commands: list[Command] = []
        self._next_seq = 0

    def add(self, request: Request) -> Sequence:
        """Queue a request. Raises ContextLengthError when it can never run."""
        check_length(request, self.limits.max_tokens)
        limit = min(self.limits.max_tokens, len(request.prompt) + request.max_tokens)
        sequence = Sequence(request, list(request.prompt), limit)
        self.waiting.append(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Finished, cancelled or failed, in whatever phase. Its room comes back with the next step."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._drop(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def restart(self, sequence: Sequence) -> None:
        """Give up what was computed of a running sequence. It waits, before all others, to be computed again."""
        self.running.remove(sequence)
        self._drop(sequence)
        self.waiting.appendleft(sequence)

    def sampled(self, sequence: Sequence, token: int) -> None:
        sequence.tokens.append(token)
        sequence.pending = False

    def lost(self, step: Step) -> None:
        """A step did not reach every stage: what it told them to drop goes again with the next one. (A second drop of
        a sequence is allowed, and ids are never used twice.)"""
        self._commands += [command for command in step.batch.commands if isinstance(command, Drop)]

    @property
    def pages_used(self) -> int:
        return self.limits.num_pages - self._pool.num_free

    def schedule(self) -> Step | None:
        """The next step, or None when nothing can be sent now."""
        if self.waiting:
            self._admit()
        spans, tokens, starts, sequences, num_decodes = [], [], [], [], 0
        for sequence, count in self._choose():
            if sequence.seq < 0:
                continue  # preempted for the sake of an older one
            is_last = sequence.sent + count == len(sequence.tokens)
            span = Span(sequence.seq, sequence.sent, count, int(is_last))
            if not self._make_room(span, sequence):
                continue
            spans.append(span)
            tokens += sequence.tokens[sequence.sent : sequence.sent + count]
            sequences.append(sequence)
            num_decodes += sequence.is_decoding
            if is_last and not sequence.started:
                starts.append(self._start(sequence))
                sequence.started = True
            sequence.sent += count
            sequence.pending = is_last
        if not spans:
            return None
        batch = Batch(tuple(spans), np.array(tokens, np.int32), tuple(self._commands))
        self._commands.clear()
        return Step(batch, tuple(starts), tuple(sequences), num_decodes)

    def _admit(self) -> None:
        promised = sum(self._missing_pages(sequence) for sequence in self.running)
        while self.waiting and len(self.running) < self.limits.max_running:
            sequence = self.waiting[0]
            needed = -(-min(len(sequence.tokens) + 1, self.limits.max_tokens) // PAGE_TOKENS)
            if promised + needed > self._pool.num_free:
                return
            promised += needed
            self.waiting.popleft()
            sequence.seq, sequence.sent = self._next_seq, 0
            sequence.pending = sequence.started = False
            self._next_seq += 1
            self.running.append(sequence)

    def _missing_pages(self, sequence: Sequence) -> int:
        return max(0, -(-len(sequence.tokens) // PAGE_TOKENS) - len(self._pool.blocks(sequence.seq)))

    def _choose(self) -> list[tuple[Sequence, int]]:
        """(sequence, number of tokens), oldest first: whoever is preempted for want of room is younger, so its turn has
        not come yet."""
        decoding = [sequence for sequence in self.running if sequence.is_decoding]
        chosen = [(sequence, 1) for sequence in decoding if not sequence.pending]
        del chosen[-(-len(decoding) // self.num_stages) :]
        if len(decoding) == len(self.running):
            return chosen
        budget = self.limits.step_tokens - len(chosen)
        chosen += self._prefills(min(budget, self.limits.mixed_tokens) if decoding else budget)
        age = {sequence: i for i, sequence in enumerate(self.running)}
        return sorted(chosen, key=lambda pair: age[pair[0]])

    def _prefills(self, budget: int) -> Iterator[tuple[Sequence, int]]:
        """Chunks of the oldest unfinished prompts, in even shares of `budget`; a younger one gets what older leave."""
        ready = [s for s in self.running if not s.is_decoding and s.sent < len(s.tokens)][: self.limits.max_prefills]
        for i, sequence in enumerate(ready):
            share = -(-budget // (len(ready) - i))
            count = min(share, len(sequence.tokens) - sequence.sent)
            if count > 0:
                budget -= count
                yield sequence, count

    def _make_room(self, span: Span, sequence: Sequence) -> bool:
        """Take pages for a span; the youngest sequences give theirs up if need be."""
        while True:
            try:
                self._pool.extend_all((span,))
                return True
            except KVRoomError:
                if len(self.running) == 1:
                    raise  # `Limits.max_tokens` makes one sequence fit
                youngest = self.running[-1]
                self.restart(youngest)
                self.num_preemptions += 1
                if youngest is sequence:
                    return False

    def _drop(self, sequence: Sequence) -> None:
        command = Drop(sequence.seq)
        self._pool.apply(command)
        self._commands.append(command)
        sequence.seq = -1

    def _start(self, sequence: Sequence) -> SequenceStart:
        r = sequence.request
        return SequenceStart(sequence.seq, r.sampling, r.prompt, tuple(sequence.tokens[sequence.num_prompt :]))
