"""List the installed models; with --all also those that `cluster pull` knows by name."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from node.config import resolve_home
from node.models import catalog
from node.models.store import ModelStore
from node.units import format_bytes
from tui.options import Home, Json
from tui.output import note, print_json, print_table


def command(
    home: Home = None,
    everything: Annotated[bool, typer.Option("--all", help="Also what can be pulled.")] = False,
    as_json: Json = False,
) -> None:
    store = ModelStore(resolve_home(home))
    installed = store.list()
    ids = {model.id for model in installed}
    pullable = [entry for entry in catalog.ENTRIES if entry.id not in ids]
    if as_json:
        print_json(
            {
                "installed": [asdict(model) | {"path": str(model.path)} for model in installed],
                "pullable": [
                    {"id": entry.id, "description": entry.description, "aliases": list(entry.aliases)}
                    for entry in pullable
                ],
            }
        )
        return
    if installed:
        print_table(
            ("MODEL", "SIZE", "QUANTIZATION", "ARCHITECTURE"),
            ((m.id, format_bytes(m.size_bytes), m.quantization, m.architecture) for m in installed),
        )
    else:
        note("nothing is installed; `cluster models --all` shows what can be pulled")
    if everything:
        if installed:
            print()
        print_table(("CAN BE PULLED", "DESCRIPTION"), ((entry.id, entry.description) for entry in pullable))
