import os
from importlib.util import find_spec

import hypothesis
import pytest
from daily import left_out_today

# The same examples in every run: a change is judged by what it does; `make fuzz` draws new ones.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.load_profile("same")
os.environ.setdefault(
    "OPENBLAS_NUM_THREADS", "1"
)  # BLAS threads keep spinning and take the cores from the kernels
os.environ["NUMFLASH_TILINGS"] = os.path.join(
    os.path.dirname(__file__), "none.json"
)  # no choice of this user
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # two test processes share the cores

if find_spec("numflash") and find_spec("numba"):
    from numflash.jit import compiler

    compiler.CHECKED = True  # callers that would share code compiled for another kind of them

# The files that take longest start first, so that two processes end together (`make test` takes
# whole files, in the order of the collection). Files whose kernels are the same stand apart: the
# second one finds them on disk.
LONGEST = (
    "tests/test_notebooks.py",
    "tests/test_guard.py",
    "tests/cuda/test_decode_cuda.py",
    "tests/cpu/test_combinations.py",
    "tests/cuda/test_decode_options_cuda.py",
    "tests/cuda/test_sass.py",
    "tests/cuda/test_decode_int4_cuda.py",
    "tests/pytorch/test_smollm2.py",
    "tests/pytorch/test_resident.py",
    "tests/cuda/test_sass_int8.py",
    "tests/cuda/test_sass_table.py",
    "tests/cuda/test_linked.py",
    "tests/cuda/test_cycles.py",
    "tests/cuda/test_flash_int8.py",
    "tests/test_docs.py",
    "tests/cpu/test_decode_rotated.py",
    "tests/cpu/test_int8_float_values.py",
    "tests/test_cli.py",
    "tests/test_export.py",
    "tests/test_validate_cpu.py",
    "tests/test_robust.py",
    "tests/test_engine.py",
    "tests/cpu/test_backward.py",
    "tests/cuda/test_flash_hopper.py",
    "tests/cuda/test_flash_halves.py",
    "tests/cuda/test_stub_driver.py",
    "tests/cuda/test_flash_backward.py",
    "tests/cpu/test_cache_sequences.py",
    "tests/test_disk_cache.py",
    "tests/test_codegen.py",
    "tests/cuda/test_validate.py",
    "tests/cpu/test_decode_cache.py",
    "tests/aarch64/test_estimate.py",
    "tests/cpu/test_int8_bits.py",
)


# Of the slow tests here a run of the slow ones alone (`make test-slow`) has a third, by the date: each compiles kernels of
# its own, for a card, another instruction set, a chapter or a page.
THIRDS = (
    "tests/cuda/",
    "tests/aarch64/",
    "tests/cpu/test_decode_bits.py",
    "tests/cpu/test_decode_int4.py",
    "tests/cpu/test_decode_options.py",
    "tests/cpu/test_decode_rotated.py",
    "tests/cpu/test_study_",
    "tests/test_docs.py",
    "tests/test_export.py",
    "tests/test_notebooks.py::test_a_notebook_runs",
)


def pytest_collection_modifyitems(config, items):
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.split("::")[0], len(place)))
    if find_spec("numba_cuda") is None:
        skip = pytest.mark.skip(reason="needs the cuda extra: pip install 'numflash[cuda]'")
        for item in items:
            if "cuda-emulator" in item.name:
                item.add_marker(skip)
    if config.option.markexpr != "slow":
        return
    slow = [i for i in items if i.get_closest_marker("slow") and i.nodeid.startswith(THIRDS)]
    out = {id(slow[n]) for n in left_out_today([item.nodeid for item in slow])}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in out])
    items[:] = [item for item in items if id(item) not in out]
