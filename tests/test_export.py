"""Kernels for C: what is written links with the C compiler here and gives NumPy's and the model's
bits.
"""

import platform
import shutil
import subprocess

import pytest

from numflash.commands.cli import main
from numflash.errors import ArgumentError, UnsupportedError
from numflash.jit import target
from numflash.machinecode import export

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
        "int8-scores",
        "float32-values",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in (
                "int8-values",
                "float32-scores",
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


@pytest.mark.parametrize(
    "kernel",
    [
        "int8-scores",
        "float32-values",
        "exp2-fexpa",
        pytest.param("int8-decode", marks=pytest.mark.slow),
    ],
)
def test_code_for_the_a64fx(kernel, tmp_path):
    found = export.run(kernel, "a64fx", tmp_path)
    text = (tmp_path / f"{found['symbol']}.s").read_text()
    marks = {"float32-values": "fmla", "exp2-fexpa": "fexpa"}
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


def test_the_command(capsys):
    assert main(["export", "--list"]) == 0
    assert "int8-attention" in capsys.readouterr().out
    assert main(["export", "int8-scores"]) == 1
    assert "no --to" in capsys.readouterr().err
    assert main(["asm", "portable-softmax", "--cpu", "a64fx", "--listing"]) == 0
    assert ".cfi_startproc" in capsys.readouterr().out
