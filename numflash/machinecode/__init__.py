"""The machine code of a kernel.

Cross-compilation, reading assembly, an AArch64 emulator, and estimates of its cycles.

Nothing here runs in a call of `attention`. May import: everything that computes, `reference`, and
`measure`.
"""
