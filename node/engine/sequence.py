"""What the endpoint asks of the engine and what comes back, and the engine's own record of one generation.

`Request` is filled by the API room, `Event`s are filled by the engine loop and read by the API room.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. A pure function of these, the logits, the history and the position.

    Order: logit_bias, penalties, temperature, top_k, top_p, min_p, draw. `temperature` 0 is greedy. `top_k` 0 is off.
    `repetition_penalty` (1 is off) looks at prompt and output, presence and frequency penalties at the output only.
    `logprobs` is None for none, else how many alternatives to report beside the chosen token (0 to 20).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation. `stop` strings never appear in the output, not even in part; `stop_tokens` end it silently.

    An empty `stop_tokens` makes it run to `max_tokens` (bench does that). `continuing`: the answer is
    read right after the prompt's own text, so a space at its start counts. `client` is shown to people only.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    continuing: bool = False
    client: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of a chosen token, after logit_bias and penalties and before temperature and truncation,
    and the `top` alternatives, most probable first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts for one request, and the two wall times that clients show. Times are seconds by a monotonic clock."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """Prefill got this far. Sent at most once a step; the API turns silence into keep-alives by its own clock."""

    prefilled: int
    total: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New text (never half a character, may be empty while bytes or a possible stop string are held back), the tokens
    sampled since the last Delta, and their logprobs if asked for."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every generation. `stop_sequence` is the stop string that ended it, if one did; `error` is
    shown to the client when `reason` is "error"."""

    reason: FinishReason
    usage: Usage
    stop_sequence: str | None = None
    error: str = ""


Event = Progress | Delta | Finished


@dataclass(slots=True, eq=False)
class Sequence:
    """The scheduler's record of one request.

    `tokens` are prompt and output. The first `sent` of them have gone down the pipeline under the id `seq`, which
    changes when the sequence is preempted and starts anew (-1 while it waits). `pending` says that a step is on its way
    which will sample the next token, `started` that the last stage knows how to sample for this id.
    """

    request: Request
    tokens: list[int]
    limit: int
    seq: int = -1
    sent: int = 0
    pending: bool = False
    started: bool = False

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_decoding(self) -> bool:
        """All is sent but for the token that was sampled last, at most."""
        num_tokens = len(self.tokens)
        return num_tokens > len(self.request.prompt) and self.sent >= num_tokens - 1

    @property
    def is_full(self) -> bool:
        return len(self.tokens) >= self.limit
