"""Run AArch64 machine code from `numflash.machinecode.codegen` in this process, at any SVE vector
length, through Unicorn.

Results are those of the architecture (base SVE, NEON) and instruction counts are exact; time,
caches and the limits of a CPU model (which instructions it has) are not modelled: the emulated CPU
supports all of base SVE and of NEON.
"""

from __future__ import annotations

import functools
import io
import re
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba.core import sigutils, types
from numba.core.types import containers

from ..errors import ArgumentError, UnsupportedError
from .codegen import Target, compile_for

try:
    from elftools.elf.elffile import ELFFile
    from unicorn import UC_ARCH_ARM64, UC_HOOK_BLOCK, UC_HOOK_CODE, UC_MODE_ARM, Uc
    from unicorn import arm64_const as arm
except ModuleNotFoundError as missing:
    raise UnsupportedError(
        f"the AArch64 emulator needs {missing.name}; pip install 'numflash[aarch64]'"
    ) from None

# where each region of memory starts
EXTERNALS = 0x500000
CODE = 0x1000000
STACK = 0x7000000
HEAP = 0x10000000
PAGE = 4096
CODE_SIZE = 1 << 22
STACK_SIZE = 1 << 20
HEAP_SIZE = 1 << 26
GUARD = b"\xa5" * 256  # after every array
SHF_ALLOC = 2
R_ABS64 = 257

KNOWN = {"neoverse-v2": "-sve2"}  # Unicorn executes base SVE, not SVE2

# (op0, op1, CRn, CRm, op2) of system registers
CPTR_EL3 = (3, 6, 1, 1, 2)
CPACR_EL1 = (3, 0, 1, 0, 2)
ZCR = ((3, 6, 1, 2, 0), (3, 4, 1, 2, 0), (3, 0, 1, 2, 0))  # EL3, EL2, EL1

# ELF relocation -> (shift right, bits, position in the instruction) of the absolute address it puts
# there
ABSOLUTE = {
    263: (0, 16, 5),
    264: (0, 16, 5),
    265: (16, 16, 5),
    266: (16, 16, 5),
    267: (32, 16, 5),
    268: (32, 16, 5),
    269: (48, 16, 5),
}  # MOVW_UABS_G*
LOW12 = {277: 0, 278: 0, 284: 1, 285: 2, 286: 3, 299: 4}  # ADD, LDST8 .. LDST128: log2 of the size


machine_code = functools.cache(compile_for)  # one code for every vector length


def _flat(arguments: Any, kinds: Any) -> Iterator[tuple[Any, Any]]:
    """Arguments and their types as a call passes them: tuples member by member."""
    for argument, kind in zip(arguments, kinds, strict=True):
        if isinstance(kind, containers.BaseTuple):
            yield from _flat(argument, list(kind))
        else:
            yield argument, kind


VECTOR_BITS = (128, 256, 512, 1024, 2048)


class Emulated:
    """A compiled function that can be called like the original, with contiguous arrays and scalars.

    An array in the place of an integer is one whose address the function gets.

    Parameters
    ----------
    function, signature : as `numflash.machinecode.codegen.compile_for`; the function must not need
        Python
    cpu, features : the CPU the code is made for
    vector_bits : length of the emulated SVE registers, one of `VECTOR_BITS`

    Attributes
    ----------
    instructions : int
        Executed by the last call with ``count=True``.
    externals : list of str
        Symbols the code refers to and does not define; only memset, memcpy, memmove and
        Numba's array allocator may be called.
    """

    def __init__(
        self,
        function: Any,
        signature: Any,
        cpu: str = "a64fx",
        features: str = "",
        vector_bits: int = 512,
    ) -> None:
        if vector_bits not in VECTOR_BITS:
            raise ArgumentError(
                f"vector_bits: got {vector_bits!r}; allowed: {', '.join(map(str, VECTOR_BITS))}"
            )
        self.argument_types, self.return_type = sigutils.normalize_signature(signature)
        self.code = machine_code(
            function, signature, Target.named(cpu, features or KNOWN.get(cpu, ""))
        )
        self.instructions = 0
        self._uc: Any = Uc(UC_ARCH_ARM64, UC_MODE_ARM)
        self._free = HEAP  # where the next allocation goes
        self._uc.ctl_set_cpu_model(arm.UC_CPU_ARM64_MAX)
        for register, value in (
            (CPTR_EL3, 0x100),
            (CPACR_EL1, 0x330000),
            *((zcr, vector_bits // 128 - 1) for zcr in ZCR),
        ):
            op0, op1, crn, crm, op2 = register
            self._uc.reg_write(arm.UC_ARM64_REG_CP_REG, (crn, crm, op0, op1, op2, value))
        for start, size in (
            (EXTERNALS, 2 * PAGE),
            (CODE, CODE_SIZE),
            (STACK, STACK_SIZE),
            (HEAP, HEAP_SIZE),
        ):
            self._uc.mem_map(start, size)
        self._stubs: dict[str, int] = {}
        self._offsets: dict[int, int] = {}  # address -> its slot of the offset table
        self._load(ELFFile(io.BytesIO(self.code.object)))
        self._uc.hook_add(UC_HOOK_CODE, self._external, begin=EXTERNALS + 16, end=EXTERNALS + PAGE)

    @property
    def externals(self) -> list[str]:
        """Names of the functions that the code calls and does not define."""
        return list(self._stubs)

    def _load(self, elf: Any) -> None:
        address = {}
        free = CODE
        for index, section in enumerate(elf.iter_sections()):
            if section["sh_flags"] & SHF_ALLOC:
                align = max(section["sh_addralign"], 16)
                address[index] = free = (free + align - 1) // align * align
                if section["sh_type"] != "SHT_NOBITS" and section["sh_size"]:
                    self._uc.mem_write(free, section.data())
                free += section["sh_size"]
        symbols = elf.get_section_by_name(".symtab")
        common = {}
        for symbol in symbols.iter_symbols():
            if symbol["st_shndx"] == "SHN_COMMON":
                free = common[symbol.name] = (free + 63) // 64 * 64
                free += symbol["st_size"]

        def place(symbol: Any) -> int:
            if isinstance(symbol["st_shndx"], int):
                return address[symbol["st_shndx"]] + symbol["st_value"]
            if symbol.name in common:
                return common[symbol.name]
            return self._stubs.setdefault(symbol.name, EXTERNALS + 16 * (len(self._stubs) + 1))

        for section in elf.iter_sections():
            if (
                section["sh_type"] == "SHT_RELA"
                and section["sh_info"] in address
                and section.name != ".rela.eh_frame"
            ):
                for relocation in section.iter_relocations():
                    value = (
                        place(symbols.get_symbol(relocation["r_info_sym"])) + relocation["r_addend"]
                    )
                    self._relocate(
                        relocation["r_info_type"],
                        address[section["sh_info"]] + relocation["r_offset"],
                        value,
                    )
        functions = [
            s
            for s in symbols.iter_symbols()
            if s["st_info"]["type"] == "STT_FUNC" and isinstance(s["st_shndx"], int)
        ]
        self.symbols = {
            s.name: (place(s), s["st_size"]) for s in functions
        }  # name -> (address, bytes)
        self._entry = self.symbols[self.code.entry][0]

    def _relocate(self, kind: int, where: int, value: int) -> None:
        if kind == R_ABS64:
            self._uc.mem_write(where, struct.pack("<Q", value))
            return
        if kind in (311, 312):  # ADR_GOT_PAGE, LD64_GOT_LO12_NC
            slot = self._offsets.setdefault(value, EXTERNALS + PAGE + 8 * len(self._offsets))
            self._uc.mem_write(slot, struct.pack("<Q", value))
            kind = {311: 275, 312: 286}[kind]
            value = slot
        (instruction,) = struct.unpack("<I", self._uc.mem_read(where, 4))
        if kind in ABSOLUTE:
            shift, bits, position = ABSOLUTE[kind]
            instruction |= ((value >> shift) & ((1 << bits) - 1)) << position
        elif kind in LOW12:
            instruction |= ((value & 0xFFF) >> LOW12[kind]) << 10
        elif kind in (282, 283):  # JUMP26, CALL26
            instruction |= ((value - where) >> 2) & 0x3FFFFFF
        elif kind == 275:  # ADR_PREL_PG_HI21
            pages = (value >> 12) - (where >> 12)
            instruction |= (pages & 3) << 29 | ((pages >> 2) & 0x7FFFF) << 5
        else:
            raise NotImplementedError(f"ELF relocation {kind}")
        self._uc.mem_write(where, struct.pack("<I", instruction))

    def _external(self, uc: Uc, where: int, size: int, user: Any) -> None:
        name = next((n for n, a in self._stubs.items() if a == where), None)
        to, a, n = (uc.reg_read(getattr(arm, f"UC_ARM64_REG_X{i}")) for i in range(3))
        if name == "memset":
            uc.mem_write(to, bytes([a & 255]) * n)
        elif name in ("memcpy", "memmove"):
            uc.mem_write(to, bytes(uc.mem_read(a, n)))
        elif name is not None and re.match("NRT_MemInfo_alloc.*_aligned$", name):  # (size, align)
            info, self._free = (
                self._free,
                (self._free + to + 2 * a + 127) // 64 * 64,
            )  # atomics need 8 bytes
            data = (info + 64 + a - 1) // a * a
            uc.mem_write(info, struct.pack("<6Q", 1, 0, 0, data, to, 0))
            uc.reg_write(arm.UC_ARM64_REG_X0, info)
        elif name == "exp2f":  # of whole numbers only: exact in every libm
            (x,) = struct.unpack("<f", struct.pack("<Q", uc.reg_read(arm.UC_ARM64_REG_D0))[:4])
            uc.reg_write(arm.UC_ARM64_REG_D0, int(np.exp2(np.float32(x)).view(np.uint32)))
        elif name == "NRT_MemInfo_call_dtor":
            pass
        elif name == "get_num_threads":
            uc.reg_write(arm.UC_ARM64_REG_X0, 1)
        elif name == "numba_attempt_nocopy_reshape":  # (nd, dims, strides twice, size, order)
            uc.reg_write(
                arm.UC_ARM64_REG_X0,
                self._reshape(*(uc.reg_read(getattr(arm, f"UC_ARM64_REG_X{i}")) for i in range(7))),
            )
        else:
            self._failure = f"the code called {name}"
            uc.emu_stop()
            return
        uc.reg_write(arm.UC_ARM64_REG_PC, uc.reg_read(arm.UC_ARM64_REG_LR))

    def _reshape(
        self,
        nd: int,
        dims: int,
        strides: int,
        new_nd: int,
        new_dims: int,
        new_strides: int,
        size: int,
    ) -> int:
        """Numba's helper for contiguous arrays: 1 and the new strides, or 0 for others."""

        def words(where: int, n: int) -> tuple[int, ...]:
            return struct.unpack(f"<{n}q", self._uc.mem_read(where, 8 * n))

        def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(
                size * int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape))
            )

        old, new = words(dims, nd), contiguous(words(new_dims, new_nd))
        steps = zip(old, words(strides, nd), contiguous(old), strict=True)
        if 0 not in old and any(n > 1 and step != whole for n, step, whole in steps):
            return 0
        self._uc.mem_write(new_strides, struct.pack(f"<{new_nd}q", *new))
        return 1

    def __call__(self, *arguments: Any, count: bool = False) -> Any:
        """Call; arrays are written back, the return value is returned.

        Raises
        ------
        RuntimeError
            If the code raised, called something outside, or wrote past the end of an array.
        """
        # result pointer, exception pointer
        uc = self._uc
        integers = [HEAP, HEAP + 64]
        floats = []
        back = []
        free = HEAP + PAGE
        for argument, kind in _flat(arguments, self.argument_types):
            if isinstance(argument, np.ndarray):
                addressed = not isinstance(kind, types.Array)
                fits = addressed or argument.dtype == np.dtype(str(kind.dtype))
                if not fits or not argument.flags.c_contiguous:
                    raise TypeError(
                        f"got {argument.dtype}, strides {argument.strides}; allowed: {kind}"
                    )
                if free + argument.nbytes + 2 * len(GUARD) > HEAP + HEAP_SIZE:
                    raise ValueError(
                        f"arrays: {argument.nbytes} bytes more; allowed: {HEAP_SIZE} in all"
                    )
                uc.mem_write(free, argument.tobytes())
                back.append((argument, free))
                whole = (
                    0,
                    0,
                    argument.size,
                    argument.itemsize,
                    free,
                    *argument.shape,
                    *argument.strides,
                )
                integers += [free] if addressed else whole
                uc.mem_write(free + argument.nbytes, GUARD)
                free += (argument.nbytes + 2 * len(GUARD) - 1) // len(GUARD) * len(GUARD)
            elif isinstance(kind, types.Float):
                floats.append(
                    struct.unpack(
                        "<Q" if kind.bitwidth == 64 else "<I",
                        struct.pack("<d" if kind.bitwidth == 64 else "<f", argument),
                    )[0]
                )
            else:
                integers.append(int(argument) & (1 << 64) - 1)
        for i, word in enumerate(integers[:8]):
            uc.reg_write(getattr(arm, f"UC_ARM64_REG_X{i}"), word)
        for i, word in enumerate(floats):
            uc.reg_write(getattr(arm, f"UC_ARM64_REG_D{i}"), word)
        top = STACK + STACK_SIZE - 8 * (len(integers) + 2) // 16 * 16 - PAGE
        uc.mem_write(top, b"".join(struct.pack("<Q", word) for word in integers[8:]) + bytes(8))
        uc.reg_write(arm.UC_ARM64_REG_SP, top)
        uc.reg_write(arm.UC_ARM64_REG_LR, EXTERNALS)
        self._free = (free + 63) // 64 * 64
        self._run(count)
        if uc.reg_read(arm.UC_ARM64_REG_W0):
            raise RuntimeError(f"{self.code.entry} raised an exception")
        for argument, where in back:
            if uc.mem_read(where + argument.nbytes, len(GUARD)) != GUARD:
                raise RuntimeError(
                    f"{self.code.entry} wrote past the end of an array of shape {argument.shape}"
                )
            argument[...] = np.frombuffer(
                bytes(uc.mem_read(where, argument.nbytes)), argument.dtype
            ).reshape(argument.shape)
        if self.return_type in (None, types.void, types.none):
            return None
        dtype = np.dtype(str(self.return_type))
        return np.frombuffer(bytes(uc.mem_read(HEAP, dtype.itemsize)), dtype)[0]

    def trace(self, *arguments: Any) -> list[str]:
        """Call, and return the executed instructions as text, in order (without the padding between
        aligned labels).
        """
        where: dict[int, str] = {}
        at = None
        for raw in self.code.assembly.splitlines():
            line = raw.split("//")[0].strip()
            name = line.rstrip(":").strip('"')
            aligned = re.match(r"\.p2align\s+(\d+)(?:,\s*,\s*(\d+))?", line)
            if line.endswith(":") and name in self.symbols:
                at = self.symbols[name][0]
            elif line.startswith(".Lfunc_end"):
                at = None
            elif at is not None and aligned:
                padding = -at % (1 << int(aligned[1]))
                at += padding if padding <= int(aligned[2] or padding) else 0
            elif at is not None and line and not line.startswith(".") and not line.endswith(":"):
                where[at] = line
                at += 4
        executed: list[int] = []
        hook = self._uc.hook_add(
            UC_HOOK_CODE,
            lambda uc, at, size, user: executed.append(at),
            begin=CODE,
            end=CODE + CODE_SIZE,
        )
        self._uc.ctl_flush_tb()  # blocks translated without the hook
        try:
            self(*arguments)
        finally:
            self._uc.hook_del(hook)
            self._uc.ctl_flush_tb()
        return [where[at] for at in executed if at in where]

    def _run(self, count: bool) -> None:
        uc = self._uc
        hook = None
        self.instructions, self._failure = 0, ""
        if count:

            def block(uc: Uc, where: int, size: int, user: Any) -> None:
                self.instructions += size // 4

            uc.ctl_flush_tb()  # blocks translated without the hook
            hook = uc.hook_add(UC_HOOK_BLOCK, block, begin=CODE, end=CODE + CODE_SIZE)
        try:
            uc.emu_start(self._entry, EXTERNALS)
        finally:
            if hook is not None:
                uc.hook_del(hook)
                uc.ctl_flush_tb()
        if self._failure:
            raise RuntimeError(f"{self.code.entry}: {self._failure}")
