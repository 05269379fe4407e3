"""What `tests/net.py` needs of the machine: whether namespaces can be had, removing them, the tools that make them."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import itertools
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from discovery.errors import RoostError

NAMES = Path("/var/run/netns")  # where `ip netns` keeps namespaces
FILES = Path("/etc/netns")  # what `ip netns exec` mounts over /etc
TOOLS = ("ip", "tc", "setpriv", "unshare", "gcc")
TOOL_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
DEADLINE_S = 10.0
_serial = itertools.count(1)


class NetError(RoostError):
    """A host or the switch could not be made, changed or removed."""


class Unavailable(NetError):
    """Hosts cannot be made here; `available()` gives the reason."""


@functools.cache
def available() -> str | None:
    """Why hosts cannot be made here, or None where they can. Tried once, with a namespace that is removed again."""
    if sys.platform != "linux":
        return "Hosts in network namespaces need Linux."
    if os.geteuid() != 0:
        return "Hosts in network namespaces need root."
    if missing := [name for name in TOOLS if shutil.which(name, path=TOOL_PATH) is None]:
        return f"Hosts in network namespaces need {', '.join(missing)} (Debian: iproute2, util-linux, gcc)."
    trial = f"{new_prefix()}-trial"
    try:
        tool("ip", "netns", "add", trial)
        ip(trial, "link add br0 type bridge mcast_snooping 0", "link add p1 type veth peer name eth0")
        ip(trial, "addr add fd77::1/64 dev eth0 nodad")
        tool("tc", *f"-n {trial} qdisc add dev p1 root tbf rate 1mbit burst 5kb limit 64kb".split())
        set_name = "echo trial > /proc/sys/kernel/hostname"
        tool("unshare", "--uts", which("ip"), "netns", "exec", trial, "/bin/sh", "-c", set_name)
        offloads_off(trial, "p1", "eth0")
        FILES.mkdir(exist_ok=True)
    except (NetError, OSError) as exc:
        return f"Network namespaces cannot be made here. {exc}"
    finally:
        delete(trial)
    return None


def sweep() -> list[str]:
    """Removes the namespaces of creators that no longer live, with what runs in them. Returns their names."""
    names = {path.name for folder in (NAMES, FILES) if folder.is_dir() for path in folder.iterdir()}
    owners = {name: re.match(r"roost-(\d+)-(\d+)-", name) for name in names}
    dead = sorted(name for name, owner in owners.items() if owner and started(int(owner[1])) != int(owner[2]))
    delete(*dead)
    return dead


def new_prefix() -> str:
    """The beginning of the names of one net's namespaces: whose they are, and which of them."""
    return f"roost-{os.getpid()}-{started(os.getpid())}-{next(_serial)}"


def started(pid: int) -> int | None:
    """When a process began, in clock ticks since the machine did; None when it is gone or a zombie."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


def delete(*names: str) -> None:
    """Kills what runs in these namespaces and removes them with their files; what is gone already is fine."""
    deadline = time.monotonic() + DEADLINE_S
    for name in names:
        while (NAMES / name).exists():
            if time.monotonic() > deadline:
                raise NetError(f"The namespace {name} cannot be removed, or a process in it does not die of SIGKILL.")
            # both may fail: another sweep may be at the same work
            pids = _quiet("ip", "netns", "pids", name).split()
            for pid in map(int, pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if pids:
                time.sleep(0.01)
            else:
                _quiet("ip", "netns", "del", name)
        shutil.rmtree(FILES / name, ignore_errors=True)
    with contextlib.suppress(OSError):  # others may have files there
        FILES.rmdir()


def offloads_off(namespace: str, *devices: str) -> None:
    """Makes frames what they are on a wire: no longer than the MTU, with checksums that were computed."""
    with ThreadPoolExecutor(1) as other_thread, other_thread.submit(_socket_in, namespace).result() as sock:
        # ETHTOOL_S: GRO, GSO, TSO, SG, TXCSUM, RXCSUM
        for device, command in itertools.product(devices, (0x2C, 0x24, 0x1F, 0x19, 0x17, 0x15)):
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            fcntl.ioctl(sock, 0x8946, struct.pack("16sP16x", device.encode(), ctypes.addressof(value)))  # SIOCETHTOOL


def _socket_in(namespace: str) -> socket.socket:
    """A socket of another namespace. The calling thread moves there and stays."""
    with (NAMES / namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000) != 0:  # CLONE_NEWNET
            raise NetError(f"The namespace {namespace} cannot be entered: {os.strerror(ctypes.get_errno())}.")
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def which(name: str) -> str:
    path = shutil.which(name, path=TOOL_PATH)
    if path is None:
        raise Unavailable(f"{name} is not installed.")
    return path


def tool(name: str, *argv: str, input: str | None = None) -> str:
    done = subprocess.run([which(name), *argv], input=input, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NetError(f"`{name} {' '.join(argv)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _quiet(name: str, *argv: str) -> str:
    return subprocess.run([which(name), *argv], capture_output=True, text=True, check=False).stdout


def ip(namespace: str, *commands: str) -> None:
    tool("ip", "-n", namespace, "-batch", "-", input="\n".join(commands))
