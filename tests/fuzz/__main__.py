"""`python -m tests.fuzz --seconds 600 --seed 1`: random calls in a child process.

Each failure is printed with a line that repeats it.

A crash of the child is a failure of the case that it was in. The same seed gives the same cases,
whatever the time.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections import Counter

from .draw import KINDS, case
from .shrink import kind_of, shrink

PATIENCE = 400  # seconds without an answer: a case that hangs (the first ones compile)
BATCH = 5.0  # seconds of cases between two answers
MEMORY = 3 << 30  # bytes of a child that is replaced by a fresh one


class Child:
    """A worker process that is started again after a crash."""

    def __init__(self) -> None:
        self.file = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115
        self.file.write(bytes(8))
        self.file.flush()
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker", self.file.name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
        )  # fmt: skip

    def ask(self, order: dict) -> dict:
        """The worker's answer, or {"crash": ..., "at": number of the case}."""
        if self.process is None or self.process.poll() is not None:
            self.start()
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        with selectors.DefaultSelector() as wait:
            wait.register(self.process.stdout, selectors.EVENT_READ)
            late = not wait.select(PATIENCE + order.get("seconds", 0))
        line = b"" if late else self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.stop()
        how = "no answer" if late else f"exit {self.process.returncode}"
        self.errors.seek(0)
        said = self.errors.read().decode(errors="replace").strip().splitlines()
        with open(self.file.name, "rb") as f:
            return {
                "crash": f"crash: {how} {said[-1] if said else ''}",
                "at": int.from_bytes(f.read(8), "little"),
            }

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
        if self.process is not None:
            self.process.wait()

    def run(self, one: dict) -> str | None:
        answer = self.ask({"case": one})
        return answer.get("crash") or answer.get("failure")


def have_torch() -> bool:
    return (
        subprocess.run([sys.executable, "-c", "import torch"], capture_output=True).returncode == 0
    )


def repeat_line(one: dict) -> str:
    return f"python -m tests.fuzz --case '{json.dumps(one, separators=(',', ':'))}'"


def fuzz(
    seed: int,
    seconds: float,
    first: int,
    cases: int,
    kinds: tuple[str, ...],
    most: int,
    shrinks: bool,
) -> int:
    child = Child()
    seen = {}
    done = Counter()
    failed = 0
    number = first
    start = time.monotonic()
    last = 0.0
    used = 0
    stop = first + cases if cases else 1 << 62
    while number < stop and (left := start + seconds - time.monotonic()) > 0 and len(seen) < most:
        order = {
            "seed": seed,
            "first": number,
            "stop": stop,
            "seconds": min(BATCH, left),
            "kinds": kinds,
        }
        answer = child.ask(order)
        if "crash" in answer:
            done["crashed"] += 1
            failures = [[answer["at"], answer["crash"]]]
            number = answer["at"] + 1
        else:
            failures = answer["failures"]
            number = answer["next"]
            done.update(answer["kinds"])
            used = answer["memory"]
            if used > MEMORY:
                child.stop()
        for at, failure in failures:
            failed += 1
            kind = f"{case(seed, at, kinds)['kind']} {kind_of(failure)}"
            if kind not in seen:
                seen[kind] = at
                report(child, seed, at, kinds, failure, shrinks)
        if time.monotonic() - last > 60:
            last = time.monotonic()
            print(
                f"# {number - first} cases in {last - start:.0f} s, {failed} failures of {len(seen)} kinds, "
                f"{used >> 20} MiB",
                flush=True,
            )
    child.stop()
    os.unlink(child.file.name)
    spent = time.monotonic() - start
    each = ", ".join(f"{n} {kind}" for kind, n in done.most_common())
    print(
        f"seed {seed}: {number - first} cases in {spent:.0f} s ({each}): {failed} failures of {len(seen)} kinds",
        flush=True,
    )
    return failed


def report(
    child: Child, seed: int, at: int, kinds: tuple[str, ...], failure: str, shrinks: bool
) -> None:
    one = case(seed, at, kinds)
    if shrinks:
        one, failure = shrink(one, failure, child.run)
    print(f"FAILED case {at} of seed {seed}: {failure}\n    {repeat_line(one)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument(
        "--cases", type=int, default=0, help="stop after so many; 0 for no limit but the time"
    )
    parser.add_argument("--kinds", default="", help=f"some of {' '.join(KINDS)}")
    parser.add_argument("--most", type=int, default=50, help="stop after so many kinds of failure")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--case", help="one case, as a failure's line gives it")
    given = parser.parse_args()
    if given.case:
        child = Child()
        failure = child.run(json.loads(given.case))
        child.stop()
        print(failure or "passed")
        return int(failure is not None)
    kinds = tuple(given.kinds.replace(",", " ").split()) or tuple(KINDS)
    if "torch" in kinds and not have_torch():
        print("# without PyTorch: no cases of numflash.torch")
        kinds = tuple(kind for kind in kinds if kind != "torch")
    return int(
        fuzz(
            given.seed,
            given.seconds,
            given.first,
            given.cases,
            kinds,
            given.most,
            not given.no_shrink,
        )
        > 0
    )


if __name__ == "__main__":
    sys.exit(main())
