"""The one place for JIT options.

`kernel`, `inline`, `bare`, `inlined`, `own` and `separate` are how numflash compiles a function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numba
from numba.core import codegen, compiler, targetconfig
from numba.core.registry import CPUDispatcher, cpu_target

from ..errors import UnsupportedError
from .closures import named, salt
from .collector import resting
from .disk_cache import cached, separate_functions, symbols
from .interrupts import uninterrupted
from .tuples import pass_whole

if numba.config.DISABLE_JIT:
    raise UnsupportedError(
        "NUMBA_DISABLE_JIT is set: the kernels use instructions that only compiled code has; allowed: unset"
    )

pass_whole(cpu_target.target_context)

# Threads come from `prange` alone: array expressions inside a worker must not become parallel loops
# of their own (they cost compile time and run serially anyway).
PRANGE_ONLY = {
    "prange": True,
    "comprehension": False,
    "fusion": False,
    "inplace_binop": False,
    "numpy": False,
    "reduction": False,
    "setitem": False,
    "stencil": False,
}
# Reassociation and contraction for float kernels. Never nnan or ninf:
# docs/pitfalls.md, "Full fast math breaks masked rows".
FLOAT_MATH = frozenset({"contract", "reassoc", "nsz", "arcp", "afn"})


class KernelCompiler(compiler.Compiler):
    """Numba's compiler with the garbage collector switched off."""

    def compile_extra(self, func: Callable) -> Any:
        """What makes Numba's compilation of a function."""
        with resting():
            return super().compile_extra(func)


def kernel(
    function: Callable | None = None,
    *,
    parallel: bool = False,
    float_math: bool = False,
    **options: Any,
) -> Any:
    """`numba.njit` as numflash uses it.

    No GIL, NumPy's division (no check for zero), the package's cache.

    Parameters
    ----------
    parallel : bool
        Compile `prange` loops to threads.
    float_math : bool
        Allow contraction and reassociation (`FLOAT_MATH`); only where equal bits are not promised.
    """
    if function is None:
        return functools.partial(kernel, parallel=parallel, float_math=float_math, **options)
    options = {
        "nogil": True,
        "error_model": "numpy",
        "no_cfunc_wrapper": True,
        "parallel": dict(PRANGE_ONLY) if parallel else False,
        "fastmath": set(FLOAT_MATH) if float_math else False,
        **options,
    }
    targets = {"nopython": True, "boundscheck": None, **options}
    return cached(_KernelDispatcher(named(function), {}, targets, KernelCompiler), options)


class InlineLibrary(codegen.JITCodeLibrary):
    """LLVM IR for callers to link.

    Numba makes machine code of every function; of this one it does not.
    """

    def _optimize_final_module(self) -> None:
        """Does nothing: the IR is optimised together with each caller."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """0: nothing calls it by its address."""
        return 0

    @property
    def codegen(self) -> Any:
        """Itself, as what takes an environment."""
        return self

    def set_env(self, name: str, env: Any) -> None:
        """Its environment belongs to machine code."""


class _TwiceOptimizedLibrary(InlineLibrary):
    _optimize_final_module = codegen.JITCodeLibrary._optimize_final_module


class _InlineCompiler(compiler.Compiler):
    _library = InlineLibrary

    def __init__(self, typingctx: Any, targetctx: Any, library: Any, *rest: Any) -> None:
        super().__init__(typingctx, targetctx, self._library(targetctx.codegen(), "inline"), *rest)


class _TwiceOptimizedCompiler(_InlineCompiler):
    _library = _TwiceOptimizedLibrary


def inline(
    function: Callable | None = None,
    *,
    float_math: bool = False,
    twice: bool = False,
    **options: Any,
) -> Any:
    """A function that kernels call: compiled into its callers, never cached by itself.

    `float_math` as in `kernel`.

    twice : bool
        Optimise it by itself too. It costs as much again to compile, and makes a few long functions
        some 4 % faster.
    """
    if function is None:
        return functools.partial(inline, float_math=float_math, twice=twice, **options)
    # where it is not given, the option is inherited from the first kernel that calls
    if float_math:
        options["fastmath"] = set(FLOAT_MATH)
    options = {
        "nopython": True,
        "boundscheck": None,
        "nogil": True,
        "error_model": "numpy",
        "no_cfunc_wrapper": True,
        "no_cpython_wrapper": True,
        **options,
    }
    pipeline = _TwiceOptimizedCompiler if twice else _InlineCompiler
    return _InlineDispatcher(named(function), {}, options, pipeline)


# The same without reference counts, for what runs per block of keys: each count is a locked
# instruction, which also holds back every later read of memory. Takes and slices arrays, allocates
# none.
bare = functools.partial(inline, _nrt=False)
# The same, inheriting nothing: for what kernels of different options call (docs/pitfalls.md, "Options
# are inherited from the first caller").
own = functools.partial(bare, fastmath=False)
# `bare` as a part of its caller in machine code, too: a call would copy all arrays of its tuples
# (docs/pitfalls.md, "A call copies the arrays of its tuples").
inlined = functools.partial(bare, forceinline=True)
CHECKED = False  # whether callers are compared, as the tests do


class _InlineDispatcher(CPUDispatcher):
    """Numba's, which compiles a function once for given types, with the options that it inherits from
    its first caller; a second one with other options would get that code.
    """

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """What a caller links; where `CHECKED`, an error if that was compiled with other options."""
        if CHECKED:
            self._compare_callers(args)
        return super().get_call_template(args, kws)

    def _compare_callers(self, args: Any) -> None:
        caller = targetconfig.ConfigStack.top_or_none()
        if caller is None:
            return
        counts = self.targetoptions.get("_nrt", bool(caller.nrt))
        math = self.targetoptions.get("fastmath", frozenset(caller.fastmath.flags))
        first = self.__dict__.setdefault("_inherited", {}).setdefault(args, (counts, math))
        if first != (counts, math):
            raise AssertionError(
                f"{self.py_func.__qualname__}: called with reference counts and fast math {counts, math}, compiled "
                f"with {first}; allowed: `own`, which inherits nothing"
            )


class _KernelDispatcher(CPUDispatcher):
    """Numba's; signals wait until a kernel is compiled."""

    def _compilation_chain_init_hook(self) -> None:
        """Nothing: Numba would search all installed packages for types that extend it."""

    def compile(self, sig: Any) -> Any:
        return uninterrupted(super().compile, sig)


class _SeparateDispatcher(_KernelDispatcher):
    """Callers declare it and find its machine code by symbol, where Numba would link its LLVM IR
    into theirs.
    """

    def add_overload(self, cres: Any) -> None:
        super().add_overload(cres)
        args = cres.fndesc.argtypes
        symbol = cres.fndesc.llvm_func_name
        context = self.targetctx
        self.provide(args, symbol)
        symbols[symbol] = salt(self), args, symbol
        context.remove_user_function(cres.entry_point)
        context.insert_user_function(cres.entry_point, cres.fndesc)

    def provide(self, args: tuple[Any, ...], symbol: str) -> None:
        """Make its code for these types known as `symbol`.

        A function compiled again since then has another symbol itself.
        """
        self.compile(args)
        cres: Any = self.overloads[args]
        llvm.add_symbol(symbol, cres.library.get_pointer_to_function(cres.fndesc.llvm_func_name))


def separate(function: Callable | None = None, **options: Any) -> Any:
    """A function that callers find by its symbol.

    Compiled and cached by itself, once for all of them.
    """
    if function is None:
        return functools.partial(separate, **options)
    options = {
        "nopython": True,
        "nogil": True,
        "error_model": "numpy",
        "no_cfunc_wrapper": True,
        "no_cpython_wrapper": True,
        **options,
    }
    dispatcher = cached(_SeparateDispatcher(named(function), {}, options, KernelCompiler), options)
    separate_functions[salt(dispatcher)] = dispatcher
    return dispatcher
