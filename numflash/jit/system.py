"""Queries to the operating system. Each has a fallback, so that other systems run the same code.

Linux describes its caches in sysfs and permits AMX tiles on request; macOS describes its caches by
sysctl; on Windows the fallbacks are used. OpenMP and its problem with fork are in `threads`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from pathlib import Path
from typing import Any

SYSFS = "/sys/devices/system/cpu/cpu0/cache"


def user_cache() -> Path:
    """The user's folder for caches.

    For a user without a home folder (no HOME, and not in the list of users, as in containers) one
    that can be neither read nor made.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        return Path(os.devnull, "cache")


def cache_sizes() -> dict[int, int]:
    """{level: bytes} of the data caches of a (fast) core, and {0: line size}; {} if unknown."""
    if sys.platform == "darwin":
        return sysctl_caches(ctypes.CDLL(None))
    return sysfs_caches() if sys.platform == "linux" else {}


def sysfs_caches(root: str = SYSFS) -> dict[int, int]:
    """Linux: as the kernel describes the first core; {} without that folder."""
    found: dict[int, int] = {}
    for index in sorted(Path(root).glob("index*")) if os.path.isdir(root) else ():
        try:
            kind, level, size = (
                (index / name).read_text(encoding="utf-8").strip()
                for name in ("type", "level", "size")
            )
            if kind != "Instruction":
                found[int(level)] = int(size[:-1]) * {"K": 1024, "M": 1 << 20}[size[-1]]
                found[0] = int((index / "coherency_line_size").read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError):
            continue
    return found


def sysctl_caches(libc: Any) -> dict[int, int]:
    """macOS: of the performance cores where there are several kinds."""
    found = {}
    for level, names in {
        0: ("hw.cachelinesize",),
        1: ("hw.perflevel0.l1dcachesize", "hw.l1dcachesize"),
        2: ("hw.perflevel0.l2cachesize", "hw.l2cachesize"),
        3: ("hw.l3cachesize",),
    }.items():
        values = (_sysctl(libc, name) for name in names)
        value = next((v for v in values if v), 0)
        if value:
            found[level] = value
    return found


def _sysctl(libc: Any, name: str) -> int:
    value = ctypes.c_int64(0)  # a 32-bit answer fills the low half
    size = ctypes.c_size_t(ctypes.sizeof(value))
    failed = libc.sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return 0 if failed else value.value


def cpu_model() -> str:
    """The CPU's name in words, "" where the system does not say (Linux on x86 does)."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            return next(
                (line.partition(":")[2].strip() for line in info if line.startswith("model name")),
                "",
            )
    except OSError:
        return ""


def memory_groups() -> list[str]:
    """CPUs of each NUMA node (core memory group), as Linux lists them; none elsewhere."""
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist"))
    return [file.read_text(encoding="utf-8").strip() for file in nodes]


def cpus_of(listed: str) -> set[int]:
    """The CPUs of a list as Linux writes it: "0-3,8"."""
    ranges = (part.partition("-") for part in listed.split(",") if part)
    return {n for low, _, high in ranges for n in range(int(low), int(high or low) + 1)}


@functools.cache
def tiles_permitted() -> bool:
    """Request permission from Linux to use AMX tiles in this process.

    False where it refuses, and on other systems.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    request = 158, 0x1023, 18  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
    return ctypes.CDLL(None).syscall(*request) == 0


@functools.cache
def scalable_bits() -> int:
    """Bits of this process's SVE vectors, 0 without SVE and on other systems than Linux."""
    if sys.platform != "linux" or platform.machine() != "aarch64":
        return 0
    length = ctypes.CDLL(None).prctl(51, 0, 0, 0, 0)  # PR_SVE_GET_VL: bytes in the low 16 bits
    return 0 if length < 0 else (length & 0xFFFF) * 8
