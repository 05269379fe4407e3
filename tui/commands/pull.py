"""Fetch a model: by its name in the catalog, or hf:owner/repo[:file] from the Hugging Face hub. An interrupted download
goes on where it stopped."""

from __future__ import annotations

from typing import Annotated

import typer

from node.config import resolve_home
from node.instance import prepare_home
from node.models.store import ModelStore
from tui.fetch import fetch
from tui.options import Home


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name of `cluster models --all`, or hf:owner/repo.")],
    home: Home = None,
) -> None:
    folder = resolve_home(home)
    prepare_home(folder)
    fetch(model, ModelStore(folder))
