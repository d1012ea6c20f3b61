"""`python -m numflash.cuda.validate`.

A card against the emulator's results, then its times beside its peers.

May import: everything of `cuda`, the oracle, and the KV cache.
"""
