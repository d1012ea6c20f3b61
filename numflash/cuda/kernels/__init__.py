"""The kernels that ship: forward, backward, decode and quantisation, as factories over constants.

May import `compile`, `instructions`, `numerics` and `tiling`; launchers fill in the arguments.
"""
