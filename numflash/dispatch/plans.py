"""Calls that were made before.

What depends only on shapes, dtypes and options is decided by the first of equal calls, and kept.

A call is looked up by the shapes and dtypes of its three arrays, and the values and types of its
options. The first one is checked in full and, where it succeeds, leaves a `Plan`; the next equal
call checks only the process (fork) and what a tensor can get wrong besides its dtype, brings its
arrays into contiguous memory, allocates its result and enters one compiled function. The numbers
of masks, lengths, slopes and sinks are looked at in every call.

Only calls on NumPy arrays or PyTorch's tensors leave a plan here. That of tensors on a card, without
masks, lengths, slopes and sinks, is `cuda.arrays.tensors.Again`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..interop import device_tensors
from ..interop.arguments import NOT_MASKS
from ..interop.arrays import Imported, convert, deliver, memory_of, restore
from ..jit import guard
from ..jit.threads import one_at_a_time, refuse_after_fork
from ..numerics.merge import apply_sinks
from ..numerics.quantization import GRANULARITIES, QuantizedTensor
from ..tiling import Store
from ..validation import Problem, described, gathered, quantized, scattered, tensor
from ..validation.options import NAMES, OptionArrays, Options

F = np.float32
Key = tuple[Any, ...] | None
MASK, LENGTHS, SLOPES, SINKS = (NAMES.index(name) for name in OptionArrays._fields)
WINDOW = NAMES.index("window")
BY_VALUE = frozenset(OptionArrays._fields)
ARRAYS = MASK, LENGTHS, SLOPES, SINKS
NO_ARRAYS = {"mask": None, "bias": None, "alibi_slopes": None, "sinks": None}
AN_ARRAY = object()  # in the key of a call, equal to no option


def _in_key(array: Any) -> Any:
    """What stands in a key for an option that is an array, whose numbers each call looks at.

    A number or flag, of which the check of masks has more to say, stays.
    """
    return array if array is None or isinstance(array, NOT_MASKS) else AN_ARRAY


def _kinds_of(window: Any) -> tuple[type, ...]:
    """The types of a window's numbers, or its own."""
    return tuple(map(type, window)) if type(window) is tuple else (type(window),)


def key_of(query: Any, key: Any, value: Any, given: tuple, impl: str) -> Key:
    """What equal calls have in common; None for a call that leaves no plan.

    `given` are the values of `Options`, unchecked.

    Types count: True, 1 and 1.0 are equal, and not all of them are allowed.
    """
    plain = given[MASK] is given[LENGTHS] is given[SLOPES] is given[SINKS] is None
    there: tuple[Any, ...] | None = ()
    if not _arrays_or_tensors(query, key, value):
        there = device_tensors.places(query, key, value) if plain else None
        if there is None or device_tensors.loses_grad(query, key, value):
            return None
    if not plain:
        asked = list(given)
        for n in ARRAYS:
            asked[n] = _in_key(asked[n])
        given = tuple(asked)
    kinds = tuple(map(type, given))
    if given[WINDOW] is not None:
        kinds += _kinds_of(given[WINDOW])
    shapes = query.shape, key.shape, value.shape
    return shapes, query.dtype, key.dtype, value.dtype, given, kinds, impl, there


def _arrays_or_tensors(*given: Any) -> bool:
    """Whether all are NumPy arrays, or all PyTorch's tensors on the CPU: no kinds of their own."""
    kind = type(given[0])
    for x in given:  # a generator for `all` takes as long as the rest of this function
        if type(x) is not kind:
            return False
    if kind is np.ndarray:
        return True
    torch = sys.modules.get("torch")
    if torch is None or kind is not torch.Tensor:
        return False
    return all(x.is_cpu for x in given)


def key_of_packed(arrays: tuple, cu_seqlens: tuple, given: tuple, impl: str) -> Key:
    """The same for `attention_varlen`, whose sequences are cut alike.

    given : is_causal, return_lse, and (name, value) of each option
    """
    if not _arrays_or_tensors(*arrays) or not _arrays_or_tensors(*cu_seqlens):
        return None
    options = dict(given[2:])
    if not BY_VALUE.isdisjoint(options):
        return None
    try:
        cuts = [np.asarray(cu) for cu in cu_seqlens]
    except (TypeError, RuntimeError):  # tensors that NumPy has no type for
        return None
    if any(cu.dtype.kind not in "iu" or cu.ndim != 1 for cu in cuts):
        return None
    kinds = tuple(type(x[1]) if type(x) is tuple else type(x) for x in given)
    kinds += _kinds_of(options.get("window"))
    shapes = tuple((x.shape, x.dtype) for x in arrays)
    ends = tuple((cu.dtype, cu.tobytes()) for cu in cuts)
    return "packed", shapes, ends, given, kinds, impl


def key_of_quantized(query: Any, key: Any, value: Any, options: dict[str, Any], impl: str) -> Key:
    """The same for `attention_int8`.

    Its operands were looked at in earlier calls, and are contiguous: what a kernel takes as it is.
    """
    tensors = query, key, value
    for t in tensors:
        if type(t) is not QuantizedTensor or not t.checked or not t.is_contiguous():
            return None
    if (query.granularity, key.granularity, value.granularity) != ("row", "row", "channel"):
        return None
    if query.rotated is not key.rotated:
        return None
    if not BY_VALUE.isdisjoint(options):
        options = {name: _in_key(x) if name in BY_VALUE else x for name, x in options.items()}
    shapes = tuple(
        (t.data.shape, t.offset is None, t.nonfinite is None, t.low is None) for t in tensors
    )
    kinds = tuple(map(type, options.values()))
    if options.get("window") is not None:
        kinds += _kinds_of(options["window"])
    return (QuantizedTensor, shapes, tuple(options.items()), kinds, impl)


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

    def with_arrays(self, arrays: OptionArrays) -> tuple[Any, np.ndarray | None]:
        """The runner for these masks, lengths and slopes, and the sinks.

        No runner where it would take more memory than that of the first call.
        """
        fields = described(arrays, self.alignment, self.grid)
        return self.runner.for_options(fields), fields["sinks"]

    def results(
        self, run: Any, operands: tuple[Any, Any, Any], sinks: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """What `run(*operands, out, lse)` computes, and lse where it is to be returned."""
        out = np.empty(self.out_shape, F)
        lse = np.empty(self.lse_shape, F) if self.return_lse or sinks is not None else None
        with one_at_a_time():
            run(*operands, out, lse)
        if sinks is not None and lse is not None:
            apply_sinks(out, lse, sinks)
        return out, lse if self.return_lse else None


class Plan(OneProblem):
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
        self.query = replace(query, array=np.empty(0))
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
        self.query = replace(query, array=np.empty(0))
        self.starts = [(cu[:-1], np.diff(cu)) for cu in cuts]

    def __call__(self, query: Any, key: Any, value: Any) -> Any:
        """What `attention_varlen` returns for such arrays."""
        refuse_after_fork()
        q, k, v = shaped(taken_in(query, key, value), "blhd", self.precision)
        out = np.empty((self.total, q.shape[1], v.shape[3]), F)
        lse = np.empty(out.shape[:2], F) if self.return_lse else None
        (at_q, q_lengths), (at_k, k_lengths) = self.starts
        for runner, (nb, nh, _, length, _, _, dv), chosen in self.parts:
            rows = gathered(q, at_q[chosen], q_lengths[chosen])
            keys, values = (gathered(x, at_k[chosen], k_lengths[chosen]) for x in (k, v))
            part = np.empty((nb, nh, length, dv), F)
            part_lse = None if lse is None else np.empty((nb, nh, length), F)
            with one_at_a_time():
                runner.run(*runner.operands(rows, keys, values), part, part_lse)
            scattered(out, part, self.cuts[0], chosen)
            if lse is not None and part_lse is not None:
                scattered(lse, part_lse, self.cuts[0], chosen)
        return deliver(out, lse, self.query, self.return_lse)


_plans: Store[Any] = Store()


def find(key: Key) -> Any:
    """The plan of a call that was made before; none for `guard`, which looks at calls in full."""
    if guard.ON:
        return None
    try:
        return _plans.get(key)
    except (TypeError, ValueError):  # an option that cannot be hashed (ValueError: a memoryview)
        return None


def runner_of(problem: Problem, impl: str) -> Any:
    """What computes a problem and all that are equal but for the numbers in their arrays.

    None where there is no such thing. It keeps no mask.
    """
    if impl not in ("auto", "cpu") or 0 in problem.shape or guard.ON:
        return None
    from ..cpu import launch

    lengths = {"key_lengths": problem.key_lengths, "diagonal": problem.diagonal}
    return launch.runner(problem.changed(**NO_ARRAYS | lengths))


def keep(
    key: tuple[Any, ...],
    problem: Problem,
    given: Sequence[Imported],
    options: Options,
    impl: str,
) -> None:
    """Keep a plan of a call that has succeeded, if there is one for it."""
    runner = runner_of(problem, impl)
    if runner is not None:
        native = all(dtype == F for dtype in key[1:4])
        _plans.keep(key, Plan(problem, given, options, runner, native))


def keep_made(key: Key, call: Any) -> None:
    """Keep what computes a call on tensors on a card that has succeeded."""
    _plans.keep(key, call)


def keep_packed(
    key: tuple[Any, ...],
    batches: list[tuple[Problem, list[int]]],
    cuts: tuple[np.ndarray, np.ndarray],
    query: Imported,
    options: Options,
    impl: str,
) -> None:
    """The same for `attention_varlen`: batches of sequences, and how they were cut."""
    parts = [(runner_of(problem, impl), problem.shape, chosen) for problem, chosen in batches]
    if parts and all(runner is not None for runner, _, _ in parts):
        plan = PackedPlan(parts, cuts, query, options, batches[0][0].precision)
        _plans.keep(key, plan)


def keep_quantized(
    key: tuple[Any, ...], problem: Problem, ndim: int, options: Options, impl: str
) -> None:
    """The same for `attention_int8`."""
    runner = runner_of(problem, impl)
    if runner is not None:
        _plans.keep(key, QuantizedPlan(problem, ndim, options, runner))


# of calls on tensors, by a key of their own: what computes them; of gradients the problem, without its
# operands
runners: Store[Any] = Store()
problems: Store[Problem] = Store()


def keep_problem(key: Any, problem: Problem) -> None:
    """Keep the problem of gradients that have been computed, without its arrays."""
    problems.keep(key, problem.with_operands(None, None, None).changed(**NO_ARRAYS))


def keep_runner(key: Any, problem: Problem, impl: str, given: str) -> None:
    """Keep what computes a call on contiguous tensors of dtype `given` that has succeeded, if it takes
    them as they are and gives float32.
    """
    if problem.precision == given or (problem.precision, given) == ("int8", "float32"):
        runner = runner_of(problem, impl)
        if runner is not None and runner.takes == given:
            runners.keep(key, runner)
