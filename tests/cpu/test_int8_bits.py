"""The bits of INT8 attention.

Integer model = every instruction set, in this process and in one with another target.
"""

import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
from bits_cases import cases, digest
from daily import between_slow, of_today

from numflash import reference
from numflash.cpu import launch
from numflash.jit import target

HERE = Path(__file__).parent
TWO = min(2, numba.config.NUMBA_NUM_THREADS)


@pytest.fixture(scope="module")
def model():
    """name -> (problem, out, lse) of the integer model."""
    return {name: (problem, *reference.integer_model(problem)) for name, problem in cases()}


def in_process(isa, threads, **environment):
    """name -> digest, computed in a process of its own."""
    path = os.pathsep.join([str(HERE.parent.parent), str(HERE.parent), str(HERE)])
    done = subprocess.run(
        [sys.executable, str(HERE / "bits_cases.py"), isa, str(threads)],
        capture_output=True,
        text=True,
        timeout=550,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {line[65:]: line[:64] for line in done.stdout.splitlines()}


@pytest.mark.parametrize("isa", between_slow(target.available()))
def test_every_instruction_set_gives_the_bits_of_the_model(isa, model):
    for name, (problem, out, lse) in model.items():
        got, got_lse = launch.run(problem, isa)
        np.testing.assert_array_equal(got, out, err_msg=name)
        np.testing.assert_array_equal(got_lse, lse, err_msg=name)


@pytest.mark.parametrize("isa", target.available()[:1])
def test_any_number_of_threads_and_every_run_gives_the_same_bits(isa, model):
    before = numba.get_num_threads()
    try:
        for threads in (1, TWO, TWO):
            numba.set_num_threads(threads)
            for name, (problem, out, lse) in model.items():
                assert digest(*launch.run(problem, isa)) == digest(out, lse), (name, threads)
    finally:
        numba.set_num_threads(before)


@pytest.mark.skipif("avx2" not in target.available(), reason="the CPU has no AVX2")
@pytest.mark.slow
@pytest.mark.parametrize("cpu", ["haswell"])
def test_another_target_gives_the_same_bits(cpu, model):
    """Code for a CPU without AVX-512: chosen by NUMBA_CPU_NAME, in its own process."""
    found = in_process("avx2", TWO, NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES="")
    assert found == {name: digest(out, lse) for name, (_, out, lse) in model.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("isa", "cpu", "features"),
    of_today(
        [
            ("portable", "x86-64", ""),
            ("portable", "nehalem", ""),
            ("avx2", "znver3", ""),
            ("avx_vnni", "alderlake", ""),
        ],
        2,
    ),
)
def test_more_targets_give_the_same_bits(isa, cpu, features, model):
    needs = {"avx_vnni": "avxvnni", "avx2": "avx2", "portable": None}[isa]
    if needs and needs not in target.features():
        pytest.skip(f"the CPU cannot run code with {needs}")
    found = in_process(isa, 1, NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES=features)
    assert found == {name: digest(out, lse) for name, (_, out, lse) in model.items()}


def test_a_target_that_lacks_an_instruction_set_refuses_it():
    code = (
        "from numflash.jit import target; from numflash.errors import UnsupportedError\n"
        "assert target.available()[0] in ('avx2', 'portable'), target.available()\n"
        "try: target.require('avx512_vnni')\n"
        "except UnsupportedError as error: assert 'haswell' in str(error)\n"
        "else: raise SystemExit(1)"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        timeout=100,
        env={**os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""},
    )
