"""numflash: FlashAttention in pure Python, at hardware speed. The public names, imported on first use."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# public name -> module that defines it
_PUBLIC = {
    "attention": "api",
    "attention_backward": "api",
    "attention_int8": "api",
    "attention_varlen": "api",
    "explain": "api",
    "accuracy": "measure.metrics",
    "merge_states": "merge",
    "quantize": "quantization",
    "quantize_qkv": "quantization",
    "QuantizedTensor": "quantization",
    "KVCache": "cache.kvcache",
}
__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'numflash' has no attribute {name!r}")
    found = globals()[name] = getattr(
        importlib.import_module(f".{_PUBLIC[name]}", __name__), name
    )  # asked for once only
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
