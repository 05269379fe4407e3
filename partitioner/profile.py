"""What was measured of nodes and of the links between them. Measured numbers, never guessed: None where nobody did."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from partitioner.model import check_count, check_number, check_text, take_fields

SLOWEST_GBPS, FASTEST_GBPS = 1e-6, 1e6
LONGEST_RTT_US = 1e9
MAX_THREADS = 4096


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """A node as a place for weights. Raises PlanError for nonsense.

    budget_bytes: memory it may use for models, with what a loaded one takes now
    read_gbps:    10^9 bytes a second that its decode really reads
    """

    node: str
    name: str
    budget_bytes: int
    read_gbps: float | None
    threads: int

    def __post_init__(self) -> None:
        check_text("node", self.node)
        check_text("name", self.name)
        check_count("budget_bytes", self.budget_bytes)
        check_count("threads", self.threads, 1, MAX_THREADS)
        if self.read_gbps is not None:
            check_number("read_gbps", self.read_gbps, SLOWEST_GBPS, FASTEST_GBPS)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> NodeProfile:
        """Raises PlanError for anything else than what `to_json` makes."""
        return cls(**take_fields("A node's profile", data, [field.name for field in fields(cls)]))


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """The way from node `src` to node `dst`. Raises PlanError for nonsense.

    rtt_us_p50, rtt_us_p95: microseconds of a small message there and back, half and 95 % of them took less
    gbps:                   10^9 bits a second
    """

    src: str
    dst: str
    rtt_us_p50: float
    rtt_us_p95: float
    gbps: float

    def __post_init__(self) -> None:
        check_text("src", self.src)
        check_text("dst", self.dst)
        check_number("rtt_us_p50", self.rtt_us_p50, 0, LONGEST_RTT_US)
        check_number("rtt_us_p95", self.rtt_us_p95, self.rtt_us_p50, LONGEST_RTT_US)
        check_number("gbps", self.gbps, SLOWEST_GBPS, FASTEST_GBPS)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> LinkProfile:
        """Raises PlanError for anything else than what `to_json` makes."""
        return cls(**take_fields("A link's profile", data, [field.name for field in fields(cls)]))
