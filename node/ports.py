"""Listening sockets, and who has the port when it is taken."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import psutil

from node.errors import PortInUseError, UsageError

BACKLOG = 128


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises PortInUseError that names the process, UsageError for a foreign address."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as exc:
        raise UsageError(f"'{host}' is not an address of this machine.", "Use --api-host 127.0.0.1.") from exc
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as exc:
        sock.close()
        if exc.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"Port {port} on {host} is taken by {describe_owner(port)}.",
                "Stop it, or choose another port with --api-port.",
            ) from exc
        if exc.errno == errno.EACCES:
            raise UsageError(f"Port {port} needs privileges.", "Choose one above 1023 with --api-port.") from exc
        raise UsageError(f"Cannot listen on {host}:{port}: {exc.strerror}.", "Use --api-host 127.0.0.1.") from exc
    return sock


def listen_unix(path: Path) -> socket.socket:
    """A listening Unix socket that only its owner may open. A file left by a killed node is replaced."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        sock.bind(str(path))
    finally:
        os.umask(mask)
    sock.listen(BACKLOG)
    return sock


def describe_owner(port: int) -> str:
    """ "python3 (pid 4711)", or that it cannot be seen: another user's sockets may be hidden from us."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                if connection.pid is None:
                    break
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        pass
    return "another user's program"
