"""The cluster's secret: read back whatever people do to its looks, refused when it is not one of ours."""

import base64
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery.token import TokenError, format_token, keep_token, new_token, parse_token, read_token, token_path

SECRET = bytes(range(16))


def test_a_token_reads_back_however_it_is_typed() -> None:
    token = format_token(SECRET)
    assert len({parse_token(text) for text in (token, token.upper(), token.replace("-", " "), f" {token}\n")}) == 1
    assert parse_token(token) == SECRET


def test_tokens_differ() -> None:
    assert len({parse_token(new_token()) for _ in range(50)}) == 50


@given(st.integers(0, 28), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"))
def test_a_typing_mistake_is_noticed_but_for_two_in_a_hundred_thousand(at: int, letter: str) -> None:
    plain = format_token(SECRET).removeprefix("roost-").replace("-", "")
    typed = plain[:at] + letter + plain[at + 1 :]
    if base64.b32decode(typed.upper() + "===") != base64.b32decode(plain.upper() + "==="):
        with pytest.raises(TokenError):
            parse_token(typed)


@given(st.text(max_size=80))
def test_what_people_make_up_is_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(TokenError) as caught:
        parse_token(text)
    assert len(text) < 12 or text not in str(caught.value)


@pytest.mark.parametrize("secret", [bytes(16), b"\x01\x02" * 8, b"hello" * 3 + b"h"])
def test_a_weak_secret_is_refused_even_with_a_right_checksum(secret: bytes) -> None:
    with pytest.raises(TokenError, match="not random"):
        parse_token(format_token(secret))


def test_a_home_keeps_its_first_token_for_its_owner_only(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert read_token(home) is None
    first, second = new_token(), new_token()
    assert keep_token(home, first) == first
    assert keep_token(home, second) == first == read_token(home)
    assert stat.S_IMODE(token_path(home).stat().st_mode) == 0o600
    assert [path.name for path in home.iterdir()] == ["token"]


def test_a_token_file_of_something_else_is_told_and_left_alone(tmp_path: Path) -> None:
    token_path(tmp_path).write_text("hunter2")
    with pytest.raises(TokenError, match="holds no token"):
        read_token(tmp_path)
    with pytest.raises(TokenError, match="holds no token"):
        keep_token(tmp_path, new_token())
    assert token_path(tmp_path).read_text() == "hunter2"
