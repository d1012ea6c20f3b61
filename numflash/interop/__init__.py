"""What callers hand in: arrays of any library, in and out, and the checks of single arguments.

May import `jit` and `errors`.
"""
