"""Steps of one family of a validation in a process of their own.

A JSON object per line on standard output: {"step": ...} before a step and again before its first
launch, then {"case": row} or {"timing": row}.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import TextIO

from ...errors import DriverError, UnsupportedError
from ..compile import compiled
from ..device import Device, current_device
from . import kernels, peers
from .families import families
from .steps import Row, Step, labels, supported

PREPARING = 60.0  # seconds until a step's first launch: operands are made, code may be compiled
Say = Callable[[Row], None]


def describe() -> Row:
    """The card and the driver."""
    device = current_device()
    version = device.driver.cuDriverGetVersion()[1]
    return {
        "device": device.name,
        "arch": device.arch,
        "multiprocessors": device.multiprocessors,
        "driver": f"CUDA {version // 1000}.{version % 1000 // 10}",
    }


def shown(place: str, name: str) -> Row:
    """How a row without results begins."""
    return {"case": name} if place == "case" else {"kernel": name}


def run_step(step: Step, place: str, device: Device, broken: set[str], say: Say) -> list[str]:
    """Run one step, unless its kernels are `broken`; those that broke now.

    A step that raises is one that failed, but the driver's errors end the process: its context may
    be of no use any more.
    """
    begun: Row = {"place": place, "name": step.name, "limit": PREPARING}
    say({"step": begun})
    used: list[str] = []
    try:
        keys = supported(step)
        if isinstance(keys, str):
            say({place: shown(place, step.name) | {"skipped": keys, "passed": True}})
            return []
        used = labels(keys)
        if place == "timing" and broken & set(used):
            why = "a problem of its kernel failed: it is not timed"
            say({place: shown(place, step.name) | {"error": why}})
            return []
        for factory, arch, constants in keys:
            compiled(factory, arch, "cubin", **dict(constants))
        say({"step": begun | {"kernels": used, "limit": step.limit}})
        passed = True
        for row in step.run(device):
            whole = shown(place, step.name) | {"arch": device.arch} | row
            say({place: whole})
            passed &= whole.get("passed", True)
        return [] if passed else used
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        failed = {"passed": False} if place == "case" else {}
        say({place: shown(place, step.name) | failed | {"error": why}})
        if isinstance(error, DriverError):
            raise
        return used if place == "case" else []


def run(request: Row, out: TextIO) -> int:
    """Write the rows of one family's steps, without those that are done already."""

    def say(found: Row) -> None:
        out.write(json.dumps(found) + "\n")
        out.flush()

    if request.get("software"):
        say({"software": peers.software()})
        return 0
    if request.get("describe"):
        try:
            say({"card": describe()})
        except UnsupportedError as error:
            say({"none": str(error)})
        return 0
    device = current_device()
    listed = families(device.arch, request["quick"], request["lengths"])
    family = next(x for x in listed if x.name == request["family"])
    done = {tuple(x) for x in request["done"]}
    broken = set(request["broken"])
    for place, steps in (
        ("case", kernels.checks(family, device.arch)),
        ("timing", kernels.timings(family, device.arch, request["triton"])),
    ):
        for step in steps:
            if (place, step.name) not in done:
                broken.update(run_step(step, place, device, broken, say))
    return 0


def main() -> int:
    """The request is the first argument; what libraries print goes to standard error."""
    request = json.loads(sys.argv[1])
    if request["lengths"] is not None:
        request["lengths"] = tuple(request["lengths"])
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        try:
            return run(request, out)
        except DriverError as error:
            print(error, file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
