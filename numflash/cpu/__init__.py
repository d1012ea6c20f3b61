"""Kernels for CPUs, and one launcher for each job.

`launch_float`, `launch_int8`, `launch_decode`, `launch_backward`.

Launchers turn a validated problem into kernel calls. May import: `validation`, `numerics`, `tiling`,
`jit`; never `cuda` or the oracle.
"""
