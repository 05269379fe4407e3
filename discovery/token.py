"""The cluster's secret: 128 random bits, written so that a person can carry them to the next machine.

Everything that a node shows to strangers is derived from it through a public key, so a guessable secret could be found
offline. Only what `new_token` makes is taken: 16 random bytes and two of a checksum, in base32.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import secrets
from pathlib import Path

from discovery.errors import RoostError

SECRET_BYTES = 16
CHECK_BYTES = 2
PREFIX = "roost-"
FEWEST_DISTINCT_BYTES = 7
"""Sixteen random bytes have fewer different ones once in 10^15 draws; what people type has them at once."""


class TokenError(RoostError):
    """A token that no `cluster token` made."""


def new_token() -> str:
    while True:
        secret = secrets.token_bytes(SECRET_BYTES)
        if len(set(secret)) >= FEWEST_DISTINCT_BYTES:
            return format_token(secret)


def format_token(secret: bytes) -> str:
    text = base64.b32encode(secret + _check(secret)).decode().rstrip("=").lower()
    return PREFIX + "-".join(text[i : i + 5] for i in range(0, len(text), 5))


def parse_token(text: str) -> bytes:
    """The 16 secret bytes. Case, spaces and dashes do not matter. Raises TokenError, which never repeats the token."""
    plain = "".join(text.split()).replace("-", "").lower().removeprefix(PREFIX[:-1]).upper()
    try:
        data = base64.b32decode(plain + "=" * (-len(plain) % 8))
    except (binascii.Error, ValueError):
        data = b""
    secret, check = data[:SECRET_BYTES], data[SECRET_BYTES:]
    if len(data) != SECRET_BYTES + CHECK_BYTES or check != _check(secret):
        raise TokenError(
            "The token is not one that Roost made, or has a typing mistake in it.",
            "Copy a token that was made with 128 random bits. One of your own choice could be guessed from outside.",
        )
    if len(set(secret)) < FEWEST_DISTINCT_BYTES:
        raise TokenError("The token is not random.", "Make one: cluster token")
    return secret


def token_path(home: Path) -> Path:
    return home / "token"


def read_token(home: Path) -> str | None:
    """This home's token, None when it has none. Raises TokenError for a file that holds something else."""
    try:
        text = token_path(home).read_text("utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as exc:
        raise TokenError(f"{token_path(home)} cannot be read: {exc}.", "Mend its permissions or move it away.") from exc
    try:
        parse_token(text)
    except TokenError as exc:
        raise TokenError(f"{token_path(home)} holds no token.", "Move it away; cluster token makes a new one.") from exc
    return text


def keep_token(home: Path, token: str) -> str:
    """Store `token` unless the home has one already; returns the one that it has now."""
    parse_token(token)
    path = token_path(home)
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        staged = path.with_name(f".token-{secrets.token_hex(4)}")
        fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, f"{token}\n".encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        try:
            os.link(staged, path)  # of two that do this at once, one wins and both use its token
        except FileExistsError:
            pass
        finally:
            staged.unlink()
    except OSError as exc:
        raise TokenError(f"The token cannot be stored in {home}: {exc.strerror}.", "Give another --home.") from exc
    return read_token(home) or token


def _check(secret: bytes) -> bytes:
    return hashlib.sha256(b"roost token" + secret).digest()[:CHECK_BYTES]
