"""The command line.

Every command runs, --json is one document, mistakes give one line and an exit status.
"""

import functools
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest

from numflash.cache.settings import DTYPES
from numflash.commands import cli, demo, warmup
from numflash.cpu.int8 import quantize_rows
from numflash.errors import NumflashError
from numflash.jit import target
from numflash.tiling import TILINGS
from numflash.tiling.rules import legal


def run(*argv, status=0):
    """(stdout, stderr) of a command in its own process."""
    done = subprocess.run(
        [sys.executable, "-m", "numflash", *argv], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr


def as_json(capsys, *argv):
    assert cli.main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_info(capsys):
    found = as_json(capsys, "info")
    assert found["isa"][-1] == "portable" and found["caches"]["L1"] > 0 and found["numba"]
    assert cli.main(["info"]) == 0
    shown = capsys.readouterr().out
    assert "instruction sets" in shown and "kernel files" in shown and "cache_files" not in shown


def test_info_with_peaks(capsys, monkeypatch):
    from numflash.measure import roofline

    one = roofline.Roof("avx2", 1, 2e11, 1e11, 1.5e10, 1e10)
    monkeypatch.setattr(roofline, "measure", lambda threads: one)
    assert as_json(capsys, "info", "--roof")["roof"][0] == one.as_dict()
    assert cli.main(["info", "--roof"]) == 0
    assert "INT8 peak 200 GOP/s (avx2), FP32 peak 100 GFLOP/s" in capsys.readouterr().out


def test_explain(capsys):
    found = as_json(capsys, "explain", "512", "64", "--causal", "--heads", "3")
    assert (
        found["shape"]["length"] == 512
        and found["shape"]["head_dim"] == 64
        and found["shape"]["heads"] == 3
    )
    assert found["visible"] == pytest.approx(0.5, abs=0.01)
    assert cli.main(["explain"]) == 0
    assert "1024 queries x 1024 keys, head_dim 128" in capsys.readouterr().out


def test_asm(capsys):
    assert "quantize-rows" in as_json(capsys, "asm", "--list")
    found = as_json(capsys, "asm", "quantize-rows", "--cpu", "neoverse-v1")
    assert found["triple"] == "aarch64-unknown-linux-gnu" and found["instructions"]["smax z.s"] > 0


def test_bench_of_short_calls(capsys, monkeypatch):
    from numflash.commands import bench_short

    monkeypatch.setattr(bench_short, "SHAPES", ((1, 1, 16, 64),))
    (found,) = as_json(capsys, "bench", "--short")
    assert found["shape"] == [1, 1, 16, 64]
    assert {"arrays", "int8", "int8, ready"} <= set(found["seconds"])
    assert all(seconds > 0 for seconds in found["seconds"].values())


@pytest.mark.slow
def test_bench_of_decoding(capsys, monkeypatch):
    from numflash.measure import decode_calls

    monkeypatch.setattr(decode_calls, "SHAPES", ((4, 2, 256, 64),))
    (found,) = as_json(capsys, "bench", "decode")
    assert {"float32", "bfloat16", "int8", "int4"} <= set(found["seconds"])
    limits = {"float32": 1e-5, "bfloat16": 0.02, "int8": 0.02, "int4": 0.2}
    limits |= {"OpenVINO u8": 0.02} if find_spec("openvino") else {}
    for name, limit in limits.items():
        assert found["relative_l1"][name] <= limit


@pytest.mark.slow
def test_bench_is_checked_and_counted(capsys):
    found = as_json(capsys, "bench", "128", "64", "1", "--reference-threads", "2")
    more = found["reference"]
    assert more["threads"] == 2 and more["seconds"] > 0
    assert more["estimated_single_thread_speed_up"] == 2 * more["speed_up"]
    names = {r["contender"] for r in found["results"]}
    assert "float32 reference" in names and any(n.startswith("numflash int8") for n in names)
    for r in found["results"]:
        assert r["seconds"] > 0 and r["operations_per_second"] == pytest.approx(
            4 * 128 * 128 * 64 / r["seconds"]
        )
        assert r["relative_l1"] <= 0.03
    assert found["roof"]["int8"] > 1e9 and found["roof"]["read"] > 1e8


def test_a_wrong_contender_is_not_timed():
    from numflash.measure.contenders import Case, Contender, compete

    wrong = Contender("wrong", 0.01, lambda case: lambda: 1.1 * case.arrays[2])
    with pytest.raises(ArithmeticError, match="wrong at L=16 D=8: relative L1"):
        compete(wrong, Case(16, 8))


@pytest.mark.parametrize("causal", [False, True])
def test_a_case_is_checked_against_the_oracle(causal):
    import numpy as np
    from oracles import naive

    from numflash.measure.contenders import Case

    case = Case(300, 8, causal, heads=2)
    exact = naive(*case.arrays, is_causal=causal)[0]
    assert case.check(exact).relative_l1 < 1e-12
    assert case.check(exact + 0.1).relative_l1 > 0.1
    assert case.operations == 4 * 2 * 8 * (np.tri(300).sum() if causal else 300**2)


@pytest.mark.parametrize(
    "argv",
    [
        ["bench", "0"],
        ["bench", "many"],
        ["bench", "--threads", "0"],
        ["explain", "-3"],
        ["nonsense"],
        [],
        ["cache"],
        ["cache", "fill"],
    ],
)
def test_wrong_command_line(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "usage: numflash" in said
    assert argv[1:] != ["many"] or "1 or more, or decode" in said


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["explain", "8", "1024"], "query: got shape"),
        (["explain", "--precision", "int3"], "precision: got 'int3'"),
        (["asm", "no-such-kernel"], "no-such-kernel"),
        (["asm", "--cpu", "a64fx", "--features=sve"], "features: got 'sve'"),
        (
            ["asm", "--cpu", "a64fx", "--features=-sve2,+svee"],
            "features: got '-sve2,+svee', and LLVM knows no 'svee' of aarch64; allowed: + or - before a name, as sve,",
        ),
        (["asm", "portable", "--list"], "kernel: got portable, which --list does not use"),
        (["asm", "--list", "--cpu", "a64fx"], "--cpu: got a64fx, which --list does not use"),
        (["export", "--list", "--to", "x"], "--to: got x, which --list does not use"),
        (["warmup", "--list", "--processes", "2"], "--processes: got 2, which --list does not use"),
        (["explain", "99999999999"], "query: got (1, 1, 99999999999, 128)"),
        (["bench", "64", "64", "1", "999"], "threads: got 999"),
        (["bench", "64", "64", "1", "--threads", "998"], "threads: got 998"),
        (["demo", "--dtype", "int4"], "--dtype: got it without a cache"),
        (["bench", "--plot", "picture.txt"], "--plot: got 'picture.txt'"),
        (
            ["bench", "--plot", "/no/such/folder/x.png"],
            "--plot: cannot write '/no/such/folder/x.png'",
        ),
        (["bench", "64", "600"], "head_dim: got 600; allowed: 1 to 576"),
        (["bench", "64", "600", "--plot", "x.png"], "head_dim: got 600"),
        (["bench", "64", "64", "--reference-threads", "999"], "threads: got 999"),
        (["tune", "--shape", "64", "600", "--model"], "head_dim: got 600"),
        (
            ["bench", "decode", "64"],
            "head_dim: got 64, which decode does not use; allowed: threads",
        ),
        (["bench", "decode", "--heads", "2"], "--heads: got 2, which decode does not use"),
        (["bench", "64", "--short"], "L: got 64, which --short does not use; allowed: threads"),
        (["bench", "decode", "128"], "head_dim: got 128, which decode does not use"),
        (["bench", "64", "64", "1", "2", "--threads", "1"], "--threads: got 1, and threads 2"),
        (["export", "int8-scores"], "--to: got nothing; allowed: numflash export KERNEL --to"),
        (["export", "--to", "x"], "KERNEL: got nothing"),
        (["bench", "--short", "--causal"], "--causal: got True"),
        (["bench", "--study", "exp2", "--threads", "2"], "--threads: got 2, which --study"),
        (["bench", "--plot", "x.png", "--batch", "2"], "--batch: got 2, which --plot"),
        (["demo", "--threads", "999"], "threads: got 999"),
        (["bench", "--plot", ""], "--plot: got ''"),
        (["job", "slurm", "--environment", ""], "environment: got ''"),
        (
            ["estimate", "exp2", "--instructions"],
            "--instructions: got True, which exp2 does not use; allowed: --cpu",
        ),
        (["estimate", "check", "--head-dim", "64"], "--head-dim: got 64, which check does not"),
    ],
)
def test_errors_are_one_line(argv, words, capsys, monkeypatch):
    """And come before anything is measured."""
    monkeypatch.setattr("numflash.measure.roofline.measure", None)
    if "--plot" in argv:
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert cli.main(argv) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("numflash: ") and words in error


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("numflash.commands.actions._version", interrupted)
    assert cli.main(["info"]) == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("numflash: interrupted")


@pytest.mark.parametrize(
    "error",
    [MemoryError("Unable to allocate 191. GiB"), FileNotFoundError(2, "No such file", "/no/x.png")],
)
def test_no_memory_and_no_file_are_one_line_too(error, monkeypatch, capsys):
    from numflash.commands import bench

    def fails(*arguments):
        raise error

    monkeypatch.setattr(bench, "run", fails)
    assert cli.main(["bench"]) == 1
    assert capsys.readouterr().err == f"numflash: {error}\n"


@pytest.mark.parametrize(
    ("argv", "usage"),
    [
        (["info", "--jsn"], "numflash info [-h]"),
        (["validate", "--quik"], "numflash validate [-h]"),
        (["--versoin"], "numflash [-h]"),
    ],
)
def test_a_misspelt_option_shows_the_commands_usage(argv, usage, capsys):
    with pytest.raises(SystemExit):
        cli.main(argv)
    said = capsys.readouterr().err
    assert said.startswith(f"usage: {usage}") and f"unrecognized arguments: {argv[-1]}" in said


def test_module_and_version():
    out, _ = run("--version")
    assert out.startswith("numflash ")


def test_a_picture_needs_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["bench", "--plot", "x.png"]) == 1
    assert "numflash: --plot: matplotlib is not installed" in capsys.readouterr().err


@pytest.mark.slow
def test_cache_clear(tmp_path, monkeypatch):
    """Only numflash's own files go, in the folder that NUMBA_CACHE_DIR names."""
    code = (
        "import numflash, numpy as np; x = np.ones((2, 2), np.float32); numflash.quantize(x); "
        "from numflash.jit import cache_files; from numflash.commands import cli; "
        "n = len(cache_files.files()); assert n, n; "
        "import pathlib, os; other = pathlib.Path(os.environ['NUMBA_CACHE_DIR'], 'other.nbi'); other.touch(); "
        "assert cli.main(['cache', 'clear']) == 0; assert list(other.parent.rglob('*.nb?')) == [other]"
    )
    for name in ("NUMBA_CACHE_DIR", "NUMFLASH_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    # the sources' own __pycache__ is not touched: the test must not make every later test compile
    code = code.replace(
        "from numflash.jit import cache_files; from numflash.commands import cli;",
        "from numflash.jit import cache_files; from numflash.commands import cli; real = cache_files.folders; "
        "cache_files.folders = lambda: [f for f in real() if os.environ['NUMBA_CACHE_DIR'] in str(f)];",
    )
    subprocess.run([sys.executable, "-c", "import os; " + code], check=True, timeout=300)


def test_tables():
    from numflash.measure.console import Table, count

    table = Table("title", ("name", "ms"), note="a note")
    table.add("long name", "1.0", name="long name", ms=1.0)
    table.add("x", "10.25", name="x", ms=10.25)
    assert table.plain().splitlines() == [
        "title",
        "name          ms",
        "---------  -----",
        "long name    1.0",
        "x          10.25",
        "a note",
    ]
    assert table.records[1] == {"name": "x", "ms": 10.25}
    assert (count(1, "thread"), count(2, "thread")) == ("1 thread", "2 threads")


@pytest.mark.parametrize("width", ["16", "24", "200"])
def test_a_narrow_terminal_cuts_no_number(width, monkeypatch, capsys):
    """Nor is anything taken for markup."""
    pytest.importorskip("rich")
    from numflash.measure.console import Table

    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    table = Table("title", ("name", "ms", "GB/s", "[red]"))
    table.add("long name", "1.2345", "123456", "[/x]")
    table.show()
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("long name", "1.2345", "123456", "[red]", "[/x]"))
    assert ("-----" in shown) == (width != "200")


@pytest.mark.slow
def test_demo():
    out, err = run("demo")
    for part in (
        "1. How exact",
        "2. How fast",
        "3. Where the time goes",
        "4. What fits which cache",
        "working set",
    ):
        assert part in out
    assert "demo 1/" in err, "progress"


def test_warmup_compiles_heads_narrower_and_wider_than_a_vector(monkeypatch):
    """In INT8 they are different kernels, in floats those of packed values and of V as it is."""
    found = {}

    def attention(query, key, value, mask, impl, **options):
        found.setdefault((impl, *options.values()), set()).add(
            query.shape[3] >= quantize_rows.LANES
        )

    monkeypatch.setattr(warmup, "attention", attention)
    for name, call, _ in warmup.everything():
        if name.startswith("attention"):
            call()
    assert {("cpu", "int8"), ("cpu", "int8", "bf16"), ("cpu", "float32")} < found.keys()
    assert all(widths == {False, True} for widths in found.values())


@pytest.mark.slow
def test_warmup():
    out, _ = run("warmup", "--json", "attention", "int8", "no", "mask")
    assert len(json.loads(out)["kernels"]) == 8  # four kinds of weights, and the portable kernels


def test_words_choose_what_is_compiled(capsys, monkeypatch):
    """Every storage and every group is there; without words, what most people need."""
    called = []
    monkeypatch.setattr(warmup, "decode", lambda *given: called.append(given))
    compiled = functools.partial(as_json, capsys, "warmup", "--processes", "1")
    assert len(compiled("cache", "INT4", "group", "4")["kernels"]) == 2
    assert len(compiled("cache float32", "group 3")["kernels"]) == 2
    assert called == [(d, g, n) for d, g in (("int4", 4), ("float32", 3)) for n in (1, 64)]
    assert len(compiled("cache int8 group 2 options")["kernels"]) == 2
    assert called[4:] == [("int8", 2, n, 1.0) for n in (1, 64)]
    assert len(as_json(capsys, "warmup", "--list", "cache", "one thread")) == 8 * len(DTYPES)
    assert len(as_json(capsys, "warmup", "--list")) == len(warmup.everything())
    common = {job.name.split(",")[0] for job in warmup.everything() if job.common}
    assert {name for name in common if "cache" in name} == {"KV cache int8", "KV cache float32"}
    for wrong in ("int5", "", "int"):
        assert cli.main(["warmup", wrong]) == 1


def test_several_processes_compile():
    """Each job has its own result; an error ends the others, and no worker is left."""
    fixed = functools.partial(legal, TILINGS["portable-int8"])  # raises UnsupportedError
    work = [warmup.Job("a, 1", functools.partial(time.sleep, 0.1)), warmup.Job("a, 2", fixed)]
    work.append(warmup.Job("b, 1", os.getpid))
    assert [job.name for job in warmup.spread(work)] == ["a, 1", "b, 1", "a, 2"]
    found = {}
    warmup.compile_all(work, 2, lambda job, *result: found.update({job.name: result}))
    assert 0.1 <= found["a, 1"][0] < 5 and "sizes are fixed" in found["a, 2"][1]
    assert found["b, 1"][1] == ""
    wrong = [warmup.Job("c", functools.partial(int, "x"))]
    slow = [warmup.Job(f"d{n}", functools.partial(time.sleep, 60)) for n in range(2)]
    start = time.perf_counter()
    with pytest.raises(ValueError, match="invalid literal"):
        warmup.compile_all(wrong + slow, 2, print)
    with pytest.raises(NumflashError, match="processes: one of 2 was ended by the system"):
        warmup.compile_all([warmup.Job("e", os.abort), *slow], 2, print)
    while multiprocessing.active_children() and time.perf_counter() - start < 50:
        time.sleep(0.05)
    assert not multiprocessing.active_children()


SLEEPING = """
import functools, multiprocessing, signal, sys, time
from numflash.commands import warmup

def show(*result):
    print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
    time.sleep(wait)  # an interrupt comes here, or between two results

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    wait = float(sys.argv[1])
    work = [warmup.Job("first", functools.partial(time.sleep, 0))]
    work += [warmup.Job(str(n), functools.partial(time.sleep, 60)) for n in range(2)]
    warmup.compile_all(work, 2, show)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("number", "wait"),
    [("SIGINT", 0), pytest.param("SIGINT", 60, marks=pytest.mark.slow), ("SIGKILL", 0)],
)
def test_no_process_outlives_what_started_it(tmp_path, number, wait):
    (tmp_path / "sleeping.py").write_text(SLEEPING)
    command = [sys.executable, str(tmp_path / "sleeping.py"), str(wait)]
    path = os.pathsep.join(filter(None, sys.path))
    parent = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    with parent:
        try:
            workers = [int(x) for x in parent.stdout.readline().split()]
            parent.send_signal(getattr(signal, number))
            assert parent.wait(20) != 0
        finally:
            parent.kill()
    assert len(workers) == 2
    end = time.perf_counter() + 20
    while any(alive(x) for x in workers) and time.perf_counter() < end:
        time.sleep(0.05)
    assert not any(alive(x) for x in workers)


def alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_demo_compiles_its_kernels_first(monkeypatch):
    """Where nothing is compiled yet: what its tables call, in several processes."""
    work = pickle.loads(pickle.dumps(demo.kernels()))
    assert [job.name for job in work][:2] == ["float32", "bfloat16"]
    assert f"numflash int8 {target.available()[0]}" in [job.name for job in work]
    asked = []
    monkeypatch.setattr(demo, "compile_all", lambda *given: asked.append(given))
    monkeypatch.setattr(demo, "accuracy_table", lambda progress: 1 / 0)
    for compiled in ([], ["x.nbc"]):
        monkeypatch.setattr(demo, "files", lambda compiled=compiled: compiled)
        with pytest.raises(ZeroDivisionError):
            demo.run()
    expected = [len(work)] * (warmup.processes_for(work) > 1)
    assert [len(jobs) for jobs, *_ in asked] == expected


def test_bench_takes_one_kind_of_table(capsys, monkeypatch):
    from numflash.commands import bench_plot

    for given in (["decode", "--plot", "x.png"], ["--short", "--study", "exp2"]):
        assert cli.main(["bench", *given]) == 1
        assert "got it together with" in capsys.readouterr().err
    monkeypatch.setattr(bench_plot, "plot", lambda *given: given)
    found = as_json(capsys, "bench", "1024", "64", "7", "2", "--plot", "x.png")
    assert found == ["x.png", 64, 2, 7]
