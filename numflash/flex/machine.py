"""Machine code of tile functions: compiled once, kept in memory and on disk.

The key of an entry is the program's text, the form, the sources, the versions of Numba and LLVM,
and the CPU. Contents and sizes of captured arrays are in none of them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from ..jit.announcements import logger
from ..jit.disk_cache import folder_of
from ..jit.sources import source_digest
from ..jit.target import FLOAT_ISAS, missing
from ..jit.trust import read
from ..jit.whole import write_whole
from . import emit, emit_cached
from .program import Program
from .tile_memory import Form


@dataclass(frozen=True)
class Machine:
    """Machine code in memory.

    address : of the C function
    library : Numba's, which owns the code
    """

    address: int
    library: Any


@dataclass(frozen=True)
class Tile:
    """A tile function with the frame of its arrays.

    The frame and the arrays are freed with this object. Machine code is not: LLVM's engine returns
    the memory of no module, so that each function that was compiled stays until the process ends.

    arrays : whose addresses the frame holds; a copy of a captured array has no other owner
    """

    machine: Machine
    frame: np.ndarray
    arrays: tuple[np.ndarray, ...]

    @property
    def address(self) -> int:
        return self.machine.address

    @functools.cached_property
    def data(self) -> int:
        return self.frame.__array_interface__["data"][0]


@functools.cache
def lanes_of_target() -> int:
    """float32 values of the target's widest vector."""
    lanes = {"avx512": 16, "avx2": 8}
    return next((n for isa, n in lanes.items() if not missing(isa, FLOAT_ISAS)), 4)


def tile(program: Program, double: bool = False, gradient: bool = False, cached: str = "") -> Tile:
    """The tile function of a program in a `Form`, compiled unless it is known."""
    form = Form(double, 1 if double else lanes_of_target(), gradient, cached)
    return Tile(machine_code(program, form), program.frame(), tuple(program.arrays))


_known: dict[tuple[str, Form], Machine] = {}


def machine_code(program: Program, form: Form) -> Machine:
    """From memory, from disk, or compiled now."""
    key = program.text, form
    with global_compiler_lock:
        if key not in _known:
            _known[key] = _from_disk(program, form)
        return _known[key]


def _from_disk(program: Program, form: Form) -> Machine:
    codegen = cpu_target.target_context.codegen()
    version = (
        source_digest(__file__),
        numba.__version__,
        llvmlite.__version__,
        codegen.magic_tuple(),
    )
    name = hashlib.sha256(repr((program.text, form, version)).encode()).hexdigest()
    folder = _folder()
    path = None if folder is None else folder / f"flex-{name}.nbc"
    if path:
        with contextlib.suppress(OSError):
            found = _read(path)
            if found is not None:
                library = codegen.unserialize_library(found)
                return Machine(library.get_pointer_to_function(f"tile_{name}"), library)
    library = compile_program(codegen, program, form, f"tile_{name}")
    if path:
        with contextlib.suppress(OSError):
            _write(path, pickle.dumps(library.serialize_using_object_code()))
    return Machine(library.get_pointer_to_function(f"tile_{name}"), library)


def compile_program(codegen: Any, program: Program, form: Form, name: str) -> Any:
    """Numba's library with the tile function `name`."""
    library = codegen.create_library(name)
    library.enable_object_caching()
    module = library.create_ir_module(name)
    (emit_cached if form.cached else emit).emit(module, name, program, form)
    library.add_ir_module(module)
    library.finalize()
    return library


@functools.cache
def _folder() -> Path | None:
    """Numba's cache folder for this file; None where there is none that is trusted."""
    return folder_of(Path(__file__))


def _digest(path: Path, payload: bytes) -> bytes:
    """Of the entry and of its name: another function's entry must not pass for it."""
    return hashlib.sha256(path.name.encode() + payload).digest()


def _read(path: Path) -> Any:
    """The entry, or None if it is damaged."""
    data = read(path)
    digest, payload = data[:32], data[32:]
    if _digest(path, payload) == digest:
        return pickle.loads(payload)
    logger.info("ignoring a damaged cache entry")
    return None


def _write(path: Path, payload: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _digest(path, payload) + payload)
