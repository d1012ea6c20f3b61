"""Which kernels a validation needs: found by planning its list, without running any."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ...cache.kvcache import KVCache
from ...errors import UnsupportedError
from .. import launch, launch_backward, study
from ..compile import Key
from ..device.operands import Launch
from ..launch_float import float_forward
from . import attention, decode, decode_cases, from_floats, ladder, rates
from .cases import emulated_as, floats_of, gradient_operands, problem_of
from .families import Family, families


def decode_kernels(arch: str, cases: Iterable) -> Iterator[Key]:
    """The kernels of caches on a card of this architecture, one new token and the case's number of
    them.
    """
    emulated = emulated_as(arch)
    for _, dtype, d, n, new, splits, options in cases:
        found: list[Key] = []

        def note(factory: Any, constants: dict[str, Any], *_: Any, to: list[Key] = found) -> None:
            to.append((factory, arch, tuple(sorted(constants.items()))))

        try:
            cache = KVCache(
                decode_cases.B,
                decode_cases.G,
                d,
                n + 2 * new,
                dtype,
                device=f"cuda-emulator:{emulated}",
                **options,
            )
        except UnsupportedError:
            continue
        memory: Any = cache._memory
        memory.layout.card.run = note
        tokens = np.zeros((decode_cases.B, decode_cases.G, n, d), np.float32)
        query = np.zeros((decode_cases.B, decode_cases.H, new, d), np.float32)
        cache.append(tokens, tokens)
        token = tokens[:, :, :1].repeat(new, 2)
        cache.step(query, token, token, splits=splits)
        cache.decode(query, splits=splits)
        cache.close()
        yield from found


def _key(work: Launch) -> Key:
    return work.factory, work.arch, tuple(sorted(work.constants.items()))


def _launches(family: Family, arch: str) -> Iterator[Launch]:
    """The launches of a forward or backward family, on operands as short as select its kernels."""
    for _, shape, precision, options in family.cases:
        try:
            problem = problem_of(shape, precision, options)
            if family.kind == "forward":
                yield launch.plan(problem, arch)
                if precision == "int8":
                    yield from from_floats.launches(floats_of(shape, precision, options), arch)[0]
            else:
                operands = gradient_operands(problem)
                yield from launch_backward.plan(problem, *operands, arch).launches
        except UnsupportedError:
            continue
    for d, causal in itertools.product((64, 128), (False, True)) if family.lengths else ():
        # as many rows as it takes to get the kernels of long problems
        problem = problem_of((1, 1, 1, 256, 256, d), family.precision, {"is_causal": causal})
        if family.kind == "backward":
            lse = np.zeros(problem.query.shape[:3], np.float32)
            yield from launch_backward.float_backward(
                problem, problem.query, problem.query, lse, arch
            ).launches
            continue
        yield launch.plan(problem, arch)
        if family.precision == "int8":
            floats = floats_of((1, 1, 1, 256, 256, d), "int8", {"is_causal": causal})
            yield from from_floats.launches(floats, arch)[0]
        if family.precision == "float16":
            yield float_forward(problem, arch)


def _variants(arch: str) -> Iterator[Launch]:
    for one in attention.variants(arch, attention.VARIANT_CHECK):
        yield one.launch(arch)


def _ladder(arch: str) -> Iterator[Launch]:
    q, k, v, _ = study.problem(256, ladder.D, 0)
    for rung in study.LADDER:
        if rung.runs_on(arch):
            yield study.launch(rung, q, k, v, arch)


def kernels_of(family: Family, arch: str) -> set[Key]:
    """Every kernel that a family launches on an architecture."""
    if family.kind in ("forward", "backward"):
        return {_key(work) for work in _launches(family, arch)}
    if family.kind == "decode":
        return set(decode_kernels(arch, (*family.cases, *decode.timed_caches(family.precision))))
    if family.kind == "variants":
        return {_key(work) for work in _variants(arch)}
    if family.kind == "ladder":
        return {_key(work) for work in _ladder(arch)}
    return set(rates.kernels(arch)) if family.kind == "rates" else set()


def needed(arch: str, quick: bool = False) -> set[Key]:
    """Every kernel that `python -m numflash.cuda.validate` launches on an architecture."""
    return {key for family in families(arch, quick) for key in kernels_of(family, arch)}
