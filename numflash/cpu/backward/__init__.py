"""The gradient of attention: by register tiles, of few rows, or row by row in `backward_rows`.

`plans` chooses. `held` finds the rows that float32 holds, `tiled` arranges their memory, `head_rows` their
operands, `flash_backward` is the kernel of register tiles, `few_gradients` that of few rows, whose memory
`few_plan` arranges.

May import: `cpu.isa`, `cpu.floats`, `cpu.semantics`, `cpu.launch_float`, `validation`, `numerics`,
`tiling`, `jit`.
"""
