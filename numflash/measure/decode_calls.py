"""What decoding one token costs, by each storage of a `KVCache`, beside PyTorch and OpenVINO.

PyTorch's rival is the call that folds the query heads of a group into rows, (B, Hkv, G, D): one
reading of each key for all of them. It is up to three times as fast as `enable_gqa=True`. OpenVINO
keeps keys and values in 8 bits, and its call appends the token, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np

from ..cache.kvcache import KVCache
from ..jit import threads
from .metrics import errors as errors_of
from .short_calls import PEER, PEER_BFLOAT16
from .timing import in_turns

SHAPES = (  # (query heads, KV heads, tokens, D)
    (14, 2, 256, 64),
    (14, 2, 1024, 64),
    (14, 2, 4096, 64),
    (32, 8, 1024, 128),
    (32, 8, 4096, 128),
    (32, 8, 32768, 128),
    (64, 8, 8192, 128),
)
DTYPES = ("float32", "bfloat16", "int8", "int4")
PEER_U8 = "OpenVINO u8"
CHECKED = 2  # query heads that are held against float64
ROUNDS = 15
PIECE = 4096  # tokens of an append

Calls = dict[str, Callable[[], np.ndarray]]
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def arrays(shape: tuple[int, int, int, int]) -> Arrays:
    """Random query (1, H, 1, D), keys and values (1, Hkv, S, D), float32."""
    heads, kv_heads, length, d = shape
    rng = np.random.default_rng(length)
    key, value = (rng.standard_normal((1, kv_heads, length, d), np.float32) for _ in range(2))
    return rng.standard_normal((1, heads, 1, d), np.float32), key, value


def filled(key: np.ndarray, value: np.ndarray, dtype: str) -> KVCache:
    """A cache of one sequence."""
    _, kv_heads, length, d = key.shape
    cache = KVCache(1, kv_heads, d, length, dtype)
    for n in range(0, length, PIECE):
        cache.append(key[:, :, n : n + PIECE], value[:, :, n : n + PIECE])
    return cache


def calls(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> Calls:
    """Contenders by name, each a call without arguments that gives (1, H, 1, D)."""
    found: Calls = {}
    for dtype in DTYPES:
        out = np.empty_like(query)
        found[dtype] = functools.partial(filled(key, value, dtype).decode, query, out=out)
    if find_spec("torch"):
        import torch

        folded = query.reshape(1, key.shape[1], -1, key.shape[3])
        tensors = [torch.from_numpy(x) for x in (folded, key, value)]
        short = [x.bfloat16() for x in tensors]

        def attend(operands: list[torch.Tensor]) -> np.ndarray:
            with torch.inference_mode():
                out = torch.nn.functional.scaled_dot_product_attention(*operands)
            return out.float().numpy().reshape(query.shape)

        found[PEER] = functools.partial(attend, tensors)
        found[PEER_BFLOAT16] = functools.partial(attend, short)
    if find_spec("openvino"):
        from .openvino_decode import token_call

        found[PEER_U8] = token_call(query, key, value, threads.count())
    return found


def errors(contenders: Calls, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> dict:
    """Relative L1 of each contender's first heads against float64."""
    s = query[0, :CHECKED, 0].astype(np.float64) @ key[0, 0].T.astype(np.float64)
    s *= key.shape[3] ** -0.5
    p = np.exp(s - s.max(1, keepdims=True))
    exact = p @ value[0, 0] / p.sum(1, keepdims=True)
    return {
        name: errors_of(call()[0, :CHECKED, 0], exact).relative_l1
        for name, call in contenders.items()
    }


def measure(
    shape: tuple[int, int, int, int], rounds: int = ROUNDS
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of one token by each contender, medians of turns, and the errors."""
    operands = arrays(shape)
    contenders = calls(*operands)
    wrong = errors(contenders, *operands)
    return in_turns(contenders, rounds), wrong
