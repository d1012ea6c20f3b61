"""`python -m numflash.cuda.validate`: compare a card with the emulator, then time it.

Every family of kernels runs in a process of its own with a limit, Hopper's forward kernels first,
and is timed as soon as its results agree; a kernel that never ends, or an illegal access, ends its
family and no other. Kernels are compiled, and the emulator's results computed, by all cores while
families run; with NUMFLASH_CUBINS both may be files made ahead
(`python -m numflash.cuda.compile --arch ARCH --to DIR`).

Writes one JSON object, after every row: the card, its clocks and power, the families with their
problems (equal bits with the emulator for INT8, errors against float64 for the rest) and times as
TFLOP/s and as a share of the card's measured product and copy rates, the peers that are installed
(PyTorch's flash and cuDNN backends, FlashAttention, with `--triton FILE` Triton's tutorial
06-fused-attention.py), and whether the targets are met. `--page FILE` makes a page from it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ... import __version__
from ...jit.whole import write_whole
from ..compile import ARCHITECTURES, Key, compiled
from . import expected, page, peers, processes, rates
from .families import Family, families
from .kernels import kernels_of
from .results import shares, shown, targets, verdict

CHILD = (sys.executable, "-m", "numflash.cuda.validate.child")
LIMIT = 20.0  # seconds of a family's problems
TIMING_LIMITS = {False: 60.0, True: 20.0}  # seconds of its timings; --quick
BUDGETS = {False: 540.0, True: 240.0}  # seconds of everything; --quick
_STARTED = time.monotonic()


def _say(text: str) -> None:
    print(f"{time.monotonic() - _STARTED:6.0f} s  {text}", file=sys.stderr, flush=True)


def _write(found: dict[str, Any], path: str) -> None:
    if path != "-":
        write_whole(path, (json.dumps(found, indent=1) + "\n").encode())


def compile_one(key: Key) -> None:
    """Compile a kernel into the cache."""
    factory, arch, constants = key
    compiled(factory, arch, "cubin", **dict(constants))


def ahead(pool: Any, listed: Iterable[Family], arch: str) -> dict[str, list[Future]]:
    """Enqueue what each family needs, in the order of the families: {family: what to wait for}."""
    seen: dict[Any, Future] = {}
    found = {}
    for family in listed:
        keys = sorted(kernels_of(family, arch), key=str)
        made: list[tuple[Any, tuple]] = [(compile_one, (key,)) for key in keys]
        made += [(expected.made, (family.kind, case, arch)) for case in family.cases]
        for work, given in made:
            if str(given) not in seen:
                seen[str(given)] = pool.submit(work, *given)
        found[family.name] = [seen[str(given)] for _, given in made]
    return found


class Validation:
    """One run: what was found, where it is written, and until when it may take."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.end = time.monotonic() + (chosen.minutes * 60 or BUDGETS[chosen.quick])
        self.found: dict[str, Any] = {"numflash": __version__, "families": []}

    def left(self) -> float:
        """Seconds of the budget that remain."""
        return max(0.0, self.end - time.monotonic())

    def write(self) -> None:
        """Bring shares and targets up to date, then the file."""
        shares(self.found)
        self.found["targets"] = targets(self.found)
        self.found["seconds"] = time.monotonic() - _STARTED
        _write(self.found, self.chosen.json)

    def request(self, **more: Any) -> list[str]:
        """The command of a child."""
        c = self.chosen
        given = {"quick": c.quick, "lengths": c.lengths, "triton": c.triton, **more}
        return [*CHILD, json.dumps(given)]

    def describe(self) -> str | None:
        """Find the card; why there is none."""
        said: dict[str, Any] = {}
        state, why = processes.attend(self.request(describe=True), said.update, LIMIT, LIMIT)
        if "card" not in said:
            return said.get("none") or f"the card cannot be opened: {state}: {why}"
        self.found |= said["card"]
        self.found["software"] = peers.software()
        return None

    def family(self, family: Family, futures: list[Future]) -> None:
        """Wait for what a family needs, then run it."""
        row: dict[str, Any] = {
            "family": family.name,
            "state": "running",
            "cases": [],
            "timings": [],
        }
        self.found["families"].append(row)
        try:
            for future in futures:
                future.result(self.left())
        except TimeoutError:
            row |= {"state": "not run", "why": "compiling took the whole time"}
        except Exception as error:  # a compiler's, or the pool's
            row |= {"state": "not run", "why": f"{type(error).__name__}: {error}"}
        if row["state"] == "running" and self.left() < 1:
            row |= {"state": "not run", "why": "no time left"}
        if row["state"] == "running":
            self._run(family, row)
        _say(f"{family.name}: {row['state']}{'; ' * ('why' in row)}{row.get('why', '')}")
        self.write()

    def _run(self, family: Family, row: dict[str, Any]) -> None:
        def take(found: dict[str, Any]) -> None:
            for place, one in found.items():
                row["cases" if place == "case" else "timings"].append(one)
                _say(shown(one))
            self.write()

        started = time.monotonic()
        row["before"] = rates.state()
        limits = (LIMIT, TIMING_LIMITS[self.chosen.quick])
        state, why = processes.attend(
            self.request(family=family.name), take, *(min(x, self.left()) for x in limits)
        )
        row["after"] = rates.state()
        row["seconds"] = time.monotonic() - started
        if state != "ended":
            row |= {"state": state, "why": why}
        elif all(case["passed"] for case in row["cases"]):
            row["state"] = "passed"
        else:
            row |= {"state": "failed", "why": "results differ: nothing was timed"}


def arguments_of(given: list[str] | None) -> argparse.Namespace:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m numflash.cuda.validate", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--json",
        default="-",
        help="file to write after every row (default: standard output, at the end)",
    )
    parser.add_argument("--page", help="HTML file to make from it at the end")
    parser.add_argument("--quick", action="store_true", help="every third problem, two lengths")
    parser.add_argument(
        "--lengths", type=int, nargs="*", help="L of the timings, powers of two; none: no timings"
    )
    parser.add_argument("--families", nargs="+", metavar="NAME", help="only these families")
    parser.add_argument(
        "--triton", help="Triton's tutorial 06-fused-attention.py, to time its kernel too"
    )
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="of everything (default: 9, --quick 4)"
    )
    parser.add_argument("--jobs", type=int, help="processes that compile (default: one per core)")
    parser.add_argument(
        "--compile",
        choices=ARCHITECTURES,
        metavar="ARCH",
        help="only compile and emulate what this architecture will need; needs no card",
    )
    return parser.parse_args(given)


def wanted(chosen: argparse.Namespace, arch: str) -> list[Family]:
    """The families of the arguments."""
    lengths = None if chosen.lengths is None else tuple(chosen.lengths)
    listed = families(arch, chosen.quick, lengths)
    unknown = set(chosen.families or ()) - {x.name for x in listed}
    if unknown:
        raise SystemExit(
            f"--families: got {', '.join(sorted(unknown))}; allowed on {arch}: "
            f"{', '.join(x.name for x in listed)}"
        )
    return [x for x in listed if not chosen.families or x.name in chosen.families]


def main(arguments: list[str] | None = None) -> int:
    """0 if every family passed, 1 if not, 2 without a card."""
    chosen = arguments_of(arguments)
    context = get_context("spawn")  # a fork would share the driver's state
    if chosen.compile:
        with ProcessPoolExecutor(chosen.jobs, context) as pool:
            waiting = ahead(pool, wanted(chosen, chosen.compile), chosen.compile)
            for name, futures in waiting.items():
                for future in futures:
                    future.result()
                _say(f"{name}: kernels and the emulator's results are ready")
        return 0
    validation = Validation(chosen)
    why = validation.describe()
    if why is not None:
        print(why, file=sys.stderr)
        return 2
    found = validation.found
    listed = wanted(chosen, found["arch"])
    _say(f"{found['device']}, {found['arch']}: {len(listed)} families")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was found until then stays
    pool = ProcessPoolExecutor(chosen.jobs, context)
    try:
        waiting = ahead(pool, listed, found["arch"])
        for family in listed:
            validation.family(family, waiting[family.name])
    except (Exception, KeyboardInterrupt) as error:
        found["stopped"] = f"{type(error).__name__}: {error}"
        _say(f"stopped: {found['stopped']}")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    validation.write()
    for goal in found["targets"]:
        _say(verdict(goal))
    if chosen.json == "-":
        print(json.dumps(found, indent=1))
    if chosen.page:
        Path(chosen.page).write_text(page.page(found), encoding="utf-8")
    passed = all(row["state"] == "passed" for row in found["families"])
    return 0 if "stopped" not in found and passed else 1
