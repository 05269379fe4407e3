"""How fast a model runs here, through the real engine loop, and how close that is to what the memory could give.

Nothing is assumed: the roof is the read bandwidth that the backend's own threads reach in the same run. With llama.cpp
as the measure, turns alternate (ours, theirs, ours, ...), so that a machine that slows down slows both.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from backends.arch import Architecture
from backends.measure import read_bandwidth
from backends.weights.open import open_source
from node import bench_llama
from node.engine.engine import Engine
from node.engine.sequence import Delta, Finished, Request, Sampling
from node.errors import EngineError, MemoryShortageError
from node.loading import Loaded
from node.memory import packed_bytes

BUSY_LOAD = 0.7
"""Running processes, averaged over the last minute, above which others take what is measured. It hits unlike programs
unlike: threads that wait for each other by spinning lose most."""

GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """Token counts of one turn, how many turns are counted, and whether llama.cpp takes turns too."""

    prompt: int = 512
    decode: int = 128
    repeat: int = 5
    against_llama: bool = False


def run(loaded: Loaded, threads: int, plan: Plan, note: Callable[[str], None]) -> dict[str, Any]:
    """The document of `cluster bench --json`. `note` is told what goes on. Raises EngineError, UsageError."""
    if plan.against_llama:
        bench_llama.require()
    arch, engine = loaded.deployment.arch, loaded.deployment.engine
    prompts = [random_prompt(arch.vocab_size, plan.prompt, seed) for seed in range(plan.repeat + 1)]
    load = os.getloadavg()[0]
    if load > BUSY_LOAD:
        note(f"this machine is busy (load {load:.1f}): compare nothing with figures taken now")
    note("warming up")
    take_turn(engine, prompts.pop(), plan.decode)
    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    bandwidth: list[float] = []
    for i, prompt in enumerate(prompts, start=1):
        note(f"turn {i} of {plan.repeat}")
        ours.append(rates(plan, take_turn(engine, prompt, plan.decode)))
        if plan.against_llama:
            turn = bench_llama.Turn(str(loaded.path), threads, prompt, plan.decode)
            theirs.append(rates(plan, bench_llama.take_turn(turn)))
        bandwidth.append(measured_bandwidth(threads))
    bytes_a_token = decode_bytes(loaded, plan)
    decode_rate = statistics.median(decode for _, decode in ours)
    document = {
        "model": loaded.deployment.id,
        "path": str(loaded.path),
        "backend": loaded.backend,
        "instructions": loaded.runner.isa,
        "threads": threads,
        "load_average": load,
        "prompt_tokens": plan.prompt,
        "decode_tokens": plan.decode,
        "prefill_tokens_per_s": summary([prefill for prefill, _ in ours]),
        "decode_tokens_per_s": summary([decode for _, decode in ours]),
        "read_bytes_per_s": summary(bandwidth),
        "decode_bytes_per_token": bytes_a_token,
        "roofline_share": bytes_a_token * decode_rate / statistics.median(bandwidth),
    }
    if plan.against_llama:
        document["llama"] = {
            "version": bench_llama.version(),
            "prefill_tokens_per_s": summary([prefill for prefill, _ in theirs]),
            "decode_tokens_per_s": summary([decode for _, decode in theirs]),
        }
        document["ratio"] = {
            name: summary([a[i] / b[i] for a, b in zip(ours, theirs, strict=True)])
            for i, name in enumerate(("prefill", "decode"))
        }
    return document


def take_turn(engine: Engine, prompt: tuple[int, ...], decode: int) -> bench_llama.Timing:
    """One request as a client sees it: time to its first token, and from there to its last. Raises EngineError."""
    request = Request(id="bench", prompt=prompt, max_tokens=decode, sampling=GREEDY, client="bench")
    begin = time.perf_counter()
    times: list[float] = []
    for event in engine.generate(request):
        if isinstance(event, Delta):
            times += [time.perf_counter()] * len(event.tokens)
        elif isinstance(event, Finished) and event.reason != "length":
            raise EngineError(f"The measured request ended by '{event.reason}': {event.error}", "See the log above.")
    if len(times) != decode:
        raise EngineError(f"{len(times)} tokens came where {decode} were due.", "Please report it.")
    return bench_llama.Timing(times[0] - begin, times[-1] - times[0])


def rates(plan: Plan, timing: bench_llama.Timing) -> tuple[float, float]:
    """Tokens per second of prefill and decode. The first token belongs to the prefill."""
    return plan.prompt / timing.prefill_s, (plan.decode - 1) / timing.decode_s


def random_prompt(vocab_size: int, length: int, seed: int) -> tuple[int, ...]:
    """Different prompts, so that nothing of one can be reused by the next."""
    return tuple(int(token) for token in np.random.default_rng(seed).integers(0, vocab_size, length))


def measured_bandwidth(threads: int) -> float:
    """Bytes per second, the best of three reads: what the memory can give at this moment."""
    try:
        return max(float(rate) for rate in read_bandwidth(threads, repeats=3))
    except MemoryError as exc:
        raise MemoryShortageError("Measuring the memory takes 512 MiB, which are not free.", "Close programs.") from exc


def decode_bytes(loaded: Loaded, plan: Plan) -> int:
    """Bytes that one decoded token has to read: all weights (an embedding of its own only by the row), and the cache
    in the middle of the answer."""
    arch = loaded.deployment.arch
    weights = loaded.runner.memory().weights_bytes
    if not arch.tied_embeddings:
        source = open_source(loaded.path)
        weights -= packed_bytes(source.info("embed"))
        source.close()
    return weights + cache_bytes(arch, plan.prompt + plan.decode // 2)


def cache_bytes(arch: Architecture, context: int) -> int:
    """Bytes of keys and values that a token at this position attends to."""
    seen = sum(min(window, context) if window else context for window in arch.windows)
    return seen * arch.kv_bytes_per_token(1)


def summary(values: Sequence[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "runs": list(values),
    }
