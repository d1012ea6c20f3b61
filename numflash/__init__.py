"""FlashAttention in pure Python, at hardware speed.

>>> import numpy as np, numflash
>>> rng = np.random.default_rng(0)
>>> query, key, value = (rng.standard_normal((1, 8, 128, 64), np.float32) for _ in range(3))
>>> numflash.attention(query, key, value, is_causal=True, precision="int8").shape
(1, 8, 128, 64)

attention, attention_int8, attention_backward : on arrays (B, H, L, D)
attention_varlen, attention_varlen_backward : on packed sequences (total, H, D)
flex_attention, create_block_mask, and_masks, or_masks, BlockMask : your own score and mask functions
KVCache : keys and values of a model that generates tokens
DecodeEngine : a KVCache behind a state machine, a token at a time
quantize, quantize_qkv, QuantizedTensor, merge_states : INT8 operands, partial results
accuracy, explain : the error of each precision on your arrays; how a problem is split into blocks
num_threads, set_num_threads, get_num_threads : threads of the kernels

`numflash.torch` and `numflash.transformers` bring them into models, `numflash.mpi` spreads sequences
over machines, `numflash.cuda` has the CUDA kernels; `numflash.errors` lists the exceptions. On the
command line: `numflash --help`. Public names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .jit.quota import limit_numba as _limit_numba

if TYPE_CHECKING:  # for type checkers and editors, which do not run `__getattr__`
    from .api import (
        attention,
        attention_backward,
        attention_int8,
        explain,
    )
    from .cache.engine import DecodeEngine
    from .cache.kvcache import KVCache
    from .flex.attention import flex_attention
    from .flex.masks import BlockMask, and_masks, create_block_mask, or_masks
    from .jit.threads import get_num_threads, num_threads, set_num_threads
    from .measure.metrics import accuracy
    from .numerics.merge import merge_states
    from .numerics.quantization import QuantizedTensor, quantize, quantize_qkv
    from .varlen import attention_varlen, attention_varlen_backward

    __version__: str

_limit_numba()

# public name -> module that defines it
_PUBLIC = {
    "attention": "api",
    "attention_backward": "api",
    "attention_int8": "api",
    "attention_varlen": "varlen",
    "attention_varlen_backward": "varlen",
    "explain": "api",
    "accuracy": "measure.metrics",
    "merge_states": "numerics.merge",
    "quantize": "numerics.quantization",
    "quantize_qkv": "numerics.quantization",
    "QuantizedTensor": "numerics.quantization",
    "KVCache": "cache.kvcache",
    "DecodeEngine": "cache.engine",
    "flex_attention": "flex.attention",
    "create_block_mask": "flex.masks",
    "BlockMask": "flex.masks",
    "and_masks": "flex.masks",
    "or_masks": "flex.masks",
    "get_num_threads": "jit.threads",
    "set_num_threads": "jit.threads",
    "num_threads": "jit.threads",
}
_MODULES = (
    "tiling",
    "errors",
    "reference",
)  # `numflash.tiling.using`, `numflash.errors.CacheFullError`
__all__ = [
    "BlockMask",
    "DecodeEngine",
    "KVCache",
    "QuantizedTensor",
    "__version__",
    "accuracy",
    "and_masks",
    "attention",
    "attention_backward",
    "attention_int8",
    "attention_varlen",
    "attention_varlen_backward",
    "create_block_mask",
    "explain",
    "flex_attention",
    "get_num_threads",
    "merge_states",
    "num_threads",
    "or_masks",
    "quantize",
    "quantize_qkv",
    "set_num_threads",
]


def __getattr__(name: str) -> Any:
    found: Any
    if name == "__version__":
        found = _version()
    elif name in _MODULES:
        found = importlib.import_module(f".{name}", __name__)
    elif name in _PUBLIC:
        found = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    else:
        raise AttributeError(f"module 'numflash' has no attribute {name!r}")
    globals()[name] = found  # the next access does not come here
    return found


def _version() -> str:
    """The version of the installed package.

    In a source tree that is not installed, the one in pyproject.toml.
    """
    from importlib import metadata
    from pathlib import Path

    try:
        return metadata.version("numflash")
    except metadata.PackageNotFoundError:
        project = Path(__file__).parent.parent / "pyproject.toml"
        lines = project.read_text(encoding="utf-8").splitlines() if project.is_file() else []
        found = [line.split('"')[1] for line in lines if line.startswith("version = ")]
        return found[0] if found else "unknown"


def __dir__() -> list[str]:
    return sorted(__all__)
