"""The child process.

Runs numbered cases, and leaves the number of the one it is in where its parent finds it after a
crash.

Run as `python -m tests.fuzz.worker`; commands come as lines of JSON on stdin, answers go to stdout.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
import traceback
import warnings

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def checks() -> dict:
    from . import caches, flexes, invalid, torches
    from . import checks as plain

    return {
        "attention": plain.attention, "quantised": plain.quantised, "varlen": plain.varlen, "merge": plain.merge,
        "backward": plain.backward, "cache": caches.cache, "torch": torches.torch, "flex": flexes.flex, "refused": invalid.refused,
    }  # fmt: skip


def outcome(case: dict, table: dict) -> str | None:
    """None, or what is wrong in one line. Warnings that leave a call count as wrong."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("default", category=DeprecationWarning)
            table[case["kind"]](case)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = next(
            (f for f in reversed(frames) if "numflash" in f.name or "/numflash/" in f.filename),
            frames[-1],
        )
        return f"{type(error).__name__}: {str(error)[:400]} ({os.path.basename(place.filename)}:{place.lineno})"
    return None


def memory() -> int:
    """Bytes that the process has used at most; 0 where that is not known."""
    try:
        import resource
    except ImportError:
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def main() -> None:
    from .draw import case

    table = checks()
    at = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 8)
    for line in sys.stdin:
        order = json.loads(line)
        if "case" in order:
            answer = {"failure": outcome(order["case"], table)}
        else:
            answer = {"failures": [], "kinds": {}}
            end = time.monotonic() + order["seconds"]
            number = order["first"]
            while number < order["stop"] and time.monotonic() < end:
                at[:] = number.to_bytes(8, "little")
                made = case(order["seed"], number, tuple(order["kinds"]))
                answer["kinds"][made["kind"]] = answer["kinds"].get(made["kind"], 0) + 1
                failure = outcome(made, table)
                if failure:
                    answer["failures"].append([number, failure])
                number += 1
            answer["next"], answer["memory"] = number, memory()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
