"""The peers of `python -m numflash.cuda.validate`.

PyTorch's flash and cuDNN backends, FlashAttention, and the kernel of Triton's tutorial.

A peer that is not there, that raises or whose result is wrong is named with the reason; it never
stops the others.
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from .attention import shapes, timed

TOLERANCE = 1e-2  # of weights and results in float16, on standard normal numbers
WARM = 5
REPEATS = 20


class Missing(Exception):
    """A peer cannot take part; the message says why."""


def tutorial(path: str) -> Callable:
    """`attention(q, k, v, causal, scale)` of Triton's tutorial, from its file (the wheel does not
    hold it).
    """
    try:
        spec = importlib.util.spec_from_file_location("triton_tutorial", path)
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        spec.loader.exec_module(module)  # type: ignore[union-attr]
        return module.attention
    except (
        ImportError,
        OSError,
        AttributeError,
        RuntimeError,
    ) as error:  # the last: Triton has no driver for the card
        raise Missing(f"{path}: {error}") from error


def pytorch() -> Any:
    """The module, where it finds a card."""
    try:
        import torch
        import torch.nn.attention
    except ImportError as error:
        raise Missing(str(error)) from error
    if not torch.cuda.is_available():
        raise Missing(f"PyTorch {torch.__version__} sees no card")
    return torch


def software() -> dict[str, str]:
    """Versions of what takes part, and the card as PyTorch names it."""
    try:
        torch = pytorch()
    except Missing as error:
        return {"torch": f"none: {error}"}
    found = {
        "torch": torch.__version__,
        "torch device": torch.cuda.get_device_name(0),
        "cudnn": str(torch.backends.cudnn.version()),
    }
    return found | (
        {"triton": importlib.import_module("triton").__version__}
        if importlib.util.find_spec("triton")
        else {}
    )


def seconds(
    torch: Any, work: Callable[[Any], Any], before: Callable[[], Any] = lambda: None
) -> float:
    """Median time of one call by events, after a few to warm up.

    `work` takes what `before` gives, untimed, ahead of each.
    """
    times = []
    for n in range(WARM + REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        given = before()
        start.record()
        work(given)
        stop.record()
        stop.synchronize()
        if n >= WARM:
            times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def _flash_attention() -> Iterator[tuple[str, Callable[..., Any]]]:
    """(name, call(q, k, v, causal) on (B, H, L, D)) of each installed version of FlashAttention."""
    for name, module in (
        ("FlashAttention-3", "flash_attn_interface"),
        ("FlashAttention-2", "flash_attn"),
    ):
        if importlib.util.find_spec(module) is None:
            continue

        def call(q: Any, k: Any, v: Any, causal: bool, module: str = module) -> Any:
            run = importlib.import_module(module).flash_attn_func
            out = run(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        yield name, call


class _Shape(NamedTuple):
    """Operands of one timing, and the first head's result in float32."""

    torch: Any
    operands: tuple[Any, ...]
    grad: Any
    expected: Any
    gradients: bool

    def timed(self, forward: Callable[[], Any]) -> float | str:
        """Median seconds of a peer, or why there are none; a wrong result is never timed."""
        torch = self.torch
        try:
            found = forward()[:1, :1].detach().float()
            if not torch.allclose(found, self.expected, atol=TOLERANCE):
                return "its result is wrong"
            if not self.gradients:
                return seconds(torch, lambda _: forward())
            return seconds(
                torch, lambda out: torch.autograd.grad(out, self.operands, self.grad), forward
            )
        except Exception as error:  # backends have errors of their own for what they do not take
            return f"{type(error).__name__}: {error}"


def times(
    shape: tuple[int, int, int, int],
    causal: bool,
    gradients: bool = False,
    triton: Callable | None = None,
) -> Iterator[tuple[str, float | str]]:
    """(name, median seconds, or why there are none) of each peer on float16 (B, H, L, D) operands."""
    try:
        torch = pytorch()
    except Missing as error:
        yield "torch", str(error)
        return
    q, k, v = (
        torch.randn(*shape, device="cuda", dtype=torch.float16, requires_grad=gradients)
        for _ in range(3)
    )
    grad = torch.randn(*shape, device="cuda", dtype=torch.float16)
    attention = torch.nn.functional.scaled_dot_product_attention
    backend = torch.nn.attention.SDPBackend
    only = torch.nn.attention.sdpa_kernel
    with only(backend.MATH):  # one head in float32
        expected = attention(*(x[:1, :1].detach().float() for x in (q, k, v)), is_causal=causal)
    work = _Shape(torch, (q, k, v), grad, expected, gradients)
    for name, which in (
        ("torch flash", backend.FLASH_ATTENTION),
        ("torch cudnn", backend.CUDNN_ATTENTION),
    ):
        with only(which):
            found = work.timed(functools.partial(attention, q, k, v, is_causal=causal))
        yield name, found
    for name, call in _flash_attention():
        yield name, work.timed(functools.partial(call, q, k, v, causal))
    if triton is not None and not gradients:
        yield "triton tutorial", work.timed(lambda: triton(q, k, v, causal, shape[3] ** -0.5))


def rows(lengths: Iterable[int], gradients: bool, triton: str | None) -> Iterator[dict[str, Any]]:
    """The timings of all peers, on the shapes of our own."""
    kernel = None
    if triton:
        try:
            kernel = tutorial(triton)
        except Missing as error:
            yield {"kernel": "triton tutorial", "error": str(error)}
    for shape, causal in shapes(lengths):
        b, h, _, length, _, d = shape
        for name, found in times((b, h, length, d), causal, gradients, kernel):
            full = f"{name}, backward" if gradients else name
            yield timed(full, shape, causal, found, gradients)
            if name == "torch":  # it is not installed, or finds no card
                return
