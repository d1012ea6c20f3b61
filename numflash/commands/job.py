"""`numflash job`: a batch script for Fugaku (A64FX, PJM) or a SLURM cluster, printed.

One process per memory group (NUMA node), its threads and its memory inside the group: that is what
both scripts are about. Nothing is submitted, and nothing here needs a cluster.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import ArgumentError

GROUPS = 4  # core memory groups of an A64FX node
THREADS = 12  # cores of each
DEFAULT = ("python", "-m", "numflash", "demo", "ring", "--threads", "{threads}")
TIME = re.compile(r"(?!0+:00:00)[0-9]+:[0-5][0-9]:[0-5][0-9]")
NAME = re.compile(r"[\w.-]+")


class Request(NamedTuple):
    """The resources that a script requests from the scheduler.

    groups : processes of a node, one in each memory group
    threads : of a process
    account, queue : of the scheduler (Fugaku: group and resource group); "" for none
    command : run by every process; its words
    """

    nodes: int = 1
    groups: int = GROUPS
    threads: int = THREADS
    time: str = "00:30:00"
    account: str = ""
    queue: str = ""
    environment: str = ".venv"
    command: Sequence[str] = ()


def _checked(request: Request) -> Request:
    for field in ("nodes", "groups", "threads"):
        if getattr(request, field) < 1:
            raise ArgumentError(f"{field}: got {getattr(request, field)}; allowed: 1 or more")
    if not TIME.fullmatch(request.time):
        raise ArgumentError(
            f"time: got {request.time!r}; allowed: as '00:30:00', hours, minutes, seconds, more than none"
        )
    if not request.environment:
        raise ArgumentError("environment: got ''; allowed: a folder")
    for field in ("account", "queue"):
        value = getattr(request, field)
        if value and not NAME.fullmatch(value):
            raise ArgumentError(
                f"{field}: got {value!r}; allowed: letters, digits, '.', '_' and '-'"
            )
    return request


def _command(request: Request) -> str:
    words = request.command or [word.format(threads=request.threads) for word in DEFAULT]
    return shlex.join(words)


def _environment(request: Request) -> str:
    """The kernels' folder stays after the job: the next one finds them compiled."""
    folder = os.path.expanduser(request.environment)  # quoted, a shell leaves ~ as it is
    return f"""source {shlex.quote(folder)}/bin/activate
export NUMBA_NUM_THREADS={request.threads} OMP_NUM_THREADS={request.threads}
export OMP_PROC_BIND=close OMP_PLACES=cores
export NUMBA_CACHE_DIR="${{NUMBA_CACHE_DIR:-$HOME/.cache/numflash/numba-cache}}"
mkdir -p "$NUMBA_CACHE_DIR\""""


def fugaku(request: Request) -> str:
    """A script for `pjsub`."""
    if request.groups > GROUPS:
        raise ArgumentError(
            f"groups: got {request.groups}; allowed: 1 to {GROUPS}, an A64FX's memory groups"
        )
    if request.threads > THREADS:
        raise ArgumentError(
            f"threads: got {request.threads}; allowed: 1 to {THREADS}, the cores of a memory group"
        )
    queue = request.queue or ("small" if request.nodes <= 384 else "large")
    account = f'#PJM -g "{request.account}"\n' if request.account else ""
    processes = request.nodes * request.groups
    return f"""#!/bin/bash
#PJM -L "node={request.nodes}"
#PJM -L "rscgrp={queue}"
#PJM -L "elapse={request.time}"
#PJM -L "freq=2000,eco_state=0"          # 2.0 GHz and both floating-point pipes
#PJM --mpi "max-proc-per-node={request.groups}"
#PJM -j
{account}set -e
# one process per core memory group: {request.threads} threads, and 8 GiB of HBM2, of its own
{_environment(request)}
cat > group-$PJM_JOBID.sh << 'END'
#!/bin/bash
node=$((4 + ${{PLE_RANK_ON_NODE:-${{OMPI_COMM_WORLD_LOCAL_RANK:-0}}}}))     # the groups are NUMA nodes 4 to 7
exec numactl --cpunodebind=$node --membind=$node "$@"
END
chmod +x group-$PJM_JOBID.sh

numactl --cpunodebind=4 --membind=4 python -m numflash info      # must say: a64fx, sve
numactl --cpunodebind=4 --membind=4 python -m numflash warmup    # compiles once, for this job and later ones: minutes
mpiexec -n {processes} ./group-$PJM_JOBID.sh {_command(request)}
"""


def slurm(request: Request) -> str:
    """A script for `sbatch`."""
    account = f"#SBATCH --account={request.account}\n" if request.account else ""
    queue = f"#SBATCH --partition={request.queue}\n" if request.queue else ""
    return f"""#!/bin/bash
#SBATCH --nodes={request.nodes}
#SBATCH --ntasks-per-node={request.groups}
#SBATCH --cpus-per-task={request.threads}
#SBATCH --hint=nomultithread
#SBATCH --time={request.time}
{account}{queue}set -e
# one process per memory group (NUMA node): {request.threads} threads, memory from the same group
{_environment(request)}
export SRUN_CPUS_PER_TASK={request.threads}      # from SLURM 22.05 on srun does not take it from above: one core
srun --nodes=1 --ntasks=1 python -m numflash info
srun --nodes=1 --ntasks=1 python -m numflash warmup              # compiles once, for this job and later ones: minutes
srun --cpu-bind=cores --mem-bind=local --distribution=block:block {_command(request)}
"""


SCHEDULERS = {"fugaku": fugaku, "slurm": slurm}


def run(scheduler: str, request: Request) -> dict[str, Any]:
    """Print the script and return it with the resources it requests.

    Raises
    ------
    ArgumentError
        For an unknown scheduler, a size below 1 or beyond the machine, or a time of another form.
    """
    if scheduler not in SCHEDULERS:
        raise ArgumentError(
            f"scheduler: got {scheduler!r}; allowed: {', '.join(map(repr, SCHEDULERS))}"
        )
    text = SCHEDULERS[scheduler](_checked(request))
    print(text, end="")
    return {"scheduler": scheduler, "processes": request.nodes * request.groups, "script": text}
