"""The memory groups (NUMA nodes) of `numflash validate`: rates on the first, the first two, ... of them.

Each number of groups is a process of its own, bound to their CPUs before its threads start: threads
that run already stay where they are, and memory lies where it was first written.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from ..jit.system import cpus_of, memory_groups

LIMIT = 120  # seconds of a process
BOUND = """
import json, os, sys
os.sched_setaffinity(0, json.loads(sys.argv[1]))
from numflash.commands import validate_groups
print(json.dumps(validate_groups.here(float(sys.argv[2]))))
"""


def usable() -> list[set[int]]:
    """The CPUs of each memory group that this process may run on; groups without any left out."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    mine = os.sched_getaffinity(0)
    return [cpus & mine for cpus in map(cpus_of, memory_groups()) if cpus & mine]


def here(seconds: float) -> dict[str, Any]:
    """Rates of this process on all of its CPUs."""
    from ..jit.threads import most
    from ..measure import roofline
    from . import validate_kernels as kernels

    roof = roofline.measure(most())
    least = kernels.seconds_of(kernels.int8_call(128), most(), seconds)
    rate = kernels.operations(128) / least
    return {"threads": most(), "read": roof.read, "copy": roof.copy, "int8_attention": rate}


def groups(count: int, seconds: float) -> dict[str, Any]:
    """The rates on the first `count` memory groups; "failed" says why there are none."""
    cpus = sorted(set().union(*usable()[:count]))
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_NUM_THREADS"}
    found: dict[str, Any] = {"check": "memory groups", "groups": count, "cpus": cpus, "ok": True}
    command = [sys.executable, "-c", BOUND, json.dumps(cpus), str(seconds)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT, env=environment, check=True
        )
        return found | json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return found | {"failed": f"not done in {LIMIT} s"}
    except subprocess.CalledProcessError as error:
        return found | {"failed": (error.stderr.strip().splitlines() or ["no message"])[-1]}


def row(x: dict[str, Any]) -> tuple[str, str]:
    """What the table says."""
    name = f"on {x['groups']} memory group(s), {len(x['cpus'])} CPUs"
    if "failed" in x:
        return name, f"not measured: {x['failed']}"
    read, copy, rate = (x[key] / 1e9 for key in ("read", "copy", "int8_attention"))
    return name, f"read {read:.0f} GB/s, copy {copy:.0f} GB/s, INT8 attention {rate:.0f} GOP/s"
