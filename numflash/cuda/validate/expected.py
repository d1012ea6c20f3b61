"""What the emulator computes for each problem of a validation: made ahead, kept in files.

A file per problem, in the folder NUMFLASH_CUBINS or beside the compiled kernels. Its name has a
hash of the problem, the architecture and the kernels' sources, so a file of other sources is not
found.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import numpy as np

from ...errors import UnsupportedError
from ...jit.whole import new_file
from .. import launch, launch_backward
from ..compile import cache_directory
from ..compile.cubins import source_digest
from ..device.operands import emulated
from . import decode_cases
from .cases import emulated_as, gradient_operands, problem_of

FOLDER = "expected"


def file_name(kind: str, case: tuple, arch: str) -> str:
    """The name of a problem's file."""
    text = repr((kind, case, arch, source_digest()))
    return f"{arch}-{hashlib.sha256(text.encode()).hexdigest()[:20]}.npz"


def folders() -> list[Path]:
    """Where results are looked for."""
    ready = os.environ.get("NUMFLASH_CUBINS")
    return [Path(x) / FOLDER for x in ([ready] if ready else [])] + [cache_directory() / FOLDER]


def compute(kind: str, case: tuple, arch: str) -> list[np.ndarray]:
    """The emulator's results: out and LSE, three gradients, or what a cache returns."""
    if kind == "decode":
        return decode_cases.results(case, f"cuda-emulator:{emulated_as(arch)}")
    _, shape, precision, options = case
    problem = problem_of(shape, precision, options)
    if kind == "forward":
        return list(emulated(launch.plan(problem, arch))[:2])
    steps = launch_backward.plan(problem, *gradient_operands(problem), arch)
    return list(launch_backward.emulated(steps)[0])


def _read(path: Path) -> list[np.ndarray] | None:
    """The arrays of a file, or None if there is none that can be read."""
    try:
        with path.open("rb") as file, np.load(file) as found:
            return [found[f"arr_{n}"] for n in range(len(found.files))]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _write(path: Path, arrays: list[np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as file:
        np.savez_compressed(file, *arrays)


def there(kind: str, case: tuple, arch: str, folder: str | None = None) -> bool:
    """Whether a problem has a file, in one folder or in any."""
    places = [Path(folder) / FOLDER] if folder else folders()
    return any(_read(place / file_name(kind, case, arch)) is not None for place in places)


def make(kind: str, case: tuple, arch: str, folder: str | None = None) -> bool:
    """Compute a problem's file unless there is one; whether it was computed.

    Raises UnsupportedError where the architecture has no kernel for it.
    """
    if there(kind, case, arch, folder):
        return False
    places = [Path(folder) / FOLDER] if folder else folders()
    _write(places[-1] / file_name(kind, case, arch), compute(kind, case, arch))
    return True


def made(kind: str, case: tuple, arch: str, folder: str | None = None) -> bool:
    """`make`, and whether there is a kernel for the problem."""
    try:
        make(kind, case, arch, folder)
    except UnsupportedError:
        return False
    return True


def get(kind: str, case: tuple, arch: str) -> list[np.ndarray]:
    """The emulator's results of a problem: from a file, or computed now and kept."""
    name = file_name(kind, case, arch)
    for place in folders():
        found = _read(place / name)
        if found is not None:
            return found
    found = compute(kind, case, arch)
    _write(folders()[-1] / name, found)
    return found
