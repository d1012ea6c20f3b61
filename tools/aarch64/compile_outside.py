"""LLVM outside the emulator: an emulated Python hands its modules to a native process.

LLVM is most of what compiling costs, and 15 times slower under emulation. Where OUTSIDE_PYTHON
names a native Python with numflash and the same llvmlite, importing this module in the emulated one
(`pytest -p compile_outside`) replaces the places where Numba has LLVM work on a module: a native
process does it, with the same release, passes, options and target machine. Numba's own part,
loading and running stay in the emulator. `tests/aarch64/test_guest.py` compares the code of both.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import Any, BinaryIO

import llvmlite
import llvmlite.binding as llvm
from numba.core import cgutils, codegen, config

# Numba's own, which `install` replaces
_optimise = codegen.CPUCodeLibrary._optimize_final_module


def work(generator: Any, kind: str, code: bytes) -> bytes:
    """What LLVM makes of a module for a code generator.

    Of text, bitcode after the passes over its functions ("parse"); of a linked module's bitcode,
    bitcode after Numba's passes ("optimise"), or an object ("object").
    """
    library = generator.create_library("outside")
    if kind == "parse":
        module = llvm.parse_assembly(code.decode())
        module.verify()
        library.add_llvm_module(module)
    else:
        library._final_module = llvm.parse_bitcode(code)
    if kind == "optimise":
        _optimise(library)
    module = library._final_module
    return generator._tm.emit_object(module) if kind == "object" else module.as_bitcode()


class Outside:
    """The native process, seen from the emulated Python. It starts with the first request."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._process: Any = None

    def ask(self, kind: str, target: tuple[str, str, str], code: bytes) -> bytes:
        """`work` for a target: triple, CPU, features."""
        if self._process is None:
            root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
            self._process = subprocess.Popen(
                [self._python, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": root, "NUMBA_OPT": str(int(config.OPT))},
            )
            self._write(llvmlite.__version__)
        self._write((kind, target, code))
        return pickle.load(self._process.stdout)

    def _write(self, request: Any) -> None:
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()


def install(outside: Outside) -> None:
    """Replace, in this Python, the work of LLVM on modules."""
    library = codegen.JITCodeLibrary
    loaded = library._object_getbuffer_hook.__func__

    def add(self: Any, module: Any) -> None:
        text = cgutils.normalize_ir_text(str(module)).encode()
        code = outside.ask("parse", self._codegen.magic_tuple(), text)
        self._final_module.link_in(llvm.parse_bitcode(code))

    def optimise(self: Any) -> None:
        name = self._final_module.name
        code = outside.ask("optimise", self._codegen.magic_tuple(), self._final_module.as_bitcode())
        self._final_module = llvm.parse_bitcode(code)
        self._final_module.name = name

    def object_of(cls: Any, module: Any) -> bytes | None:
        found = loaded(cls, module)
        owner = getattr(module, "_CPUCodeLibrary__library", None)
        if found is None and owner is not None:
            found = outside.ask("object", owner._codegen.magic_tuple(), module.as_bitcode())
            cls._object_compiled_hook(module, found)
        return found

    codegen.CPUCodeLibrary.add_ir_module = add
    codegen.CPUCodeLibrary._optimize_final_module = optimise
    library._object_getbuffer_hook = classmethod(object_of)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """The native process: answers until its input ends."""
    from numflash.machinecode.codegen import Target, code_generator

    release = pickle.load(requests)
    if release != llvmlite.__version__:
        raise SystemExit(f"the emulated Python has llvmlite {release}, this {llvmlite.__version__}")
    while True:
        try:
            kind, target, code = pickle.load(requests)
        except EOFError:
            return
        pickle.dump(work(code_generator(Target(*target)), kind, code), answers)
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
elif os.environ.get("OUTSIDE_PYTHON"):
    OUTSIDE = Outside(os.environ["OUTSIDE_PYTHON"])
    install(OUTSIDE)
