"""Where the compiled kernels lie on disk, and how to remove them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from numba.core import caching, config
from numba.misc.appdirs import AppDirs


def folders() -> list[Path]:
    """Every folder that may hold compiled kernels of this package: beside the sources, NUMBA_CACHE_DIR, the user's cache."""
    packages = sorted({path.parent for path in Path(__file__).parents[1].rglob("*.py")})
    roots = [Path(config.CACHE_DIR)] if config.CACHE_DIR else []
    roots.append(Path(AppDirs(appname="numba", appauthor=False).user_cache_dir))
    below = [
        caching._CacheLocator.get_suitable_cache_subpath(str(package / "module.py"))
        for package in packages
    ]
    return [package / "__pycache__" for package in packages] + [
        root / path for root in roots for path in below
    ]


def files() -> list[Path]:
    """Index and data files of the compiled kernels."""
    return sorted(
        path
        for folder in folders()
        if folder.is_dir()
        for path in folder.iterdir()
        if path.suffix in (".nbi", ".nbc")
    )


def clear() -> int:
    """Remove them; returns how many."""
    found = files()
    for path in found:
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            os.remove(path)
    return len(found)
