"""The shared tiling parameters.

Which block sizes every kernel uses, on every device, and what they cost in cache.

A `Tiling` is data. Kernels read their sizes from it, the command line explains it, tests check its
arithmetic. The key block is common to CPU and CUDA: softmax weights are rounded once per row and
key block, so equal key blocks give equal bits (INT8 pipeline, step 1).

The tilings of the A64FX notes (docs/sources.md) are among the named ones, with their working sets
added up: the fused kernel needs 58.75 KiB where the summary says 46 KB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from .errors import ArgumentError, UnsupportedError
from .jit.system import cache_sizes

KEY_BLOCK = 128  # keys whose weights share one octave: the same on every device
MAX_HEAD_DIM = 512
# the second: rows of whole swizzles
CUDA_HEAD_DIMS = (32, 64, 96, 128, 256)
SWIZZLED_HEAD_DIMS = (64, 128, 256)
CUDA_WIDE = 128  # head sizes beyond have tilings of their own, named "-wide"
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
    device : "cpu" or "cuda"
    isa : instruction set of the micro-kernels ("avx512_vnni", "sve", "sm_80", ...)
    dtype : type of the operands of the products
    mr, nv, lanes : register block: mr rows x nv vectors of `lanes` 32-bit accumulators
    block_q : query rows per tile, a multiple of mr
    key_block : keys per tile, a multiple of nv * lanes
    buffers : what the inner loop touches, for the working set; on CUDA the shared memory of a block

    head_dims, value_dims : what d and dv are rounded up to; all sizes if empty, and for dv d's if
        only that is

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
            tile = f"{self.mr} x {self.nv} sums on AArch64; on x86 one product at a time, as the compiler unrolls it"
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
        from .jit.target import cpu_name

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


def _int8_buffers(score: str, weight: str, packed: str = "int8") -> tuple[Buffer, ...]:
    return (
        Buffer("Q tile", "block_q", "d", "uint8" if packed == "int8" else packed),
        Buffer("K block", "key_block", "d", packed),
        Buffer("V block", "key_block", "dv", packed),
        Buffer("start, scale of K", "key_block", 2, "float32"),
        Buffer("S scores", "block_q", "key_block", score),
        Buffer("P weights", "block_q", "key_block", weight),
        Buffer("sums of P", "block_q", "lanes", "int32"),
        Buffer("O accumulator", "block_q", "dv", "float32"),
        Buffer("m, l, scales, sums", "block_q", 6, "float32"),
        Buffer("octaves", "block_q", 1, "int16"),
    )


def _float_buffers(operand: str) -> tuple[Buffer, ...]:
    weights = (
        () if operand == "float32" else (Buffer("P weights", "block_q", "key_block", operand),)
    )
    return (
        Buffer("Q tile", "block_q", "d", operand),
        Buffer("K block", "key_block", "d", operand),
        Buffer("V block", "key_block", "dv", operand),
        Buffer("S scores", "block_q", "key_block", "float32"),
        *weights,
        Buffer("O accumulator", "block_q", "dv", "float32"),
        Buffer("m, l", "block_q", 2, "float32"),
    )


def _arm(cpu: str, isa: str, lanes: int) -> Tiling:
    """24 rows fill nine tenths of an L1 of 64 KiB at D = 128.

    On A64FX a row of a packed panel is one 256-byte line.
    """
    return Tiling(
        f"{cpu}-int8",
        "cpu",
        isa,
        "int8",
        6,
        4,
        lanes,
        24,
        KEY_BLOCK,
        _int8_buffers("int16", "uint8"),
    )


def _cuda_float(arch: str, dtype: str, key_block: int, wide: str = "") -> Tiling:
    """FlashAttention-2: four warps of 16 rows; the output leaves through Q's place.

    Two stages by cp.async, one on sm_75.
    """
    stages = 1 if arch == "sm_75" else 2
    return Tiling(
        f"{arch}-{dtype}{wide}",
        "cuda",
        arch,
        dtype,
        16,
        key_block // 8,
        8,
        64,
        key_block,
        (
            Buffer("Q, then O", "block_q", "widest", dtype),
            Buffer("K tile", "key_block", "d", dtype, stages),
            Buffer("V tile", "key_block", "dv", dtype, stages),
        ),
        head_dims=CUDA_HEAD_DIMS,
    )


def _hopper(dtype: str, key_block: int, wide: str = "") -> Tiling:
    """FlashAttention-3: two warpgroups of 64 rows, a ring of two stages by TMA.

    Head sizes are multiples of 64.
    """
    return Tiling(
        f"sm_90a-{dtype}{wide}",
        "cuda",
        "sm_90a",
        dtype,
        64,
        key_block // 8,
        8,
        128,
        key_block,
        (
            Buffer("Q, then O", "block_q", "widest", dtype),
            Buffer("K tile", "key_block", "d", dtype, 2),
            Buffer("V tile", "key_block", "dv", dtype, 2),
            Buffer("sums that order the softmax", 1, 256, "float32"),
            Buffer("barriers, alignment", 1, 2048, "int8"),
        ),
        head_dims=SWIZZLED_HEAD_DIMS,
    )


def _cuda_int8(arch: str, buffers: tuple[Buffer, ...], name: str = "", halves: int = 1) -> Tiling:
    """A warp owns 16 rows.

    Of wide heads half of the keys and channels of them, and a second warp the rest (`halves`).
    """
    return Tiling(
        f"{arch}-int8{name}",
        "cuda",
        arch,
        "int8",
        16,
        KEY_BLOCK // 8 // halves,
        8,
        64,
        KEY_BLOCK,
        (
            Buffer("Q tile", "block_q", "d", "int8"),
            *buffers,
            Buffer("scales of K", "key_block", 1, "float32"),
            Buffer("row table", "block_q", 8, "float32", halves),
        ),
        head_dims=SWIZZLED_HEAD_DIMS,
        value_dims=CUDA_HEAD_DIMS,
    )


_FLOAT_VALUES = Buffer("V part", 32, "dv", "float32"), Buffer("padding of V", 32, 4, "float32")


def _hopper_int8(stages: int, wide: str = "") -> Tiling:
    """Two warpgroups of 64 rows, a ring by TMA.

    Rows of Q and K are padded to whole swizzles of 128 bytes by the copies.
    """
    return Tiling(
        f"sm_90a-int8{wide}",
        "cuda",
        "sm_90a",
        "int8",
        64,
        KEY_BLOCK // 8,
        8,
        128,
        KEY_BLOCK,
        (
            Buffer("Q tile", "block_q", "d", "int8"),
            Buffer("K block", "key_block", "d", "int8", stages),
            Buffer("V block", "key_block", "dv", "int8", stages),
            Buffer("scales of K", "key_block", 1, "float32", stages),
            Buffer("row table", "block_q", 8, "float32"),
            Buffer("barriers, alignment", 1, 2048, "int8"),
        ),
        head_dims=(128, 256),
        value_dims=CUDA_HEAD_DIMS,
    )


_DOCUMENT = "Fused FlashAttention V2, Tile Sizes (L1D Optimized)"

TILINGS = {
    t.name: t
    for t in (
        Tiling(
            "amx_int8-int8",
            "cpu",
            "amx_int8",
            "int8",
            32,
            4,
            16,
            128,
            KEY_BLOCK,
            _int8_buffers("int16", "uint8"),
        ),
        Tiling(
            "avx512_vnni-int8",
            "cpu",
            "avx512_vnni",
            "int8",
            6,
            4,
            16,
            48,
            KEY_BLOCK,
            _int8_buffers("int16", "uint8"),
        ),
        Tiling(
            "avx_vnni-int8",
            "cpu",
            "avx_vnni",
            "int8",
            6,
            2,
            8,
            24,
            KEY_BLOCK,
            _int8_buffers("int16", "uint8"),
        ),
        Tiling(
            "avx2-int8",
            "cpu",
            "avx2",
            "int8",
            6,
            2,
            8,
            24,
            KEY_BLOCK,
            _int8_buffers("int16", "int16", "int16"),
        ),
        Tiling(
            "sve-int8",
            "cpu",
            "sve",
            "int8",
            6,
            4,
            16,
            24,
            KEY_BLOCK,
            _int8_buffers("int16", "uint8"),
        ),
        Tiling(
            "neon_dot-int8",
            "cpu",
            "neon_dot",
            "int8",
            6,
            4,
            4,
            24,
            KEY_BLOCK,
            _int8_buffers("int16", "uint8"),
        ),
        _arm("a64fx", "sve", 16),
        _arm("neoverse-v1", "sve", 8),
        _arm("neoverse-v2", "sve", 4),
        _arm("neoverse-n1", "neon_dot", 4),
        Tiling(
            "portable-int8",
            "cpu",
            "portable",
            "int8",
            4,
            4,
            1,
            32,
            KEY_BLOCK,
            _int8_buffers("int32", "uint8"),
        ),
        Tiling(
            "avx512-float32",
            "cpu",
            "avx512",
            "float32",
            6,
            4,
            16,
            192,
            256,
            _float_buffers("float32"),
        ),
        Tiling(
            "avx2-float32", "cpu", "avx2", "float32", 6, 2, 8, 192, 128, _float_buffers("float32")
        ),
        Tiling(
            "neon-float32", "cpu", "neon", "float32", 6, 4, 4, 192, 128, _float_buffers("float32")
        ),
        Tiling(
            "avx512_bf16-bfloat16",
            "cpu",
            "avx512_bf16",
            "bfloat16",
            6,
            4,
            16,
            192,
            128,
            _float_buffers("bfloat16"),
        ),
        Tiling(
            "amx_bf16-bfloat16",
            "cpu",
            "amx_bf16",
            "bfloat16",
            32,
            4,
            16,
            192,
            256,
            _float_buffers("bfloat16"),
        ),
        Tiling(
            "a64fx-fused-48x64",
            "cpu",
            "sve",
            "int8",
            6,
            4,
            16,
            48,
            64,
            (
                Buffer("Q tile", "block_q", "d", "int8"),
                Buffer("K chunk", "key_block", "d", "int8"),
                Buffer("V chunk", "key_block", "dv", "int8"),
                Buffer("O tile", "block_q", "dv", "float32"),
                Buffer("S chunk", "block_q", "key_block", "int32"),
                Buffer("state", "block_q", 4, "float32"),
            ),
            _DOCUMENT,
        ),
        Tiling(
            "a64fx-unfused-48x128",
            "cpu",
            "sve",
            "int8",
            6,
            4,
            16,
            48,
            128,
            (
                Buffer("Q tile", "block_q", "d", "int8"),
                Buffer("K tile", "key_block", "d", "int8"),
                Buffer("S tile", "block_q", "key_block", "int32", 2),
            ),
            "INT8 GEMM + FlashAttention status, Working Set Analysis",
        ),
        _cuda_float("sm_75", "float16", 64),
        _cuda_float("sm_75", "float16", 16, "-wide"),
        _cuda_float("sm_80", "float16", 64),
        _cuda_float("sm_80", "float16", 32, "-wide"),
        _cuda_float("sm_80", "bfloat16", 64),
        _cuda_float("sm_80", "bfloat16", 32, "-wide"),
        _hopper("float16", 128),
        _hopper("float16", 64, "-wide"),
        _hopper("bfloat16", 128),
        _hopper("bfloat16", 64, "-wide"),
        _cuda_int8("sm_75", (Buffer("K, then V", "key_block", "widest", "int8"),)),
        _cuda_int8("sm_75", (Buffer("K, then P, V", "key_block", "widest", "int8"),), "-wide", 2),
        _cuda_int8(
            "sm_80",
            (
                Buffer("K block", "key_block", "d", "int8"),
                Buffer("V block", "key_block", "dv", "int8"),
            ),
        ),
        _cuda_int8(
            "sm_80",
            (
                Buffer("K block, then P", "key_block", "d", "int8"),
                Buffer("V block", "key_block", "dv", "int8"),
            ),
            "-wide",
            2,
        ),
        _cuda_int8("sm_80", (Buffer("K block", "key_block", "d", "int8"), *_FLOAT_VALUES), "-fp32"),
        _cuda_int8(
            "sm_80",
            (Buffer("K block, then P", "key_block", "widest", "int8"), *_FLOAT_VALUES),
            "-fp32-wide",
            2,
        ),
        _hopper_int8(4),
        _hopper_int8(2, "-wide"),
        Tiling(
            "sm_80-float32",
            "cuda",
            "sm_80",
            "float32",
            1,
            1,
            1,
            4,
            1,
            (),
            "a warp per row, all in registers",
            head_dims=CUDA_HEAD_DIMS,
        ),
    )
}


def padded(n: int, sizes: tuple[int, ...]) -> int:
    """The smallest of the sizes that holds n."""
    for size in sizes:
        if n <= size:
            return size
    raise UnsupportedError(f"head_dim: got {n}; the CUDA kernels take 1 to {sizes[-1]}")


def tiling(isa: str, dtype: str = "int8", **changes: Any) -> Tiling:
    """The tiling that the kernels for `isa` and `dtype` use.

    Keyword arguments replace single sizes, checked again.
    """
    name = f"{isa}-{dtype}"
    if name not in TILINGS:
        raise ArgumentError(
            f"tiling: no tiling for isa {isa!r} and dtype {dtype!r}; allowed: {', '.join(sorted(TILINGS))}"
        )
    return replace(TILINGS[name], **changes) if changes else TILINGS[name]


# Multiplications from which on a thread of its own pays: some 0.1 ms, several times what waking it
# costs.
THREAD_WORK = {"float32": 4 << 20, "bfloat16": 8 << 20, "int8": 16 << 20}


def workers(kind: str, multiplications: int) -> int:
    """The most threads that a problem of so many multiplications uses.

    Each has at least `THREAD_WORK` of them.
    """
    return max(1, multiplications // THREAD_WORK[kind])


def split_count(units: int, blocks: int, workers: int) -> int:
    """How many splits of `blocks` key blocks keep `workers` busy with `units` query tiles.

    FlashAttention 2's rule.

    The smallest number whose last wave is filled at least 85 % as well as the best number's; counts
    that do not change the blocks of a split are left out. 14 heads on the T4's 40 multiprocessors
    (80 workers, blocks of 256 keys) at 1024 keys give 4, as in the T4 architecture
    (docs/sources.md).
    """
    fill = {}
    for n in range(1, min(blocks, 128) + 1):
        if n == 1 or -(-blocks // n) != -(-blocks // (n - 1)):
            waves = units * n / workers
            fill[n] = waves / -(-units * n // workers)
    return next((n for n in fill if fill[n] >= 0.85 * max(fill.values())), 1)


def cuda_tiling(arch: str, dtype: str, head_dim: int, value_dim: int | None = None) -> Tiling:
    """The tiling of the CUDA kernels.

    Sm_86 and later run sm_80's, sm_90a has its own for 16-bit numbers and bytes.
    """
    family = arch if f"{arch}-{dtype}" in TILINGS else "sm_80"
    wide = (
        "-wide"
        if max(head_dim, value_dim or 0) > CUDA_WIDE and f"{family}-{dtype}-wide" in TILINGS
        else ""
    )
    return tiling(family, dtype + wide)
