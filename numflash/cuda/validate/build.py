"""Fills a folder with ready cubins.

`python -m numflash.cuda.compile` (see `numflash.cuda.compile.cubins`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ... import __version__
from ...errors import UnsupportedError
from ...jit.whole import write_whole
from ..compile import ARCHITECTURES, Key, compiled, tool_versions
from ..compile.cubins import MANIFEST, file_name, forget, kernel_name, manifest, source_digest
from . import expected
from .families import families
from .kernels import needed
from .steps import here_only


def _build(key: Key, folder: str) -> dict[str, Any]:
    """Compile a kernel, write its cubin, return its entry of the manifest."""
    factory, arch, constants = key
    item = compiled(factory, arch, "cubin", **dict(constants))
    name = kernel_name(factory, arch, dict(constants))
    file = file_name(factory, arch, dict(constants))
    (Path(folder) / file).write_bytes(item.code)
    launch = {k: v for k, v in vars(item).items() if k not in ("code", "arch")}
    digest = hashlib.sha256(item.code).hexdigest()
    return {"kernel": name, "file": file, "sha256": digest, "launch": launch}


def write(keys: set[Key], folder: str, jobs: int | None = None) -> int:
    """Compile kernels into a folder and add them to its manifest.

    How many bytes of cubins it then lists.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    try:
        entries = dict(manifest(folder))
    except UnsupportedError:
        entries = {}  # new, or of other sources: what it lists is of no use
    todo = sorted(keys, key=str)
    made = [_build(key, folder) for key in todo if jobs == 1 or here_only(key)]
    todo = [key for key in todo if jobs != 1 and not here_only(key)]
    if todo:
        with ProcessPoolExecutor(jobs or os.cpu_count(), get_context("spawn")) as pool:
            made += pool.map(_build, todo, [folder] * len(todo))
    entries |= {entry["kernel"]: entry for entry in made}
    listed = {
        "numflash": __version__,
        "source": source_digest(),
        "tools": tool_versions(),
        "kernels": list(entries.values()),
    }
    write_whole(path / MANIFEST, (json.dumps(listed, indent=1) + "\n").encode())
    forget()
    return sum((path / entry["file"]).stat().st_size for entry in entries.values())


def expect(arch: str, folder: str, quick: bool = False, jobs: int | None = None) -> int:
    """Run the emulator on the problems of a validation; of how many the folder holds results."""
    todo = [(x.kind, case) for x in families(arch, quick) for case in x.cases]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        made = [pool.submit(expected.made, kind, case, arch, folder) for kind, case in todo]
        return sum(future.result() for future in made)


def main(arguments: list[str] | None = None) -> int:
    """`python -m numflash.cuda.compile`: 0 once the folder is written."""
    parser = argparse.ArgumentParser(
        prog="python -m numflash.cuda.compile",
        description="Compile the kernels of `python -m numflash.cuda.validate`, and run the emulator on its problems, "
        "into a folder for NUMFLASH_CUBINS.",
    )
    parser.add_argument("--arch", choices=ARCHITECTURES, nargs="+", required=True)
    parser.add_argument("--to", metavar="DIR", required=True, help="the folder, made if need be")
    parser.add_argument("--quick", action="store_true", help="only what validate --quick uses")
    parser.add_argument(
        "--no-emulator", action="store_true", help="without the emulator's results of validate"
    )
    parser.add_argument("--jobs", type=int, help="processes (default: one per core)")
    chosen = parser.parse_args(arguments)
    for arch in chosen.arch:
        keys = needed(arch, quick=chosen.quick)
        size = write(keys, chosen.to, chosen.jobs)
        print(f"{len(keys)} kernels for {arch}; {chosen.to} holds {size / 1e6:.1f} MB of cubins")
        if not chosen.no_emulator:
            made = expect(arch, chosen.to, chosen.quick, chosen.jobs)
            print(f"{made} problems for {arch} have the emulator's results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
