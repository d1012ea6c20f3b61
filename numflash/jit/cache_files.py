"""Where the CPU's compiled kernels are stored on disk, and how to remove files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from .disk_cache import folder_of

SUFFIXES = (".nbi", ".nbc")  # index and data files
LEFT_BEHIND = tuple(f"{suffix}.tmp." for suffix in SUFFIXES)  # by a process that was killed


def folders() -> list[Path]:
    """The folders in use for the kernels of this package.

    Of each of its own folders, the one that Numba would choose now.
    """
    packages = {path.parent: path for path in Path(__file__).parents[1].rglob("*.py")}
    found = map(folder_of, packages.values())
    return sorted({folder for folder in found if folder is not None})


def files() -> list[Path]:
    """Index and data files of the compiled kernels."""
    return sorted(
        path
        for folder in folders()
        if folder.is_dir()
        for path in folder.iterdir()
        if (path.suffix in SUFFIXES or any(part in path.name for part in LEFT_BEHIND))
        and path.is_file()
    )


def remove(found: Iterable[Path]) -> None:
    """Remove files that may have gone meanwhile."""
    for path in found:
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            os.remove(path)
