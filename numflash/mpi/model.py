"""How long a sequence each rank must hold for the exchange to hide behind the kernel, from a
measured rate and a link.

One step of the ring moves the keys and values of one rank, S tokens, and computes its L = S queries
against them:

    kernel(S) = 4 H D S^2 / rate            (half of it for causal attention, zigzag)
    exchange(S) = latency + S * token_bytes / bandwidth

Work grows with the square, bytes with the length: from some length on the kernel is the longer one,
and the ring runs at the speed of the kernel alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ArgumentError

ITEM = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
SCALE = 4  # bytes: the scale of a quantised key


@dataclass(frozen=True)
class Link:
    """bandwidth in bytes per second in one direction, latency in seconds."""

    name: str
    bandwidth: float
    latency: float
    source: str


LINKS = (
    Link(
        "TofuD, one link",
        6.8e9,
        0.54e-6,
        "Ajima et al., The Tofu Interconnect D, CLUSTER 2018: 6.8 GB/s, 0.49 to 0.54 us",
    ),
    Link("100 Gb/s", 12.5e9, 1.5e-6, "line rate; 1.5 us is an assumption for MPI over it"),
)


@dataclass(frozen=True)
class Ring:
    """Ring attention in the model.

    rate : operations per second of one rank's kernel, 4 H D for each visible pair of query and key
    heads, kv_heads, head_dim : of the whole problem;  precision : of the messages, one of `ITEM`

    Raises
    ------
    ArgumentError
        Another precision, a rate or sizes that are not positive.
    """

    rate: float
    link: Link
    heads: int
    kv_heads: int
    head_dim: int
    precision: str
    causal: bool = False

    def __post_init__(self) -> None:
        if self.precision not in ITEM:
            raise ArgumentError(
                f"precision: got {self.precision!r}; allowed: {', '.join(map(repr, ITEM))}"
            )
        for name in ("rate", "heads", "kv_heads", "head_dim"):
            if not getattr(self, name) > 0:
                raise ArgumentError(f"{name}: got {getattr(self, name)}; allowed: more than 0")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value."""
        scale = SCALE if self.precision == "int8" else 0
        return self.kv_heads * (2 * self.head_dim * ITEM[self.precision] + scale)

    def kernel(self, length: float) -> float:
        """Seconds in the kernel for one step; `length` queries and keys per rank."""
        return (
            4.0 * self.heads * self.head_dim * length**2 * (0.5 if self.causal else 1.0) / self.rate
        )

    def exchange(self, length: float) -> float:
        """Seconds for the messages of one step."""
        return self.link.latency + length * self.token_bytes / self.link.bandwidth

    def hiding_length(self) -> int:
        """Tokens per rank from which the kernel takes at least as long as the exchange.

        The root of kernel(x) = exchange(x).
        """
        a = self.kernel(1.0)
        b = self.token_bytes / self.link.bandwidth
        return math.ceil((b + math.sqrt(b * b + 4 * a * self.link.latency)) / (2 * a))

    def seconds(self, length: int, ranks: int) -> float:
        """One call over `ranks` ranks of `length` tokens each.

        n kernels, n - 1 exchanges beside them.
        """
        return (ranks - 1) * max(self.kernel(length), self.exchange(length)) + self.kernel(length)

    def sent(self, length: int, ranks: int) -> int:
        """Bytes that each rank sends in one call without causal mask or window."""
        return (ranks - 1) * length * self.token_bytes
