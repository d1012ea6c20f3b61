"""Kernels for C: what is written links with the C compiler here and gives NumPy's and the model's
bits.
"""

import ctypes
import platform
import shutil
import subprocess

import numpy as np
import pytest

from numflash.commands.cli import main
from numflash.errors import ArgumentError, UnsupportedError
from numflash.jit import target
from numflash.machinecode import export, exported_decode

needs_gcc = pytest.mark.skipif(
    not (shutil.which("gcc") and shutil.which("make")), reason="needs gcc and make"
)
NATIVE = platform.machine() in ("x86_64", "aarch64")


def check(folder):
    return subprocess.run(
        ["make", "-C", str(folder), "check", "CFLAGS=-O1 -Wall -Werror"],
        capture_output=True,
        text=True,
    )


@needs_gcc
@pytest.mark.skipif(
    not NATIVE or target.available()[0] == "portable", reason="no register tiles here"
)
@pytest.mark.parametrize(
    "kernel",
    [
        "int8-softmax",
        "float32-softmax",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in (
                "int8-scores",
                "int8-values",
                "float32-scores",
                "float32-values",
                "int8-attention",
                "int8-append",
                "int8-decode",
            )
        ),
    ],
)
def test_an_exported_kernel_links_and_gives_the_results(kernel, tmp_path):
    found = export.run(kernel, "host", tmp_path)
    done = check(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kernel}: 0 results differ" in done.stdout
    # the listing assembles to the same function
    listing = subprocess.run(
        ["make", "-B", "-C", str(tmp_path), "check", f"OBJECT={found['symbol']}.s"],
        capture_output=True,
        text=True,
    )
    assert listing.returncode == 0, listing.stdout + listing.stderr
    # and the check can fail
    header = tmp_path / "example.h"
    text = header.read_text()
    at = text.index("= {\n", text.index(" expected_")) + 4
    header.write_text(text[:at] + "    77, " + text[at:].split(",", 1)[1])
    assert check(tmp_path).returncode != 0


@needs_gcc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("cpu", "isa", "kernels"),
    [
        ("haswell", "avx2", ("int8-append", "int8-decode")),
        ("alderlake", "avx_vnni", ("int8-append",)),
    ],
)
def test_a_cache_in_c_by_narrower_vectors(cpu, isa, kernels, tmp_path):
    """Appended in three calls, the second beginning inside a block and ending in the next: the bytes
    of NumPy's cache, and attention over them the model's bits (`make check`).
    """
    if isa not in target.available():
        pytest.skip(f"no {isa} here")
    for kernel in kernels:
        assert export.run(kernel, cpu, tmp_path / kernel)["isa"] == isa
        done = check(tmp_path / kernel)
        assert done.returncode == 0 and f"{kernel}: 0 results differ" in done.stdout, done.stderr
    heads, d, dv = exported_decode.HEADS, exported_decode.HEAD_DIM, exported_decode.VALUE_DIM
    folder, library = tmp_path / "int8-append", tmp_path / "append.so"
    command = ["gcc", "-shared", "-fPIC", "-o", library, folder / "runtime.c"]
    subprocess.run([*command, folder / "numflash_int8_append.o"], check=True)
    append = ctypes.CDLL(str(library)).numflash_int8_append_raw
    key, value = exported_decode._tokens(256)
    expected, _, _ = exported_decode._filled(isa, key, value, 256)
    cache, offset = np.zeros_like(expected), np.zeros((heads, d), np.float32)
    result, failed = (ctypes.c_int64 * 8)(), ctypes.c_void_p()
    for first, stop in ((0, 77), (77, 171), (171, 256)):
        some = [np.ascontiguousarray(x[:, first:stop]) for x in (key, value)]
        numbers = heads, stop - first, first, 256, d, dv
        arguments = [ctypes.c_int64(x.ctypes.data) for x in (*some, offset, cache)]
        arguments += [ctypes.c_int64(x) for x in numbers]
        assert append(result, ctypes.byref(failed), *arguments) == 0
    np.testing.assert_array_equal(cache, expected)


@pytest.mark.parametrize(
    "kernel",
    [
        "int8-scores",
        "float32-values",
        "exp2-fexpa",
        "int8-softmax",
        "float32-softmax",
        pytest.param("int8-decode", marks=pytest.mark.slow),
    ],
)
def test_code_for_the_a64fx(kernel, tmp_path):
    found = export.run(kernel, "a64fx", tmp_path)
    text = (tmp_path / f"{found['symbol']}.s").read_text()
    marks = {
        "float32-values": "fmla",
        "exp2-fexpa": "fexpa",
        "int8-softmax": "smax",
        "float32-softmax": "fmla",
    }
    assert f"{marks.get(kernel, 'sdot')}\tz" in text
    assert (tmp_path / f"{found['symbol']}.o").read_bytes()[18:20] == b"\xb7\x00", "ELF for AArch64"
    assert "aarch64-linux-gnu-gcc" in (tmp_path / "Makefile").read_text() or (
        platform.machine() == "aarch64"
    )


@pytest.mark.parametrize(
    ("kernel", "cpu", "error", "message"),
    [
        ("quantize-rows", "host", ArgumentError, "cannot be exported; allowed: 'int8-scores'"),
        ("int8-scores", "z80", ArgumentError, "cpu: got 'z80'; allowed: 'host'"),
        ("exp2-fexpa", "neoverse-n1", UnsupportedError, "'exp2-fexpa' needs vectors.*SVE"),
        ("int8-scores", "x86-64-v2", UnsupportedError, "lacks; allowed: a CPU with AVX2"),
        ("int8-decode", "cortex-a72", UnsupportedError, "'int8-decode' needs vectors"),
    ],
)
def test_what_cannot_be_exported(kernel, cpu, error, message, tmp_path):
    with pytest.raises(error, match=message):
        export.run(kernel, cpu, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_folder_must_be_writable(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ArgumentError, match="to: cannot write"):
        export.run("float32-values", "a64fx", file / "folder")


def test_the_printed_command_quotes_the_folder(tmp_path, capsys):
    to = tmp_path / "a folder"
    assert main(["export", "float32-values", "--cpu", "a64fx", "--to", str(to)]) == 0
    assert f"make -C '{to}' check" in capsys.readouterr().out


def test_the_command(capsys):
    assert main(["export", "--list"]) == 0
    assert "int8-attention" in capsys.readouterr().out
    assert main(["export", "int8-scores"]) == 1
    assert "--to: got nothing" in capsys.readouterr().err
    assert main(["asm", "portable-softmax", "--cpu", "a64fx", "--listing"]) == 0
    assert ".cfi_startproc" in capsys.readouterr().out
