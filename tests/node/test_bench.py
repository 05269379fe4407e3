"""The arithmetic of `cluster bench`, on a clock and an engine that are made up."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from node import bench, bench_llama
from node.bench_llama import Timing
from node.engine.sequence import Delta, Event, Finished, Progress, Usage
from node.errors import EngineError, UsageError
from tests.models import tiny_arch


class ScriptedEngine:
    """Answers every request with the same events."""

    def __init__(self, *events: Event) -> None:
        self._events = events

    def generate(self, request: object) -> Iterator[Event]:
        return iter(self._events)


def clocked(monkeypatch: pytest.MonkeyPatch, *readings: float) -> None:
    times = iter(readings)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(times))


def turn(*events: Event, decode: int = 3) -> Timing:
    return bench.take_turn(ScriptedEngine(*events), (1, 2), decode)  # pyright: ignore[reportArgumentType]


DONE = Finished("length", Usage())


def test_a_turn_is_timed_from_its_start_to_its_first_and_its_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked(monkeypatch, 10.0, 12.0, 12.5)
    timing = turn(Progress(1, 2), Delta("", (5,)), Delta("ab", (6, 7)), DONE)
    assert timing == Timing(prefill_s=2.0, decode_s=0.5)
    assert bench.rates(bench.Plan(prompt=512, decode=3), timing) == (256.0, 4.0)


def test_a_turn_that_ends_otherwise_is_an_error() -> None:
    with pytest.raises(EngineError, match="'error': it broke"):
        turn(Delta("", (5,)), Finished("error", Usage(), error="it broke"))
    with pytest.raises(EngineError, match="1 tokens came where 3 were due"):
        turn(Delta("", (5,)), DONE)


def test_summary_of_runs() -> None:
    assert bench.summary([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "runs": [3.0, 1.0, 2.0]}


def test_prompts_differ_and_lie_in_the_vocabulary() -> None:
    prompts = [bench.random_prompt(50, 64, seed) for seed in range(4)]
    assert len(set(prompts)) == 4 and prompts[0] == bench.random_prompt(50, 64, 0)
    assert all(len(prompt) == 64 and 0 <= min(prompt) <= max(prompt) < 50 for prompt in prompts)


def test_a_window_bounds_the_cache_that_a_token_reads() -> None:
    arch = tiny_arch("llama", num_layers=2)
    a_layer = arch.kv_bytes_per_token(1)
    assert bench.cache_bytes(arch, 100) == 2 * 100 * a_layer
    windowed = dataclasses.replace(arch, windows=(8, 0))
    assert bench.cache_bytes(windowed, 100) == (8 + 100) * a_layer
    assert bench.cache_bytes(windowed, 4) == 8 * a_layer


def test_without_llama_cpp_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_llama, "find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        bench_llama.require()
    assert "pip install 'roost[llama]'" in caught.value.cure
