"""Compiled kernels on disk.

What others may write is not read, what cannot be saved is not missed, and clearing says what goes.
"""

import functools
import json
import os
import pickle
import shutil
from pathlib import Path

import processes
import pytest
from numba.core import config
from numba.core.registry import cpu_target
from processes import ROOT

from numflash.flex import machine
from numflash.flex.prepared import prepare
from numflash.flex.program import Program
from numflash.jit import announcements, trust, whole
from numflash.numerics.quantize_kernels import quantize_rows

slow = pytest.mark.slow
QUANTIZE = "import numpy as np, numflash; print(numflash.quantize(np.arange(24, dtype=np.float32).reshape(4, 6)).data.tolist())"
posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX permissions")


def python(code, cache, *arguments, folder=ROOT):
    """A new process with its compiled kernels in `cache`, and nothing in a home of its own."""
    home = f"{cache}-home"
    folders = {"HOME": home, "XDG_CACHE_HOME": home, "NUMFLASH_CACHE_DIR": str(cache)}
    return processes.run(code, cache, *arguments, folder=folder, check=False, **folders)


def entries(cache, suffixes=(".nbi", ".nbc")):
    return sorted(
        path for path in Path(cache).rglob("*") if path.suffix in suffixes and path.is_file()
    )


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    file = tmp_path / "numbers"
    whole.write_whole(file, b"old")

    def fail():
        with whole.new_file(file) as new:
            new.write(b"half of the")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fail()
    assert file.read_bytes() == b"old" and list(tmp_path.iterdir()) == [file]
    whole.write_whole(file, b"new")
    assert file.read_bytes() == b"new" and list(tmp_path.iterdir()) == [file]


@slow
@posix
def test_a_path_that_is_no_text(tmp_path):
    folder = tmp_path / os.fsdecode(b"na\xefve")  # Latin-1, where names are UTF-8
    folder.mkdir()
    (folder / "numflash").symlink_to(ROOT / "numflash")
    done = python(QUANTIZE, tmp_path / "cache", folder=folder)
    assert done.returncode == 0, done.stderr
    assert entries(tmp_path / "cache")


class Planted:
    """Writes a file when it is unpickled: what an attacker's cache entry would do."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A folder of compiled kernels of `QUANTIZE`, and what it prints."""
    cache = tmp_path_factory.mktemp("cache")
    done = python(QUANTIZE, cache)
    assert done.returncode == 0 and "compiling" in done.stderr, done.stderr[-3000:]
    return cache, done.stdout


def copy_of(filled, tmp_path):
    return shutil.copytree(filled[0], tmp_path / "cache")


def cut(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def flip_a_bit(path):
    data = path.read_bytes()
    path.write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])


@pytest.mark.parametrize("damage", [pytest.param(cut, marks=slow), flip_a_bit])
def test_damaged_entries_are_compiled_anew(damage, filled, tmp_path):
    cache = copy_of(filled, tmp_path)
    for path in entries(cache):
        damage(path)
    done = python(QUANTIZE, cache)
    assert done.stdout == filled[1] and "compiling" in done.stderr, done.stderr[-3000:]


@slow
def test_the_code_of_a_kernel_under_the_name_of_another(filled, tmp_path):
    cache = copy_of(filled, tmp_path)
    one, other = entries(cache, [".nbc"])[:2]
    shutil.copy(other, one)
    assert python(QUANTIZE, cache).stdout == filled[1]


@posix
@pytest.mark.parametrize("where", ["file", pytest.param("folder", marks=slow)])
def test_what_others_may_write_is_not_read(where, filled, tmp_path):
    cache = copy_of(filled, tmp_path)
    marker = tmp_path / "run"
    for path in entries(cache):
        path.write_bytes(pickle.dumps(Planted(marker)))
        if where == "file":
            path.chmod(0o666)
        else:
            path.parent.chmod(0o777)
    done = python(QUANTIZE, cache)
    assert not marker.exists(), "a planted file was unpickled"
    assert done.returncode == 0 and done.stdout == filled[1], done.stderr[-3000:]
    assert done.stderr.count(str(cache)) == 1, done.stderr
    assert "others may write" in done.stderr


@pytest.fixture
def functions(tmp_path, monkeypatch):
    """Calls that load either of two score functions from the disk, and their files there."""
    monkeypatch.setattr(machine, "_folder", lambda: tmp_path)
    graphs = (prepare(lambda score, b, h, q, k, n=n: score * n, None) for n in (2, 3))
    programs = [Program(x.graph, x.score, None, None, (1, 1, 8, 8)) for x in graphs]
    form = machine.Form(False, 4, False, "")

    def load(program):
        machine._known.pop((program.text, form), None)
        return machine.machine_code(program, form)

    calls = [functools.partial(load, program) for program in programs]
    files = []
    for call in calls:
        call()
        files += set(tmp_path.iterdir()) - set(files)
    return calls, files


def test_a_function_of_another_name_is_compiled_anew(functions, monkeypatch):
    """It has no code under the name that is asked for, and the kernel ran without it."""
    calls, files = functions
    made = []
    real = machine.compile_program
    monkeypatch.setattr(machine, "compile_program", lambda *a: made.append(a) or real(*a))
    shutil.copy(files[0], files[1])
    assert all(load().address for load in calls)
    assert len(made) == 1 and files[0].read_bytes() != files[1].read_bytes()


@posix
def test_functions_that_others_may_write_are_not_read(functions, tmp_path, monkeypatch):
    calls, files = functions
    marker = tmp_path / "run"
    payload = pickle.dumps(Planted(marker))
    files[0].write_bytes(machine._digest(files[0], payload) + payload)
    files[0].chmod(0o666)
    monkeypatch.setattr(trust, "_refused", [])
    assert calls[0]().address and not marker.exists(), "a planted file was unpickled"


@posix
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away"
)
@pytest.mark.parametrize("where", ["file", pytest.param("folder", marks=slow)])
def test_what_somebody_else_owns_is_not_read(where, filled, tmp_path):
    cache = copy_of(filled, tmp_path)
    marker = tmp_path / "run"
    for path in entries(cache):
        path.write_bytes(pickle.dumps(Planted(marker)))
        os.chown(path if where == "file" else path.parent, 12345, -1)
    done = python(QUANTIZE, cache)
    assert not marker.exists(), "a planted file was unpickled"
    assert done.returncode == 0 and done.stdout == filled[1], done.stderr[-3000:]
    assert str(cache) in done.stderr and "owned by" in done.stderr


@posix
def test_own_files_are_read(filled, tmp_path):
    """Also under a folder that everybody may write to, as /tmp is.

    And through a group that is the user's alone.
    """
    cache = copy_of(filled, tmp_path)
    cache.chmod(0o777)
    done = python(QUANTIZE, cache)
    assert (
        done.stdout == filled[1] and "compiling" not in done.stderr and "write" not in done.stderr
    )


@posix
def test_a_full_disk_does_not_stop_a_call(tmp_path):
    """Neither a file-size limit (EFBIG), nor a folder that vanishes.

    The kernel is compiled, so the call succeeds.
    """
    script = f"ulimit -f 8; exec \"$0\" -c '{QUANTIZE}'"
    done = processes.start(cache=tmp_path / "cache", wrapper=("bash", "-c", script))
    assert done.stdout.startswith("[["), done.stderr[-3000:]
    assert done.stderr.count("not saved") == 1 and str(tmp_path / "cache") in done.stderr
    assert not list((tmp_path / "cache").rglob("*.tmp.*"))


def test_a_folder_that_is_passed_over_is_said_once(monkeypatch, caplog):
    """A kernel that is not stored yet is looked for twice, under a NUMBA_CACHE_DIR that is not in use."""
    stored, context = quantize_rows._cache, cpu_target.target_context
    monkeypatch.setattr(announcements, "_said", set())
    for chosen in ("", "/dev/null/kernels", "/dev/null/kernels"):
        monkeypatch.setattr(config, "CACHE_DIR", chosen)
        assert stored.load_overload(("no such types",), context) is None
    said = [x.getMessage() for x in caplog.records if "NUMBA_CACHE_DIR" in x.getMessage()]
    assert said == [
        "NUMBA_CACHE_DIR: got '/dev/null/kernels', where no folder can be made or written to; "
        f"compiled kernels go to {stored.cache_path}"
    ]


@slow
@posix
def test_no_folder_at_all_is_said_once(tmp_path):
    """A read-only installation and home: here files are where the folders would be, root can write
    anywhere.
    """
    package = tmp_path / "site" / "numflash"
    shutil.copytree(ROOT / "numflash", package, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (package, *(path for path in package.rglob("*") if path.is_dir())):
        (folder / "__pycache__").touch()
    (tmp_path / "home").touch()
    below = str(tmp_path / "home" / "cache")
    done = processes.run(
        f"{QUANTIZE}; {QUANTIZE}", below, folder=package.parent, HOME=below, XDG_CACHE_HOME=below
    )
    assert done.stdout.startswith("[["), done.stderr[-3000:]
    assert done.stderr.count("not saved in any folder (neither NUMBA_CACHE_DIR") == 1, done.stderr
    assert "compiling" in done.stderr and "cached on disk" not in done.stderr


INTERRUPTED = """
import importlib, os, signal, sys, threading
import numba, numpy as np
module, name, attribute, turn = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
owner = getattr(importlib.import_module(module), name)
plain, calls = getattr(owner, attribute), 0
def interrupt(*arguments, **options):                    # the method as it is, with Ctrl-C pressed before its n-th call ends
    global calls
    found = plain(*arguments, **options)
    calls += 1
    if calls == int(turn):
        os.kill(os.getpid(), signal.SIGINT)
    return found
setattr(owner, attribute, interrupt)
import numflash
numflash.quantize
stopped = 0
for _ in range(2):
    try:
        out = numflash.quantize(np.arange(24, dtype=np.float32).reshape(4, 6)).data.tolist()
    except KeyboardInterrupt:
        stopped += 1
print(out)
sys.exit(40 + stopped)
"""
MOMENTS = [
    ("numba.core.codegen", "JITCodeLibrary", "_object_compiled_hook", 1),  # in a callback from LLVM
    ("numba.core.codegen", "JITCodeLibrary", "_object_compiled_hook", 2),
    ("numba.core.codegen", "JITCodeLibrary", "finalize", 3),
    ("numba.core.dispatcher", "Dispatcher", "add_overload", 1),
    ("numba.core.dispatcher", "Dispatcher", "add_overload", 2),
    ("numba.core.base", "BaseContext", "insert_func_defn", 3),
]


@posix
@pytest.mark.parametrize(
    "moment",
    [MOMENTS[0], *(pytest.param(m, marks=slow) for m in MOMENTS[1:])],
    ids=lambda m: f"{m[2]}-{m[3]}",
)
def test_an_interrupt_while_compiling_leaves_the_next_call_working(moment, filled, tmp_path):
    done = python(INTERRUPTED, tmp_path / "cache", *map(str, moment))
    assert done.returncode == 41, (done.returncode, done.stderr[-3000:])
    assert done.stdout == filled[1]
    assert "no compiled object" not in done.stderr and "gnored" not in done.stderr, done.stderr


def test_an_entry_with_another_checksum_is_not_taken(tmp_path):
    """The pickles are whole, the code inside is not what was saved."""
    from numflash.jit.disk_cache import _CheckedFile

    file = _CheckedFile(str(tmp_path), "kernel", "stamp")
    file.save(("key",), [1, 2, 3])
    assert file.load(("key",)) == [1, 2, 3]
    (data,) = tmp_path.glob("*.nbc")
    owner, checksum, payload = pickle.loads(data.read_bytes())
    data.write_bytes(pickle.dumps((owner, checksum, pickle.dumps([1, 2, 4]))))
    assert file.load(("key",)) is None
    data.write_bytes(pickle.dumps(("other", checksum, payload)))
    assert file.load(("key",)) is None
    data.write_bytes(pickle.dumps((owner, checksum, payload)))
    assert file.load(("key",)) == [1, 2, 3]


def command(cache, *arguments):
    done = python(
        "import sys; from numflash.commands.cli import main; sys.exit(main(sys.argv[1:]))",
        cache,
        *arguments,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_clearing_lists_what_goes_and_takes_no_more(filled, tmp_path):
    cache = copy_of(filled, tmp_path)
    package = entries(cache)[0].parent
    (package / "folder.nbc").mkdir()
    (package / f"{entries(cache)[0].name}.tmp.0123456789abcdef").write_bytes(
        b"left by a process that was killed"
    )
    other = cache / "other_package" / "kernel.nbi"
    other.parent.mkdir()
    other.write_bytes(b"")
    names = (
        "flash-sm_90a-{}.cubin",
        "flash-sm_80-{}.ptx",
        "flash-sm_80-{}.linked.tmp.0123456789abcdef",
    )
    cuda = [cache / "cuda" / name.format(40 * "0") for name in names]
    cuda.append(cache / "cuda" / "expected" / f"sm_75-{20 * '0'}.npz")
    not_ours = cache / "cuda" / "other.ptx"
    cuda[-1].parent.mkdir(parents=True)
    for path in (*cuda, not_ours):
        path.write_bytes(b"")
    beside = ROOT / "numflash" / "__pycache__" / "test_clearing.nbi"
    beside.parent.mkdir(exist_ok=True)
    beside.write_bytes(b"")
    try:
        kernels = {str(path) for path in entries(cache)} - {str(other)}
        want = kernels | {str(path) for path in cuda}
        shown = command(cache, "cache", "clear", "--dry-run")
        assert (
            all(path in shown for path in want)
            and str(beside) not in shown
            and str(other) not in shown
        )
        assert "would be removed" in shown
        assert {str(path) for path in entries(cache)} == kernels | {str(other)}
        info = json.loads(command(cache, "info", "--json"))
        assert info["cache_files"] == len(want) + 1
        assert set(info["cache"]) >= {str(path.parent) for path in cuda}
        found = json.loads(command(cache, "cache", "clear", "--json"))
        assert (
            set(found["files"]) >= want and found["removed"] == len(found["files"]) == len(want) + 1
        )
        assert entries(cache) == [other] and beside.exists() and (package / "folder.nbc").is_dir()
        assert not list(package.glob("*.tmp.*"))
        assert not any(path.exists() for path in cuda) and not_ours.exists()
    finally:
        beside.unlink()


PAIR = """
from numflash.jit.compiler import kernel

@kernel
def inner(x):
    return x + 1

@kernel
def outer(x):
    return inner(x) * 2
"""
CALLS = """
import sys
sys.path.insert(0, sys.argv[1])
import pair
print(pair.inner(1), *(pair.outer(int(n)) for n in sys.argv[2:]), sum(pair.inner.stats.cache_hits.values()))
"""


def test_a_kernel_from_the_disk_can_be_called_by_one_that_is_compiled(tmp_path):
    (tmp_path / "pair.py").write_text(PAIR)
    for numbers, printed in (("", "2 0"), ("3", "2 8 1")):
        done = python(CALLS, tmp_path / "cache", tmp_path, *numbers)
        assert done.stdout.split() == printed.split(), done.stderr


def test_the_log_names_a_kernel_and_not_its_digest():
    from numflash.cpu.floats.float_packing import make_pack_keys
    from numflash.jit.closures import shown_name

    function = make_pack_keys(8, 32, 8, 1).py_func
    assert not function.__qualname__.endswith("pack_panel"), "a factory's kernel has a digest"
    assert shown_name(function) == "cpu.floats.float_packing.pack_panel"


def test_a_file_that_changes_after_it_was_imported_matches_no_entry(monkeypatch):
    """Its code on disk is not the code that runs."""
    from numflash.jit import sources

    digest = functools.partial(sources.source_digest.__wrapped__, sources.__file__)
    assert digest() == digest()
    monkeypatch.setattr(sources, "IMPORTED", 0.0)
    assert digest() != digest()
    monkeypatch.setattr(sources.time, "time", lambda: 1.0)  # all files come from the future
    assert digest() == digest()
