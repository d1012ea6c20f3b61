"""Threads of the caller and of Numba: right answers, and errors that say what to do."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest
from oracles import draw
from processes import run, start

import numflash
from numflash import tiling
from numflash.errors import ArgumentError, NumflashError, UnsupportedError
from numflash.jit import quota, threads

resource = pytest.importorskip("resource")

EIGHT = """
import sys, threading
import numpy as np, numflash
start, found, errors = threading.Barrier(8), [None] * 8, []
def work(n):
    x = np.random.default_rng(n % 4).standard_normal((1, 2, 70, 32)).astype(np.float32)
    start.wait()
    try:
        found[n] = numflash.quantize(x).data, numflash.quantize(x, "channel").data
    except BaseException as error:
        errors.append(error)
workers = [threading.Thread(target=work, args=(n,)) for n in range(8)]
for worker in workers: worker.start()
for worker in workers: worker.join()
assert not errors, errors
for n in range(8):
    x = np.random.default_rng(n % 4).standard_normal((1, 2, 70, 32)).astype(np.float32)
    for mine, how in zip(found[n], ("row", "channel"), strict=True):
        assert (mine == numflash.quantize(x, how).data).all()
        assert (mine == found[n % 4][how == "channel"]).all()
print(found[0][0].astype(np.int64).sum())
"""


def test_eight_threads_with_an_empty_cache(tmp_path):
    done = run(EIGHT, tmp_path)
    again = run(EIGHT, tmp_path)
    assert again.stdout == done.stdout and "compiling" not in again.stderr


POOL = """
import multiprocessing, sys
import numpy as np, numflash
def work(n):
    x = np.full((1, 4), n + 1, np.float32)
    return numflash.quantize(x).scale.item()
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.map_async(work, range(4)).get(200)
    assert np.allclose(found, [(n + 1) / 127 for n in range(4)], rtol=1e-6), found
"""


@pytest.mark.slow
def test_a_spawn_pool_with_an_empty_cache(tmp_path):
    script = tmp_path / "work.py"
    script.write_text(POOL)
    start(script, cache=tmp_path / "cache")


@pytest.mark.skipif(threads.most() < 2, reason="needs two threads")
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_the_number_of_threads_changes_while_another_thread_computes(precision):
    """The number belongs to the Python thread that sets it; results do not depend on it."""
    q, k, v = (draw((1, 4, 200, 32), n) for n in range(3))
    want = numflash.attention(q, k, v, precision=precision)
    cache = numflash.KVCache(1, 4, 32, 4000, "int8")
    cache.append(draw((1, 4, 4000, 32)), draw((1, 4, 4000, 32), 1))
    query = draw((1, 8, 1, 32), 2)
    decoded = cache.decode(query, splits=4)
    stop = threading.Event()

    def change():
        n = 0
        while not stop.is_set():
            numba.set_num_threads(1 + n % threads.most())
            n += 1

    def compute(_):
        for n in range(30):
            numba.set_num_threads(1 + n % threads.most())
            np.testing.assert_array_equal(numflash.attention(q, k, v, precision=precision), want)

    before = numba.get_num_threads()
    with ThreadPoolExecutor(3) as pool:
        changed = pool.submit(change)
        computing = list(map(pool.submit, [compute] * 2, range(2)))
        for _ in range(30):
            np.testing.assert_array_equal(cache.decode(query, splits=4), decoded)
        for job in computing:
            job.result()
        stop.set()
        changed.result()
    assert numba.get_num_threads() == before


@pytest.mark.parametrize("layer", ["tbb", "nonsense"])
@pytest.mark.parametrize(
    "call",
    ["numflash.attention(x, x, x)", pytest.param("numflash.quantize(x)", marks=pytest.mark.slow)],
)
def test_an_absent_threading_layer(layer, call, tmp_path):
    if layer == "tbb":
        try:
            from numba.np.ufunc import tbbpool  # noqa: F401
        except ImportError:
            pass
        else:
            pytest.skip("TBB is installed")
    code = f"""
import numpy as np, numflash
x = np.ones((1, 1, 7, 8), np.float32)
for _ in range(2):
    try:
        {call}
    except numflash.errors.UnsupportedError as error:
        print(error)
"""
    code = code.replace("numflash\n", "numflash, numflash.errors\n", 1)
    done = run(code, tmp_path, NUMBA_THREADING_LAYER=layer)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and lines[0] == lines[1]
    assert lines[0].startswith(f"NUMBA_THREADING_LAYER: got '{layer}'")


NESTED = """
import ctypes
from numba.np.ufunc import omppool
import numflash
levels = ctypes.CDLL(omppool.__file__).omp_get_max_active_levels
numflash.get_num_threads()
print(levels())
"""


def test_openmp_regions_inside_of_regions(tmp_path):
    """Forbidden again after Numba's threads have started, but where the environment asks for them."""
    pytest.importorskip(
        "numba.np.ufunc.omppool", reason="needs an OpenMP runtime", exc_type=ImportError
    )
    for asked in ({}, {"OMP_MAX_ACTIVE_LEVELS": "3"}):
        done = run(NESTED, tmp_path, NUMBA_THREADING_LAYER="omp", **asked)
        assert (int(done.stdout) > 1) == bool(asked)


def test_too_little_memory_for_threads(monkeypatch):
    """GNU OpenMP ends the process where a thread cannot be started; here it is a MemoryError."""
    limits = {resource.RLIMIT_AS: (1 << 28, resource.RLIM_INFINITY)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    threads.check_memory_for_threads()

    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "most", lambda: 4)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(MemoryError, match=r"4 threads cannot be started .* 256 MB.*ulimit -v"):
        threads.check_memory_for_threads()
    limits[resource.RLIMIT_AS] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    threads.check_memory_for_threads()


def test_the_public_number_of_threads():
    before = numflash.get_num_threads()
    with numflash.num_threads(1) as n:
        assert n == numflash.get_num_threads() == numba.get_num_threads() == 1
        numflash.set_num_threads(before)
    assert numflash.get_num_threads() == before
    for wrong in (0, -1, 1 << 20, 1.0, True, None, "2"):
        for use in (numflash.set_num_threads, lambda n: numflash.num_threads(n).__enter__()):
            with pytest.raises(NumflashError, match=r"threads: got .* allowed: "):
                use(wrong)
    assert numflash.get_num_threads() == before


def test_a_limit_of_threads_ends_with_its_block():
    before = numba.get_num_threads()
    with threads.limit(1) as n:
        assert n == numba.get_num_threads() == 1
    assert numba.get_num_threads() == before
    for bad in (0, -1, threads.most() + 1):
        with pytest.raises(ArgumentError, match="threads"), threads.limit(bad):
            pass


@pytest.mark.parametrize(
    ("asked", "layer", "cores", "refused"),
    [
        ("16k", "omp", 2, True),
        (" 63 ", "omp", 2, True),  # KiB without a unit
        ("65535B", "omp", 2, True),
        ("64K", "omp", 2, False),
        ("4M", "omp", 2, False),
        ("many", "omp", 2, False),  # OpenMP ignores it
        ("16k", "workqueue", 2, False),
        ("16k", "omp", 1, False),
    ],
)
def test_stacks_of_openmp_that_are_too_small(asked, layer, cores, refused, monkeypatch):
    monkeypatch.setenv("OMP_STACKSIZE", asked)
    monkeypatch.setattr(numba, "threading_layer", lambda: layer)
    monkeypatch.setattr(threads, "most", lambda: cores)
    if refused:
        with pytest.raises(UnsupportedError, match=f"OMP_STACKSIZE: got '{asked}'.*64k"):
            threads.check_stacks()
    else:
        threads.check_stacks()


def test_a_small_stack_is_refused_before_a_kernel_ends_the_process():
    code = (
        "import numba, numpy as np, numflash; x = np.ones((1, 4, 300, 128), np.float32)\n"
        "try: numflash.attention(x, x, x); print('computed', numba.threading_layer())\n"
        "except numflash.errors.UnsupportedError as error: print(error)"
    )
    shown = run(code, OMP_STACKSIZE="16k", NUMBA_NUM_THREADS="2").stdout
    assert "OMP_STACKSIZE: got '16k'" in shown or "computed workqueue" in shown, shown


@pytest.mark.parametrize("precision", ["float32", "int8", "gradient"])
def test_an_error_in_a_kernel_leaves_the_number_of_threads(precision, monkeypatch):
    def without_memory(*arguments):
        numba.set_num_threads(1)
        raise MemoryError

    q = draw((1, 2, 30, 17))  # a shape that no other test has
    out, lse = numflash.attention(q, q, q, return_lse=True)
    for place in (
        "launch_float.make_call",
        "launch_int8.make_float_call",
        "backward.tiled.make_call",
    ):
        monkeypatch.setattr(f"numflash.cpu.{place}", lambda *rows: without_memory)
    q, x = draw((1, 2, 31, 17)), out[:, :, :29]
    before = numflash.get_num_threads()
    with pytest.raises(MemoryError):
        _ = (
            numflash.attention_backward(x, x, x, x, x, lse[:, :, :29])
            if precision == "gradient"
            else numflash.attention(q, q, q, precision=precision)
        )
    assert numflash.get_num_threads() == before


@pytest.mark.parametrize(("layer", "times"), [("omp", 1), ("tbb", 1), ("workqueue", 8)])
def test_threads_that_start_slowly_get_more_work(layer, times, monkeypatch):
    monkeypatch.setattr(numba, "threading_layer", lambda: layer)
    work = tiling.threads.THREAD_WORK["int8"] * times
    assert [tiling.workers("int8", n) for n in (1, work, 2 * work - 1, 2 * work)] == [1, 1, 1, 2]
    assert [threads.threads_for(n, 100) for n in (0, 100, 100 * times)] == [1, 1, 1]
    assert threads.threads_for(100 * times + 1, 100) == threads.count()


def test_little_work_starts_no_threads():
    code = (
        "import numpy as np, numba, numflash\nfrom numflash.jit import threads\n"
        "c = numflash.KVCache(1, 2, 16, 64)\n"
        "for _ in range(2): c.append(*np.ones((2, 1, 2, 3, 16), 'f'))\n"
        "assert not threads._started"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


V2, V1 = "0::/pod/box\n", "4:cpu,cpuacct:/box\n3:cpuset:/\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "files", "cpus"),
    [
        (V2, {}, None),
        (V2, {"cpu.max": "max 100000"}, None),
        (V2, {"cpu.max": "150000 100000"}, 1.5),  # in a container: its own group is the root
        (V2, {"cpu.max": "400000 100000", "pod/box/cpu.max": "max 100000"}, 4),
        (V2, {"pod/cpu.max": "300000 100000", "pod/box/cpu.max": "800000 100000"}, 3),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        (V1, {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        (V1, {"cpu/box/cpu.cfs_quota_us": "20000", "cpu/box/cpu.cfs_period_us": "10000"}, 2),
        (V1, {"cpu/cpu.cfs_quota_us": "50000"}, None),
        ("", {"cpu.max": "100000 100000"}, None),
        ("odd\n\n3:cpu\n" + V2, {"cpu.max": "100000 0", "pod/cpu.max": "100000 100000 7"}, None),
    ],
)
def test_the_quota_of_a_container(groups, files, cpus, tmp_path):
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert quota.cpu_quota(str(tmp_path / "groups"), str(tmp_path)) == cpus
    assert quota.cpu_quota(str(tmp_path / "none"), str(tmp_path)) is None


@pytest.mark.parametrize(
    ("cpus", "number"),
    [(None, None), (0.5, 1), (1, 1), (1.5, 2), (3, 3), (3.2, None), (4, None), (8, None)],
)
def test_threads_of_a_quota(cpus, number, monkeypatch):
    monkeypatch.setattr(quota, "cpu_quota", lambda: cpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    assert quota.threads_of_quota() == number


@pytest.mark.skipif(threads.most() < 2, reason="needs two threads")
@pytest.mark.parametrize(
    ("first", "given", "number"), [("", "", 1), ("import numba", "", 1), ("", "2", 2)]
)
def test_numba_starts_as_many_threads_as_the_quota_allows(first, given, number, tmp_path):
    """Also where Numba was there before; a number that the user gives is taken."""
    (tmp_path / "sitecustomize.py").write_text(
        "import io, builtins\nreal = open\n"
        "def opened(path, *rest, **options):\n"
        "    text = {'/proc/self/cgroup': '0::/', '/sys/fs/cgroup/cpu.max': '50000 100000'}.get(path)\n"
        "    return io.StringIO(text) if text else real(path, *rest, **options)\n"
        "builtins.open = opened\n"
    )
    code = f"{first}\nimport numflash, os, numba\nassert numflash.get_num_threads() == {number}"
    settings = {k: v for k, v in os.environ.items() if k != quota.VARIABLE}
    settings |= {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    settings |= {quota.VARIABLE: given} if given else {}
    subprocess.run([sys.executable, "-c", code], check=True, env=settings)


def test_a_number_of_threads_that_the_user_has_set_stays(monkeypatch):
    """Where Numba was imported before numflash."""
    asked = []
    monkeypatch.delenv(quota.VARIABLE, raising=False)
    monkeypatch.setattr(quota, "threads_of_quota", lambda: 1)
    monkeypatch.setattr(threads, "most", lambda: 8)
    monkeypatch.setattr(numba, "set_num_threads", asked.append)
    assert threads._within_quota(4) == 4 and not asked
    assert threads._within_quota(8) == 1 and asked == [1]
