"""Folders of ready cubins: `python -m numflash.cuda.compile --arch sm_90a --to DIR` fills one, NUMFLASH_CUBINS=DIR uses it.

A machine with such a folder needs no compiler: Python, numpy, numba, llvmlite and cuda-bindings are enough. The folder's
manifest.json holds, for every kernel, its factory, options and architecture, how it is launched, and a checksum; and for the whole
the versions of numflash and of the tools. Cubins of other sources than the installed ones are refused.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import UnsupportedError
from .compile import ARCHITECTURES, Compiled, Key, compiled, tool_versions

MANIFEST, VARIABLE = "manifest.json", "NUMFLASH_CUBINS"
SOURCES = ("cuda/kernels/*.py", "cuda/ptx.py", "cuda/_target.py", "tiling.py", "fixedpoint.py")


@functools.cache
def source_digest() -> str:
    """Hash of the sources that kernels are made of."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for file in sorted(file for pattern in SOURCES for file in root.glob(pattern)):
        digest.update(f"{file.name}\n{file.read_text()}\0".encode())
    return digest.hexdigest()


def _name(factory: Callable, arch: str, constants: dict[str, Any]) -> str:
    return json.dumps(
        [f"{factory.__module__}.{factory.__qualname__}", arch, sorted(constants.items())]
    )


@functools.cache
def _manifest(folder: str) -> dict[str, Any]:
    """{name of a kernel: its entry}; raises UnsupportedError for a folder that cannot be used."""
    try:
        found = json.loads((Path(folder) / MANIFEST).read_text())
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
    return entries


def ready(folder: str, factory: Callable, arch: str, constants: dict[str, Any]) -> Compiled | None:
    """The kernel from a folder, or None if it is not there; raises UnsupportedError for a damaged file."""
    entry = _manifest(folder).get(_name(factory, arch, constants))
    if entry is None:
        return None
    path = Path(folder) / entry["file"]
    try:
        code = path.read_bytes()
    except OSError as error:
        raise UnsupportedError(f"{VARIABLE}: {path} cannot be read ({error})") from error
    if hashlib.sha256(code).hexdigest() != entry["sha256"]:
        raise UnsupportedError(f"{VARIABLE}: {path} is damaged: its checksum is not the manifest's")
    launch = {**entry["launch"], "parameters": tuple(entry["launch"]["parameters"])}
    return Compiled(arch=arch, code=code, **launch)


def _build(key: Key, folder: str) -> dict[str, Any]:
    """Compile a kernel, write its cubin, return its entry of the manifest."""
    factory, arch, constants = key
    item = compiled(factory, arch, "cubin", **dict(constants))
    name = _name(factory, arch, dict(constants))
    file = f"{factory.__name__}-{arch}-{hashlib.sha256(name.encode()).hexdigest()[:12]}.cubin"
    (Path(folder) / file).write_bytes(item.code)
    launch = {k: v for k, v in vars(item).items() if k not in ("code", "arch")}
    digest = hashlib.sha256(item.code).hexdigest()
    return {"kernel": name, "file": file, "sha256": digest, "launch": launch}


def write(keys: set[Key], folder: str, jobs: int | None = None) -> int:
    """Compile kernels into a folder and add them to its manifest; how many bytes of cubins it then lists."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    try:
        entries = dict(_manifest(folder))
    except UnsupportedError:
        entries = {}  # new, or of other sources: what it lists is of no use
    todo = sorted(keys, key=str)
    if jobs == 1:
        made = [_build(key, folder) for key in todo]
    else:
        with ProcessPoolExecutor(jobs or os.cpu_count(), get_context("spawn")) as pool:
            made = list(pool.map(_build, todo, [folder] * len(todo)))
    entries |= {entry["kernel"]: entry for entry in made}
    manifest = {
        "numflash": __version__,
        "source": source_digest(),
        "tools": tool_versions(),
        "kernels": list(entries.values()),
    }
    new = path / (MANIFEST + ".new")
    new.write_text(json.dumps(manifest, indent=1) + "\n")
    os.replace(new, path / MANIFEST)
    _manifest.cache_clear()
    return sum((path / entry["file"]).stat().st_size for entry in entries.values())


def main(arguments: list[str] | None = None) -> int:
    """`python -m numflash.cuda.compile`: 0 once the folder is written."""
    parser = argparse.ArgumentParser(
        prog="python -m numflash.cuda.compile",
        description="Compile the kernels that `python -m numflash.cuda.validate` uses into a folder for NUMFLASH_CUBINS.",
    )
    parser.add_argument("--arch", choices=ARCHITECTURES, nargs="+", required=True)
    parser.add_argument("--to", metavar="DIR", required=True, help="the folder, made if need be")
    parser.add_argument("--quick", action="store_true", help="only what validate --quick uses")
    parser.add_argument("--jobs", type=int, help="processes (default: one per core)")
    chosen = parser.parse_args(arguments)
    from .validate.kernels import needed

    for arch in chosen.arch:
        keys = needed(arch, quick=chosen.quick)
        size = write(keys, chosen.to, chosen.jobs)
        print(f"{len(keys)} kernels for {arch}; {chosen.to} holds {size / 1e6:.1f} MB of cubins")
    return 0


if __name__ == "__main__":
    sys.exit(main())
