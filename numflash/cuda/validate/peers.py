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

from ..device import Device
from ..device.device import ALTOGETHER, GROUP, MOST_LAUNCHES
from .attention import shapes, timed, title
from .steps import Row, Step, nothing

TOLERANCE = 1e-2  # of weights and results in float16, on standard normal numbers
WARM = 2
REPEATS = 20
TUTORIAL = "triton tutorial"
FIRST_CALL = 60.0  # seconds: PyTorch is loaded, and Triton's kernel compiled and tuned


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
    except Exception as error:  # Triton has errors of its own, as without a driver for the card
        raise Missing(f"{path}: {error}") from error


def pytorch() -> Any:
    """The module, where it finds a card."""
    try:
        import torch
        import torch.nn.attention

        there = torch.cuda.is_available()
    except Exception as error:  # a damaged installation raises more than ImportError
        raise Missing(f"{type(error).__name__}: {error}") from error
    if not there:
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
    try:
        found["triton"] = importlib.import_module("triton").__version__
    except Exception as error:
        found["triton"] = f"none: {type(error).__name__}: {error}"
    return found


def seconds(torch: Any, work: Callable[[], Any]) -> float:
    """Median seconds of one call among others: as `device.median_seconds` takes them of ours."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def group(calls: int) -> float:
        start.record()
        for _ in range(calls):
            work()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3 / calls

    group(WARM)
    one = max(group(1), 1e-6)
    calls = max(1, min(MOST_LAUNCHES, round(GROUP / one)))
    groups = max(5, min(REPEATS, int(ALTOGETHER / (calls * one))))
    return statistics.median(group(calls) for _ in range(groups))


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
                return seconds(torch, forward)
            out, again = forward(), torch.autograd.grad
            return seconds(torch, lambda: again(out, self.operands, self.grad, retain_graph=True))
        except Exception as error:  # backends have errors of their own for what they do not take
            return f"{type(error).__name__}: {error}"


def times(
    shape: tuple[int, int, int, int],
    causal: bool,
    gradients: bool = False,
    triton: Callable | None = None,
    only: str = "",
) -> Iterator[tuple[str, float | str]]:
    """(name, median seconds, or why there are none) of each peer, or of one, on float16 operands
    (B, H, L, D).

    Raises Missing without PyTorch.
    """
    torch = pytorch()
    q, k, v = (
        torch.randn(*shape, device="cuda", dtype=torch.float16, requires_grad=gradients)
        for _ in range(3)
    )
    grad = torch.randn(*shape, device="cuda", dtype=torch.float16)
    attention = torch.nn.functional.scaled_dot_product_attention
    backend = torch.nn.attention.SDPBackend
    within = torch.nn.attention.sdpa_kernel
    with within(backend.MATH):  # one head in float32
        expected = attention(*(x[:1, :1].detach().float() for x in (q, k, v)), is_causal=causal)
    work = _Shape(torch, (q, k, v), grad, expected, gradients)
    for name, which in (
        ("torch flash", backend.FLASH_ATTENTION),
        ("torch cudnn", backend.CUDNN_ATTENTION),
    ):
        if only in ("", name):
            with within(which):
                found = work.timed(functools.partial(attention, q, k, v, is_causal=causal))
            yield name, found
    for name, call in _flash_attention():
        if only in ("", name):
            yield name, work.timed(functools.partial(call, q, k, v, causal))
    if triton is not None and not gradients and only in ("", TUTORIAL):
        yield TUTORIAL, work.timed(lambda: triton(q, k, v, causal, shape[3] ** -0.5))


def timings(lengths: Iterable[int], gradients: bool, triton: str | None) -> Iterator[Step]:
    """A step per peer and shape, on the shapes of our own."""
    names = ["torch flash", "torch cudnn", *(name for name, _ in _flash_attention())]
    names += [TUTORIAL] * (triton is not None and not gradients)
    said: set[str] = set()  # what is missing is said once
    for shape, causal in shapes(lengths):
        for name in names:
            yield _timing(name, shape, causal, gradients, triton, said)


def _timing(
    name: str,
    shape: tuple[int, ...],
    causal: bool,
    gradients: bool,
    triton: str | None,
    said: set[str],
) -> Step:
    full = f"{name}, backward" if gradients else name

    def run(device: Device) -> Iterator[Row]:
        b, h, _, length, _, d = shape
        try:
            kernel = tutorial(triton) if triton and name == TUTORIAL else None
            for _, found in times((b, h, length, d), causal, gradients, kernel, name):
                yield timed(full, shape, causal, found, gradients)
        except Missing as error:
            if str(error) not in said:
                said.add(str(error))
                yield {"kernel": full, "error": str(error)}

    return Step(title(full, shape, causal), nothing, run, FIRST_CALL)
