from __future__ import annotations

from pathlib import Path

import pytest

from node.config import SETTABLE, UNBUILT, Settings, load, resolve_home
from node.errors import UsageError


def settings(home: Path, flags: dict | None = None, env: dict | None = None) -> Settings:
    return load(flags or {}, home, env or {})[0]


def test_defaults(tmp_path: Path) -> None:
    found = settings(tmp_path)
    assert (found.api_host, found.api_port, found.backend, found.mode) == ("127.0.0.1", 7117, "auto", "auto")
    assert found.num_threads >= 1
    assert found.api_url == "http://127.0.0.1:7117/v1"


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('api_port = 1001\nthreads = 3\nname = "file"\n')
    env = {"ROOST_API_PORT": "1002", "ROOST_THREADS": "4"}
    found, sources = load({"api_port": 1003, "context": None}, tmp_path, env)
    assert (found.api_port, found.threads, found.name, found.context) == (1003, 4, "file", None)
    assert {field: sources[field] for field in ("api_port", "threads", "name", "context")} == {
        "api_port": "flag",
        "threads": "environment",
        "name": "config.toml",
        "context": "default",
    }


def test_every_field_can_be_set_by_environment_and_is_described() -> None:
    assert {"model", "name", "api_host", "api_port", "backend", "threads", "memory", "context", "mode"} <= SETTABLE
    assert all(info.description for info in Settings.model_fields.values())


def test_home_is_the_flag_or_the_variable_or_the_platforms() -> None:
    assert resolve_home(Path("/a"), {"ROOST_HOME": "/b"}) == Path("/a")
    assert resolve_home(None, {"ROOST_HOME": "/b"}) == Path("/b")
    assert resolve_home(None, {}).name == "roost"


def test_sizes_are_read_from_every_source(tmp_path: Path) -> None:
    assert settings(tmp_path, {"memory": "8GiB"}).memory == 8 << 30
    assert settings(tmp_path, env={"ROOST_MEMORY": "512MiB"}).memory == 512 << 20
    (tmp_path / "config.toml").write_text("memory = 4096")
    assert settings(tmp_path).memory == 4096


@pytest.mark.parametrize(
    ("flags", "env", "words"),
    [
        ({"api_port": 99999}, {}, "--api-port = 99999"),
        ({}, {"ROOST_API_PORT": "abc"}, "ROOST_API_PORT = 'abc'"),
        ({"threads": 0}, {}, "--threads = 0"),
        ({"memory": "12q"}, {}, "'12q' is not a size"),
        ({"context": 1}, {}, "--context = 1"),
        ({"backend": "tpu"}, {}, "--backend = 'tpu'"),
        ({"name": ""}, {}, "--name = ''"),
    ],
)
def test_a_bad_value_is_named_with_its_source(tmp_path: Path, flags: dict, env: dict, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(flags, tmp_path, env)
    assert words in caught.value.message and caught.value.cure


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mode", "split"), ("mode", "pipeline"), ("backend", "cuda"), ("backend", "llama"),
        ("peer", "host"), ("interface", "10.0.0.1"), ("peer_port", 7118), ("token", "t"),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused_from_flag_and_environment(tmp_path: Path, field: str, value: object) -> None:
    for flags, env in (({field: value}, {}), ({}, {f"ROOST_{field.upper()}": str(value)})):
        with pytest.raises(UsageError, match="is not available yet"):
            load(flags, tmp_path, env)
    assert field in UNBUILT


@pytest.mark.parametrize(
    ("text", "words"),
    [("api_port = ", "cannot be read"), ("colour = 1", "unknown names: colour"), ("api_port = []", "api_port in")],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        load({}, tmp_path, {})
    assert words in caught.value.message and "config.toml" in caught.value.message


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read"):
        load({}, tmp_path, {})


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:7117/v1"), ("::", "http://[::1]:7117/v1"), ("::1", "http://[::1]:7117/v1")],
)
def test_the_url_can_be_opened(tmp_path: Path, host: str, url: str) -> None:
    assert settings(tmp_path, {"api_host": host}, {"ROOST_API_KEY": "k"}).api_url == url


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "box.local"])
def test_an_address_that_others_reach_needs_a_key(tmp_path: Path, host: str) -> None:
    with pytest.raises(UsageError) as caught:
        settings(tmp_path, {"api_host": host})
    assert "everybody on its network" in caught.value.message and "ROOST_API_KEY" in caught.value.cure
    found = settings(tmp_path, {"api_host": host}, {"ROOST_API_KEY": "secret"})
    assert found.api_key == "secret" and "secret" not in f"{found!r} {found.model_dump()}"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_none(tmp_path: Path, host: str) -> None:
    assert settings(tmp_path, {"api_host": host}).api_key is None


def test_origins_are_a_list_in_words_or_in_toml(tmp_path: Path) -> None:
    assert settings(tmp_path, {"origins": "http://a, http://b"}).origins == ("http://a", "http://b")
    (tmp_path / "config.toml").write_text('origins = ["http://c"]')
    assert settings(tmp_path).origins == ("http://c",)
