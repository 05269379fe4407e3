"""Measure prefill, decode and memory bandwidth of a model on this machine, and with --against llama the same file in
llama.cpp, turn by turn."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from node.config import load
from node.errors import UsageError
from node.instance import InstanceLock, prepare_home
from node.models.store import ModelStore
from tui.options import Backend, Home, Json, Memory, Model, Threads
from tui.output import note, print_json, print_table


def command(
    model: Model = None,
    prompt: Annotated[int, typer.Option("--prompt", min=1, help="Prompt tokens of a turn.")] = 512,
    decode: Annotated[int, typer.Option("--decode", min=2, help="Tokens decoded in a turn.")] = 128,
    repeat: Annotated[int, typer.Option("--repeat", min=1, max=1000, help="Turns that count.")] = 5,
    against: Annotated[str | None, typer.Option("--against", metavar="llama", help="What to compare with.")] = None,
    threads: Threads = None,
    memory: Memory = None,
    backend: Backend = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    if against not in (None, "llama"):
        raise UsageError(f"--against {against} is not known.", "Use --against llama, or leave it out.")
    settings, _ = load(
        {"model": model, "threads": threads, "memory": memory, "backend": backend, "context": max(16, prompt + decode)},
        home,
    )
    from node import bench, bench_llama
    from node.loading import load_deployment
    from tui.choose import fetched_model

    if against:
        bench_llama.require()
    prepare_home(settings.home)
    if pid := InstanceLock(settings.home).holder():
        note(f"a node runs here (pid {pid}); what it does meanwhile makes these figures worse")
    store = ModelStore(settings.home)
    loaded = load_deployment(settings, fetched_model(settings, store), store)
    try:
        plan = bench.Plan(prompt, decode, repeat, against == "llama")
        document = bench.run(loaded, settings.num_threads, plan, note)
    finally:
        loaded.deployment.engine.close()
    if as_json:
        print_json(document)
    else:
        show(document)


def show(document: dict[str, Any]) -> None:
    from node.bench import BUSY_LOAD

    print(
        f"{document['model']}: {document['prompt_tokens']} tokens of prompt, {document['decode_tokens']} decoded, "
        f"{document['threads']} threads, {document['backend']} ({document['instructions']})"
    )
    rows = [
        ("prefill", "tokens/s", document["prefill_tokens_per_s"], 1.0),
        ("decode", "tokens/s", document["decode_tokens_per_s"], 1.0),
        ("memory read", "GB/s", document["read_bytes_per_s"], 1e-9),
    ]
    if "llama" in document:
        rows += [
            ("llama.cpp prefill", "tokens/s", document["llama"]["prefill_tokens_per_s"], 1.0),
            ("llama.cpp decode", "tokens/s", document["llama"]["decode_tokens_per_s"], 1.0),
            ("ratio prefill", "", document["ratio"]["prefill"], 1.0),
            ("ratio decode", "", document["ratio"]["decode"], 1.0),
        ]
    print_table(
        ("", "MEDIAN", "MIN", "MAX", ""),
        [
            (name, *(f"{values[key] * scale:.{1 if unit else 2}f}" for key in ("median", "min", "max")), unit)
            for name, unit, values, scale in rows
        ],
    )
    if document["load_average"] > BUSY_LOAD:
        print(f"taken on a busy machine (load {document['load_average']:.1f}): not to be compared")
    print(
        f"decode reads {document['decode_bytes_per_token'] / 1e6:.1f} MB a token: "
        f"{document['roofline_share']:.0%} of what the memory gives"
    )
