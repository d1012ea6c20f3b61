"""From a kernel factory to PTX (for the emulator) and to a cubin (for a card), offline, with a
cache on disk.

A factory is a module-level function whose arguments are plain values (head size, block sizes,
flags). It returns a `Source`: the kernel as an ordinary Python function with those values in its
closure, and how it is to be launched. The cache key is the content: every source file of the
package, the factory's arguments, the architecture, and the compiler's versions.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import json
import logging
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ArgumentError, UnsupportedError
from ...jit.collector import resting
from ...jit.interrupts import uninterrupted
from ...jit.sources import source_digest
from ...jit.system import user_cache
from ...jit.trust import read
from ...jit.whole import write_whole
from ...tiling import SHARED_MEMORY
from .cubins import made_by, ready

logger = logging.getLogger("numflash")

# name -> compute capability as numba-cuda takes it, shared memory one block may have
ARCHITECTURES: dict[str, tuple[tuple, int]] = {
    name: (cc, SHARED_MEMORY[name])
    for name, cc in (
        ("sm_75", (7, 5)),
        ("sm_80", (8, 0)),
        ("sm_86", (8, 6)),
        ("sm_89", (8, 9)),
        ("sm_90a", (9, 0, "a")),
        ("sm_100", (10, 0)),
        ("sm_120", (12, 0)),
    )
}
Key = tuple[Callable, str, tuple[tuple[str, Any], ...]]  # factory, architecture, sorted options
TEXTS = {"ptx": "to_ptx", "linked": "to_linked_ptx"}  # kind -> the function of `target`
_lock = threading.Lock()  # Numba's compiler is not thread-safe


@dataclass(frozen=True)
class Source:
    """What a kernel factory returns.

    Attributes
    ----------
    function : the kernel, a plain Python function
    signature : Numba signature; tuples are flattened into single parameters
    threads : threads per block
    shared_bytes : dynamic shared memory per block
    max_registers : ceiling for ptxas, or None
    blocks : blocks that one multiprocessor is to hold at once; ptxas limits the registers
        accordingly
    cluster : blocks along x that run together and reach each other's shared memory (sm_90 and
        later)
    fastmath : all or nothing, so the shipped kernels leave it off and use approximate instructions
        by name
    """

    function: Callable
    signature: Any
    threads: int
    shared_bytes: int = 0
    max_registers: int | None = None
    blocks: int = 1
    cluster: int = 1
    fastmath: bool = False


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel: `code` is PTX text or a cubin.

    `parameters` has one type name per flattened parameter, `remarks` the numbers of what ptxas
    remarked about a cubin (C7510 to C7519: products of wgmma that it serialised or waits for).
    """

    name: str
    arch: str
    code: bytes
    parameters: tuple[str, ...]
    threads: int
    shared_bytes: int
    cluster: int = 1
    remarks: tuple[str, ...] = ()

    @property
    def ptx(self) -> str:
        """The text of the PTX."""
        return self.code.decode()


def cache_directory() -> Path:
    """NUMFLASH_CACHE_DIR, or NUMBA_CACHE_DIR, or the user's cache folder."""
    chosen = os.environ.get("NUMFLASH_CACHE_DIR") or os.environ.get("NUMBA_CACHE_DIR")
    return (Path(chosen) if chosen else user_cache() / "numflash") / "cuda"


def capability(arch: str) -> tuple:
    """The compute capability of an architecture name."""
    if arch not in ARCHITECTURES:
        raise ArgumentError(f"arch: got {arch!r}; allowed: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[arch][0]


def flat_parameters(signature: Any) -> tuple[str, ...]:
    """Type names of the parameters as they reach the kernel: an array is `array1`, `array2`, ...

    A tuple is its items.
    """
    from .target import types

    found: list[str] = []
    for t in signature.args:
        if isinstance(t, types.Array):
            found.append(f"array{t.ndim}")
        elif isinstance(t, types.UniTuple):
            found += [str(t.dtype)] * t.count
        else:
            found.append(str(t))
    return tuple(found)


def compile_source(source: Source, arch: str, kind: str) -> Compiled:
    """Compile without the cache; `kind` as for `compiled`."""
    from . import target

    cc = capability(arch)
    bounds = (source.threads, source.blocks)
    with _lock, resting():
        if kind in TEXTS:
            name = source.function.__name__
            to_text = getattr(target, TEXTS[kind])
            code = to_text(source.function, source.signature, cc, bounds, source.fastmath).encode()
            remarks: tuple[str, ...] = ()
        else:
            name, code, remarks = target.to_cubin(
                source.function, source.signature, cc, bounds, source.fastmath, source.max_registers
            )
    return Compiled(
        name,
        arch,
        code,
        flat_parameters(source.signature),
        source.threads,
        source.shared_bytes,
        source.cluster,
        remarks,
    )


@functools.cache
def tool_versions() -> dict[str, str]:
    """Versions of what compiles kernels.

    Of the wheels, or of a CUDA toolkit's libraries where their wheels are not installed.
    """
    from . import target

    found = {}
    for wheel in ("numba", "llvmlite", "numba-cuda", "nvidia-nvvm", "nvidia-nvjitlink"):
        try:
            found[wheel] = importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            found[wheel] = target.library_version(wheel)
    return found


def code_version() -> int | None:
    """The CUDA version of the machine code that is loaded: the folder's of ready cubins, or the
    linker's. None where neither is known.
    """
    folder = os.environ.get("NUMFLASH_CUBINS")
    try:
        tools = made_by(folder) if folder else tool_versions()
    except UnsupportedError:  # no compiler, or a folder that is refused when a kernel is asked for
        return None
    found = re.match(r"(?:toolkit )?(\d+)\.", tools.get("nvidia-nvjitlink", ""))
    return int(found[1]) if found else None


def _key(factory: Callable, arch: str, kind: str, constants: dict) -> str:
    versions = list(tool_versions().values())
    source = source_digest(factory.__code__.co_filename)
    complete = inspect.signature(factory).bind(**constants)
    complete.apply_defaults()  # a constant left out is its default's kernel
    what = [
        source,
        factory.__module__,
        factory.__qualname__,
        arch,
        kind,
        sorted(complete.arguments.items()),
        versions,
    ]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:40]


_loaded: dict[tuple, Compiled] = {}


def compiled(factory: Callable[..., Source], arch: str, kind: str, **constants: Any) -> Compiled:
    """The kernel that `factory(**constants)` describes, from memory, from disk, or freshly
    compiled.

    Parameters
    ----------
    factory : module-level function returning a `Source`
    arch : one of `ARCHITECTURES`
    kind : "ptx" (what the emulator runs), "linked" (PTX after link-time optimisation) or "cubin";
        cubins are taken from the folder NUMFLASH_CUBINS first (`cubins`)
    constants : plain values (numbers, strings, booleans, None)
    """
    folder = os.environ.get("NUMFLASH_CUBINS") if kind == "cubin" else None
    wanted = (factory, arch, kind, folder, *sorted(constants.items()))
    if wanted in _loaded:
        return _loaded[wanted]
    capability(arch)
    if folder:
        there = ready(folder, factory, arch, constants)
        if there is not None:
            return _loaded.setdefault(wanted, Compiled(arch=arch, code=there[0], **there[1]))
    shown = ", ".join(f"{k}={v}" for k, v in constants.items())
    try:
        found = _from_cache(factory, arch, kind, constants, shown)
    except UnsupportedError as error:
        if not folder:
            raise
        raise UnsupportedError(
            f"NUMFLASH_CUBINS: {folder} has no {factory.__name__}({shown}) for {arch}, and it cannot be compiled here ({error})"
        ) from error
    return _loaded.setdefault(wanted, found)


def is_ready(factory: Callable[..., Source], arch: str, kind: str, **constants: Any) -> bool:
    """Whether `compiled` has the kernel without compiling it."""
    folder = os.environ.get("NUMFLASH_CUBINS") if kind == "cubin" else None
    try:
        if folder and ready(folder, factory, arch, constants) is not None:
            return True
        return _read(_path(factory, arch, kind, constants)) is not None
    except UnsupportedError:  # a folder that cannot be used, or no compiler
        return False


def _path(factory: Callable[..., Source], arch: str, kind: str, constants: dict[str, Any]) -> Path:
    """The kernel's file in the cache."""
    key = _key(factory, arch, kind, constants)
    return cache_directory() / f"{factory.__name__}-{arch}-{key}.{kind}"


def _from_cache(
    factory: Callable[..., Source], arch: str, kind: str, constants: dict[str, Any], shown: str
) -> Compiled:
    """The kernel from the cache on disk, or freshly compiled."""
    path = _path(factory, arch, kind, constants)
    found = _read(path)
    if found is None:
        logger.info("compiling %s(%s) for %s", factory.__name__, shown, arch)
        found = uninterrupted(compile_source, factory(**constants), arch, kind)
        _write(path, found)
    return found


def _read(path: Path) -> Compiled | None:
    """One line of JSON (with a checksum), then the code. Anything damaged counts as absent."""
    try:
        head, code = read(path).split(b"\n", 1)
        meta = json.loads(head)
        if meta.pop("sha256") != hashlib.sha256(code).hexdigest():
            return None
        parameters, remarks = (tuple(meta.pop(x)) for x in ("parameters", "remarks"))
        return Compiled(code=code, parameters=parameters, remarks=remarks, **meta)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, item: Compiled) -> None:
    meta = {k: v for k, v in vars(item).items() if k != "code"} | {
        "sha256": hashlib.sha256(item.code).hexdigest()
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(meta).encode() + b"\n" + item.code)
    except OSError as error:
        logger.info("cannot cache compiled CUDA code: %s", error)
