"""Who a node is, and how it proves that it belongs: its key, the cluster's authority, and TLS made of both.

The authority's key is derived from the cluster's token (HKDF, RFC 5869), so every member has it and signs its own
certificate; nobody has to be first. Certificates carry the fixed name `node.roost`, which both sides check, and the
node's id, which is a hash of its public key. Their dates span a century: a machine with a wrong clock is a member too.
P-256, because gRPC's TLS takes no Ed25519 by default.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import json
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from discovery.errors import RoostError
from discovery.machine import machine_hash
from discovery.token import parse_token

NODE_NAME = "node.roost"
ID_DIGITS = 16
P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
VALID_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
VALID_TO = datetime.datetime(2099, 12, 31, tzinfo=datetime.UTC)


class IdentityError(RoostError):
    """A node's key cannot be read or kept, or a peer's certificate is not one of ours."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A node's key, kept in `<home>/identity/` for its owner's eyes only. `incarnation` counts the node's starts."""

    id: str
    incarnation: int
    key: ec.EllipticCurvePrivateKey
    folder: Path

    @classmethod
    def open(cls, home: Path, machine: str | None = None) -> Identity:
        """The identity of this home, made on first use, one incarnation further each time. A home that comes from
        another machine (its `machine` hash differs) gets a new key. Raises IdentityError."""
        folder, machine = home / "identity", machine or machine_hash()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with (folder / "lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                key = _read_key(folder / "key.pem")
                facts = _read_facts(folder / "facts.json")
                incarnation = int(facts.get("incarnation", 0)) + 1
                if key is None or facts.get("machine") != machine:
                    key, incarnation = ec.generate_private_key(ec.SECP256R1()), 1
                    _write(folder / "key.pem", _pem(key))
                facts = {"machine": machine, "incarnation": incarnation}
                _write(folder / "facts.json", json.dumps(facts).encode())
        except OSError as exc:
            raise IdentityError(
                f"This node's identity in {folder} cannot be kept: {exc.strerror}.", "Give another --home."
            ) from exc
        return cls(id_of(key.public_key()), incarnation, key, folder)


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a member of one cluster shows and checks. PEM throughout; `fingerprint` names the cluster, and says nothing
    of its secret; `chain` is a file with key and certificate, since the ssl module reads them from files only."""

    fingerprint: str
    authority_pem: bytes
    certificate_pem: bytes
    key_pem: bytes
    chain: Path

    @classmethod
    def make(cls, identity: Identity, token: str) -> Credentials:
        """Raises TokenError for a token that is none."""
        authority = authority_key(parse_token(token))
        certificate_pem = _node_certificate(identity, authority).public_bytes(serialization.Encoding.PEM)
        key_pem, chain = _pem(identity.key), identity.folder / "tls.pem"
        _write(chain, key_pem + certificate_pem)
        return cls(
            fingerprint=fingerprint_of(authority),
            authority_pem=_authority_certificate(authority).public_bytes(serialization.Encoding.PEM),
            certificate_pem=certificate_pem,
            key_pem=key_pem,
            chain=chain,
        )

    def server_context(self, *protocols: str) -> ssl.SSLContext:
        """TLS 1.3, asking for the other side's certificate. `protocols` are offered by ALPN."""
        return self._context(ssl.PROTOCOL_TLS_SERVER, protocols)

    def client_context(self, *protocols: str) -> ssl.SSLContext:
        """Use it with `server_hostname=NODE_NAME`."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT, protocols)

    def _context(self, kind: int, protocols: tuple[str, ...]) -> ssl.SSLContext:
        context = ssl.SSLContext(kind)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.authority_pem.decode())
        context.load_cert_chain(self.chain)
        if protocols:
            context.set_alpn_protocols(list(protocols))
        return context


def authority_key(secret: bytes) -> ec.EllipticCurvePrivateKey:
    """The P-256 key of a cluster. 384 bits are reduced to the order's 256, which leaves a bias below 2^-128."""
    wide = HKDF(hashes.SHA256(), 48, salt=b"roost cluster authority 1", info=b"p256").derive(secret)
    return ec.derive_private_key(int.from_bytes(wide, "big") % (P256_ORDER - 1) + 1, ec.SECP256R1())


def fingerprint_of(authority: ec.EllipticCurvePrivateKey) -> str:
    return hashlib.sha256(b"roost cluster" + _der(authority.public_key())).hexdigest()[:ID_DIGITS]


def id_of(key: ec.EllipticCurvePublicKey) -> str:
    return hashlib.sha256(b"roost node" + _der(key)).hexdigest()[:ID_DIGITS]


def peer_id(certificate: bytes) -> str:
    """The id of the node that showed `certificate` (PEM or DER), which TLS has verified already. Raises IdentityError
    for one that is a member's but no node's."""
    try:
        is_pem = certificate.lstrip().startswith(b"-----BEGIN")
        cert = x509.load_pem_x509_certificate(certificate) if is_pem else x509.load_der_x509_certificate(certificate)
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        key = cert.public_key()
        if NODE_NAME not in names.get_values_for_type(x509.DNSName) or not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("it is no node's")
    except (ValueError, x509.ExtensionNotFound) as exc:
        raise IdentityError(
            f"The other side's certificate cannot be used: {exc}.", "It may run another version."
        ) from exc
    return id_of(key)


def _authority_certificate(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"roost cluster {fingerprint_of(key)}")])
    builder = _builder(name, name, key.public_key(), key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.add_extension(_usage(signs_certificates=True), critical=True).sign(key, hashes.SHA256())


def _node_certificate(identity: Identity, authority: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"roost node {identity.id}")])
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"roost cluster {fingerprint_of(authority)}")])
    builder = _builder(subject, issuer, identity.key.public_key(), authority.public_key())
    names = [x509.DNSName(NODE_NAME), x509.DNSName(f"{identity.id}.{NODE_NAME}")]
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    return builder.add_extension(_usage(signs_certificates=False), critical=True).sign(authority, hashes.SHA256())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, authority: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(VALID_FROM)
        .not_valid_after(VALID_TO)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _der(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey | None:
    """None when there is none, or it is broken: then a new one is made, as after a copy."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return key if isinstance(key, ec.EllipticCurvePrivateKey) else None


def _read_facts(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    is_sound = isinstance(facts, dict) and type(facts.get("incarnation")) is int and facts["incarnation"] >= 0
    return facts if is_sound else {}


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all, and for the owner only."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.unlink(missing_ok=True)
    fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    staged.rename(path)
