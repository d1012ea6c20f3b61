"""From a validated problem to the INT8 kernels: plans, scratch memory, and the log-sum-exp.

Operands come from float arrays in one pass (`int8.quantize`), or are quantised already, by the
caller or by `general_int8`, and only packed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..jit.memory import fresh
from ..jit.scratch import Layout, placed, scratch
from ..jit.threads import restoring_threads
from ..numerics import fixedpoint as fx
from ..numerics.fixedpoint import FIRST_KEYS
from ..numerics.quantization import QuantizedTensor
from ..numerics.scores import LIMIT, log_sum_exp, row_shift, score_unit
from ..tiling import KEY_BLOCK, chosen, workers
from ..validation import Problem
from .floats.call import addresses
from .general_int8 import run_general, semantics, slopes_of, stream_of
from .int8.call import NUMBERS, PLACES, Numbers, make_float_call, make_ready_call
from .int8.quantize_rows import LANES
from .int8.quantize_values import value_type
from .isa.isas import VECTOR_ISAS, padded, running_lanes
from .isa.strided import contiguous_strides, rows_of
from .launch_float import Results
from .plan import ForwardPlan
from .problem_arrays import at_address, in_place, kernel_arrays, seen_keys
from .semantics import ARRAY_NUMBERS, array_numbers, option_numbers

F = np.float32
WORKERS = Numbers._fields.index("workers")
OF_ARRAYS = slice(NUMBERS, NUMBERS + ARRAY_NUMBERS)  # what masks, lengths and slopes decide


class Int8Plan(ForwardPlan):
    """Instruction set, places in scratch memory, options as numbers.

    Parameters
    ----------
    problem : Problem
        Its query, key and value count by their shapes and dtypes; its masks, lengths and slopes are
        the plan's own, `for_arrays` makes that of others.
    isa : str
        An instruction set with register tiles.

    """

    def __init__(self, problem: Problem, isa: str) -> None:
        super().__init__()
        nb, nh, nkv, length, s, d, dv = self.shape = problem.shape
        self.isa = isa
        isa, rows = chosen(isa)
        ready = isinstance(problem.query, QuantizedTensor)
        dtype = problem.query.data.dtype if ready else problem.query.dtype
        self.operand = np.dtype(dtype if dtype in (np.int8, np.uint16) else F)
        self.takes = {"float32": "float32", "uint16": "bfloat16"}.get(self.operand.name)
        self.problem = problem.without_memory()
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
        self.layout = Layout()
        places = self.layout.add_all(
            q=0 if ready else n * length * d,
            q_scale=0 if ready else n * length * 4,
            scores_scale=n * length * 4,
            packed_keys=n_kv * keys * channels * size,
            starts=n_kv * keys * 4,
            key_scale=n_kv * keys * 4,
            wide=n_kv * keys // KEY_BLOCK,
            packed_values=n_kv * keys * columns * value_size,
            first_keys=first_rows * d * 2,
            first_scale=first_rows * 4,
            first_values=first_rows * columns * 4,
            value_scale=0 if ready else n_kv * dv * 4,
            offset=0 if ready else n_kv * d * 4,
            m=n * length * 4,
            l=n * length * 4,
            counter=16,
        )
        numbers = Numbers(
            *self.shape,
            packed_length=keys,
            channels=channels,
            columns=columns,
            smooth=problem.smooths,
            first_count=problem.first_keys if first_rows else 0,
            workers=1,
            stream=stream_of(problem, isa),
            **places,
        )
        self.options = semantics(self.problem, False, None)
        self.numbers = np.array((*numbers, *option_numbers(self.options)), np.int64)
        size = self.operand.itemsize
        result = (nb, nh, length, dv), F().itemsize
        self.strides = contiguous_strides(*((x, size) for x in self.shapes()), result)
        self.set_arrays()
        unit = score_unit(problem.scale, problem.softcap)
        self.factors = np.array((unit, self.options.softcap), np.float64)
        if ready:
            self.call = make_ready_call(isa, problem.pv, *rows)
        else:
            kind = "bfloat16" if self.operand == np.uint16 else "float32"
            self.call = make_float_call(isa, kind, problem.pv, *rows)

    def set_arrays(self) -> None:
        """Write what the problem's masks, lengths and slopes decide into the numbers."""
        nb, nh, _, length, _, d, dv = self.shape
        self.arrays = kernel_arrays(self.problem, slopes_of(self.problem))
        seen = max(seen_keys(self.problem).tolist(), default=0)
        self.numbers[WORKERS] = workers("int8", nb * nh * length * seen * (d + dv))
        self.numbers[OF_ARRAYS] = array_numbers(self.arrays)

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of query, key and value."""
        nb, nh, nkv, length, s, d, dv = self.shape
        return (nb, nh, length, d), (nb, nkv, s, d), (nb, nkv, s, dv)

    def operands(
        self, query: np.ndarray, key: np.ndarray, value: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(B, H, L, D), (B, Hkv, S, D) and (B, Hkv, S, Dv) float arrays as `run` takes them."""
        q, k, v = (rows_of(x, self.operand) for x in (query, key, value))
        return q, k, v

    def run_at(
        self,
        places: Sequence[int],
        with_lse: bool = True,
        strides: np.ndarray | None = None,
        narrow: bool = False,
    ) -> None:
        """As of `ForwardPlan`; it never narrows."""
        *operands, out, lse = places
        strides = self.strides if strides is None else strides
        self._run(tuple(operands), strides, out, lse if with_lse else 0)

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
        self._run(at, self.strides, out_at, 0 if lse is None else lse_at, tensors)

    def _run(
        self, operands: tuple[int, ...], strides: np.ndarray, out: int, lse: int, ready: Any = None
    ) -> None:
        with scratch.take(self.layout.nbytes) as room:
            numbers = placed(self.numbers, PLACES, self.layout, room)
            if restoring_threads(
                self.call, operands, out, room.address, numbers, strides, self.factors
            ):
                self._run_general(operands, strides, out, lse, ready)
            elif lse:
                self._write_lse(room.address, numbers, lse, ready)

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

    def _run_general(
        self, operands: Sequence[int], strides: np.ndarray, out: int, lse: int, ready: Any
    ) -> None:
        nb, nh, _, length, _, _, dv = self.shape
        *steps, of_out = map(tuple, strides.reshape(4, 3).tolist())
        if ready is None:
            given = zip(operands, self.shapes(), steps, strict=True)
            ready = (in_place(at, shape, self.operand.str, step) for at, shape, step in given)
        query, key, value = ready
        problem = self.problem.with_operands(query, key, value)
        to = in_place(out, (nb, nh, length, dv), "=f4", of_out)
        _, found = run_general(problem, self.isa, to)
        if lse:
            at_address(lse, (nb, nh, length), "=f4")[...] = found


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
