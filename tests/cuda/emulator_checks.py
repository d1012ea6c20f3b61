"""Small kernels in the emulator: run one, or expect a named fault at a line of its source."""

import inspect
import re

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from numflash.cuda import emulate
from numflash.cuda.compile import Source, compile_source
from numflash.cuda.compile.target import types
from numflash.cuda.emulator import EmulatorError

WORDS = types.Array(types.uint32, 1, "C")
FLOATS = types.Array(types.float32, 1, "C")


def compiled(function, *args, signature=None, threads=64, arch="sm_80", cluster=1):
    """A kernel's PTX; it takes arrays of words where no signature is given."""
    signature = signature or types.void(*[WORDS for _ in args])
    source = Source(function, signature, threads, cluster=cluster)
    return compile_source(source, arch, "ptx")


def run(function, *args, schedule="random", seed=0, **options):
    """One block, or one cluster of them."""
    kernel = compiled(function, *args, **options)
    return emulate(kernel, kernel.cluster, None, list(args), schedule=schedule, seed=seed)


def words(n=64):
    return np.arange(n, dtype=np.uint32)


def fails(kinds, line, function, *args, said="", **options):
    """The fault is found under every schedule, with the kernel's own line (the one that holds
    `line`; None where schedules find it at different ones).

    said : a pattern of the message
    """
    kernel = compiled(function, *args, **options)
    for schedule, seed in (("random", 0), ("random", 1), ("lockstep", 0)):
        with pytest.raises(EmulatorError) as caught:
            emulate(kernel, kernel.cluster, None, list(args), schedule=schedule, seed=seed)
        assert caught.value.kind in kinds.split(), caught.value
        assert re.search(said, str(caught.value)), caught.value
        if line is not None:
            file, number = caught.value.source
            assert file == inspect.getsourcefile(function)
            source, first = inspect.getsourcelines(function)
            assert line in source[number - first], caught.value
        assert "PTX line" in str(caught.value)


def run_ptx(body, arch="sm_80"):
    return f".version 8.0\n.target {arch}\n.address_size 64\n.visible .entry k()\n{{\n.reg .b32 %r<9>;\n{body}\nret;\n}}\n"
