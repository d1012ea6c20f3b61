"""Score and mask functions as device code: the instructions of `emit` for one score at a time.

The frame differs from the CPU's: arrays are C-contiguous, their addresses are the kernel's own
arguments, and float constants are float32 bits.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from ..cuda.kernels import score_functions
from ..jit.sources import source_digest
from .emit import TileWriter
from .graph import Node, reachable
from .lanes import F32, I32, I64, LOG2E, Lanes
from .program import Program, readable
from .tile_memory import PER_VALUE, Form, element_of, size_of

POINT = Form(double=False, lanes=1)
# one operand, one result: no LLVM intrinsic of libNVVM, but one instruction
INSTRUCTIONS = {
    "fabs": "abs.f32",
    "sqrt": "sqrt.rn.f32",
    "floor": "cvt.rmi.f32.f32",
    "ceil": "cvt.rpi.f32.f32",
    "trunc": "cvt.rzi.f32.f32",
    "rint": "cvt.rni.f32.f32",
    "ex2": "ex2.approx.ftz.f32",
    "lg2": "lg2.approx.f32",
}


class OnDevice(NamedTuple):
    """The functions as a launch takes them.

    name : of their code, see `score_functions.known`
    frame, batches : int64 and int32 arrays
    arrays : the captured ones, contiguous
    """

    name: str
    frame: np.ndarray
    batches: np.ndarray
    arrays: tuple[np.ndarray, ...]


class DeviceProgram(Program):
    """A program over contiguous arrays."""

    def _array(self, x: np.ndarray) -> np.ndarray:
        x = readable(x)
        if x.dtype == np.float64:  # the functions' floats are float32
            with np.errstate(all="ignore"):
                x = x.astype(np.float32)
        return x if x.flags.c_contiguous else x.copy()

    def frame(self) -> np.ndarray:
        """Sizes of the arrays and constants as they are now; addresses are 0."""
        frame = super().frame()
        for table in self.tables.values():
            frame[table.at] = 0
        for number, at in self.parameters.items():
            value = self.graph.nodes[number].data
            if isinstance(value, float):
                with np.errstate(all="ignore"):
                    frame[at] = int(np.float32(value).view(np.uint32))
        return frame


class Code:
    """Writes the functions of a program (`score_functions.Code`)."""

    def __init__(self, program: DeviceProgram) -> None:
        self.program = program
        score, _, mask = program.roots_by_name
        self.changes, self.masks = score is not None, mask is not None
        self.roots = {"score": score, "mask": mask}
        self.arrays = len(program.tables)

    def write(self, builder: Any, root: str, values: Any, pointers: Any) -> Any:
        """The LLVM value of a root."""
        found = self.roots[root]
        assert found is not None
        return _Point(self.program, builder, values, pointers).value_of(found)


def on_device(program: DeviceProgram, batches: np.ndarray) -> OnDevice:
    """The functions for a launch; their code is known from now on."""
    content = repr((program.text, source_digest(__file__)))
    name = hashlib.sha256(content.encode()).hexdigest()[:32]
    score_functions.keep(name, Code(program))
    # as bytes: a dtype may be one that only an extension of NumPy knows
    arrays = tuple(_bytes(program.arrays[number]) for number in program.tables)
    return OnDevice(name, program.frame(), batches.astype(np.int32), arrays)


def _bytes(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1).view(np.uint8)


class _Builder:
    """An IR builder without `fneg`, which libNVVM's LLVM does not know."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self._builder = builder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    def fneg(self, x: Any) -> Any:
        return self._builder.fsub(ir.Constant(x.type, -0.0), x)


class _OnDevice(Lanes):
    """One float32 at a time; functions by the card's approximate instructions."""

    def _instruction(self, name: str, x: Any) -> Any:
        kind = ir.FunctionType(F32, [F32])
        return self.b.asm(kind, f"{INSTRUCTIONS[name]} $0, $1;", "=f,f", [x], False)

    def intrinsic(self, name: str, *args: Any) -> Any:
        if name == "copysign":
            sign, size = I32(-(1 << 31)), I32((1 << 31) - 1)
            size = self.b.and_(self.bits(args[0]), size)
            return self.floats(self.b.or_(size, self.b.and_(self.bits(args[1]), sign)))
        return self._instruction(name, args[0])

    def exp2(self, x: Any) -> Any:
        return self._instruction("ex2", x)

    def exp(self, x: Any) -> Any:
        return self._instruction("ex2", self.times(x, LOG2E))

    def log2(self, x: Any) -> Any:
        return self._instruction("lg2", x)

    def log(self, x: Any) -> Any:
        return self.times(self.log2(x), math.log(2))

    def tanh(self, x: Any) -> Any:
        """1 - 2 / (1 + e**(2 x))."""
        e = self._instruction("ex2", self.times(x, 2 * LOG2E))
        one, two = self.number(1.0), self.number(2.0)
        return self.b.fsub(one, self.b.fdiv(two, self.b.fadd(one, e)))


class _Point(TileWriter):
    """The values of a program's nodes at one score."""

    def __init__(self, program: Program, builder: Any, values: Any, pointers: Any) -> None:
        self.program, self.form = program, POINT
        self.b = _Builder(builder)
        self.raw = values[0]
        b, h, q, k = (builder.sext(x, I64) for x in values[1:])
        self.args = {"b": b, "h": h, "q": q, "k": k, "scale": ir.Constant(F32, 1.0)}
        self.frame, self.pointers = pointers[score_functions.FRAME], pointers
        self.real, self.whole = F32, I64 if program.wide else I32
        self.one = self.many = _OnDevice(self.b, self.real, self.whole, 1)
        self.lane_index, self.row_index = "k", "q"
        self.row, self.column = self._index(self.args["q"]), I64(0)
        self.values, self.mask = {}, None
        places = range(score_functions.ARRAYS, len(pointers))
        self.places = dict(zip(program.tables, places, strict=True))

    def level(self, x: Node) -> int:
        return PER_VALUE

    def value_of(self, root: Node) -> Any:
        """The value of a root, computed here."""
        for x in reachable([root]):
            self.values[x.number] = self._value(x)
        return self.values[root.number]

    def _at(self, address: Any, element: ir.Type) -> Any:
        """Memory that nothing writes while the kernel runs."""
        place = self.b.inttoptr(address, ir.PointerType(element, addrspace=1))
        found = self.b.load(place, align=size_of(element))
        found.set_metadata("invariant.load", self.b.module.add_metadata([]))
        return found

    def _word(self, at: int, element: ir.Type) -> Any:
        """The first bytes of an entry of the frame."""
        return self._at(self.b.add(self.frame, I64(8 * at)), element)

    def _constant(self, x: Node) -> Any:
        at = self.program.parameters.get(x.number)
        if at is None:
            return super()._constant(x)
        return self._word(at, F32 if x.kind == "f" else self.whole)

    def _load(self, x: Node, scalar: bool) -> Any:
        b = self.b
        table = self.program.tables[x.data]
        offset = None
        for axis, y in enumerate(x.args):
            size = self._word(table.at + 1 + 2 * axis, I64)
            index = self._inside(self.one, self.values[y.number], x, axis, size)
            index = self._offset_type(index, table)
            if offset is None:
                offset = index
            else:
                offset = b.add(b.mul(offset, self._offset_type(size, table)), index)
        element = element_of(table.dtype)
        address = self.pointers[self.places[x.data]]
        if offset is not None:
            address = b.add(address, b.mul(self._signed64(offset), I64(size_of(element))))
        return self._converted(self.one, table.dtype, self._at(address, element))

    def _offset_type(self, index: Any, table: Any) -> Any:
        wanted = I32 if table.small else I64
        if index.type == wanted:
            return index
        return self.b.trunc(index, wanted) if wanted == I32 else self.b.sext(index, wanted)
