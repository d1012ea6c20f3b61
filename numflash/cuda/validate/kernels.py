"""The steps of each family, and which kernels they need: found by planning, without running any."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..compile import Key
from . import attention, decode, frameworks, gradient_variants, ladder, peers, rates, variants
from .families import Family, families
from .steps import Step, supported

Steps = Iterator[Step]


def checks(family: Family, arch: str) -> Steps:
    """The family's problems: those with results of the emulator first, then the long ones."""
    if family.kind in ("forward", "backward"):
        make = attention.forward_check if family.kind == "forward" else attention.gradient_check
        yield from (make(case, arch, True) for case in family.cases)
        yield from (make(case, arch, False) for case in family.long)
    elif family.kind == "decode":
        yield from decode.checks(family.cases, arch)
    elif family.kind == "variants":
        yield from variants.checks(arch)
    elif family.kind == "gradient variants":
        yield from gradient_variants.checks(arch)
    elif family.kind == "frameworks":
        yield from frameworks.checks(arch)


def timings(family: Family, arch: str, triton: str | None = None) -> Steps:
    """The family's times."""
    lengths = family.lengths
    found: dict[str, Callable[[], Steps]] = {
        "forward": lambda: attention.forward_timings(family.precision, lengths, arch),
        "backward": lambda: attention.backward_timings(family.precision, lengths, arch),
        "decode": lambda: decode.timings(family.precision, arch),
        "variants": lambda: variants.timings(arch),
        "gradient variants": lambda: gradient_variants.timings(arch),
        "rates": lambda: rates.timings(arch),
        "ladder": lambda: ladder.timings(arch),
        "peers": lambda: peers.timings(lengths, False, triton),
        "gradient peers": lambda: peers.timings(lengths, True, None),
        "frameworks": lambda: iter(()),
    }
    return found[family.kind]()


def kernels_of(family: Family, arch: str) -> set[Key]:
    """Every kernel that a family launches on an architecture."""
    found: set[Key] = set()
    for step in (*checks(family, arch), *timings(family, arch)):
        keys = supported(step)
        if not isinstance(keys, str):  # else there is no kernel for it
            found |= keys
    return found


def needed(arch: str, quick: bool = False) -> set[Key]:
    """Every kernel that `python -m numflash.cuda.validate` launches on an architecture."""
    return {key for family in families(arch, quick) for key in kernels_of(family, arch)}
