"""The peers of `python -m numflash.cuda.validate`.

PyTorch's flash and cuDNN backends, and the kernel of Triton's tutorial.

A peer that is not there, that raises or whose result is wrong is named with the reason; it never
stops the others.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterator
from typing import Any

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
    """The module, where it sees a card."""
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


def times(
    b: int,
    h: int,
    length: int,
    d: int,
    causal: bool,
    gradients: bool = False,
    triton: Callable | None = None,
) -> Iterator[tuple[str, float | str]]:
    """(name, median seconds, or why there are none) of each peer on float16 operands of one shape."""
    try:
        torch = pytorch()
    except Missing as error:
        yield "torch", str(error)
        return
    q, k, v = (
        torch.randn(b, h, length, d, device="cuda", dtype=torch.float16, requires_grad=gradients)
        for _ in range(3)
    )
    grad = torch.randn(b, h, length, d, device="cuda", dtype=torch.float16)
    attention = torch.nn.functional.scaled_dot_product_attention
    backend = torch.nn.attention.SDPBackend
    only = torch.nn.attention.sdpa_kernel
    with only(backend.MATH):  # one head in float32
        expected = attention(*(x[:1, :1].detach().float() for x in (q, k, v)), is_causal=causal)

    def backward(out: Any) -> Any:
        return torch.autograd.grad(out, (q, k, v), grad)

    def timed(forward: Callable[[], Any]) -> float | str:
        try:
            if not torch.allclose(forward()[:1, :1].detach().float(), expected, atol=TOLERANCE):
                return "its result is wrong"  # and is never timed
            return (
                seconds(torch, backward, forward)
                if gradients
                else seconds(torch, lambda _: forward())
            )
        except (
            Exception
        ) as error:  # compilers and backends have errors of their own for what they do not take
            return f"{type(error).__name__}: {error}"

    for name, which in (
        ("torch flash", backend.FLASH_ATTENTION),
        ("torch cudnn", backend.CUDNN_ATTENTION),
    ):
        with only(which):
            found = timed(lambda: attention(q, k, v, is_causal=causal))
        yield name, found
    if triton is not None and not gradients:
        yield "triton tutorial", timed(lambda: triton(q, k, v, causal, d**-0.5))
