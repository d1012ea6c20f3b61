"""On an AArch64 machine, real or emulated (`make test-aarch64`): what it is taken for, and the bits of INT8 attention on it."""
import os
import platform

import numpy as np
import pytest
from oracles import qkv

from numflash import reference, validation
from numflash.cpu import launch, target
from numflash.cpu.isas import VECTOR_ISAS, running_lanes
from numflash.errors import UnsupportedError
from numflash.quantization import quantize_problem

pytestmark = pytest.mark.skipif(platform.machine() != "aarch64", reason="needs an AArch64 machine; make test-aarch64 emulates one")

# GUEST_CPU -> (instruction sets, best first; int32 lanes of the best)
EXPECTED = {"a64fx": (["sve", "portable"], 16), "neoverse-v1": (["sve", "neon_dot", "portable"], 8),
            "neoverse-v2": (["sve", "neon_dot", "portable"], 4), "neoverse-n1": (["neon_dot", "portable"], 4)}
CASES = {
    "full": ({"l": 30, "s": 140, "d": 64}, {}),
    "causal": ({"l": 70, "s": 70, "d": 20, "dv": 36}, {"is_causal": True}),
    "grouped": ({"h": 4, "hkv": 2, "l": 5, "s": 130, "d": 33}, {"enable_gqa": True}),
    "one": ({"l": 1, "s": 1, "d": 1}, {}),
    "mask": ({"l": 9, "s": 200, "d": 16}, {"window": (40, 17), "softcap": 2.0}),
}


@pytest.mark.skipif("GUEST_CPU" not in os.environ, reason="the emulated machine is known by this variable")
def test_the_machine_is_detected():
    cpu = os.environ["GUEST_CPU"]
    isas, lanes = EXPECTED[cpu]
    assert target.cpu_name() == cpu
    assert target.available() == isas and running_lanes(isas[0]) == lanes


def test_what_the_machine_lacks_is_refused():
    for isa in set(target.ISAS) - set(target.available()):
        with pytest.raises(UnsupportedError, match=f"isa: '{isa}' needs"):
            target.require(isa)


@pytest.mark.parametrize("isa", target.available()[:1] if os.environ.get("GUEST_CPU", "a64fx") != "a64fx" else target.available())
def test_bits_of_the_integer_model(isa):
    assert isa in VECTOR_ISAS or isa == "portable"
    for name, (shape, options) in CASES.items():
        problem = quantize_problem(validation.problem(*qkv(**shape), precision="int8", return_lse=True, **options))
        out, lse = reference.integer_model(problem)
        got, got_lse = launch.run(problem, isa)
        np.testing.assert_array_equal(got, out, err_msg=name)
        np.testing.assert_array_equal(got_lse, lse, err_msg=name)
