"""From a validated problem to the floating-point kernels.

Packing, options as arrays, and the rows that float32 cannot hold.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np

from ..interop import halves
from ..interop.arrays import address, to_float32, widen
from ..jit import target
from ..jit.memory import fresh
from ..jit.scratch import Layout, placed, scratch
from ..jit.threads import restoring_threads
from ..numerics.fixedpoint import LOG2E
from ..tiling import chosen_float, few_parts, workers
from ..validation import Problem
from .floats.call import IN_PLACE, LSE, NARROW, NUMBERS, PLACES, REDO, Numbers, make_call
from .floats.few_rows import make_few_call
from .floats.flash_rows import LOWEST, Given, make_attend_rows
from .floats.float_isas import FLOAT_ISAS
from .floats.float_packing import LARGEST, MANY_ROWS
from .isa.isas import padded
from .isa.strided import contiguous_strides, rows_of
from .plan import ForwardPlan
from .problem_arrays import (
    at_address,
    heads,
    in_place,
    kernel_arrays,
    seen_keys,
    semantics,
    slopes_of,
)
from .semantics import ARRAY_NUMBERS, Semantics, array_numbers, option_numbers

F = np.float32
# contiguous float32 arrays of the caller to be written, or None
Results = tuple[np.ndarray, np.ndarray] | None
# instruction sets with a kernel of few rows, and whose vectors it may use: bfloat16 is widened to float32
FEW_ROWS_BY = {
    "avx2": ("avx2",),
    "avx512": ("avx512", "avx2"),
    "avx512_bf16": ("avx512", "avx2"),
    "amx_bf16": ("avx512", "avx2"),
}
PANELS, VALUE_ROWS = (Numbers._fields.index(name) for name in ("panels", "value_rows"))
OF_VALUES = slice(6, 9)  # the strides of V among those of q, k, v and out
CHOICES = tuple(itertools.product((False, True), repeat=2))  # bfloat16 results; V is read in place
OF_ARRAYS = slice(PANELS, NUMBERS + ARRAY_NUMBERS)  # what masks, lengths and slopes decide


def run_rows(
    problem: Problem,
    options: Semantics,
    double: bool,
    todo: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
) -> None:
    """Rows `todo` one at a time, in plain loops."""
    q, k, v = (heads(to_float32(x)) for x in (problem.query, problem.key, problem.value))
    _, nh, nkv, _, s, _, _ = problem.shape
    threads = numba.get_num_threads()
    given = Given(q, k, v, todo, problem.scale * LOG2E, options, nh, nkv, s, threads)
    make_attend_rows(double)(given, np.zeros(1, np.int64), out, lse)


def parts_of(problem: Problem, isa: str) -> int:
    """How many parts of the keys the kernel of few rows takes; 0 where the register tiles compute it."""
    nb, nh, nkv, length, s, d, dv = problem.shape
    if few_rows_isa(problem, isa) is None:
        return 0
    nbytes = nb * nkv * s * (d + dv) * F().itemsize if operand_kind(isa) == "float32" else 0
    return few_parts(length, nb * nkv, s, nh // nkv, nbytes)


def few_rows_isa(problem: Problem, isa: str) -> str | None:
    """Whose vectors the kernel of few rows uses: the widest of which head sizes are whole ones."""
    sizes = problem.shape[5:]
    for name in FEW_ROWS_BY.get(isa, ()):
        if not any(size % FLOAT_ISAS[name].lanes for size in sizes):
            return name
    return None


class FloatPlan(ForwardPlan):
    """Instruction set, tasks, places in scratch memory, options as numbers.

    Parameters
    ----------
    problem : Problem
        Its query, key and value count by their shapes; its masks, lengths and slopes are the plan's
        own, `for_arrays` makes that of others.
    isa : str
        An instruction set with register tiles.

    Attributes
    ----------
    operand : dtype of the arrays that a call takes: float32, or uint16 (the bits of bfloat16)
    line_of_values : what the address of V is a multiple of where it is read in place; 0 if V is packed
    bytes_in_place : scratch memory of a call that reads V in place
    numbers_of : the numbers of a call, by its choice of `CHOICES`
    """

    def __init__(self, problem: Problem, isa: str) -> None:
        super().__init__()
        nb, nh, nkv, length, s, d, dv = self.shape = problem.shape
        self.problem = problem.without_memory()
        self.isa, self.kind = isa, operand_kind(isa)
        isa, changed, block_q = chosen_float(isa, self.kind)
        tiles = self.tiles = FLOAT_ISAS[isa]
        self.operand = np.dtype(np.uint16 if self.kind == "bfloat16" else F)
        n, n_kv = nb * nh, nb * nkv
        parts = self.parts = parts_of(problem, self.isa)
        self.step = 1 if parts else tiles.group
        words = padded(d, tiles.step) * self.operand.itemsize // 4
        panels, value_rows = self._packed(int(seen_keys(problem).max(initial=0)))
        columns = padded(dv, tiles.lanes)
        value_row = columns + tiles.spare // 2
        packed = 0 if parts else n_kv
        self.line_of_values = 0
        if self.kind == "float32" and columns == dv:
            few = length * nh // nkv < MANY_ROWS
            self.line_of_values = F().itemsize * (1 if few else tiles.lanes)
        self.takes = None if d % self.step else self.kind
        self.layout = Layout()
        places = self.layout.add_all(
            packed_keys=packed * panels * tiles.panel * words * 4,
            magnitudes=packed * panels * 4,
            limits=packed * 4,
            redo=n * length,
            counter=2 * 8,
            states=n * length * parts * (dv + 2) * 4,
            spoiled=n * length * parts,
            lse=n * length * 4,
        )
        self.bytes_in_place = self.layout.nbytes
        places["packed_values"] = self.layout.add(
            "packed_values", packed * value_rows * value_row * 4
        )
        numbers = Numbers(
            *self.shape,
            words=words,
            key_words=padded(d, tiles.group) * self.operand.itemsize // 4,
            columns=columns,
            value_row=value_row,
            block_q=block_q,
            parts=parts,
            **places,
            narrow=0,
            in_place=0,
            panels=panels,
            value_rows=value_rows,
            workers=1,
            stops=0,
        )
        self.options = semantics(self.problem)
        self.numbers = np.array((*numbers, *option_numbers(self.options)), np.int64)
        size = self.operand.itemsize
        self.strides = contiguous_strides(
            ((nb, nh, length, d), size),
            ((nb, nkv, s, padded(d, self.step)), size),
            ((nb, nkv, s, dv), size),
            ((nb, nh, length, dv), F().itemsize),
        )
        self.narrow_strides = self.strides.copy()
        self.narrow_strides[-3:] //= 2
        self.narrows = not parts
        self.set_arrays()
        self.factors = np.array((problem.scale * LOG2E, self.options.softcap), np.float64)
        self.call = (
            make_few_call(few_rows_isa(problem, self.isa), self.kind)
            if parts
            else make_call(isa, self.kind, *changed)
        )

    def _packed(self, seen: int) -> tuple[int, int]:
        """Panels of packed keys and rows of packed values, of each head."""
        tiles = self.tiles
        return max(1, -(-seen // tiles.panel)), max(1, padded(seen, tiles.step) // tiles.group)

    def set_arrays(self) -> None:
        """Write what the problem's masks, lengths and slopes decide into the numbers."""
        nb, nh, _, length, _, d, dv = self.shape
        self.arrays = kernel_arrays(self.problem, slopes_of(self.problem))
        self.stops = np.ascontiguousarray(seen_keys(self.problem), np.int64)
        seen = max(self.stops.tolist(), default=0)
        self.packed = self._packed(seen)
        kind = "few rows" if self.parts else self.kind
        self.numbers[OF_ARRAYS] = (
            *self.packed,
            workers(kind, nb * nh * length * seen * (d + dv)),
            address(self.stops),
            *array_numbers(self.arrays),
        )
        self.numbers_of = {}
        for choice in CHOICES:
            self.numbers_of[choice] = self.numbers.copy()
            self.numbers_of[choice][[NARROW, IN_PLACE]] = choice

    def for_options(self, fields: dict[str, Any]) -> FloatPlan | None:
        """As of `KernelPlan`: more memory is needed where more keys are seen."""
        plan = self.with_options(fields)
        fits = self.parts or plan.packed <= self.packed  # both sizes grow with the keys
        return plan if fits else None

    def operands(
        self, query: np.ndarray, key: np.ndarray, value: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(B, H, L, D), (B, Hkv, S, D) and (B, Hkv, S, Dv) arrays of the problem's storage as `run`
        takes them.
        """
        q, k, v = (rows_of(x, self.operand) for x in (query, key, value))
        if key.shape[3] % self.step:
            k = np.pad(k, (*((0, 0),) * (k.ndim - 1), (0, -key.shape[3] % self.step)))
        return q, k, v

    def reads_in_place(self, value: int, strides: np.ndarray | None = None) -> bool:
        """Whether V at this address is read there and not packed: one block, whose rows are whole vectors and,
        where many queries read them, begin at cache lines.
        """
        if not self.line_of_values or value % self.line_of_values:
            return False
        return strides is None or bool((strides[OF_VALUES] == self.strides[OF_VALUES]).all())

    def run_at(
        self,
        places: Sequence[int],
        with_lse: bool = True,
        strides: np.ndarray | None = None,
        narrow: bool = False,
    ) -> None:
        """As of `ForwardPlan`."""
        *arrays, lse = places
        choice = narrow, self.reads_in_place(arrays[2], strides)
        nbytes = self.bytes_in_place if choice[1] else self.layout.nbytes
        if strides is None:
            strides = self.narrow_strides if narrow else self.strides
        with scratch.take(nbytes) as room:
            at = room.address
            numbers = placed(self.numbers_of[choice], PLACES, self.layout, room)
            lse = lse if with_lse else at + int(numbers[LSE])
            if restoring_threads(self.call, *arrays, lse, at, numbers, strides, self.factors):
                self.rescue(arrays, strides, lse, at + int(numbers[REDO]), narrow)

    def rescue(
        self, places: list[int], strides: np.ndarray, lse: int, redo: int, narrow: bool
    ) -> None:
        """Do the rows that float32 cannot hold again in float64.

        `redo` is the address of their flags.
        """
        nb, nh, nkv, length, s, d, dv = self.shape
        shapes = (nb, nh, length, d), (nb, nkv, s, d), (nb, nkv, s, dv), (nb, nh, length, dv)
        kinds = *(self.operand.str,) * 3, "=u2" if narrow else "=f4"
        steps = map(tuple, strides.reshape(-1, 3).tolist())
        given = zip(places, shapes, kinds, steps, strict=True)
        *operands, out = (in_place(at, shape, kind, step) for at, shape, kind, step in given)
        problem = self.problem.with_operands(*operands)
        todo = np.flatnonzero(at_address(redo, (nb * nh * length,), "|u1"))
        rows = widen(out) if narrow else np.ascontiguousarray(out)
        to = heads(rows), at_address(lse, (nb * nh, length), "=f4")
        run_rows(problem, semantics(problem, double=True), True, todo, *to)
        out[...] = halves.narrow(rows, "bfloat16") if narrow else rows


def isa_of(problem: Problem, isa: str | None = None) -> str:
    """The instruction set for a problem: `isa`, or the best of the target."""
    bfloat16 = problem.precision == "bfloat16"
    return target.require(isa, target.BFLOAT16_ISAS if bfloat16 else target.FLOAT_ISAS)


def operand_kind(isa: str) -> str:
    """What the products of an instruction set multiply: "bfloat16" or "float32"."""
    return "bfloat16" if isa in ("amx_bf16", "avx512_bf16") else "float32"


def may_overflow(problem: Problem) -> np.ndarray:
    """(B * H, L) bool.

    Rows in whose scores a partial sum may leave float32, which could cancel into a finite number or
    -inf.
    """
    _, nh, nkv, _, _, d, _ = problem.shape

    def largest(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        size = np.abs(to_float32(x))
        return size.max(axes, where=np.isfinite(size), initial=0).astype(np.float64)

    of_keys = np.repeat(largest(problem.key, (2, 3)), nh // nkv, 1)[:, :, None]
    product = largest(problem.query, (3,)) * of_keys * d * max(1.0, abs(problem.scale * LOG2E))
    return (product > LARGEST).reshape(-1, problem.shape[3])


def run(
    problem: Problem, isa: str | None = None, results: Results = None
) -> tuple[np.ndarray, np.ndarray]:
    """out (B, H, L, Dv) and lse (B, H, L), both float32, sinks not applied.

    `results` if these are given.
    """
    isa = isa_of(problem, isa)
    nb, nh, _, length, _, _, dv = problem.shape
    out, lse = results or (fresh((nb, nh, length, dv), F), fresh((nb, nh, length), F))
    if isa != "portable":
        plan = FloatPlan(problem, isa)
        plan.run(*plan.operands(problem.query, problem.key, problem.value), out, lse)
        return out, lse
    n = nb * nh
    options = semantics(problem)
    rows = out.reshape(n, length, dv), lse.reshape(n, length)
    run_rows(problem, options, False, np.arange(n * length), *rows)
    redo = ~(np.isfinite(rows[0]).all(-1) & (rows[1] > LOWEST)) | may_overflow(problem)
    if redo.any():
        run_rows(problem, semantics(problem, double=True), True, np.flatnonzero(redo), *rows)
    return out, lse
