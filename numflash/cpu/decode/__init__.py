"""Attention of a few new tokens over a KV cache, split over keys.

Appending, register tiles, softmax, the loop in `flash_decode`.

May import: `cpu.isa`, `cpu.int8`, `cpu.floats`, `numerics`, `interop`, `tiling`, `jit`.
"""
