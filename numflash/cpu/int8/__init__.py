"""The INT8 attention kernel.

Packing, register tiles, fixed-point softmax, and the fused loop in `flash_int8`.

`portable` is the same algorithm in plain loops: read it first. May import: `cpu.isa`,
`cpu.semantics`, `cpu.floats`, `numerics`, `interop`, `tiling`, `jit`.
"""
