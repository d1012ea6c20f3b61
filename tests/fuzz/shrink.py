"""Smaller cases that fail in the same way."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator

SIZES = ("b", "l", "s", "d", "dv", "max_length", "window", "sinks")


def kind_of(failure: str) -> str:
    """A failure without its numbers: two of one kind are likely one fault."""
    return re.sub(r"[-+\d.e]+|\bnan\b|\binf\b", "#", failure)[:60]


def smaller(case: dict) -> Iterator[dict]:
    """Cases that are a little simpler."""

    def changed(change: Callable[[dict], None]) -> dict:
        other = copy.deepcopy(case)
        change(other)
        return other

    for name in case.get("options", {}):
        yield changed(lambda c, name=name: c["options"].pop(name))
    for i in reversed(range(len(case.get("ops", ())))):
        yield changed(lambda c, i=i: c["ops"].pop(i))
    for i, op in enumerate(case.get("ops", ())):
        for n in {op.get("n", 0) // 2, max(op.get("n", 0) - 1, 0)} - {op.get("n", 0)}:
            if "counts" not in op:
                yield changed(
                    lambda c, i=i, n=n: c["ops"][i].update(
                        n=n, **({"l": n} if c["ops"][i]["op"] == "step" else {})
                    )
                )
        for name in ("view", "bad", "counts", "score", "sees"):
            if name in op:
                yield changed(lambda c, i=i, name=name: c["ops"][i].pop(name))
    for name in ("q", "k", "v", "do", "a"):
        for part in ("view", "bad"):
            if isinstance(case.get(name), dict) and part in case[name]:
                yield changed(lambda c, name=name, part=part: c[name].pop(part))
        if isinstance(case.get(name), dict) and case[name].get("draw") not in (
            None,
            "ones",
            "normal",
        ):
            yield changed(lambda c, name=name: c[name].update(draw="normal"))
    if case.get("g", 1) > 1 or case.get("h", 1) > 1:
        yield changed(
            lambda c: (
                c.update(h=c["h"] // c["g"], g=1)
                if c["g"] > 1 and "h" in c
                else c.update({n: 1 for n in "hg" if n in c})
            )
        )
    if case.get("queries", 0) > case.get("g", 1):
        yield changed(lambda c: c.update(queries=c["g"]))
    for name in SIZES:
        n = case.get(name)
        if isinstance(n, int) and n > 1:
            for to in dict.fromkeys((1, n // 2, n - 1)):
                yield changed(lambda c, name=name, to=to: resize(c, name, to))
    if "d" in case and case.get("dv") not in (None, case["d"]):
        yield changed(lambda c: c.update(dv=c["d"]))


def resize(c: dict, name: str, to: int) -> None:
    if name == "d" and c.get("dv") == c["d"]:
        c["dv"] = to
    if name in ("l", "s") and c["l"] == c["s"]:
        c["l"] = c["s"] = to
    c[name] = to
    lengths = c.get("options", {}).get("key_lengths")
    if lengths is not None:
        c["options"]["key_lengths"] = [min(n, c["s"]) for n in (lengths * c["b"])[: c["b"]]]
    if name == "b":
        for op in c.get("ops", ()):
            if "counts" in op:
                op["counts"] = op["counts"][:to]


def shrink(
    case: dict, failure: str, run: Callable[[dict], str | None], tries: int = 300
) -> tuple[dict, str]:
    """The simplest case found that fails alike, and how."""
    wanted = kind_of(failure)
    again = True
    while again and tries > 0:
        again = False
        for other in smaller(case):
            tries -= 1
            found = run(other)
            if found is not None and kind_of(found) == wanted:
                case = other
                failure = found
                again = True
                break
            if tries <= 0:
                break
    return case, failure
