"""What a card reaches on the simplest kernels, and its state: the scale of every timing.

Product rates come from kernels that do nothing but tensor-core products, the copy rate from the
driver's copy within the card.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..compile import Key, compiled
from ..device import Device, median_seconds
from ..device.driver import check
from ..device.operands import Launch
from ..kernels.rates import BLOCKS, operations, product_rate
from .attention import median_of
from .steps import Row, Step, nothing

COPY_BYTES = 1 << 29
ASKED = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")


def kernels(arch: str) -> list[Key]:
    """The kernels of the product rates."""
    dtypes = ("float16",) if arch == "sm_75" else ("float16", "int8")
    hopper = arch == "sm_90a"
    return [
        (product_rate, arch, (("dtype", dtype), ("hopper", hopper), ("turing", arch == "sm_75")))
        for dtype in dtypes
    ]


def timings(arch: str) -> Iterator[Step]:
    """Operations per second of each kind of product, bytes per second of a copy (read and
    written).
    """
    for key in kernels(arch):
        yield _products(key)
    yield Step("copy", nothing, lambda device: [copy_row(device)])


def _products(key: Key) -> Step:
    factory, arch, options = key
    constants = dict(options)
    name = f"products {constants['dtype']}"

    def run(device: Device) -> Iterator[Row]:
        blocks = BLOCKS * device.multiprocessors
        out = np.zeros(blocks * compiled(factory, arch, "cubin", **constants).threads, np.int32)
        work = Launch(factory, constants, arch, (blocks, 1, 1), (out,), lambda: None)
        seconds = median_of(device, work)
        done = blocks * operations(constants["dtype"], constants["hopper"])
        yield {"kernel": name, "seconds": seconds, "tflops": done / seconds / 1e12}

    return Step(name, lambda: [key], run)


def copy_row(device: Device) -> Row:
    """The copy's time and rate."""
    seconds = copying(device)
    return {"kernel": "copy", "seconds": seconds, "bytes_per_second": 2 * COPY_BYTES / seconds}


def copying(device: Device) -> float:
    """Median seconds of a copy of `COPY_BYTES` within the card."""
    d = device.driver
    with device.active():
        addresses: list[Any] = []
        try:
            for _ in range(2):
                addresses.append(check(d, d.cuMemAlloc(COPY_BYTES)))
            source, to = addresses
            return median_seconds(
                device, lambda: check(d, d.cuMemcpyDtoDAsync(to, source, COPY_BYTES, 0))
            )
        finally:
            for address in addresses:
                d.cuMemFree(address)


def state() -> dict[str, Any]:
    """Clocks (MHz), power (W) and temperature as nvidia-smi shows them, or why it does not."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {"error": "nvidia-smi is not installed"}
    asked = [program, f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    values = [x.strip() for x in done.stdout.splitlines()[0].split(",")] if done.stdout else []
    if done.returncode or len(values) != len(ASKED):
        return {"error": (done.stderr or done.stdout).strip()}
    return dict(zip(ASKED, values, strict=True))
