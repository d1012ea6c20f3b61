"""What a tiling is: block sizes as data, and the arrays of an inner loop."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ArgumentError, UnsupportedError
from .caches import SHARED_MEMORY, Caches

KEY_BLOCK = 128  # keys whose weights share one octave: the same on every device
MAX_HEAD_DIM = 576  # of DeepSeek's latents: 512 channels and 64 of positions
# SWIZZLED_HEAD_DIMS: rows that are multiples of the 128-byte swizzle
CUDA_HEAD_DIMS = (32, 64, 96, 128, 256)
SWIZZLED_HEAD_DIMS = (64, 128, 256)
_SIZES = {"int8": 1, "uint8": 1, "int16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4}


@dataclass(frozen=True)
class Buffer:
    """One array of a kernel's inner loop: `rows` x `cols` of `dtype`, `copies` times.

    Sizes may name a `Tiling.sizes`.
    """

    name: str
    rows: str | int
    cols: str | int
    dtype: str
    copies: int = 1

    def nbytes(self, sizes: dict[str, int]) -> int:
        """Bytes of all copies, for the named sizes of a problem."""
        rows, cols = (sizes[x] if isinstance(x, str) else x for x in (self.rows, self.cols))
        return rows * cols * _SIZES[self.dtype] * self.copies


@dataclass(frozen=True)
class Tiling:
    """Block sizes of one kernel family on one kind of machine.

    Attributes
    ----------
    name : what `TILINGS` lists it by: instruction set, dtype and variant ("sm_80-float16-wide")
    device : "cpu" or "cuda"
    isa : instruction set of the micro-kernels ("avx512_vnni", "sve", "sm_80", ...)
    dtype : type of the operands of the products
    mr, nv, lanes : register block: mr rows x nv vectors of `lanes` 32-bit accumulators
    block_q : query rows per tile, a multiple of mr
    key_block : keys per tile, a multiple of nv * lanes
    buffers : what the inner loop touches, for the working set; on CUDA the shared memory of a block
    source : the note that the sizes are from, or how the kernel is built; empty for most
    head_dims : sizes that d is rounded up to; empty: not rounded
    value_dims : the same for dv; empty: head_dims

    On CUDA the register block is a warp's (sm_90a: a warpgroup's) tile of scores: mr rows of nv
    products of 8 keys.
    """

    name: str
    device: str
    isa: str
    dtype: str
    mr: int
    nv: int
    lanes: int
    block_q: int
    key_block: int
    buffers: tuple[Buffer, ...]
    source: str = ""
    head_dims: tuple[int, ...] = ()
    value_dims: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in ("mr", "nv", "lanes", "block_q", "key_block"):
            if getattr(self, field) < 1:
                raise ArgumentError(
                    f"tiling {self.name!r}: {field} = {getattr(self, field)}; allowed: 1 or more"
                )
        for field, unit, what in (
            ("block_q", self.mr, "mr"),
            ("key_block", self.nv * self.lanes, "nv * lanes"),
        ):
            if getattr(self, field) % unit:
                raise ArgumentError(
                    f"tiling {self.name!r}: {field} = {getattr(self, field)} is not a multiple of {what} = {unit}"
                )

    @property
    def accumulators(self) -> int:
        """Vector registers that hold the accumulators of one register tile."""
        return self.mr * self.nv

    @property
    def stages(self) -> int:
        """Tiles of a ring in shared memory."""
        return max(b.copies for b in self.buffers)

    def sizes(self, head_dim: int, value_dim: int | None = None) -> dict[str, int]:
        """What a buffer's rows and columns may be named by."""
        d = head_dim
        dv = value_dim or head_dim
        if self.head_dims:
            d = padded(d, self.head_dims)
            dv = padded(dv, self.value_dims or self.head_dims)
        return {
            "block_q": self.block_q,
            "key_block": self.key_block,
            "lanes": self.lanes,
            "d": d,
            "dv": dv,
            "widest": max(d, dv),
        }

    def working_set(self, head_dim: int, value_dim: int | None = None) -> dict[str, int]:
        """Bytes of each buffer of the inner loop, by name."""
        sizes = self.sizes(head_dim, value_dim)
        return {b.name: b.nbytes(sizes) for b in self.buffers}

    def caches(self, arch: str | None = None) -> Caches:
        """Where the working set has to fit.

        This machine's caches, or the shared memory of a block on an architecture.
        """
        if self.device == "cpu":
            return Caches.of_this_machine()
        names = ("the shared memory of a block", "L2", "L3")
        return Caches(
            SHARED_MEMORY[arch or self.isa], 0, 0, 128, "table: CUDA C++ guide", names=names
        )

    def explain(
        self, head_dim: int, value_dim: int | None = None, caches: Caches | None = None
    ) -> str:
        """The tiling in words and bytes: each buffer, the sum, and the caches it fits."""
        caches = caches or self.caches()
        sizes = self.sizes(head_dim, value_dim)
        tile = f"{self.mr} x {self.nv} vectors of {self.lanes}: {self.accumulators} accumulators"
        if self.isa == "portable":
            tile = "one product at a time, as the compiler unrolls it"
            if self.accumulators > 1:
                tile = f"{self.mr} x {self.nv} sums on AArch64; on x86 {tile}"
        elif self.device == "cuda":
            owner, threads = ("warpgroup", 128) if self.mr == 64 else ("warp", 32)
            scores = self.mr * self.nv * self.lanes
            tile = f"{self.mr} x {self.nv * self.lanes} scores per {owner}: {max(1, scores // threads)} of each thread"
        lines = [
            f"{self.name}: {self.dtype} on {self.isa}, head_dim {head_dim}",
            f"  register tile {tile}",
            f"  blocks: {self.block_q} query rows x {self.key_block} keys",
        ]
        total = 0
        for b in self.buffers:
            rows, cols = (sizes[x] if isinstance(x, str) else x for x in (b.rows, b.cols))
            n = b.nbytes(sizes)
            total += n
            times = f"{b.copies} x " if b.copies > 1 else ""
            lines.append(
                f"  {b.name:<18} {times}{rows} x {cols} x {_SIZES[b.dtype]} B = {n / 1024:.2f} KiB"
            )
        lines.append(f"  working set {total / 1024:.2f} KiB")
        for level, size in caches.levels():
            cores = caches.l2_cores if level == "L2" else 1
            shared = f", {size / cores / 1024:.0f} for each of {cores} cores" if cores > 1 else ""
            lines.append(
                f"  {100 * total / size:.0f} % of {level} ({size / 1024:.0f} KiB{shared}, {caches.source})"
            )
        return "\n".join(lines)


def padded(n: int, sizes: tuple[int, ...]) -> int:
    """The smallest of the sizes that holds n."""
    for size in sizes:
        if n <= size:
            return size
    raise UnsupportedError(f"head_dim: got {n}; the CUDA kernels take 1 to {sizes[-1]}")
