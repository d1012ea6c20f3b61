"""Folders of ready cubins.

`python -m numflash.cuda.compile --arch sm_90a --to DIR` fills one, NUMFLASH_CUBINS=DIR uses it.

A machine with such a folder needs no compiler: Python, numpy, numba, llvmlite and cuda-bindings are
enough. The folder's manifest.json holds, for every kernel, its factory, options and architecture,
how it is launched, and a checksum; and for the whole the versions of numflash and of the tools.
Cubins of other sources than the installed ones are refused.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ... import __version__
from ...errors import UnsupportedError

MANIFEST = "manifest.json"
VARIABLE = "NUMFLASH_CUBINS"
SOURCES = (
    "cuda/kernels/*.py",
    "cuda/instructions/*.py",
    "cuda/compile/target.py",
    "tiling/*.py",
    "numerics/fixedpoint.py",
)


@functools.cache
def source_digest() -> str:
    """Hash of the sources that kernels are made of."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for file in sorted(file for pattern in SOURCES for file in root.glob(pattern)):
        digest.update(f"{file.name}\n{file.read_text(encoding='utf-8')}\0".encode())
    return digest.hexdigest()


def kernel_name(factory: Callable, arch: str, constants: dict[str, Any]) -> str:
    """What the manifest calls a kernel: its factory, architecture and options."""
    return json.dumps(
        [f"{factory.__module__}.{factory.__qualname__}", arch, sorted(constants.items())]
    )


def file_name(factory: Callable, arch: str, constants: dict[str, Any]) -> str:
    """The name of a kernel's file in a folder."""
    digest = hashlib.sha256(kernel_name(factory, arch, constants).encode()).hexdigest()
    return f"{factory.__name__}-{arch}-{digest[:12]}.cubin"


@functools.cache
def _listed(folder: str) -> tuple[dict[str, Any], dict[str, str]]:
    """{name of a kernel: its entry} and the versions of the tools; raises UnsupportedError for a
    folder that cannot be used.
    """
    try:
        found = json.loads((Path(folder) / MANIFEST).read_text(encoding="utf-8"))
        entries = {entry["kernel"]: entry for entry in found["kernels"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnsupportedError(
            f"{VARIABLE}: got {folder!r}, whose {MANIFEST} cannot be read ({error}); allowed: a folder that "
            "`python -m numflash.cuda.compile --to` has made"
        ) from error
    if found.get("source") != source_digest():
        raise UnsupportedError(
            f"{VARIABLE}: got {folder!r}, made of other kernels (numflash {found.get('numflash')}); allowed: one made with the "
            f"installed numflash ({__version__}): run `python -m numflash.cuda.compile --to` again"
        )
    return entries, found["tools"]


def manifest(folder: str) -> dict[str, Any]:
    """{name of a kernel: its entry}; raises UnsupportedError for a folder that cannot be used."""
    return _listed(folder)[0]


def made_by(folder: str) -> dict[str, str]:
    """The versions of the tools that made a folder; raises as `manifest`."""
    return _listed(folder)[1]


def forget() -> None:
    """Read folders again: one has changed."""
    _listed.cache_clear()


def ready(
    folder: str, factory: Callable, arch: str, constants: dict[str, Any]
) -> tuple[bytes, dict[str, Any]] | None:
    """A kernel's cubin from a folder and how it is launched, or None if it is not there.

    Raises
    ------
    UnsupportedError
        The folder or the file cannot be used.
    """
    entry = manifest(folder).get(kernel_name(factory, arch, constants))
    if entry is None:
        return None
    path = Path(folder) / entry["file"]
    try:
        code = path.read_bytes()
    except OSError as error:
        raise UnsupportedError(f"{VARIABLE}: {path} cannot be read ({error})") from error
    if hashlib.sha256(code).hexdigest() != entry["sha256"]:
        raise UnsupportedError(f"{VARIABLE}: {path} is damaged: its checksum is not the manifest's")
    launch = entry["launch"]
    lists = {x: tuple(launch[x]) for x in ("parameters", "remarks")}
    return code, {**launch, **lists}
