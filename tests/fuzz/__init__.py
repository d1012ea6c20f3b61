"""A seeded fuzzer over the public functions, with an oracle of its own.

`python -m tests.fuzz --help`.
"""
