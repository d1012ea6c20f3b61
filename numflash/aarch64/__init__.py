"""AArch64 without an AArch64 machine: run cross-compiled kernels (`emulator`), and estimate what they cost (`estimate`)."""
