"""The float32 and bfloat16 attention kernel.

Packing, register tiles, and the fused loop in `flash_float`.

`flash_rows` is the same algorithm row by row in plain loops. May import: `cpu.isa`,
`cpu.semantics`, `numerics`, `tiling`, `jit`.
"""
