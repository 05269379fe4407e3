"""Command-line options made from `Settings`: its names, descriptions and defaults are said once, there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from node.config import UNBUILT, Settings, flag_of

METAVARS = {"memory": "SIZE", "peer": "HOST[:PORT]", "interface": "ADDR"}


def setting(field: str) -> Any:
    """The option of one field. None means "not given": `node.config.load` then looks further."""
    info = Settings.model_fields[field]
    default = "" if info.default_factory or info.default in (None, False, ()) else f" [default: {info.default}]"
    return typer.Option(
        flag_of(field),
        help=f"{info.description}{default}",
        metavar=METAVARS.get(field, field.split("_")[-1].upper()),
        hidden=field in UNBUILT and UNBUILT[field][0] is None,
    )


Home = Annotated[Path | None, typer.Option("--home", help="Folder for models and state (ROOST_HOME).", metavar="DIR")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Model = Annotated[str | None, typer.Argument(metavar="[MODEL]", help="A name, or a path to a GGUF file or folder.")]
Name = Annotated[str | None, setting("name")]
ApiHost = Annotated[str | None, setting("api_host")]
ApiPort = Annotated[int | None, setting("api_port")]
Origins = Annotated[str | None, setting("origins")]
Backend = Annotated[str | None, setting("backend")]
Threads = Annotated[int | None, setting("threads")]
Memory = Annotated[str | None, setting("memory")]
Context = Annotated[int | None, setting("context")]
Mode = Annotated[str | None, setting("mode")]
Peer = Annotated[str | None, setting("peer")]
Interface = Annotated[str | None, setting("interface")]
PeerPort = Annotated[int | None, setting("peer_port")]
Token = Annotated[str | None, setting("token")]


def given(**flags: Any) -> Mapping[str, Any]:
    """The flags that were given."""
    return {field: value for field, value in flags.items() if value is not None}
