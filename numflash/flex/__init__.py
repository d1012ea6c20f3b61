"""Score and mask functions written in Python, traced and fused into the kernels."""
