"""Registers, symbols and memory of a batch of blocks, and how operands of instructions name them."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from .binders import DTYPES
from .errors import EmulatorError, Fault
from .memory import RESERVED, Global, Shared
from .parse import Program

SHARED_WINDOW = 0x7F00_0000_0000_0000
LOCAL_WINDOW = 0x7E00_0000_0000_0000


class Launch(NamedTuple):
    """What a kernel is launched with; `parameters` by name, tensor `maps` by address."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_shared: int  # bytes
    memory: Global
    parameters: dict[str, Any]
    maps: dict[int, Any]
    cluster: int  # blocks along x that run together


class Registers:
    """The state of `blocks` blocks of one kernel: a register is an array of one element a thread."""

    def __init__(self, program: Program, blocks: int, launch: Launch) -> None:
        self.program = program
        self.grid = launch.grid
        self.block = launch.block
        self.memory = launch.memory
        self.parameters = launch.parameters
        self.maps = launch.maps
        self.cluster = launch.cluster
        self.dynamic_shared = launch.dynamic_shared
        self.threads_per_block = int(np.prod(self.block))
        if self.threads_per_block % 32:
            raise EmulatorError(
                "unsupported",
                f"{self.threads_per_block} threads per block; allowed: multiples of 32",
                0,
                "",
                None,
            )
        self.blocks, self.n = blocks, blocks * self.threads_per_block
        self.warps_per_block = self.threads_per_block // 32
        self.thread = np.arange(self.n)
        self.warp, self.block_of = self.thread >> 5, self.thread // self.threads_per_block
        self.symbols, size = self._place_symbols(self.dynamic_shared)
        self.shared = Shared(blocks, size, self._granule(), self.warps_per_block, self.cluster)
        self.local = np.zeros((self.n, max(1, sum(n for n, _ in program.local.values()))), np.uint8)
        self.window = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}
        self.bases: dict[str, np.ndarray] = {}
        self.special = self._special_registers()

    def _place_symbols(self, dynamic: int) -> tuple[dict[str, int], int]:
        at = RESERVED
        symbols = {}
        for name, (size, align) in self.program.shared.items():
            if size:
                at = (at + align - 1) // align * align
                symbols[name] = at
                at += size
        for name, (size, align) in self.program.shared.items():
            if not size:
                at = (at + max(align, 16) - 1) // max(align, 16) * max(align, 16)
                symbols[name] = at
        offset = LOCAL_WINDOW
        for name, (size, _) in self.program.local.items():
            symbols[name] = offset
            offset += size
        return symbols, at - RESERVED + dynamic

    def _granule(self) -> int:
        """Bytes of a granule: the smallest shared access of the kernel, at most 16.

        The shadow keeps one state for each granule.
        """
        sizes = [16]
        for i in self.program.code:
            if (
                i.op in ("ld", "st", "atom")
                and "param" not in i.modifiers
                and "global" not in i.modifiers
            ):
                sizes.append(
                    DTYPES[i.type]().itemsize
                    * next((int(m[1]) for m in i.modifiers if m in ("v2", "v4")), 1)
                )
        return min(16, *sizes)

    def _special_registers(self) -> dict[str, np.ndarray]:
        x, y, _ = self.block
        t = self.thread % self.threads_per_block
        fixed = {
            "%tid.x": t % x,
            "%tid.y": t // x % y,
            "%tid.z": t // (x * y),
            "%laneid": t & 31,
            "%warpid": t >> 5,
            "%dynamic_smem_size": np.full(self.n, self.dynamic_shared),
            "%clock": np.zeros(self.n),
            "%cluster_ctarank": self.block_of % self.cluster,
            "%cluster_nctarank": np.full(self.n, self.cluster),
        }
        for k, axis in enumerate("xyz"):
            fixed["%ntid." + axis] = np.full(self.n, self.block[k])
            fixed["%nctaid." + axis] = np.full(self.n, self.grid[k])
            fixed["%ctaid." + axis] = np.zeros(self.n)
            first = axis == "x"  # clusters are rows of blocks
            fixed["%cluster_ctaid." + axis] = self.block_of % self.cluster * first
            fixed["%cluster_nctaid." + axis] = np.full(self.n, self.cluster if first else 1)
        return {name: v.astype(np.uint32) for name, v in fixed.items()}

    def base(self, name: str) -> np.ndarray:
        """The storage of a register: one element per thread."""
        if name not in self.bases:
            if name not in self.program.registers:
                raise Fault("unsupported", f"unknown register {name!r}")
            self.bases[name] = np.zeros(self.n, DTYPES[self.program.registers[name]])
        return self.bases[name]

    def value(self, operand: str, t: str) -> Any:
        """A live view of a register as type t, an array for a special register, or a scalar for a
        constant.
        """
        kind = np.dtype(DTYPES[t])
        if operand in self.special:
            return (
                self.special[operand].view(kind)
                if kind.itemsize == 4
                else self.special[operand].astype(kind)
            )
        if operand in self.program.registers:
            base = self.base(operand)
            if base.dtype == kind:
                return base
            if base.dtype.itemsize < kind.itemsize:
                raise Fault("unsupported", f"register {operand} is narrower than {t}")
            # the low part (little-endian)
            return base.view(kind)[:: base.dtype.itemsize // kind.itemsize]
        if operand in self.symbols:
            return kind.type(self.symbols[operand])
        if operand.startswith(("0f", "0d")):
            raw = bytes.fromhex(operand[2:])
            return np.array(
                struct.unpack(">f" if len(raw) == 4 else ">d", raw)[0], f"f{len(raw)}"
            ).view(kind if kind.itemsize == len(raw) else f"f{len(raw)}")[()]
        number = int(operand.rstrip("U"), 0)
        if kind.kind in "fb":
            return kind.type(number)
        return np.array(number & ((1 << 8 * kind.itemsize) - 1), f"u{kind.itemsize}").view(kind)[()]

    def target(self, operand: str, t: str) -> np.ndarray:
        """The register to write as type t; it must be as wide as t."""
        view = self.value(operand, t)
        if self.base(operand).dtype.itemsize != view.dtype.itemsize:
            raise Fault("unsupported", f"register {operand} is wider than {t}")
        return view

    def wide_target(self, operand: str, t: str) -> tuple[np.ndarray, np.dtype]:
        """A register that may be wider than t (loads and conversions extend by t's sign), and the
        dtype to extend to.
        """
        base = self.base(operand)
        kind = np.dtype(DTYPES[t])
        if base.dtype.itemsize == kind.itemsize:
            return base.view(kind), kind
        wide = np.dtype(f"{kind.kind}{base.dtype.itemsize}")
        return base.view(wide), wide

    def address(self, operand: str, t: str) -> tuple[Any, int]:
        """`[%rd1+16]` as (base value, offset)."""
        inner = operand.strip("[]")
        name, _, offset = inner.partition("+")
        return self.value(name.strip(), t), int(offset, 0) if offset else 0
