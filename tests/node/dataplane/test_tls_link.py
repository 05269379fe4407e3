"""Links over real TLS connections on loopback, and what becomes of them when the other side misbehaves."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from backends.base import Batch, Span
from discovery.identity import NODE_NAME, Credentials, Identity
from discovery.token import format_token
from node.dataplane.channel import Channel
from node.dataplane.frames import Header, Kind
from node.dataplane.links import LinkClosed
from node.dataplane.tls_link import DEAD_S, DEPTH, TLSLink
from node.worker import Sampled, StepMessage

DEPLOYMENT = 3


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return Credentials.make(Identity.open(tmp_path_factory.mktemp("home")), format_token(bytes(range(16))))


@pytest.fixture
def channels(credentials: Credentials) -> Iterator[tuple[Channel, Channel]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    ends: list[ssl.SSLSocket] = []
    context = credentials.server_context()
    thread = threading.Thread(target=lambda: ends.append(context.wrap_socket(far, server_side=True)))
    thread.start()
    client = credentials.client_context().wrap_socket(near, server_hostname=NODE_NAME)
    thread.join()
    pair = Channel(client), Channel(ends[0])
    yield pair
    for channel in pair:
        channel.close()


@pytest.fixture
def links(channels: tuple[Channel, Channel]) -> Iterator[tuple[TLSLink, TLSLink]]:
    pair = TLSLink(channels[0], DEPLOYMENT, name="near"), TLSLink(channels[1], DEPLOYMENT, name="far")
    yield pair
    for link in pair:
        link.close()


def step(number: int, rows: int, cols: int = 64) -> StepMessage:
    x = np.random.default_rng(number).standard_normal((rows, cols), np.float32)
    return StepMessage(number, Batch((Span(1, 0, rows, 1),), np.arange(rows, dtype=np.int32)), (), x)


def test_messages_come_in_order_and_bit_equal_both_ways(links: tuple[TLSLink, TLSLink]) -> None:
    near, far = links
    sizes = (1, 511, 3, 4096, 1, 700)

    def answer() -> None:
        for number, rows in enumerate(sizes):
            got = far.recv(10)
            sent = step(number, rows)
            is_equal = got.step == number and got.x.tobytes() == sent.x.tobytes()  # type: ignore[union-attr]
            far.send(Sampled(number, ((1, int(is_equal), None),)))

    thread = threading.Thread(target=answer)
    thread.start()
    for number, rows in enumerate(sizes):
        near.send(step(number, rows))
    assert [near.recv(10) for _ in sizes] == [Sampled(i, ((1, 1, None),)) for i in range(len(sizes))]
    thread.join()


def test_a_quiet_link_stays_open_by_its_pulse(links: tuple[TLSLink, TLSLink]) -> None:
    near, far = links
    assert near.recv(DEAD_S * 2) is None
    assert near.reason is None and far.reason is None
    far.send(Sampled(1, ()))
    assert near.recv(5) == Sampled(1, ())


def test_whoever_is_silent_is_dead(channels: tuple[Channel, Channel]) -> None:
    near = TLSLink(channels[0], DEPLOYMENT, name="near")  # the far end is a channel without a pulse
    with pytest.raises(LinkClosed, match=r"silent for 0\.8 s"):
        near.recv(10)
    with pytest.raises(LinkClosed, match="silent"):
        near.send(Sampled(1, ()))


def test_the_reason_of_a_goodbye_arrives_after_what_was_sent_before(links: tuple[TLSLink, TLSLink]) -> None:
    near, far = links
    near.send(Sampled(1, ()))
    near.close("The plan changed.")
    assert far.recv(5) == Sampled(1, ())
    with pytest.raises(LinkClosed, match="The plan changed"):
        far.recv(5)
    assert near.reason == "The plan changed."
    with pytest.raises(LinkClosed, match="The plan changed"):
        near.send(Sampled(2, ()))


def test_a_receiver_that_takes_nothing_holds_the_sender_back(links: tuple[TLSLink, TLSLink]) -> None:
    near, far = links
    num_sent = []

    def send() -> None:
        for number in range(200):
            near.send(step(number, 512, 1024))  # 2 MiB each
            num_sent.append(number)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    assert far.recv(5).step == 0
    while len(num_sent) < DEPTH:
        time.sleep(0.01)
    before = -1
    while before != len(num_sent):  # until it stands still
        before = len(num_sent)
        time.sleep(0.1)
    assert before < 20
    time.sleep(DEAD_S * 1.5)  # slow is not dead
    assert len(num_sent) == before and near.reason is None
    assert [far.recv(5).step for _ in range(199)] == list(range(1, 200))
    thread.join(10)
    assert len(num_sent) == 200


@pytest.mark.parametrize("raw", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4, bytes(64), b"\xff" * 64])
def test_garbage_ends_the_link_in_words(channels: tuple[Channel, Channel], raw: bytes) -> None:
    near = TLSLink(channels[0], DEPLOYMENT, name="near")
    channels[1]._send_all(memoryview(raw), 1.0)
    with pytest.raises(LinkClosed, match="data protocol"):
        near.recv(5)


def test_a_sender_that_waits_is_released_when_the_other_side_dies(channels: tuple[Channel, Channel]) -> None:
    near = TLSLink(channels[0], DEPLOYMENT, name="near")  # the far end neither reads nor beats
    with pytest.raises(LinkClosed, match="silent"):
        for number in range(50):
            near.send(step(number, 512, 1024))


def test_frames_of_another_deployment_end_the_link(channels: tuple[Channel, Channel]) -> None:
    near = TLSLink(channels[0], DEPLOYMENT, name="near")
    channels[1].send(Header(Kind.SAMPLED, DEPLOYMENT + 1, meta_bytes=8), bytes(8), patience_s=1.0)
    with pytest.raises(LinkClosed, match="deployment"):
        near.recv(5)


def test_a_connection_that_breaks_in_mid_frame_ends_the_link(channels: tuple[Channel, Channel]) -> None:
    near = TLSLink(channels[0], DEPLOYMENT, name="near")
    channels[1].send(Header(Kind.SAMPLED, DEPLOYMENT, meta_bytes=8), b"half", patience_s=1.0)
    channels[1].close()
    with pytest.raises(LinkClosed):
        near.recv(5)


def test_bytes_on_the_wire_for_a_decoded_token(channels: tuple[Channel, Channel]) -> None:
    message = step(1, 1, 576)
    near = TLSLink(channels[0], DEPLOYMENT, name="near")
    far = TLSLink(channels[1], DEPLOYMENT, name="far")
    near.send(message)
    assert far.recv(5).step == 1
    beats = 32 * 4
    assert 576 * 4 < near.num_sent <= 576 * 4 + 96 + beats
    near.close()
    far.close()
