"""All ranks raise the same error, or none does.

So no rank waits for a message of a rank that has failed.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError

T = TypeVar("T")


def mpi(what: str) -> Any:
    """mpi4py's MPI, or one error that names `what` needed it.

    Raised where mpi4py is missing, or the MPI library that it loads.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UnsupportedError(
            f"{what}: mpi4py cannot be loaded here ({error}); allowed: pip install 'numflash[mpi]', and an MPI "
            "(the cluster's own, or pip install mpich)"
        ) from error
    return MPI


def communicator(comm: Any) -> Any:
    """`comm` if it is an intracommunicator of mpi4py."""
    MPI = mpi("comm")
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise ArgumentTypeError(
            f"comm: got {type(comm).__name__}; allowed: an intracommunicator of mpi4py, as MPI.COMM_WORLD"
        )
    return comm


def portable(error: Exception, rank: int) -> Exception:
    """A picklable copy of the error, with its rank's number."""
    message = f"rank {rank}: {error}"
    try:
        copy = type(error)(message)
        if str(pickle.loads(pickle.dumps(copy))) == message:
            return copy
    except Exception:  # classes of other libraries take other arguments: say what it was in words
        pass
    return RuntimeError(f"rank {rank}: {type(error).__name__}: {error}")


def agree(comm: Any, make: Callable[[], T]) -> list[T]:
    """What `make()` returns on each rank.

    Where it raises on any, the error of the first such rank is raised on all.

    One exchange of small objects; every rank calls it.
    """
    result = None
    mine = None
    error = None
    try:
        result = make()
    except Exception as raised:
        mine = raised
        error = portable(raised, comm.rank)
    everyone = comm.allgather((result, error))
    for rank, (_, found) in enumerate(everyone):
        if found is not None:
            raise found from (mine if rank == comm.rank else None)
    return [result for result, _ in everyone]


def require_same(everyone: Sequence[dict[str, Any]]) -> None:
    """Raise ArgumentError unless all ranks gave the same arguments, {name: value}."""
    first = everyone[0]
    for rank, other in enumerate(everyone):
        for name, value in first.items():
            if other[name] != value:
                raise ArgumentError(
                    f"rank {rank}: {name}: got {other[name]}; allowed: that of rank 0, {value}"
                )
