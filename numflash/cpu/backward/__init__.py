"""The gradient of attention: by register tiles, or row by row in `backward_rows`.

`held` finds the rows that float32 holds, `tiled` arranges their memory, `head_rows` their operands,
`flash_backward` is the kernel.

May import: `cpu.isa`, `cpu.floats`, `cpu.semantics`, `cpu.launch_float`, `validation`, `numerics`,
`tiling`, `jit`.
"""
