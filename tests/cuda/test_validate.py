"""`python -m numflash.cuda.validate` without a card.

Against the stub driver, with stand-ins for PyTorch and Triton.
"""

import json
import sys
import types
from pathlib import Path

import fake_torch
import numpy as np
import pytest
from daily import of_today

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from test_stub_driver import driver  # noqa: F401
from test_stub_driver import pytestmark as needs_compiler

from numflash.cuda.compile import compiled
from numflash.cuda.emulator import emulate
from numflash.cuda.kernels.rates import operations, product_rate
from numflash.cuda.validate import (
    attention,
    cases,
    expected,
    families,
    kernels,
    peers,
    rates,
    results,
)
from numflash.cuda.validate import run as validate

TUTORIAL = """
import torch
def attention(q, k, v, causal, scale):
    {before}
    with torch.nn.attention.sdpa_kernel("own"):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
"""
CARD = {"card": {"device": "STUB", "arch": "sm_90a", "multiprocessors": 1, "driver": "CUDA 13.0"}}
# a child that needs no driver: rows by family, then how it ends
CHILD = """
import json, os, sys, time
request = json.loads(sys.argv[1])
def say(**row):
    print(json.dumps(row), flush=True)
if request.get("describe"):
    say(**{card})
    sys.exit()
family = request["family"]
print("a library's own words")
say(case=dict(case="first", passed=family != "forward bfloat16"))
if family == "forward int8":
    time.sleep(100)
if family == "backward float16":
    os.abort()
if family == "decode float16":
    sys.exit("CUDA driver: CUDA_ERROR_ILLEGAL_ADDRESS")
if family != "forward bfloat16":
    say(phase="timings")
    say(timing=dict(kernel="numflash float16", L=64, D=64, causal=False, seconds=1e-3, tflops=300.0))
    if family == "rates":
        say(timing=dict(kernel="products float16", seconds=1.0, tflops=600.0))
"""


@pytest.fixture
def validation(monkeypatch, tmp_path):
    """run(*arguments, child=...): what it returns and its file, without compiling anything."""
    monkeypatch.setattr(validate, "ahead", lambda pool, listed, arch: {x.name: [] for x in listed})
    monkeypatch.setattr(validate.signal, "signal", lambda *arguments: None)
    file = tmp_path / "found.json"

    def run(*arguments, child=CHILD):
        script = tmp_path / "child.py"
        script.write_text(child.replace("{card}", repr(CARD)))
        monkeypatch.setattr(validate, "CHILD", (sys.executable, str(script)))
        code = validate.main(["--json", str(file), *arguments])
        return code, json.loads(file.read_text()) if file.exists() else None

    return run


FAULTY = (
    "forward float16",
    "rates",
    "forward int8",
    "decode float16",
    "backward float16",
    "forward bfloat16",
    "backward bfloat16",
)


def test_a_family_that_ends_badly_leaves_the_others(validation, monkeypatch, tmp_path, capsys):
    """A deadlock, an illegal access, an abort and a wrong result; then the page of it all."""
    monkeypatch.setattr(validate, "LIMIT", 2.0)
    page = tmp_path / "page.html"
    code, found = validation("--families", *FAULTY, "--page", str(page))
    rows = {row["family"]: row for row in found["families"]}
    assert code == 1 and tuple(rows) == FAULTY and "stopped" not in found
    assert [row["state"] for row in rows.values()] == [
        "passed", "passed", "killed", "crashed", "crashed", "failed", "passed",
    ]  # fmt: skip
    assert rows["forward int8"]["why"] == "no end within 2 s"
    assert "ILLEGAL_ADDRESS" in rows["decode float16"]["why"]
    assert "SIGABRT" in rows["backward float16"]["why"]
    assert [len(row["timings"]) for row in rows.values()] == [1, 2, 0, 0, 0, 0, 1]
    assert all(len(row["cases"]) == 1 for row in rows.values())
    assert rows["forward float16"]["timings"][0]["share_of_products"] == 0.5
    html = page.read_text()
    assert "ILLEGAL_ADDRESS" in html and "50 %" in html and "STUB" in html and "killed" in html
    assert "backward bfloat16: passed" in capsys.readouterr().err


def test_the_file_is_whole_at_every_row(validation, monkeypatch):
    """Also when the run is interrupted: what was found is there, and why it ended."""
    seen = []
    write = validate._write

    def interrupted(found, path):
        write(found, path)
        seen.append(json.loads(Path(path).read_text()))
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(validate, "_write", interrupted)
    code, found = validation("--families", "forward float16", "rates")
    assert code == 1 and found["stopped"].startswith("KeyboardInterrupt")
    assert [len(x["families"][0]["timings"]) for x in seen] == [0, 1, 1]


def test_no_more_than_its_minutes(validation):
    code, found = validation("--minutes", "0.0001", "--families", "forward float16", "rates")
    assert code == 1 and {row["state"] for row in found["families"]} <= {"killed", "not run"}
    assert found["families"][1]["why"] == "no time left"


def test_a_card_that_cannot_be_opened(validation, capsys):
    code, found = validation(child='print(\'{"none": "no driver"}\')')
    assert code == 2 and found is None and "no driver" in capsys.readouterr().err
    code, _ = validation(child="import os; os.abort()")
    assert code == 2 and "SIGABRT" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="got forwards; allowed on sm_90a: forward float16, rates"):
        validation("--families", "forwards")


def on_the_stub(driver, monkeypatch, tmp_path, capability, *arguments, plant=""):  # noqa: F811
    """A run whose children launch through the stub driver."""
    monkeypatch.setattr(validate, "ahead", lambda pool, listed, arch: {x.name: [] for x in listed})
    monkeypatch.setattr(validate.signal, "signal", lambda *arguments: None)
    child = Path(__file__).with_name("validate_child.py")
    monkeypatch.setattr(validate, "CHILD", (sys.executable, str(child)))
    monkeypatch.setattr(validate.peers, "software", lambda: {"torch": "fake"})
    for name, value in (
        ("LD_LIBRARY_PATH", str(driver)), ("STUB_CC", capability), ("STUB_PLANT", plant),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    file = tmp_path / "found.json"
    code = validate.main(["--json", str(file), "--lengths", "64", *arguments])
    return code, json.loads(file.read_text())


@needs_compiler
@pytest.mark.slow
def test_planted_faults_on_the_stub_driver(driver, monkeypatch, tmp_path):  # noqa: F811
    """Kernels that never end, and an illegal access that the driver reports at the next wait."""
    monkeypatch.setattr(validate, "LIMIT", 12.0)
    chosen = ("forward float16", "rates", "decode int8")
    code, found = on_the_stub(
        driver, monkeypatch, tmp_path, "90", "--families", *chosen,
        plant="forward float16=illegal;decode int8=hang",
    )  # fmt: skip
    forward, rates, decode = found["families"]
    assert code == 1 and found["device"] == "STUB" and found["arch"] == "sm_90a"
    assert "ILLEGAL_ADDRESS" in forward["cases"][0]["error"] and forward["state"] == "crashed"
    assert decode["state"] == "killed" and decode["timings"] == []
    assert rates["state"] == "passed" and [row["kernel"] for row in rates["timings"]] == [
        "products float16", "products int8", "copy",
    ]  # fmt: skip


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("capability", ["90", *of_today(["80", "75"], 2)])
def test_every_family_on_the_stub_driver(driver, monkeypatch, tmp_path, capability):  # noqa: F811
    tutorial = tmp_path / "tutorial.py"
    tutorial.write_text(TUTORIAL.format(before="pass"))
    code, found = on_the_stub(driver, monkeypatch, tmp_path, capability, "--triton", str(tutorial))
    rows = {row["family"]: row for row in found["families"]}
    wrong = {"forward variants", "ladder of the study kernels"}  # the oracle sees zeros
    assert {name for name, row in rows.items() if row["state"] != "passed"} == wrong, found
    assert ("forward bfloat16" in rows) == (capability != "75")
    own = [row["kernel"] for row in rows["forward float16"]["timings"]]
    assert own == 4 * (
        ["numflash float16", attention.OLDER] if capability == "90" else ["numflash float16"]
    )
    assert [row["kernel"] for row in rows["forward peers"]["timings"][:3]] == [
        "torch flash", "torch cudnn", "triton tutorial",
    ]  # fmt: skip
    assert [row["kernel"] for row in rows["decode float16"]["timings"]] == [
        "decode float16", "decode float16 step in a graph",
    ]  # fmt: skip
    flop = 4 * 2 * 64 * 64 * 64
    backward = rows["backward float16"]["timings"][2]
    assert backward["D"] == 64 and backward["tflops"] == pytest.approx(2.5 * flop / 1e-3 / 1e12)
    assert all(goal["shapes"] for goal in found["targets"] if goal["against"] == "torch flash")


@pytest.fixture
def torch(monkeypatch):
    """The stand-in, which leaves with the test."""
    for name in ("torch", "torch.nn", "torch.nn.attention", "triton"):
        monkeypatch.setitem(
            sys.modules, name, None
        )  # so that the end of the test puts back what was there
    return fake_torch.install


def found(**options):
    return dict(peers.times((1, 2, 16, 8), True, **options))


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
        results.shown({"kernel": "torch cudnn", "L": 16, "error": "No kernel"})
        == "torch cudnn, L 16: No kernel"
    )


def test_flash_attention_takes_its_own_layout(torch, monkeypatch):
    """(B, L, H, D) goes in and comes out, in version 3 beside the LSE."""
    sdpa = torch().nn.functional.scaled_dot_product_attention

    def flash_attn_func(q, k, v, causal):
        assert q.shape == (1, 16, 2, 8)
        with sys.modules["torch.nn.attention"].sdpa_kernel("own"):
            return sdpa(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal).transpose(
                1, 2
            ), None

    module = types.ModuleType("flash_attn_interface")
    module.__spec__, module.flash_attn_func = types.SimpleNamespace(), flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    assert found()["FlashAttention-3"] > 0 and "FlashAttention-2" not in found()


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
    found = {"arch": "sm_80", "families": [{"timings": rows}]}
    goals = results.targets(found)
    assert [(goal["median"], goal["met"]) for goal in goals] == [
        (pytest.approx(0.95), True),
        (2.0, True),
        (None, None),
        (0.7, False),
    ]
    assert goals[0]["worst"] == pytest.approx(0.9) and goals[0]["shapes"] == 3
    older, _, _, flash, cudnn, _ = results.targets(found | {"arch": "sm_90a"})
    assert (older["met"], flash["met"], cudnn["met"]) == (None, False, None)
    assert results.verdict(cudnn).endswith("1 wanted: no shape that both took")
    assert results.verdict(flash).endswith("0.95 (worst 0.90 of 3), NOT MET")


def test_families():
    """Hopper's forward kernels first; each problem once; what has no kernel is left out."""
    whole = families.families("sm_90a")
    assert [x.name for x in whole][:2] == ["forward float16", "rates"]
    listed = [case[0] for x in whole if x.kind != "decode" for case in x.cases]
    assert sorted(listed) == sorted(case[0] for case in cases.CASES + cases.GRADIENTS)
    assert not any("bfloat16" in x.name for x in families.families("sm_75"))
    quick = families.families("sm_90a", quick=True)
    assert quick[0].lengths == cases.QUICK_LENGTHS and len(quick[0].cases) < len(whole[0].cases)
    assert all(x.cases for x in families.families("sm_90a", lengths=()))
    assert validate.BUDGETS == {False: 540.0, True: 240.0}


def test_the_emulators_results_come_from_files(monkeypatch, tmp_path):
    """Made once, found again in the folder; a damaged file is made again."""
    monkeypatch.setenv("NUMFLASH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("NUMFLASH_CUBINS", str(tmp_path / "ready"))
    computed = []

    def compute(*arguments):
        computed.append(arguments)
        return [np.arange(3, dtype=np.uint16), np.full((2, 2), np.nan, np.float32)]

    monkeypatch.setattr(expected, "compute", compute)
    case = ("one", (1, 1, 1, 8, 8, 32), "float16", {"key_lengths": np.array([3])})
    assert expected.make("forward", case, "sm_80", str(tmp_path / "ready"))
    assert not expected.make("forward", case, "sm_80")
    first, second = expected.get("forward", case, "sm_80")
    assert first.dtype == np.uint16 and np.isnan(second).all() and len(computed) == 1
    (file,) = tmp_path.glob("ready/expected/*.npz")
    file.write_bytes(file.read_bytes()[:-10])
    expected.get("forward", case, "sm_80")
    expected.get("forward", case, "sm_80")
    expected.get("forward", (*case[:3], {}), "sm_80")
    assert len(computed) == 3


def test_what_is_compiled_ahead(monkeypatch):
    """Each kernel and problem once, in the order of the families."""

    made = []

    class Pool:
        def submit(self, work, *given):
            made.append((work.__name__, given))
            return len(made)

    monkeypatch.setattr(validate, "kernels_of", lambda family, arch: {("same", arch, ())})
    one, two = (families.Family(n, "forward", cases=(("case", n),)) for n in "ab")
    assert validate.ahead(Pool(), [one, two], "sm_80") == {"a": [1, 2], "b": [1, 3]}
    assert made[0] == ("compile_one", (("same", "sm_80", ()),))
    assert made[2] == ("made", ("forward", ("case", "b"), "sm_80"))


def test_kernels_of_a_family():
    """Those of its problems and its timings; problems without a kernel are left out."""

    def names(arch, **family):
        return sorted(
            key[0].__name__ for key in kernels.kernels_of(families.Family("", **family), arch)
        )

    forward = families.families("sm_90a", lengths=(64,))[0]
    wanted = {"kind": "forward", "precision": "float16", "lengths": forward.lengths}
    assert set(names("sm_90a", **wanted)) == {"flash_hopper", "flash_float"}
    assert names("sm_75", kind="forward", cases=cases.CASES[5:6]) == []
    assert names("sm_90a", kind="rates") == ["product_rate", "product_rate"]
    assert names("sm_80", kind="peers") == []


def test_a_state_that_nvidia_smi_does_not_show(monkeypatch, tmp_path):
    monkeypatch.setattr(rates.shutil, "which", lambda name: None)
    assert rates.state() == {"error": "nvidia-smi is not installed"}
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 1980, 1980, 2619, 512.5, 700.0, 61\n")
    program.chmod(0o755)
    monkeypatch.setattr(rates.shutil, "which", lambda name: str(program))
    assert rates.state()["power.draw"] == "512.5"


@pytest.mark.parametrize("options", [{"dtype": "float16"}, {"dtype": "int8", "hopper": True}])
def test_product_rates(options):
    """The operations that are counted are those that run: the emulator counts them too."""
    arch = "sm_90a" if options.get("hopper") else "sm_80"
    kernel = compiled(product_rate, arch, "ptx", loops=1, **options)
    out = np.zeros(kernel.threads, np.int32)
    report = emulate(kernel, (1, 1, 1), None, [out])
    assert report.tensor_flops == operations(loops=1, **options) and out.all()
