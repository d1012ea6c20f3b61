"""A card: its context and loaded kernels, and launches on it, through cuda-bindings.

numba-cuda's own launcher cannot give a block more than 48 KB of shared memory and costs tens of
microseconds, so kernels are loaded and launched here: one parameter block per kernel and thread,
filled in place, one driver call.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ...errors import ArgumentError, DriverError, UnsupportedError
from ..compile import ARCHITECTURES, Compiled, compiled
from .constants import Constants
from .driver import (
    MAP_BYTES,
    Active,
    Encoder,
    Uncaptured,
    capturing,
    check,
    device_of,
    encode,
    open_driver,
)
from .kernel import Kernel
from .operands import Launch
from .recorded import Recorded

# of `median_seconds`: of a group of launches, of all groups; launches of a group
GROUP, ALTOGETHER, MOST_LAUNCHES = 2e-3, 0.4, 50


class _Copies:
    """Host arrays on the card for the length of a `with`: {id(array): address}.

    Those of `written` come back at the end.
    """

    def __init__(
        self, driver: Any, arrays: list[np.ndarray], written: Sequence[np.ndarray] = ()
    ) -> None:
        self.driver = driver
        self.arrays = list({id(x): x for x in arrays}.values())
        self.written = list({id(x): x for x in written}.values())

    def __enter__(self) -> dict[int, int]:
        d = self.driver
        self.address: dict[int, int] = {}
        try:
            for x in self.arrays:
                self.address[id(x)] = int(check(d, d.cuMemAlloc(max(16, x.nbytes))))
                check(d, d.cuMemcpyHtoD(self.address[id(x)], x.ctypes.data, x.nbytes))
        except BaseException:  # an interrupt too, while gigabytes are copied
            self._release()
            raise
        return self.address

    def __exit__(self, failure: Any, *details: Any) -> None:
        d = self.driver
        try:
            if failure is None:
                check(d, d.cuCtxSynchronize())
                for x in self.written:
                    check(d, d.cuMemcpyDtoH(x.ctypes.data, self.address[id(x)], x.nbytes))
        finally:
            self._release()

    def _release(self) -> None:
        for address in self.address.values():
            self.driver.cuMemFree(address)


def _arguments(item: Compiled, args: list, address: Any, next_map: int) -> list[Any]:
    """What a launch hands over: for an array its address or the fields of Numba's array, for a list
    of tensor maps the address of the first, from `next_map` on.

    address : the id of an array -> where it is on the card
    """
    numbers: list[Any] = []
    for x, parameter in zip(args, item.parameters, strict=True):
        if isinstance(x, list):
            numbers.append(next_map)
            next_map += MAP_BYTES * len(x)
        elif not isinstance(x, np.ndarray):
            numbers.append(x)
        elif parameter.startswith("array"):
            numbers += [0, 0, x.size, x.itemsize, address[id(x)], *x.shape, *x.strides]
        else:
            numbers.append(address[id(x)])
    return numbers


class Device:
    """One card: its architecture, its loaded kernels, and its copies of what launches read from the
    host.

    Attributes
    ----------
    ordinal : the driver's number of the device
    arch, name, multiprocessors : the architecture kernels are built for, the device's name, its
        number of multiprocessors
    """

    def __init__(self, ordinal: int = 0) -> None:
        driver = open_driver()
        handle = self._handle = check(driver, driver.cuDeviceGet(ordinal))
        attribute = driver.CUdevice_attribute
        major, minor, count = (
            check(driver, driver.cuDeviceGetAttribute(a, handle))
            for a in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
            )
        )
        self.driver, self.ordinal, self.arch = driver, ordinal, arch_of(major, minor)
        self.multiprocessors = count
        self.name = check(driver, driver.cuDeviceGetName(128, handle)).split(b"\0")[0].decode()
        self._context = check(driver, driver.cuDevicePrimaryCtxRetain(handle))
        self._kernels: dict[Compiled, Kernel] = {}
        self._constants = Constants(driver)
        self._lock = threading.Lock()

    def active(self) -> Active:
        """A `with` in which the device's context is this thread's current one."""
        return Active(self.driver, self._context)

    @contextlib.contextmanager
    def stream(self) -> Iterator[int]:
        """A stream of its own for the length of a `with`."""
        d = self.driver
        with self.active():
            made = check(d, d.cuStreamCreate(d.CUstream_flags.CU_STREAM_DEFAULT))
        try:
            yield int(made)
        finally:
            with self.active():
                d.cuStreamDestroy(made)

    def kernel(self, item: Compiled) -> Kernel:
        """The loaded kernel of a cubin.

        Loads it the first time, which no capture of this thread forbids.
        """
        found = self._kernels.get(item)
        if found is None:
            with self._lock, self.active(), Uncaptured(self.driver):
                found = self._kernels.get(item) or Kernel(self.driver, item)
                self._kernels[item] = found
        return found

    def release(self, address: int) -> None:
        """Free memory of the device; waits for the kernels that may still read it.

        Garbage collection asks for it, also in a forked process, which has no driver.
        """
        with contextlib.suppress(DriverError), self.active(), Uncaptured(self.driver):
            self.driver.cuMemFree(address)

    def prepared(
        self,
        launches: Launch | Sequence[Launch],
        use: Callable[[Callable[[], None]], Any],
        persist: Sequence[np.ndarray] = (),
        blocks: int = 0,
        stream: int = 0,
    ) -> Any:
        """`use` the launches, in order, as one function without arguments, their arrays on the
        card; results are back afterwards.

        `persist`: arrays among those of the launches, or views of their whole memory, that should
        stay in L2 meanwhile: one window over all of them (`Device.persist`).

        `blocks`: of a persistent kernel, as if there were so many multiprocessors. `stream`: of
        the launches; the arrays are on the card before `use` is called.
        """
        steps = [launches] if isinstance(launches, Launch) else launches
        most = blocks or self.multiprocessors
        flat = [step.flat(most) for step in steps]
        maps = [m for args in flat for x in args if isinstance(x, list) for m in x]
        arrays = [x for args in flat for x in args if isinstance(x, np.ndarray)]
        arrays += [m.array for m in maps]
        written = [
            x
            for step, args in zip(steps, flat, strict=True)
            for x in (args if step.written is None else step.written)
            if isinstance(x, np.ndarray) and x.flags.writeable
        ]
        with self.active(), _Copies(self.driver, arrays, written) as address:
            encoders = [Encoder(self.driver, m) for m in maps]
            table = encode(encoders, [address[id(m.array)] for m in maps])
            with _Copies(self.driver, [table]) as at:
                next_map = at[id(table)]
                calls = []
                for step, args in zip(steps, flat, strict=True):
                    item = compiled(step.factory, step.arch, "cubin", **step.constants)
                    numbers = _arguments(item, args, address, next_map)
                    next_map += MAP_BYTES * sum(len(x) for x in args if isinstance(x, list))
                    grid = step.blocks(most)
                    calls.append(functools.partial(self.kernel(item), grid, stream, *numbers))

                def work() -> None:
                    for call in calls:
                        call()

                if stream:
                    check(self.driver, self.driver.cuCtxSynchronize())
                if not persist:
                    return use(work)
                copies = {x.ctypes.data: address[id(x)] for x in arrays}
                starts = [copies[x.ctypes.data] for x in persist]
                ends = [start + x.nbytes for start, x in zip(starts, persist, strict=True)]
                self.persist(stream, min(starts), max(ends) - min(starts))
                try:
                    return use(work)
                finally:
                    self.persist(stream, 0, 0)

    def recorded(self, launch: Launch) -> Recorded:
        """A launch whose arrays are on the device, its kernel loaded, to be enqueued many times."""
        kernel = self.kernel(compiled(launch.factory, launch.arch, "cubin", **launch.constants))
        with self.active():
            return Recorded(self, self._constants, kernel, launch)

    def enqueue(self, steps: Sequence[Recorded], bases: Sequence[int], stream: int) -> None:
        """Enqueue recorded launches, in order, on operands (`Recorded.enqueue`).

        What is small and comes from the host is uploaded once per content.

        Legal while the stream is captured: then no memory that the graph reads is freed or written
        again.
        """
        with self.active():
            captured = capturing(self.driver, stream)
            for step in steps:
                step.enqueue(bases, stream, captured)

    @contextlib.contextmanager
    def among(self, stream: int, others: Sequence[int]) -> Iterator[None]:
        """A `with` whose launches on a stream come after what others have been given so far, and before
        what they are given next, which may write or free what is read.

        Not those of a stream that is captured: a graph does not wait for what is no part of it.
        """
        d = self.driver
        with self.active():
            if capturing(d, stream):
                others = ()
            event = check(d, d.cuEventCreate(d.CUevent_flags.CU_EVENT_DISABLE_TIMING))
            try:
                for other in others:
                    check(d, d.cuEventRecord(event, other))
                    check(d, d.cuStreamWaitEvent(stream, event, 0))
                yield
                for other in others:
                    check(d, d.cuEventRecord(event, stream))
                    check(d, d.cuStreamWaitEvent(other, event, 0))
            finally:
                d.cuEventDestroy(event)

    def submit(self, launch: Launch, stream: int) -> None:
        """Enqueue one launch whose arrays lie on the device, where they say."""
        self.enqueue([self.recorded(launch)], (0,), stream)

    def persist(self, stream: int, address: int, nbytes: int, hit_ratio: float = 1.0) -> None:
        """Request that this range, read again by every block of queries (keys and values), stays in
        L2 for launches on the stream.

        CUDA C++ guide, "L2 set-aside cache for persisting accesses". nbytes 0 ends it. A card
        refuses more than its largest window and its largest part of L2: the range is cut to the
        one, the hit ratio lowered to the other. On a card that can set nothing aside (before sm_80)
        nothing happens.
        """
        with self.active():
            self._persist(stream, address, nbytes, hit_ratio)

    def _persist(self, stream: int, address: int, nbytes: int, hit_ratio: float) -> None:
        d = self.driver
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


def median_seconds(
    device: Device, work: Callable[[], None], repeats: int = 20, stream: int = 0
) -> float:
    """Median seconds of a launch among others: a start event, launches, a stop event, divided.

    A group takes about `GROUP` seconds, so that the host enqueues ahead of the card and the time
    between two launches is the card's own. A launch that is shorter than enqueueing it is measured
    as that. Launches to warm up come first; long ones are repeated less, but five times.
    """
    d = device.driver
    with device.active():
        events = [check(d, d.cuEventCreate(0)) for _ in range(2)]

        def seconds(launches: int) -> float:
            check(d, d.cuEventRecord(events[0], stream))
            for _ in range(launches):
                work()
            check(d, d.cuEventRecord(events[1], stream))
            check(d, d.cuEventSynchronize(events[1]))
            return float(check(d, d.cuEventElapsedTime(*events))) / 1e3 / launches

        try:
            seconds(2)
            one = max(seconds(1), 1e-6)
            launches = max(1, min(MOST_LAUNCHES, round(GROUP / one)))
            groups = max(5, min(repeats, int(ALTOGETHER / (launches * one))))
            return statistics.median(seconds(launches) for _ in range(groups))
        finally:
            for event in events:
                d.cuEventDestroy(event)


def arch_of(major: int, minor: int) -> str:
    """The newest architecture that kernels are built for and that a card of this compute capability
    runs.
    """
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
def device(ordinal: int) -> Device:
    """The card with this number; raises UnsupportedError where there is none."""
    return Device(ordinal)


def current_device() -> Device:
    """The card of the thread's current context, or the first one.

    Raises UnsupportedError where there is none.
    """
    driver = open_driver()
    return device(current_ordinal(driver))


def current_ordinal(driver: Any) -> int:
    """The number of the device of the thread's current context; 0 without one."""
    if not int(check(driver, driver.cuCtxGetCurrent())):
        return 0
    return int(check(driver, driver.cuCtxGetDevice()))


def device_at(named: Sequence[tuple[str, int]]) -> Device:
    """The card that memory at all of these addresses is on; the current one without any.

    Parameters
    ----------
    named : argument's name and the address of its array, unless that is empty

    Raises
    ------
    ArgumentError
        They are on different devices.
    """
    driver = open_driver()
    there = [(name, device_of(driver, address)) for name, address in named]
    if not there:
        return current_device()
    first, ordinal = there[0]
    for name, other in there[1:]:
        if other != ordinal:
            raise ArgumentError(
                f"{name}: got an array on CUDA device {other}; allowed: device {ordinal}, where {first} lies"
            )
    return device(ordinal)
