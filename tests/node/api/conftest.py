"""A real HTTP server over the real engine loop, with a scripted model behind it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from backends.base import Batch
from node.api.app import create_app
from node.api.guard import Access
from node.api.server import Server
from node.deployment import Deployment, Deployments
from node.engine.engine import Engine
from node.engine.pipeline import pipeline_of
from node.engine.scheduler import Limits
from node.engine.stops import StreamDecoder
from node.models.messages import read_messages
from tests.fakes import FakeTokenizer, ScriptedRunner
from tests.models import tiny_arch

CONTEXT = 640


class Names(FakeTokenizer):
    """The fake tokenizer with what the API asks of a real one."""

    eos_ids = frozenset({FakeTokenizer.END})

    def __init__(self, words: Iterable[str] = ()) -> None:
        super().__init__(words)
        self.continued: list[bool] = []

    def decoder(self, *, continuing: bool = False) -> StreamDecoder:
        """Notes what it was asked for."""
        self.continued.append(continuing)
        return super().decoder()

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def token_text(self, token: int) -> str:
        return self.decode([token])

    def token_bytes(self, token: int) -> bytes:
        return self._pieces[token]


class Template:
    """A fake chat template: "role: content" lines."""

    stop = ("\nuser:",)  # as the fallback for base models has it

    def __init__(self, tokenizer: Names) -> None:
        self.tokenizer = tokenizer
        self.options: dict[str, Any] = {}

    def render(self, messages: list[dict[str, Any]], /, **options: Any) -> list[int]:
        self.options = options
        lines = [f"{one['role']}: {one['content']}\n" for one in read_messages(messages)]
        return self.tokenizer.encode("".join(lines) + "assistant:")


@dataclass
class Served:
    """`say(prompt, answer)` scripts a chat answer; while `hold` is set the model waits in its next step."""

    url: str
    tokenizer: Names
    template: Template
    runner: ScriptedRunner
    engine: Engine
    deployments: Deployments
    scripts: dict[tuple[int, ...], list[int]]
    go: threading.Event
    fail: list[str] = field(default_factory=list)

    def say(self, content: str, answer: str) -> list[dict[str, str]]:
        """Messages that are answered so."""
        messages = [{"role": "user", "content": content}]
        self.scripts[tuple(self.template.render(messages))] = self.tokenizer.encode(answer)
        return messages

    def continue_with(self, prompt: str, answer: str) -> str:
        self.scripts[tuple(self.tokenizer.encode_prompt(prompt))] = self.tokenizer.encode(answer)
        return prompt

    def wait_idle(self, seconds: float = 20.0) -> None:
        """Until the engine holds no request and no page."""
        for _ in range(int(seconds / 0.02)):
            stats = self.engine.stats()
            if not (stats.running or stats.waiting or stats.kv_pages_used):
                return
            threading.Event().wait(0.02)
        raise AssertionError(f"still busy: {self.engine.stats()}")


@contextmanager
def serving(
    *, access: Access | None = None, ping_s: float = 0.1, max_waiting: int = 64, **limits: int
) -> Iterator[Served]:
    tokenizer = Names([f"w{i} " for i in range(50)])
    scripts: dict[tuple[int, ...], list[int]] = {}
    go, fail = threading.Event(), []
    go.set()

    def before(batch: Batch) -> None:
        go.wait(20)
        if fail:
            raise RuntimeError(fail.pop())

    runner = ScriptedRunner(scripts, vocab_size=tokenizer.vocab_size, num_pages=64, before=before)
    engine = Engine(
        pipeline_of([runner]),
        decoder_factory=tokenizer.decoder,
        limits=Limits(context=CONTEXT, num_pages=64, **limits),
        max_waiting=max_waiting,
    )
    engine.start()
    template = Template(tokenizer)
    deployment = Deployment(
        id="toy:1m",
        created=1_700_000_000,
        context=CONTEXT,
        arch=tiny_arch("llama"),
        tokenizer=tokenizer,  # pyright: ignore[reportArgumentType]
        chat=template,  # pyright: ignore[reportArgumentType]
        engine=engine,
        aliases=frozenset({"org/toy"}),
    )
    deployments = Deployments([deployment])
    sock = socket.create_server(("127.0.0.1", 0))
    server = Server(create_app(deployments, access=access, ping_s=ping_s), sock)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        yield Served(url, tokenizer, template, runner, engine, deployments, scripts, go, fail)
    finally:
        go.set()
        server.stop()
        thread.join(10)
        engine.close()
        sock.close()
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as one:
        yield one


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=20) as client:
        yield client
