"""Who is here: the frozen words that every other room speaks of nodes with."""

from __future__ import annotations

from dataclasses import dataclass

PROTOCOL = (1, 0)
"""(major, minor) of everything that nodes say to each other. Nodes of another one are refused, in words."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One running node as others see it.

    id:           16 hex digits, from its key: kept over restarts, another where the home was copied to
    incarnation:  grows with every start of the same node
    cluster:      fingerprint of its cluster's authority (16 hex digits), "" for a node that stays alone
    addresses:    where it answers, best first; link-local IPv6 ones carry their scope ("fe80::1%eth0")
    port:         control; data links use the next one
    """

    id: str
    name: str
    incarnation: int
    protocol: tuple[int, int]
    version: str
    cluster: str
    addresses: tuple[str, ...]
    port: int

    @property
    def data_port(self) -> int:
        return self.port + 1


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A node appeared, came back as a new incarnation, or changed (its addresses, say)."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class PeerDown:
    """A node went: it said goodbye, or is silent. `reason` is for people."""

    id: str
    incarnation: int
    reason: str


PeerEvent = PeerUp | PeerDown
