"""A folder of ready cubins, and machines that have no compiler or none of its packages."""

import importlib.metadata
import json
import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from test_driver_rules import START
from test_stub_driver import driver, run  # noqa: F401
from test_stub_driver import pytestmark as needs_compiler

from numflash.cuda.compile import compiled, compiler, cubins
from numflash.cuda.kernels.decode_combine import decode_combine
from numflash.cuda.kernels.flash_hopper import flash_hopper
from numflash.cuda.launch import plan
from numflash.cuda.validate import build, kernels
from numflash.cuda.validate.cases import problem_of
from numflash.errors import UnsupportedError

SMALL = {"dv": 32, "tile_rows": 16, "exact": False}


def key_of(factory, arch, constants):
    return factory, arch, tuple(sorted(constants.items()))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """One kernel, made without further processes."""
    build.write({key_of(decode_combine, "sm_80", SMALL)}, str(tmp_path), 1)
    monkeypatch.setenv("NUMFLASH_CUBINS", str(tmp_path))
    monkeypatch.setattr(compiler, "_loaded", {})
    yield tmp_path
    cubins.forget()


def test_a_kernel_comes_from_the_folder(folder, monkeypatch):
    monkeypatch.setattr(compiler, "compile_source", None)
    made = compiled(decode_combine, "sm_80", "cubin", **SMALL)
    (file,) = folder.glob("*.cubin")
    assert made.code == file.read_bytes() and made.threads == 128 and made.parameters[0] == "uint64"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest) == {"numflash", "source", "tools", "kernels"}
    assert manifest["tools"]["numba"] == importlib.metadata.version("numba")


def test_folders_that_cannot_be_used(folder):
    def said():
        cubins.forget()
        compiler._loaded.clear()
        with pytest.raises(UnsupportedError, match="NUMFLASH_CUBINS") as found:
            compiled(decode_combine, "sm_80", "cubin", **SMALL)
        return str(found.value)

    (file,) = folder.glob("*.cubin")
    whole = file.read_bytes()
    manifest = (folder / "manifest.json").read_text()
    file.write_bytes(whole[:-1])
    assert "is damaged" in said()
    file.unlink()
    assert "cannot be read" in said()
    (folder / "manifest.json").write_text(manifest.replace('"source": "', '"source": "0'))
    assert "made of other kernels" in said()
    (folder / "manifest.json").write_text("[]")
    assert "manifest.json cannot be read" in said()


def test_more_kernels_join_the_folder(folder):
    build.write({key_of(decode_combine, "sm_75", SMALL)}, str(folder), 1)
    assert len(json.loads((folder / "manifest.json").read_text())["kernels"]) == 2


def test_a_kernel_of_a_score_function_joins_the_folder(folder, monkeypatch):
    """It is compiled in the process that has planned it: no other one knows its code."""
    built = []
    monkeypatch.setattr(build, "_build", lambda key, folder: built.append(key) or ENTRY)
    monkeypatch.setattr(build, "ProcessPoolExecutor", None)
    key = key_of(decode_combine, "sm_80", SMALL | {"functions": "of some code"})
    build.write({key}, str(folder))
    assert built == [key]


ENTRY = {"kernel": "one", "file": "manifest.json"}
NO_COMPILER = """
import sys
for name in ("numba_cuda", "numba.cuda", "cuda.bindings.nvvm", "cuda.bindings.nvjitlink"):
    sys.modules[name] = None
"""
SOLVED = """
card.compiled = compiler.compiled  # what is ready is loaded
print(numflash.attention(*(np.zeros((1, 2, n, 64), np.float16) for n in (70, 90, 90)), impl="cuda").shape)
print(refused(lambda: numflash.attention(*(np.zeros((1, 2, n, 64), np.float16) for n in (70, 90, 90)), impl="cuda", softcap=3.0)))
print(refused(lambda: numflash.attention(*(np.zeros((1, 2, n, 64), np.float16) for n in (70, 90, 90)), impl="cuda-emulator")))
"""


@pytest.mark.slow
@needs_compiler
def test_a_machine_without_a_compiler(driver, tmp_path):  # noqa: F811
    """No numba-cuda, no NVVM, no nvJitLink: what is in the folder runs, what is not is named."""
    launch = plan(problem_of((1, 2, 2, 70, 90, 64), "float16", {}), "sm_90a")
    assert launch.factory is flash_hopper
    build.write({key_of(flash_hopper, "sm_90a", launch.constants)}, str(tmp_path), 1)
    done = run(
        driver,
        NO_COMPILER + START + SOLVED,
        "90",
        NUMFLASH_CUBINS=str(tmp_path),
        NUMFLASH_CACHE_DIR=str(tmp_path / "none"),
    )
    shape, missing, emulated = done.stdout.splitlines()
    assert shape == "(1, 2, 70, 64)" and "launch grid 1 1 1 block 384" in done.stderr
    assert "has no flash_hopper(" in missing and "softcap=True" in missing
    assert "pip install 'numflash[cuda]'" in missing and "pip install 'numflash[cuda]'" in emulated


OPENED = """
from numflash.cuda.device.driver import open_driver
from numflash.errors import UnsupportedError
try:
    open_driver()
    print("opened")
except UnsupportedError as error:
    print(error)
"""


@needs_compiler
def test_the_driver_is_as_new_as_the_machine_code(driver, folder):  # noqa: F811
    """Not as the bindings: a folder may be of another CUDA version than they."""

    def said(linker, version):
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["tools"]["nvidia-nvjitlink"] = linker
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return run(driver, OPENED, "80", STUB_VERSION=version, NUMFLASH_CUBINS=str(folder)).stdout

    assert said("12.9.86", "12080") == "opened\n"
    assert "supports CUDA 12.8; allowed: CUDA 13.0 or later (driver 580" in said("13.5.37", "12080")
    assert said("toolkit 13.0", "13000") == "opened\n"


MISFIT = """
import importlib.abc, sys
class Misfit(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "numba_cuda" or name.startswith("numba.cuda"):
            raise AttributeError("module 'numba.cuda.types' has no attribute 'NPDatetime'")
sys.meta_path.insert(0, Misfit())
"""


def test_a_compiler_that_does_not_go_with_numba(tmp_path):
    """It raises more than ImportError; the package can be imported, and says what is wrong."""
    code = (
        MISFIT
        + """
import numflash.cuda
from numflash.cuda.compile import compiled
from numflash.cuda.kernels.decode_combine import decode_combine
try:
    compiled(decode_combine, "sm_80", "cubin", dv=32, tile_rows=16, exact=False)
except numflash.errors.UnsupportedError as error:
    print(error)
"""
    )
    environment = {**os.environ, "NUMFLASH_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert "in versions that go together" in done.stdout, done.stderr
    assert "AttributeError: module 'numba.cuda.types' has no attribute" in done.stdout


def test_a_toolkit_without_the_wheel_of_nvvm(monkeypatch, tmp_path):
    """The version is the library's own where pip does not know the package."""
    known = importlib.metadata.version

    def version(name):
        if name.startswith("nvidia-"):
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setenv("NUMFLASH_CACHE_DIR", str(tmp_path))
    compiler.tool_versions.cache_clear()
    try:
        assert compiler.tool_versions()["nvidia-nvvm"].startswith("toolkit ")
        assert compiler._key(decode_combine, "sm_80", "cubin", SMALL)
    finally:
        compiler.tool_versions.cache_clear()


@pytest.mark.slow
def test_what_a_validation_needs():
    """Each kernel once, decode's too; a quick run needs fewer."""
    quick = kernels.needed("sm_90a", quick=True)
    whole = kernels.needed("sm_90a")
    names = {f.__name__ for f, _, _ in whole if ".study" not in f.__module__}
    assert quick < whole and {arch for _, arch, _ in whole} == {"sm_90a"}
    assert names == {
        "flash_hopper", "flash_float", "flash_int8_hopper", "flash_int8", "flash_float32", "flash_backward",
        "int8_statistics", "int8_quantize", "int8_results",
        "merge_parts", "backward_rows", "backward_hopper", "backward_float32",
        "decode_append", "decode_int8", "decode_float", "decode_combine", "decode_rotate",
        "product_rate",
    }  # fmt: skip


def test_the_command_names_its_arguments():
    done = subprocess.run(
        [sys.executable, "-m", "numflash.cuda.compile", "--arch", "sm_70", "--to", "x"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "'sm_90a'" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_75", "sm_89"])
def test_the_emulator_takes_an_architecture(arch):
    import numflash

    q = np.random.default_rng(0).standard_normal((1, 1, 16, 32)).astype(np.float16)
    out = numflash.attention(q, q, q, impl=f"cuda-emulator:{arch}")
    assert np.abs(out - numflash.attention(q, q, q, impl="reference")).max() < 2e-3
    cache = numflash.KVCache(1, 1, 32, 32, "float16", device=f"cuda-emulator:{arch}")
    cache.append(q, q)
    assert np.abs(cache.decode(q[:, :, :1]) - out[:, :, :1]).max() < 4e-3
    assert cache.emulator.arch == arch
    with pytest.raises(numflash.errors.ArgumentError, match="after 'cuda-emulator:': 'sm_75'"):
        numflash.attention(q, q, q, impl="cuda-emulator:sm_70")
