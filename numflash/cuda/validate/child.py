"""One family of a validation in a process of its own: a JSON object per line on standard output."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from ...errors import DriverError, UnsupportedError
from ..device import Device, current_device
from . import attention, decode, ladder, peers, rates
from .families import Family, families

Rows = Iterator[dict[str, Any]]


def checks(family: Family, device: Device) -> Rows:
    """Rows of the family's problems."""
    if family.kind in ("forward", "backward"):
        yield from attention.check(device, family.cases, family.kind == "backward")
    elif family.kind == "decode":
        yield from decode.check(device, family.cases)
    elif family.kind == "variants":
        yield from attention.variant_rows(device, checked=True)


def timings(family: Family, device: Device, triton: str | None) -> Rows:
    """Rows of the family's times."""
    found: dict[str, Callable[[], Rows]] = {
        "forward": lambda: attention.forward_times(device, family.precision, family.lengths),
        "backward": lambda: attention.backward_times(device, family.precision, family.lengths),
        "decode": lambda: decode.timings(device, family.precision),
        "variants": lambda: attention.variant_rows(device, checked=False),
        "rates": lambda: rates.rows(device),
        "ladder": lambda: ladder.rows(),
        "peers": lambda: peers.rows(family.lengths, False, triton),
        "gradient peers": lambda: peers.rows(family.lengths, True, None),
    }
    return found[family.kind]()


def describe() -> dict[str, Any]:
    """The card and the driver."""
    device = current_device()
    version = device.driver.cuDriverGetVersion()[1]
    return {
        "device": device.name,
        "arch": device.arch,
        "multiprocessors": device.multiprocessors,
        "driver": f"CUDA {version // 1000}.{version % 1000 // 10}",
    }


def run(request: dict[str, Any], out: TextIO) -> int:
    """Write one family's rows; nothing wrong is timed, nothing is run after a driver's error."""

    def say(found: dict[str, Any]) -> None:
        out.write(json.dumps(found) + "\n")
        out.flush()

    if request.get("describe"):
        try:
            say({"card": describe()})
        except UnsupportedError as error:
            say({"none": str(error)})
        return 0
    device = current_device()
    listed = families(device.arch, request["quick"], request["lengths"])
    family = next(x for x in listed if x.name == request["family"])
    right = True
    for row in checks(family, device):
        say({"case": row})
        right &= row["passed"]
        if "error" in row:  # the driver's: the context may be of no use any more
            return 1
    if right:
        say({"phase": "timings"})
        for row in timings(family, device, request["triton"]):
            say({"timing": row})
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
