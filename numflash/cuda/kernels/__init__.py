"""The forward kernels that ship, as factories over head size, blocks and options."""
