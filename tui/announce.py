"""How a node says that it is ready, and its log."""

from __future__ import annotations

import logging

from node.config import Settings
from node.loading import Loaded
from node.units import format_bytes

NUM_NODES = 1


def ready_line(model: str, api_url: str) -> str:
    """The line that scripts wait for."""
    return f"ready model={model} api={api_url} nodes={NUM_NODES}"


def log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
    for chatty in ("httpx", "httpcore", "uvicorn.access", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def show_summary(settings: Settings, loaded: Loaded) -> None:
    """For people: the address, and how to point an agent at it."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table

    deployment, memory = loaded.deployment, loaded.runner.memory()
    facts = Table.grid(padding=(0, 2))
    for name, value in (
        ("API", f"[bold]{settings.api_url}[/bold]  (OpenAI-compatible, any key)"),
        ("Context", f"{deployment.context} tokens ({loaded.plan.reason})"),
        ("Memory", f"{format_bytes(memory.weights_bytes)} weights, {format_bytes(memory.kv_bytes)} cache"),
        ("Device", f"{loaded.backend} ({loaded.runner.isa}), {settings.num_threads} threads"),
        ("Agents", f"OPENAI_BASE_URL={settings.api_url} OPENAI_API_KEY=any"),
        ("Ask", f'cluster run {deployment.id} "…"'),
        ("Stop", "Ctrl-C, or cluster down"),
    ):
        facts.add_row(f"[dim]{name}[/dim]", value)
    Console().print(
        Panel(facts, title=f"[bold green]{deployment.id} is ready[/bold green]", title_align="left", expand=False)
    )
