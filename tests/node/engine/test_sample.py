"""The sampler against a slow and obvious one, and against the distributions that it promises."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.engine.sample import sample, uniform
from node.engine.sequence import Sampling
from node.errors import EngineError


def slow_logits(logits: list[float], s: Sampling, prompt: list[int], output: list[int]) -> list[float]:
    out = list(logits)
    for token, bias in s.logit_bias:
        out[token] += bias
    for token in set(prompt) | set(output):
        out[token] = out[token] / s.repetition_penalty if out[token] > 0 else out[token] * s.repetition_penalty
    for token, count in Counter(output).items():
        out[token] -= s.presence_penalty + s.frequency_penalty * count
    return out


def slow_kept(logits: list[float], s: Sampling) -> list[tuple[int, float]]:
    """(id, relative probability) of what survives, by rising id."""
    best = max(logits)
    weight = [math.exp((x - best) / s.temperature) for x in logits]
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if s.top_k:
        ranked = ranked[: s.top_k]
    total, before, kept = math.fsum(weight[i] for i in ranked), 0.0, []
    for i in ranked:
        if kept and (s.top_p < 1 and before >= s.top_p * total):
            break
        if kept and s.min_p > 0 and (logits[i] - best) / s.temperature < math.log(s.min_p):
            break
        kept.append(i)
        before += weight[i]
    return [(i, weight[i]) for i in sorted(kept)]


def slow_sample(logits: list[float], s: Sampling, prompt: list[int], output: list[int], position: int) -> int:
    adjusted = slow_logits(logits, s, prompt, output)
    if s.temperature == 0:
        return adjusted.index(max(adjusted))
    kept = slow_kept(adjusted, s)
    target = uniform(s.seed, position) * math.fsum(weight for _, weight in kept)
    passed = 0.0
    for token, weight in kept:
        passed += weight
        if passed > target:
            return token
    return kept[-1][0]


# Eighths are exact in float32 through every penalty drawn below, so both samplers see the same ties.
EIGHTHS = st.integers(-64, 64).map(lambda n: n / 8)


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    return Sampling(
        temperature=draw(st.sampled_from([0.0, 0.25, 0.7, 1.0, 1.9])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, 1000])),
        top_p=draw(st.sampled_from([0.0, 0.13, 0.5, 0.93, 1.0, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.051, 0.61])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25])),
        repetition_penalty=draw(st.sampled_from([1.0, 2.0])),
        logit_bias=tuple(draw(st.lists(st.tuples(st.integers(0, 4), EIGHTHS), max_size=2))),
        seed=draw(st.integers(0, 2**63 - 1)),
    )


@settings(max_examples=600, deadline=None)
@given(
    logits=st.lists(EIGHTHS, min_size=5, max_size=40),
    s=samplings(),
    prompt=st.lists(st.integers(0, 4), max_size=4),
    output=st.lists(st.integers(0, 4), max_size=4),
)
def test_it_chooses_what_the_slow_one_chooses(
    logits: list[float], s: Sampling, prompt: list[int], output: list[int]
) -> None:
    row = np.array(logits, np.float32)
    position = len(prompt) + len(output)
    expected = slow_sample(logits, s, prompt, output, position)
    assert sample(row, s, prompt, output, position) == (expected, None)
    assert sample(row, s, array("q", prompt), array("q", output), position) == (expected, None)
    assert row.tolist() == logits


@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
@pytest.mark.parametrize(
    "s",
    [
        Sampling(),
        Sampling(top_p=0.9, temperature=0.8),
        Sampling(top_p=0.999),
        Sampling(top_k=700, top_p=0.5),
        Sampling(top_k=3000),
        Sampling(min_p=0.02, top_p=0.98),
    ],
)
def test_large_vocabularies_go_the_same_way(scale: float, s: Sampling) -> None:
    rng = np.random.default_rng(5)
    for position in range(4):
        row = (rng.standard_normal(9001) * scale).astype(np.float32)
        assert sample(row, s, [], [], position)[0] == slow_sample(row.tolist(), s, [], [], position)


def chi_square(counts: Counter[int], expected: dict[int, float]) -> float:
    return sum((counts[token] - e) ** 2 / e for token, e in expected.items())


@pytest.mark.parametrize(
    "s",
    [
        Sampling(seed=17),
        Sampling(seed=17, temperature=0.5),
        Sampling(seed=17, top_k=5),
        Sampling(seed=17, top_p=0.8),
        Sampling(seed=17, min_p=0.1),
    ],
)
def test_draws_follow_the_distribution(s: Sampling) -> None:
    row = np.array([0.0, 1.0, 2.0, 0.5, 1.5, 2.5, -1.0, 3.0, 0.2, 1.1], np.float32)
    num_draws = 6000
    counts = Counter(sample(row, s, [], [], position)[0] for position in range(num_draws))
    kept = slow_kept(row.tolist(), s)
    total = sum(weight for _, weight in kept)
    assert set(counts) == {token for token, _ in kept}
    # 99.99 % of right samplers stay below this with 9 degrees of freedom, and more with fewer
    assert chi_square(counts, {token: num_draws * weight / total for token, weight in kept}) < 33.7


def test_the_counter_is_uniform_in_position_and_in_seed() -> None:
    for draws in ([uniform(3, p) for p in range(8000)], [uniform(s, 3) for s in range(8000)]):
        counts = Counter(int(draw * 10) for draw in draws)
        assert chi_square(counts, dict.fromkeys(range(10), 800.0)) < 33.7
        assert min(draws) >= 0 and max(draws) < 1


class SplitMix:
    """As published: a state, and an output that is mixed from it."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def next(self) -> int:
        self.state = (self.state + 0x9E3779B97F4A7C15) % 2**64
        z = self.state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)


def test_the_counter_is_two_rounds_of_splitmix() -> None:
    published = SplitMix(1234567)
    assert [published.next() for _ in range(2)] == [6457827717110365317, 3203168211198807973]
    for seed, position in ((0, 0), (1, 0), (0, 1), (2**63, 12345), (2**64 - 1, 7)):
        bits = SplitMix(SplitMix(seed).next() ^ position).next()
        assert uniform(seed, position) == (bits >> 11) / 2**53
    assert uniform(-1, 7) == uniform(2**64 - 1, 7) == 0.10134950925237729


def test_greedy_takes_the_lowest_of_equals() -> None:
    row = np.zeros(300, np.float32)
    row[[200, 7, 90]] = 4.0
    assert sample(row, Sampling(temperature=0.0), [], [], 0)[0] == 7
    assert sample(row, Sampling(temperature=5.0, top_k=1), [], [], 0)[0] == 7
    assert {sample(row, Sampling(top_k=2, seed=i), [], [], 0)[0] for i in range(40)} == {7, 90}


def test_a_banned_token_is_never_drawn() -> None:
    row = np.full(1500, -np.inf, np.float32)
    row[[3, 700, 1499]] = [0.0, 1.0, 2.0]
    for s in (Sampling(), Sampling(top_p=0.99), Sampling(min_p=0.001), Sampling(top_k=10), Sampling(temperature=50.0)):
        assert {sample(row, s, [], [], p)[0] for p in range(300)} == {3, 700, 1499}


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-3])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    row = np.array([1.0, 3.0, 2.0, -np.inf], np.float32)
    assert sample(row, Sampling(temperature=temperature), [], [], 0)[0] == 1


@pytest.mark.parametrize("bad", [[0.0, np.nan, 1.0], [np.inf, 0.0, 1.0], [-np.inf] * 3, [np.nan] * 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error(bad: list[float], temperature: float) -> None:
    with pytest.raises(EngineError, match="not numbers"):
        sample(np.array(bad, np.float32), Sampling(temperature=temperature), [], [], 0)


@pytest.mark.parametrize("token", [-1, 3])
def test_a_bias_for_an_unknown_token_is_an_error(token: int) -> None:
    with pytest.raises(EngineError, match=f"token {token}"):
        sample(np.zeros(3, np.float32), Sampling(logit_bias=((token, 1.0),)), [], [], 0)


def test_logprobs_are_natural_and_before_the_temperature() -> None:
    row = np.array([1.0, 3.0, 2.0, 3.0, -np.inf], np.float32)
    norm = math.log(sum(math.exp(x) for x in (1, 3, 2, 3)))
    token, logprob = sample(row, Sampling(temperature=0.0, logprobs=3), [], [], 0)
    assert logprob is not None and (token, logprob.token) == (1, 1)
    assert logprob.logprob == pytest.approx(3 - norm)
    assert [i for i, _ in logprob.top] == [1, 3, 2]
    assert [value for _, value in logprob.top] == pytest.approx([3 - norm, 3 - norm, 2 - norm])
    cold = sample(row, Sampling(temperature=0.1, logprobs=3), [], [], 0)[1]
    assert cold is not None and cold.top == logprob.top


def test_logprobs_count_bias_and_penalties() -> None:
    row = np.array([0.0, 0.0], np.float32)
    s = Sampling(temperature=0.0, logit_bias=((1, 3.0),), presence_penalty=1.0, logprobs=2)
    _, logprob = sample(row, s, [0], [1], 2)
    assert logprob is not None
    assert dict(logprob.top) == pytest.approx({1: 2 - math.log(1 + math.exp(2)), 0: -math.log(1 + math.exp(2))})


@pytest.mark.parametrize(("asked", "given"), [(0, 0), (2, 2), (20, 4)])
def test_as_many_alternatives_as_asked_for_and_there_are(asked: int, given: int) -> None:
    row = np.array([1.0, 3.0, 2.0, 0.0, -np.inf], np.float32)
    _, logprob = sample(row, Sampling(logprobs=asked), [], [], 0)
    assert logprob is not None and len(logprob.top) == given


def test_penalties_look_where_they_should() -> None:
    row = np.array([2.0, 1.9, 1.8], np.float32)

    def greedy(prompt: list[int], output: list[int], **penalty: Any) -> int:
        return sample(row, Sampling(temperature=0.0, **penalty), prompt, output, 0)[0]

    assert greedy([0], [], presence_penalty=1.0) == 0
    assert greedy([0], [], frequency_penalty=1.0) == 0
    assert greedy([0], [], repetition_penalty=1.5) == 1
    assert greedy([], [0], presence_penalty=1.0) == 1
    assert greedy([], [0, 1, 1], frequency_penalty=0.15) == 0
    assert greedy([], [0, 0, 1], frequency_penalty=0.15) == 2
