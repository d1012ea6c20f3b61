"""Arrays on the card (PyTorch, CuPy, Numba).

Results of the same kind, on the caller's stream, nothing copied.

A NumPy array whose data pointer is a device address represents such an array while the arguments
are checked: views, shapes and strides are computed as for any array, and nothing ever reads through
it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ... import validation
from ...errors import ArgumentError, ArgumentTypeError, UnsupportedError
from ...interop.arrays import Memory, import_array, on_device
from ...validation.options import Options
from ..device import device_at
from ..device.driver import device_of, open_driver

DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Remote:
    """A device array: `array` represents it, `dtype` is its own, `empty` makes another of its kind,
    `stream` is the caller's.
    """

    array: np.ndarray
    dtype: str
    empty: Callable[[tuple[int, ...], str], Any]
    stream: int


def take(name: str, x: Any, dtypes: tuple[str, ...] = DTYPES) -> Remote:
    """Describe a device array; raises for a library or dtype that is not served."""
    torch = sys.modules.get("torch")
    cupy = sys.modules.get("cupy")
    if torch is not None and isinstance(x, torch.Tensor):
        dtype = str(x.dtype).removeprefix("torch.")
        strides = tuple(n * x.element_size() for n in x.stride())

        def empty(shape: tuple[int, ...], wanted: str) -> Any:
            return torch.empty(shape, dtype=getattr(torch, wanted), device=x.device)

        return _remote(
            name,
            dtypes,
            x.data_ptr(),
            tuple(x.shape),
            strides,
            dtype,
            empty,
            torch.cuda.current_stream(x.device).cuda_stream,
        )
    if not on_device(x):
        raise ArgumentTypeError(
            f"{name}: got {type(x).__name__} in host memory; allowed: device arrays, as the query is one"
        )
    described = x.__cuda_array_interface__
    dtype = np.dtype(described["typestr"])
    shape = tuple(described["shape"])
    strides = described.get("strides")
    if cupy is not None and isinstance(x, cupy.ndarray):
        with cupy.cuda.Device(x.device.id):  # its current stream, too, is the device's
            stream = cupy.cuda.get_current_stream().ptr

        def like(shape: tuple[int, ...], wanted: str) -> Any:
            with cupy.cuda.Device(x.device.id):
                return cupy.empty(shape, wanted)

        return _remote(name, dtypes, described["data"][0], shape, strides, dtype.name, like, stream)
    if type(x).__module__.startswith(("numba.cuda", "numba_cuda")):
        from ..compile.target import cuda

        def another(shape: tuple[int, ...], wanted: str) -> Any:
            with cuda.gpus[device_of(open_driver(), described["data"][0])]:
                return cuda.device_array(shape, wanted)

        return _remote(
            name,
            dtypes,
            described["data"][0],
            shape,
            strides,
            dtype.name,
            another,
            getattr(x.stream, "handle", None) or 0 if x.stream else 0,
        )
    raise ArgumentTypeError(
        f"{name}: got {type(x).__name__}; allowed on a card: PyTorch tensors, CuPy and Numba arrays"
    )


def _remote(
    name: str,
    dtypes: tuple[str, ...],
    pointer: int,
    shape: tuple,
    strides: tuple | None,
    dtype: str,
    empty: Callable,
    stream: int,
) -> Remote:
    if dtype not in dtypes:
        raise ArgumentTypeError(
            f"{name}: got dtype {dtype}; allowed on a card: {', '.join(dtypes)}"
        )
    stored = np.dtype("uint16" if dtype == "bfloat16" else dtype)
    steps = None if strides is None else tuple(int(n) for n in strides)  # None: contiguous
    array = np.asarray(Memory(pointer or 16, tuple(int(n) for n in shape), steps, stored.str))
    return Remote(array, dtype, empty, int(stream))


def attention(
    query: Any,
    key: Any,
    value: Any,
    options: Options,
    with_functions: Callable[[validation.Problem], validation.Problem] | None = None,
) -> Any:
    """`numflash.attention` for device arrays.

    `with_functions` adds score and mask functions to the problem; what they capture is in host
    memory and uploaded once per content.

    A mask must be on the card (bool or float32). Sinks may be on the card (float32) or on the host,
    like all small arguments (lengths, slopes).
    """
    from .. import launch
    from . import quantized

    sinks = options.sinks
    there = None
    layout = options.layout
    if sinks is not None and on_device(sinks):
        options = replace(options, sinks=None)
    taken, problem = _described(query, key, value, options)
    if with_functions is not None:
        problem = with_functions(problem)
    if problem.precision == "int8":
        quantized.check(problem)
    own = taken[0].dtype
    ndim = taken[0].array.ndim
    b, h, _, length, s, _, dv = problem.shape
    if sinks is not None and problem.sinks is None:
        there = take("sinks", sinks, ("float32",)).array
        if there.shape != (h,) or not there.flags.c_contiguous:
            raise ArgumentError(
                f"sinks: got shape {there.shape}; allowed: contiguous (H,) = ({h},)"
            )
        problem = replace(problem, sinks=there)
    shape = (b, h, length, dv) if layout == "bhld" else (b, length, h, dv)
    device = device_at(_named(taken, problem, there))
    out = taken[0].empty(shape, own)
    lse = taken[0].empty((b, h, length), "float32")
    results = take("out", out).array, take("lse", lse).array
    if layout == "blhd":
        results = results[0].swapaxes(1, 2), results[1]
    if 0 not in (b, length):
        stream = taken[0].stream
        if problem.precision == "int8":
            room = taken[0].empty((quantized.scratch_bytes(problem, device.arch),), "uint8")
            scratch = take("scratch", room, ("uint8",)).array
            for step in quantized.plan(problem, device.arch, own, results, scratch):
                device.submit(step, stream)
        else:
            device.submit(launch.plan(problem, device.arch, results), stream)
    if ndim < 4:
        out = out.reshape(shape[4 - ndim :])
        lse = lse.reshape((b, h, length)[4 - ndim :])
    if not options.return_lse:
        return out
    if layout == "blhd":
        if not hasattr(lse, "swapaxes"):
            raise UnsupportedError(
                f"return_lse: {type(lse).__name__} cannot be transposed; allowed with it: layout 'bhld'"
            )
        lse = lse.swapaxes(1, 2)
    return out, lse


def attention_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    options: Options,
) -> tuple[Any, Any, Any]:
    """`numflash.attention_backward` for device arrays.

    A mask is on that card too, the rows' statistics get memory of the query's kind.

    Sinks are in the LSE already.
    """
    from .. import launch_backward

    taken, problem = _described(query, key, value, replace(options, sinks=None))
    layout = options.layout
    lead = taken[0].array.shape[:-1]
    given = []
    for name, x, shape, dtype in (
        ("grad_out", dense(grad_out), (*lead, problem.shape[6]), taken[0].dtype),
        ("out", out, (*lead, problem.shape[6]), taken[0].dtype),
        ("lse", lse, lead, "float32"),
    ):
        remote = take(name, x)
        if remote.dtype != dtype:
            raise ArgumentTypeError(f"{name}: got dtype {remote.dtype}; allowed on a card: {dtype}")
        if remote.array.shape != shape:
            raise ArgumentError(
                f"{name}: got shape {remote.array.shape}; allowed: {shape} with query {taken[0].array.shape}"
            )
        given.append(remote.array)
    grad, o = (
        validation.tensor(name, x, layout)
        for name, x in (("grad_out", given[0]), ("out", given[1]))
    )
    rows = validation.tensor("lse", given[2][..., None], layout)[..., 0]
    beside = zip(("grad_out", "out", "lse"), given, strict=True)
    device = device_at([*_named(taken, problem), *beside])
    found = [x.empty(x.array.shape, x.dtype) for x in taken]
    stats = taken[0].empty(launch_backward.statistics_shape(problem), "float32")
    results = [
        validation.tensor(name, take(name, x).array, layout)
        for name, x in zip(("dq", "dk", "dv"), found, strict=True)
    ]
    work = launch_backward.plan(
        problem, grad, o, rows, device.arch, (*results, take("statistics", stats).array)
    )
    for step in work.launches:
        device.submit(step, taken[0].stream)
    return found[0], found[1], found[2]


def _named(
    taken: list[Remote], problem: validation.Problem, sinks: np.ndarray | None = None
) -> list[tuple[str, np.ndarray]]:
    """The arrays on the card with their arguments' names."""
    found = [(n, x.array) for n, x in zip(("query", "key", "value"), taken, strict=True)]
    mask = problem.bias if problem.mask is None else problem.mask
    more = (("attn_mask", mask), ("sinks", sinks))
    return found + [(name, x) for name, x in more if x is not None]


def dense(x: Any) -> Any:
    """x, or a copy if it is a PyTorch tensor without rows in memory.

    `sum().backward()` returns one number, expanded.
    """
    return x.contiguous() if hasattr(x, "contiguous") and x.stride(-1) != 1 else x


def _described(
    query: Any, key: Any, value: Any, options: Options
) -> tuple[list[Remote], validation.Problem]:
    """The operands and the mask as they are stored on the card, and the problem."""
    mask = options.attn_mask
    precision = options.precision
    if mask is not None:
        mask = take("attn_mask", mask, ("bool", "float32")).array
    taken = [take(n, x) for n, x in (("query", query), ("key", key), ("value", value))]
    own = taken[0].dtype
    ndim = taken[0].array.ndim
    if options.layout == "blhd" and ndim != 4:
        raise ArgumentError(
            f"query: got {ndim} dimensions; allowed on a card with layout 'blhd': 4"
        )
    if precision not in (None, own, "int8"):
        raise UnsupportedError(
            f"precision: got {precision!r} for {own} arrays on a card; allowed there: their own, 'int8'"
        )
    options = replace(options, attn_mask=mask, precision=precision or own)
    q, k, v = (replace(import_array("array", x.array), dtype=x.dtype) for x in taken)
    return taken, validation.problem_of((q, k, v), options)
