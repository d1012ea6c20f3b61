"""The libraries whose arrays lie on a card (PyTorch, CuPy, Numba).

What is read of an array, how another of its kind is made, and the caller's stream.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from ...errors import ArgumentTypeError
from ...interop import device_tensors
from ...interop.arrays import on_device
from ..device.driver import device_of, open_driver

EMPTY = device_tensors.ALIGNMENT  # where an array without numbers, which has no address, counts as
# shape, strides in bytes (None: contiguous), name of the dtype
Described = tuple[tuple[int, ...], tuple[int, ...] | None, str]


class PyTorch:
    """Tensors."""

    @staticmethod
    def look(x: Any) -> tuple[int, tuple[Any, ...]]:
        """Address, and form: the shape and all else that says how its numbers lie there."""
        return x.data_ptr(), (x.shape, x.stride(), x.dtype, x.element_size())

    @staticmethod
    def describe(form: tuple[Any, ...]) -> Described:
        """What a form says."""
        shape, strides, dtype, size = form
        return shape, tuple(n * size for n in strides), str(dtype).removeprefix("torch.")

    @staticmethod
    def empty(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """Another array on the same device, contiguous."""
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)

    @staticmethod
    def stream(x: Any) -> int:
        """The caller's stream for kernels that read x."""
        return int(sys.modules["torch"].cuda.current_stream(x.device).cuda_stream)


class CuPy:
    """CuPy's arrays."""

    @staticmethod
    def look(x: Any) -> tuple[int, tuple[Any, ...]]:
        """As of a tensor, by the interface that every library of device arrays has."""
        described = x.__cuda_array_interface__
        form = tuple(described["shape"]), described.get("strides"), described["typestr"]
        return described["data"][0], form

    @staticmethod
    def describe(form: tuple[Any, ...]) -> Described:
        """What a form says."""
        shape, strides, typestr = form
        return shape, strides, np.dtype(typestr).name

    @staticmethod
    def empty(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """Another array on the same device, contiguous."""
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(like.device.id):
            return cupy.empty(shape, dtype)

    @staticmethod
    def stream(x: Any) -> int:
        """The current stream of the array's device."""
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(x.device.id):
            return int(cupy.cuda.get_current_stream().ptr)


class Numba:
    """Numba's device arrays."""

    look, describe = CuPy.look, CuPy.describe

    @staticmethod
    def empty(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """Another array on the same device, contiguous, and of the same stream: `copy_to_host` waits
        for no other.
        """
        from ..compile.target import cuda

        address, _ = Numba.look(like)
        with cuda.gpus[device_of(open_driver(), address)]:
            return cuda.device_array(shape, dtype, stream=like.stream)

    @staticmethod
    def stream(x: Any) -> int:
        """The array's own stream, or the default one."""
        return int(getattr(x.stream, "handle", None) or 0 if x.stream else 0)


class Seen(NamedTuple):
    """A device array as its library describes it; nothing of the array itself is held."""

    library: Any
    address: int
    form: tuple[Any, ...]  # the shape first


def seen(name: str, x: Any) -> Seen | None:
    """A device array of a library that is served; None for anything else.

    Raises what `device_tensors.check` does.
    """
    library = None if x is None else _library_of(x)
    if library is None:
        return None
    if library is PyTorch:
        device_tensors.check(name, x)
    address, form = library.look(x)
    return Seen(library, address or EMPTY, form)


def _library_of(x: Any) -> Any:
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(x, torch.Tensor):
        return PyTorch if x.is_cuda else None
    if cupy is not None and isinstance(x, cupy.ndarray):
        return CuPy
    numba = type(x).__module__.startswith(("numba.cuda", "numba_cuda"))
    return Numba if numba and on_device(x) else None


def refused(name: str, x: Any) -> ArgumentTypeError:
    """Why `seen` does not see x."""
    kind = type(x).__name__
    if on_device(x):
        return ArgumentTypeError(
            f"{name}: got {kind}; allowed on a card: PyTorch tensors, CuPy and Numba arrays"
        )
    return ArgumentTypeError(
        f"{name}: got {kind} in host memory; allowed: device arrays, as the query is one"
    )
