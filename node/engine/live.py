"""A request while it is being served: its text, its clock, and where its events go."""

from __future__ import annotations

import time
from collections.abc import Callable

from node.engine.sequence import (
    Delta,
    Event,
    Finished,
    FinishReason,
    Progress,
    Request,
    Sequence,
    TokenLogprob,
    Usage,
)
from node.engine.stops import StreamDecoder, TextStream


class Live:
    """Belongs to the engine's thread, but for `is_cancelled`, which anybody may set."""

    def __init__(self, request: Request, put: Callable[[Event], None], decoder: StreamDecoder) -> None:
        self.request = request
        self.sequence: Sequence | None = None
        self.is_cancelled = False
        self.is_finished = False
        self._text = TextStream(decoder, request.stop)
        self._put = put
        self._num_tokens = 0
        self._queued_at = time.monotonic()
        self._started_at: float | None = None
        self._first_token_at: float | None = None

    def sent(self, now: float) -> None:
        if self._started_at is None:
            self._started_at = now

    def progress(self, prefilled: int) -> None:
        total = len(self.request.prompt)
        if self._num_tokens == 0:  # a sequence that is computed again says nothing
            self._put(Progress(min(prefilled, total), total))

    def token(self, token: int, logprob: TokenLogprob | None, *, is_full: bool) -> FinishReason | None:
        """Take a sampled token in and emit its text. Returns why the generation ends here, if it does."""
        if self._first_token_at is None:
            self._first_token_at = time.monotonic()
        self._num_tokens += 1
        if token in self.request.stop_tokens:
            return "stop"
        text = self._text.push((token,))
        self._put(Delta(text, (token,), (logprob,) if logprob else ()))
        if self._text.stopped is not None:
            return "stop"
        return "length" if is_full or self._num_tokens >= self.request.max_tokens else None

    def finish(self, reason: FinishReason, error: str = "") -> None:
        """The last events. Text that was held back is shown unless the generation broke off."""
        self.is_finished = True
        if reason in ("stop", "length"):
            rest = self._text.flush()
            if rest:
                self._put(Delta(rest, ()))
            if self._text.stopped is not None:  # the end of the text may complete it
                reason = "stop"
        self._put(Finished(reason, self._usage(), self._text.stopped, error))

    def _usage(self) -> Usage:
        now = time.monotonic()
        started = self._started_at if self._started_at is not None else now
        first = self._first_token_at if self._first_token_at is not None else now
        return Usage(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=self._num_tokens,
            queue_s=started - self._queued_at,
            prefill_s=first - started,
            decode_s=now - first,
        )
