"""`python -m numflash.cuda.validate`.

A card against the emulator's results, then its times beside its peers.

May import: everything of `cuda` and what it may import, the oracle, and the KV cache.
"""
