"""What kernels, caches and oracle need alike: number formats, INT8 operands, scales, rotation, merging.

Each module has its own float64 tests. May import `interop`, `tiling`, `jit`, `errors`.
"""
