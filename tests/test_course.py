"""`check` accepts what is right, refuses what is wrong, says what is wrong with it, and gives
nothing away; hints come one by one, the solution only when asked.
"""

import functools
import linecache
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from numba import njit

from numflash.course import drawings, exercises, lessons, moving, widgets
from numflash.course.answers import c00, c01, c02, c07, c10, c13, c15, c23, kernels
from numflash.course.exercises import Exercise, answers, check, difference, hint, solution
from numflash.errors import ArgumentError


@pytest.fixture
def posed(monkeypatch):
    """Pose an exercise of number "99.1"."""

    def pose(**settings):
        asked = Exercise("it", ("first hint", "second hint"), **settings)
        monkeypatch.setattr(exercises, "find", lambda number: asked)
        monkeypatch.setattr(exercises, "_hinted", {})

    return pose


@pytest.mark.parametrize(
    ("got", "expected", "verdict"),
    [
        (..., 5, "open"),
        ((1, ...), (1, 2), "open"),
        (5, 5, "right"),
        (6, 5, "wrong"),
        (5.0, 5, "right"),
        (5.0000001, 5.0, "right"),
        (5.01, 5.0, "wrong"),
        ("memory", "memory", "right"),
        ("Memory ", "memory", "right"),
        ("compute", "memory", "wrong"),
        (None, 5, "wrong"),
        ((1, 2), (1, 2), "right"),
        ((1, 2), (1, 3), "wrong"),
        (1, (1, 2), "wrong"),
        (True, True, "right"),
        (False, True, "wrong"),
        (float("nan"), 1.0, "wrong"),
        (np.arange(3), np.arange(3), "right"),
        (np.arange(4), np.arange(3), "wrong"),
        ([0, 1, 2], np.arange(3), "right"),
        ("5", 5, "wrong"),
        ([1, [2]], np.arange(2), "wrong"),
    ],
)
def test_values(got, expected, verdict, posed, capsys):
    posed(expected=expected)
    check("99.1", got)
    assert answers[-1].verdict == verdict
    said = capsys.readouterr().out
    assert said.startswith("99.1 it: ") and ("hint 1 of 2" in said) == (verdict == "wrong")
    assert "hint 2" not in said


def test_a_wrong_answer_is_told_what_is_wrong_and_not_what_is_right(posed, capsys):
    posed(expected=1234)
    check("99.1", 1000)
    check("99.1", 2000)
    said = capsys.readouterr().out
    assert "too small" in said and "too large" in said and "1234" not in said
    assert "3 of 4 entries differ, the first at [0, 1]" in difference(
        np.zeros((2, 2)), np.arange(4.0).reshape(2, 2)
    )
    assert "at [1]: 0 where 2.5 is expected" in difference(np.zeros(2), np.array([0, 2.5]))
    assert "shape" in difference(np.zeros(3), np.zeros(4))
    assert "dtype must be int8" in difference(np.zeros(3), np.zeros(3, np.int8))
    assert "value 2 of 2" in difference((1, 2), (1, 3))


def test_a_float_that_nearly_cancels_is_measured_by_its_array():
    """float32 has an error of 1e-7 of the terms, whatever they sum to."""
    assert difference(np.array([1.0, 2e-7]), np.array([1.0, 0.0])) == ""
    assert difference(np.array([1.0, 2e-6]), np.array([1.0, 0.0])) != ""


def test_hints_come_one_by_one_and_can_be_read_again(posed, capsys):
    """The first wrong answer brings the first; wrong ones after it use up none."""
    posed(expected=1)
    for said in (["hint 1 of 2: first"], [], []):
        check("99.1", 2)
        assert re.findall(r"hint . of 2: \w+", capsys.readouterr().out) == said
    for _ in range(2):
        hint("99.1")
        out = capsys.readouterr().out
        assert re.findall(r"hint . of 2: \w+", out) == ["hint 1 of 2: first", "hint 2 of 2: second"]
    assert 'no more hints; solution("99.1")' in out


def test_the_number_of_an_exercise_is_text():
    for number in (1.3, "1.3", "01.33", ""):
        with pytest.raises(ArgumentError, match=r'in quotes, as in hint\("01.3"\)'):
            hint(number)
    with pytest.raises(ArgumentError, match=r"chapter 14 has 14\.1, 14\.2$"):
        check("14.3", 1)


def test_functions(posed, capsys):
    posed(model=lambda x: x * x, cases=((2,), (3,)))
    for answer, verdict, words in (
        (lambda x: x + x, "wrong", "for (x = 3) got 6, which is too small"),
        (lambda x: x * x, "right", "2 cases"),
        (lambda x: ..., "open", "not answered"),
        (lambda x: x[0], "raised", "for (x = 2) it raises TypeError"),
        (lambda x: None, "wrong", "it returns None"),
        (4, "wrong", "got 4, which is not a function"),
    ):
        check("99.1", answer)
        assert answers[-1].verdict == verdict and words in capsys.readouterr().out
    assert "neither True nor False" in difference("True", True)
    assert difference(np.bool_(True), True) == ""
    check("99.1", lambda: 4)
    assert "for (2) it raises TypeError" in capsys.readouterr().out


def test_an_answer_may_write_to_its_arguments(posed):
    x = np.ones(3)

    def doubled(x):
        x *= 2
        return x

    posed(model=lambda x: 2 * x, cases=((x,), (x,)))
    check("99.1", doubled)
    assert answers[-1].verdict == "right" and x.sum() == 3


def test_the_line_of_an_exception_is_that_of_the_answer(posed, capsys):
    """Not the line of NumPy, nor of the check; and no hint, which is about wrong answers."""

    def fails(x):
        return np.reshape(x, 7)  # this line

    for settings in ({"model": fails, "cases": ((2,),)}, {"judge": lambda got: got(2)}):
        posed(**settings)
        check("99.1", fails)
        said = capsys.readouterr().out
        assert answers[-1].verdict == "raised" and "hint" not in said
        assert re.search(
            r"ValueError: .*\n   at line \d+: return np.reshape\(x, 7\)  # this line", said
        )


def test_a_right_function_of_the_reader_is_the_one_that_runs(posed, capsys):
    posed(model=abs, cases=((-2,),))

    def right(x):
        return max(x, -x)

    for answer, runs in ((right, right), (lambda x: x, abs), (lambda x: ..., abs)):
        check("99.1", answer)
        assert exercises.yours_or("99.1", answer) is runs
        assert ("your function" in capsys.readouterr().out) == (runs is right)
    check("99.1", right)
    assert exercises.yours_or("99.1", lambda x: x) is abs  # another one than was judged


def test_judges(posed, capsys):
    posed(judge=lambda got, limit: "" if got() < limit else "too much")
    check("99.1", lambda: 1, 2)
    assert answers[-1].verdict == "right" and answers[-1].given == (2,)
    check("99.1", lambda: 3, 2)
    assert answers[-1].words == "not yet: too much"
    check("99.1", lambda: "x", 2)
    assert answers[-1].verdict == "raised" and "TypeError" in capsys.readouterr().out
    for no_function in (None, 3, "x", np.zeros(2)):
        check("99.1", no_function, 2)
        assert answers[-1].words.endswith("which is not a function")


@pytest.mark.parametrize(
    ("got", "said"),
    [
        ("64", "which is not a number or an array of numbers; write numbers without quotes"),
        ([1, 2], "got (1, 2); give one number"),
        (np.zeros(3), "give one number"),
        (len, "got the function len; call it, and give what it returns"),
    ],
)
def test_an_answer_of_another_kind_is_told_the_kind(got, said, posed):
    posed(expected=64.0)
    check("99.1", got)
    assert answers[-1].verdict == "wrong" and answers[-1].words.endswith(said)


def test_long_arguments_have_lines_of_their_own(posed, capsys):
    posed(model=lambda q, k: 0, cases=((np.zeros((4, 32)), np.zeros((4, 32))),))
    check("99.1", lambda q, k: 1)
    assert "for (\n      q = array (4, 32)" in capsys.readouterr().out


def test_a_function_that_does_the_wrong_thing_is_not_an_open_exercise():
    """Its body is not empty: it returns what it should store, or calls no part."""

    def empty(q, k, v, scale, out): ...

    def returns(q, k, v, scale, out):
        return q * scale

    assert c02._compiled(empty) == c02._compiled(njit(empty)) == "open"
    assert "stored nothing in `out`" in c02._compiled(returns)
    assert "stored nothing in `out`" in c02._compiled(njit(returns))
    assert c07._fused(lambda m, blocks: [blocks]) == "of 5 blocks, 0 were finished"


@pytest.mark.parametrize(
    ("sectors", "conflicts", "size", "said"),
    [
        (128, 0, 4096, ""),
        (1024, 0, 4096, "1152 sectors of global memory"),
        (128, 992, 4096, "992 of 1056 passes"),
        (128, 0, 4224, "4224 bytes of shared memory"),
    ],
)
def test_a_transpose_is_judged_by_what_it_needs(sectors, conflicts, size, said, monkeypatch):
    """Right numbers are not enough: columns of global memory would do without shared memory."""
    report = SimpleNamespace(
        global_stored=4096,
        global_load_sectors=128,
        global_store_sectors=sectors,
        shared_conflicts=conflicts,
        shared_wavefronts=1056,
    )

    def ran(kernel, grid, block, args):
        args[1][...] = args[0].T
        return report, ""

    monkeypatch.setattr(c15, "emulated", ran)
    monkeypatch.setattr(c15, "_shared_bytes", lambda kernel: size)
    verdict = c15._transpose(None)
    assert said in verdict and bool(said) == bool(verdict)


def test_split_decode_must_split():
    """The same numbers from all keys at once are no answer; the solution is one."""

    def at_once(q, k, v, splits, merge):
        s = k @ q
        p = 2.0 ** (s - s.max())
        return p @ v / p.sum()

    def in_blocks_of_its_own(q, k, v, splits, merge):
        return decode(q, k, v, 4, merge)

    def all_for_show(q, k, v, splits, merge):
        for n in range(1, min(splits, len(k))):
            merge((0.0, 1.0, v[0]), (0.0, 1.0, v[n]))
        return at_once(q, k, v, splits, merge)

    decode = solved("10.3", "decode")
    assert "0 pairs of states that have keys; 4 parts are 3 merges" in c10._split_decode(at_once)
    assert "`merge` was called for 3 pairs" in c10._split_decode(in_blocks_of_its_own)
    assert "a part has 64 keys" in c10._split_decode(all_for_show)
    assert c10._split_decode(decode) == ""
    assert c10._split_decode(lambda *x: decode(*x).astype(np.float32)) == ""
    assert "return" in c10._split_decode(lambda q, k, v, splits, merge: None)


def solved(number, name, **names):
    """A function of a printed solution."""
    names["np"] = np
    exec(exercises.solution_text(number), names)
    return names[name]


def in_float32(given):
    return [x.astype(np.float32) if isinstance(x, np.ndarray) else x for x in given]


def weighted_rows(weighted, q, k, v, scale, *_):
    """Attention a row at a time, with all of its scores."""
    return np.concatenate([weighted(row[None] @ k.T * np.float32(scale), v) for row in q])


def test_tiled_attention_must_not_keep_all_scores():
    """However they are multiplied; an answer in float32 is right."""

    def weighted(t, v):
        p = 2.0 ** (t - t.max(1, keepdims=True))
        return p @ v / p.sum(1, keepdims=True)

    whole = {
        "np.dot": lambda q, k, v, scale, *_: weighted(np.dot(q, k.T) * scale, v),
        "einsum": lambda q, k, v, scale, *_: weighted(np.einsum("id,jd->ij", q, k) * scale, v),
        "float32": lambda q, k, v, scale, *_: weighted(
            np.float32(q) @ np.float32(k).T * np.float32(scale), v
        ),
    }
    for name, answer in whole.items():
        assert "kB are in use at a time" in c01._tiled(answer), name
    tiled = solved("01.3", "tiled_attention")
    one_by_one = c01._tiled(lambda *x: weighted_rows(weighted, *x))
    assert "64 queries and 32768 keys" in one_by_one and "loop over key blocks" in one_by_one
    assert c01._tiled(tiled) == "" and c01._tiled(lambda *x: tiled(*in_float32(x))) == ""
    assert "one tile of rows" in c01._tiled(lambda q, k, v, s, a, b: tiled(q, k, v, s, a, len(k)))


REFUSED = [  # (exercise, an answer that is right for some sizes only, or does it another way)
    ("02.2", lambda block_k, d, cache: max(
        q for q in range(6, 10000, 6)
        if 4 * (2 * q * d + 2 * block_k * d + q * block_k + 2 * q) < cache)),
    ("03.1", lambda x: (np.rint(x / (np.abs(x).max() / 127)), np.float32(np.abs(x).max() / 127))),
    ("06.4", lambda m, q, k: [
        [functools.reduce(lambda s, e: m.dot(s, q[i, e], k[e, 16 * n : 16 * n + 16]), range(64), m.zero())
         for n in range(2)] for i in range(2)]),
    ("07.1", lambda m, blocks: [
        part(b) for b in range(blocks - 1) for part in (m.scores, m.softmax, m.merge, m.values)]),
    ("17.3", lambda n: (65536 - 128 * n) // 256 // 8 * 8),
    ("24.3", lambda mr, nv: mr * nv + nv + 1 < 32),
    ("10.2", lambda a, b: (
        max(a[0], b[0]), *(a[n] * 2.0 ** (a[0] - max(a[0], b[0])) + b[n] * 2.0 ** (b[0] - max(a[0], b[0]))
                           for n in (1, 2)))),
    ("21.1", lambda a, x, b, y: (
        np.exp(x)[:, None] * a + np.exp(y)[:, None] * b) / (np.exp(x) + np.exp(y))[:, None]),
    ("02.1", 72.0),
    ("22.3", (4, 0.04)),
    ("08.3", lambda exp2, product, d, share: 1.01 * d * exp2 / (share * product)),
]  # fmt: skip


@pytest.mark.parametrize(("number", "answer"), REFUSED, ids=[x[0] for x in REFUSED])
def test_nearly_right_is_wrong(number, answer, capsys):
    with np.errstate(over="ignore", invalid="ignore"):
        check(number, answer)
    assert answers[-1].verdict == "wrong", answers[-1]


def test_the_formula_for_one_traced_size_is_wrong():
    def traced(block_q):
        lines = 96 // block_q * 2 * 96 * 16 * 4 // 64
        part = SimpleNamespace(misses=lines // 2)
        return SimpleNamespace(arrays={"k": part, "v": part}, line=64)

    given = traced(1), traced(16)
    assert c00._by_the_traces(c00.bytes_of_k_and_v, *given) == ""
    assert "length 192" in c00._by_the_traces(lambda length, d, q: 96 * 96 * 16 * 8 // q, *given)


@pytest.mark.slow
def test_a_kernel_must_be_compiled_and_right():
    """Chapter 02's kernel: in the interpreter, with float64 sums, without a shrink, not typed."""
    right = solved("02.4", "compiled_tiled", kernel=lambda function: function)
    assert "not compiled" in c02._compiled(right)
    assert c02._compiled(njit(right)) == ""
    assert c02._compiled(lambda *given: None) == "open"

    @njit
    def one_query(q, k, v, scale, out):
        out[:] = v[0]

    @njit
    def untyped(q, k, v, scale, out):
        out[0, 0] = "zero"

    @njit
    def like_numpy(q, k, v, scale, out):
        s = q @ k.T * scale
        top = s.max(1, keepdims=True)
        out[:] = np.exp2(s - top) @ v

    @njit
    def whole_tiles(q, k, v, scale, out):
        for row in range(0, q.shape[0], 24):
            s, m = np.zeros((24, k.shape[0]), np.float32), np.zeros(24, np.float32)
            for i in range(24):
                for j in range(k.shape[0]):
                    for e in range(q.shape[1]):
                        s[i, j] += q[row + i, e] * k[j, e] * scale
                m[i] = s[i].max()
                w = np.exp2(s[i] - m[i])
                for e in range(v.shape[1]):
                    out[row + i, e] = (w * v[:, e]).sum() / w.sum()

    assert "50 queries, 70 keys, D = 8, scale 0.5: it writes behind" in c02._compiled(whole_tiles)
    assert "48 queries, 64 keys" in c02._compiled(one_query)
    assert "it does not compile" in c02._compiled(untyped)
    said = c02._compiled(like_numpy)
    assert "Numba has no max(array(float32, 2d, C), 1, keepdims=True)" in said
    assert "top = s.max(1, keepdims=True)" in said and "Loop over single numbers" in said


def test_a_sweep_may_not_pass_a_size_by_its_place():
    """`using` takes sizes by name only."""

    def sweep(sizes, run, using):
        found = {}
        for size in sizes:
            with using(size):
                found[size] = run()
        return found

    check("24.2", sweep)
    assert answers[-1].verdict == "raised"


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        ("02.1", 72.8),
        ("10.1", (26.2, 184)),
        ("22.3", (4, 0.03)),
        ("08.3", lambda exp2, product, d, share: -(-d * exp2 // (share * product) // 10) * 10),
    ],
)
def test_rounded_answers_are_right(number, answer, capsys):
    check(number, answer)
    assert answers[-1].verdict == "right"


@pytest.mark.parametrize(
    ("number", "given", "answer", "said"),
    [
        ("00.3", (SimpleNamespace(float32=2e11, read=2e10),), "long", "which is not a number"),
        ("03.2", (), "Channels", 'allowed: "row", "channel"'),
        ("00.1", (), np.array([None]), ""),
        ("20.4", (), [256], "give one number, without brackets"),
    ],
)
def test_an_answer_of_another_form_is_told_the_form(number, given, answer, said, capsys):
    check(number, answer, *given)
    assert answers[-1].verdict == "wrong" and said in capsys.readouterr().out


JUDGED = {  # judges of functions of Python, with what their chapters pass to `check`
    "00.2": [SimpleNamespace(arrays=dict.fromkeys("kv", SimpleNamespace(misses=1)), line=64)] * 2,
    "01.3": (),
    "06.4": (),
    "10.3": (),
    "22.1": (np.array([0.5, 0.25]),),
    "24.2": (),
    "24.4": (),
}


@pytest.mark.parametrize("number", JUDGED)
def test_a_function_without_return_is_told_so(number, capsys):
    check(number, lambda *given, **named: None, *JUDGED[number])
    assert answers[-1].verdict == "wrong"
    assert "it returns None; is there a `return`?" in capsys.readouterr().out


def test_a_none_of_the_answers_own_is_shown_with_its_line(posed, capsys):
    def fails(x):
        return x + None  # this line

    posed(judge=lambda got: got(2))
    check("99.1", fails)
    assert answers[-1].verdict == "raised" and "# this line" in capsys.readouterr().out


def test_a_rounded_ridge_is_right(capsys):
    check("02.3", 7.7, SimpleNamespace(float32=77.2, read=10))
    assert answers[-1].verdict == "right"


def test_a_broken_program_gets_its_hint_after_the_reader_has_tried(posed, capsys, monkeypatch):
    posed(expected=1, broken=True)
    monkeypatch.setattr(exercises, "answers", [])
    check("99.1", 2)
    assert "hint 1 of" not in capsys.readouterr().out
    check("99.1", 2)
    assert "hint 1 of 2" in capsys.readouterr().out


def test_the_report_of_a_race_names_both_warps(capsys):
    """Chapter 23's second kernel: warp 0 overwrites words that warp 3 reads."""
    pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")
    from numba import cuda

    def running_sums(x, out):
        shared = cuda.shared.array(128, np.float32)
        t = cuda.threadIdx.x
        total = np.float32(0)
        for n in range(x.shape[0]):
            shared[t] = x[n, t]
            cuda.syncthreads()
            total += shared[127 - t]
        out[t] = total

    check("23.2", running_sums)
    said = re.search(r"overwritten by warp (\d) while warp (\d)", capsys.readouterr().out)
    assert said and int(said[1]) + int(said[2]) == 3


@pytest.mark.slow
def test_a_broken_kernel_must_be_mended_and_not_gone_round():
    """Right numbers by another way than the one with the fault."""
    pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")
    from numba import cuda

    from numflash.cuda.instructions import ptx

    def backwards(x, out):
        out[cuda.threadIdx.x] = x[127 - cuda.threadIdx.x]

    def from_global(x, out):
        total = np.float32(0)
        for c in range(32):
            total += x[cuda.threadIdx.x, c]
        out[cuda.threadIdx.x] = total

    names = {"cuda": cuda, "ptx": ptx}
    unshifted = solved_kernel(
        "23.5", "shifted_attention", names, ("        s += shift[0]\n", ""), ("-1e30", "0")
    )
    for number, kernel, said in (
        ("23.1", backwards, "do not come by way of shared memory"),
        ("23.7", from_global, "1024 sectors are loaded from global memory"),
        ("23.5", unshifted, "with shift 0 and products near -400"),
    ):
        check(number, kernel)
        assert answers[-1].verdict == "wrong" and said in answers[-1].words, answers[-1]


def solved_kernel(number, name, names, *changes):
    """A kernel of a printed solution with changes; the compiler wants its source in a file."""
    text, file = exercises.solution_text(number), f"<solution {number} changed>"
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    linecache.cache[file] = len(text), None, text.splitlines(True), file
    exec(compile(text, file, "exec"), names := names | {"np": np})
    return names[name]


def test_a_kernel_written_like_numpy_is_told_so():
    """The compiler's own words for a row that is assigned are "NRT required but not enabled"."""
    pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")
    from numba import cuda

    def rows(q, k, out):
        shared = cuda.shared.array((64, 32), np.float32)
        shared[cuda.threadIdx.x] = k[cuda.threadIdx.x]

    def products(q, k, out):
        out[0, cuda.threadIdx.x] = np.sum(q[0] * k[cuda.threadIdx.x])

    def sized(q, k, out):
        cuda.shared.array((len(q), 32), np.float32)
        out[0, cuda.threadIdx.x] = np.float32(0)

    def zeros(q, k, out):
        out[cuda.threadIdx.x, 0] = np.float32(0)

    def nothing(q, k, out):
        cuda.syncthreads()

    said = c13._scores(products)
    assert "makes a new array" in said and "give every index" in said and "at line" not in said
    assert "The shape of a shared or local array is fixed" in c13._scores(sized)
    said = c13._scores(rows)
    assert "does not compile" in said and "shared[cuda.threadIdx.x] = k" in said
    assert "give every index" in said and "\x1b" not in said
    assert "numbers of out are wrong" in c13._scores(zeros)  # stored something: not open
    assert c13._scores(nothing) == "open"


def test_a_loop_without_an_end_is_found_in_seconds(monkeypatch):
    pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")
    from numba import cuda

    from numflash.cuda.emulator import machine

    def endless(x, out):
        while x[cuda.threadIdx.x] > -100:
            out[cuda.threadIdx.x] += np.float32(1)

    assert machine.STEP_LIMIT >= 100 * kernels.BRANCHES
    monkeypatch.setattr(kernels, "BRANCHES", 1000)
    check("23.1", endless)
    assert "more than 1000 branches without an end" in answers[-1].words


def test_a_kernel_that_stores_nothing_is_told_so():
    pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")
    from numba import cuda

    def copies(q, k, out):
        shared = cuda.shared.array((64, 32), np.float32)
        shared[cuda.threadIdx.x, 0] = k[cuda.threadIdx.x, 0]
        cuda.syncthreads()

    assert c13._scores(copies) == "your kernel ran, but stored nothing in `out`"


def test_a_ring_has_each_consumers_own_sum():
    """The right total in another order of the threads is not what the exercise asks for."""
    pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")
    from numba import cuda
    from numba.cuda import types

    from numflash.cuda.instructions import ptx

    u32, i32 = types.uint32, types.int32
    text = exercises.solution_text("17.2")
    for old, verdict in (("out[t] =", ""), ("out[63 - t] =", "64 of 64 sums are wrong")):
        names, file = {"cuda": cuda, "ptx": ptx, "u32": u32, "i32": i32}, f"<ring {old}>"
        source = text.replace("out[t] =", old)
        linecache.cache[file] = len(source), None, source.splitlines(True), file
        exec(compile(source, file, "exec"), names)
        said = c23.pipeline(names["pipeline"])
        assert verdict in said and bool(verdict) == bool(said), said


def test_a_misspelt_name_is_not_blamed_on_rows():
    pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

    def misspelt(q, k, out):
        out[0, 0] = totl  # noqa: F821

    def returns(q, k, out):
        return q[0, 0]

    def matrices(q, k, out):
        out[0, 0] = (q @ k)[0, 0]

    for kernel, words in (
        (misspelt, "misspelt"),
        (returns, "returns nothing"),
        (matrices, "give every index"),
    ):
        said = c13._scores(kernel)
        assert words in said and ("give every index" in said) == (kernel is matrices), said


def test_a_solution_is_printed_only_when_asked(capsys):
    solution("00.1")
    assert "4096" in capsys.readouterr().out
    for number in ("00.99", "77.1"):
        with pytest.raises(ArgumentError, match=r"number: got .*; allowed"):
            solution(number)


def test_frames_stand_for_themselves():
    """No other file and no script beside the slider's; every frame is drawn and captioned."""
    pictures = moving.Frames([(moving.box(0, 0, 9, 9, label="a<b"), f"step {n}") for n in range(3)])
    page = pictures._repr_html_()
    assert page.count("<animate ") == 3 and "a&lt;b" in page and "<script" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert repr(pictures).splitlines() == ["1. step 0", "2. step 1", "3. step 2"]


MOVED = {  # drawing: its arguments, then what a slider is moved to
    "shapes": ((), {"length": 4}),
    "sweep": ((), {"block_q": 1}),
    "online_softmax": (((1.0, 3.0, 2.0, 6.0, 5.0, 6.0),), {"block": 3}),
    "tile_against_cache": ((64, 64, 48, (6, 48, 192)), {"cache_kib": 2048}),
    "register_tile": ((), {"mr": 8}),
    "fused_against_unfused": ((), {"blocks": 5}),
    "ring_of_stages": ((), {"stages": 1}),
    "race": ((), {"barrier": True}),
    "ring_of_ranks": ((), {"ranks": 2}),
}


@pytest.mark.parametrize("name", MOVED)
def test_sliders_move_the_same_picture(name):
    """The widgets show the frames that the page shows; a control draws them again."""
    pytest.importorskip("ipywidgets")
    draw, (given, change) = getattr(drawings, name), MOVED[name]
    frames = draw(*given)
    shown = widgets.under_sliders(frames)
    *controls, (_, step), picture = [getattr(x, "children", x) for x in shown.children]
    assert [x.description for x in controls] == [n.replace("_", " ") for n in frames.controls]
    assert picture.value == frames.svg(frames.drawing(0))
    step.value = len(frames.frames)
    assert picture.value == frames.svg(frames.drawing(len(frames.frames) - 1))
    ((control, value),) = change.items()
    dict(zip(frames.controls, controls, strict=True))[control].value = value
    moved = frames.redraw(**change)
    assert step.max == len(moved.frames) and moved.frames != frames.frames
    assert picture.value == moved.svg(moved.drawing(step.value - 1))


def test_every_moving_picture_is_tried():
    made = {n for n, f in vars(drawings).items() if getattr(f, "__wrapped__", None)}
    assert made == set(MOVED)


def test_widgets_are_for_a_live_jupyter_only(monkeypatch):
    """A page without one has the HTML alone; a live one has both, and HTML without ipywidgets."""
    pytest.importorskip("ipywidgets")
    picture = drawings.race()
    assert set(picture._repr_mimebundle_()) == {"text/plain", "text/html"}
    monkeypatch.setattr(widgets, "_in_jupyter", lambda: True)
    assert widgets.VIEW in picture._repr_mimebundle_()
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert set(picture._repr_mimebundle_()) == {"text/plain", "text/html"}


def test_tiles_read_fewer_rows_than_rows_do():
    """The counts in the pictures are those of the definition."""
    last = drawings.sweep(block_q=4, block_k=2).frames[-1][0]
    assert "64 rows of K read" in last and "16 rows of K read" in last  # 8 rows x 8; 2 sweeps of 8
    assert (
        "wait for 10 in all" in drawings.ring_of_stages(stages=1).frames[0][1]
    )  # each of 5 copies
    assert "wait for 2 in all" in drawings.ring_of_stages(stages=2).frames[0][1]  # the first only
    softmax = drawings.online_softmax((1.0, 3.0, 2.0, 6.0, 5.0, 6.0), 2).frames[-1][0]
    assert "l = 2.719" in softmax and "m = 6" in softmax


def test_machine_names_the_machine_and_the_day(capsys):
    lessons.machine()
    said = capsys.readouterr().out
    assert "cores" in said and "Numba" in said and "20" in said


def test_card_says_whether_there_is_one(capsys):
    pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")
    lessons.card.cache_clear()
    found = lessons.card()
    assert ("No GPU here" in capsys.readouterr().out) == (found is None)
