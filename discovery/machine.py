"""What makes this machine itself: a node's identity is bound to it, so that a copied home folder is another node."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import uuid
from pathlib import Path

MACHINE_ID_FILES = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))


def machine_hash() -> str:
    """64 hex digits that differ between machines and stay on one. The machine's own id cannot be had from them."""
    return hashlib.sha256(f"roost machine {_machine_id()}".encode()).hexdigest()


def _machine_id() -> str:
    for path in MACHINE_ID_FILES:
        try:
            text = path.read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text and text != "uninitialized":
            return text
    if sys.platform == "darwin":
        try:
            command = ["/usr/sbin/ioreg", "-rd1", "-c", "IOPlatformExpertDevice"]
            told = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            told = ""
        match = re.search(r'"IOPlatformUUID" = "([^"]+)"', told)
        if match:
            return match[1]
    return f"{uuid.getnode():012x}"  # the network card's address, where a system tells nothing better
