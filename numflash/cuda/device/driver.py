"""Calls of the CUDA driver that need care: errors, contexts, stream capture, tensor maps.

The rules are those of the CUDA driver API manual: "Stream Management" (capture), "Context
Management" and "Tensor Map Object Management".
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...errors import DriverError, UnsupportedError
from ..compile import code_version
from ..instructions.tensormap import ADDRESSES, TensorMap

# of an encoded tensor map; the alignment is the driver's rule
MAP_BYTES = 128
MAP_ALIGNMENT = 64
NOT_HERE = "impl: got 'cuda', but "  # how errors begin; those of a KV cache name its device
# the oldest that loads machine code of a CUDA version
DRIVERS = {12: "driver 525 or later", 13: "driver 580 or later"}


def check(driver: Any, result: tuple) -> Any:
    """The value of a driver call, or DriverError."""
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        if result[0] == driver.CUresult.CUDA_ERROR_NOT_INITIALIZED:
            raise DriverError(
                "CUDA driver: it is not initialised in this process, which was forked from one that had used the "
                "card; start processes by multiprocessing's 'spawn' instead"
            )
        _, text = driver.cuGetErrorString(result[0])
        raise DriverError(f"CUDA driver: {result[0].name}: {text.decode() if text else 'unknown'}")
    return result[1] if len(result) == 2 else result[1:]


@functools.cache
def open_driver() -> Any:
    """The driver's Python bindings, initialised.

    Raises
    ------
    UnsupportedError
        No bindings, no driver, or a driver that is older than the CUDA version whose machine code
        is made here.
    """
    try:
        from cuda.bindings import __version__, driver

        check(driver, driver.cuInit(0))
    except (ImportError, RuntimeError) as error:
        why = f"{error}: pip install 'numflash[cuda]'" if isinstance(error, ImportError) else error
        raise UnsupportedError(
            f"{NOT_HERE}there is no usable GPU here ({why}); 'cuda-emulator' runs the same "
            "kernels without one"
        ) from error
    major = code_version() or int(__version__.split(".")[0])
    there = check(driver, driver.cuDriverGetVersion())
    if there < 1000 * major:
        needed = DRIVERS.get(major, "a newer driver")
        raise UnsupportedError(
            f"{NOT_HERE}the driver here supports CUDA {there // 1000}.{there % 1000 // 10}; allowed: CUDA "
            f"{major}.0 or later ({needed}), because kernels are machine code of CUDA {major}"
        )
    return driver


class Active:
    """A `with` in which a context is the thread's current one.

    The one before is current again afterwards.
    """

    __slots__ = ("context", "driver", "pushed")

    def __init__(self, driver: Any, context: Any) -> None:
        self.driver, self.context, self.pushed = driver, context, False

    def __enter__(self) -> None:
        d = self.driver
        if int(check(d, d.cuCtxGetCurrent())) != int(self.context):
            check(d, d.cuCtxPushCurrent(self.context))
            self.pushed = True

    def __exit__(self, *failure: Any) -> None:
        if self.pushed:
            self.driver.cuCtxPopCurrent()


class Uncaptured:
    """A `with` in which this thread may allocate, load, free and wait while some stream is being
    captured.

    These calls are no part of the graph. Outside of it they would end the capture with an error.
    """

    __slots__ = ("before", "driver")

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def __enter__(self) -> None:
        d = self.driver
        relaxed = d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self.before = check(d, d.cuThreadExchangeStreamCaptureMode(relaxed))

    def __exit__(self, *failure: Any) -> None:
        self.driver.cuThreadExchangeStreamCaptureMode(self.before)


def capturing(driver: Any, stream: int) -> bool:
    """Whether launches on a stream are recorded into a graph instead of run."""
    status = check(driver, driver.cuStreamIsCapturing(stream))
    return status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE


@functools.cache
def _function(driver: Any, name: str, *types: Any) -> Callable[..., int]:
    """A function of the driver itself, where the bindings' wrapper of it is wrong."""
    address = check(driver, driver.cuGetProcAddress(name.encode(), 12000, 0))[0]
    return ctypes.CFUNCTYPE(ctypes.c_int, *types)(int(address))


@functools.cache
def _asker(driver: Any) -> Callable[[int, int], int]:
    """cuPointerGetAttribute for the device's number: (where to write it, address) -> status.

    Some versions of the bindings say 0 for every address (NVIDIA/cuda-python, issue 2928).
    """
    p = ctypes.c_void_p
    ask = _function(driver, "cuPointerGetAttribute", p, ctypes.c_int, ctypes.c_uint64)
    attribute = int(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
    return lambda to, address: ask(to, attribute, address)


def device_of(driver: Any, address: int) -> int:
    """The number of the device that holds an address."""
    ordinal = ctypes.c_int()
    status = _asker(driver)(ctypes.addressof(ordinal), address)
    if status:
        check(driver, (driver.CUresult(status),))
    return ordinal.value


class Encoder:
    """A tensor map as cuTensorMapEncodeTiled takes it, but for its array's address.

    The bindings' wrapper has the driver write to memory that is not aligned as required.
    """

    def __init__(self, driver: Any, tensor: TensorMap) -> None:
        self._driver, self._tensor = driver, tensor
        i, u, p = ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p
        types = (p, i, u, ctypes.c_uint64, p, p, p, p, i, i, i, i)
        self._encode = _function(driver, "cuTensorMapEncodeTiled", *types)
        self._checked = False
        x, kinds, swizzles = tensor.array, driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
        names = {"float16": "FLOAT16", "uint16": "BFLOAT16", "int8": "UINT8", "float32": "FLOAT32"}
        kind = getattr(kinds, "CU_TENSOR_MAP_DATA_TYPE_" + names[x.dtype.name])
        swizzle = getattr(swizzles, f"CU_TENSOR_MAP_SWIZZLE_{'128B' if tensor.swizzle else 'NONE'}")
        promotion = driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B
        self._kind = int(kind), x.ndim
        # axes innermost first, strides from the second axis on
        self._sizes = (
            np.array(x.shape[::-1], np.uint64),
            np.array(tensor.strides()[::-1], np.int64),
            np.array(tensor.box[::-1], np.uint32),
            np.ones(x.ndim, np.uint32),
        )
        self._layout = (
            *(a.ctypes.data for a in self._sizes),
            0,  # no interleaving
            int(swizzle),
            int(promotion),
            0,  # zeros beyond the array
        )

    def __call__(self, to: int, address: int) -> None:
        """Write the bytes that TMA reads of an array at this address."""
        if not self._checked or address % ADDRESSES:
            self._tensor.check(address)
            self._checked = True
        status = self._encode(to, *self._kind, address, *self._layout)
        if status:
            check(self._driver, (self._driver.CUresult(status),))


def encode(encoders: Sequence[Encoder], addresses: Sequence[int]) -> np.ndarray:
    """(n, 128) bytes that TMA reads, of tensor maps and the addresses of their arrays."""
    count = len(encoders)
    memory = np.zeros(MAP_BYTES * count + MAP_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % MAP_ALIGNMENT
    table = memory[start : start + MAP_BYTES * count].reshape(count, MAP_BYTES)
    to = table.ctypes.data
    for encoder, address in zip(encoders, addresses, strict=True):
        encoder(to, address)
        to += MAP_BYTES
    return table
