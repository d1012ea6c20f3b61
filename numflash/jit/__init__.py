"""How numflash compiles and runs kernels.

JIT options, compiled kernels on disk, threads, and scratch memory.

Knows nothing of attention. May import: `errors` only.
"""
