"""The KV cache: its storage, pages and arguments, and the decode engine on top of it.

Reaches the kernels through `launch_decode` of a device. May import: `validation`, `numerics`,
`interop`, `tiling`, `jit`.
"""
