"""Hosts as Linux network namespaces, for every test that needs more than one machine.

    with Net("a", "b", mbit=1000, delay_ms=0.15) as net:
        server = net["a"].popen([sys.executable, "serve.py", net["a"].address])
        net["b"].run([sys.executable, "ask.py", net["a"].address])

The switch lives in a namespace of its own: a bridge, or `relay.c` where frames are delayed. Nothing of the machine's
own network is touched. A host has `eth0`, a host name, a machine id, `/etc/hosts` with all hosts, and no name server.
It shares files, users and processors with the machine; its `/sys` is a fresh mount, without `/sys/fs/cgroup`.

Nothing is left behind: processes in hosts die with their creator, and a `Net` begins by sweeping away what creators
that were killed have left. Names carry the creator's pid and start time for that.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import types
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.netns import (
    DEADLINE_S,
    FILES,
    NetError,
    Unavailable,
    available,
    delete,
    ip,
    new_prefix,
    offloads_off,
    sweep,
    tool,
    which,
)

__all__ = ["Host", "Net", "NetError", "Unavailable", "available", "sweep"]

RELAY = Path(__file__).with_name("relay.c")


class Host:
    """One machine of a `Net`. `address` is IPv4, `address6` IPv6; both are reached from every other host."""

    def __init__(self, net: Net, name: str, number: int) -> None:
        self.name = name
        self.namespace = f"{net.prefix}-{name}"
        self.address, self.address6 = f"10.77.{number}.1", f"fd77::{number:x}"
        self._net, self._outer, self._number = net, f"p{number}", number

    def popen(self, argv: Sequence[str | os.PathLike[str]], **kwargs: Any) -> subprocess.Popen[Any]:
        """`subprocess.Popen` in this host, in a session of its own. `pid` is the program's own, not a wrapper's.

        It is killed, with all that it started, when the `Net` ends or this interpreter dies.
        """
        inside = [which("ip"), "netns", "exec", self.namespace, "/bin/sh", "-c"]
        inside += ['echo "$0" > /proc/sys/kernel/hostname && exec "$@"', self.name, *argv]
        # each of these replaces itself by the next
        words = [which("setpriv"), "--pdeathsig", "KILL", which("unshare"), "--uts", *inside]
        return self._net._start(words, **kwargs)

    def run(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        timeout: float = 60.0,
        input: Any = None,
        capture_output: bool = False,
        check: bool = False,
        **kwargs: Any,
    ) -> subprocess.CompletedProcess[Any]:
        """`subprocess.run` in this host; after `timeout` seconds the program and all of its group are killed."""
        if capture_output:
            kwargs |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        if input is not None:
            kwargs["stdin"] = subprocess.PIPE
        process = self.popen(argv, **kwargs)
        try:
            out, err = process.communicate(input, timeout)
        finally:
            self._net._end(process)
        done = subprocess.CompletedProcess(argv, process.returncode, out, err)
        if check:
            done.check_returncode()
        return done

    def link_down(self) -> None:
        """Pulls the cable: the host keeps its addresses and hears nothing any more, not even a refusal."""
        ip(self._net.switch, f"link set {self._outer} down")

    def link_up(self) -> None:
        ip(self._net.switch, f"link set {self._outer} up")

    def shape(self, mbit: float | None) -> None:
        """Bounds what the host sends and what it is sent to `mbit` million bits a second each; None lifts that."""
        if mbit is not None:
            _check_mbit(mbit)
        for namespace, device in ((self.namespace, "eth0"), (self._net.switch, self._outer)):
            if mbit is not None:
                bytes_per_s = mbit * 1e6 / 8
                # a burst covers a late timer; the queue is that of a small switch
                burst = max(5_000, round(bytes_per_s * 250e-6))
                limit = burst + round(min(512_000, max(64_000, bytes_per_s * 0.05)))
                rate = f"rate {round(mbit * 1e6)}bit burst {burst}b limit {limit}b"
                tool("tc", *f"-n {namespace} qdisc replace dev {device} root tbf {rate}".split())
            elif "tbf" in tool("tc", *f"-n {namespace} qdisc show dev {device} root".split()):
                tool("tc", *f"-n {namespace} qdisc del dev {device} root".split())

    def bytes_sent(self) -> int:
        """Bytes that left this host, with their Ethernet headers."""
        return self._counters()["tx"]["bytes"]

    def bytes_received(self) -> int:
        """Bytes that reached this host, with their Ethernet headers."""
        return self._counters()["rx"]["bytes"]

    def _counters(self) -> dict[str, dict[str, int]]:
        return json.loads(tool("ip", *f"-n {self.namespace} -j -s link show eth0".split()))[0]["stats64"]

    def _make(self) -> None:
        net, n, outer = self._net, self._number, self._outer
        tool("ip", "netns", "add", self.namespace)
        etc = FILES / self.namespace
        while not etc.is_dir():  # another test run may remove the empty folder above at this moment
            with contextlib.suppress(FileNotFoundError):
                etc.mkdir(parents=True)
        (etc / "machine-id").write_text(uuid.uuid4().hex + "\n")
        (etc / "resolv.conf").write_text("# no name server: a look-up fails at once\n")
        others = "".join(f"{host.address} {host.name}\n{host.address6} {host.name}\n" for host in net)
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{others}")
        master = "" if net.delay_ms else "master br0"
        # no automatic IPv6 addresses: the switch has none, the host's are there at once, without duplicate detection
        ip(
            net.switch,
            f"link add {outer} mtu 1500 type veth peer name eth0 address 02:77:00:00:00:{n:02x}",
            f"link set {outer} addrgenmode none",
        )
        offloads_off(net.switch, outer, "eth0")
        ip(net.switch, f"link set eth0 netns {self.namespace}", f"link set {outer} {master} up")
        ip(
            self.namespace,
            "link set lo up",
            "link set eth0 addrgenmode none",
            "link set eth0 up",
            f"addr add {self.address}/16 broadcast + dev eth0",
            f"addr add {self.address6}/64 dev eth0 nodad",
            f"addr add fe80::{n:x}/64 dev eth0 nodad",
            "route add default dev eth0",
            "route add ::/0 dev eth0",
        )


class Net:
    """Hosts of these names on one switch. `delay_ms` is one way, `mbit` as in `Host.shape`, for every host.

    Entering raises `Unavailable`, in words, where namespaces are not to be had. Iterating gives the hosts.
    """

    def __init__(self, *names: str, mbit: float | None = None, delay_ms: float = 0.0) -> None:
        if len(set(names)) != len(names) or not 1 <= len(names) <= 200:
            raise ValueError(f"a net has 1 to 200 hosts of different names, not {names}")
        if wrong := [name for name in names if not re.fullmatch(r"[a-z][a-z0-9-]{0,30}", name) or name == "switch"]:
            raise ValueError(f"a host's name is lower-case letters, digits and -, and not 'switch': {wrong}")
        if not 0 <= delay_ms <= 1000:
            raise ValueError(f"delay_ms must be from 0 to 1000, not {delay_ms}")
        if mbit is not None:
            _check_mbit(mbit)
        self.mbit, self.delay_ms = mbit, delay_ms
        self.prefix = new_prefix()
        self.switch = f"{self.prefix}-switch"
        self._hosts = {name: Host(self, name, number) for number, name in enumerate(names, 1)}
        self._processes: set[subprocess.Popen[Any]] = set()
        self._starter: ThreadPoolExecutor | None = None
        self._relay: subprocess.Popen[Any] | None = None
        self._creator, self._closed, self._owns_sigterm = os.getpid(), False, False

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    def __enter__(self) -> Net:
        if reason := available():
            raise Unavailable(reason)
        if self._starter is not None:
            raise NetError("This net was entered before.", "Make a new one.")
        # one thread starts every process: a parent-death signal comes when the thread dies that started the process
        self._starter = ThreadPoolExecutor(1, "net")
        atexit.register(self.close)
        # SIGTERM unwinds the with block, unless the program has other plans for it
        self._owns_sigterm = (
            threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        if self._owns_sigterm:
            signal.signal(signal.SIGTERM, _leave)
        try:
            sweep()
            tool("ip", "netns", "add", self.switch)
            if not self.delay_ms:
                bridge = "link add br0 type bridge stp_state 0 mcast_snooping 0"
                ip(self.switch, bridge, "link set br0 addrgenmode none", "link set br0 up")
            for host in self:
                host._make()
                if self.mbit is not None:
                    host.shape(self.mbit)
            if self.delay_ms:
                self._start_relay()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        lost = None if self._relay is None else self._relay.poll()
        self.close()
        if lost is not None and kind is None:
            raise NetError(f"The relay ended with status {lost} while the net was in use.", "Its last words are above.")

    def close(self) -> None:
        """Kills what runs in the hosts and removes them. Again is harmless, and in a fork it does nothing."""
        if os.getpid() != self._creator or self._starter is None:
            return
        self._closed = True
        self._starter.shutdown()
        for process in list(self._processes):
            self._end(process)
        delete(self.switch, *(host.namespace for host in self))
        atexit.unregister(self.close)
        if self._owns_sigterm:
            self._owns_sigterm = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _start(self, words: list[Any], **kwargs: Any) -> subprocess.Popen[Any]:
        if self._starter is None or self._closed:
            raise NetError("This net has no hosts now.", "Start programs inside its with statement.")

        def start() -> subprocess.Popen[Any]:
            process = subprocess.Popen(words, start_new_session=True, **kwargs)
            self._processes.add(process)
            return process

        return self._starter.submit(start).result()

    def _end(self, process: subprocess.Popen[Any]) -> None:
        """Kills a process with its group where it still runs, and closes its pipes."""
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(DEADLINE_S)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not flushed meets a dead reader
                    pipe.close()
        self._processes.discard(process)

    def _start_relay(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder, "relay")
            tool("gcc", "-O2", "-o", str(program), str(RELAY))
            words = [which("setpriv"), "--pdeathsig", "KILL", which("ip"), "netns", "exec", self.switch, program]
            words += [str(self.delay_ms * 1000), *(host._outer for host in self)]
            self._relay = self._start(words, stdout=subprocess.PIPE, text=True)
            if self._relay.stdout is None or self._relay.stdout.readline() != "ready\n":
                raise NetError("The relay does not start.", "Its last words are above.")


def _check_mbit(mbit: float) -> None:
    if not 0.1 <= mbit <= 100_000:
        raise ValueError(f"mbit must be from 0.1 to 100000, not {mbit}")


def _leave(number: int, frame: types.FrameType | None) -> None:
    raise SystemExit(128 + number)
