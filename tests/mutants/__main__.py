"""`python -m tests.mutants [WORD ...]`.

Plant one fault after the other in a copy of the package, and see the tests fail.

WORD ... : only the faults with this number, or with this word in their file's name. Faults that nothing can
notice are left out, with their reason. Kernels are compiled anew for each fault, so the whole table
takes about an hour.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .planted import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 900  # seconds for the tests of one fault; a test that hangs has noticed it
NO_TESTS = "no such tests"


def plant(copy: Path, mutant: Mutant) -> str:
    """Change the copy; returns the text as it was."""
    file = copy / "numflash" / mutant.file
    text = file.read_text()
    file.write_text(text.replace(mutant.old, mutant.new, 1))
    return text


def chosen(word: str, number: int, mutant: Mutant) -> bool:
    """Whether a word of the command line means this fault: "17" is a number, "int8/" a file."""
    return number == int(word) if word.isdigit() else word in mutant.file


def noticed(copy: Path, mutant: Mutant, cache: Path) -> str:
    """How the tests end on the changed copy: first the default ones, then, if they notice nothing,
    those marked slow.

    "killed", "survived", or what went wrong with the tests themselves.
    """
    found = ended(copy, mutant, cache, "not slow")
    if found == "survived" or found.startswith(NO_TESTS):
        slow = ended(copy, mutant, cache, "slow")
        found = found if slow.startswith(NO_TESTS) else slow
    return found


def ended(copy: Path, mutant: Mutant, cache: Path, marks: str) -> str:
    """The same for the tests with these marks."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "NUMBA_CACHE_DIR": str(cache)}
    environment["TABLE"] = "whole"  # whatever the date
    words = mutant.tests.split(" -k ")
    tests = [*shlex.split(words[0]), *(["-k", words[1]] if len(words) > 1 else [])]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, "-m", marks, *tests],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        return "killed (no answer)"
    if done.returncode == 0:
        return "survived"
    if done.returncode in (4, 5):
        return f"{NO_TESTS}: {done.stdout.strip().splitlines()[-1:]}"
    return "killed" if done.returncode in (1, 2) else f"killed (exit {done.returncode})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*")
    words = parser.parse_args().words
    for word in words:
        if not any(chosen(word, number, mutant) for number, mutant in enumerate(MUTANTS)):
            parser.error(f"words: got {word!r}, which chooses no fault of planted.py")
    alive = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        cache = Path(folder) / "cache"
        copy.mkdir()
        for name in ("numflash", "tests", "pyproject.toml"):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        for number, mutant in enumerate(MUTANTS):
            if words and not any(chosen(word, number, mutant) for word in words):
                continue
            start = time.monotonic()
            if mutant.equivalent:
                found = f"equivalent: {mutant.equivalent}"
            else:
                text = plant(copy, mutant)
                found = noticed(copy, mutant, cache)
                (copy / "numflash" / mutant.file).write_text(text)
                alive += not found.startswith("killed")
            shown = " ".join(mutant.old.split())[:60]
            print(
                f"{number:3} {mutant.file}: {shown}: {found} ({time.monotonic() - start:.0f} s)",
                flush=True,
            )
    print(f"{alive} faults that no test noticed")
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main())
