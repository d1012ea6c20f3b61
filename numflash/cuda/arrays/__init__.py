"""Calls with arrays that are on a card (PyTorch, CuPy, Numba): nothing is copied to the host.

May import the launchers and what these may import.
"""

from .calls import attention, attention_backward

__all__ = ["attention", "attention_backward"]
