"""Which model a command means when none is named, and a model that is not here yet."""

from __future__ import annotations

from node.config import Settings
from node.models.catalog import DEFAULT_MODEL
from node.models.store import ModelStore
from tui.fetch import fetch
from tui.output import note


def chosen_model(settings: Settings, store: ModelStore) -> str:
    """The named one, else the best installed one, else the default, which is fetched."""
    if settings.model is not None:
        return settings.model
    best = store.best()
    if best is not None:
        return best.id
    note(f"no model is installed; fetching {DEFAULT_MODEL}")
    return fetch(DEFAULT_MODEL, store).id
