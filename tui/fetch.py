"""Pulling a model while somebody watches: a bar on a terminal, a line a stage elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from node.models.download import Progress
from node.models.pull import pull
from node.models.store import InstalledModel, ModelStore
from node.units import format_bytes
from tui.output import is_terminal, note


def fetch(name: str, store: ModelStore) -> InstalledModel:
    """Raises UnknownModelError and DownloadError. What was fetched so far is kept for the next try."""
    with (bar if is_terminal(sys.stderr) else lines)(name) as show:
        model = pull(name, store, progress=show)
    note(f"pulled {model.id}, {format_bytes(model.size_bytes)}")
    return model


@contextmanager
def lines(name: str) -> Iterator[Callable[[Progress], None]]:
    """One line whenever the stage changes."""
    last: list[str] = []

    def show(progress: Progress) -> None:
        if progress.stage not in last:
            last[:] = [progress.stage]
            total = f", {format_bytes(progress.total_bytes)}" if progress.total_bytes else ""
            note(f"{name}: {progress.stage}{total}")

    yield show


@contextmanager
def bar(name: str) -> Iterator[Callable[[Progress], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    with Bars(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        task = bars.add_task(name, total=None)
        stage = ""

        def show(progress: Progress) -> None:
            nonlocal stage
            if progress.stage != stage:
                stage = progress.stage
                bars.reset(task, total=progress.total_bytes, description=f"{name} {stage}")
            bars.update(task, completed=progress.done_bytes, total=progress.total_bytes)

        yield show
