"""Cached kernels, many callers, forks, and memory.

Nothing here may crash, hang, or give a wrong answer.
"""

import json
import os
import platform
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from oracles import qkv
from processes import ROOT, run, start

import numflash

QUANTIZE = "import numpy as np, numflash; print(numflash.quantize(np.arange(24, dtype=np.float32).reshape(4, 6)).data.tolist())"


def test_a_kernel_from_the_cache_loads_no_compiler(tmp_path):
    """What Numba compiles with is imported to compile alone.

    The garbage collector, which rests meanwhile, goes on.
    """
    code = (
        "import gc, sys, numpy as np, numflash; x = numflash.quantize(np.ones((2, 4), np.float32)); "
        "print(x.data.sum(), 'numba.np.linalg' in sys.modules, gc.isenabled())"
    )
    assert run(code, tmp_path).stdout.split() == ["1016", "True", "True"]
    assert run(code, tmp_path).stdout.split() == ["1016", "False", "True"]


def test_an_edited_helper_in_another_file_is_seen(tmp_path):
    """The stamp of a cached kernel covers every source file that it imports, and no other."""
    import shutil

    shutil.copytree(
        ROOT / "numflash", tmp_path / "numflash", ignore=shutil.ignore_patterns("__pycache__")
    )
    first = run(QUANTIZE, tmp_path / "cache", folder=tmp_path)
    errors = tmp_path / "numflash" / "errors.py"
    errors.write_text(errors.read_text() + "\n# edited\n")
    second = run(QUANTIZE, tmp_path / "cache", folder=tmp_path)
    assert "compiling" in second.stderr and first.stdout == second.stdout
    unrelated = tmp_path / "numflash" / "commands" / "cli.py"
    unrelated.write_text(unrelated.read_text() + "\n# edited\n")
    assert "compiling" not in run(QUANTIZE, tmp_path / "cache", folder=tmp_path).stderr


def test_long_arrays_that_differ_in_the_middle_are_two_kernels():
    from numflash.jit import closures, compiler

    one = np.zeros(5000, np.int32)
    other = np.zeros(5000, np.int32)
    other[2500] = 1
    assert repr(one) == repr(other)

    def kernel_of(table):
        return compiler.kernel(lambda n: table[n])

    assert closures.salt(kernel_of(one)) != closures.salt(kernel_of(other))


def test_a_helper_with_other_options_is_another_kernel():
    """Two kernels that differ only in the options of a function they call must not share compiled
    code.
    """
    from numflash.jit import closures, compiler

    one = 1

    def plain(x):
        return x + 1

    def closing(x):  # its name tells what it closes over, and not the options
        return x + one

    def caller(called):
        return compiler.kernel(lambda x: called(x))

    for helper in (plain, closing):
        salts = {
            closures.salt(caller(compiler.kernel(helper, **options)))
            for options in ({}, {"float_math": True}, {"inline": "always"})
        }
        assert len(salts) == 3
        assert closures.salt(caller(compiler.kernel(helper))) == closures.salt(
            caller(compiler.kernel(helper))
        )


def test_a_function_that_two_kinds_of_callers_would_share_is_an_error(monkeypatch):
    """Numba compiles it with the options of the first one, which a cache on disk would leave out."""
    from numflash.jit import compiler

    monkeypatch.setattr(compiler, "CHECKED", True)
    monkeypatch.setattr(compiler, "cached", lambda dispatcher, options: dispatcher)
    for decorate, shared in (
        (compiler.inline, False),
        (compiler.bare, False),
        (compiler.own, True),
    ):

        @decorate
        def helper(x):
            return x * 3.0 - x * 3.0

        relaxed, strict = (
            compiler.kernel(lambda x: helper(x), float_math=fast) for fast in (True, False)
        )
        relaxed(1.0)
        if shared:
            assert np.isnan(strict(np.inf))
        else:
            with pytest.raises(AssertionError, match=r"helper.*: called with reference counts"):
                strict(np.inf)


FACTORY = """
from numflash.jit.compiler import inline, kernel

def make(step):
    @inline
    def helper(x, n):
        for i in range(n):
            x[i % x.size] = x[i % x.size] * x[(i + step) % x.size] + step
            if x[i % x.size] > 1e6:
                x[i % x.size] = step
        return x[n % x.size]

    @kernel
    def run(x, n):
        return helper(x, n) + step
    return run
"""
MADE = "import sys, numpy as np, factory; print([factory.make(c)(np.arange(5.0), 9) for c in map(int, sys.argv[1:])])"


def test_closures_compiled_in_other_processes_keep_apart(tmp_path):
    """Numba numbers closures anew in every process.

    Two from the cache must not run each other's code.
    """
    (tmp_path / "factory.py").write_text(FACTORY)

    def made(*steps, cache="cache"):
        path = f"{tmp_path}{os.pathsep}{ROOT}"
        return json.loads(run(MADE, tmp_path / cache, *steps, PYTHONPATH=path).stdout)

    one, two = made(1), made(2)
    assert one != two and made(3, 2, 1)[1:] == two + one


TASKS = """
import sys
import numpy as np
from numflash.jit.compiler import inline, kernel
from numflash.jit.parallel import over_tasks, share

def make(step):
    @inline
    def task(n, out):
        out[n] = 10 * step + n

    @kernel
    def run(out):
        over_tasks(task, out.size, (out,))
    return run

if __name__ == "__main__":
    for step in map(int, sys.argv[1:]):
        out, run = np.zeros(2, np.int64), make(step)
        run(out)
        print(out.tolist(), sum(run.stats.cache_hits.values()))
    print(sum(share.stats.cache_hits.values()))
"""


def test_kernels_from_the_cache_find_what_shares_out_their_tasks(tmp_path):
    """A kernel in the disk cache holds only its symbol, whether it is in the cache too or must be
    compiled anew.
    """
    script = tmp_path / "factory.py"
    cache = tmp_path / "cache"
    script.write_text(TASKS)

    def made(*steps):
        return start(script, *steps, cache=cache).stdout.splitlines()

    def lines(*steps, hits):
        return [f"[{10 * step}, {10 * step + 1}] {hits}" for step in steps]

    assert made(1, 2) == [*lines(1, 2, hits=0), "0"]
    assert made(3) == [*lines(3, hits=0), "1"]
    shared = [file for file in cache.rglob("*.nb?") if ".share-" in file.name]
    assert len(shared) == 2  # an index, and code
    assert made(3, 1, 2) == [*lines(3, 1, 2, hits=1), "1"]
    for file in shared:
        file.unlink()
    assert made(2, 3, 1) == [*lines(2, 3, 1, hits=1), "0"]


def test_a_kernel_typed_at_the_prompt_is_not_cached():
    run("from numflash.jit.compiler import kernel; assert kernel(lambda x: x + 1)(1) == 2")


def test_without_a_compiler_there_is_an_error_that_says_so():
    done = start("-m", "numflash", "explain", check=False, NUMBA_DISABLE_JIT="1")
    assert done.returncode == 1 and done.stderr.startswith("numflash: NUMBA_DISABLE_JIT is set"), (
        done.stderr[-2000:]
    )


def test_no_threads_is_an_error_that_names_the_variable():
    done = start("-m", "numflash", "info", check=False, NUMBA_NUM_THREADS="0")
    assert done.returncode == 1
    assert done.stderr == "numflash: NUMBA_NUM_THREADS: got '0'; allowed: unset, or 1 or more\n"


def test_unwritable_cache_still_computes(tmp_path):
    folder = tmp_path / "file"
    folder.write_text("not a folder")
    data = numflash.quantize(np.arange(24, dtype=np.float32).reshape(4, 6)).data
    assert run(QUANTIZE, folder).stdout == f"{data.tolist()}\n"


def test_many_python_threads_at_once():
    problems = [qkv(b=1, h=2, l=64 + 7 * i, s=130 + i, d=64, seed=i) for i in range(12)]

    def attend(arrays):
        return numflash.attention(*arrays, precision="int8", is_causal=True, return_lse=True)

    want = list(map(attend, problems))
    with ThreadPoolExecutor(6) as pool:
        for _ in range(3):
            for mine, other in zip(pool.map(attend, problems), want, strict=True):
                np.testing.assert_array_equal(mine[0], other[0])
                np.testing.assert_array_equal(mine[1], other[1])


CHILD = """
import multiprocessing, numpy as np, numflash
x = np.ones((1, 1, 70, 64), np.float32)
def work(_=None):
    return float(numflash.attention(x, x, x, precision="int8").sum())
if __name__ == "__main__":
    want = work() if {first} else 70 * 64.0
    context = multiprocessing.get_context({method!r})
    with context.Pool(2) as pool:
        found = pool.map_async(work, range(4)).get(200)
    assert found == [found[0]] * 4 and abs(found[0] - want) < 1, (found, want)
"""


@pytest.mark.parametrize(("method", "first"), [("spawn", True), ("fork", False)])
def test_worker_processes(method, first, tmp_path):
    """Spawned workers always work; forked ones if the parent has not run a kernel yet."""
    script = tmp_path / "work.py"
    script.write_text(CHILD.format(method=method, first=first))
    start(script, timeout=400)


FORKED = """
import os, sys, numpy as np, numba, numflash
from numflash.errors import UnsupportedError
x = np.ones((1, 1, 7, 8), np.float32)
{first}
if numba.threading_layer() != "omp":
    sys.exit(0)
child = os.fork()
if child == 0:
    refused = 0
    for call in (lambda: numflash.attention(x, x, x), lambda: numflash.quantize(x)):
        try:
            call()
        except UnsupportedError as error:
            refused += "spawn" in str(error)
    os._exit(40 + refused)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("first", ["numflash.quantize(x)", "numflash.get_num_threads()"])
def test_a_process_forked_after_threads_started_gets_an_error_not_a_crash(first):
    run(FORKED.format(first=first))


MEMORY = """
import numpy as np, numba, numflash
numba.set_num_threads(min(2, numba.config.NUMBA_NUM_THREADS))
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
x = np.ones((1, 1, 64, 128), np.float32)
numflash.attention(x, x, x, precision="int8")                     # compiled and loaded: code is not counted
numflash.attention_int8(*numflash.quantize_qkv(x, x, x))
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, 1, {length}, 128), np.float32) for _ in range(3))
{prepare}
open("/proc/self/clear_refs", "w").write("5")                     # the peak starts anew
before = status("VmRSS")
out = {call}
assert out.shape == q.shape and np.isfinite(out).all()
print((status("VmHWM") - before - out.nbytes) / 1e6)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux")
@pytest.mark.parametrize(
    ("prepare", "call"),
    [
        pytest.param(
            "q8, k8, v8 = numflash.quantize_qkv(q, k, v)",
            "numflash.attention_int8(q8, k8, v8)",
            marks=pytest.mark.slow,
        ),
        ("", "numflash.attention(q, k, v, precision='int8')"),
    ],
)
def test_memory_beyond_inputs_and_output(prepare, call):
    """The score matrix of 32768 x 32768 would take 4 GB; 100 MB must do for everything."""
    done = run(MEMORY.format(length=32768, prepare=prepare, call=call))
    assert float(done.stdout) < 100, done.stdout


@pytest.mark.slow
def test_memory_is_measured():
    """The measure sees a score matrix."""
    done = run(MEMORY.format(length=8192, prepare="", call="(q @ k.swapaxes(2, 3)) @ v"))
    assert float(done.stdout) > 200, done.stdout


AGAIN = """
import resource, numpy as np, numflash
q, k, v = (np.random.default_rng(n).standard_normal((1, 1, 4096, 128), np.float32) for n in range(3))
def faults(calls):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(calls):
        numflash.attention(q, k, v, window=(64, 0))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / calls
faults(3)
print(faults(10))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's heap")
def test_a_call_finds_the_memory_of_the_last_one():
    """Packed K and V and the output are 6 MB.

    1500 pages, which the system would clear anew each time.
    """
    assert float(run(AGAIN).stdout) < 100
