"""From a validated problem to the INT8 kernels.

Operands, options as arrays, threads, and the log-sum-exp.

Operands come from float arrays in one pass (`int8.quantize`), or are quantised already, by the
caller or the general way, and only packed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numba
import numpy as np

from ..interop.arrays import Memory, convert, widen
from ..jit import guard
from ..jit.memory import Layout, fresh, scratch
from ..numerics import fixedpoint as fx
from ..numerics.fixedpoint import FIRST_KEYS
from ..numerics.quantization import QuantizedTensor, float_values, quantize_problem
from ..numerics.scores import (
    LIMIT,
    cap_shift,
    combined_scale,
    largest,
    log_sum_exp,
    row_shift,
    score_unit,
)
from ..tiling import KEY_BLOCK, chosen, workers
from ..validation import Problem
from .floats.call import addresses
from .int8 import amx_stream, arguments, flash_int8, portable
from .int8.call import (
    MOST,
    NUMBERS,
    PLACES,
    STRIDES,
    Numbers,
    make_float_call,
    make_ready_call,
    most_score,
)
from .int8.first_keys import FirstKeys, first_keys, no_first_keys
from .int8.packing import bfloat16_pairs, float_rows, pack_keys, pack_values
from .int8.quantize import rows_of
from .int8.quantize_rows import LANES
from .int8.quantize_values import value_type
from .int8.wide_rows import floats_of
from .isa.isas import VECTOR_ISAS, padded, running_lanes
from .launch_float import NO_LIMIT, Results, at_address, compact, functions_of, heads, seen_keys
from .semantics import Semantics, option_numbers

F = np.float32


class Operands(NamedTuple):
    """What the kernels take, for N query heads and Nkv KV heads.

    query : (N, L, D) int8;  query_scale : (N, L) float32, in Q8.8 or units of the softcap
    keys : `PackedKeys`, or what `portable` takes;  values : as packed;  first : the first keys
    value_scale : (Nkv, Dv) float32
    most : no score is larger than this
    cap_shift, row_shift : functions f() of `scores`, for options that need them
    """

    query: np.ndarray
    query_scale: np.ndarray
    keys: Any
    values: np.ndarray
    first: FirstKeys
    value_scale: np.ndarray
    most: float
    cap_shift: Callable[[], np.ndarray | None]
    row_shift: Callable[[], np.ndarray | None]


def semantics(problem: Problem, extreme: bool, shift: np.ndarray | None) -> Semantics:
    """The options of a problem as the kernels take them; scores are in Q8.8 (256 per octave).

    extreme : scores may be too large to be rounded to int16 at once;  shift : `scores.cap_shift`
        where there is a softcap
    """
    nb, nh, _, length, _, _, _ = problem.shape
    has_mask = problem.mask is not None
    has_bias = problem.bias is not None
    slopes = problem.alibi_slopes
    return Semantics(
        NO_LIMIT if problem.left is None else problem.left,
        NO_LIMIT if problem.right is None else problem.right,
        np.asarray(problem.diagonal, np.int64),
        np.asarray(problem.key_lengths, np.int64),
        extreme or has_mask or has_bias or bool(problem.softcap) or slopes is not None,
        compact(problem.mask, np.uint8),
        compact(problem.bias, F),
        has_mask,
        has_bias,
        F(problem.softcap) * fx.LOG2E_Q8,
        np.zeros((nb, nh, length) if problem.softcap else (1, 1, 1), F) if shift is None else shift,
        np.zeros((1, 1), F)
        if slopes is None
        else np.ascontiguousarray(slopes.astype(F) * fx.LOG2E_Q8),
        extreme,
        functions_of(problem),
    )


def from_integers(problem: Problem, isa: str) -> Operands:
    """Operands of QuantizedTensors, packed."""
    q = problem.query
    k = problem.key
    v = problem.value
    dv = problem.shape[6]
    cq, ck = combined_scale(q, k, problem.scale, problem.softcap)
    unit = score_unit(problem.scale, problem.softcap)
    precise = problem.pv in fx.FLOAT_VALUES
    if precise:
        v, units, bad = float_values(v)
        if problem.pv == "bf16":
            v = convert(v, "bfloat16")
        v_scale = units.reshape(-1, dv)
    else:
        v_scale, bad = heads(v.scale)[:, 0], v.nonfinite
    if bad is not None:
        ck = np.where(bad, F(np.nan), ck)
    if isa == "portable":
        keys: Any = portable.pad_keys(heads(k.data)), portable.pad_keys(heads(ck))
        values = (
            portable.arrange_values(heads(widen(v)), heads(bad))
            if precise
            else portable.arrange_values(heads(v.data))
        )
        columns = padded(dv, portable.NR)
    else:
        keys = pack_keys(isa, heads(k.data), heads(ck))
        if not precise:
            values = pack_values(isa, heads(v.data))
        elif floats_of(isa, problem.pv).group == 2:
            values = bfloat16_pairs(isa, heads(v))
        else:
            values = float_rows(isa, heads(widen(v)), heads(bad))
        columns = values.shape[1] // max(1, keys.start.shape[1])
    if precise:
        first = no_first_keys(len(v_scale), columns)
    else:
        lows = (None if t.low is None else heads(t.low) for t in (k, v))
        first = first_keys(
            heads(k.data), heads(v.data), heads(ck), lows, columns, problem.first_keys
        )
    return Operands(
        heads(q.data),
        heads(cq),
        keys,
        values,
        first,
        v_scale,
        most_score.py_func(unit, largest(q.scale), largest(k.scale), problem.shape[5]),
        lambda: cap_shift(problem),
        lambda: row_shift(q, k.offset, problem.scale),
    )


def stream_of(problem: Problem, isa: str) -> int:
    """The address of the software-pipelined stream for these head sizes, or 0 where there is none."""
    if not VECTOR_ISAS[isa].tiled or problem.pv != "int8":
        return 0
    changed = problem.functions is not None and problem.functions.changes_scores
    return amx_stream.address_of(problem.shape[5], problem.shape[6], changed)


class Int8Plan:
    """What equal calls have in common, decided once, as in `launch_float.FloatPlan`.

    Parameters
    ----------
    problem : Problem
        Its query, key and value count by their shapes and dtypes; its masks, lengths and slopes are
        the plan's own.
    isa : str
        An instruction set with register tiles.

    Attributes
    ----------
    direct : contiguous float32 arrays are what `run` takes, as they are
    layout : of scratch memory
    """

    def __init__(self, problem: Problem, isa: str) -> None:
        nb, nh, nkv, length, s, d, dv = self.shape = problem.shape
        self.isa = isa
        isa, rows = chosen(isa)
        ready = isinstance(problem.query, QuantizedTensor)
        dtype = problem.query.data.dtype if ready else problem.query.dtype
        self.operand = np.dtype(dtype if dtype in (np.int8, np.uint16) else F)
        self.direct = self.operand == F
        self.problem = replace(problem, query=None, key=None, value=None)
        self.options = semantics(problem, False, None)
        n = nb * nh
        n_kv = nb * nkv
        description = VECTOR_ISAS[isa]
        keys = padded(s, KEY_BLOCK)
        channels = padded(d, description.step)
        columns = padded(dv, description.unit * running_lanes(isa))
        size = 1 if description.group == 4 else 2
        # written where values are integers, whether or not the sequences have any
        first_rows = 0 if problem.pv in fx.FLOAT_VALUES else n_kv * FIRST_KEYS
        value_size = np.dtype(value_type(isa, problem.pv)).itemsize
        seen = int(seen_keys(problem).max(initial=0))
        self.layout = Layout()
        places = (  # in the order of `Numbers`
            self.layout.add("quantised query", 0 if ready else n * length * d),
            self.layout.add("scales of the query", 0 if ready else n * length * 4),
            self.layout.add("scales of scores", n * length * 4),
            self.layout.add("packed keys", n_kv * keys * channels * size),
            self.layout.add("starts of sums", n_kv * keys * 4),
            self.layout.add("scales of keys", n_kv * keys * 4),
            self.layout.add("blocks of wide keys", n_kv * keys // KEY_BLOCK),
            self.layout.add("packed values", n_kv * keys * columns * value_size),
            self.layout.add("first keys", first_rows * d * 2),
            self.layout.add("scales of first keys", first_rows * 4),
            self.layout.add("first values", first_rows * columns * 4),
            self.layout.add("scales of values", 0 if ready else n_kv * dv * 4),
            self.layout.add("mean of keys", 0 if ready else n_kv * d * 4),
            self.layout.add("octaves", n * length * 4),
            self.layout.add("sums of weights", n * length * 4),
            self.layout.add("counter", 8),
        )
        strides = (strides_of(shape, self.operand.itemsize) for shape in self.shapes())
        numbers = (  # in the order of `Numbers`
            *self.shape,
            keys,
            channels,
            columns,
            problem.smooths,
            problem.first_keys if first_rows else 0,
            workers("int8", n * length * seen * (d + dv)),
            stream_of(problem, isa),
            *(step for steps in strides for step in steps[:3]),
            *places,
            *option_numbers(self.options),
        )
        self.numbers = np.array(numbers, np.int64)
        unit = score_unit(problem.scale, problem.softcap)
        self.factors = np.array((unit, self.options.softcap), np.float64)
        if ready:
            self.call = make_ready_call(isa, problem.pv, *rows)
        else:
            kind = "bfloat16" if self.operand == np.uint16 else "float32"
            self.call = make_float_call(isa, kind, problem.pv, *rows)

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of query, key and value."""
        nb, nh, nkv, length, s, d, dv = self.shape
        return (nb, nh, length, d), (nb, nkv, s, d), (nb, nkv, s, dv)

    def operands(
        self, query: np.ndarray, key: np.ndarray, value: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(B, H, L, D), (B, Hkv, S, D) and (B, Hkv, S, Dv) float arrays as `run` takes them."""
        return rows_of(query), rows_of(key), rows_of(value)

    def run(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, lse: np.ndarray | None
    ) -> None:
        """Attend float operands whose rows are contiguous. out (B, H, L, Dv) and lse (B, H, L),
        contiguous float32, are written.

        None for no lse.
        """
        numbers = self.numbers
        if not (q.flags.c_contiguous and k.flags.c_contiguous and v.flags.c_contiguous):
            numbers = numbers.copy()
            numbers[STRIDES] = [step for x in (q, k, v) for step in x.strides[:3]]
            at = [x.ctypes.data for x in (q, k, v)]
            _, _, _, out_at, lse_at = addresses(out, out, out, out, out if lse is None else lse)
        else:
            *at, out_at, lse_at = addresses(q, k, v, out, out if lse is None else lse)
        self._run(tuple(at), numbers, out_at, 0 if lse is None else lse_at)

    def run_at(self, q: int, k: int, v: int, out: int, lse: int, with_lse: bool = True) -> None:
        """The same for addresses of contiguous arrays."""
        self._run((q, k, v), self.numbers, out, lse if with_lse else 0)

    def run_ready(
        self,
        query: QuantizedTensor,
        key: QuantizedTensor,
        value: QuantizedTensor,
        out: np.ndarray,
        lse: np.ndarray | None,
    ) -> None:
        """The same for quantised operands that `is_plain` allows."""
        q, k, v, q_scale, k_scale = addresses(
            query.data, key.data, value.data, query.scale, key.scale
        )
        k_low, v_low = (value.data if t.low is None else t.low for t in (key, value))
        v_scale, out_at, k_low_at, v_low_at, lse_at = addresses(
            value.scale, out, k_low, v_low, out if lse is None else lse
        )
        k_low_at, v_low_at = (
            0 if t.low is None else at for t, at in ((key, k_low_at), (value, v_low_at))
        )
        tensors = query, key, value
        at = (q, q_scale, k, k_scale, k_low_at, v, v_scale, v_low_at)  # in the order of `Ready`
        self._run(at, self.numbers, out_at, 0 if lse is None else lse_at, tensors)

    def _run(
        self, operands: tuple[int, ...], numbers: np.ndarray, out: int, lse: int, ready: Any = None
    ) -> None:
        room = scratch.take(self.layout.nbytes)
        at = room.address
        try:
            if guard.ON:
                numbers = numbers.copy()
                buffers = self.layout.guarded()
                numbers[PLACES] = [x.ctypes.data - at for x in buffers]
            if self.call(operands, out, at, numbers, self.factors):
                self._go_the_general_way(operands, numbers, out, lse, ready)
            elif lse:
                self._write_lse(at, numbers, lse, ready)
        finally:
            scratch.give(room)

    def _write_lse(self, room: int, numbers: np.ndarray, lse: int, ready: Any) -> None:
        nb, nh, nkv, length, _, d, _ = self.shape
        p = Numbers(*numbers[:NUMBERS].tolist())
        shift = None
        rows = (nb, nh, length)
        if self.problem.smooths:  # otherwise nothing was taken off the keys
            if ready is None:
                q = at_address(room + p.q, (*rows, d), "|i1")
                scale = at_address(room + p.q_scale, (*rows, 1), "=f4")
                query = QuantizedTensor(q, scale, "row")
                offset = at_address(room + p.offset, (nb, nkv, 1, d), "=f4")
            else:
                query, offset = ready[0], ready[1].offset
            shift = row_shift(query, offset, self.problem.scale)
        m = at_address(room + p.m, rows, "=i4")
        l = at_address(room + p.l, rows, "=f4")
        one = fx.WEIGHT_ONE[self.problem.pv]
        at_address(lse, rows, "=f4")[...] = log_sum_exp(m, l, shift, one)

    def _go_the_general_way(
        self, operands: Sequence[int], numbers: np.ndarray, out: int, lse: int, ready: Any
    ) -> None:
        if ready is None:
            steps = numbers[STRIDES].reshape(3, 3).tolist()
            kind = self.operand
            ready = (
                np.asarray(Memory(at, shape, (*step, kind.itemsize), kind.str))
                for at, shape, step in zip(operands, self.shapes(), steps, strict=True)
            )
        query, key, value = ready
        problem = replace(self.problem, query=query, key=key, value=value)
        nb, nh, _, length, _, _, dv = self.shape
        to = at_address(out, (nb, nh, length, dv), "=f4")
        _, found = run_general(problem, self.isa, to)
        if lse:
            at_address(lse, (nb, nh, length), "=f4")[...] = found


def strides_of(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The strides of a contiguous array."""
    _, heads, rows, columns = shape
    row = columns * itemsize
    return heads * rows * row, rows * row, row, itemsize


def is_plain(problem: Problem, isa: str) -> bool:
    """Whether a plan takes the problem's operands.

    Float arrays that the one-pass quantiser takes, or contiguous tensors with a scale for each row
    and channel, all finite; not tensors beside float values.
    """
    if isa == "portable":
        return False
    q, k, v = problem.query, problem.key, problem.value
    if not isinstance(q, QuantizedTensor):
        unit = score_unit(problem.scale, problem.softcap)
        return min(problem.shape[5:]) >= LANES and abs(unit) < LIMIT
    if problem.pv in fx.FLOAT_VALUES:
        return False
    kinds = q.granularity, k.granularity, v.granularity
    finite = q.nonfinite is k.nonfinite is v.nonfinite is None
    shifted = not problem.smooths and k.offset is not None
    return (
        kinds == ("row", "row", "channel")
        and finite
        and not shifted
        and all(t.is_contiguous() for t in (q, k, v))
    )


def run(
    problem: Problem, isa: str, results: Results = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """`precision="int8"` on the CPU. Returns out and lse, both float32.

    `results` if these are given.

    problem : its query, key and value are QuantizedTensors, or all three are float arrays
    """
    nb, nh, _, length, _, _, dv = problem.shape
    out = fresh((nb, nh, length, dv), F) if results is None else results[0]
    if not is_plain(problem, isa):
        return run_general(problem, isa, out)
    lse = None
    if problem.return_lse or problem.sinks is not None:
        lse = fresh((nb, nh, length), F) if results is None else results[1]
    plan = Int8Plan(problem, isa)
    operands = problem.query, problem.key, problem.value
    if isinstance(problem.query, QuantizedTensor):
        plan.run_ready(*operands, out, lse)
    else:
        plan.run(*plan.operands(*operands), out, lse)
    return out, lse


def run_general(
    problem: Problem, isa: str, shaped: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """The same for operands of all kinds; out is `shaped`, contiguous (B, H, L, Dv) float32."""
    if isinstance(problem.query, np.ndarray):
        problem = quantize_problem(problem)
    isa, rows = chosen(isa)
    x = from_integers(problem, isa)
    nb, nh, nkv, length, s, _, dv = problem.shape
    options = semantics(problem, x.most >= MOST, x.cap_shift() if problem.softcap else None)
    n = nb * nh
    out = shaped.reshape(n, length, dv)
    m = fresh((n, length), np.int32)
    l = fresh((n, length), F)
    if isa == "portable":
        attend, stream = portable.make_attend(problem.pv), 0
    else:
        attend, stream = flash_int8.make_attend(isa, problem.pv, *rows), stream_of(problem, isa)
    attend(
        arguments.Operands(x.query, x.query_scale, x.keys, x.values, x.first, x.value_scale),
        options,
        arguments.Sizes(nh, nkv, s, numba.get_num_threads(), stream),
        np.zeros(1, np.int64),
        arguments.Results(out, m, l),
    )
    if not problem.return_lse and problem.sinks is None:
        return shaped, None
    shift = x.row_shift() if problem.smooths else None
    rows = nb, nh, length
    one = fx.WEIGHT_ONE[problem.pv]
    return shaped, log_sum_exp(m.reshape(rows), l.reshape(rows), shift, one)
