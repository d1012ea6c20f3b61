"""Machine code of any Numba function for any CPU that LLVM supports, on this machine, without
running it.

The pip wheel of llvmlite holds LLVM's AArch64 and x86 back ends whatever the host is. Here Numba's
own front end, type inference and pass pipeline run against a target machine of the caller's choice,
so that a test on an x86 machine can read the very instructions an A64FX would execute, and an
emulator can execute them.

Nested ``@njit`` functions, ``@overload`` implementations and intrinsics are compiled for that CPU
too, and nothing of it reaches the functions as they run on the host: typing and lowering happen in
contexts of their own.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from numba.core import codegen, config, cpu, fastmathpass, sigutils, typing
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher, cpu_target
from numba.core.runtime import nrtdynmod
from numba.core.types import BoundFunction, abstract

from ..errors import ArgumentError
from ..jit.compiler import InlineLibrary, KernelCompiler
from ..jit.parallel import share
from ..jit.tuples import pass_whole
from . import assembly
from .kernels import KERNELS, Kernel

AARCH64 = "aarch64-unknown-linux-gnu"
X86_64 = "x86_64-unknown-linux-gnu"
_CPUS = {
    AARCH64: "a64fx neoverse-v1 neoverse-v2 neoverse-n1 neoverse-n2 cortex-a72",
    X86_64: "x86-64-v2 haswell skylake-avx512 icelake-server alderlake sapphirerapids znver2 znver3 znver4 znver5",
}
_SINCE = {
    "neoverse-v2": 16,
    "znver4": 16,
    "znver5": 20,
}  # LLVM release; an older one would abort over an unknown x86 CPU
TRIPLES = {
    name: triple
    for triple, names in _CPUS.items()
    for name in names.split()
    if llvm.llvm_version_info[0] >= _SINCE.get(name, 0)
}


_FEATURES = re.compile(r"[+-][\w.-]+(,[+-][\w.-]+)*")


class Target(NamedTuple):
    """What code is made for.

    An LLVM triple, CPU name and feature list (``"+sve,-sve2"``, empty = the CPU's own).
    """

    triple: str
    cpu: str
    features: str = ""

    @classmethod
    def named(cls, name: str = "host", features: str = "") -> Target:
        """The target of a CPU name; ``"host"`` is what Numba compiles for in this process."""
        if features and not _FEATURES.fullmatch(features):  # LLVM would abort the process
            raise ArgumentError(f"features: got {features!r}; allowed: as '+sve,-sve2'")
        if name == "host" and features:
            raise ArgumentError(
                f"features: got {features!r} for the host, whose code is as it runs; allowed: with a named cpu"
            )
        if name == "host":
            host = cpu_target.target_context.codegen()
            return cls(llvm.get_process_triple(), *host.magic_tuple()[1:3])
        if name not in TRIPLES:
            raise ArgumentError(
                f"cpu: got {name!r}; allowed: 'host', {', '.join(map(repr, TRIPLES))}"
            )
        for word in features.split(",") if features else ():
            _check_feature(word, TRIPLES[name], features)
        return cls(TRIPLES[name], name, features)


def _check_feature(word: str, triple: str, given: str) -> None:
    """Raise ArgumentError for a feature that LLVM would leave out, with a warning of its own only."""
    known = _known_features(triple)
    if known and word[1:] not in known:
        near = difflib.get_close_matches(word[1:], known, 5, 0.5) or known
        raise ArgumentError(
            f"features: got {given!r}, and LLVM knows no {word[1:]!r} of {triple.split('-')[0]}; "
            f"allowed: + or - before a name, as {', '.join(near)}"
        )


_ASK = """
import sys
import llvmlite.binding as llvm
llvm.initialize_all_targets()
llvm.Target.from_triple(sys.argv[1]).create_target_machine(features="+help")
"""


@functools.cache
def _known_features(triple: str) -> tuple[str, ...]:
    """LLVM's names of a triple's features; none where it does not tell.

    It prints them to the process's standard error and returns nothing, so another process asks.
    """
    said = subprocess.run(
        [sys.executable, "-c", _ASK, triple], capture_output=True, text=True, timeout=60
    ).stderr
    _, _, listed = said.partition("Available features")
    return tuple(re.findall(r"^  ([\w.-]+) +- ", listed, re.M))


@dataclass(frozen=True)
class MachineCode:
    """Compiled code: optimised LLVM bitcode, and the entry's symbol name.

    Text and object are made from it when they are asked for: a large kernel's take seconds each.
    """

    target: Target
    entry: str
    bitcode: bytes

    @functools.cached_property
    def assembly(self) -> str:
        """The assembly text."""
        return self._machine.emit_assembly(llvm.parse_bitcode(self.bitcode))

    @functools.cached_property
    def object(self) -> bytes:
        """The ELF object; not for the host's own run."""
        return self._machine.emit_object(llvm.parse_bitcode(self.bitcode))

    @property
    def _machine(self) -> Any:
        return _contexts(self.target)[1].codegen()._tm


class _Codegen(codegen.AOTCPUCodegen):
    """Numba's code generator with another target machine and no execution engine."""

    crosses = True  # the code is not for this process

    def __init__(self, target: Target) -> None:
        self._target = target
        super().__init__("numflash.machinecode.codegen", target.cpu)

    def _init(self, llvm_module: Any) -> None:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        opt: Any = vars(config)["OPT"]
        self._tm_features = self._target.features
        # the options of Numba's JIT, so that the code is the one that would run
        self._tm = llvm.Target.from_triple(self._target.triple).create_target_machine(
            cpu=self._target.cpu,
            features=self._target.features,
            opt=int(opt),
            reloc="default",
            codemodel="jitdefault",
            jit=True,
        )
        self._target_data = self._tm.target_data
        self._data_layout = str(self._target_data)
        self._loopvect, self._opt_level = (True, 3) if opt.is_opt_max else (False, 0)

    def _create_empty_module(self, name: str) -> Any:
        module = super()._create_empty_module(name)
        module.triple = self._target.triple
        return module

    def _get_host_cpu_name(self) -> str:
        return self._target.cpu

    def _get_host_cpu_features(self) -> str:
        return self._target.features


class _TypingContext(typing.Context):
    """Types every dispatcher as a fresh twin, so that no overload is shared with the host's
    functions.
    """

    def __init__(self) -> None:
        self._twins: dict[tuple[CPUDispatcher, bool], CPUDispatcher] = {}
        super().__init__()

    def twin(self, function: CPUDispatcher, called: bool = True) -> CPUDispatcher:
        """`called`: from compiled code. Else it is optimised by itself whatever it is."""
        key = function, called
        if key not in self._twins:
            options = function.targetoptions
            if (
                function is share
            ):  # Numba's threads are not what is read or emulated: one task after the other
                options = {**options, "parallel": False}
            compiler: Any = function._compiler
            self._twins[key] = CPUDispatcher(
                function.py_func,
                function.locals,
                options,
                compiler.pipeline_class if called else KernelCompiler,
            )
        return self._twins[key]

    def resolve_value_type(self, val: Any) -> Any:
        return super().resolve_value_type(self.twin(val) if isinstance(val, CPUDispatcher) else val)


class _TargetContext(cpu.CPUContext):
    """Numba's CPU lowering, emitting into a `_Codegen`."""

    aot_mode = True  # symbols instead of this process's addresses

    def __init__(self, typingctx: typing.Context, target: Target) -> None:
        self._target = target
        super().__init__(typingctx)

    def init(self) -> None:
        self.is32bit = False
        self._internal_codegen = _Codegen(self._target)
        pass_whole(self)

    @functools.cached_property
    def _runtime(self) -> Any:
        return nrtdynmod.compile_nrt_functions(self)

    def post_lowering(self, mod: Any, library: Any) -> None:
        if self.fastmath:
            fastmathpass.rewrite_module(mod, self.fastmath)
        # not the host's runtime library: that one is IR already lowered for the host (llvm.x86.*)
        if not isinstance(library, InlineLibrary):
            library.add_linking_library(self._runtime)

    def create_cpython_wrapper(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is called from Python."""

    create_cfunc_wrapper = create_cpython_wrapper

    def get_executable(self, library: Any, fndesc: Any, env: Any) -> Callable:
        # Numba keys overloads by a built-in function; this one represents code that cannot run here
        return object().__sizeof__


@functools.cache
def _contexts(target: Target) -> tuple[_TypingContext, _TargetContext]:
    typingctx = _TypingContext()
    return typingctx, _TargetContext(typingctx, target)


def code_generator(target: Target) -> Any:
    """Numba's code generator for a target, with the features that `cpu.target` requests."""
    return _contexts(target)[1].codegen()


def _forget_methods() -> None:
    """Drop Numba's types of methods, so that it makes new ones.

    Numba reuses the type of a method while anything refers to it, and such a type resolves calls in
    the typing context in which it was made. Reused in another context, it would give a kernel of the
    host a function that was compiled for another CPU.
    """
    types: Any = vars(abstract)["_typecache"]
    for reference in list(types):
        if isinstance(reference(), BoundFunction):
            types.pop(reference, None)


@contextlib.contextmanager
def _as_cpu_target(typingctx: _TypingContext, targetctx: _TargetContext) -> Iterator[None]:
    """Dispatchers made inside (Numba makes them for overloads) belong to these contexts."""
    host = {
        "_toplevel_typing_context": cpu_target.typing_context,
        "_toplevel_target_context": cpu_target.target_context,
    }
    try:
        cpu_target.__dict__.update(
            _toplevel_typing_context=typingctx, _toplevel_target_context=targetctx
        )
        _forget_methods()
        yield
    finally:
        cpu_target.__dict__.update(host)
        _forget_methods()


@global_compiler_lock
def bitcode_for(function: Callable, signature: Any, target: Target) -> tuple[bytes, str]:
    """Optimised LLVM bitcode of a function for a target, and its entry's symbol.

    Arguments as for `compile_for`.
    """
    typingctx, targetctx = _contexts(target)
    args, _ = sigutils.normalize_signature(signature)
    with _as_cpu_target(typingctx, targetctx):
        twin = typingctx.twin(
            function if isinstance(function, CPUDispatcher) else CPUDispatcher(function),
            called=False,
        )
        twin.compile(args)
    overload: Any = twin.overloads[args]
    library = overload.library
    library._ensure_finalized()
    return library._final_module.as_bitcode(), overload.fndesc.llvm_func_name


@global_compiler_lock
def compile_for(function: Callable, signature: Any, target: Target) -> MachineCode:
    """Compile `function` for `target` and return its machine code.

    Parameters
    ----------
    function : ``@njit`` function (its options are kept, caching excepted) or plain function
        (default options)
    signature : a Numba signature, ``"void(int8[:, ::1], int32[::1])"`` or a tuple of types
    target : see `Target.named`

    Raises
    ------
    numba.core.errors.NumbaError
        As ``@njit`` would on that CPU, for instance when an operation needs a feature that the CPU
        lacks.
    """
    optimised, entry = bitcode_for(function, signature, target)
    return MachineCode(target, entry, optimised)


@functools.cache
def compile_kernel(kernel: str, cpu: str = "host", features: str = "") -> MachineCode:
    """Machine code of one of `KERNELS` for a CPU by name.

    Raises
    ------
    ArgumentError
        For an unknown kernel or CPU.
    UnsupportedError
        If the CPU lacks the kernel's vectors.
    """
    if kernel not in KERNELS:
        raise ArgumentError(f"kernel: got {kernel!r}; allowed: {', '.join(map(repr, KERNELS))}")
    entry = KERNELS[kernel]
    where = Target.named(cpu, features)
    function = getattr(importlib.import_module(entry.module), entry.name)
    if entry.arguments is not None:
        function = function(*arguments_of(entry, where))
    signature = entry.signature if isinstance(entry.signature, str) else entry.signature()
    return compile_for(function, signature, where)


def arguments_of(entry: Kernel, where: Target) -> tuple[Any, ...]:
    """What a kernel's factory is given on a CPU."""
    if not callable(entry.arguments):
        return entry.arguments or ()
    return entry.arguments(where.cpu, code_generator(where))


def histogram(kernel: str, cpu: str = "host", features: str = "") -> dict[str, Any]:
    """What the hot loop of a kernel consists of on a CPU, as plain data (JSON-ready).

    Parameters
    ----------
    kernel : a name in `KERNELS`
    cpu : "host" or a name in `TRIPLES`
    features : LLVM feature list that changes the CPU's own, for instance ``"-sve"``

    Returns
    -------
    dict
        As `report`.

    Raises
    ------
    ArgumentError
        For an unknown kernel or CPU, or a feature list that is none.
    """
    return {"kernel": kernel, **report(compile_kernel(kernel, cpu, features))}


def report(code: MachineCode) -> dict[str, Any]:
    """Count what the hot loop of a kernel consists of.

    Keys: ``cpu``, ``triple``, ``function`` (symbol), ``depth`` (of the hot loop), ``instructions``
    (kind -> count), ``total``, and counts of what a hot loop should not hold:
    ``integer_divisions``, ``float64``, ``lanes64``, ``calls``, ``stack``.
    """
    loop = assembly.hot_loop(code.assembly)
    unwanted = {
        "integer_divisions": assembly.is_integer_division,
        "float64": assembly.is_float64,
        "lanes64": assembly.is_lanes64,
        "calls": assembly.is_call,
        "stack": assembly.is_stack,
    }
    return {
        "cpu": code.target.cpu,
        "triple": code.target.triple,
        "function": loop.function,
        "depth": loop.depth,
        "instructions": assembly.histogram(loop.instructions),
        "total": len(loop.instructions),
        **{name: sum(map(test, loop.instructions)) for name, test in unwanted.items()},
    }
