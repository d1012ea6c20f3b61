"""Instruction sets.

Which of them this machine has, and the vector operations that each one is given in LLVM IR.

The only place for instructions of one CPU. May import: `jit`, `tiling`, `errors`.
"""
