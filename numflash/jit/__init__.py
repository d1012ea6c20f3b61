"""How numflash compiles and runs kernels.

JIT options, compiled kernels on disk, threads, and scratch memory.

Contains nothing about attention. May import: `errors` only.
"""
