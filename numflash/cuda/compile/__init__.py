"""From a kernel's factory to machine code, offline: compiled, cached on disk, taken ready, read.

`python -m numflash.cuda.compile` fills a folder of ready cubins. May import `jit`, `tiling`,
`errors`; `target` alone imports numba-cuda.
"""

from .compiler import (
    ARCHITECTURES,
    Compiled,
    Key,
    Source,
    cache_directory,
    code_version,
    compile_source,
    compiled,
    is_ready,
    tool_versions,
)

__all__ = [
    "ARCHITECTURES",
    "Compiled",
    "Key",
    "Source",
    "cache_directory",
    "code_version",
    "compile_source",
    "compiled",
    "is_ready",
    "tool_versions",
]
