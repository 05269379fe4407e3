"""Remove an installed model and what is left of its downloads."""

from __future__ import annotations

from typing import Annotated

import typer

from node.config import resolve_home
from node.models.store import ModelStore
from node.units import format_bytes
from tui.options import Home
from tui.output import note


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Its name in `cluster models`.")],
    home: Home = None,
) -> None:
    freed = ModelStore(resolve_home(home)).remove(model)
    note(f"removed {model}, {format_bytes(freed)} freed")
