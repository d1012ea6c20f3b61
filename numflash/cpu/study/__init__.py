"""Kernels of the course, one step at a time: what it costs to leave out each idea.

May import everything but `commands`.
"""
