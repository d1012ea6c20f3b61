"""The exp2 benchmark (docs/sources.md), redone.

Which way of computing O = exp2(S * scale - max) @ V comes how near the FMA peak.

`exp2 + FMLA benchmark`, all tables. Percentages are of the FMA peak measured in the same run,
cycles of the clock measured in the same run. Every result is held against float64 before it is
timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from ...errors import ArgumentError
from ...jit.compiler import kernel
from ...measure import roofline
from ...measure.timing import best_time
from . import exp2_values
from .exp2_values import COLUMNS, LANES, ROWS
from .registers import aligned

F = np.float32
KERNELS = ("fused", "fused4", "two_pass", "gemm", "exp2")
BROADCASTS = ("register", "memory")
CHAIN = 1 << 20
SECONDS = 0.01  # of each timed run: some run is not interrupted,
SWEEPS = 3  # and what disturbs one sweep over the table has gone by the next
# largest relative error of a weight; float32 rounds S * scale, too
WORST = {
    "accurate": 4e-6,
    "fast": 2.8e-3,
    "ultra": 0.5001,
    "fexpa": 5.6e-3,
    "fexpa-quadratic": 4e-6,
}


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes
    ----------
    kernel : of KERNELS; "exp2" computes P and no product
    exp2 : "accurate", "fast", "ultra", and on SVE "fexpa", "fexpa-quadratic"; of "gemm", the one
        that P came from
    broadcast : "register" or "memory"; of "two_pass" and "gemm" always "memory", and "" of "exp2"
    m, nc, d : rows, keys, columns
    seconds : per call, best of many
    share : of the measured FMA peak, counting the 2 * m * nc * d operations of the product and
        nothing else; 0 for "exp2"
    cycles : of the measured clock, per element of S
    weight_error : largest relative error of a weight of P
    output_error : relative L1 error of O; of P for "exp2"
    ranking_errors : share of the pairs of keys of a row whose scores differ, but whose weights are
        not in the same order
    """

    kernel: str
    exp2: str
    broadcast: str
    m: int
    nc: int
    d: int
    seconds: float
    share: float
    cycles: float
    weight_error: float
    output_error: float
    ranking_errors: float

    def as_dict(self) -> dict[str, float | str]:
        return asdict(self)


@kernel
def _chain(n, x, add, flip):
    for _ in range(n):
        x = (x + add) ^ flip
    return x


def measure_clock() -> float:
    """Cycles per second of one core, from a chain of additions and exclusive ors, each of which
    takes one cycle.

    Some machines run code with wide vectors at a lower clock: there the cycles of the table are too
    many, the percentages right.
    """
    x, add, flip = np.uint64(1), np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
    return 2 * CHAIN / best_time(lambda: _chain(CHAIN, x, add, flip), 0.1)


@functools.cache
def _repeated(name: str, exp2: str, broadcast: str):
    """Kernel f(times, s, scale, top, v, p, scratch, o): the chosen kernel `times` times over.

    No call from Python is timed.
    """
    if name in ("fused", "fused4"):
        fused = (exp2_values.make_fused if name == "fused" else exp2_values.make_fused4)(
            exp2, broadcast
        )

        def repeated(times, s, scale, top, v, p, scratch, o):
            for _ in range(times):
                fused(s, scale, top, v, scratch, o)
    elif name == "two_pass":
        two_pass = exp2_values.make_two_pass(exp2)

        def repeated(times, s, scale, top, v, p, scratch, o):
            for _ in range(times):
                two_pass(s, scale, top, v, p, o)
    elif name == "exp2":
        rows = exp2_values.make_exp2_rows(exp2)

        def repeated(times, s, scale, top, v, p, scratch, o):
            for _ in range(times):
                rows(s, scale, top, p)
    else:
        gemm = exp2_values.gemm

        def repeated(times, s, scale, top, v, p, scratch, o):
            for _ in range(times):
                gemm(p, v, o)

    return kernel(repeated)


def draw(
    m: int, nc: int, d: int = 64, seed: int = 0
) -> tuple[np.ndarray, np.float32, np.float32, np.ndarray]:
    """S (m, nc) int32 with natural scores N(0, 1) behind scale, the scale, the maximum in units of
    log2, and V (nc, d) float32.

    S and V start at a cache line.
    """
    rng = np.random.default_rng(seed)
    s = np.rint(rng.normal(0, 4096, (m, nc))).astype(np.int32)
    scale = F(np.log2(np.e) / 4096)
    return aligned(s), scale, F(s.max() * scale), aligned(rng.standard_normal((nc, d), np.float32))


def ranking_errors(s: np.ndarray, p: np.ndarray) -> float:
    """Share of the pairs of keys with different scores in a row whose weights tie or are in the
    other order.
    """
    order = np.argsort(s, 1, kind="stable")
    s, p = np.take_along_axis(s, order, 1), np.take_along_axis(p, order, 1)
    higher = s[:, None, :] > s[:, :, None]
    wrong = higher & (p[:, None, :] <= p[:, :, None])
    return float(wrong.sum() / max(1, higher.sum()))


def compute(
    name: str,
    exp2: str,
    broadcast: str,
    s: np.ndarray,
    scale: float | np.float32,
    top: float | np.float32,
    v: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """P (M, Nc) and O (M, D) float32 by one kernel.

    Parameters
    ----------
    name, exp2, broadcast : of KERNELS, `exp2_values.EXP2`, BROADCASTS
    s : (M, Nc) int32, M a multiple of 4, Nc of 16;  v : (Nc, D) float32, D a multiple of 64
    scale, top : the weights are 2**(s * scale - top), 2**-125 below that

    Returns
    -------
    p : by the vectorised exp2 over rows, whichever the kernel
    o : zeros from kernel "exp2"

    Raises
    ------
    ArgumentError
    """
    for argument, given, allowed in (
        ("name", name, KERNELS),
        ("exp2", exp2, tuple(exp2_values.EXP2)),
        ("broadcast", broadcast, BROADCASTS),
    ):
        if given not in allowed:
            raise ArgumentError(
                f"{argument}: got {given!r}; allowed: {', '.join(map(repr, allowed))}"
            )
    if s.ndim != 2 or s.shape[0] % ROWS or s.shape[1] % LANES or not s.size:
        raise ArgumentError(
            f"s: got shape {s.shape}; allowed: (M, Nc), M a multiple of {ROWS} and Nc of {LANES}"
        )
    if v.ndim != 2 or v.shape[0] != s.shape[1] or v.shape[1] % COLUMNS:
        raise ArgumentError(
            f"v: got shape {v.shape}; allowed: ({s.shape[1]}, D), D a multiple of {COLUMNS}"
        )
    s, v = np.ascontiguousarray(s, np.int32), np.ascontiguousarray(v, np.float32)
    p, o, scratch = (
        aligned(np.zeros(shape, F)) for shape in (s.shape, (s.shape[0], v.shape[1]), LANES)
    )
    exp2_values.make_exp2_rows(exp2)(s, F(scale), F(top), p)
    _repeated(name, exp2, broadcast)(1, s, F(scale), F(top), v, p, scratch, o)
    return p, o


def prepare(
    name: str, exp2: str, broadcast: str, s, scale, top, v
) -> tuple[Callable[[], None], int]:
    """A call that runs the kernel so many times over that it takes some 10 ms, and how many times
    that is.
    """
    run, scratch = _repeated(name, exp2, broadcast), aligned(np.zeros(LANES, F))
    p, o = compute(name, exp2, broadcast, s, scale, top, v)
    # every kernel makes more than 2 G sums a second
    times = max(1, int(2e9 * SECONDS / (o.size * s.shape[1])))
    return lambda: run(times, s, scale, top, v, p, scratch, o), times


def combinations() -> Iterator[tuple[str, str, str]]:
    """Every kernel with every exp2 and every way to broadcast that makes a difference to it."""
    for exp2 in exp2_values.EXP2:
        for name in ("fused", "fused4"):
            yield from ((name, exp2, broadcast) for broadcast in BROADCASTS)
        yield "two_pass", exp2, "memory"
        yield "exp2", exp2, "register"
    yield "gemm", "accurate", "memory"


def measure(
    rows: Sequence[int] = (4, 16), keys: Sequence[int] = (64, 128, 256, 512), d: int = 64
) -> list[Row]:
    """The table: every combination at every size, on one thread.

    Raises
    ------
    ArithmeticError
        A kernel's result is off by more than its exp2 explains: it is not timed.
    """
    cases, calls = [], []
    for m in rows:
        for nc in keys:
            s, scale, top, v = draw(m, nc, d)
            exact = np.exp2(s * np.float64(scale) - np.float64(top))
            for name, exp2, broadcast in combinations():
                p, o = compute(name, exp2, broadcast, s, scale, top, v)
                worst = float(np.abs(p / exact - 1).max())
                out, want = (p, exact) if name == "exp2" else (o, exact @ v)
                error = float(np.abs(out - want).sum() / np.abs(want).sum())
                if worst > WORST[exp2] or error > 2 * WORST[exp2]:
                    raise ArithmeticError(
                        f"{name}, exp2 {exp2}, {broadcast}: errors {worst:.2g} and {error:.2g}"
                    )
                cases.append((name, exp2, broadcast, m, nc, worst, error, ranking_errors(s, p)))
                calls.append(prepare(name, exp2, broadcast, s, scale, top, v))
    peak, clock, seconds = 0.0, 0.0, [np.inf] * len(calls)
    for _ in range(SWEEPS):
        peak, clock = max(peak, roofline.measure_compute(1)[1]), max(clock, measure_clock())
        for n, (call, times) in enumerate(calls):
            seconds[n] = min(seconds[n], best_time(call, 2 * SECONDS) / times)
    return [
        Row(
            name,
            exp2,
            broadcast,
            m,
            nc,
            d,
            t,
            (name != "exp2") * 2.0 * m * nc * d / t / peak,
            t * clock / (m * nc),
            *errors,
        )
        for (name, exp2, broadcast, m, nc, *errors), t in zip(cases, seconds, strict=True)
    ]
