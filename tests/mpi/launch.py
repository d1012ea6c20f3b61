"""Start a script on several ranks, with a limit of time; skip where there is no MPI."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MPIEXEC = shutil.which(
    "mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
)
REASON = (
    "mpi4py is not installed (pip install 'numflash[mpi]')"
    if find_spec("mpi4py") is None
    else "no mpiexec beside Python or in PATH (pip install mpich, or the system's MPI)"
    if MPIEXEC is None
    else ""
)
needs_mpi = pytest.mark.skipif(bool(REASON), reason=REASON)


def on_ranks(ranks, *command, limit=240, threads=1):
    """stdout of `python command` on so many ranks.

    Fails when a rank fails, or nothing has come back after `limit` seconds.
    """
    path = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent)))
    env = {
        **os.environ,
        "NUMBA_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": path,
    }
    done = subprocess.run(
        [MPIEXEC, "-n", str(ranks), sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=limit,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
