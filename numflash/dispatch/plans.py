"""What equal calls have in common, decided by the first of them.

The first of equal calls (`call_keys`) is checked in full and, where it succeeds, leaves a plan
(`plan_store`); the next one checks only the process (fork) and what a tensor can get wrong besides its
dtype, brings its arrays into contiguous memory, allocates its result and enters one compiled
function. The numbers of masks, lengths, slopes and sinks are looked at in every call.

These are plans of calls on NumPy arrays or PyTorch's tensors. That of tensors on a card, without
masks, lengths, slopes and sinks, is `cuda.arrays.tensors.Again`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..interop.arrays import Imported, address, convert, deliver, memory_of, restore, to_float32
from ..jit.threads import one_at_a_time, refuse_after_fork
from ..numerics.merge import apply_sinks
from ..numerics.quantization import GRANULARITIES
from ..validation import Problem, are_neighbours, gathered, quantized, scattered, tensor
from ..validation.options import OptionArrays, Options
from .call_keys import BY_VALUE

F = np.float32


def taken_in(query: Any, key: Any, value: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The three as NumPy arrays."""
    return memory_of("query", query), memory_of("key", key), memory_of("value", value)


def shaped(arrays: Sequence[np.ndarray], layout: str, precision: str) -> Sequence[np.ndarray]:
    """(B, H, L, D) views of query, key and value, in the dtype of the kernels."""
    if layout != "bhld" or arrays[0].ndim != 4:
        named = zip(("query", "key", "value"), arrays, strict=True)
        arrays = [tensor(name, x, layout) for name, x in named]
    return arrays if precision == "int8" else [convert(x, precision) for x in arrays]


class OneProblem:
    """Equal calls on one problem.

    Parameters
    ----------
    problem : the first of them, checked
    options : its options
    runner : what computes them
    """

    def __init__(self, problem: Problem, options: Options, runner: Any) -> None:
        nb, nh, _, length, s, _, dv = problem.shape
        self.runner, self.return_lse = runner, options.return_lse
        self.alignment, self.grid = options.alignment, (nb, nh, length, s)
        self.out_shape, self.lse_shape = (nb, nh, length, dv), (nb, nh, length)
        self.by_token = options.layout == "blhd"
        self.bfloat16 = False

    def with_arrays(self, arrays: OptionArrays) -> tuple[Any, np.ndarray | None]:
        """The runner for these masks, lengths and slopes, and the sinks, as of `KernelPlan.for_arrays`."""
        found: tuple[Any, np.ndarray | None] = self.runner.for_arrays(
            arrays, self.alignment, self.grid
        )
        return found

    def results(
        self, run: Any, operands: tuple[Any, Any, Any], sinks: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """What `run(*operands, out, lse)` computes, and lse where it is to be returned: float32, or where
        the caller's arrays are bfloat16 and the runner can write them their bits.
        """
        kind = np.uint16 if self.bfloat16 and sinks is None and self.runner.narrows else F
        out = np.empty(self.out_shape, kind)
        if self.by_token:
            nb, nh, length, dv = self.out_shape
            out = np.empty((nb, length, nh, dv), kind).swapaxes(1, 2)
        lse = np.empty(self.lse_shape, F) if self.return_lse or sinks is not None else None
        with one_at_a_time():
            run(*operands, out, lse)
        if sinks is not None and lse is not None:
            apply_sinks(out, lse, sinks)
        return out, lse if self.return_lse else None


class ArrayPlan(OneProblem):
    """Equal calls of `attention` on arrays or tensors: the same shapes, dtypes and options.

    Parameters
    ----------
    problem : the first of them, checked
    given : its query, key and value, taken in
    options : its options
    runner : what computes them: `operands` brings arrays into its form, `run` attends
    native : query, key and value are NumPy arrays of float32 in the machine's byte order

    Attributes
    ----------
    unchanged : the kernels' result is the caller's, but for its kind
    direct : contiguous operands are what the runner takes, as they are
    """

    def __init__(
        self,
        problem: Problem,
        given: Sequence[Imported],
        options: Options,
        runner: Any,
        native: bool,
    ) -> None:
        super().__init__(problem, options, runner)
        query = given[0]
        self.layout, self.precision, self.ndim = options.layout, problem.precision, query.array.ndim
        self.query = query._replace(array=np.empty(0))
        self.bfloat16 = query.array.dtype == np.uint16
        self.plain, self.native = not options.arrays.given(), native
        whole = self.ndim == 4 and options.layout == "bhld"
        self.unchanged = whole and query.dtype == "float32"
        unconverted = problem.precision in ("float32", "int8")
        floats = all(x.dtype == "float32" for x in given)
        self.direct = whole and floats and unconverted and runner.takes == "float32"

    def __call__(self, query: Any, key: Any, value: Any, arrays: tuple) -> Any:
        """What `attention` returns for arrays of these shapes and dtypes, and the options' arrays, in
        the order of `OptionArrays`.

        None where these take more memory than those of the first call.
        """
        refuse_after_fork()
        if not self.native:
            query, key, value = taken_in(query, key, value)
        runner, sinks = self.runner, None
        if not self.plain:
            runner, sinks = self.with_arrays(OptionArrays._make(arrays))
            if runner is None:
                return None
        if not (self.direct and query.flags.carray and key.flags.carray and value.flags.carray):
            operands = shaped((query, key, value), self.layout, self.precision)
            query, key, value = runner.operands(*operands)
        out, lse = self.results(runner.run, (query, key, value), sinks)
        if self.native and self.unchanged:
            return out if lse is None else (out, lse)
        if not self.unchanged:
            out, lse = (restore(x, self.ndim, self.layout) for x in (out, lse))
        return deliver(out, lse, self.query, self.return_lse)


class ArrayGradientPlan:
    """Equal calls of `attention_backward` on four-dimensional NumPy arrays of float32.

    Parameters
    ----------
    problem : the first of them, checked
    options : its options
    runner : a `cpu.launch_backward.GradientRunner`
    """

    def __init__(self, problem: Problem, options: Options, runner: Any) -> None:
        nb, nh, _, length, s, _, _ = problem.shape
        self.runner, self.plain = runner, not options.arrays.given()
        self.alignment, self.grid = options.alignment, (nb, nh, length, s)

    def __call__(self, given: tuple[Any, ...], arrays: tuple) -> tuple[np.ndarray, ...] | None:
        """The gradients of query, key and value, from `attention_backward`'s arrays and the options' arrays,
        in the order of `OptionArrays`; None where float32 does not hold all rows.
        """
        refuse_after_fork()
        options = None
        if not self.plain:
            options = OptionArrays._make(arrays), self.alignment, self.grid
        grad_out, query, key, value, out, lse = (to_float32(x) for x in given[:6])
        grad_lse = None if given[6] is None else to_float32(given[6])
        results = np.empty(query.shape, F), np.empty(key.shape, F), np.empty(value.shape, F)
        places = [
            0 if x is None else address(x)
            for x in (query, key, value, grad_out, out, lse, grad_lse, *results, None)
        ]
        with one_at_a_time():
            return results if self.runner.run_at(places, None, options) else None


class QuantizedPlan(OneProblem):
    """Equal calls of `attention_int8`, on data of `ndim` dimensions."""

    def __init__(self, problem: Problem, ndim: int, options: Options, runner: Any) -> None:
        super().__init__(problem, options, runner)
        self.ndim = ndim

    def __call__(self, query: Any, key: Any, value: Any, options: dict[str, Any]) -> Any:
        """What `attention_int8` returns for such operands and options."""
        refuse_after_fork()
        if self.ndim != 4:
            tensors = ("query", query), ("key", key), ("value", value)
            query, key, value = (quantized(name, t, GRANULARITIES) for name, t in tensors)
        runner, sinks = self.runner, None
        if not BY_VALUE.isdisjoint(options):
            arrays = OptionArrays(*(options.get(name) for name in OptionArrays._fields))
            runner, sinks = self.with_arrays(arrays)
        out, lse = self.results(runner.run_ready, (query, key, value), sinks)
        if self.ndim != 4:
            out, lse = restore(out, self.ndim, "bhld"), restore(lse, self.ndim, "bhld")
        return out if lse is None else (out, lse)


class PackedPlan:
    """Equal calls of `attention_varlen`: arrays of the same shapes and dtypes, cut alike.

    Parameters
    ----------
    parts : of each batch of sequences what computes it, its shape, and the sequences' numbers
    cuts : (N + 1,) int64 cumulative lengths of queries and of keys
    query : of the first call, taken in
    options : of the first call
    precision : of the kernels
    """

    def __init__(
        self,
        parts: list[tuple[Any, Any, list[int]]],
        cuts: tuple[np.ndarray, np.ndarray],
        query: Imported,
        options: Options,
        precision: str,
    ) -> None:
        self.parts, self.cuts, self.precision = parts, cuts, precision
        self.return_lse, self.total = options.return_lse, query.array.shape[0]
        self.query = query._replace(array=np.empty(0))
        self.starts = [(cu[:-1], np.diff(cu)) for cu in cuts]

    def __call__(self, query: Any, key: Any, value: Any) -> Any:
        """What `attention_varlen` returns for such arrays."""
        refuse_after_fork()
        q, k, v = shaped(taken_in(query, key, value), "blhd", self.precision)
        out = np.empty((self.total, q.shape[1], v.shape[3]), F)
        lse = np.empty(out.shape[:2], F) if self.return_lse else None
        (at_q, q_lengths), (at_k, k_lengths) = self.starts
        for runner, (nb, nh, _, length, _, _, dv), chosen in self.parts:
            own, of_keys = (at_q[chosen], q_lengths[chosen]), (at_k[chosen], k_lengths[chosen])
            rows, keys, values = gathered(q, *own), gathered(k, *of_keys), gathered(v, *of_keys)
            in_place = are_neighbours(*own)
            part = (
                gathered(out.swapaxes(0, 1)[None], *own)
                if in_place
                else np.empty((nb, length, nh, dv), F).swapaxes(1, 2)
            )
            part_lse = None if lse is None else np.empty((nb, nh, length), F)
            with one_at_a_time():
                runner.run(*runner.operands(rows, keys, values), part, part_lse)
            if not in_place:
                scattered(out, part, self.cuts[0], chosen)
            if lse is not None and part_lse is not None:
                scattered(lse, part_lse, self.cuts[0], chosen)
        return deliver(out, lse, self.query, self.return_lse)
