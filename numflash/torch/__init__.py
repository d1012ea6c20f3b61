"""numflash inside PyTorch.

`scaled_dot_product_attention` with PyTorch's signature, gradients, and a switch for whole models.

A model that somebody else wrote, as it is, on numflash's kernels:

>>> import torch, numflash.torch
>>> layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True).eval()
>>> x = torch.randn(2, 100, 64)
>>> with torch.no_grad(), numflash.torch.use() as routed:
...     y = layer(x)
>>> routed.calls, torch.allclose(y, layer(x), atol=1e-4)
(1, True)

In integers, where no gradient is needed: `use(precision="int8")`. To train, call the function as
PyTorch's own:

>>> q, k, v = (torch.randn(1, 8, 128, 64, requires_grad=True) for _ in range(3))
>>> numflash.torch.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
>>> q.grad.shape
torch.Size([1, 8, 128, 64])

`attention` takes what PyTorch's function has no name for (windows, soft caps, sinks, key lengths)
and returns the log-sum-exp; `attention_varlen` takes sequences packed one behind the other.

Tensors are read in place. CPU tensors go to the CPU kernels, on as many threads as PyTorch
uses; CUDA tensors to those of `numflash.cuda`, on the current stream. Nothing falls back to
PyTorch's kernels unless `use(fallback=True)` says so.
"""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("numflash.torch needs PyTorch: pip install 'numflash[torch]'") from error

from .checks import SdpaError
from .flex import flex_attention
from .routing import use
from .sdpa import attention, scaled_dot_product_attention
from .varlen import attention_varlen

__all__ = [
    "SdpaError",
    "attention",
    "attention_varlen",
    "flex_attention",
    "scaled_dot_product_attention",
    "use",
]
