"""Choosing a token: a pure function of logits, parameters, history, seed and position.

Order: logit_bias, penalties, temperature, top_k, top_p, min_p, draw. Tokens rank by falling logit, ties by rising id,
and each cut keeps a beginning of that ranking: top_k its first k, top_p as many as it takes to hold that share of what
top_k left, min_p those with at least that share of the best one's probability. The draw inverts the cumulative
distribution of what is left, in order of ids, with one uniform number. That number comes from a counter, not from a
state: SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") of seed and position, the
same on every machine, so a sequence that is resumed elsewhere goes on with the same stream. (`exp` is the platform's:
where two machines round it differently, one draw in some 10^11 may fall to the neighbour.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from node.engine.sequence import Sampling, TokenLogprob
from node.errors import EngineError

_MASK = (1 << 64) - 1
_BLOCK = 512


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing else, with 53 random bits."""
    return (_mix(_mix(seed & _MASK) ^ (position & _MASK)) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def sample(
    logits: np.ndarray, sampling: Sampling, prompt: Sequence[int], output: Sequence[int], position: int
) -> tuple[int, TokenLogprob | None]:
    """The token at `position` (index of the new token in prompt + output), greedy if the temperature is 0.

    logits: float32 `[vocab]`, not changed. History as `array("q")` saves a copy a token.
    Raises EngineError when the logits hold no usable number, or when a biased token is not in the vocabulary.
    """
    if _is_changed_by(sampling):
        logits = _adjusted(logits, sampling, prompt, output)
    best = int(logits.argmax())
    if not math.isfinite(logits[best]):  # argmax stops at the first NaN
        raise EngineError(
            "The model returned logits that are not numbers.", "Its weights may be damaged: pull it again."
        )
    is_greedy = sampling.temperature == 0 or sampling.top_k == 1
    token = best if is_greedy else _draw(logits, float(logits[best]), sampling, position)
    return token, None if sampling.logprobs is None else _logprob(logits, token, best, sampling.logprobs)


def _is_changed_by(s: Sampling) -> bool:
    return bool(s.logit_bias or s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1)


def _adjusted(logits: np.ndarray, s: Sampling, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    out = logits.astype(np.float32, copy=True)
    for token, bias in s.logit_bias:
        if not 0 <= token < len(out):
            raise EngineError(f"logit_bias names token {token}; the vocabulary has {len(out)}.", "Name another.")
        out[token] += bias
    written = np.asarray(output, np.int64)
    if s.repetition_penalty != 1:
        is_seen = np.zeros(len(out), bool)
        is_seen[np.asarray(prompt, np.int64)] = True
        is_seen[written] = True
        seen = np.flatnonzero(is_seen)
        values = out[seen]
        out[seen] = np.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
    if (s.presence_penalty or s.frequency_penalty) and len(written):
        seen, counts = np.unique(written, return_counts=True)
        out[seen] -= (s.presence_penalty + s.frequency_penalty * counts).astype(np.float32)
    return out


def _draw(logits: np.ndarray, best: float, s: Sampling, position: int) -> int:
    count = _num_kept(logits, best, s)
    ids = _top_ids(logits, count) if count < len(logits) else None
    weights = _weights(logits if ids is None else logits[ids], best, s.temperature)
    blocks = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK))
    # two look-ups in short sums: one long cumulative sum would cost as much as all of `exp`
    block, rest = _invert(blocks, uniform(s.seed, position) * blocks.sum())
    index, _ = _invert(weights[block * _BLOCK : (block + 1) * _BLOCK], rest)
    index += block * _BLOCK
    return index if ids is None else int(ids[index])


def _weights(logits: np.ndarray, best: float, temperature: float) -> np.ndarray:
    """Probabilities relative to the best token's."""
    x = logits.astype(np.float64)
    x -= best
    if temperature != 1:
        with np.errstate(over="ignore"):  # a tiny temperature makes -inf, which is right
            x /= temperature
    return np.exp(x, out=x)


def _invert(weights: np.ndarray, target: float) -> tuple[int, float]:
    """The index at which the cumulative sum passes `target`, and how far into it. Never one of weight 0."""
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, target, side="right"))
    if index == len(weights):  # rounding
        index = int(np.flatnonzero(weights)[-1])
    return index, target - (float(cumulative[index - 1]) if index else 0.0)


def _num_kept(logits: np.ndarray, best: float, s: Sampling) -> int:
    """How many of the ranking survive top_k, top_p and min_p; at least one."""
    count = s.top_k if 0 < s.top_k < len(logits) else len(logits)
    if s.top_p < 1:
        count = _num_within(logits, best, count, s)
    if s.min_p > 0:
        count = min(count, int(np.count_nonzero(logits >= best + s.temperature * math.log(s.min_p))))
    return max(1, count)


def _num_within(logits: np.ndarray, best: float, count: int, s: Sampling) -> int:
    """How many of the first `count` it takes to hold `top_p` of their probability. Looks at few first."""
    total = float(_weights(logits, best, s.temperature).sum()) if count == len(logits) else None
    few = min(count, _BLOCK)
    while True:
        ranked = np.sort(_top_values(logits, few if total is not None else count))[::-1]
        cumulative = np.cumsum(_weights(ranked, best, s.temperature))
        wanted = s.top_p * (float(cumulative[-1]) if total is None else total)
        if cumulative[-1] >= wanted or len(ranked) == count:
            return min(int(np.searchsorted(cumulative, wanted)) + 1, count)
        few = min(8 * few, count)


def _top_values(x: np.ndarray, count: int) -> np.ndarray:
    """The `count` greatest, in no order."""
    return x if count == len(x) else np.partition(x, len(x) - count)[len(x) - count :]


def _top_ids(x: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` greatest (fewer than all of them), rising; of equals the lowest ids."""
    if count == 0:
        return np.empty(0, np.int64)
    threshold = np.partition(x, len(x) - count)[len(x) - count]
    ids = np.flatnonzero(x >= threshold)
    if len(ids) > count:
        values = x[ids]
        above = ids[values > threshold]
        ids = np.sort(np.concatenate([above, ids[values == threshold][: count - len(above)]]))
    return ids


def _logprob(logits: np.ndarray, token: int, best: int, num_top: int) -> TokenLogprob:
    highest = float(logits[best])
    norm = highest + math.log(_weights(logits, highest, 1.0).sum())
    top = _top_ids(logits, num_top) if num_top < len(logits) else np.arange(len(logits))
    top = top[np.argsort(-logits[top], kind="stable")]
    alternatives = ((int(i), float(logits[i]) - norm) for i in top)
    return TokenLogprob(token, float(logits[token]) - norm, tuple(a for a in alternatives if math.isfinite(a[1])))
