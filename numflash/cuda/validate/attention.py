"""Forward and backward passes on a card: compared with the emulator and float64, then timed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ...errors import UnsupportedError
from ...validation import Problem
from .. import launch, launch_backward
from ..compile import Key
from ..device import Device, median_seconds
from ..device.operands import EMULATED_BLOCKS, Launch
from ..launch_float import float_forward
from . import compare, expected, on_the_card
from .cases import CHANNELS, ROWS, Case, floats_of, gradient_operands, problem_of
from .steps import Row, Step, keys_of

OLDER = "numflash float16, sm_80 code"  # on a Hopper card, beside the wgmma kernel
REPEATS = 3  # of each problem: a race that shows once in a while has the more chances
LONG = 500  # query rows, from which on float64 takes time: some heads are compared
LONG_HEADS = 4
POISON = 0x7F  # of every byte of the output before a launch: NaN in float16 and bfloat16


def repeated(device: Device, work: Launch) -> tuple[list[np.ndarray], bool]:
    """Results of a launch, and whether each of some more launches gave the same bits.

    Persistent blocks run once more as few as in the emulator: each then takes several turns, where
    a card's own number may give each of them one.
    """
    most = [device.multiprocessors] * REPEATS + [EMULATED_BLOCKS] * work.persistent
    found = []
    for blocks in most:
        for x in work.finish()[:1]:
            x.view(np.uint8)[...] = POISON  # what a launch leaves out does not stay from the last
        device.prepared(work, lambda run: run(), blocks=blocks)
        found.append([np.array(x) for x in work.finish()])
    return found[0], not any(compare.different(found[0], other) for other in found[1:])


def compared(device: Device, problem: Problem, work: Launch, emulator: Any) -> Row:
    """A launch against what is right, and its repetitions against each other."""
    found, equal = repeated(device, work)
    if problem.shape[3] >= LONG and problem.precision != "int8":
        problem, found = _some_heads(problem, found)
    row = compare.forward(problem, found, emulator)
    return row | {"repeats_equal": equal, "passed": row["passed"] and equal}


def _some_heads(problem: Problem, found: list[np.ndarray]) -> tuple[Problem, list[np.ndarray]]:
    """The last heads of the last batch entry; the others are compared among the repetitions."""
    some = (slice(-1, None), slice(-LONG_HEADS, None))
    operands: dict[str, Any] = {
        name: getattr(problem, name)[some] for name in ("query", "key", "value")
    }
    places: dict[str, Any] = {
        "diagonal": problem.diagonal[-1:],
        "key_lengths": problem.key_lengths[-1:],
    }
    return problem.changed(**operands, **places), [x[some] for x in found]


def emulators(kind: str, case: Case, arch: str) -> list[np.ndarray] | None:
    """The emulator's results; None where no file has them and nothing is compiled here: float64 and
    the integer model are enough to compare with.
    """
    try:
        return expected.get(kind, case, arch)
    except UnsupportedError:
        return None


def forward_check(case: Case, arch: str, emulated: bool) -> Step:
    """A problem in host memory, and as arrays on the card."""
    name, shape, precision, options = case

    def plans() -> tuple[Problem, Launch, Problem]:
        problem = problem_of(shape, precision, options)
        alone = problem.changed(sinks=None)  # host memory gets them from the caller
        return problem, launch.plan(alone, arch), floats_of(shape, precision, options)

    def kernels() -> set[Key]:
        _, work, floats = plans()
        return keys_of(work, *on_the_card.launches(floats, on_the_card.Planned(arch))[0])

    def run(device: Device) -> Iterator[Row]:
        problem, work, floats = plans()
        emulator = emulators("forward", case, arch) if emulated else None
        row = compared(device, problem.changed(sinks=None), work, emulator)
        found, parts = on_the_card.solved(floats)
        there = compare.on_the_card(problem, found, work.finish(), parts)
        yield row | {"on_the_card": there, "passed": row["passed"] and there["passed"]}

    return Step(name, kernels, run)


def gradient_check(case: Case, arch: str, emulated: bool) -> Step:
    """dq, dk and dv, computed more than once: their bits are equal."""
    return compared_gradients(
        case, arch, emulated, functools.partial(launch_backward.plan, arch=arch)
    )


def compared_gradients(
    case: Case, arch: str, emulated: bool, plan: Callable[..., launch_backward.Backward]
) -> Step:
    """A case's gradients by the launches that plan(problem, gradient, output, LSE) gives."""
    name, shape, precision, options = case

    def plans() -> tuple[Problem, tuple[np.ndarray, ...], launch_backward.Backward]:
        problem = problem_of(shape, precision, options)
        operands = gradient_operands(problem)
        return problem, operands, plan(problem, *operands)

    def run(device: Device) -> Iterator[Row]:
        problem, operands, work = plans()
        emulator = emulators("backward", case, arch) if emulated else None
        found = []
        for _ in range(REPEATS):
            device.prepared(work.launches, lambda run: run())
            found.append([np.array(x) for x in work.gradients])
        row = compare.gradients(problem, operands, found[0], emulator)
        equal = not any(compare.different(found[0], other) for other in found[1:])
        yield row | {"repeats_equal": equal, "passed": row["passed"] and equal}

    return Step(name, lambda: keys_of(*plans()[2].launches), run)


def shapes(lengths: Iterable[int]) -> Iterator[tuple[tuple[int, ...], bool]]:
    """(B, H, Hkv, L, S, D) and causal of the timings: a medium length of every kernel first, then
    long ones before short ones.

    16,384 query rows times heads of 2048 channels are in flight, D is 64 and 128.
    """
    ordered = sorted(lengths, reverse=True)
    middle = (len(ordered) - 1) // 2
    ordered = ordered[middle : middle + 1] + ordered[:middle] + ordered[middle + 1 :]
    for length, d, causal in itertools.product(ordered, (128, 64), (False, True)):
        h = CHANNELS // d
        yield (max(1, ROWS // length), h, h, length, length, d), causal


def one_group(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape with heads of one key head: it has the same kernels, and is planned at once."""
    _, h, hkv, length, s, d = shape
    return 1, h // hkv, 1, length, s, d


def place(shape: tuple[int, ...], causal: bool) -> Row:
    """What a timing's row says of its shape."""
    b, h, hkv, length, _, d = shape
    return {"L": length, "D": d, "B": b, "H": h, "Hkv": hkv, "causal": causal}


def title(name: str, shape: tuple[int, ...], causal: bool) -> str:
    """The name of a timing's step."""
    return f"{name}, L={shape[3]} D={shape[5]}{', causal' * causal}"


def timed(
    name: str,
    shape: tuple[int, ...],
    causal: bool,
    found: float | str,
    backward: bool = False,
    error: float = 0.0,
    limit: float = 1.0,
) -> Row:
    """A timing's row: seconds and TFLOP/s, or why there are none.

    Gradients: five products count, the two that are computed twice do not.

    error, limit : of some rows (`compare.sample`); what is wrong has no time
    """
    row: Row = {"kernel": name, **place(shape, causal)}
    if isinstance(found, str):
        return row | {"error": found}
    if error:
        row["error_of_rows"] = error
    if not error <= limit:
        return row | {"error": f"its result is wrong: error {error:.2e} of some rows"}
    b, h, _, length, _, d = shape
    flop = 4 * b * h * length * length * d * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)
    return row | {"seconds": found, "tflops": flop / found / 1e12}


def median_of(device: Device, work: Any) -> float:
    """Median seconds of a launch, or of several in a row."""
    return device.prepared(work, lambda run: median_seconds(device, run))


@functools.lru_cache(1)
def plain(shape: tuple[int, ...], precision: str, causal: bool) -> Problem:
    """The problem of a timing; the last one is kept, since several kernels are timed on it."""
    return problem_of(shape, precision, {"is_causal": causal})


def forward_timing(
    name: str,
    shape: tuple[int, ...],
    causal: bool,
    precision: str,
    plan: Callable[[Problem], Launch],
) -> Step:
    """Times of a forward launch, once some rows are right."""

    def kernels() -> set[Key]:
        return keys_of(plan(problem_of(one_group(shape), precision, {"is_causal": causal})))

    def run(device: Device) -> Iterator[Row]:
        problem = plain(shape, precision, causal)
        work = plan(problem)
        seconds = median_of(device, work)
        if precision == "int8":
            problem = floats_of(shape, precision, {"is_causal": causal})
        error = compare.sample(problem, work.finish()[:1])
        yield timed(name, shape, causal, seconds, False, error, compare.LIMITS[precision])

    return Step(title(name, shape, causal), kernels, run)


def _from_floats(shape: tuple[int, ...], causal: bool, arch: str) -> Step:
    name = "numflash int8, float32 arrays"

    def kernels() -> set[Key]:
        floats = floats_of(one_group(shape), "int8", {"is_causal": causal})
        return keys_of(*on_the_card.launches(floats, on_the_card.Planned(arch))[0])

    def run(device: Device) -> Iterator[Row]:
        floats = floats_of(shape, "int8", {"is_causal": causal})
        card, work, results = on_the_card.prepared(floats)
        seconds = median_seconds(device, work, stream=card.stream)
        error = compare.sample(floats, [card.download(results[0])])
        yield timed(name, shape, causal, seconds, False, error, compare.LIMITS["int8"])

    return Step(title(name, shape, causal), kernels, run)


def forward_timings(precision: str, lengths: Iterable[int], arch: str) -> Iterator[Step]:
    """What ships for the card, and on Hopper the float16 kernel that it replaces."""
    for shape, causal in shapes(lengths):
        yield forward_timing(
            f"numflash {precision}", shape, causal, precision, lambda x: launch.plan(x, arch)
        )
        if arch == "sm_90a" and precision == "float16":
            yield forward_timing(OLDER, shape, causal, precision, lambda x: float_forward(x, arch))
        if precision == "int8":
            yield _from_floats(shape, causal, arch)


def backward_timings(precision: str, lengths: Iterable[int], arch: str) -> Iterator[Step]:
    """What ships for the card, and on Hopper the float16 kernels that it replaces."""
    shipped = functools.partial(launch_backward.float_backward, arch=arch)
    older = functools.partial(shipped, older=True)
    for shape, causal in shapes(lengths):
        name = f"numflash {precision}, backward"
        yield gradient_timing(name, shape, causal, precision, shipped)
        if arch == "sm_90a" and precision == "float16":
            yield gradient_timing(f"{OLDER}, backward", shape, causal, precision, older)


def gradient_timing(
    name: str,
    shape: tuple[int, ...],
    causal: bool,
    precision: str,
    plan: Callable[..., launch_backward.Backward],
) -> Step:
    """Times of all launches of a backward pass; LSE and output are made up, which changes no time.

    plan : (problem, gradient, output, LSE) -> the launches
    """

    def plans(
        shape: tuple[int, ...],
    ) -> tuple[Problem, tuple[np.ndarray, ...], launch_backward.Backward]:
        problem = problem_of(shape, precision, {"is_causal": causal})
        lse = np.full(problem.query.shape[:3], np.log(shape[4]), np.float32)
        operands = (problem.query, problem.query, lse)
        return problem, operands, plan(problem, *operands)

    def run(device: Device) -> Iterator[Row]:
        problem, operands, work = plans(shape)
        seconds = median_of(device, work.launches)
        error = compare.sample(problem, work.gradients, operands)
        limit = compare.GRADIENT_LIMITS[precision]
        yield timed(name, shape, causal, seconds, True, error, limit)

    return Step(
        title(name, shape, causal), lambda: keys_of(*plans(one_group(shape))[2].launches), run
    )
