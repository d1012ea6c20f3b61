"""Random appends, shares, resets and decodes of a cache against plain lists of tokens."""

import numpy as np
from decode_cases import TOLERANCE, B, D, G, H, expected, relative, tokens
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracles import draw

from numflash.cache.kvcache import KVCache
from numflash.errors import CacheFullError


class Generation(RuleBasedStateMachine):
    """Random appends, shares, resets and decodes against plain lists of tokens."""

    @initialize(dtype=st.sampled_from(["int8", "float32"]), paged=st.booleans())
    def start(self, dtype, paged):
        self.dtype, self.paged, self.seed = dtype, paged, 0
        self.cache = KVCache(
            B, G, D, 300, dtype, 128 if paged else None, pages=4 if paged else None
        )
        self.lists = [[], []]

    @rule(
        n=st.sampled_from([0, 1, 2, 63, 126, 128, 131]),
        counts=st.one_of(st.none(), st.tuples(st.integers(0, 5), st.integers(0, 5))),
    )
    def append(self, n, counts):
        self.seed += 1
        key, value = tokens(n, self.seed)
        take = [n, n] if counts is None else [min(c, n) for c in counts]
        grown = [len(x) + t for x, t in zip(self.lists, take, strict=True)]
        try:
            self.cache.append(key, value, counts=None if counts is None else take)
        except CacheFullError:
            assert max(grown) > 300 or self.paged
            return
        assert max(grown) <= 300
        for b in range(B):
            self.lists[b] += [(key[b, :, i], value[b, :, i]) for i in range(take[b])]

    @precondition(lambda self: self.paged and self.lists[0] and not self.lists[1])
    @rule(share=st.floats(0, 1))
    def share(self, share):
        n = int(share * len(self.lists[0]))
        try:
            self.cache.share(0, 1, n)
        except CacheFullError:
            return
        self.lists[1] = self.lists[0][:n]

    @rule(b=st.integers(0, 1))
    def reset(self, b):
        self.cache.reset(b)
        self.lists[b] = []

    @rule(splits=st.sampled_from([None, 1, 2, 3]))
    def decode(self, splits):
        query = draw((B, H, 1, D), 99)
        out = self.cache.decode(query, splits=splits)
        for b, held in enumerate(self.lists):
            if held:
                key, value = (np.stack([x[i] for x in held], 1)[None] for i in (0, 1))
                assert (
                    relative(out[b : b + 1], expected(query[b : b + 1], key, value)[0])
                    <= TOLERANCE[self.dtype]
                )
            else:
                assert not out[b].any()

    @invariant()
    def same_lengths(self):
        if hasattr(self, "lists"):
            assert self.cache.lengths.tolist() == [len(x) for x in self.lists]


TestGeneration = Generation.TestCase
TestGeneration.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)
