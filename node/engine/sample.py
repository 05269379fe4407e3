"""Choosing a token: a pure function of logits, parameters, history, seed and position, the same on every node.

Order: logit_bias, penalties, temperature, top_k, top_p, min_p, draw. Candidates are ordered by falling probability,
ties by rising id, and the draw inverts their cumulative distribution with one uniform number. That number comes from a
counter, not from a state: SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") of
seed and position, so a sequence that is resumed on another node goes on with the same stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from node.engine.sequence import Sampling, TokenLogprob
from node.errors import EngineError

_MASK = (1 << 64) - 1
_FEW = 512
"""Candidates that are sorted first; a full sort follows only when these do not hold enough probability."""


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
    """The token at `position` (index of the new token in prompt + output).

    logits: float32 `[vocab]`, not changed. Raises EngineError when they hold no usable number.
    """
    if _is_changed_by(sampling):
        logits = _adjusted(logits, sampling, prompt, output)
    best = int(np.argmax(logits))
    if not np.isfinite(logits[best]):
        raise EngineError(
            "The model returned logits that are not numbers.", "Its weights may be damaged: pull it again."
        )
    token = best if sampling.temperature == 0 or sampling.top_k == 1 else _draw(logits, sampling, position)
    if sampling.logprobs is None:
        return token, None
    return token, _logprob(logits, token, sampling.logprobs)


def _is_changed_by(s: Sampling) -> bool:
    return bool(s.logit_bias or s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1)


def _adjusted(logits: np.ndarray, s: Sampling, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    out = logits.astype(np.float32, copy=True)
    for token, bias in s.logit_bias:
        out[token] += bias
    if s.repetition_penalty != 1 and (prompt or output):
        seen = np.unique(np.concatenate([np.asarray(prompt, np.int64), np.asarray(output, np.int64)]))
        values = out[seen]
        out[seen] = np.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
    if (s.presence_penalty or s.frequency_penalty) and output:
        seen, counts = np.unique(np.asarray(output, np.int64), return_counts=True)
        out[seen] -= (s.presence_penalty + s.frequency_penalty * counts).astype(np.float32)
    return out


def _draw(logits: np.ndarray, s: Sampling, position: int) -> int:
    scaled = logits.astype(np.float64) / s.temperature
    scaled -= scaled.max()
    weights = np.exp(scaled)
    u = uniform(s.seed, position)
    if s.top_p >= 1 and s.min_p <= 0 and not 0 < s.top_k < len(weights):
        order = None  # nothing is cut off: any fixed order will do, and that of ids needs no sort
        kept = weights
    else:
        order = _candidates(weights, s)
        kept = weights[order]
    cumulative = np.cumsum(kept)
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    index = min(index, len(kept) - 1)
    return index if order is None else int(order[index])


def _candidates(weights: np.ndarray, s: Sampling) -> np.ndarray:
    """Ids that survive top_k, top_p and min_p, most probable first. Never empty. top_p counts within top_k."""
    limit = s.top_k if 0 < s.top_k < len(weights) else len(weights)
    order = _sorted_ids(weights, min(limit, _FEW))
    if s.top_p < 1:
        total = weights.sum() if limit == len(weights) else _sorted_weights(weights, limit).sum()
        if weights[order].sum() < s.top_p * total and len(order) < limit:
            order = _sorted_ids(weights, limit)
        # a candidate stays while those before it hold less than top_p
        before = np.cumsum(weights[order]) - weights[order]
        order = order[before < s.top_p * total] if s.top_p > 0 else order[:1]
    elif len(order) < limit and not (s.min_p > 0 and weights[order[-1]] < s.min_p * weights[order[0]]):
        order = _sorted_ids(weights, limit)
    if s.min_p > 0:
        order = order[weights[order] >= s.min_p * weights[order[0]]]
    return order


def _sorted_ids(weights: np.ndarray, count: int) -> np.ndarray:
    """The `count` heaviest ids, heaviest first, ties by rising id."""
    if count >= len(weights):
        return np.argsort(-weights, kind="stable")
    threshold = np.partition(weights, len(weights) - count)[len(weights) - count]
    ids = np.flatnonzero(weights >= threshold)
    return ids[np.argsort(-weights[ids], kind="stable")][:count]


def _sorted_weights(weights: np.ndarray, count: int) -> np.ndarray:
    return np.partition(weights, len(weights) - count)[len(weights) - count :]


def _logprob(logits: np.ndarray, token: int, num_top: int) -> TokenLogprob:
    x = logits.astype(np.float64)
    x -= x.max()
    x -= np.log(np.exp(x).sum())
    top = _sorted_ids(x, num_top) if num_top else np.empty(0, np.int64)
    return TokenLogprob(token, float(x[token]), tuple((int(i), float(x[i])) for i in top))
