"""Ask a model once, or chat with it when there is no prompt. What is piped in is the prompt, or its end. The running
node answers if it serves that model; otherwise the model is loaded just for this."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from node.config import Settings, load
from node.errors import NodeNotRunningError, RoostError, UsageError
from node.instance import prepare_home
from tui.client import NodeClient
from tui.options import Context, Home, Memory, Threads
from tui.output import note, print_roost_error

if TYPE_CHECKING:
    from tui.chat import Answerer, Wishes

HELP = "/clear forgets the conversation, /bye or Ctrl-D leaves, Ctrl-C stops an answer"


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name, or a path to a GGUF file or folder.")],
    prompt: Annotated[str | None, typer.Argument(metavar="[PROMPT]", help="The question.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="What the model is told first.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Longest answer.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0, max=2, help="0 is greedy.")] = 0.7,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Repeats the same draw.")] = None,
    threads: Threads = None,
    memory: Memory = None,
    context: Context = None,
    home: Home = None,
) -> None:
    settings, _ = load({"model": model, "threads": threads, "memory": memory, "context": context}, home)
    question = with_piped(prompt)
    if question is not None and not question.strip():
        raise UsageError("The prompt is empty.", "Give one, pipe one in, or leave it out on a terminal to chat.")

    from tui.chat import Wishes

    wishes = Wishes(max_tokens, temperature, seed)
    messages = [{"role": "system", "content": system}] if system else []
    with answering(settings) as answerer:
        if question is None:
            converse(answerer, messages, wishes)
        else:
            say(answerer.answer([*messages, {"role": "user", "content": question}], wishes))


def with_piped(prompt: str | None) -> str | None:
    """The prompt and what stdin brings; None for a conversation."""
    if sys.stdin is None or sys.stdin.isatty():
        return prompt
    piped = sys.stdin.read()
    return "\n\n".join(part for part in (prompt, piped) if part and part.strip()) if piped.strip() else prompt or ""


@contextlib.contextmanager
def answering(settings: Settings) -> Iterator[Answerer]:
    """Whoever answers for the model."""
    from node.models.store import ModelStore
    from tui.chat import LocalAnswerer, NodeAnswerer
    from tui.choose import reference

    store = ModelStore(settings.home)
    model = reference(settings.model or "", store)
    answerer = None
    with contextlib.suppress(NodeNotRunningError), NodeClient(settings.home) as client:
        document, running = client.status(), client.settings()["model"]
        ready = [deployment["model"] for deployment in document["deployments"] if deployment["state"] == "ready"]
        if ready and model in (running, *ready):
            answerer = NodeAnswerer(document["api"], ready[0], settings.api_key)
    if answerer is None:
        from node.loading import load_deployment

        prepare_home(settings.home)
        answerer = LocalAnswerer(load_deployment(settings, model, store))
    with contextlib.closing(answerer):
        yield answerer


def say(pieces: Iterator[str]) -> str:
    """Print an answer as it comes; returns all of it."""
    text = ""
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
        text += piece
    print(flush=True)
    return text


def converse(answerer: Answerer, messages: list[dict[str, str]], wishes: Wishes) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history for input()
    note(HELP)
    start = list(messages)
    while True:
        try:
            line = input(">>> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            note("\n/bye leaves")
            continue
        if line == "/bye":
            return
        if line == "/clear":
            messages[:] = start
        elif line.startswith("/"):
            note(HELP)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                with contextlib.closing(answerer.answer(messages, wishes)) as pieces:
                    messages.append({"role": "assistant", "content": say(pieces)})
            except KeyboardInterrupt:
                messages.pop()
                note("\nstopped")
            except RoostError as exc:
                messages.pop()
                print_roost_error(exc)
