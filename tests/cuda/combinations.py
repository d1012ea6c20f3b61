"""Every combination of the options that the CUDA forward kernels have code for, and the cases that
each of these kernels meets.

A kernel is compiled for a set of constants: `FAMILIES` enumerates them. What is an argument of the
kernel (bands, lengths, masks of every form, scales, shapes, places) comes from decks, which are
dealt until they are empty and then shuffled again, so that each case meets each option in a few
hundred runs. The expected values are those of attention by its definition in float64, for INT8 the
bits of the integer model.

`python tests/cuda/combinations.py [FAMILY ...]` goes through all combinations of the families, or
of all of them; the tests go through all of some and through enough of the others that every pair of
options occurs, or every option (`WHOLE`, `PAIRS`).
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
import traceback
import zlib
from collections.abc import Iterator
from typing import Any

import float_checks
import int8_checks
import numpy as np
import oracles
import pytest
from daily import of_today

from numflash.cuda import launch_float, launch_int8
from numflash.cuda.device import operands
from numflash.numerics.quantization import quantize

Combination = dict[str, Any]
Case = dict[str, Any]
RUNS = 3  # cases per kernel
OF_TILES = ("block_q", "block_k", "queries", "ping_pong", "cluster")


@dataclasses.dataclass(frozen=True)
class Family:
    """The kernels of one kind on one architecture.

    masks : kinds of masks: "", "bool", "float" (additive, some -inf), "both"
    banded : a band of keys is a constant of the kernel;  on_card : it runs on arrays that lie on
        the card, and joins sinks there
    signed : whether the scale is positive is a constant, where nothing else makes the kernel scale
        its scores
    groups : query heads per key head
    shapes : (L, S) for one head per key head, then for more: with more rows than a block of queries
        has, fewer, and more than keys
    tile : keys per tile
    """

    precisions: tuple[str, ...]
    arch: str
    masks: tuple[str, ...] = ("", "bool", "float")
    banded: bool = True
    on_card: bool = True
    signed: bool = True
    groups: tuple[int, int] = (1, 3)
    shapes: tuple[tuple[tuple[int, int], ...], ...] = (
        ((37, 150), (70, 65), (49, 130)),
        ((17, 150), (23, 20), (40, 130)),
    )
    tile: int = 64


HOPPER = {"groups": (1, 6), "tile": 128}
INT8 = {
    "masks": ("", "bool", "float", "both"),
    "on_card": False,
    "signed": False,
    "tile": 128,
    "shapes": (((37, 300), (70, 50), (49, 260)), ((17, 150), (23, 20), (40, 280))),
}
FAMILIES = {
    "float16 sm_80": Family(("float16",), "sm_80"),
    "bfloat16 sm_80": Family(("bfloat16",), "sm_80"),
    "float16 sm_75": Family(("float16",), "sm_75"),
    "halves sm_90a": Family(
        ("float16", "bfloat16"),
        "sm_90a",
        **HOPPER,
        shapes=(((70, 150), (140, 50), (65, 300)), ((17, 150), (40, 30), (70, 300))),
    ),
    "float32 sm_80": Family(
        ("float32",),
        "sm_80",
        INT8["masks"],
        banded=False,
        signed=False,
        tile=16,
        shapes=(((9, 40), (30, 20), (5, 33)), ((5, 40), (11, 7), (9, 21))),
    ),
    "int8 sm_80": Family(("int8",), "sm_80", **INT8),
    "int8 sm_75": Family(("int8",), "sm_75", **INT8),
    "int8 sm_90a": Family(
        ("int8",),
        "sm_90a",
        **{
            **INT8,
            **HOPPER,
            "shapes": (((70, 150), (140, 50), (65, 300)), ((40, 150), (70, 50), (35, 300))),
        },
    ),
    "int8-int16 sm_80": Family(("int8-int16",), "sm_80", **INT8),
    "int8-int16 sm_75": Family(("int8-int16",), "sm_75", **INT8),
    "int8-fp32 sm_80": Family(("int8-fp32",), "sm_80", **INT8),
}
# the tests go through all of the first, through every pair of options of the second, through every
# option of the others
WHOLE = ("float16 sm_80", "int8 sm_80")
PAIRS = ("float16 sm_75", "halves sm_90a", "float32 sm_80")


def combinations(family: Family) -> list[Combination]:
    """Every set of constants; `group` takes turns, so that with any two options both occur."""
    found = []
    either = (False, True)
    levels = {
        "precision": family.precisions,
        "band": either[: 1 + family.banded],
        "mask": family.masks,
        "softcap": either,
        "alibi": either,
        "sinks": either[: 1 + family.on_card],
    }
    for places in itertools.product(*(range(len(x)) for x in levels.values())):
        one = {name: values[n] for (name, values), n in zip(levels.items(), places, strict=True)}
        scaled = (
            not family.signed or one["softcap"] or one["alibi"] or one["mask"] in ("float", "both")
        )
        found += [
            {**one, "scale": scale, "group": family.groups[(sum(places) + n) % 2]}
            for n, scale in enumerate(("any",) if scaled else ("positive", "not positive"))
        ]
    return found


def enough(found: list[Combination], together: int) -> list[Combination]:
    """Some of the combinations, with every so many options that are ever together.

    First those that add most.
    """

    def groups(one):
        return set(itertools.combinations(one.items(), together))

    missing = set().union(*map(groups, found))
    chosen = []
    while missing:
        chosen.append(max(found, key=lambda one: len(missing & groups(one))))
        missing -= groups(chosen[-1])
    return chosen


def tested(name: str) -> list[Combination]:
    """The combinations of a family that the tests go through."""
    found = combinations(FAMILIES[name])
    return found if name in WHOLE else enough(found, 2 if name in PAIRS else 1)


BANDS = (
    {"is_causal": True},
    {"is_causal": True, "alignment": "lower_right"},
    {"window": (20, 3)},
    {"window": (None, 9)},
    {"window": (30, None), "alignment": "lower_right"},
    {"window": (20, 5), "is_causal": True},
    {"window": (0, 0)},
    {"window": (15, 40), "alignment": "lower_right"},
)
FORMS = {  # shape of a mask for B, H, L and S
    "rows and keys": lambda b, h, l, s: (l, s),
    "entries": lambda b, h, l, s: (b, 1, l, s),
    "heads": lambda b, h, l, s: (h, l, s),
    "all": lambda b, h, l, s: (b, h, l, s),
    "keys": lambda b, h, l, s: (b, 1, 1, s),
    "rows": lambda b, h, l, s: (h, l, 1),
    "part of a larger one": lambda b, h, l, s: (h + 1, 2 * l, 3 * s),
    "turned": lambda b, h, l, s: (b, h, s, l),
}
SCALES = {"any": (None, 0.3, -0.2, 0.0), "positive": (None, 0.3), "not positive": (-0.2, 0.0)}
DECKS = {
    "band": BANDS,
    "plain": ({}, {"alignment": "lower_right"}),
    "form": tuple(FORMS),
    "hidden": (-np.inf, np.finfo(np.float32).min),
    "lengths": ("all", "none and some", "some"),
    "shape": (0, 1, 2),
    "heads": ((32, 32), (24, 16), (20, 29)),
    "place": ("host", "card", "turned on the card"),
    "place with sinks": ("card", "turned on the card"),
    "slopes": ("heads", "entries"),
    "smooth": (False, True),
    "seed": (0, 1),
    **{f"scale {kind}": scales for kind, scales in SCALES.items()},
}


class Dealer:
    """Deals each deck to its end before it is shuffled again; the same cards on every run."""

    def __init__(self) -> None:
        self.random, self.left = np.random.default_rng(0), {name: [] for name in DECKS}

    def __call__(self, name: str) -> Any:
        if not self.left[name]:
            self.left[name] = [DECKS[name][n] for n in self.random.permutation(len(DECKS[name]))]
        return self.left[name].pop()


def place_of(case: Case) -> str:
    """Where the arrays lie. Sinks join on the card alone; in host memory the caller joins them."""
    return case.get("place") or case.get("place with sinks", "host")


def cases(family: Family, found: list[Combination]) -> Iterator[tuple[Combination, list[Case]]]:
    """The combinations, each with the cases that its kernel meets."""
    deal = Dealer()
    for one in found:
        dealt = []
        for _ in range(RUNS):
            names = ["lengths", "shape", "heads", "seed", f"scale {one['scale']}"]
            names += ["band" if one["band"] or (not family.banded and dealt) else "plain"]
            names += (
                ["form"] * bool(one["mask"])
                + ["hidden"] * (one["mask"] in ("float", "both"))
                + ["slopes"] * one["alibi"]
            )
            names += ["smooth"] * (one["softcap"] and one["precision"].startswith("int8"))
            names += [("place with sinks" if one["sinks"] else "place")] * family.on_card
            dealt.append({name: deal(name) for name in names})
        yield one, dealt


def name_of(one: Combination) -> str:
    return " ".join(
        str(x)
        if name in ("precision", "mask", "scale")
        else f"{name}{x}"
        if name == "group"
        else name
        for name, x in one.items()
        if x and x != "any"
    )


def draw_masks(
    one: Combination, case: Case, family: Family, shape: tuple[int, ...]
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """`attn_mask`, and the boolean mask that stands beside an additive one.

    With rows and a tile of keys that nobody sees.
    """
    if not one["mask"]:
        return None, None
    (_, h, l, s), form = shape, case["form"]

    def placed(x: np.ndarray) -> np.ndarray:
        if form == "part of a larger one":
            return x[1:, l // 2 : l // 2 + l, 5 : 5 + 2 * s : 2]
        return x.swapaxes(-1, -2) if form == "turned" else x

    rng = np.random.default_rng(7)
    seen = rng.random(FORMS[form](*shape)) > 0.4
    bias = rng.standard_normal(FORMS[form](*shape)).astype(np.float32)
    if placed(seen).shape[-2] > 1:
        placed(seen)[..., 3, :] = False
    if form in ("keys", "heads", "turned"):
        placed(seen)[..., : family.tile] = False
    if one["mask"] == "bool":
        return placed(seen), None
    bias[~seen] = case["hidden"]
    if placed(bias).shape[-2] > 1:
        placed(bias)[
            ..., 4, :
        ] = -np.inf  # row 3 has the lowest number everywhere, or is as this one
    return placed(bias), rng.random((h, 1, s)) > 0.3 if one["mask"] == "both" else None


def draw(
    family: Family, one: Combination, case: Case
) -> tuple[tuple[np.ndarray, ...], dict[str, Any], np.ndarray | None]:
    """Operands and options of `numflash.attention`, and the boolean mask beside an additive one."""
    group, (l, s) = one["group"], family.shapes[one["group"] > 1][case["shape"]]
    b, hkv, (d, dv) = 2, 1 if group == 6 else 2, case["heads"]
    h = hkv * group
    if place_of(case) != "host":
        # whole rows of 16 bytes
        d = -(-d // 8) * 8
        dv = -(-dv // 8) * 8
    operands = oracles.qkv(
        b=b, h=h, hkv=hkv, l=l, s=s, d=d, dv=dv, seed=zlib.crc32(str(case).encode())
    )
    options: dict[str, Any] = {
        "scale": case[f"scale {one['scale']}"],
        **case.get("band", case.get("plain")),
    }
    if case["lengths"] != "all":
        options["key_lengths"] = np.array(
            [0, 2 * s // 3] if case["lengths"] == "none and some" else [s - 1, s // 3]
        )
    if one["softcap"]:
        options["softcap"] = 2.0
    if one["alibi"]:
        slopes = np.linspace(0.05, 1, b * h, dtype=np.float32).reshape(b, h)
        options["alibi_slopes"] = slopes if case["slopes"] == "entries" else slopes[1]
    if one["sinks"]:
        options["sinks"] = np.linspace(-3, 4, h, dtype=np.float32)
    options["attn_mask"], mask = draw_masks(one, case, family, (b, h, l, s))
    return (
        tuple(x.astype(float_checks.DTYPES.get(one["precision"], np.float32)) for x in operands),
        options,
        mask,
    )


def with_mask(problem: Any, mask: np.ndarray | None) -> Any:
    """The problem with a boolean mask beside its additive one."""
    if mask is None:
        return problem
    nb, nh, _, l, s, *_ = problem.shape
    return dataclasses.replace(problem, mask=np.broadcast_to(mask, (nb, nh, l, s)))


def turned(x: np.ndarray) -> np.ndarray:
    """The same numbers as (B, L, H, D) in memory."""
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


def in_memory(launch: operands.Launch) -> operands.Launch:
    """The launch with the memory behind its arrays, from their first number on.

    The emulator takes no array with gaps.
    """

    def memory(x: Any) -> Any:
        if not isinstance(x, np.ndarray) or x.flags.c_contiguous:
            return x
        size = sum(step * (n - 1) for step, n in zip(x.strides, x.shape, strict=True)) + x.itemsize
        return np.lib.stride_tricks.as_strided(
            x[(slice(1),) * x.ndim].view(np.uint8), (size,), (1,)
        )

    return dataclasses.replace(
        launch,
        args=tuple(tuple(map(memory, x)) if isinstance(x, tuple) else x for x in launch.args),
    )


def plan(family: Family, problem: Any, case: Case) -> operands.Launch:
    """The launch of a float kernel, on arrays in host memory or as they lie on a card."""
    single = problem.precision == "float32"
    arch = {} if family.arch == "sm_90a" else {"arch": family.arch}
    make = (
        launch_float.hopper_forward
        if not arch
        else launch_float.float32_forward
        if single
        else launch_float.float_forward
    )
    if place_of(case) == "host":
        return make(problem, **arch)
    nb, nh, _, l, _, _, dv = problem.shape
    out = np.zeros((nb, nh, l, dv), problem.query.dtype)
    if place_of(case) == "turned on the card" and not single:  # float32 takes no other layout
        problem = dataclasses.replace(
            problem, **{n: turned(getattr(problem, n)) for n in ("query", "key", "value")}
        )
        out = turned(out)
    return in_memory(make(problem, results=(out, np.zeros((nb, nh, l), np.float32)), **arch))


def check(family: Family, one: Combination, case: Case) -> tuple:
    """Run one case and compare; what names the kernel, but for Hopper's tiles, which follow the shape."""
    (q, k, v), options, mask = draw(family, one, case)
    if one["precision"].startswith("int8"):
        pv = one["precision"].partition("-")[2] or "int8"
        problem = with_mask(int8_checks.problem_of(q, k, v, **options, pv=pv), mask)
        if case.get("smooth"):
            problem = dataclasses.replace(problem, key=quantize(k, "row", smooth=True))
        launch = launch_int8.int8_forward(problem, family.arch)
        (int8_checks.near_the_model if pv == "fp32" else int8_checks.same_bits_of)(
            problem, family.arch, case["seed"]
        )
    else:
        launch = plan(family, with_mask(float_checks.problem_of(q, k, v, **options), mask), case)
        out, lse, _ = operands.emulated(launch, seed=case["seed"])
        if mask is not None:
            options["attn_mask"] = np.where(mask, options["attn_mask"], -np.inf)
        float_checks.compare(out, lse, q, k, v, **options)
    constants = ((n, x) for n, x in launch.constants.items() if n not in OF_TILES)
    return launch.factory, launch.arch, tuple(constants)


def check_all(family: Family, one: Combination, dealt: list[Case]) -> None:
    """All cases of a combination, which one kernel takes."""
    kernels = set()
    for case in dealt:
        try:
            kernels.add(check(family, one, case))
        except Exception as error:
            raise AssertionError(f"{family.arch}: {name_of(one)}: {case}") from error
    assert len(kernels) == 1, kernels


def parameters(*names: str) -> list[Any]:
    """What `check_all` takes, as parameters of a test.

    By default the kernels that have every option; in the slow tests a third of the others a day.
    """
    chosen = []
    for name in names:
        family = FAMILIES[name]
        found = list(cases(family, tested(name)))
        for one, dealt in of_today(found[:-1], 3 if name in WHOLE else 1) + found[-1:]:
            marks = () if name in WHOLE and one == found[-1][0] else pytest.mark.slow
            chosen.append(
                pytest.param(family, one, dealt, id=f"{family.arch} {name_of(one)}", marks=marks)
            )
    return chosen


def main(names: list[str]) -> int:
    """Go through all combinations of the families; the number of those that fail."""
    failed = 0
    for name in names or FAMILIES:
        start = time.perf_counter()
        family = FAMILIES[name]
        found = list(cases(family, combinations(family)))
        for one, dealt in found:
            try:
                check_all(family, one, dealt)
            except AssertionError:
                failed += 1
                traceback.print_exc()
        print(
            f"{name}: {len(found)} kernels, {sum(len(dealt) for _, dealt in found)} cases, "
            f"{time.perf_counter() - start:.0f} s; {failed} combinations failed so far",
            flush=True,
        )
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
