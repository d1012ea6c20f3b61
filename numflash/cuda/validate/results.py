"""What the rows of a validation amount to: shares of the card's rates, targets, lines of text."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from .attention import OLDER

PLACE = ("L", "D", "causal")


def timings(found: dict[str, Any]) -> list[dict[str, Any]]:
    """All rows with times."""
    return [row for family in found["families"] for row in family["timings"]]


def shares(found: dict[str, Any]) -> None:
    """Give each timing its share of the card's measured product rate, where that is known."""
    rows = timings(found)
    rates = {
        row["kernel"].removeprefix("products "): row["tflops"]
        for row in rows
        if row["kernel"].startswith("products ")
    }
    for row in rows:
        kind = "int8" if "int8" in row["kernel"] else "float16"
        if "tflops" in row and "L" in row and kind in rates:
            row["share_of_products"] = row["tflops"] / rates[kind]


def _ratios(rows: list[dict[str, Any]], own: str, peer: str) -> list[float]:
    """The peer's time over ours, for each shape that both took."""
    times = {
        (row["kernel"], tuple(row[x] for x in PLACE)): row["seconds"]
        for row in rows
        if "L" in row and "seconds" in row
    }
    return [
        times[peer, place] / mine
        for (name, place), mine in times.items()
        if name == own and (peer, place) in times
    ]


def targets(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What is to be reached.

    The median over the shapes that both took, of the peer's time over ours, or of the share of a
    copy.
    """
    rows = timings(found)
    hopper = found.get("arch") == "sm_90a"
    goals = [
        (OLDER if hopper else "numflash float16", "torch flash", 0.9),
        ("numflash float16, backward", "torch flash, backward", 1.0 if hopper else 0.9),
    ]
    if hopper:
        goals += [
            ("numflash float16", "torch flash", 1.0),
            ("numflash float16", "torch cudnn", 1.0),
            ("numflash float16, backward", "torch cudnn, backward", 1.0),
        ]
    else:  # on Hopper its instructions allow no more than float16's products do (`cuda.cycles`)
        goals.append(("numflash int8", "numflash float16", 1.3))
    made = [_goal(own, peer, least, _ratios(rows, own, peer)) for own, peer, least in goals]
    return made + [
        _goal(row["kernel"], "a copy's rate", 0.8, [row["share_of_copy"]])
        for row in rows
        if "share_of_copy" in row
    ]


def _goal(own: str, peer: str, least: float, ratios: Iterable[float]) -> dict[str, Any]:
    ratios = list(ratios)
    return {
        "kernel": own,
        "against": peer,
        "wanted": least,
        "shapes": len(ratios),
        "median": statistics.median(ratios) if ratios else None,
        "worst": min(ratios, default=None),
        "met": statistics.median(ratios) >= least if ratios else None,
    }


def shown(row: dict[str, Any]) -> str:
    """A row in one line."""
    if "case" in row:
        why = row.get("error") or row.get("skipped") or ""
        return f"{'ok ' if row['passed'] else 'BAD'} {row['case']}{why and ': '}{why}"
    place = "".join(f", {x} {row[x]}" for x in ("L", "S", "D", "causal") if x in row)
    if "error" in row:
        return f"{row['kernel']}{place}: {row['error']}"
    rate = f"{row['tflops']:.1f} TFLOP/s" if "tflops" in row else ""
    if "share_of_copy" in row:
        rate = f"{100 * row['share_of_copy']:.0f} % of a copy's rate"
    return f"{row['kernel']}{place}: {1e3 * row['seconds']:.3f} ms {rate}".rstrip()


def verdict(goal: dict[str, Any]) -> str:
    """A target in one line."""
    what = f"{goal['kernel']} against {goal['against']}, {goal['wanted']:g} wanted"
    if goal["met"] is None:
        return f"{what}: no shape that both took"
    met = "met" if goal["met"] else "NOT MET"
    return f"{what}: {goal['median']:.2f} (worst {goal['worst']:.2f} of {goal['shapes']}), {met}"
