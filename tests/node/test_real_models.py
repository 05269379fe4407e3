"""The two real models say sensible things, and the same things over one, two and three stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from backends.base import KVRoom
from backends.cpu.engine import CPUBackend
from backends.weights.open import open_source
from node.engine.engine import Engine
from node.engine.pipeline import pipeline_of
from node.engine.scheduler import Limits
from node.engine.sequence import Delta, Request, Sampling
from node.models.chat import ChatTemplate
from node.models.tokenizer import Tokenizer
from partitioner.plan import split_evenly

pytestmark = pytest.mark.real_model

PAGES = 32


@contextmanager
def engine_on(path: Path, tokenizer: Tokenizer, num_stages: int) -> Iterator[Engine]:
    source = open_source(path)
    shards = split_evenly(source.arch.num_layers, num_stages)
    runners = [CPUBackend(2 if num_stages == 1 else 1).load(shard, source, KVRoom(PAGES)) for shard in shards]
    source.close()  # what a runner needs it has packed
    engine = Engine(
        pipeline_of(runners), decoder_factory=tokenizer.decoder, limits=Limits(context=1024, num_pages=PAGES)
    )
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


def answer(engine: Engine, tokenizer: Tokenizer, prompt: list[int], max_tokens: int, **sampling: float) -> str:
    request = Request(
        id="r",
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        sampling=Sampling(**{"temperature": 0.0, **sampling}),  # pyright: ignore[reportArgumentType]
        stop_tokens=tokenizer.eos_ids,
    )
    return "".join(event.text for event in engine.generate(request) if isinstance(event, Delta))


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_smollm2(smollm2_path: Path, num_stages: int) -> None:
    tokenizer = Tokenizer.load(smollm2_path)
    chat = ChatTemplate.load(smollm2_path, tokenizer)
    prompt = chat.render([{"role": "user", "content": "What is the capital of France? Answer in one sentence."}])
    story = chat.render([{"role": "user", "content": "Tell me about the sea in two sentences."}])
    with engine_on(smollm2_path, tokenizer, num_stages) as engine:
        assert answer(engine, tokenizer, prompt, 40) == "The capital of France is Paris."
        told = answer(engine, tokenizer, story, 60)
        assert told == answer(engine, tokenizer, story, 60)
        assert answer(engine, tokenizer, story, 60, temperature=1.0, seed=3) != told
    assert " ocean" in told or " sea" in told
    assert told.isascii()


@pytest.mark.parametrize("num_stages", [1, 2])
def test_gemma3(gemma3_path: Path, num_stages: int) -> None:
    tokenizer = Tokenizer.load(gemma3_path)
    with engine_on(gemma3_path, tokenizer, num_stages) as engine:
        text = answer(engine, tokenizer, tokenizer.encode_prompt("The Eiffel Tower is a famous landmark in"), 12)
        assert " Paris" in text
        count = answer(engine, tokenizer, tokenizer.encode_prompt("One, two, three, four,"), 8)
        assert count.startswith(" five, six")
