"""The memory that a working set has to fit: caches of a core, shared memory of a block on a card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..jit.system import cache_sizes

# shared memory that one block may have (CUDA C++ guide, table of technical specifications: 1 KB of
# each SM is the system's)
SHARED_MEMORY = {
    arch: kib << 10
    for arch, kib in (
        ("sm_75", 64),
        ("sm_80", 163),
        ("sm_86", 99),
        ("sm_89", 99),
        ("sm_90a", 227),
        ("sm_100", 227),
        ("sm_120", 99),
    )
}


@dataclass(frozen=True)
class Caches:
    """Data cache sizes in bytes available to one core; 0 where there is no such level.

    `l2_cores` share one L2 (table only).
    """

    l1: int
    l2: int
    l3: int
    line: int
    source: str
    l2_cores: int = 1
    names: tuple[str, str, str] = ("L1", "L2", "L3")

    def levels(self) -> Iterator[tuple[str, int]]:
        """Name and size of each level that exists."""
        return ((n, s) for n, s in zip(self.names, (self.l1, self.l2, self.l3), strict=True) if s)

    @classmethod
    def of_this_machine(cls) -> Caches:
        """As the system reports (Linux, macOS).

        Elsewhere from `CACHES`, for the CPU that Numba compiles for.
        """
        found = cache_sizes()
        if found.get(1):
            return cls(
                found[1], found.get(2, 0), found.get(3, 0), found.get(0, 64), "read from the system"
            )
        from ..jit.target import cpu_name

        return CACHES.get(cpu_name(), CACHES["generic"])


K = 1024
CACHES = {
    "a64fx": Caches(64 * K, 8192 * K, 0, 256, "table: A64FX manual", 12),
    "neoverse-n1": Caches(64 * K, 1024 * K, 32768 * K, 64, "table: Neoverse N1"),
    "neoverse-v1": Caches(64 * K, 1024 * K, 32768 * K, 64, "table: Neoverse V1 (Graviton 3)"),
    "neoverse-v2": Caches(
        64 * K, 2048 * K, 36864 * K, 64, "table: Neoverse V2 (Graviton 4, Grace)"
    ),
    "apple-m1": Caches(128 * K, 12288 * K, 0, 128, "table: Apple M1, performance cores", 4),
    "apple-m2": Caches(128 * K, 16384 * K, 0, 128, "table: Apple M2, performance cores", 4),
    "apple-m3": Caches(128 * K, 16384 * K, 0, 128, "table: Apple M3, performance cores", 4),
    "apple-m4": Caches(128 * K, 16384 * K, 0, 128, "table: Apple M4, performance cores", 4),
    "generic": Caches(32 * K, 512 * K, 0, 64, "table: assumed"),
}
