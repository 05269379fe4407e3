"""One measured turn of llama.cpp, in a process of its own: `python -m node.bench_llama REQUEST`, an answer on stdout.

A process a turn, because its worker threads spin while they live and would slow whatever is measured next. It gets what
ours gets: the same file, threads, prompt and answer lengths, a float16 cache, greedy choice of tokens, all logits read.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from node.errors import EngineError, UsageError

BATCH_TOKENS = 512
TURN_TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True)
class Turn:
    """Feed `prompt` in chunks of 512, then decode `decode` tokens one by one."""

    path: str
    threads: int
    prompt: tuple[int, ...]
    decode: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds from the start of the prompt to its first token, and for the `decode - 1` tokens after that."""

    prefill_s: float
    decode_s: float


def require() -> None:
    """Raises UsageError when llama-cpp-python is not installed."""
    if find_spec("llama_cpp") is None:
        raise UsageError("--against llama needs llama-cpp-python.", "Install it: pip install 'roost[llama]'")


def version() -> str:
    return metadata.version("llama-cpp-python")


def take_turn(turn: Turn) -> Timing:
    """Measure in a fresh child process. Raises EngineError."""
    child = subprocess.run(
        [sys.executable, "-m", "node.bench_llama"],
        input=json.dumps(asdict(turn)),
        capture_output=True,
        text=True,
        timeout=TURN_TIMEOUT_S,
    )
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise EngineError(f"llama.cpp could not run {Path(turn.path).name}: {last}.", "Leave out --against llama.")
    return Timing(**json.loads(child.stdout))


def measure(turn: Turn) -> Timing:
    import numpy as np

    llama_cpp: Any = import_module("llama_cpp")

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(turn.path.encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise SystemExit("the file was not accepted")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = -(-(len(turn.prompt) + turn.decode) // 256) * 256
    params.n_batch = params.n_ubatch = BATCH_TOKENS
    params.n_threads = params.n_threads_batch = turn.threads
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise SystemExit("no context could be made")
    num_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def feed(tokens: tuple[int, ...]) -> int:
        for start in range(0, len(tokens), BATCH_TOKENS):
            chunk = tokens[start : start + BATCH_TOKENS]
            array = (llama_cpp.llama_token * len(chunk))(*chunk)
            if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(chunk))) != 0:
                raise SystemExit("llama_decode failed")
        return int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), shape=(num_vocab,)).argmax())

    def run() -> Timing:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        begin = time.perf_counter()
        token = feed(turn.prompt)
        first = time.perf_counter()
        for _ in range(turn.decode - 1):
            token = feed((token,))
        return Timing(first - begin, time.perf_counter() - first)

    run()  # pages of the file come in, threads start
    return run()


def main() -> None:
    request = json.load(sys.stdin)
    print(json.dumps(asdict(measure(Turn(**request | {"prompt": tuple(request["prompt"])})))))


if __name__ == "__main__":
    main()
