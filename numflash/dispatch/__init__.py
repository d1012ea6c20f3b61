"""From a checked problem to its kernels: the backend, plans of equal calls, what a call would cost.

May import everything that computes, and `reference`; not the public functions.
"""
