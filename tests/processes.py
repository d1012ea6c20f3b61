"""Fresh Python processes with the package of this tree."""

import os
import subprocess
import sys
from pathlib import Path

import numflash

ROOT = Path(numflash.__file__).parent.parent


def start(*command, cache=None, folder=ROOT, check=True, timeout=300, wrapper=(), **environment):
    """The finished process of `python *command`, which succeeded if `check`.

    Parameters
    ----------
    cache : the folder of its compiled kernels; that of this process unless given
    folder : where it runs and imports from
    wrapper : a command that starts it
    environment : variables besides those of this process
    """
    environment.setdefault("PYTHONPATH", str(folder))
    if cache is not None:
        environment["NUMBA_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [*wrapper, sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=folder,
        env={**os.environ, **environment},
    )
    assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def run(code, cache=None, *arguments, **options):
    """The same for a program's text."""
    return start("-c", code, *arguments, cache=cache, **options)
