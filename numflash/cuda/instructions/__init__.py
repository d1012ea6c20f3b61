"""The instructions that Numba lacks: inline PTX, and the tensor maps that its copies read.

May import `compile.target` (Numba's intrinsics) and `errors`.
"""
