"""The hosts of multi-host tests: they are a network, shaping and delay are real, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import net as net_module
from tests import netns
from tests.net import Host, Net, NetError, Unavailable, available, sweep

ROOT = Path(__file__).parent.parent

# Echoes what comes on one connection after another; ends a connection with the other side.
ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 7000), family=socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
print("ready", flush=True)
while True:
    peer, _ = server.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := peer.recv(1 << 20):
        peer.sendall(data)
"""
# Prints the median round trip of 50 small messages, in ms.
PING = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 7000), timeout=5)
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
times = []
for _ in range(50):
    start = time.perf_counter()
    peer.sendall(b"ping")
    assert peer.recv(4, socket.MSG_WAITALL) == b"ping"
    times.append(time.perf_counter() - start)
print(sorted(times)[25] * 1e3)
"""
# Takes what comes on one connection and prints how many bytes that was.
SINK = """
import socket, sys
server = socket.create_server((sys.argv[1], 7000))
print("ready", flush=True)
peer, _ = server.accept()
total = 0
while data := peer.recv(1 << 20):
    total += len(data)
print(total, flush=True)
"""
# Sends for a second.
SOURCE = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 7000), timeout=5)
end = time.monotonic() + 1
while time.monotonic() < end:
    peer.send(bytes(1 << 14))
"""
# Joins the groups of mDNS and prints from whom a message came.
LISTEN = """
import socket, struct, sys
if sys.argv[1] == "4":
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("", 5353))
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton("224.0.0.251") + bytes(4))
else:
    sock = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    sock.bind(("::", 5353))
    group = socket.inet_pton(socket.AF_INET6, "ff02::fb") + struct.pack("I", socket.if_nametoindex("eth0"))
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, group)
sock.settimeout(10)
print("ready", flush=True)
data, sender = sock.recvfrom(2000)
print(data.decode(), sender[0].partition("%")[0], flush=True)
"""
SHOUT = """
import socket, sys
family, group = (socket.AF_INET, "224.0.0.251") if sys.argv[1] == "4" else (socket.AF_INET6, "ff02::fb%eth0")
address = socket.getaddrinfo(group, 5353, family, socket.SOCK_DGRAM)[0][4]
socket.socket(family, socket.SOCK_DGRAM).sendto(b"hello", address)
"""
# Frames that no network card would send: runts, groups as senders, noise, thousands of senders.
GARBAGE = """
import random, socket, sys
sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
sock.bind(("eth0", 0))
chance = random.Random(1)
me, other = bytes.fromhex("020000000009"), bytes.fromhex("027700000002")
frames = [other + me + b"\\x08\\x00", b"\\xff" * 14, bytes(14), bytes(60), other + b"\\xff" * 6 + bytes(1500)]
frames += [chance.randbytes(chance.randrange(14, 1514)) for _ in range(3000)]
frames += [other + bytes([2]) + chance.randbytes(5) + bytes(50) for _ in range(3000)]
for frame in frames:
    sock.send(frame)
"""


def names_of(pid: int) -> list[str]:
    return [p.name for folder in (netns.NAMES, netns.FILES) if folder.is_dir() for p in folder.glob(f"roost-{pid}-*")]


@pytest.fixture
def nothing_left() -> Iterator[None]:
    if reason := available():
        pytest.skip(reason)
    assert names_of(os.getpid()) == []
    yield
    assert names_of(os.getpid()) == []


hosts = pytest.mark.usefixtures("nothing_left")


def until(condition: Callable[[], Any], what: str, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)


def serve(host: Host, program: str, *words: str) -> subprocess.Popen[str]:
    process = host.popen([sys.executable, "-c", program, *words], stdout=subprocess.PIPE, text=True)
    assert line(process) == "ready"
    return process


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def say(host: Host, program: str, *words: str) -> str:
    done = host.run([sys.executable, "-c", program, *words], timeout=30, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def streamed(net: Net) -> int:
    """Bytes that went from b to a in a second of TCP."""
    sink = serve(net["a"], SINK, net["a"].address)
    say(net["b"], SOURCE, net["a"].address)
    return int(line(sink))


@hosts
@pytest.mark.parametrize("delay_ms", [0.0, 0.1])
def test_hosts_reach_each_other_over_ipv4_and_ipv6(delay_ms: float) -> None:
    with Net("a", "b", "c", delay_ms=delay_ms) as net:
        for address in (net["a"].address, net["a"].address6):
            serve(net["a"], ECHO, address)
            for host in (net["b"], net["c"]):
                assert float(say(host, PING, address)) > 0
    assert len({host.address for host in net} | {host.address6 for host in net}) == 6


@hosts
@pytest.mark.parametrize("delay_ms", [0.0, 0.1])
@pytest.mark.parametrize("version", ["4", "6"])
def test_multicast_reaches_every_other_host(delay_ms: float, version: str) -> None:
    with Net("a", "b", "c", delay_ms=delay_ms) as net:
        listeners = [serve(net[name], LISTEN, version) for name in "bc"]
        say(net["a"], SHOUT, version)
        for listener in listeners:
            said, sender = line(listener).split()
            assert said == "hello"
            assert sender == net["a"].address if version == "4" else sender.startswith("f")


@hosts
def test_shaping_bounds_both_directions_and_can_be_lifted() -> None:
    with Net("a", "b") as net:
        net["a"].shape(mbit=20)
        down = streamed(net)
        net["a"].shape(None)
        net["b"].shape(mbit=20)
        up = streamed(net)
        net["b"].shape(None)
        net["b"].shape(None)
        free = streamed(net)
    # 20 Mb/s are 2.5 MB a second; the queues hold some more
    assert 1e6 < down < 4.5e6
    assert 1e6 < up < 4.5e6
    assert free > 10e6


@hosts
def test_a_net_is_shaped_from_the_start_and_counts_wire_frames() -> None:
    with Net("a", "b", mbit=50, delay_ms=0.5) as net:
        sent, received = net["b"].bytes_sent(), net["a"].bytes_received()
        total = streamed(net)
        sent, received = net["b"].bytes_sent() - sent, net["a"].bytes_received() - received
        counters = net["b"]._counters()["tx"]
    assert 2e6 < total < 10e6
    # every frame of at most 1514 bytes pays for its headers: no offload hides them
    assert total * 1514 / 1460 * 0.999 < sent < total * 1.3
    assert total < received < sent + 10_000  # a few frames may have been under way at the first look
    assert counters["bytes"] / counters["packets"] < 1514


@hosts
@pytest.mark.parametrize("delay_ms", [0.15, 5.0])
def test_delay_is_one_way(delay_ms: float) -> None:
    with Net("a", "b", delay_ms=delay_ms) as net:
        serve(net["a"], ECHO, net["a"].address)
        measured = float(say(net["b"], PING, net["a"].address))
    assert 2 * delay_ms <= measured < 2 * delay_ms + 3


@hosts
def test_the_relay_carries_a_fast_stream() -> None:
    with Net("a", "b", delay_ms=0.15) as net:
        assert streamed(net) > 12.5e6  # 100 Mb/s


@hosts
def test_the_relay_lives_through_garbage() -> None:
    with Net("a", "b", delay_ms=0.1) as net:
        serve(net["b"], ECHO, net["b"].address)
        say(net["a"], GARBAGE)
        assert float(say(net["a"], PING, net["b"].address)) > 0


@hosts
def test_a_lost_relay_is_an_error() -> None:
    with pytest.raises(NetError, match="relay ended with status -9"), Net("a", delay_ms=1) as net:
        assert net._relay is not None
        net._relay.kill()
        net._relay.wait(5)


@hosts
@pytest.mark.parametrize("delay_ms", [0.0, 0.1])
def test_a_cut_link_is_silent_and_comes_back(delay_ms: float) -> None:
    with Net("a", "b", delay_ms=delay_ms) as net:
        for address in (net["a"].address, net["a"].address6):
            serve(net["a"], ECHO, address)
        for address in (net["a"].address, net["a"].address6):
            say(net["b"], PING, address)
            net["a"].link_down()
            before = net["a"].bytes_received()
            knock = [sys.executable, "-c", PING.replace("timeout=5", "timeout=0.3"), address]
            done = net["b"].run(knock, capture_output=True, text=True)
            assert done.returncode == 1
            assert "Timeout" in done.stderr or "No route to host" in done.stderr
            assert net["a"].bytes_received() == before
            net["a"].link_up()
            until(lambda where=address: say(net["b"], PING, where), "a ping after the link came back")


@hosts
def test_every_host_has_its_own_identity() -> None:
    with Net("a", "b") as net:
        ids = {say(host, "print(open('/etc/machine-id').read())") for host in net}
        names = [say(host, "import socket; print(socket.gethostname())") for host in net]
        found = say(net["a"], "import socket; print(socket.gethostbyname('b'))")
        assert found == net["b"].address
    own = Path("/etc/machine-id")
    assert all(len(bytes.fromhex(one)) == 16 for one in ids)
    assert len(ids | {own.read_text().strip() if own.exists() else ""}) == 3
    assert names == ["a", "b"]


@hosts
def test_signals_by_pid_hit_the_program() -> None:
    with Net("a") as net:
        words = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"]
        process = net["a"].popen(words, stdout=subprocess.PIPE, text=True)
        assert int(line(process)) == process.pid
        os.kill(process.pid, signal.SIGSTOP)
        state = Path(f"/proc/{process.pid}/stat")
        until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", "the program stops")
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(5) == -signal.SIGKILL


@hosts
def test_run_is_subprocess_run() -> None:
    with Net("a") as net:
        done = net["a"].run(["cat"], input="words", capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "words", "")
        with pytest.raises(subprocess.CalledProcessError):
            net["a"].run(["false"], check=True)
        with pytest.raises(subprocess.TimeoutExpired):
            net["a"].run(["sleep", "60"], timeout=0.2)
        assert not net._processes
        assert net["a"].run(["no-such-program"], stderr=subprocess.DEVNULL).returncode == 127
    with pytest.raises(NetError, match="no hosts"):
        net["a"].run(["true"])


@hosts
def test_exceptions_leave_nothing() -> None:
    seen: list[subprocess.Popen[Any]] = []
    pids: list[int] = []
    with pytest.raises(ZeroDivisionError), Net("a", "b", delay_ms=1) as net:
        seen.append(net["a"].popen(["sleep", "1000"]))
        # one in a session of its own, which no process group reaches
        assert net["a"].popen(["setsid", "--fork", "sleep", "1000"]).wait(10) == 0
        pids += map(int, netns.tool("ip", "netns", "pids", net["a"].namespace).split())
        assert set(pids) - {seen[0].pid}
        raise ZeroDivisionError
    assert seen[0].returncode == -signal.SIGKILL
    until(lambda: not any(map(is_alive, pids)), "all of the host's processes are gone")


@hosts
def test_failing_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net_module, "RELAY", Path(__file__))
    with pytest.raises(NetError, match="gcc"):
        Net("a", delay_ms=1).__enter__()
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


CREATOR = """
import sys, time
from tests.net import Net
with Net("a", "b", delay_ms=1) as net:
    print(net["a"].popen(["sleep", "1000"]).pid, net._relay.pid, flush=True)
    time.sleep(1000)
"""


def is_alive(pid: int) -> bool:
    return netns.started(pid) is not None


@hosts
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_killing_the_creator_leaves_nothing(number: signal.Signals) -> None:
    words = [sys.executable, "-c", CREATOR]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as creator:
        try:
            pids = [int(word) for word in line(creator).split()]
            assert len(pids) == 2
            assert all(map(is_alive, pids))
            left = names_of(creator.pid)
            assert len(left) == 5  # three namespaces, the files of two hosts
        finally:
            creator.send_signal(number)
        creator.wait(10)
    until(lambda: not any(map(is_alive, pids)), "processes in hosts die with their creator")
    if number != signal.SIGKILL:
        assert names_of(creator.pid) == []
        return
    assert sorted(names_of(creator.pid)) == sorted(left)
    assert set(left) <= set(sweep()) or names_of(creator.pid) == []  # another test run may sweep, too
    assert names_of(creator.pid) == []


@hosts
def test_sweep_spares_the_living() -> None:
    with Net("a") as net:
        assert not [name for name in sweep() if name.startswith(net.prefix)]
        with Net("a") as second:  # of the same names and addresses, beside the first
            assert say(second["a"], "print(1)") == say(net["a"], "print(1)") == "1"


@pytest.mark.parametrize("names", [(), ("a", "a"), ("A",), ("",), ("a/../b",), ("switch",), ("a b",), ("x" * 40,)])
def test_wrong_names_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="host"):
        Net(*names)


def test_wrong_numbers_are_refused() -> None:
    for delay_ms in (-1, 1e9, float("nan")):
        with pytest.raises(ValueError, match="delay_ms"):
            Net("a", delay_ms=delay_ms)
    for mbit in (0, -5, 1e9, float("nan")):
        with pytest.raises(ValueError, match="mbit"):
            Net("a", mbit=mbit)


def test_what_is_missing_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net_module, "available", lambda: available.__wrapped__())
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        with pytest.raises(Unavailable, match="Linux"):
            Net("a").__enter__()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(Unavailable, match="root"):
            Net("a").__enter__()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 0)
        patch.setattr(netns, "TOOL_PATH", "")
        with pytest.raises(Unavailable, match="need ip, tc, setpriv"):
            Net("a").__enter__()


@hosts
def test_forbidden_namespaces_are_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(name: str, *argv: str, **_: Any) -> str:
        raise NetError("Operation not permitted.")

    monkeypatch.setattr(netns, "tool", forbidden)
    assert available.__wrapped__() == "Network namespaces cannot be made here. Operation not permitted."
