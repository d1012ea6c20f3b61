"""From a validated problem and the gradient of its output to the launches that give the gradients
of query, key and value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from ..interop.arrays import convert
from ..validation import LARGEST_LSE, Problem
from .compile import ARCHITECTURES
from .device import current_device
from .device.operands import (
    LOG2E,
    Launch,
    aligned,
    band,
    emulate_launch,
    float_cap,
    folding,
    key_places,
    one_mask,
    option_constants,
    padded,
    padded_rows,
    refuse_bfloat16,
    resident_ids,
    slopes_of,
    steps,
    storage,
    strides_of,
)
from .kernels.backward import flash_backward
from .kernels.backward_float32 import backward_float32
from .kernels.backward_rows import ROWS, backward_rows
from .kernels.float32_pairs import WARPS
from .launch_backward_hopper import ShapeOf, hopper_passes, pass_of, takes
from .launch_backward_hopper import shape_of as hopper_shape

BLOCK = 64  # rows of statistics come in whole blocks, of the largest `mma.sync` pass
# rows that a block owns and columns per tile, the best first: what fits into shared memory is taken
SHAPES = ((64, 64), (64, 32), (64, 16), (32, 32), (32, 16))
Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Backward:
    """The launches of one backward pass, in order, and where they leave dq, dk and dv."""

    launches: tuple[Launch, ...]
    gradients: tuple[np.ndarray, np.ndarray, np.ndarray]


@functools.cache
def shape_of(gradients: str, d: int, dv: int, arch: str, masked: bool = False) -> dict[str, Any]:
    """rows, columns and chunk of a pass.

    The chunk is what leaves registers for everything else (tests/cuda/test_sass.py).
    """
    narrow = masked or (arch == "sm_75" and d + dv > 192)
    for rows, columns in SHAPES:
        shape: dict[str, Any] = {
            "rows": rows,
            "columns": columns,
            "chunk": min(16 if narrow else 32, columns),
        }
        if (
            flash_backward(gradients, d, dv, **shape, turing=arch == "sm_75").shared_bytes
            <= ARCHITECTURES[arch][1]
        ):
            return shape
    raise UnsupportedError(
        f"head_dim: got {d} and {dv}; their tiles exceed the shared memory of {arch}"
    )


def passes(d: int, dv: int) -> tuple[str, ...]:
    """The passes of the tile kernel.

    dK and dV take a pass each where their sums do not fit into registers together.
    """
    return ("kv", "q") if d + dv <= 256 else ("v", "k", "q")


def _finite(
    problem: Problem, grad: np.ndarray, lse: np.ndarray
) -> tuple[Problem, np.ndarray, np.ndarray]:
    """The problem without NaN and infinity in its operands, such that 0 * NaN never happens.

    A row of query or gradient that is not finite gets LSE NaN, and a key whose row is not finite a
    bias of NaN: they spoil the keys they attend to and the rows that attend to them, and nothing
    else.
    """
    bits = np.uint16(0x7F80 if problem.precision == "bfloat16" else 0x7C00)

    def bad(x: np.ndarray) -> np.ndarray:
        return (np.ascontiguousarray(x).view(np.uint16) & bits) == bits

    q, k, v, do = (bad(x) for x in (problem.query, problem.key, problem.value, grad))
    if not any(x.any() for x in (q, k, v, do)):
        return problem, grad, lse
    keys = np.repeat(k.any(-1) | v.any(-1), problem.shape[1] // problem.shape[2], 1)[:, :, None]
    bias = problem.bias
    if keys.any():
        bias = np.where(keys, np.float32(np.nan), np.float32(0) if bias is None else bias)
        bias = np.broadcast_to(bias, (*problem.shape[:2], problem.shape[3], problem.shape[4]))
        if problem.bias is not None:
            bias = np.where(problem.bias == -np.inf, problem.bias, bias)
    lse = np.where(q.any(-1) | do.any(-1), np.float32(np.nan), lse)

    def zeroed(x: np.ndarray, bad: np.ndarray) -> np.ndarray:
        return np.where(bad, x.dtype.type(0), x)

    return (
        replace(
            problem,
            query=zeroed(problem.query, q),
            key=zeroed(problem.key, k),
            value=zeroed(problem.value, v),
            bias=bias,
        ),
        zeroed(grad, do),
        lse,
    )


def _operands(
    problem: Problem, grad: np.ndarray, out: np.ndarray, lse: np.ndarray, results: Arrays | None
) -> tuple[Problem, Arrays, Arrays]:
    """The problem; q, k, v, dO, O, LSE; dq, dk, dv and the statistics.

    In host memory made fit, on the card taken as they are.
    """
    if results is not None:
        named = (
            ("query", problem.query),
            ("key", problem.key),
            ("value", problem.value),
            ("grad_out", grad),
            ("out", out),
        )
        if not lse.flags.c_contiguous:
            raise UnsupportedError("lse: not contiguous (B, H, L) on the card")
        return problem, (*(aligned(n, x) for n, x in named), lse), results
    problem, grad, lse = _finite(problem, grad, lse)
    q, k, v, do, o = (
        padded_rows(x) for x in (problem.query, problem.key, problem.value, grad, out)
    )
    stats = np.zeros(statistics_shape(problem), np.float32)
    return (
        problem,
        (q, k, v, do, o, np.ascontiguousarray(lse, np.float32)),
        (*(np.zeros_like(x) for x in (q, k, v)), stats),
    )


def _given(grad_lse: np.ndarray | None) -> Arrays:
    """The gradient of the LSE as the last operand of a kernel, or nothing."""
    return () if grad_lse is None else (grad_lse,)


def _constants(grad_lse: np.ndarray | None) -> dict[str, bool]:
    """The constant of kernels that take it."""
    return {} if grad_lse is None else {"of_lse": True}


def statistics_shape(problem: Problem) -> tuple[int, int, int]:
    """Of the float32 array in which each row's LSE and D wait for the passes, pair after pair."""
    nb, nh, _, length, *_ = problem.shape
    return nb, nh, -(-length // BLOCK) * BLOCK * 2


def plan(
    problem: Problem,
    grad: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    arch: str,
    results: Arrays | None = None,
    grad_lse: np.ndarray | None = None,
) -> Backward:
    """The launches for a problem on an architecture: `float_backward` or `float32_backward`."""
    chosen = float32_backward if problem.precision == "float32" else float_backward
    return chosen(problem, grad, out, lse, arch, results, grad_lse)


def float32_backward(
    problem: Problem,
    grad: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    arch: str,
    results: Arrays | None = None,
    grad_lse: np.ndarray | None = None,
) -> Backward:
    """The launches for a float32 problem: arguments as for `float_backward`.

    On the card all arrays are contiguous.
    """
    nb, nh, nkv, length, s, d, dv = problem.shape
    given = problem.query, problem.key, problem.value, grad, out, lse
    arrays = tuple(np.asarray(x) for x in (*given, *_given(grad_lse)))
    if results is None:
        arrays = tuple(np.ascontiguousarray(x, np.float32) for x in arrays)
    elif not all(x.flags.c_contiguous for x in (*arrays, *results)):
        raise UnsupportedError(
            "query, key, value, grad_out, out, lse, grad_lse: not contiguous (B, H, L, D) on the card, which its float32 "
            "kernel needs"
        )
    dq, dk, dv_out = [np.zeros_like(x) for x in arrays[:3]] if results is None else results[:3]
    _, left, right = band(problem)
    mask_at, bias_at = storage(problem.mask, results), storage(problem.bias, results)
    shared = (*key_places(problem, s), mask_at, bias_at, slopes_of(problem))
    numbers = (
        (*strides_of(problem.mask, results), *strides_of(problem.bias, results)),
        (length, s, d, dv, nh, left, right),
        tuple(
            np.float32(x)
            for x in (problem.scale * LOG2E, problem.scale, float_cap(problem) * LOG2E)
        ),
    )
    constants = {
        "d": padded(d),
        "dv": padded(dv),
        "group": nh // nkv,
        **_constants(grad_lse),
        **folding(nb),
        **option_constants(problem),
    }
    here = resident_ids(results, *arrays, dq, dk, dv_out, mask_at, bias_at)
    launches = []
    for which in ("kv", "q"):
        own = pass_of(which, arrays[:4], (dq, dk, dv_out))
        launches.append(
            Launch(
                backward_float32,
                {"gradients": which, **constants},
                arch,
                (-(-own.rows // WARPS), own.heads, nb),
                ((*arrays[:6], *own.sums, *shared, *arrays[6:]), *numbers),
                lambda: None,
                here,
                written=own.sums,
            )
        )
    return Backward(tuple(x for x in launches if 0 not in x.grid), (dq, dk, dv_out))


def _warp_passes(
    problem: Problem,
    arch: str,
    operands: Arrays,
    results: Arrays,
    mask: tuple[np.ndarray, str, tuple[int, ...]],
    launch: Callable[..., Launch],
) -> list[Launch]:
    """The launches of `kernels.backward`.

    operands : q, k, v, dO;  results : dq, dk, dv and the statistics
    mask : its memory, kind and strides
    launch : (factory, constants, grid, arguments, arrays that are written) -> Launch
    """
    nb, nh, nkv, _, s, d, dv = problem.shape
    q, _, v, _ = operands
    stats = results[3]
    wide, dv_wide, rows = padded(d), padded(dv), stats.shape[2] // 2
    has_band, left, right = band(problem)
    places, slopes = key_places(problem, s), slopes_of(problem)
    cap = float_cap(problem)
    stored, kind, mask_strides = mask
    common = {
        "d": wide,
        "dv": dv_wide,
        "dtype": problem.precision,
        "group": nh // nkv,
        "band": has_band,
        "mask": kind,
        "softcap": bool(problem.softcap),
        "alibi": problem.alibi_slopes is not None,
        "turing": arch == "sm_75",
        **folding(nb),
    }
    factors = tuple(
        np.float32(x)
        for x in (problem.scale * LOG2E, problem.scale, cap * LOG2E, 2 / cap if cap else 0.0)
    )
    found = []
    for which in passes(wide, dv_wide):
        shape = shape_of(which, wide, dv_wide, arch, bool(kind))
        arrays = pass_of(which, operands, results)
        args = (
            (*arrays.own, *arrays.other, *arrays.sums, stats, *places, stored, slopes),
            (*steps(*arrays.own, *arrays.other, *arrays.sums), *mask_strides),
            (arrays.rows, arrays.others, q.shape[-1] * 2, v.shape[-1] * 2, nh, left, right, rows),
            factors,
        )
        grid = (-(-arrays.rows // shape["rows"]), arrays.heads, nb)
        constants = {"gradients": which, **shape, **common}
        found.append(launch(flash_backward, constants, grid, args, arrays.sums))
    return found


def float_backward(
    problem: Problem,
    grad: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    arch: str,
    results: Arrays | None = None,
    grad_lse: np.ndarray | None = None,
    older: bool = False,
    shape: ShapeOf = hopper_shape,
) -> Backward:
    """The launches for a float16 or bfloat16 problem.

    Parameters
    ----------
    problem : of the forward pass
    grad, out : (B, H, L, Dv) in the problem's storage;  lse : (B, H, L) float32, as the forward
        pass gave them;  grad_lse : (B, H, L) float32, or None for 0
    results : dq, dk, dv and statistics (`statistics_shape`); they say that all arrays lie on the
        card
    older : the kernels of all cards, on sm_90a too
    shape : of sm_90a's own kernel, for a pass, a precision and a head size

    Raises
    ------
    UnsupportedError
        A head size without a kernel, bfloat16 on sm_75; arrays on the card that cannot be read as
        they lie.
    """
    nb, nh, _, length, _, d, dv = problem.shape
    refuse_bfloat16(problem, arch)
    padded(d)  # refuses what has no kernel
    problem, (q, k, v, do, o, lse), (dq, dk, dv_out, stats) = _operands(
        problem, grad, out, lse, results
    )
    of_lse = _given(grad_lse)
    if results is None:
        of_lse = tuple(np.ascontiguousarray(x, np.float32) for x in of_lse)
    elif not all(x.flags.c_contiguous for x in of_lse):
        raise UnsupportedError("grad_lse: not contiguous (B, H, L) on the card")
    mask, kind = one_mask(problem)
    stored = storage(mask, results)
    here = resident_ids(results, q, k, v, do, o, lse, *of_lse, dq, dk, dv_out, stats, stored)
    rows = stats.shape[2] // 2

    def launch(
        factory: Any,
        constants: dict[str, Any],
        grid: tuple[int, int, int],
        args: tuple,
        written: Arrays,
        persistent: bool = False,
    ) -> Launch:
        return Launch(
            factory, constants, arch, grid, args, lambda: None, here, persistent, written=written
        )

    launches = [
        launch(
            backward_rows,
            {"dv": padded(dv), "dtype": problem.precision, **_constants(grad_lse), **folding(nb)},
            (rows // ROWS, nh, nb),
            ((do, o, lse, stats, *of_lse), steps(do, o), (length, v.shape[-1] * 2, nh, rows)),
            (),  # the statistics stay there
        )
    ]
    made = dq, dk, dv_out, stats
    if not older and takes(problem, arch, q, k, v, do):
        launches += hopper_passes(problem, (q, k, v, do), made, launch, shape)
    else:
        given = stored, kind, strides_of(mask, results)
        launches += _warp_passes(problem, arch, (q, k, v, do), made, given, launch)
    launches = [x for x in launches if 0 not in x.grid]
    return Backward(tuple(launches), (dq[..., :d], dk[..., :d], dv_out[..., :dv]))


def run(
    problem: Problem,
    grad: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    grad_lse: np.ndarray | None = None,
    emulator: str | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dq (B, H, L, D), dk (B, Hkv, S, D) and dv (B, Hkv, S, Dv) of a problem in host memory, in its
    storage.

    Parameters
    ----------
    grad, out : (B, H, L, Dv) float arrays;  lse, grad_lse : (B, H, L) float32, None for 0
    emulator : str or None
        Run the PTX of this architecture's kernels in the emulator instead of on a card.

    Raises
    ------
    UnsupportedError
        No driver or card, a precision or head size without a kernel, scores that float32 does not
        hold.
    """
    if (np.isfinite(lse) & (np.abs(lse) >= LARGEST_LSE)).any():
        raise UnsupportedError(
            f"lse: got {np.abs(lse[np.isfinite(lse)]).max()}; the CUDA backward kernels take it below "
            f"{LARGEST_LSE:g}, where float32 still tells weights apart; impl 'cpu' takes any"
        )
    grad, out = (convert(x, problem.precision) for x in (grad, out))
    if emulator:
        return emulated(plan(problem, grad, out, lse, emulator, grad_lse=grad_lse))[0]
    device = current_device()
    work = plan(problem, grad, out, lse, device.arch, grad_lse=grad_lse)
    if work.launches:
        device.prepared(work.launches, lambda work: work())
    return work.gradients


def emulated(
    work: Backward, **options: Any
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], tuple[Any, ...]]:
    """Run the launches in the emulator: (dq, dk, dv) and one report per launch."""
    reports = tuple(emulate_launch(launch, **options) for launch in work.launches)
    return work.gradients, reports
