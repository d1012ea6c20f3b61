"""`python -m numflash.cuda.validate`: compare a card with the emulator, then time it.

Every family of kernels runs in a process of its own, Hopper's forward kernels first: its problems,
then timings of the kernels whose problems agree. A kernel that never ends, or an illegal access,
ends the process; its step is noted, and the next ones run in another process. Kernels are compiled,
and the emulator's results computed, by all cores while families run; with NUMFLASH_CUBINS both may
be files made ahead (`python -m numflash.cuda.compile --arch ARCH --to DIR`).

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
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ... import __version__
from ...errors import UnsupportedError
from ...jit.whole import write_whole
from ..compile import ARCHITECTURES, Key, compiled, is_ready
from ..compile.cubins import source_digest
from . import expected, page, processes, rates
from .families import Family, families
from .kernels import kernels_of
from .results import shares, shown, targets, verdict
from .steps import here_only

CHILD = (sys.executable, "-m", "numflash.cuda.validate.child")
START = 90.0  # seconds until a child says anything: modules are loaded, a context is made
BUDGETS = {False: 540.0, True: 450.0}  # seconds of everything; --quick
SOFTWARE = 60.0  # seconds for the versions of the frameworks
# processes of a family that may end badly: what is left of it is then not run, other families are
MOST_ENDS = 4
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


def expect_one(kind: str, case: tuple, arch: str) -> None:
    """Make the emulator's results of a problem; one without a kernel has none."""
    try:
        expected.make(kind, case, arch)
    except UnsupportedError:
        return


def missing(family: Family, arch: str) -> list[tuple[Callable, tuple]]:
    """What is to be made before a family can run: kernels, and the emulator's results."""
    found: list[tuple[Callable, tuple]] = []
    for key in sorted(kernels_of(family, arch), key=str):
        factory, _, constants = key
        if here_only(key) or is_ready(factory, arch, "cubin", **dict(constants)):
            continue
        found.append((compile_one, (key,)))
    for case in family.cases:
        if not expected.there(family.kind, case, arch):
            found.append((expect_one, (family.kind, case, arch)))
    return found


def ahead(pool: Any, listed: Iterable[Family], arch: str) -> dict[str, Future]:
    """Enqueue what each family needs, in the order of the families, beside those that run.

    {family: a future of the futures to wait for}
    """
    seen: dict[str, Future] = {}

    def enqueue(family: Family) -> list[Future]:
        found = []
        for work, given in missing(family, arch):
            if str(given) not in seen:
                seen[str(given)] = pool.submit(work, *given)
            found.append(seen[str(given)])
        return found

    planner = ThreadPoolExecutor(1)
    waiting = {family.name: planner.submit(enqueue, family) for family in listed}
    planner.shutdown(wait=False)
    return waiting


LISTS = {"case": "cases", "timing": "timings"}


def done(row: dict[str, Any]) -> list[tuple[str, str]]:
    """(place, name) of the steps of which a family's row has rows."""
    return [(place, one["step"]) for place, name in LISTS.items() for one in row[name]]


def lost(row: dict[str, Any], begun: dict[str, Any], why: str) -> None:
    """Note the step that ended its process, unless it has said why itself."""
    place, name = begun["place"], begun["name"]
    said = row[LISTS[place]]
    if any(one["step"] == name and "error" in one for one in said):
        return
    one = {"step": name, "kernels": begun.get("kernels", []), "error": why}
    said.append(
        {"case": name, "passed": False} | one if place == "case" else {"kernel": name} | one
    )


def judged(row: dict[str, Any], ends: list[str], peers: bool) -> dict[str, Any]:
    """State of a family, and why. Peers that take no part are no failure."""
    wrong = [one["step"] for one in row["cases"] if not one["passed"]]
    untimed = [] if peers else [one["step"] for one in row["timings"] if "error" in one]
    if not wrong and not untimed and not ends:
        return {"state": "passed"}
    parts = [
        f"{len(names)} {what}: {', '.join(names[:4])}{', ...' * (len(names) > 4)}"
        for what, names in (
            ("problems differ", wrong),
            ("have no time", untimed),
            ("processes ended badly", ends),
        )
        if names
    ]
    return {"state": "failed", "why": "; ".join(parts)}


def kept_of(chosen: argparse.Namespace, found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """{family: the rows that --resume keeps}: those without a failure, of the same kernels and card."""
    try:
        old = json.loads(Path(chosen.json).read_text()) if chosen.resume else {}
    except (OSError, ValueError):
        return {}
    if any(old.get(x) != found[x] for x in ("source", "device", "arch")):
        return {}
    same = old["asked"] == found["asked"]
    return {
        row["family"]: row if same and row["state"] == "passed" else kept_rows(row)
        for row in old["families"]
    }


def kept_rows(row: dict[str, Any]) -> dict[str, Any]:
    """A family's steps that need not run again, all rows of each."""
    kept: dict[str, Any] = {"seconds": row.get("seconds", 0.0)}
    for name in LISTS.values():
        bad = {x["step"] for x in row[name] if "error" in x or not x.get("passed", True)}
        kept[name] = [x for x in row[name] if x["step"] not in bad]
    return kept


class Validation:
    """One run: what was found, where it is written, and until when it may take."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.end = time.monotonic() + (chosen.minutes * 60 or BUDGETS[chosen.quick])
        self.found: dict[str, Any] = {"numflash": __version__, "source": source_digest()}
        self.found["asked"] = {"quick": chosen.quick, "lengths": chosen.lengths}
        self.found["families"] = []

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
        state, why = processes.attend(self.request(describe=True), said.update, START, START)
        if "card" not in said:
            return said.get("none") or f"the card cannot be opened: {state}: {why}"
        self.found |= said["card"]
        return None

    def software(self) -> None:
        """Versions of the frameworks; one that does not load costs nothing else."""
        said: dict[str, Any] = {}
        limit = min(SOFTWARE, max(5.0, self.left()))
        state, why = processes.attend(self.request(software=True), said.update, limit, limit)
        self.found["software"] = said.get("software") or {"torch": f"none: {state}: {why}"}
        self.write()

    def family(self, family: Family, needs: Future, kept: dict[str, Any]) -> None:
        """Wait for what a family needs, then run it. `kept`: the rows of another run."""
        if kept.get("state") == "passed":
            self.found["families"].append(kept)
            return
        row = {"family": family.name, "state": "running", "cases": [], "timings": []} | kept
        self.found["families"].append(row)
        try:
            for future in needs.result(self.left()):
                future.result(self.left())
        except TimeoutError:
            row |= {"state": "not run", "why": "compiling took the whole time"}
        except Exception as error:  # a compiler's, or the pool's: what can run does
            row["why"] = f"{type(error).__name__}: {error}"
        if row["state"] == "running" and self.left() < 1:
            row |= {"state": "not run", "why": "no time left"}
        if row["state"] == "running":
            self._run(family, row)
        _say(f"{family.name}: {row['state']}{'; ' * ('why' in row)}{row.get('why', '')}")
        self.write()

    def broken(self) -> list[str]:
        """Kernels of which a problem failed, of any family."""
        cases = [case for row in self.found["families"] for case in row["cases"]]
        return sorted({x for case in cases if not case["passed"] for x in case.get("kernels", ())})

    def _run(self, family: Family, row: dict[str, Any]) -> None:
        """Run a family's steps; after one that ends its process, the rest in another one."""
        started = time.monotonic()
        row["before"] = rates.state()
        ends: list[str] = []
        while len(ends) < MOST_ENDS and self.left() >= 1:
            begun: dict[str, Any] = {}
            state, why = self._attend(family, row, begun)
            if state == "ended":
                break
            last = why.splitlines()[-1:]  # the rest is in the step's row
            ends.append(": ".join((begun.get("name", "its start"), state, *last)))
            _say(ends[-1])
            if not begun:  # before the first step: another process would end as well
                break
            lost(row, begun, f"{state}: {why}")
            self.write()
        row["after"] = rates.state()
        row["seconds"] = row.get("seconds", 0.0) + time.monotonic() - started
        row |= judged(row, ends, family.kind.endswith("peers"))

    def _attend(
        self, family: Family, row: dict[str, Any], begun: dict[str, Any]
    ) -> tuple[str, str]:
        """One process; `begun` becomes the step that it was in."""

        def take(found: dict[str, Any]) -> None:
            for place, one in found.items():
                if place == "step":
                    begun.clear()
                    begun.update(one)
                    continue
                one |= {"step": begun["name"], "kernels": begun.get("kernels", [])}
                row[LISTS[place]].append(one)
                _say(shown(one))
                self.write()

        request = self.request(family=family.name, done=done(row), broken=self.broken())
        return processes.attend(request, take, START, self.left())


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
    parser.add_argument(
        "--resume", action="store_true", help="keep what the file of --json has and what passed"
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
        "--minutes", type=float, default=0.0, help="of everything (default: 9, --quick 7.5)"
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
            for name, needs in waiting.items():
                for future in needs.result():
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
    kept = kept_of(chosen, found)
    try:
        waiting = ahead(pool, listed, found["arch"])
        for family in listed:
            validation.family(family, waiting[family.name], kept.get(family.name, {}))
        validation.software()
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
