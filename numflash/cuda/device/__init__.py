"""A card: the calls of its driver, its memory, and launches with their operands.

May import `compile`, `instructions`, the emulator that stands in for a card, `validation`, `interop`,
`tiling`, `errors`.
"""

from .device import Device, arch_of, current_device, device_at, median_seconds

__all__ = ["Device", "arch_of", "current_device", "device_at", "median_seconds"]
