"""What the steps of `numflash.cuda.validate` launch, and which results they let pass.

The emulator stands in for a card.
"""

import functools

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from numflash import reference
from numflash.cache.kvcache import KVCache
from numflash.cuda import launch
from numflash.cuda.compile import compiled
from numflash.cuda.device.operands import Launch
from numflash.cuda.device.resident import Emulated
from numflash.cuda.emulator import emulate
from numflash.cuda.validate import (
    attention,
    cases,
    child,
    compare,
    decode,
    decode_cases,
    expected,
    families,
    kernels,
    on_the_card,
    steps,
    variants,
)
from numflash.cuda.validate.cases import problem_of
from numflash.errors import UnsupportedError

SHAPE = (1, 2, 2, 40, 70, 64)
KNOWN = {case[0]: case for case in cases.CASES + cases.LONG_CASES}


class Device:
    """The emulator as a device; `after(launch)` is called after each launch."""

    arch, multiprocessors = "sm_90a", 8

    def __init__(self, after=lambda work: None):
        self.after, self.grids = after, []

    def run(self, work, blocks=0):
        kernel = compiled(work.factory, work.arch, "ptx", **work.constants)
        most = blocks or self.multiprocessors
        self.grids.append(work.blocks(most))
        emulate(kernel, self.grids[-1], None, work.arguments(most))
        self.after(work)

    def prepared(self, launches, use, blocks=0, **options):
        listed = [launches] if isinstance(launches, Launch) else launches
        return use(lambda: [self.run(x, blocks) for x in listed])

    def submit(self, work, stream):
        self.run(work)


class Card(Emulated):
    """The same with buffers."""

    stream = 0

    def __init__(self, device):
        super().__init__(device.arch)
        self.device = device


def rows_of(step, device, monkeypatch):
    monkeypatch.setattr(on_the_card, "Card", functools.partial(Card, device))
    (row,) = step.run(device)
    return row


def no_compiler(*arguments):
    raise UnsupportedError("no compiler")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parts_of_the_keys_need_not_have_equal_bits(dtype, monkeypatch):
    """On the card few rows over many keys are computed in parts, in host memory at once."""
    case = ("few rows", (1, 2, 1, 1, 600, 64), dtype, {})
    row = rows_of(attention.forward_check(case, "sm_80", False), Device(), monkeypatch)
    there = row["on_the_card"]
    assert row["passed"] and there["passed"] and 0 < there["difference"] < 1e-2


@pytest.mark.slow
def test_a_forward_check_passes_and_fails(monkeypatch):
    """Right results, then a race, and an LSE that is off."""
    case = ("one", (1, 2, 1, 300, 150, 64), "float16", {"is_causal": True})
    work = launch.plan(problem_of(*case[1:]), "sm_90a")
    right = [np.array(x) for x in attention.repeated(Device(), work)[0]]
    monkeypatch.setattr(expected, "get", lambda *arguments: right)
    step = attention.forward_check(case, "sm_90a", True)
    device = Device()
    row = rows_of(step, device, monkeypatch)
    assert row["passed"] and row["repeats_equal"] and row["on_the_card"]["equal_bits"]
    assert device.grids == [(n, 1, 1) for n in (5, 5, 5, 4, 5)]  # five tiles, then EMULATED_BLOCKS

    def race(work):
        if len(racing.grids) == 2:
            work.finish()[0][0, 0, 7, 3] += np.float16(0.001)

    racing = Device(race)
    row = rows_of(step, racing, monkeypatch)
    assert not row["passed"] and not row["repeats_equal"] and row["card_error"] < 1e-3

    def shift(work):
        work.finish()[1][...] += 2e-3

    monkeypatch.setattr(expected, "get", no_compiler)  # nor a file: float64 is enough
    row = rows_of(step, Device(shift), monkeypatch)
    assert not row["passed"] and row["repeats_equal"] and 1e-3 < row["lse_error"] < 3e-3


def test_persistent_blocks_take_several_turns():
    """In the long problems on a card of 132 multiprocessors, and with few blocks everywhere."""
    problem = problem_of(*KNOWN["float16 long D=128"][1:])
    work = launch.plan(problem, "sm_90a")
    assert work.persistent and work.blocks(132)[0] == 132 and work.grid[0] >= 2 * 128
    tried = []

    class Counts(Device):
        def run(self, work, blocks=0):
            tried.append(work.blocks(blocks or self.multiprocessors)[0])

    attention.repeated(Counts(), work)
    assert tried == [8, 8, 8, 4]


def test_comparisons():
    """NaN, a wrong LSE and a row that is not there are found; so is a wrong bit of INT8."""
    problem = problem_of(SHAPE, "float16", {})
    out, lse = (
        x.astype(t)
        for x, t in zip(
            reference.oracle(compare.floats(problem)), (np.float16, np.float32), strict=True
        )
    )

    def passes(out=out, lse=lse):
        return compare.forward(problem, (out, lse), None)["passed"]

    assert passes() and not passes(out * np.float16(np.nan)) and not passes(out + np.float16(0.01))
    assert not passes(lse=lse + 2e-3) and not passes(lse=np.where(lse > lse.mean(), lse, -np.inf))
    assert not passes(lse=lse * np.nan)
    problem = problem_of(SHAPE, "int8", {})
    out, lse = reference.integer_model(problem)
    assert compare.forward(problem, (out, lse), None)["passed"]
    out[0, 1, 3, 5] = np.nextafter(out[0, 1, 3, 5], 2)
    assert compare.forward(problem, (out, lse), None)["different_numbers"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8 causal", "int8 D=128"])
def test_the_integer_model_has_the_emulators_bits(name):
    """LSE too: long problems are compared with it alone."""
    case = KNOWN[name]
    found = expected.compute("forward", case, "sm_90a")
    assert compare.forward(problem_of(*case[1:]), found, None)["passed"]


@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_are_compared_after_a_timing(causal):
    problem = problem_of((2, 2, 2, 60, 60, 32), "float16", {"is_causal": causal})
    out, lse = reference.oracle(compare.floats(problem))
    assert compare.sample(problem, [out]) < 1e-12
    grad = np.random.default_rng(3).standard_normal(out.shape)
    exact = reference.gradients(problem, grad, out, lse)
    assert compare.sample(problem, exact, (grad, out, lse)) < 1e-6
    for n in range(3):
        wrong = [x.copy() for x in exact]
        wrong[n][-1, -1, -1] += 1
        assert compare.sample(problem, wrong, (grad, out, lse)) > 1e-2
    out[0, 0, 0, 0] = np.nan
    assert compare.sample(problem, [out]) == np.inf
    row = attention.timed("one", SHAPE, causal, 1.0, False, np.inf, 1e-3)
    assert "seconds" not in row and "its result is wrong" in row["error"]


@pytest.mark.parametrize("dtype", ["float16", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_cache_of_nan_fails(dtype, monkeypatch):
    """The host computes rows again that are not finite, and so would hide such a kernel."""
    case = next(x for x in decode_cases.CASES if x[0] == f"{dtype} 17 tokens, D=64")
    right = decode_cases.results(case, "cuda-emulator:sm_80")
    assert decode.compared(dtype, right, right) == {
        "computed_again": [0, 0], "passed": True,
        **({"equal_bits": True} if dtype == "int8" else {"largest_difference": 0.0}),
    }  # fmt: skip
    run = Emulated.run

    def spoiled(card, factory, constants, blocks, args):
        run(card, factory, constants, blocks, args)
        if factory.__name__.startswith("decode_float") or factory.__name__ == "decode_int8":
            next(
                x
                for x in args[0]
                if isinstance(x, np.ndarray) and x.shape == (2, 2, 7, 64) and x is not args[0][0]
            )[...] = np.nan

    monkeypatch.setattr(Emulated, "run", spoiled)
    nan = decode_cases.results(case, "cuda-emulator:sm_80")
    assert not decode.compared(dtype, nan, right)["passed"]
    if dtype == "float16":
        assert np.isfinite(nan[0]).all() and nan[-1].tolist() == [28, 28]


def test_a_wrong_cache_is_not_timed():
    assert "error" not in decode.wrong("float16", 0, 1e-4)
    assert "3 rows are not finite" in decode.wrong("float16", 3, 1e-4)["error"]
    assert "error 1.00e+00" in decode.wrong("int8", 0, 1.0)["error"]
    assert "error" in decode.wrong("int8", 0, np.nan)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_variants_are_timed_with_the_kernels_that_were_compared(arch):
    """Clusters among them, which an odd number of tiles of rows would rule out."""
    compared = {label for step in variants.checks(arch) for label in steps.labels(step.kernels())}
    timed = {label for step in variants.timings(arch) for label in steps.labels(step.kernels())}
    assert timed and timed <= compared
    shared = [
        dict(key[2]).get("cluster") for step in variants.checks(arch) for key in step.kernels()
    ]
    assert (2 in shared) == (arch == "sm_90a")


class Recorded(Device):
    """Notes what is launched and runs nothing."""

    multiprocessors = 132

    def __init__(self, found):
        super().__init__()
        self.found = found

    def run(self, work, blocks=0):
        self.found.add(steps.key_of(work))


@pytest.mark.slow
@pytest.mark.parametrize("quick", [True, False])
def test_every_kernel_is_known_ahead(quick, monkeypatch):
    """Steps on their real shapes, of zeros: what they launch is what is planned for the folder."""
    found = set()
    device = Recorded(found)
    attention.plain.cache_clear()
    monkeypatch.setattr(cases, "_numbers", lambda count, seed: np.zeros(count, np.float32))
    monkeypatch.setattr(on_the_card, "Card", functools.partial(Card, device))
    monkeypatch.setattr(
        attention, "median_seconds", lambda device, work, stream=0: (work(), 1.0)[1]
    )
    monkeypatch.setattr(expected, "get", lambda *arguments: None)
    monkeypatch.setattr(
        reference,
        "oracle",
        lambda problem: (np.zeros(problem.query.shape), np.zeros(problem.query.shape[:3])),
    )
    for name in ("forward", "gradients", "on_the_card"):
        monkeypatch.setattr(compare, name, lambda *arguments: {"passed": True})
    monkeypatch.setattr(compare, "sample", lambda *arguments: 0.0)
    for family in families.families("sm_90a", quick):
        if family.kind in ("forward", "backward", "variants"):
            for step in (*kernels.checks(family, "sm_90a"), *kernels.timings(family, "sm_90a")):
                list(step.run(device))
    planned = kernels.needed("sm_90a", quick)
    assert found - planned == set() and len(found) > 50


@pytest.mark.parametrize("dtype", ["float16", "int8", "int4"])
@pytest.mark.parametrize("batch", [1, 16])
def test_every_kernel_of_a_timed_cache_is_known_ahead(dtype, batch, monkeypatch):
    """Long caches are split or not, by the number of multiprocessors and sequences."""
    found = set()

    def cache(batch, heads, d, length, dtype, device):
        made = KVCache(batch, heads, d, length, dtype, device="cuda-emulator:sm_90a")
        card = made._memory.layout.card
        card.multiprocessors = 132
        card.run = lambda factory, constants, *rest: found.add(
            (factory, "sm_90a", tuple(sorted(constants.items())))
        )
        return made

    monkeypatch.setattr(decode, "KVCache", cache)
    size = decode.LONG | {"batch": batch, "length": 2048, "chunk": 1024}
    monkeypatch.setattr(decode, "wrong", lambda *arguments: {"error": "of the zeros"})
    decode.long_cache(None, dtype, **size)
    decode.short_step(dtype, **(decode.SHORT | {"steps": 4}))
    monkeypatch.undo()
    long, short = decode.timings(dtype, "sm_90a")
    planned = set(long.kernels()) | set(short.kernels())
    assert found and found <= planned


def test_a_timing_of_a_broken_kernel_is_left_out(monkeypatch):
    """A kernel that failed a problem; others are timed."""
    said, ran = [], []
    monkeypatch.setattr(child, "labels", lambda keys: list(keys))
    monkeypatch.setattr(child, "compiled", lambda *arguments, **constants: None)
    key = ("a kernel", "sm_90a", ())
    step = steps.Step("one", lambda: [key], lambda device: ran.append(1) or [{"seconds": 1.0}])
    assert child.run_step(step, "timing", Device(), {key}, said.append) == [] and not ran
    assert said[-1]["timing"] == {
        "kernel": "one", "error": "a problem of its kernel failed: it is not timed",
    }  # fmt: skip
    child.run_step(step, "timing", Device(), {("another", "sm_90a", ())}, said.append)
    assert ran and said[-1]["timing"]["seconds"] == 1.0
    # a problem runs whatever failed before, and says which kernels failed with it
    wrong = steps.Step("one", lambda: [key], lambda device: [{"passed": False}])
    assert child.run_step(wrong, "case", Device(), {key}, said.append) == [key]
