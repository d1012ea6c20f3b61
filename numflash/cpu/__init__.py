"""Kernels for CPUs, and one launcher for each job.

`launch_float`, `launch_int8`, `launch_decode`, `launch_backward`.

Launchers turn a validated problem into kernel calls. May import: `validation`, `numerics`, `interop`,
`tiling`, `jit`, `errors`; never `cuda` or the oracle.
"""
