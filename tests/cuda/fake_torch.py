"""What `validate` uses of PyTorch and Triton, on NumPy arrays.

No card, no time passes, and a backend can be told to fail.
"""

import contextlib
import sys
import types

import numpy as np

import numflash


class Tensor(np.ndarray):
    """An array with the methods that are called."""

    detach = lambda self: self  # noqa: E731
    float = lambda self: self.astype(np.float32)  # noqa: E731
    transpose = np.ndarray.swapaxes


class Event:
    """Each call took a millisecond more than the last: medians show."""

    made = 0

    def __init__(self, enable_timing):
        assert enable_timing
        Event.made += 1
        self.n = Event.made

    def record(self):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, stop):
        return (stop.n - 1) // 2 % 25 + 1.0


def install(fail="", wrong="", card=True):
    """Put the fakes into `sys.modules`.

    `fail` and `wrong` name a backend that raises, or whose result is off.
    """
    torch, nn, attention = (
        types.ModuleType(name) for name in ("torch", "torch.nn", "torch.nn.attention")
    )
    chosen = []

    @contextlib.contextmanager
    def sdpa_kernel(backend):
        chosen.append(backend)
        yield
        chosen.pop()

    def randn(*shape, device, dtype, requires_grad=False):
        assert device == "cuda"
        return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype).view(Tensor)

    def scaled_dot_product_attention(q, k, v, is_causal):
        if chosen[-1] == fail:
            raise RuntimeError("No available kernel")
        out = numflash.attention(
            *(np.asarray(x, np.float32) for x in (q, k, v)), is_causal=is_causal, impl="reference"
        )
        return (out + (1 if chosen[-1] == wrong else 0)).view(Tensor)

    torch.__version__, torch.float16, torch.randn, torch.nn = "fake", np.float16, randn, nn
    torch.allclose = lambda a, b, atol: np.allclose(a, b, atol=atol)
    torch.autograd = types.SimpleNamespace(grad=lambda out, inputs, grad, retain_graph: inputs)
    torch.cuda = types.SimpleNamespace(
        is_available=lambda: card, get_device_name=lambda n: "fake card", Event=Event
    )
    torch.backends = types.SimpleNamespace(cudnn=types.SimpleNamespace(version=lambda: 91000))
    nn.attention, nn.functional = (
        attention,
        types.SimpleNamespace(scaled_dot_product_attention=scaled_dot_product_attention),
    )
    attention.sdpa_kernel = sdpa_kernel
    attention.SDPBackend = types.SimpleNamespace(
        MATH="math", FLASH_ATTENTION="flash", CUDNN_ATTENTION="cudnn"
    )
    triton = types.ModuleType("triton")
    triton.__version__, triton.__spec__ = "fake", types.SimpleNamespace(name="triton")
    sys.modules |= {
        "torch": torch,
        "torch.nn": nn,
        "torch.nn.attention": attention,
        "triton": triton,
    }
    return torch
