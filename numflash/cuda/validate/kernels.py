"""Which kernels a validation needs: found by planning its list, without running any."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ...arguments import EMULATED
from ...cache.kvcache import KVCache
from ...errors import UnsupportedError
from ..compile import Key
from . import attention, decode


def decode_kernels(arch: str, cases: Iterable) -> Iterator[Key]:
    """The kernels of caches on a card of this architecture, one new token and the case's number of
    them.
    """
    emulated = arch if arch in EMULATED else "sm_80"  # Blackwell runs what sm_80 does
    for _, dtype, d, n, new, splits, options in cases:
        found: list[Key] = []

        def note(factory: Any, constants: dict[str, Any], *_: Any, to: list[Key] = found) -> None:
            to.append((factory, arch, tuple(sorted(constants.items()))))

        try:
            cache = KVCache(
                decode.B,
                decode.G,
                d,
                n + 2 * new,
                dtype,
                device=f"cuda-emulator:{emulated}",
                **options,
            )
        except UnsupportedError:
            continue
        memory: Any = cache._memory
        memory.layout.card.run = note
        tokens = np.zeros((decode.B, decode.G, n, d), np.float32)
        query = np.zeros((decode.B, decode.H, new, d), np.float32)
        cache.append(tokens, tokens)
        token = tokens[:, :, :1].repeat(new, 2)
        cache.step(query, token, token, splits=splits)
        cache.decode(query, splits=splits)
        cache.close()
        yield from found


def needed(arch: str, quick: bool = False) -> set[Key]:
    """Every kernel that `python -m numflash.cuda.validate` launches on an architecture."""
    every = 3 if quick else 1
    launches = attention.launches(
        arch,
        attention.CASES[::every],
        attention.GRADIENTS[::every],
        attention.QUICK_LENGTHS if quick else attention.LENGTHS,
    )
    planned = {
        (work.factory, work.arch, tuple(sorted(work.constants.items())))
        for kind, work in launches
        if kind == "cubin"
    }
    return planned | set(decode_kernels(arch, decode.CASES[::every]))
