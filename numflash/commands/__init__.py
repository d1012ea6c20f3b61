"""The command line.

One file for each command that is more than a few lines, what they do in `actions`, the parser in `cli`.

Nothing imports it but `python -m numflash`. May import: everything.
"""
