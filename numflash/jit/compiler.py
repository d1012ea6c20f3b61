"""The one place for JIT options and for the on-disk cache of compiled kernels.

Numba's own cache looks only at the file of the function itself (PITFALLS P1, P2): an edited helper in another file, another
option set of the same function, or a data file cut short by a full disk can each run the wrong code. `_PackageCache` closes
all three: the stamp is a hash of the kernel's source file and of all files of the package that it imports, the key holds
options and closure values, and each entry carries its own key and checksum; anything that does not match is compiled again.
"""
from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import linecache
import logging
import os
import pickle
import re
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from numba.core import caching, codegen, compiler
from numba.core.registry import CPUDispatcher
from numba.core.runtime import rtsys

from .errors import UnsupportedError

logger = logging.getLogger("numflash")

if numba.config.DISABLE_JIT:
    raise UnsupportedError("NUMBA_DISABLE_JIT is set: the kernels use instructions that only compiled code has; allowed: unset")

# Threads come from `prange` alone: array expressions inside a worker must not become parallel loops of their own (they cost
# compile time and run serially anyway).
PRANGE_ONLY = {"prange": True, "comprehension": False, "fusion": False, "inplace_binop": False, "numpy": False,
               "reduction": False, "setitem": False, "stencil": False}
# Reassociation and contraction for float kernels. Never nnan/ninf: they break masked rows (P11).
FLOAT_MATH = frozenset({"contract", "reassoc", "nsz", "arcp", "afn"})


def _source(path: Path) -> str:
    return "".join(linecache.getlines(str(path)))            # which also knows the cells of a notebook


_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+(\.*)([\w.]*)[ \t]+)?import[ \t]+(\([^)]*\)|[^#\n]*)", re.MULTILINE)


@functools.cache
def _imports(path: Path) -> frozenset[Path]:
    """The package's own files that a file imports, wherever in it the import stands."""
    root = Path(__file__).parent
    found: set[str] = set()                                                  # as text: a Path takes twenty times as long
    for dots, module, names in _IMPORT.findall(_source(path)):               # parsing takes eight times as long
        base = "/".join([str(path.parents[len(dots) - 1] if dots else root.parent), *module.split(".")]).rstrip("/")
        found.add(base)
        found.update(f"{base}/{words[0].replace('.', '/')}" for name in names.strip("()").split(",") if (words := name.split()))
    files = (name + end for name in found if name.startswith(str(root)) for end in (".py", "/__init__.py"))
    return frozenset(Path(file) for file in files if os.path.isfile(file))


@functools.cache
def source_digest(path: str) -> str:
    """Hash of a source file and of all that it imports from the package, directly or not: the version of its kernels."""
    seen: set[Path] = set()
    waiting = {Path(path), Path(__file__)}
    while waiting:
        seen |= waiting
        waiting = {file for found in map(_imports, waiting) for file in found} - seen
    digest = hashlib.sha256()
    for file in sorted(seen):
        digest.update(f"{file.name}\n{_source(file)}\0".encode())
    return digest.hexdigest()


@functools.cache
def _announce() -> None:
    logger.warning("compiling numflash kernels: the first call only, they are cached on disk (numflash warmup does it ahead)")


def _shown(options: dict[str, Any]) -> str:
    return repr(sorted((k, sorted(v) if isinstance(v, set) else v) for k, v in options.items()))


EMPTY = types.CellType()                         # of a name that is not bound yet


def _salt(value: Any) -> str:
    """A closure value as text that is equal in every process (pickling a dispatcher is not)."""
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(map(_salt, value)) + ")"
    function = getattr(value, "py_func", getattr(value, "_defn", value))     # a dispatcher's or an intrinsic's own function
    if hasattr(function, "_named"):                                          # its name says it all
        return function.__qualname__ + _shown(getattr(value, "targetoptions", {}))
    if callable(function):
        cells = getattr(function, "__closure__", None) or ()
        inner = ",".join(_salt(cell.cell_contents) for cell in cells if cell != EMPTY)
        name = getattr(function, "__qualname__", type(function).__name__)
        return f"{getattr(function, '__module__', '')}.{name}[{inner}]{_shown(getattr(value, 'targetoptions', {}))}"
    if isinstance(value, np.ndarray):                                        # repr leaves out the middle of a long one
        return f"{value.dtype.str}{value.shape}{hashlib.sha256(value.tobytes()).hexdigest()}"
    return repr(value)


def _named(function: Callable) -> Callable:
    """Name a closure after all that it closes over.

    Numba tells the closures of a factory apart by a number that every process counts anew. Two of them, compiled in different
    processes and loaded from the cache into a third, would share a symbol, and one would run the other's code.
    """
    if function.__closure__ and not hasattr(function, "_named"):
        function.__qualname__ += "." + hashlib.sha256(_salt(function).encode()).hexdigest()[:16]
        function._named = True                                               # type: ignore[attr-defined]
    return function


class _CheckedFile(caching.IndexDataCacheFile):
    """Cache files whose entries prove that they are whole and belong to the key that asks."""

    def save(self, key: Any, data: Any) -> None:
        payload = pickle.dumps(data, protocol=-1)
        super().save(key, (repr(key), hashlib.sha256(payload).digest(), payload))

    def load(self, key: Any) -> Any:
        try:
            entry = super().load(key)
            if entry is None:
                return None
            owner, checksum, payload = entry
            if owner == repr(key) and checksum == hashlib.sha256(payload).digest():
                return pickle.loads(payload)
        except Exception as error:          # any damage at all: compile again
            logger.info("ignoring a damaged cache entry: %s", error)
        return None

    def _load_index(self) -> Any:
        try:
            return super()._load_index()
        except Exception as error:
            logger.info("ignoring a damaged cache index: %s", error)
            return {}


class _Entries(caching.CompileResultCacheImpl):
    """What is cached of a kernel: Numba's, and the `separate` functions that must be there before it is loaded."""

    def reduce(self, cres: Any) -> Any:
        declared = (f.name for f in cres.library._final_module.functions if f.is_declaration)
        return tuple(_symbols[name] for name in declared if name in _symbols), super().reduce(cres)

    def rebuild(self, target_context: Any, payload: Any) -> Any:
        called, compiled = payload
        for name, args, symbol in called:
            _separate[name].provide(args, symbol)
        return super().rebuild(target_context, compiled)


class _PackageCache(caching.FunctionCache):
    _impl_class = _Entries

    def __init__(self, py_func: Callable, options: str) -> None:
        super().__init__(py_func)
        self._options = options
        del self._cache_file                     # Numba's own

    @functools.cached_property
    def _cache_file(self) -> _CheckedFile:       # which reads sources: for kernels that are called, not for all that are imported
        return _CheckedFile(self._cache_path, self._impl.filename_base, source_digest(self._py_func.__code__.co_filename))

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (str(sig), codegen.magic_tuple(), self._options, _salt(self._py_func))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        # Numba would import and register all that it can compile first, which takes as long as the rest of a first call. The
        # compiler does that by itself; machine code from the disk needs only the functions that allocate.
        rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            found = self._load_overload(sig, target_context)
        if found is None:
            _announce()
        return found


def _cached(dispatcher: Any, options: dict[str, Any]) -> Any:
    with contextlib.suppress(RuntimeError):      # a function typed at the prompt has no file, and Numba nowhere to cache it
        dispatcher._cache = _PackageCache(dispatcher.py_func, _shown(options))
    return dispatcher


class _KernelCompiler(compiler.Compiler):
    """Numba's, without garbage collection meanwhile: what it makes stays, and looking through that again and again is a sixth of
    the time.
    """

    def compile_extra(self, func: Callable) -> Any:
        collects = gc.isenabled()
        gc.disable()
        try:
            return super().compile_extra(func)
        finally:
            if collects:
                gc.enable()


def kernel(function: Callable | None = None, *, parallel: bool = False, float_math: bool = False, **options: Any) -> Any:
    """`numba.njit` as numflash uses it: no GIL, NumPy's division (P12), the package's cache.

    Parameters
    ----------
    parallel : bool
        Compile `prange` loops to threads.
    float_math : bool
        Allow contraction and reassociation (`FLOAT_MATH`); only where equal bits are not promised (P10, P11).
    """
    if function is None:
        return functools.partial(kernel, parallel=parallel, float_math=float_math, **options)
    options = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True,
               "parallel": dict(PRANGE_ONLY) if parallel else False,
               "fastmath": set(FLOAT_MATH) if float_math else False, **options}
    return _cached(numba.njit(pipeline_class=_KernelCompiler, **options)(_named(function)), options)


_kernels = threading.RLock()


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Around parallel kernels: concurrent callers wait where Numba's threads are its own work queue, which is not thread-safe
    and ends the process (P27); OpenMP and TBB need no waiting.
    """
    try:
        layer = numba.threading_layer()
    except ValueError:                           # not chosen yet: the first kernel chooses
        layer = "workqueue"
    if layer == "workqueue":
        with _kernels:
            yield
    else:
        yield


_first_process: int | None = None


def refuse_after_fork() -> None:
    """To be called before parallel kernels run.

    Raises
    ------
    UnsupportedError
        In a process forked from one that has run them already: GNU OpenMP would end it without a word to the caller (P28).
    """
    global _first_process
    if _first_process is None:
        _first_process = os.getpid()
    elif _first_process != os.getpid():
        try:
            layer = numba.threading_layer()
        except ValueError:                       # no kernel has run yet
            _first_process = os.getpid()
            return
        if layer == "omp":
            raise UnsupportedError("forked from a process that has run numflash kernels, which GNU OpenMP cannot survive; "
                                   "allowed: worker processes started by 'spawn', or forked before the first call")


class _InlineLibrary(codegen.JITCodeLibrary):
    """LLVM IR for callers to link; no machine code is made of it, which Numba does of every function."""

    def _optimize_final_module(self) -> None:
        """Callers do."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0

    @property
    def codegen(self) -> Any:
        return self

    def set_env(self, name: str, env: Any) -> None:
        """Its environment belongs to machine code."""


class _TwiceOptimizedLibrary(_InlineLibrary):
    _optimize_final_module = codegen.JITCodeLibrary._optimize_final_module


class _InlineCompiler(compiler.Compiler):
    _library = _InlineLibrary

    def __init__(self, typingctx: Any, targetctx: Any, library: Any, *rest: Any) -> None:
        super().__init__(typingctx, targetctx, self._library(targetctx.codegen(), "inline"), *rest)


class _TwiceOptimizedCompiler(_InlineCompiler):
    _library = _TwiceOptimizedLibrary


def inline(function: Callable | None = None, *, float_math: bool = False, twice: bool = False, **options: Any) -> Any:
    """A function that kernels call: compiled into its callers, never cached by itself; `float_math` as in `kernel`.

    twice : bool
        Optimise it by itself too. It costs as much again to compile, and makes a few long functions some 4 % faster.
    """
    if function is None:
        return functools.partial(inline, float_math=float_math, twice=twice, **options)
    if float_math:                               # otherwise as in the kernel that calls: options that are not given are inherited
        options["fastmath"] = set(FLOAT_MATH)
    return numba.njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=True,
                      pipeline_class=_TwiceOptimizedCompiler if twice else _InlineCompiler, **options)(_named(function))


# The same without reference counts, for what runs per block of keys: each count is a locked instruction, which also holds back
# every later read of memory. Takes and slices arrays, allocates none.
bare = functools.partial(inline, _nrt=False)


class _SeparateDispatcher(CPUDispatcher):
    """Callers declare it and find its machine code by symbol, where Numba would link its LLVM IR into theirs."""

    def add_overload(self, cres: Any) -> None:
        super().add_overload(cres)
        args, symbol, context = cres.fndesc.argtypes, cres.fndesc.llvm_func_name, self.targetctx
        self.provide(args, symbol)
        _symbols[symbol] = _salt(self), args, symbol
        context.remove_user_function(cres.entry_point)
        context.insert_user_function(cres.entry_point, cres.fndesc)

    def provide(self, args: tuple[Any, ...], symbol: str) -> None:
        """Make its code for these types known as `symbol`; compiled again since, it has another one itself."""
        self.compile(args)
        cres: Any = self.overloads[args]
        llvm.add_symbol(symbol, cres.library.get_pointer_to_function(cres.fndesc.llvm_func_name))


_separate: dict[str, _SeparateDispatcher] = {}
_symbols: dict[str, tuple[str, tuple[Any, ...], str]] = {}                   # (name in _separate, types, symbol) of each symbol


def separate(function: Callable | None = None, **options: Any) -> Any:
    """A function that callers find by its symbol: compiled and cached by itself, once for all of them."""
    if function is None:
        return functools.partial(separate, **options)
    options = {"nopython": True, "nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, "no_cpython_wrapper": True,
               **options}
    dispatcher = _cached(_SeparateDispatcher(_named(function), {}, options, _KernelCompiler), options)
    _separate[_salt(dispatcher)] = dispatcher
    return dispatcher
