"""The files of CUDA's cache on disk.

A module of its own, which no kernel imports: a change of it leaves what is stored valid.
"""

from __future__ import annotations

import re
from pathlib import Path

from .compiler import cache_directory

# kernels, the results that `validate.expected` keeps beside them, and what a process that was killed
# has left of either
OWN = re.compile(r"(\w+-)?sm_\d+a?-[0-9a-f]{20,40}\.(ptx|linked|cubin|npz)(\.tmp\.[0-9a-f]{16})?")


def cached_files() -> list[Path]:
    """What numflash has stored in `cache_directory`."""
    found = (*cache_directory().glob("*"), *cache_directory().glob("expected/*"))
    return sorted(path for path in found if OWN.fullmatch(path.name) and path.is_file())
