"""The gradient of attention: register tiles in `flash_backward`, row by row in `backward_rows`.

May import: `cpu.isa`, `cpu.floats`, `cpu.semantics`, `cpu.launch_float`, `validation`, `numerics`,
`tiling`, `jit`.
"""
