"""The toolchain without a GPU.

Offline compilation for every architecture, the cache, and what happens without the extra.
"""

import re
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from numflash.cuda.compile import ARCHITECTURES, Source, compiled, compiler, target
from numflash.cuda.compile.target import cuda, types
from numflash.cuda.kernels.flash_float import flash_float
from numflash.errors import ArgumentError

VECTOR = types.Array(types.float32, 1, "C")


def scale_kernel(factor=2.0):
    def scale(x, n):
        i = cuda.grid(1)
        if i < n:
            x[i] = x[i] * types.float32(factor)

    return Source(scale, types.void(VECTOR, types.int32), 64)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMFLASH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "_loaded", {})
    return tmp_path


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_cubin_offline(arch, cache):
    made = compiled(scale_kernel, arch, "cubin")
    assert made.code[:4] == b"\x7fELF" and made.name.encode() in made.code
    assert made.parameters == ("array1", "int32") and made.threads == 64


@pytest.mark.slow
@pytest.mark.parametrize("arch", list(ARCHITECTURES))
def test_every_architecture(arch, cache):
    assert compiled(scale_kernel, arch, "cubin").code[:4] == b"\x7fELF"


@pytest.mark.parametrize(("arch", "target"), [("sm_75", "sm_75"), ("sm_90a", "sm_90a")])
def test_ptx_names_its_target(arch, target, cache):
    assert f".target {target}" in compiled(scale_kernel, arch, "ptx").ptx


@pytest.mark.slow
def test_a_label_that_nvvm_leaves_out():
    """With line numbers NVVM 13.5 drops one of this kernel's.

    Neither ptxas, for Blackwell, nor the emulator could go there.
    """
    source = flash_float(32, 32, 64, 64, group=4, band=True, mask="float")
    text = target.to_ptx(source.function, source.signature, (8, 0), (source.threads, 1), False)
    label = re.search(r"^\$\w+:", text, re.M)[0]
    assert not target.missing_labels(text) and target.missing_labels(text.replace(label, "")) == {
        label[:-1]
    }


@pytest.mark.slow
def test_a_kernel_that_nvvm_refuses_with_line_numbers():
    source = flash_float(32, 32, 64, 64, mask="float", softcap=True, sinks=True, turing=True)
    assert ".target sm_75" in target.to_ptx(
        source.function, source.signature, (7, 5), (source.threads, 1), False
    )


def test_second_process_reads_the_disk(cache, monkeypatch):
    first = compiled(scale_kernel, "sm_80", "ptx", factor=3.0)
    monkeypatch.setattr(compiler, "_loaded", {})
    monkeypatch.setattr(compiler, "compile_source", lambda *a: pytest.fail("compiled again"))
    assert compiled(scale_kernel, "sm_80", "ptx", factor=3.0) == first


@pytest.mark.parametrize(
    "damage",
    [lambda b: b[:-10], lambda b: b"", lambda b: b"{}\n", lambda b: b.replace(b"mul", b"add")],
)
def test_damaged_entries_are_compiled_again(cache, monkeypatch, damage):
    compiled(scale_kernel, "sm_80", "ptx", factor=3.0)
    (path,) = (cache / "cuda").iterdir()
    path.write_bytes(damage(path.read_bytes()))
    monkeypatch.setattr(compiler, "_loaded", {})
    assert "mul.f32" in compiled(scale_kernel, "sm_80", "ptx", factor=3.0).ptx
    assert compiler._read(path) is not None


def test_constants_are_part_of_the_key(cache):
    a, b = (compiled(scale_kernel, "sm_80", "ptx", factor=f) for f in (2.0, 4.0))
    assert a.code != b.code
    assert len(list((cache / "cuda").iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch):
    monkeypatch.setenv("NUMFLASH_CACHE_DIR", "/proc/none")
    monkeypatch.setattr(compiler, "_loaded", {})
    assert ".entry" in compiled(scale_kernel, "sm_80", "ptx").ptx


def test_unknown_architecture():
    with pytest.raises(ArgumentError, match=r"arch: got 'sm_70'; allowed: sm_75"):
        compiled(scale_kernel, "sm_70", "ptx")


def test_tuples_are_flattened():
    signature = types.void(
        types.UniTuple(types.uint64, 2), types.Array(types.int8, 2, "C"), types.float32
    )
    assert compiler.flat_parameters(signature) == ("uint64", "uint64", "array2", "float32")


def test_device_functions_compile_offline():
    @cuda.jit(device=True)
    def double(x):
        return x + x

    def kernel(x):
        x[cuda.grid(1)] = double(x[cuda.grid(1)])

    assert (
        compiler.compile_source(Source(kernel, types.void(VECTOR), 32), "sm_80", "cubin").code[:4]
        == b"\x7fELF"
    )


def test_canary_of_private_names():
    """What `target` uses of numba-cuda beyond its documentation.

    A release that drops one fails here, with its name.
    """
    import numba.cuda.dispatcher
    from numba.cuda.compiler import compile_cuda, kernel_fixup
    from numba.cuda.cudadrv import nvvm

    assert callable(compile_cuda) and callable(kernel_fixup) and callable(nvvm.set_launch_bounds)
    assert callable(numba.cuda.dispatcher.get_current_device)
    assert tuple(int(x) for x in target.numba_cuda_version.split(".")[:2]) in {
        (0, 28),
        (0, 29),
        (0, 30),
    }


def test_a_numpy_without_row_stack(monkeypatch):
    """NumPy 2.5 has dropped a name that numba-cuda uses: it is added during a compilation only."""
    monkeypatch.delattr(np, "row_stack", raising=False)
    before = set(vars(np))
    assert ".entry" in compiler.compile_source(scale_kernel(), "sm_80", "ptx").ptx
    assert set(vars(np)) - {"row_stack"} == before - {"row_stack"} and not hasattr(np, "row_stack")


def test_without_the_extra():
    code = (
        "import sys; sys.modules['numba_cuda'] = None; sys.modules['numba.cuda'] = None\n"
        "import numflash, numflash.cuda\n"
        "try: numflash.cuda.emulate(lambda x: None, 1, 32, [1])\n"
        "except numflash.errors.UnsupportedError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'numflash[cuda]'" in done.stdout, done.stderr
