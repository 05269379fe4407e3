"""Answers for `cluster run`, from the running node if it serves the model, else from a model loaded in this process."""

from __future__ import annotations

import json
import secrets
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from node.engine.sequence import Delta, Finished, Request, Sampling
from node.errors import EngineError, NodeNotRunningError, RequestError
from node.loading import Loaded

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Wishes:
    """How to answer. None is left to the model's server: its defaults, a random seed, up to the context's end."""

    max_tokens: int | None = None
    temperature: float = 0.7
    seed: int | None = None


class Answerer(Protocol):
    def answer(self, messages: Messages, wishes: Wishes) -> Generator[str, None, None]:
        """Pieces of text as they come. Leaving early cancels. Raises RequestError and EngineError."""
        ...

    def close(self) -> None: ...


class NodeAnswerer:
    """Streams from the OpenAI endpoint of a running node."""

    def __init__(self, api_url: str, model: str, api_key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=api_url, headers=headers, timeout=httpx.Timeout(10.0, read=None))
        self._model = model

    def answer(self, messages: Messages, wishes: Wishes) -> Generator[str, None, None]:
        body = {"model": self._model, "messages": messages, "stream": True, **given(wishes)}
        try:
            with self._http.stream("POST", "/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise RequestError(_message(response.json()))
                for line in response.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield from _texts(json.loads(line.removeprefix("data: ")))
        except (httpx.HTTPError, ValueError) as exc:
            raise NodeNotRunningError(
                f"The node at {self._http.base_url} stopped answering: {exc}.", "See its log, and start it: cluster up"
            ) from exc

    def close(self) -> None:
        self._http.close()


class LocalAnswerer:
    """Runs a model that was loaded for this alone."""

    def __init__(self, loaded: Loaded) -> None:
        self._deployment = loaded.deployment

    def answer(self, messages: Messages, wishes: Wishes) -> Generator[str, None, None]:
        deployment = self._deployment
        prompt = tuple(deployment.chat.render([dict(message) for message in messages]))
        request = Request(
            id="run",
            prompt=prompt,
            max_tokens=wishes.max_tokens or max(1, deployment.context - len(prompt)),
            sampling=Sampling(
                temperature=wishes.temperature,
                seed=secrets.randbits(63) if wishes.seed is None else wishes.seed,
            ),
            stop=tuple(deployment.chat.stop),
            stop_tokens=frozenset(deployment.tokenizer.eos_ids),
            client="cluster run",
        )
        for event in deployment.engine.generate(request):
            if isinstance(event, Delta) and event.text:
                yield event.text
            elif isinstance(event, Finished) and event.reason == "error":
                raise EngineError(event.error, "Run it again; if it stays so, please report it.")

    def close(self) -> None:
        self._deployment.engine.close()


def given(wishes: Wishes) -> dict[str, Any]:
    fields = {"max_tokens": wishes.max_tokens, "temperature": wishes.temperature, "seed": wishes.seed}
    return {name: value for name, value in fields.items() if value is not None}


def _texts(chunk: dict[str, Any]) -> Iterator[str]:
    if "error" in chunk:
        raise EngineError(_message(chunk))
    for choice in chunk.get("choices", ()):
        if text := choice["delta"].get("content"):
            yield text


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message")) if isinstance(error, dict) else "The node refused the request."
