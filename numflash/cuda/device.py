"""The card: its driver, contexts and loaded kernels, through cuda-bindings.

numba-cuda's own launcher cannot give a block more than 48 KB of shared memory and costs tens of microseconds, so kernels are
loaded and launched here: one parameter block per kernel and thread, filled in place, one driver call.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from .compile import ARCHITECTURES, Compiled, compiled
from .operands import Launch
from .tensormap import TensorMap

EMULATED_ARCH = "sm_80"


_CTYPES: dict[str, Any] = {
    "int32": ctypes.c_int32,
    "uint32": ctypes.c_uint32,
    "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64,
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
}


class DriverError(UnsupportedError):
    """The driver refused a call; the message has its words."""


def check(driver: Any, result: tuple) -> Any:
    """The value of a driver call, or DriverError."""
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(result[0])
        raise DriverError(f"CUDA driver: {result[0].name}: {text.decode() if text else 'unknown'}")
    return result[1] if len(result) == 2 else result[1:]


def words_of(parameter: str) -> tuple[str, ...]:
    """What a parameter is passed as. A Numba array: two pointers to its owner, size, item size, address, shape, strides."""
    return (
        ("int64",) * (5 + 2 * int(parameter[5:])) if parameter.startswith("array") else (parameter,)
    )


def encode(driver: Any, tensor: TensorMap, address: int) -> np.ndarray:
    """The 128 bytes that TMA reads: axes innermost first, strides from the second axis on."""
    kind = getattr(
        driver.CUtensorMapDataType,
        "CU_TENSOR_MAP_DATA_TYPE_"
        + {"float16": "FLOAT16", "uint16": "BFLOAT16", "int8": "UINT8", "float32": "FLOAT32"}[
            tensor.array.dtype.name
        ],
    )
    swizzles = driver.CUtensorMapSwizzle
    swizzle = (
        swizzles.CU_TENSOR_MAP_SWIZZLE_128B
        if tensor.swizzle
        else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE
    )
    whole = tensor.array
    encoded = check(
        driver,
        driver.cuTensorMapEncodeTiled(
            kind,
            whole.ndim,
            address,
            [driver.cuuint64_t(n) for n in whole.shape[::-1]],
            [driver.cuuint64_t(n) for n in whole.strides[::-1][1:]],
            [driver.cuuint32_t(n) for n in tensor.box[::-1]],
            [driver.cuuint32_t(1)] * whole.ndim,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
    )
    return np.array([int(n) for n in encoded.opaque], np.uint64).view(np.uint8)


class Kernel:
    """A cubin loaded into the current context.

    Call it with the grid, the stream's handle and one number per parameter (for an array those of `words_of`); `threads` and the
    dynamic shared memory are the compiled kernel's own. Thread-safe: each thread has its own parameter block.
    """

    def __init__(self, driver: Any, item: Compiled) -> None:
        self._driver, self.item = driver, item
        self._library = check(driver, driver.cuLibraryLoadData(item.code, [], [], 0, [], [], 0))
        kernel = check(driver, driver.cuLibraryGetKernel(self._library, item.name.encode()))
        self._function = check(driver, driver.cuKernelGetFunction(kernel))
        if item.shared_bytes > 48 * 1024:  # more than 48 KB needs an attribute of the function
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver, driver.cuFuncSetAttribute(self._function, attribute, item.shared_bytes))
        if item.cluster > 1:  # all three or none
            attribute = driver.CUfunction_attribute
            for axis, blocks in (("WIDTH", item.cluster), ("HEIGHT", 1), ("DEPTH", 1)):
                which = getattr(attribute, f"CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_{axis}")
                check(driver, driver.cuFuncSetAttribute(self._function, which, blocks))
        self._local = threading.local()

    def _block(self) -> tuple[list[Any], Any, int]:
        values: list[Any] = [_CTYPES[t](0) for p in self.item.parameters for t in words_of(p)]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        self._local.block = values, pointers, ctypes.addressof(pointers)
        return self._local.block

    def __call__(self, grid: tuple[int, int, int], stream: int, *arguments: Any) -> None:
        """Launch with device pointers and numbers as arguments."""
        block = getattr(self._local, "block", None) or self._block()
        for slot, value in zip(block[0], arguments, strict=True):
            slot.value = value
        item = self.item
        launched = self._driver.cuLaunchKernel(
            self._function, *grid, item.threads, 1, 1, item.shared_bytes, stream, block[2], 0
        )
        if launched[0]:
            check(self._driver, launched)


class _Copies:
    """Host arrays on the card for the length of a `with`: {id(array): address}; written ones come back at the end."""

    def __init__(self, driver: Any, arrays: list[np.ndarray]) -> None:
        self.driver = driver
        self.arrays = list({id(x): x for x in arrays}.values())

    def __enter__(self) -> dict[int, int]:
        d = self.driver
        self.address: dict[int, int] = {}
        for x in self.arrays:
            self.address[id(x)] = int(check(d, d.cuMemAlloc(max(16, x.nbytes))))
            check(d, d.cuMemcpyHtoD(self.address[id(x)], x.ctypes.data, x.nbytes))
        return self.address

    def __exit__(self, failure: Any, *details: Any) -> None:
        d = self.driver
        if failure is None:
            check(d, d.cuCtxSynchronize())
            for x in self.arrays:
                if x.flags.writeable:
                    check(d, d.cuMemcpyDtoH(x.ctypes.data, self.address[id(x)], x.nbytes))
        for address in self.address.values():
            d.cuMemFree(address)


class Device:
    """The first card: its architecture, and its loaded kernels."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver

            check(driver, driver.cuInit(0))
            handle = self._handle = check(driver, driver.cuDeviceGet(0))
        except (ImportError, RuntimeError) as error:
            why = (
                f"{error}: pip install 'numflash[cuda]'"
                if isinstance(error, ImportError)
                else error
            )
            raise UnsupportedError(
                f"impl: got 'cuda', but there is no usable GPU here ({why}); 'cuda-emulator' runs the same "
                "kernels without one"
            ) from error
        attribute = driver.CUdevice_attribute
        major, minor = (
            check(driver, driver.cuDeviceGetAttribute(a, handle))
            for a in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        self.driver, self.arch = driver, arch_of(major, minor)
        count = attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        self.multiprocessors = check(driver, driver.cuDeviceGetAttribute(count, handle))
        self.name = check(driver, driver.cuDeviceGetName(128, handle)).split(b"\0")[0].decode()
        self._context = check(driver, driver.cuDevicePrimaryCtxRetain(handle))
        self._kernels: dict[Compiled, Kernel] = {}
        self._constants: OrderedDict[bytes, int] = OrderedDict()

    def use(self) -> None:
        """Make the card's context this thread's own."""
        check(self.driver, self.driver.cuCtxSetCurrent(self._context))

    def kernel(self, item: Compiled) -> Kernel:
        """The loaded kernel of a cubin; loads it the first time."""
        self.use()
        if item not in self._kernels:
            self._kernels[item] = Kernel(self.driver, item)
        return self._kernels[item]

    def prepared(
        self,
        launches: Launch | Sequence[Launch],
        use: Callable[[Callable[[], None]], Any],
        persist: Sequence[np.ndarray] = (),
    ) -> Any:
        """`use` the launches, in order, as one function without arguments, their arrays on the card; results are back afterwards.

        `persist` names arrays that should stay in L2 meanwhile: one window over all of them (`Device.persist`).
        """
        steps = [launches] if isinstance(launches, Launch) else launches
        flat = [
            [x for group in step.args for x in (group if isinstance(group, tuple) else (group,))]
            for step in steps
        ]
        maps = [m for args in flat for x in args if isinstance(x, list) for m in x]
        with self.copies(
            [x for args in flat for x in args if isinstance(x, np.ndarray)]
            + [m.array for m in maps]
        ) as address:
            table = np.array([encode(self.driver, m, address[id(m.array)]) for m in maps], np.uint8)
            with self.copies([table]) as at:
                next_map, calls = at[id(table)], []
                for step, args in zip(steps, flat, strict=True):
                    kernel = self.kernel(
                        compiled(step.factory, step.arch, "cubin", **step.constants)
                    )
                    numbers: list[Any] = []
                    for x, parameter in zip(args, kernel.item.parameters, strict=True):
                        if isinstance(x, list):
                            numbers.append(next_map)
                            next_map += table.shape[1] * len(x)
                        elif not isinstance(x, np.ndarray):
                            numbers.append(x)
                        elif parameter.startswith("array"):
                            numbers += [
                                0,
                                0,
                                x.size,
                                x.itemsize,
                                address[id(x)],
                                *x.shape,
                                *x.strides,
                            ]
                        else:
                            numbers.append(address[id(x)])
                    calls.append(functools.partial(kernel, step.grid, 0, *numbers))

                def work() -> None:
                    for call in calls:
                        call()

                if not persist:
                    return use(work)
                low = min(address[id(x)] for x in persist)
                self.persist(0, low, max(address[id(x)] + x.nbytes for x in persist) - low)
                try:
                    return use(work)
                finally:
                    self.persist(0, 0, 0)

    def submit(self, launch: Launch, stream: int) -> None:
        """Enqueue a launch whose arrays lie on the card; what is small and comes from the host is uploaded once per content."""
        kernel = self.kernel(compiled(launch.factory, launch.arch, "cubin", **launch.constants))
        numbers: list[Any] = []
        for x in (
            x for group in launch.args for x in (group if isinstance(group, tuple) else (group,))
        ):
            if isinstance(x, list):
                maps = [encode(self.driver, m, m.array.ctypes.data) for m in x]
                numbers.append(self.constant(np.array(maps, np.uint8)))
            elif isinstance(x, np.ndarray):
                numbers.append(x.ctypes.data if id(x) in launch.resident else self.constant(x))
            else:
                numbers.append(x)
        kernel(launch.grid, stream, *numbers)

    def persist(self, stream: int, address: int, nbytes: int, hit_ratio: float = 1.0) -> None:
        """Ask that this range, read again by every block of queries (keys and values), stays in L2 for launches on the stream.

        CUDA C++ guide, "L2 set-aside cache for persisting accesses". nbytes 0 ends it. A card refuses more than its largest window
        and its largest part of L2: the range is cut to the one, the hit ratio lowered to the other. On a card that can set nothing
        aside (before sm_80) nothing happens.
        """
        d = self.driver
        self.use()
        attribute = d.CUdevice_attribute
        window_most, aside_most = (
            check(d, d.cuDeviceGetAttribute(a, self._handle))
            for a in (
                attribute.CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE,
                attribute.CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE,
            )
        )
        if not aside_most or not window_most:
            return
        nbytes = min(nbytes, window_most)
        aside = min(nbytes, aside_most)
        hit_ratio = min(hit_ratio, aside / nbytes) if nbytes else hit_ratio
        check(d, d.cuCtxSetLimit(d.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE, aside))
        value = d.CUstreamAttrValue()
        window = value.accessPolicyWindow
        window.base_ptr, window.num_bytes, window.hitRatio = address, nbytes, hit_ratio
        window.hitProp = d.CUaccessProperty.CU_ACCESS_PROPERTY_PERSISTING
        window.missProp = d.CUaccessProperty.CU_ACCESS_PROPERTY_STREAMING
        value.accessPolicyWindow = window
        check(
            d,
            d.cuStreamSetAttribute(
                stream, d.CUstreamAttrID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW, value
            ),
        )

    def constant(self, x: np.ndarray) -> int:
        """Address of a copy of x on the card; the last 256 different ones are kept."""
        d, content = self.driver, x.tobytes()
        if content not in self._constants:
            address = int(check(d, d.cuMemAlloc(max(16, x.nbytes))))
            check(d, d.cuMemcpyHtoD(address, content, len(content)))
            self._constants[content] = address
            if len(self._constants) > 256:
                d.cuMemFree(
                    self._constants.popitem(last=False)[1]
                )  # waits for the kernels that may still read it
        self._constants.move_to_end(content)
        return self._constants[content]

    def copies(self, arrays: list[np.ndarray]) -> _Copies:
        """Host arrays on the card while the `with` lasts."""
        self.use()
        return _Copies(self.driver, arrays)


def median_seconds(
    device: Device, work: Callable[[], None], repeats: int = 20, stream: int = 0
) -> float:
    """Median time of one launch, by events on the stream, after five launches to warm up."""
    d = device.driver
    start, stop = (check(d, d.cuEventCreate(0)) for _ in range(2))
    times = []
    for n in range(repeats + 5):
        check(d, d.cuEventRecord(start, stream))
        work()
        check(d, d.cuEventRecord(stop, stream))
        check(d, d.cuEventSynchronize(stop))
        if n >= 5:
            times.append(float(check(d, d.cuEventElapsedTime(start, stop))) / 1e3)
    return statistics.median(times)


def arch_of(major: int, minor: int) -> str:
    """The newest architecture that kernels are built for and that a card of this compute capability runs."""
    if (major, minor) == (9, 0):
        return "sm_90a"
    same = [
        name
        for name, (cc, _) in ARCHITECTURES.items()
        if cc[0] == major and cc[1] <= minor and len(cc) == 2
    ]
    if not same:
        raise UnsupportedError(
            f"compute capability {major}.{minor}: there is no kernel; allowed: {', '.join(ARCHITECTURES)}"
        )
    return same[-1]


@functools.cache
def current_device() -> Device:
    """The first card; raises UnsupportedError where there is none."""
    return Device()
