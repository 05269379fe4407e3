"""Keys, ids and certificates, checked through real TLS connections and real gRPC ones."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from discovery.identity import NODE_NAME, Credentials, Identity, IdentityError, peer_id
from discovery.token import format_token, new_token

TOKEN = format_token(bytes(range(16)))


def member(home: Path, token: str = TOKEN) -> tuple[Identity, Credentials]:
    identity = Identity.open(home)
    return identity, Credentials.make(identity, token)


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str = NODE_NAME) -> tuple[object, object]:
    """What each side came to: the other's certificate, or its error. One byte each way, since TLS 1.3 refuses a
    client's certificate only after the client thinks that it is connected."""
    ends = socket.socketpair()
    results: list[object] = [None, None]

    def side(i: int) -> None:
        with ends[i] as raw:
            raw.settimeout(10)
            try:
                if i == 0:
                    tls = server.wrap_socket(raw, server_side=True)
                else:
                    tls = client.wrap_socket(raw, server_hostname=name)
                with tls:
                    tls.sendall(b"x")
                    results[i] = tls.getpeercert(True) if tls.recv(1) else ConnectionError("closed")
            except OSError as error:
                results[i] = error

    threads = [threading.Thread(target=side, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results[0], results[1]


def test_a_node_is_the_same_after_a_restart_one_incarnation_further(tmp_path: Path) -> None:
    first, second = Identity.open(tmp_path), Identity.open(tmp_path)
    assert (second.id, second.incarnation) == (first.id, 2)
    assert first.incarnation == 1 and len(first.id) == 16
    for path in (tmp_path / "identity").glob("*.*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_home_that_was_copied_to_another_machine_is_another_node(tmp_path: Path) -> None:
    here = Identity.open(tmp_path, machine="one")
    there = Identity.open(tmp_path, machine="two")
    assert there.id != here.id and there.incarnation == 1
    assert Identity.open(tmp_path, machine="two").id == there.id


@pytest.mark.parametrize("name, content", [("key.pem", b"garbage"), ("facts.json", b"[1]"), ("facts.json", b"\xff{")])
def test_a_broken_identity_is_made_anew(tmp_path: Path, name: str, content: bytes) -> None:
    first = Identity.open(tmp_path)
    (tmp_path / "identity" / name).write_bytes(content)
    assert Identity.open(tmp_path).id != first.id


def test_an_identity_that_cannot_be_kept_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "identity").write_text("a file where a folder should be")
    with pytest.raises(IdentityError, match="cannot be kept"):
        Identity.open(tmp_path)


def test_members_know_each_other_by_token_alone(tmp_path: Path) -> None:
    (a, ours), (b, theirs) = member(tmp_path / "a"), member(tmp_path / "b")
    assert ours.fingerprint == theirs.fingerprint
    seen_by_server, seen_by_client = handshake(ours.server_context("one"), theirs.client_context("one"))
    assert isinstance(seen_by_server, bytes) and isinstance(seen_by_client, bytes)
    assert peer_id(seen_by_server) == b.id and peer_id(seen_by_client) == a.id


def test_a_certificate_of_another_cluster_is_refused_on_both_sides(tmp_path: Path) -> None:
    (_, ours), (_, theirs) = member(tmp_path / "a"), member(tmp_path / "b", new_token())
    assert ours.fingerprint != theirs.fingerprint
    for server, client in ((ours, theirs), (theirs, ours)):
        results = handshake(server.server_context(), client.client_context())
        assert all(isinstance(result, OSError) for result in results)


def test_who_shows_no_certificate_or_asks_for_another_name_is_refused(tmp_path: Path) -> None:
    _, ours = member(tmp_path)
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    assert isinstance(handshake(ours.server_context(), stranger)[0], OSError)
    assert isinstance(handshake(ours.server_context(), ours.client_context(), "example.org")[1], OSError)


def test_older_tls_is_refused(tmp_path: Path) -> None:
    _, ours = member(tmp_path)
    old = ours.client_context()
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    assert isinstance(handshake(ours.server_context(), old)[0], OSError)


def test_the_authority_is_no_node(tmp_path: Path) -> None:
    _, ours = member(tmp_path)
    for certificate in (ours.authority_pem, b"", b"garbage", b"-----BEGIN CERTIFICATE-----\n"):
        with pytest.raises(IdentityError):
            peer_id(certificate)


def test_grpc_takes_the_same_certificates(tmp_path: Path) -> None:
    (_, ours), (b, theirs), (_, foreign) = (
        member(tmp_path / "a"),
        member(tmp_path / "b"),
        member(tmp_path / "c", new_token()),
    )

    def who(request: bytes, context: grpc.ServicerContext) -> bytes:
        return peer_id(context.auth_context()["x509_pem_cert"][0]).encode()

    handlers = {"Who": grpc.unary_unary_rpc_method_handler(who)}
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Test", handlers),))
    pairs = [(ours.key_pem, ours.certificate_pem)]
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials(pairs, ours.authority_pem, require_client_auth=True)
    )
    server.start()

    def ask(one: Credentials) -> bytes:
        credentials = grpc.ssl_channel_credentials(one.authority_pem, one.key_pem, one.certificate_pem)
        options = [("grpc.ssl_target_name_override", NODE_NAME)]
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
            return channel.unary_unary("/Test/Who")(b"", timeout=10)

    try:
        assert ask(theirs) == b.id.encode()
        with pytest.raises(grpc.RpcError):
            ask(foreign)
    finally:
        server.stop(None).wait()
