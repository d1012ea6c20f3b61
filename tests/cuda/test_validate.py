"""`python -m numflash.cuda.validate` without a card.

Against the stub driver, with stand-ins for PyTorch and Triton.
"""

import json
import sys
import types
from concurrent.futures import Future
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
family, done, software = (request.get(x) for x in ("family", "done", "software"))
def say(**row):
    print(json.dumps(row), flush=True)
def step(place, name, limit=1.0):
    if [place, name] in done:
        return False
    say(step=dict(place=place, name=name, kernels=[name + " of " + family], limit=limit))
    return True
if request.get("describe"):
    say(**{card})
    sys.exit()
if software:
    say(software=dict(torch="2.0"))
    sys.exit()
print("a library's own words")
if step("case", "first"):
    say(case=dict(case="first", passed=family != "forward bfloat16"))
if step("case", "second"):
    if family == "forward int8":
        time.sleep(100)
    if family == "decode float16":
        say(case=dict(case="second", passed=False, error="CUDA_ERROR_ILLEGAL_ADDRESS"))
        sys.exit("CUDA driver: CUDA_ERROR_ILLEGAL_ADDRESS")
    say(case=dict(case="second", passed=True))
if step("timing", "one"):
    if family == "backward float16":
        os.abort()
    say(timing=dict(kernel="numflash float16", L=64, D=64, causal=False, seconds=1e-3, tflops=300.0))
if step("timing", "two"):
    say(timing=dict(kernel="products float16", seconds=1.0, tflops=600.0, broken=request["broken"]))
"""


def nothing_ahead(pool, listed, arch):
    """All is there already."""
    ready = Future()
    ready.set_result([])
    return {family.name: ready for family in listed}


@pytest.fixture
def validation(monkeypatch, tmp_path):
    """run(*arguments, child=...): what it returns and its file, without compiling anything."""
    monkeypatch.setattr(validate, "ahead", nothing_ahead)
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


def test_a_step_that_ends_badly_leaves_the_others(validation, tmp_path, capsys):
    """A deadlock, an illegal access, an abort and a wrong result: each loses its own step, and the
    other steps of its family run in another process. Then the page of it all.
    """
    page = tmp_path / "page.html"
    code, found = validation("--families", *FAULTY, "--page", str(page))
    rows = {row["family"]: row for row in found["families"]}
    assert code == 1 and tuple(rows) == FAULTY and "stopped" not in found
    assert [row["state"] for row in rows.values()] == [
        "passed", "passed", "failed", "failed", "failed", "failed", "passed",
    ]  # fmt: skip
    for family, what in (
        ("forward int8", "1 processes ended badly: second: killed: nothing within 1 s"),
        ("decode float16", "ILLEGAL_ADDRESS"),
        ("backward float16", "1 have no time: one; 1 processes ended badly: one: crashed: signal SIGABRT"),
        ("forward bfloat16", "1 problems differ: first"),
    ):  # fmt: skip
        assert what in rows[family]["why"]
    for row in rows.values():  # every step has one row, whatever happened
        assert [case["step"] for case in row["cases"]] == ["first", "second"]
        assert [one["step"] for one in row["timings"]] == ["one", "two"]
    assert rows["forward int8"]["cases"][1]["error"] == "killed: nothing within 1 s"
    assert "SIGABRT" in rows["backward float16"]["timings"][0]["error"]
    # a process is told which kernels broke, also those of other families
    assert rows["backward bfloat16"]["timings"][1]["broken"] == [
        "first of forward bfloat16", "second of decode float16", "second of forward int8",
    ]  # fmt: skip
    assert rows["forward float16"]["timings"][0]["share_of_products"] == 0.5
    assert found["software"] == {"torch": "2.0"}
    html = page.read_text()
    assert "ILLEGAL_ADDRESS" in html and "50 %" in html and "STUB" in html and "failed" in html
    assert "backward bfloat16: passed" in capsys.readouterr().err


def test_a_family_ends_after_some_processes(validation, monkeypatch):
    """One that always ends badly does not take the time of the others; nor one that never starts."""
    always = CHILD.replace(
        'print("a library', "step('case', str(len(done))) and os.abort()\nprint(\"a library"
    )
    _, found = validation("--families", "forward float16", "rates", child=always)
    assert [len(row["cases"]) for row in found["families"]] == [validate.MOST_ENDS] * 2
    never = CHILD.replace('print("a library', 'os.abort()\nprint("a library')
    _, found = validation("--families", "forward float16", "rates", child=never)
    assert [row["cases"] for row in found["families"]] == [[], []]
    assert "its start: crashed: signal SIGABRT" in found["families"][1]["why"]


def test_frameworks_that_do_not_load(validation, monkeypatch):
    """Their versions are asked in a process with a limit, after everything else."""
    monkeypatch.setattr(validate, "SOFTWARE", 1.0)
    slow = CHILD.replace("if software:", "if software:\n    time.sleep(100)")
    code, found = validation("--families", "rates", child=slow)
    assert code == 0 and found["software"] == {"torch": "none: killed: no time left"}


def test_a_run_that_goes_on(validation, monkeypatch):
    """--resume keeps what passed, and runs what did not: of the same kernels and card."""
    chosen = ("--families", "rates", "forward bfloat16")
    validation(*chosen)
    mended = CHILD.replace('family != "forward bfloat16"', "True").replace("1e-3", "2e-3")
    code, found = validation("--resume", *chosen, child=mended)
    assert code == 0 and [row["state"] for row in found["families"]] == ["passed", "passed"]
    again = [[one["seconds"] for one in row["timings"]] for row in found["families"]]
    assert again == [[1e-3, 1.0], [1e-3, 1.0]]
    assert [one["step"] for one in found["families"][1]["cases"]] == ["second", "first"]
    monkeypatch.setattr(validate, "source_digest", lambda: "others")
    code, found = validation("--resume", *chosen, child=mended)
    assert [row["timings"][0]["seconds"] for row in found["families"]] == [2e-3, 2e-3]


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
    assert [len(x["families"][0]["cases"]) for x in seen] == [1, 2, 2]


def test_no_more_than_its_minutes(validation):
    code, found = validation("--minutes", "0.0001", "--families", "forward float16", "rates")
    assert code == 1 and {row["state"] for row in found["families"]} <= {"failed", "not run"}
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
    monkeypatch.setattr(validate, "ahead", nothing_ahead)
    monkeypatch.setattr(validate.signal, "signal", lambda *arguments: None)
    child = Path(__file__).with_name("validate_child.py")
    monkeypatch.setattr(validate, "CHILD", (sys.executable, str(child)))
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
    chosen = ("forward float16", "rates", "decode int8")
    code, found = on_the_stub(
        driver, monkeypatch, tmp_path, "90", "--families", *chosen,
        plant="forward float16=illegal;decode int8=hang",
    )  # fmt: skip
    forward, rates, decode = found["families"]
    assert code == 1 and found["device"] == "STUB" and found["arch"] == "sm_90a"
    assert "ILLEGAL_ADDRESS" in forward["cases"][0]["error"] and forward["state"] == "failed"
    assert forward["why"].count("ILLEGAL_ADDRESS") == validate.MOST_ENDS  # each step's own process
    assert all("error" in one for one in forward["timings"])
    assert "killed: nothing within" in decode["cases"][0]["error"] and decode["state"] == "failed"
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
    wrong = {"ladder of the study kernels"}  # its float64 sees zeros
    assert {name for name, row in rows.items() if row["state"] != "passed"} == wrong, found
    assert ("forward bfloat16" in rows) == (capability != "75")
    own = [row["kernel"] for row in rows["forward float16"]["timings"]]
    assert own == 4 * (
        ["numflash float16", attention.OLDER] if capability == "90" else ["numflash float16"]
    )
    assert [row["kernel"] for row in rows["forward peers"]["timings"][:3]] == [
        "torch flash", "torch cudnn", "triton tutorial",
    ]  # fmt: skip
    assert found["software"]["torch"] == "fake"
    assert [row["kernel"] for row in rows["decode float16"]["timings"]] == [
        "decode float16", "decode float16 step in a graph",
    ]  # fmt: skip
    flop = 4 * 2 * 64 * 64 * 64
    backward = next(x for x in rows["backward float16"]["timings"] if x["D"] == 64)
    assert backward["tflops"] == pytest.approx(2.5 * flop / 3e-3 / 1e12)
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
    assert peers.software() == {"torch": "none: PyTorch fake sees no card"}
    steps = list(peers.timings((64, 128), False, None))
    rows = [row for step in steps for row in step.run(None)]
    assert len(steps) == 16 and rows == [  # said once
        {"kernel": "torch flash", "error": "PyTorch fake sees no card"}
    ]
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(peers.Missing, match="torch"):
        found()

    class Damaged:
        def __getattr__(self, name):
            raise OSError("libcudart.so: cannot open")

    monkeypatch.setitem(sys.modules, "torch", Damaged())  # raises more than ImportError
    with pytest.raises(peers.Missing, match="OSError: libcudart"):
        found()
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
        (None, None),
        (2.0, True),
        (0.7, False),
    ]
    assert goals[0]["worst"] == pytest.approx(0.9) and goals[0]["shapes"] == 3
    older, _, flash, cudnn, _, _ = results.targets(found | {"arch": "sm_90a"})
    assert (older["met"], flash["met"], cudnn["met"]) == (None, False, None)
    assert results.verdict(cudnn).endswith("1 wanted: no shape that both took")
    assert results.verdict(flash).endswith("0.95 (worst 0.90 of 3), NOT MET")


def test_families():
    """Hopper's forward kernels first; each problem once; what has no kernel is left out."""
    whole = families.families("sm_90a")
    assert [x.name for x in whole][:2] == ["forward float16", "rates"]
    listed = [case[0] for x in whole if x.kind != "decode" for case in (*x.cases, *x.long)]
    all_cases = cases.CASES + cases.LONG_CASES + cases.GRADIENTS + cases.LONG_GRADIENTS
    assert sorted(listed) == sorted(case[0] for case in all_cases)
    assert not any("bfloat16" in x.name for x in families.families("sm_75"))
    quick = families.families("sm_90a", quick=True)
    assert quick[0].lengths == cases.QUICK_LENGTHS and len(quick[0].cases) < len(whole[0].cases)
    assert all(x.cases or x.kind == "frameworks" for x in families.families("sm_90a", lengths=()))
    assert validate.BUDGETS == {False: 540.0, True: 450.0}


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_names_of_steps(arch):
    """A step is known by its name, to run it once and to leave it out."""
    for family in families.families(arch):
        for steps in (kernels.checks(family, arch), kernels.timings(family, arch, "file")):
            names = [step.name for step in steps]
            assert len(set(names)) == len(names)


def test_a_medium_length_is_timed_first():
    order = [shape[3] for shape, _ in attention.shapes(cases.LENGTHS)]
    assert order[::4] == [4096, 16384, 8192, 2048, 1024, 512]
    assert [shape[3] for shape, _ in attention.shapes((64,))] == [64] * 4


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
    """Each kernel and problem once, in the order of the families, but for what is there already and
    for a score function's kernel, which another process cannot compile.
    """
    made = []

    class Pool:
        def submit(self, work, *given):
            made.append((work.__name__, given))
            return len(made)

    key, there, function = (
        ("same", "sm_80", constants) for constants in ((), (("d", 64),), (("functions", "x"),))
    )
    monkeypatch.setattr(validate, "kernels_of", lambda family, arch: {key, there, function})
    monkeypatch.setattr(
        validate, "is_ready", lambda factory, arch, kind, **constants: bool(constants)
    )
    monkeypatch.setattr(validate.expected, "there", lambda kind, case, arch: case[1] == "c")
    one, two = (families.Family(n, "forward", cases=(("case", n), ("case", "c"))) for n in "ab")
    waiting = validate.ahead(Pool(), [one, two], "sm_80")
    assert {name: needs.result(10) for name, needs in waiting.items()} == {"a": [1, 2], "b": [1, 3]}
    assert made[0] == ("compile_one", (key,))
    assert made[2] == ("expect_one", ("forward", ("case", "b"), "sm_80"))


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
