"""`/v1/chat/completions`, `/v1/completions` and `/v1/models`: from a checked request to generations, and back."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from node.api import answers, errors
from node.api.answers import ChatChunks, Choice, CompletionChunks, Head
from node.api.requests import ChatRequest, CommonFields, CompletionRequest
from node.api.watch import Connection, merged, submitted
from node.deployment import AnyDeployment, Deployment
from node.engine.generation import Generation
from node.engine.sequence import Delta, Finished, Request, Sampling
from node.errors import ContextLengthError, EngineError, LoadingError, RequestError, RoostError

log = logging.getLogger(__name__)

MAX_CHOICES_IN_ALL = 64
"""Prompts times choices of one request: more than an empty queue takes would never be served."""

SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
DEFAULT_COMPLETION_TOKENS = 16
"""What the specification says for completions; a chat answer may fill the context."""


class Answer:
    """An ASGI response that runs generations and writes what they say, as a stream or as one document."""

    def __init__(
        self,
        deployment: Deployment,
        head: Head,
        requests: Sequence[Request],
        *,
        choices_per_prompt: int,
        chunks: ChatChunks | CompletionChunks | None,
        include_usage: bool,
        prefixes: Sequence[str],
        ping_s: float,
    ) -> None:
        self._deployment, self._head, self._requests = deployment, head, requests
        self._choices_per_prompt = choices_per_prompt
        self._chunks, self._include_usage = chunks, include_usage
        self._prefixes = prefixes
        self._ping_s = ping_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._deployment.check_ready()  # it may have begun to drain while the prompt was rendered
        engine = self._deployment.engine
        generations = submitted([lambda request=request: engine.submit(request) for request in self._requests])
        async with Connection(receive, send, generations, ping_s=self._ping_s) as connection:
            if self._chunks is None:
                await self._whole(connection, generations, scope, receive, send)
            else:
                await self._stream(connection, generations, self._chunks)

    async def _stream(
        self, connection: Connection, generations: list[Generation], chunks: ChatChunks | CompletionChunks
    ) -> None:
        """An error after the 200 is the last event; without a [DONE] clients know that the answer is not whole."""
        await connection.start(200, SSE_HEADERS)
        connection.ping = b": ping\n\n"
        try:
            tail = await self._events(connection, generations, chunks)
        except RoostError as error:
            tail = f"data: {errors.dumps(errors.described(error)[1])}\n\n"
        except Exception:
            log.exception("an answer failed in mid-stream")
            tail = f"data: {errors.dumps(errors.internal())}\n\n"
        await connection.write(errors.encoded(tail), more=False)

    async def _events(
        self, connection: Connection, generations: list[Generation], chunks: ChatChunks | CompletionChunks
    ) -> str:
        """Write events as they come, those that are ready together at once. Returns what is to be written last."""
        opening = [chunks.first(i) for i in range(len(generations))] if isinstance(chunks, ChatChunks) else []
        opening += [chunks.text(i, prefix, ()) for i, prefix in enumerate(self._prefixes) if prefix]
        await connection.write(errors.encoded("".join(opening)))
        usages = [Finished("error", answers.Usage())] * len(generations)
        async with contextlib.aclosing(merged(generations)) as batches:
            async for events in batches:
                out, failure = [], None
                for index, event in events:
                    if isinstance(event, Delta):
                        if event.text or event.logprobs:
                            out.append(chunks.text(index, event.text, event.logprobs))
                    elif isinstance(event, Finished):
                        failure = broken_off(event)
                        if failure is not None:
                            break
                        usages[index] = event
                        out.append(chunks.last(index, finish_reason(event), event.usage))
                if out:
                    await connection.write(errors.encoded("".join(out)))
                if failure is not None:
                    raise failure
        tail = "data: [DONE]\n\n"
        if self._include_usage:
            tail = chunks.usage(self._usage([one.usage for one in usages]), answers.timings(usages[0].usage)) + tail
        return tail

    async def _whole(
        self, connection: Connection, generations: list[Generation], scope: Scope, receive: Receive, send: Send
    ) -> None:
        names, choices = self._deployment.tokenizer, [Choice(prefix) for prefix in self._prefixes]
        async with contextlib.aclosing(merged(generations)) as batches:
            async for events in batches:
                for index, event in events:
                    choice = choices[index]
                    if isinstance(event, Delta):
                        choice.offsets += answers.offsets_of(names, event.logprobs, len(choice.text))
                        choice.text += event.text
                        choice.logprobs += event.logprobs
                    elif isinstance(event, Finished):
                        if connection.is_gone:
                            return
                        failure = broken_off(event)
                        if failure is not None:
                            raise failure
                        choice.finish_reason, choice.usage = finish_reason(event), event.usage
        shapes = [self._shape(i, choice) for i, choice in enumerate(choices)]
        usages = [choice.usage for choice in choices]
        document = self._head.whole(shapes, self._usage(usages), answers.timings(usages[0]))
        await errors.json_response(document)(scope, receive, send)

    def _usage(self, usages: Sequence[answers.Usage]) -> dict[str, Any]:
        prompts = usages[:: self._choices_per_prompt]
        return answers.usage_of(
            sum(one.prompt_tokens for one in prompts),
            sum(one.cached_tokens for one in prompts),
            sum(one.completion_tokens for one in usages),
        )

    def _shape(self, index: int, choice: Choice) -> dict[str, Any]:
        names, shape = self._deployment.tokenizer, {"index": index, "finish_reason": choice.finish_reason}
        if self._head.object == "chat.completion":
            logprobs = answers.chat_logprobs(names, choice.logprobs) if choice.logprobs else None
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            return {**shape, "message": message, "logprobs": logprobs}
        told = answers.completion_logprobs(names, choice.logprobs, choice.offsets) if choice.logprobs else None
        return {**shape, "text": choice.text, "logprobs": told}


def broken_off(event: Finished) -> RoostError | None:
    """Why an answer is not whole. One that is cancelled under a client who still listens ends with the server."""
    if event.reason == "error":
        return EngineError(event.error)
    if event.reason == "cancelled":
        return LoadingError("The server stopped before the answer was finished.", "Send the request again in a moment.")
    return None


def finish_reason(event: Finished) -> str:
    return "length" if event.reason == "length" else "stop"


def chat(deployment: Deployment, request: ChatRequest, *, ping_s: float) -> Answer:
    request.check_tools()
    limit = request.token_limit
    options = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        options.setdefault("reasoning_effort", request.reasoning_effort)
    reserved = {"messages", "tools", "add_generation_prompt"} & options.keys()
    if reserved:
        raise RequestError(
            f"chat_template_kwargs may not set {', '.join(sorted(reserved))}.", param="chat_template_kwargs"
        )
    prompt = deployment.chat.render(request.messages, **options)
    sampling = request.sampling(request.num_logprobs, vocab_size=deployment.tokenizer.vocab_size)
    name = f"chatcmpl-{secrets.token_hex(12)}"
    head = Head(name, "chat.completion", int(time.time()), deployment.id)
    stops = (*request.stop, *deployment.chat.stop)  # a base model's transcript would go on with the user's next turn
    requests = _choices(deployment, name, [prompt], request, sampling, limit, stops)
    chunks = None
    if request.stream:
        chunk_head = dataclasses.replace(head, object="chat.completion.chunk")
        chunks = ChatChunks(chunk_head, deployment.tokenizer, include_usage=request.include_usage)
    return _answer(deployment, head, requests, request, chunks, [""] * len(requests), ping_s)


def completions(deployment: Deployment, request: CompletionRequest, *, ping_s: float) -> Answer:
    prompts, texts = _prompts(deployment, request)
    sampling = request.sampling(request.logprobs, vocab_size=deployment.tokenizer.vocab_size)
    if request.echo and request.logprobs is not None:
        raise RequestError("echo with logprobs would need those of the prompt, which is not supported.", param="echo")
    name = f"cmpl-{secrets.token_hex(12)}"
    head = Head(name, "text_completion", int(time.time()), deployment.id)
    limit = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    requests = _choices(deployment, name, prompts, request, sampling, limit, request.stop)
    prefixes = [text if request.echo else "" for text in texts for _ in range(request.n or 1)]
    chunks = None
    if request.stream:
        chunks = CompletionChunks(head, deployment.tokenizer, include_usage=request.include_usage)
    return _answer(deployment, head, requests, request, chunks, prefixes, ping_s)


def _answer(
    deployment: Deployment,
    head: Head,
    requests: Sequence[Request],
    request: CommonFields,
    chunks: ChatChunks | CompletionChunks | None,
    prefixes: Sequence[str],
    ping_s: float,
) -> Answer:
    return Answer(
        deployment,
        head,
        requests,
        choices_per_prompt=request.n or 1,
        chunks=chunks,
        include_usage=request.include_usage,
        prefixes=prefixes,
        ping_s=ping_s,
    )


def _choices(
    deployment: Deployment,
    name: str,
    prompts: Sequence[Sequence[int]],
    request: CommonFields,
    sampling: Sampling,
    limit: int | None,
    stops: tuple[str, ...],
) -> list[Request]:
    """Choice i of a prompt draws with seed + i, so that a seed still says everything."""
    requests = []
    for prompt in prompts:
        room = deployment.context - len(prompt)
        if room < 1:
            error = ContextLengthError(len(prompt), deployment.context)
            error.param = "messages" if isinstance(request, ChatRequest) else "prompt"
            raise error
        for i in range(request.n or 1):
            requests.append(
                Request(
                    id=f"{name}-{len(requests)}",
                    prompt=tuple(prompt),
                    max_tokens=room if limit is None else min(limit, room),
                    sampling=dataclasses.replace(sampling, seed=sampling.seed + i),
                    stop=stops,
                    stop_tokens=deployment.tokenizer.eos_ids,
                    continuing=isinstance(request, CompletionRequest),
                    client=request.user or "",
                )
            )
    return requests


def _prompts(deployment: Deployment, request: CompletionRequest) -> tuple[list[list[int]], list[str]]:
    """Token ids of the prompts (a string, strings, token ids, or lists of token ids), and their texts to echo."""
    tokenizer, prompt = deployment.tokenizer, request.prompt
    given = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    if len(given) * (request.n or 1) > MAX_CHOICES_IN_ALL:
        raise RequestError(
            f"{len(given)} prompts with {request.n or 1} choices each are too many.",
            f"Send requests of at most {MAX_CHOICES_IN_ALL} choices in all.",
            param="prompt",
        )
    ids, texts = [], []
    for i, one in enumerate(given):
        param = f"prompt[{i}]" if given is prompt else "prompt"
        if isinstance(one, str):
            ids.append(tokenizer.encode_prompt(one))
            texts.append(one)
            continue
        if not isinstance(one, list) or not all(type(token) is int for token in one):
            raise RequestError(f"'{param}' has to be a string or a list of token ids.", param=param)
        if not all(0 <= token < tokenizer.vocab_size for token in one):
            raise RequestError(f"'{param}' has a token outside the vocabulary.", param=param)
        ids.append(one)
        texts.append(tokenizer.decode(one) if request.echo else "")
    if not ids or not all(ids):
        raise RequestError("'prompt' is empty.", param="prompt")
    return ids, texts


def model_card(deployment: AnyDeployment) -> dict[str, Any]:
    """The context that is served, not the one that was trained."""
    return {
        "id": deployment.id,
        "object": "model",
        "created": deployment.created,
        "owned_by": "roost",
        "max_model_len": deployment.context,
        "context_length": deployment.context,
        "capabilities": ["completion", "chat"],
    }
