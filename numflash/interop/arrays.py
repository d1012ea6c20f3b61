"""Arrays in and out: NumPy, ml_dtypes bfloat16, PyTorch, and anything that supports DLPack.

Results are of the caller's kind.

Inside, bfloat16 is always the uint16 array of its bits (docs/pitfalls.md, "float16 and bfloat16
arrays"), and every array is typed writable, because a read-only input would compile every kernel a
second time.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from ctypes import addressof, c_char
from typing import Any, NamedTuple

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError
from . import halves
from .device_tensors import refuse_grad

CPU_DEVICE = 1  # kDLCPU
WORD = 4  # bytes that kernels pack at a time: rows that begin within a word are copied
STORAGE = {"bfloat16": "uint16"}
RESULTS = {"float64": "float32", "uint16": "bfloat16", "int8": "float32"}  # of other inputs
HALVES = "eH"  # NumPy's characters of float16, and of the uint16 that bfloat16 is


class Imported(NamedTuple):
    """An argument as a NumPy array.

    array : the data, bfloat16 as uint16 bits
    dtype : the caller's dtype by name; "bfloat16" and "uint16" share their storage
    export : NumPy array (bits where bfloat16) and dtype name -> the caller's kind
    """

    array: np.ndarray
    dtype: str
    export: Callable[[np.ndarray, str], Any]


@functools.cache
def dtype_name(dtype: np.dtype) -> str:
    """dtype.name, cached: NumPy builds the string at each access, 4 us."""
    return dtype.name


def widen(x: np.ndarray) -> np.ndarray:
    """Float array from a float array or from bfloat16 bits (uint16 -> float32)."""
    return halves.widen(x) if x.dtype == np.uint16 else x


def convert(x: np.ndarray, dtype: str) -> np.ndarray:
    """A float array (or bfloat16 bits) as "float32", "float16" or "bfloat16" (bits).

    The same array where nothing changes.
    """
    if dtype_name(x.dtype) in (dtype, STORAGE.get(dtype)):
        return x
    if x.dtype.char in HALVES:
        x = halves.widen(x)
    if x.dtype == np.float64 and dtype == "float16":  # rounded once
        with np.errstate(all="ignore"):
            return x.astype(dtype)
    x = to_float32(x)
    return x if dtype == "float32" else halves.narrow(x, dtype)


def to_float32(x: np.ndarray) -> np.ndarray:
    """A float array (or bfloat16 bits) as contiguous, aligned, writable float32.

    The same memory where it is.
    """
    if x.dtype == np.float32 and x.flags.carray:  # before errstate, which takes a microsecond
        return x
    if x.dtype.char in HALVES:
        return halves.widen(x)
    with np.errstate(all="ignore"):
        return carray(np.ascontiguousarray(x, np.float32))


def carray(x: np.ndarray) -> np.ndarray:
    """An array of any dtype as contiguous, aligned and writable.

    The same memory where it is contiguous and aligned.
    """
    if x.flags.carray:
        return x
    return writable(np.require(np.ascontiguousarray(x), requirements="A"))


class ArrayInterface:
    """Carries an address, on the host or a card, into NumPy.

    `owner` is kept as long as the array.
    """

    def __init__(
        self,
        pointer: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        typestr: str,
        owner: Any = None,
    ) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (pointer, False),
            "shape": shape,
            "strides": strides,
            "typestr": typestr,
        }


def writable(x: np.ndarray) -> np.ndarray:
    """The same memory typed writable (no kernel writes to its inputs).

    Read-only arrays are another type to Numba.
    """
    return (
        x
        if x.flags.writeable
        else np.asarray(ArrayInterface(x.ctypes.data, x.shape, x.strides, x.dtype.str, x))
    )


def lent(x: np.ndarray) -> np.ndarray:
    """The same memory, which this array does not keep alive."""
    return np.asarray(ArrayInterface(x.ctypes.data, x.shape, x.strides, x.dtype.str))


def location(x: Any) -> tuple[int, Any, Any, Any] | None:
    """Address, shape, strides and dtype of an array's numbers.

    None for what is neither a NumPy array nor a dense tensor on the CPU without a gradient, and for
    arrays without memory.
    """
    if type(x) is np.ndarray:
        return (x.ctypes.data, x.shape, x.strides, x.dtype) if x.size else None
    torch = sys.modules.get("torch")
    if torch is None or type(x) is not torch.Tensor or x.layout is not torch.strided:
        return None
    hidden = x.is_neg() or x.is_nested or x.requires_grad
    if hidden or not x.is_cpu or not x.data_ptr():
        return None
    return x.data_ptr(), x.shape, x.stride(), x.dtype


def address(x: np.ndarray) -> int:
    """Where a contiguous array lies, 0 for an empty one; `x.ctypes.data` takes eight times as long."""
    if not x.size:
        return 0
    at: Any = x
    return addressof(c_char.from_buffer(at)) if x.flags.writeable else int(x.ctypes.data)


def spread(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """`np.broadcast_to`, but writable where x is.

    Raises
    ------
    ValueError
        x does not broadcast to the shape.
    """
    lead = len(shape) - x.ndim
    if lead < 0 or not x.flags.c_contiguous:
        return np.broadcast_to(x, shape)
    steps = [0] * lead
    for size, step, wanted in zip(x.shape, x.strides, shape[lead:], strict=True):
        if size not in (1, wanted):
            return np.broadcast_to(x, shape)
        steps.append(0 if size == 1 else step)
    return np.ndarray(shape, x.dtype, x, 0, steps)


def import_array(name: str, x: Any) -> Imported:
    """Take one argument in.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        Not an array, a dtype without numbers, or a tensor that would lose its gradient.
    UnsupportedError
        An array in GPU memory.
    """
    if isinstance(x, np.ndarray):
        return _import_numpy(name, x)
    if x is None or isinstance(x, type):  # a class has the methods of its arrays
        raise ArgumentTypeError(f"{name}: got {x!r}; allowed: an array")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return _import_torch(name, x, torch)
    if _is_tracer(x):
        raise ArgumentTypeError(
            f"{name}: got a JAX tracer, which has no numbers yet; allowed: arrays. Call numflash outside jit, "
            "grad and vmap, or inside jit through jax.pure_callback"
        )
    if on_device(x):
        raise UnsupportedError(
            f"{name}: the array is in GPU memory; allowed: arrays in host memory"
        )
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _import_dlpack(name, x)
    try:
        array = np.asarray(x)
    except ValueError as error:
        raise ArgumentTypeError(
            f"{name}: got {type(x).__name__} ({error}); allowed: an array"
        ) from None
    if array.dtype.kind == "O":
        raise ArgumentTypeError(f"{name}: got {type(x).__name__}; allowed: an array of numbers")
    return _import_numpy(name, array)


def import_integers(name: str, x: Any) -> np.ndarray:
    """Take one argument of integers in.

    Raises
    ------
    ArgumentTypeError
        Another dtype, and what `import_array` refuses.
    """
    array, dtype, _ = import_array(name, x)
    if dtype == "bfloat16" or array.dtype.kind not in "iu":  # whose bits are stored as integers
        raise ArgumentTypeError(f"{name}: got dtype {dtype}; allowed: integers")
    return array


def _is_tracer(x: Any) -> bool:
    """Whether x is a JAX tracer: an array of a function that is being traced."""
    return any(
        kind.__name__ == "Tracer" and kind.__module__.split(".")[0] == "jax"
        for kind in type(x).__mro__
    )


def on_device(x: Any) -> bool:
    """Whether x is in CUDA memory."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return x.is_cuda
    return hasattr(x, "__cuda_array_interface__")


def _import_numpy(name: str, x: np.ndarray) -> Imported:
    if isinstance(x, np.ma.MaskedArray):
        raise ArgumentTypeError(
            f"{name}: got a masked array; allowed: plain arrays, with attn_mask for what is hidden"
        )
    dtype = dtype_name(x.dtype)
    caller = x.dtype.newbyteorder("=")
    if x.dtype.kind == "O" or x.dtype.kind in "USmM" or x.dtype.names:
        raise ArgumentTypeError(
            f"{name}: got {type(x).__name__} of dtype {x.dtype}; allowed: an array of numbers"
        )

    def export(out: np.ndarray, wanted: str) -> np.ndarray:
        return out.view(caller) if wanted == "bfloat16" and dtype == "bfloat16" else out

    return Imported(np.asarray(_array_memory(x)), dtype, export)


def _array_memory(x: np.ndarray) -> np.ndarray:
    """bfloat16 as bits, other numbers in the machine's byte order."""
    x = x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))
    return x.view(np.uint16) if dtype_name(x.dtype) == "bfloat16" else x


def _tensor_memory(name: str, x: Any, torch: Any) -> np.ndarray:
    """A tensor's numbers, bfloat16 as bits, after the checks of what a dtype does not say."""
    if not x.is_cpu:
        raise UnsupportedError(
            f"{name}: the tensor is on device {x.device}; allowed: tensors on the CPU, or all on one CUDA card"
        )
    if x.requires_grad:
        if torch.is_grad_enabled():
            raise refuse_grad(name)
        x = x.detach()
    try:
        bits = x.view(torch.int16) if x.dtype is torch.bfloat16 else x
        array: np.ndarray = bits.numpy()
    except (TypeError, RuntimeError) as error:
        if x._is_zerotensor():
            check_memory(name, x)
        if x.is_neg():  # dense, but its numbers are not in its memory
            raise ArgumentTypeError(
                f"{name}: got a tensor with PyTorch's negative bit; allowed: {name}.resolve_neg()"
            ) from None
        raise ArgumentTypeError(
            f"{name}: got a tensor of {x.dtype}, {x.layout} ({error}); allowed: dense float tensors"
        ) from None
    check_memory(name, x)
    return array if bits is x else array.view(np.uint16)


def check_memory(name: str, x: Any) -> None:
    """Raise where a dense tensor has no memory: `untyped_storage().resize_(0)` leaves its shape, and zeros
    among the gradients of PyTorch's forward mode never had any.
    """
    if not x.data_ptr() and x.numel():
        reason = (
            "that stands for zeros, without memory"
            if x._is_zerotensor()
            else "whose memory was freed"
        )
        raise ArgumentError(
            f"{name}: got a tensor {reason}; allowed: a tensor that holds its numbers"
        )


def memory_of(name: str, x: Any) -> np.ndarray:
    """`import_array(name, x).array` of a NumPy array or a tensor of a dtype that was taken in before.

    Raises
    ------
    ArgumentTypeError, ArgumentError, UnsupportedError
        What a tensor can get wrong besides its dtype.
    """
    if type(x) is np.ndarray:
        return _array_memory(x)
    return _tensor_memory(name, x, sys.modules["torch"])


def _import_torch(name: str, x: Any, torch: Any) -> Imported:
    array = _tensor_memory(name, x, torch)

    def export(out: np.ndarray, wanted: str) -> Any:
        return (
            torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
            if wanted == "bfloat16"
            else torch.from_numpy(out)
        )

    return Imported(array, str(x.dtype).removeprefix("torch."), export)


def _import_copy(name: str, x: Any, namespace: Any) -> Imported | None:
    """bfloat16 of a library that gives it to NumPy, but not through DLPack (JAX).

    None for anything else.
    """
    as_array = getattr(namespace, "asarray", None)
    if str(getattr(x, "dtype", "")) != "bfloat16" or as_array is None:
        return None
    taken = _import_numpy(name, np.asarray(x))
    return Imported(taken.array, taken.dtype, lambda out, to: as_array(taken.export(out, to)))


def _import_dlpack(name: str, x: Any) -> Imported:
    if int(x.__dlpack_device__()[0]) != CPU_DEVICE:
        raise UnsupportedError(
            f"{name}: the array is on DLPack device {tuple(x.__dlpack_device__())}; allowed: host memory"
        )
    namespace = (
        x.__array_namespace__()
        if hasattr(x, "__array_namespace__")
        else sys.modules.get(type(x).__module__.split(".")[0])
    )
    give_back = getattr(namespace, "from_dlpack", None)
    if give_back is None:
        raise ArgumentTypeError(
            f"{name}: got {type(x).__name__}, whose library has no from_dlpack; allowed: NumPy arrays"
        )
    try:
        array = np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError) as error:
        taken = _import_copy(name, x, namespace)
        if taken is None:
            raise ArgumentTypeError(
                f"{name}: got {type(x).__name__} ({error}); allowed: float16, float32 and float64 arrays"
            ) from None
        return taken
    return Imported(array, array.dtype.name, lambda out, wanted: give_back(out))


def restore(x: np.ndarray | None, ndim: int, layout: str) -> Any:
    """(B, H, L, ...) back in the caller's layout and number of dimensions (`ndim` counts the
    query's), contiguous.
    """
    if x is None:
        return None
    if layout == "blhd":
        x = np.ascontiguousarray(x.swapaxes(1, 2))
        return x if ndim == 4 else x[0] if ndim == 3 else x[0, :, 0]
    return x.reshape(x.shape[4 - ndim :])


def deliver(out: np.ndarray, lse: Any, taken: Imported, return_lse: bool) -> Any:
    """The result as the kind and dtype of what came (float32 for float64), lse as float32 of the
    same kind.
    """
    dtype = RESULTS.get(taken.dtype, taken.dtype)
    result = taken.export(convert(out, dtype), dtype)
    return (result, taken.export(lse, "float32")) if return_lse else result
