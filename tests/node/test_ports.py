from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from node.errors import PortInUseError, UsageError
from node.ports import listen, listen_unix


def test_a_taken_port_names_the_process() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError) as caught:
            listen("127.0.0.1", port)
    assert f"Port {port}" in caught.value.message
    assert f"(pid {os.getpid()})" in caught.value.message
    assert "--api-port" in caught.value.cure


def test_an_address_of_someone_else() -> None:
    with pytest.raises(UsageError):
        listen("192.0.2.7", 0)
    with pytest.raises(UsageError):
        listen("no such host", 0)


def test_a_unix_socket_is_private_and_replaces_a_stale_one() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s"
        listen_unix(path).close()
        with listen_unix(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
