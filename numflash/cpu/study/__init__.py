"""Kernels of the course, one step at a time: what it costs to leave out each idea.

May import: everything; of `commands` only the tables, for a program that prints one.
"""
