"""What is said while kernels are compiled, and where they cannot be kept."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger("numflash")
ANNOUNCED_EVERY = 15.0  # seconds
_announced: list[float] = []  # when


def announce(name: str, kept: str = ": they are cached on disk") -> None:
    """Say what takes so long: at once, and again while kernels are still being compiled."""
    now = time.monotonic()
    if _announced and now < _announced[-1] + ANNOUNCED_EVERY:
        return
    if _announced:
        logger.warning("compiling one more numflash kernel: %s", name)
    else:
        logger.warning(
            "compiling numflash kernels, for their first call%s",
            f"{kept} (numflash warmup does it ahead)" if kept else "",
        )
    _announced.append(now)


_said: set[str] = set()  # what is said once


def elsewhere(chosen: str, folder: str) -> None:
    """Say once that the folder of NUMBA_CACHE_DIR is not the one in use."""
    if "elsewhere" not in _said:
        _said.add("elsewhere")
        logger.warning(
            "NUMBA_CACHE_DIR: got %r, where no folder can be made or written to; compiled kernels go to %s",
            chosen,
            folder,
        )


def not_saved(folder: str, error: Exception | str) -> None:
    """Say once that compiled kernels are lost with the process."""
    if "not saved" not in _said:
        _said.add("not saved")
        logger.warning(
            "compiled kernels are not saved in %s (%s): every process compiles them again",
            folder,
            error,
        )
