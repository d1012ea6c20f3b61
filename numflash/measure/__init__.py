"""Measuring: timers, errors against float64, the roof of the machine, contenders of a benchmark,
tables on the terminal.

May import: everything that computes; never `commands` or `course`.
"""
