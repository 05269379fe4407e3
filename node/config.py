"""What a node was told to do: one frozen `Settings`, checked when it is made.

A value comes from the first of: a flag, its ROOST_* variable, `<home>/config.toml`, the default. The command line reads
its options' names, help and defaults from here, so there is one list of them.
"""

from __future__ import annotations

import os
import platform
import tomllib
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

import platformdirs
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from node.errors import UsageError
from node.limits import num_cores
from node.units import parse_bytes

PREFIX = "ROOST_"
CONFIG_FILE = "config.toml"

Port = Annotated[int, Field(ge=1, le=65535)]
Source = Literal["flag", "environment", "config.toml", "default"]

NEEDS_CLUSTER = "This version serves one machine; joining several comes with a later one."

UNBUILT: dict[str, tuple[frozenset[str] | None, str]] = {
    # field: (values that work today, or None for none at all; what to say of the others)
    "mode": (frozenset({"auto", "solo"}), NEEDS_CLUSTER),
    "backend": (frozenset({"auto", "cpu"}), "This version computes on the CPU; use --backend cpu or leave it out."),
    "peer": (None, NEEDS_CLUSTER),
    "interface": (None, NEEDS_CLUSTER),
    "peer_port": (None, NEEDS_CLUSTER),
    "token": (None, NEEDS_CLUSTER),
}
"""Flags that the command line knows and refuses in words until what they steer exists. Build it, drop the row."""


def _bytes(value: Any) -> int:
    try:
        return parse_bytes(value)
    except UsageError as exc:
        raise PydanticCustomError("size", "{words}", {"words": str(exc).rstrip(".")}) from exc


def _words(value: Any) -> Any:
    return tuple(word for word in value.replace(",", " ").split()) if isinstance(value, str) else value


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Settings(BaseModel):
    """Every field's description is its help text; properties resolve what was left open."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    home: Path = Field(description="Folder for models, state and config.toml.")
    model: str | None = Field(None, description="Model to serve: a name, or a path to a GGUF file or model folder.")
    name: str = Field(
        default_factory=lambda: platform.node()[:64] or "node",
        description="This node's name.",
        min_length=1,
        max_length=64,
    )
    api_host: str = Field("127.0.0.1", description="Address the API listens on.")
    api_port: Port = Field(7117, description="Port the API listens on.")
    api_key: str | None = Field(
        None, exclude=True, repr=False, min_length=1, description="Key that the API asks for; needed beyond loopback."
    )
    origins: Annotated[tuple[str, ...], BeforeValidator(_words)] = Field(
        (), description="Web pages (origins) that may call the API, separated by commas."
    )
    backend: Literal["auto", "cpu", "cuda", "mlx", "llama"] = Field("auto", description="What computes: auto or cpu.")
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads (default: the physical cores).")
    memory: Annotated[int, BeforeValidator(_bytes), Field(ge=1)] | None = Field(
        None, description='Memory budget, like "8GiB" (default: what is free, less a reserve).'
    )
    context: int | None = Field(
        None, ge=16, le=1 << 24, description="Tokens of prompt and answer (default: what was trained and fits memory)."
    )
    mode: Literal["auto", "solo", "replicas", "pipeline", "tensor", "split"] = Field(
        "auto", description="How machines share a model: auto or solo."
    )
    headless: bool = Field(False, description="Print machine-readable lines even on a terminal.")
    peer: str | None = Field(None, description="A node to join.")
    interface: str | None = Field(None, description="Network interface for the other nodes.")
    peer_port: Port | None = Field(None, description="Port the other nodes reach.")
    token: str | None = Field(None, description="Secret that lets a node join.")

    @model_validator(mode="after")
    def refuse_unbuilt(self) -> Settings:
        for field, (works, words) in UNBUILT.items():
            value = getattr(self, field)
            if value is not None and (works is None or value not in works):
                given = f"{flag_of(field)} {value}" if works else flag_of(field)
                raise UsageError(f"{given} is not available yet.", words)
        return self

    @model_validator(mode="after")
    def refuse_open_door(self) -> Settings:
        if self.api_key is None and not is_loopback(self.api_host):
            raise UsageError(
                f"--api-host {self.api_host} would let everybody on its network use this machine.",
                f"Stay on 127.0.0.1, or set a key for clients to send: {PREFIX}API_KEY, or api_key in config.toml.",
            )
        return self

    @property
    def num_threads(self) -> int:
        return self.threads or num_cores()

    @property
    def api_url(self) -> str:
        host = "127.0.0.1" if self.api_host in ("0.0.0.0", "") else "[::1]" if self.api_host == "::" else self.api_host
        return f"http://{f'[{host}]' if ':' in host and host[0] != '[' else host}:{self.api_port}/v1"


SETTABLE = frozenset(Settings.model_fields) - {"home"}


def flag_of(field: str) -> str:
    return "MODEL" if field == "model" else f"--{field.replace('_', '-')}"


def default_home() -> Path:
    return platformdirs.user_data_path("roost", appauthor=False)


def resolve_home(flag: Path | None = None, env: Mapping[str, str] = os.environ) -> Path:
    return (flag or Path(env.get(f"{PREFIX}HOME") or default_home())).expanduser().absolute()


def read_config(home: Path) -> dict[str, Any]:
    """`<home>/config.toml` as a dict of known fields. Raises UsageError."""
    path = home / CONFIG_FILE
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise UsageError(f"{path} cannot be read: {exc}.", "Mend the file or move it away.") from exc
    if unknown := sorted(values.keys() - SETTABLE):
        raise UsageError(f"{path} sets unknown names: {', '.join(unknown)}.", f"Known: {', '.join(sorted(SETTABLE))}.")
    return values


def load(
    flags: Mapping[str, Any], home: Path | None = None, env: Mapping[str, str] = os.environ
) -> tuple[Settings, dict[str, Source]]:
    """Settings and where each value came from. A flag that is None was not given. Raises UsageError."""
    home = resolve_home(home, env)
    layers: list[tuple[Source, dict[str, Any]]] = [
        ("config.toml", read_config(home)),
        ("environment", {field: env[key] for field in SETTABLE if env.get(key := f"{PREFIX}{field.upper()}")}),
        ("flag", {field: value for field, value in flags.items() if value is not None}),
    ]
    values: dict[str, Any] = {"home": home}
    sources: dict[str, Source] = dict.fromkeys(Settings.model_fields, "default")
    for source, layer in layers:
        values |= layer
        sources |= dict.fromkeys(layer, source)
    try:
        return Settings(**values), sources
    except ValidationError as exc:
        raise _in_words(exc, sources, home) from exc


def _in_words(exc: ValidationError, sources: Mapping[str, Source], home: Path) -> UsageError:
    problem = exc.errors(include_url=False)[0]
    field = str(problem["loc"][0]) if problem["loc"] else "?"
    said = {
        "flag": flag_of(field),
        "environment": f"{PREFIX}{field.upper()}",
        "config.toml": f"{field} in {home / CONFIG_FILE}",
    }.get(sources.get(field, "default"), field)
    return UsageError(
        f"{said} = {problem['input']!r}: {problem['msg']}.", f"cluster up --help explains {flag_of(field)}."
    )
