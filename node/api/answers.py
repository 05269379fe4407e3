"""The shapes of answers: whole responses and the chunks of a stream, for chat and for completions.

Chunks are put together from a prefix that is made once a stream; only the text of each is serialized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from node.api.errors import dumps
from node.engine.sequence import TokenLogprob, Usage


class TokenNames(Protocol):
    def token_text(self, token: int) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...


@dataclass(slots=True)
class Choice:
    """What one choice has come to so far."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    usage: Usage = field(default_factory=Usage)


def usage_of(prompt: int, cached: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def timings(one: Usage) -> dict[str, Any]:
    """Seconds become milliseconds; rates are null when there was too little to measure."""
    prompt_n, predicted_n = one.prompt_tokens - one.cached_tokens, one.completion_tokens
    return {
        "queue_ms": round(one.queue_s * 1e3, 3),
        "prompt_n": prompt_n,
        "prompt_ms": round(one.prefill_s * 1e3, 3),
        "prompt_per_second": round(prompt_n / one.prefill_s, 3) if one.prefill_s > 0 else None,
        "predicted_n": predicted_n,
        "predicted_ms": round(one.decode_s * 1e3, 3),
        # the first token comes with the prompt's last step
        "predicted_per_second": round((predicted_n - 1) / one.decode_s, 3)
        if predicted_n > 1 and one.decode_s > 0
        else None,
    }


def chat_logprobs(names: TokenNames, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"token": names.token_text(token), "logprob": logprob, "bytes": list(names.token_bytes(token))}

    content = [
        {**one(lp.token, lp.logprob), "top_logprobs": [one(token, value) for token, value in lp.top]} for lp in logprobs
    ]
    return {"content": content, "refusal": None}


def offsets_of(names: TokenNames, logprobs: Sequence[TokenLogprob], start: int) -> list[int]:
    """Where tokens that came together begin, in characters; `start` is where the text they brought begins."""
    offsets = []
    for lp in logprobs:
        offsets.append(start)
        start += len(names.token_text(lp.token))
    return offsets


def completion_logprobs(names: TokenNames, logprobs: Sequence[TokenLogprob], offsets: Sequence[int]) -> dict[str, Any]:
    """The legacy form."""
    return {
        "tokens": [names.token_text(lp.token) for lp in logprobs],
        "token_logprobs": [lp.logprob for lp in logprobs],
        "top_logprobs": [_alternatives(names, lp) for lp in logprobs],
        "text_offset": list(offsets),
    }


def _alternatives(names: TokenNames, lp: TokenLogprob) -> dict[str, float]:
    """By text: the chosen token, then the others, most probable first. Parts of characters share a text, which then
    stands for the first that has it."""
    named = {names.token_text(lp.token): lp.logprob}
    for token, value in lp.top:
        named.setdefault(names.token_text(token), value)
    return named


@dataclass(frozen=True, slots=True)
class Head:
    """What all parts of one answer have in common."""

    id: str
    object: str
    created: int
    model: str

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any], timings: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id, "object": self.object, "created": self.created, "model": self.model,
            "choices": choices, "usage": usage, "timings": timings,
        }  # fmt: skip

    def prefix(self) -> str:
        """A server-sent event up to its choices."""
        common = {"id": self.id, "object": self.object, "created": self.created, "model": self.model}
        return f"data: {dumps(common)[:-1]}"


class ChatChunks:
    """Chunks of a chat stream. `include_usage` puts `usage: null` into each, as the specification has it."""

    def __init__(self, head: Head, names: TokenNames, *, include_usage: bool) -> None:
        self._prefix = head.prefix()
        self._names = names
        self._end = ',"usage":null}\n\n' if include_usage else "}\n\n"

    def _chunk(
        self, index: int, delta: str, logprobs: Sequence[TokenLogprob], reason: str | None, more: str = ""
    ) -> str:
        told = dumps(chat_logprobs(self._names, logprobs)) if logprobs else "null"
        finish = f'"{reason}"' if reason else "null"
        choice = f'{{"index":{index},"delta":{delta},"logprobs":{told},"finish_reason":{finish}}}'
        return f'{self._prefix},"choices":[{choice}]{more}{self._end}'

    def first(self, index: int) -> str:
        return self._chunk(index, '{"role":"assistant","content":""}', (), None)

    def text(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> str:
        return self._chunk(index, f'{{"content":{dumps(text)}}}', logprobs, None)

    def last(self, index: int, reason: str, usage: Usage) -> str:
        return self._chunk(index, "{}", (), reason, f',"timings":{dumps(timings(usage))}')

    def usage(self, usage: dict[str, Any], timings: dict[str, Any]) -> str:
        return f'{self._prefix},"choices":[],"usage":{dumps(usage)},"timings":{dumps(timings)}}}\n\n'


class CompletionChunks:
    """Chunks of a completion stream."""

    def __init__(self, head: Head, names: TokenNames, *, include_usage: bool) -> None:
        self._prefix = head.prefix()
        self._names = names
        self._end = ',"usage":null}\n\n' if include_usage else "}\n\n"
        self._offsets: dict[int, int] = {}

    def _chunk(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str | None, more: str = ""
    ) -> str:
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(text)
        told = "null"
        if logprobs:
            told = dumps(completion_logprobs(self._names, logprobs, offsets_of(self._names, logprobs, offset)))
        finish = f'"{reason}"' if reason else "null"
        choice = f'{{"index":{index},"text":{dumps(text)},"logprobs":{told},"finish_reason":{finish}}}'
        return f'{self._prefix},"choices":[{choice}]{more}{self._end}'

    def text(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> str:
        return self._chunk(index, text, logprobs, None)

    def last(self, index: int, reason: str, usage: Usage) -> str:
        return self._chunk(index, "", (), reason, f',"timings":{dumps(timings(usage))}')

    def usage(self, usage: dict[str, Any], timings: dict[str, Any]) -> str:
        return f'{self._prefix},"choices":[],"usage":{dumps(usage)},"timings":{dumps(timings)}}}\n\n'
