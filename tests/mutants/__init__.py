"""Planted faults that the tests must notice: `make mutants`."""
