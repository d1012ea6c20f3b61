"""`python -m numflash.cuda.validate` without a card.

Against the stub driver, with stand-ins for PyTorch and Triton.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import fake_torch
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from test_stub_driver import driver  # noqa: F401
from test_stub_driver import pytestmark as needs_compiler

from numflash.cuda.kernels.decode_combine import decode_combine
from numflash.cuda.operands import Launch
from numflash.cuda.validate import attention as validate
from numflash.cuda.validate import peers

TUTORIAL = """
import torch
def attention(q, k, v, causal, scale):
    {before}
    with torch.nn.attention.sdpa_kernel("own"):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
"""
# neither the stub nor this emulator runs a kernel, so none is compiled; what the list says of zeros
# is replaced
WHOLE = """
import sys
sys.path.insert(0, {here!r})
import fake_torch
fake_torch.install()
from numflash.cuda import compile as compiler, device as card, resident
from numflash.cuda.validate import attention as validate, decode as validate_decode
def uncompiled(factory, arch, kind, **constants):
    source = factory(**constants)
    return compiler.Compiled(factory.__name__, arch, repr((factory.__name__, constants)).encode(),
                             compiler.flat_parameters(source.signature), source.threads, source.shared_bytes)
card.compiled = resident.compiled = uncompiled
resident.emulate = lambda *arguments: None
validate.emulated = lambda work: work.finish()
validate.compile_ahead = lambda arch, *lists: len(set(kind for kind, _ in validate.launches(arch, *lists)))
validate.CASES, validate.GRADIENTS, validate.ROWS, validate.CHANNELS = validate.CASES[:1], validate.GRADIENTS[:1], 64, 128
validate_decode.CASES = validate_decode.CASES[:1]
validate_decode.LONG = dict(batch=1, heads=4, kv_heads=2, length=512, d=64, chunk=256)
validate.compare = lambda *arguments: {{"passed": True}}
def planned(device, problem):
    validate.launch_backward.plan(problem, *validate.gradient_operands(problem), device.arch)
    return {{"passed": True}}
validate.gradient_row = planned
correct = validate_decode.correctness
validate_decode.correctness = lambda cases: (row | {{"passed": True}} for row in correct(cases))
sys.exit(validate.main({arguments!r}))
"""


def run(driver, arguments, capability, before=""):  # noqa: F811
    code = WHOLE.format(here=str(Path(__file__).parent), arguments=arguments).replace(
        "sys.exit", before + "\nsys.exit"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver), "STUB_CC": capability}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=500
    )


@needs_compiler
def test_from_the_first_problem_to_the_targets(driver, tmp_path):  # noqa: F811
    """A Hopper card: every case and timing is in the file, with names, medians, errors and what was
    to be reached.
    """
    tutorial = tmp_path / "tutorial.py"
    file = tmp_path / "found.json"
    tutorial.write_text(TUTORIAL.format(before="pass"))
    done = run(driver, ["--json", str(file), "--lengths", "64", "--triton", str(tutorial)], "90")
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert (
        found["device"] == "STUB"
        and found["arch"] == "sm_90a"
        and "stopped" not in found
        and found["seconds"] > 0
    )
    assert found["software"] == {
        "torch": "fake",
        "torch device": "fake card",
        "cudnn": "91000",
        "triton": "fake",
    }
    assert [row["passed"] for row in found["cases"]] == [True] * 3
    kernels = [
        "numflash float16",
        validate.OLDER,
        "numflash int8",
        "torch flash",
        "torch cudnn",
        "triton tutorial",
        "numflash float16, backward",
        "torch flash, backward",
        "torch cudnn, backward",
    ]
    own = found["timings"][:36]
    assert [row["kernel"] for row in own] == 4 * kernels and {
        (row["D"], row["causal"]) for row in own
    } == {(64, False), (64, True), (128, False), (128, True)}
    assert all(
        row["L"] == 64
        and row["B"] == 1
        and row["H"] * row["D"] == 128
        and row["seconds"] > 0
        and row["tflops"] > 0
        for row in own
    )
    flop = 4 * 2 * 64 * 64 * 64
    assert own[0]["tflops"] == pytest.approx(flop / 1e-3 / 1e12) and own[6][
        "tflops"
    ] == pytest.approx(2.5 * flop / 1e-3 / 1e12)
    assert own[3]["seconds"] == pytest.approx(15.5e-3), (
        "the median of calls 6 to 25, which took 6 to 25 ms"
    )
    assert [row["kernel"] for row in found["timings"][36:]] == [
        "decode int8",
        "decode int8 step in a graph",
        "decode float16",
        "decode float16 step in a graph",
    ]
    assert [(goal["kernel"], goal["against"], goal["shapes"]) for goal in found["targets"]] == [
        (validate.OLDER, "torch flash", 4),
        ("numflash int8", "numflash float16", 4),
        ("numflash float16", "torch flash", 4),
        ("numflash float16", "torch cudnn", 4),
        ("decode int8", "a copy's rate", 1),
        ("decode float16", "a copy's rate", 1),
    ]
    assert (
        "numflash int8 against numflash float16, 1.5 wanted: 1.00 (worst 1.00 of 4), NOT MET"
        in done.stderr
    )
    assert "36/36 torch cudnn, backward" in done.stderr


@needs_compiler
def test_an_older_card_killed_half_way(driver, tmp_path):  # noqa: F811
    """The file is whole after every row; SIGTERM ends the list with what was found."""
    file = tmp_path / "found.json"
    kill = (
        "import os, signal\nvalidate.GRADIENTS = validate_decode.CASES = ()\n"
        "def timings(*arguments):\n    yield {'kernel': 'first', 'L': 1, 'error': 'none'}\n"
        f"    assert open({str(file)!r}).read().count('first') == 1\n    os.kill(os.getpid(), signal.SIGTERM)\n    yield\n"
        "validate.timings = timings\n"
    )
    done = run(
        driver,
        ["--json", str(file), "--lengths", "64", "--triton", str(tmp_path / "none.py")],
        "80",
        kill,
    )
    found = json.loads(file.read_text())
    assert done.returncode == 1 and found["stopped"].startswith("KeyboardInterrupt"), done.stderr
    assert [row["kernel"] for row in found["timings"]] == [
        "triton tutorial",
        "first",
    ] and "targets" not in found
    assert "none.py" in found["timings"][0]["error"]


@needs_compiler
def test_turing(driver):  # noqa: F811
    """What it has no kernels for is skipped and no failure, and named.

    Float16 decode is compared and timed.
    """
    code = (
        "validate.CASES, validate.GRADIENTS = (('b', (1, 1, 1, 8, 8, 32), 'bfloat16', {}),), (('g', (1, 1, 1, 8, 8, 32), "
        "'bfloat16', {}),)\nvalidate_decode.CASES = (('f', 'float16', 32, 4, 1, 1, {}), ('b', 'bfloat16', 32, 4, 1, 1, {}))\n"
        "validate.timings = lambda *arguments: iter(())\n"
    )
    done = run(driver, ["--lengths", "64"], "75", code)
    found = json.loads(done.stdout)
    assert done.returncode == 0 and [
        ("skipped" in row, row["passed"]) for row in found["cases"]
    ] == [(True, True), (True, True), (False, True), (True, True)], done.stderr
    assert [row["kernel"] for row in found["timings"]] == [
        "decode float16",
        "decode float16 step in a graph",
    ]


@pytest.fixture
def torch(monkeypatch):
    """The stand-in, which leaves with the test."""
    for name in ("torch", "torch.nn", "torch.nn.attention", "triton"):
        monkeypatch.setitem(
            sys.modules, name, None
        )  # so that the end of the test puts back what was there
    return fake_torch.install


def found(**options):
    return dict(peers.times(1, 2, 16, 8, True, **options))


def test_each_peer_fails_by_itself(torch, tmp_path):
    torch(fail="cudnn")
    times = found()
    assert times["torch flash"] > 0 and times["torch cudnn"] == "RuntimeError: No available kernel"
    torch(wrong="flash")
    times = found()
    assert times["torch flash"] == "its result is wrong" and times["torch cudnn"] > 0
    file = tmp_path / "tutorial.py"
    for before, wrong, said in (
        ("pass", "own", "its result is wrong"),
        ("raise KeyError('D')", "", "KeyError: 'D'"),
    ):
        torch(wrong=wrong)
        file.write_text(TUTORIAL.format(before=before))
        times = found(triton=peers.tutorial(str(file)))
        assert (
            times["triton tutorial"] == said
            and times["torch flash"] > 0
            and times["torch cudnn"] > 0
        )
    assert list(found(gradients=True, triton=print)) == ["torch flash", "torch cudnn"]
    assert (
        validate.shown({"kernel": "torch cudnn", "L": 16, "error": "No kernel"})
        == "torch cudnn, L 16: No kernel"
    )


def test_peers_that_are_not_there(torch, monkeypatch, tmp_path):
    """Without PyTorch, where PyTorch sees no card, and a file of Triton's that cannot be loaded."""
    torch(card=False)
    assert found() == {"torch": "PyTorch fake sees no card"} and peers.software() == {
        "torch": "none: PyTorch fake sees no card"
    }
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "torch" in found()["torch"]
    file = tmp_path / "tutorial.py"
    file.write_text("import no_such_triton\n")
    for path in (file, tmp_path / "none.py"):
        with pytest.raises(peers.Missing, match=path.name):
            peers.tutorial(str(path))


def test_targets():
    """Medians over the shapes that both took; none where a peer took no shape."""
    place = {"L": 1024, "D": 64, "causal": False}
    rows = [
        {"kernel": name, **place, "L": length, "seconds": seconds * length}
        for length in (1, 2, 3)
        for name, seconds in (
            ("numflash float16", 2.0),
            ("numflash int8", 1.0),
            ("torch flash", 1.7 + 0.1 * length),
        )
    ]
    rows += [
        {"kernel": "torch cudnn", **place, "error": "none"},
        {"kernel": "decode int8", "share_of_copy": 0.7},
    ]
    goals = validate.targets(rows, "sm_80")
    assert [(goal["median"], goal["met"]) for goal in goals] == [
        (pytest.approx(0.95), True),
        (2.0, True),
        (0.7, False),
    ]
    assert goals[0]["worst"] == pytest.approx(0.9) and goals[0]["shapes"] == 3
    older, _, flash, cudnn, _ = validate.targets(rows, "sm_90a")
    assert (older["met"], flash["met"], cudnn["met"]) == (None, False, None)
    assert validate.verdict(cudnn).endswith("0.85 wanted: no shape that both took")
    assert validate.verdict(flash).endswith("0.95 (worst 0.90 of 3), NOT MET")


def test_what_is_compiled_ahead(monkeypatch, capsys):
    """All kernels of the list, each once, for an architecture without a card.

    a case that has no kernel is left out.
    """
    cases = [
        case
        for case in validate.CASES
        if case[0] in ("bfloat16 D=64", "float16 D=64", "int8 D=64", "float16 one key")
    ]
    kinds = [
        (kind, work.factory.__name__)
        for kind, work in validate.launches("sm_75", cases, validate.GRADIENTS[5:6], (64,))
    ]
    assert ("ptx", "flash_int8") in kinds and len(kinds) == 6 + 12 + 12
    kinds = [
        (kind, work.factory.__name__)
        for kind, work in validate.launches("sm_90a", cases, validate.GRADIENTS[:1], ())
    ]
    assert (
        len(kinds) == 8 + 6
        and ("cubin", "flash_backward") in kinds
        and ("ptx", "flash_hopper") in kinds
    )
    said = []
    monkeypatch.setattr(validate, "compile_ahead", lambda *arguments: said.append(arguments) or 3)
    assert validate.main(["--compile", "sm_80", "--quick"]) == 0
    arch, cases, _, lengths = said[0]
    assert (
        arch == "sm_80"
        and lengths == validate.QUICK_LENGTHS
        and len(cases) == -(-len(validate.CASES) // 3)
    )
    assert "3 kernels for sm_80" in capsys.readouterr().err


def test_compiling_ahead_fills_the_cache(monkeypatch, tmp_path, capsys):
    """In processes of their own; the same kernel twice is one."""
    small = Launch(
        decode_combine,
        {"dv": 32, "row_tiles": 1, "exact": False},
        "sm_80",
        (1, 1, 1),
        (),
        lambda: None,
    )
    monkeypatch.setattr(validate, "launches", lambda *arguments: iter([("ptx", small)] * 2))
    monkeypatch.setattr(validate.os, "cpu_count", lambda: 1)
    monkeypatch.setenv("NUMFLASH_CACHE_DIR", str(tmp_path))
    assert (
        validate.compile_ahead("sm_80", (), (), ()) == 1
        and "compiled 1 of 1" in capsys.readouterr().err
    )
    assert [file.suffix for file in (tmp_path / "cuda").iterdir()] == [".ptx"]
