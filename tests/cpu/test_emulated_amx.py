"""AMX's kernels on a CPU without AMX: its tile instructions emulated, everything else its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from numflash.jit import target

ROOT = Path(__file__).parents[2]
SUITE = [
    f"tests/cpu/test_{name}.py"
    for name in (
        "amx", "amx_stream", "combinations", "int8_float_values", "decode_bits", "decode_int4",
        "decode_latent", "backward",
    )
]  # fmt: skip
TESTS = (
    "amx and not bfloat16-amx_int8 and not float32-amx_int8"  # latent caches of floats: no tiles
)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    "amx_int8" in target.available() or "avx512_vnni" not in target.available(),
    reason="the CPU has AMX, or no AVX-512",
)
def test_the_kernels_give_their_bits():
    command = (
        *(sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"),
        *("-m", "slow or not slow", "-k", TESTS, *SUITE),
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMFLASH_EMULATE_AMX": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1100, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
