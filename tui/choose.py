"""Which model a command means when none is named."""

from __future__ import annotations

from pathlib import Path

from node.config import Settings
from node.models.catalog import DEFAULT_MODEL, canonical
from node.models.store import ModelStore
from tui.fetch import fetch
from tui.output import note


def reference(model: str, store: ModelStore) -> str:
    """One spelling for each model: its id, or the absolute path of a file or folder that is no installed model."""
    path = Path(model).expanduser()
    return str(path.absolute()) if store.find(model) is None and path.exists() else canonical(model)


def chosen_model(settings: Settings, store: ModelStore) -> str:
    """The named one, else the best installed one, else the default one, which may not be here yet."""
    if settings.model is not None:
        return reference(settings.model, store)
    best = store.best()
    return best.id if best is not None else DEFAULT_MODEL


def fetched_model(settings: Settings, store: ModelStore) -> str:
    """`chosen_model`, fetched first if it is the default of an empty store. A named model is never fetched unasked."""
    model = chosen_model(settings, store)
    if settings.model is None and store.find(model) is None:
        note(f"no model is installed; fetching {model}")
        return fetch(model, store).id
    return model
