"""Each kind of fault, planted in a small kernel next to the correct version.

The emulator names the rule and the source line. What Hopper adds: test_emulator_hopper.py.
"""

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from emulator_checks import fails, run, run_ptx, words

from numflash.cuda import emulate
from numflash.cuda.compile.target import cuda, types
from numflash.cuda.emulator import EmulatorError
from numflash.cuda.instructions import ptx

u32 = types.uint32
u64 = types.uint64
f32 = types.float32


def exchange(with_barrier=True, second_barrier=True):
    """Threads pass their word to the mirrored thread through shared memory, twice."""

    def kernel(x, y):
        shared = cuda.shared.array(64, u32)
        t = cuda.threadIdx.x
        shared[t] = x[t]
        if with_barrier:
            cuda.syncthreads()
        y[t] = shared[63 - t]
        if second_barrier:
            cuda.syncthreads()
        shared[t] = x[t] + u32(1)
        cuda.syncthreads()
        y[t] += shared[63 - t]

    return kernel


@pytest.mark.parametrize("schedule", ["random", "lockstep"])
def test_exchange_is_right(schedule):
    y = np.zeros(64, np.uint32)
    report = run(exchange(), words(), y, schedule=schedule)
    assert np.array_equal(y, 2 * words()[::-1] + 1)
    assert (
        report.shared_stored == 2 * 256
        and report.shared_conflicts == 0
        and report.barriers == 3 * 2
    )


def test_missing_barrier_after_write():
    fails("race uninitialised", None, exchange(with_barrier=False), words(), words())


def test_missing_barrier_before_overwrite():
    fails("race", None, exchange(second_barrier=False), words(), words())


def test_uninitialised_shared():
    def kernel(x):
        shared = cuda.shared.array(128, u32)
        t = cuda.threadIdx.x
        shared[t] = x[t]
        cuda.syncthreads()
        x[t] = shared[t + 1]

    fails("uninitialised", "x[t] = shared[t + 1]", kernel, words())


def test_shared_out_of_bounds():
    def kernel(x):
        shared = cuda.shared.array(64, u32)
        t = cuda.threadIdx.x
        ptx.store_shared_f32(ptx.shared_address(shared) + u32(t * 8), f32(1))
        x[t] = u32(0)

    fails("out-of-bounds", "store_shared_f32", kernel, words())


def test_global_out_of_bounds():
    def kernel(x):
        t = cuda.threadIdx.x
        x[t] = x[t + 1]

    fails("out-of-bounds", "x[t] = x[t + 1]", kernel, words())


def test_misaligned():
    def kernel(x):
        four = cuda.local.array(4, u32)
        ptx.load_global_v4(four, 0, ptx.global_address(x) + u64(cuda.threadIdx.x * 8))
        x[cuda.threadIdx.x] = four[0]

    fails("misaligned", "load_global_v4", kernel, words(256))


def test_read_only_arrays():
    def kernel(x):
        x[cuda.threadIdx.x] = u32(1)

    frozen = words()
    frozen.flags.writeable = False
    fails("out-of-bounds", "x[cuda.threadIdx.x]", kernel, frozen)


def test_divergent_shuffle():
    def kernel(x):
        t = cuda.threadIdx.x
        if t & 31 < 7:
            x[t] = ptx.bits(ptx.shuffle_xor(f32(1), u32(1)))

    fails("divergent", "shuffle_xor", kernel, words())


def test_divergent_vote():
    def kernel(x):
        t = cuda.threadIdx.x
        if t & 31 < 7:
            x[t] = u32(ptx.vote_all(types.int32(1)))

    fails("divergent", "vote_all", kernel, words(), said="0xffffffff by the lanes 0x0000007f")


def test_divergent_barrier():
    def kernel(x):
        if cuda.threadIdx.x < 40:
            ptx.barrier(u32(0), u32(64))
        x[cuda.threadIdx.x] = u32(0)

    fails("divergent", "ptx.barrier", kernel, words())


def test_deadlock_at_a_barrier():
    def kernel(x):
        if cuda.threadIdx.x < 32:
            ptx.barrier(u32(1), u32(64))
        x[cuda.threadIdx.x] = u32(0)

    said = r"waits: warp 0 at line \d+ at barrier 1 \(warps missing: 1\) \["
    fails("deadlock", None, kernel, words(), said=said)


@pytest.mark.parametrize(("number", "threads"), [(1, 64), (16, 96)])
def test_barriers_that_do_not_exist(number, threads):
    """A third warp at a barrier of 64 threads begins its next round; there are 16 barriers."""

    def kernel(x):
        ptx.barrier(u32(number), u32(threads))
        x[cuda.threadIdx.x] = u32(0)

    fails("protocol deadlock", None, kernel, words(96), threads=96)


def test_deadlock_at_an_mbarrier():
    def kernel(x):
        shared = cuda.shared.array(2, u64)
        bar = ptx.shared_address(shared)
        if cuda.threadIdx.x == 0:
            ptx.mbarrier_init(bar, u32(2))
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            ptx.mbarrier_arrive(bar)
        ptx.mbarrier_wait(bar, u32(0))
        x[cuda.threadIdx.x] = u32(0)

    said = (
        r"waits: warps 0-1 at line \d+ for parity 0 of the mbarrier at shared byte 0 "
        r"\(arrivals missing: 1\) \["
    )
    fails("deadlock", "mbarrier_wait", kernel, words(), said=said, arch="sm_90a")


def test_too_many_arrivals():
    def kernel(x):
        shared = cuda.shared.array(2, u64)
        bar = ptx.shared_address(shared)
        if cuda.threadIdx.x == 0:
            ptx.mbarrier_init(bar, u32(63))
        cuda.syncthreads()
        ptx.mbarrier_arrive(bar)
        x[cuda.threadIdx.x] = u32(0)

    fails("protocol", "mbarrier_arrive", kernel, words(), arch="sm_90a")


def async_copy(wait=True, barrier=True, early_wait_count=0):
    pause = ptx.cp_async_wait[early_wait_count]

    def kernel(x, y):
        shared = cuda.shared.array(256, u32)
        four = cuda.local.array(4, u32)
        t = cuda.threadIdx.x
        to = ptx.shared_address(shared) + u32(t * 16)
        ptx.cp_async(to, ptx.global_address(x) + u64(t * 16))
        ptx.cp_async_commit()
        if wait:
            pause()
        if barrier:
            cuda.syncthreads()
        ptx.load_shared_v4(four, 0, to ^ u32(512))
        for i in range(4):
            y[t * 4 + i] = four[i]

    return kernel


def test_async_copy():
    y = np.zeros(256, np.uint32)
    report = run(async_copy(), words(256), y)
    assert np.array_equal(y, np.roll(words(256), 128)) and report.async_copied == 1024


@pytest.mark.parametrize("options", [{"wait": False}, {"early_wait_count": 1}])
def test_read_before_the_copy_is_waited_for(options):
    fails("pending", "load_shared_v4", async_copy(**options), words(256), words(256))


def test_a_copy_of_nothing_from_anywhere():
    """An address is aligned where no byte of it is read, too."""

    def kernel(x):
        to = ptx.shared_address(cuda.shared.array(256, u32)) + u32(cuda.threadIdx.x * 16)
        ptx.cp_async_zfill(to, 0, ptx.global_address(x) + u64(8), u32(0))

    fails("misaligned", "cp_async_zfill", kernel, words())


def test_wait_without_barrier():
    kernel = async_copy(barrier=False)
    fails("race pending uninitialised", None, kernel, words(256), words(256))


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("add.s32 %r1, %r2, 1;", "%r2"),
        ("mov.b32 %r1, %r2;\nadd.s32 %r3, %r1, 1;", "%r1"),
        ("@%p1 mov.b32 %r1, 1;\nadd.s32 %r2, %r1, 1;", "%p1"),
        # written by half of the threads only
        ("mov.b32 %r1, %tid.x;\nsetp.lt.u32 %p1, %r1, 16;\n@%p1 mov.b32 %r2, 1;\n"
         "add.s32 %r3, %r2, 1;", "%r2"),
        ("mov.b32 %r1, %tid.x;\nsetp.lt.u32 %p1, %r1, 16;\n@%p1 bra $L;\nmov.b32 %r2, 1;\n$L:\n"
         "add.s32 %r3, %r2, 1;", "%r2"),
    ],
)  # fmt: skip
def test_registers_that_nothing_has_written(body, name):
    with pytest.raises(EmulatorError, match=f"register {name} read but never written") as caught:
        emulate(run_ptx(".reg .pred %p<2>;\n" + body), 1, 32, [])
    assert caught.value.kind == "uninitialised"


def test_registers_that_the_same_threads_have_written():
    """A path that does not write a register does not read it either."""
    body = (
        ".reg .pred %p<2>;\nmov.b32 %r1, %tid.x;\nsetp.lt.u32 %p1, %r1, 16;\n@%p1 mov.b32 %r2, 1;\n"
        "@%p1 add.s32 %r3, %r2, 1;"
    )
    emulate(run_ptx(body), 1, 32, [])


def lanes(sync=True, reread=False, store_again=False, clash=False):
    """Each lane passes its word to the next one of its warp."""

    def kernel(x):
        shared = cuda.shared.array(64, u32)
        t = cuda.threadIdx.x
        shared[t] = x[t]
        if clash:
            shared[t & 32] = x[t]
        if sync:
            cuda.syncwarp()
        other = shared[(t & 32) + ((t + 1) & 31)]
        if store_again:
            shared[t] = other
            cuda.syncwarp()
            other = shared[t]
        x[t] = other

    return kernel


def test_lanes_of_a_warp():
    x = words()
    run(lanes(), x)
    assert x.tolist() == [*range(1, 32), 0, *range(33, 64), 32]


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("other = shared[(t & 32)", {"sync": False}),
        ("shared[t] = other", {"store_again": True}),  # another lane has just read it
        ("shared[t & 32] = x[t]", {"clash": True}),
    ],
)
def test_two_lanes_of_a_warp_race(line, options):
    fails("race", line, lanes(**options), words())


def test_registers_for_half_a_warpgroup():
    """setmaxnreg is for whole warpgroups, and for multiples of 8 registers."""
    give = ptx.setmaxnreg_dec[40]

    def whole(x):
        give()
        x[cuda.threadIdx.x] = u32(0)

    run(whole, words(128), threads=128, arch="sm_90a")
    text = run_ptx("setmaxnreg.dec.sync.aligned.u32 41;", "sm_90a")
    with pytest.raises(EmulatorError, match="setmaxnreg to 41"):
        emulate(text, 1, 128, [])

    def half(x):
        if cuda.threadIdx.x < 64:
            give()
        x[cuda.threadIdx.x] = u32(0)

    fails("divergent", "give()", half, words(128), threads=128, arch="sm_90a")


def test_unsupported_instruction():
    text = run_ptx("frobnicate.b32 %r1, %r1;")
    with pytest.raises(EmulatorError, match="not implemented") as caught:
        emulate(text, 1, 32, [])
    assert caught.value.kind == "unsupported"


@pytest.mark.parametrize(
    ("instruction", "arch", "since"),
    [
        ("cvt.rn.f16x2.f32 %r1, %f1, %f2", "sm_75", "sm_80"),
        ("cp.async.commit_group", "sm_75", "sm_80"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r2}, {%f1}", "sm_75", "sm_80"),
        ("mbarrier.try_wait.parity.shared::cta.b64 p, [%r1], %r2", "sm_89", "sm_90"),
        ("cp.async.bulk.commit_group", "sm_80", "sm_90"),
        ("wgmma.fence.sync.aligned", "sm_80", "sm_90a"),
        ("wgmma.fence.sync.aligned", "sm_90", "sm_90a"),
    ],
)  # fmt: skip
def test_instructions_of_later_architectures(instruction, arch, since):
    """Where ptxas refuses a kernel it does not run here either."""
    with pytest.raises(
        EmulatorError, match=f"{arch} has no {instruction.split()[0]}; .* from {since} on"
    ) as caught:
        emulate(run_ptx(f"{instruction};", arch), 1, 32, [])  # fmt: skip
    assert caught.value.kind == "unsupported" and caught.value.ptx_line == 7


def test_endless_loop(monkeypatch):
    monkeypatch.setattr("numflash.cuda.emulator.machine.STEP_LIMIT", 1000)
    with pytest.raises(EmulatorError, match="endless loop"):
        emulate(run_ptx("mov.b32 %r1, 0;\n$L:\nadd.s32 %r1, %r1, 1;\nbra $L;"), 1, 32, [])


def test_bad_arguments():
    from numflash.errors import ArgumentError, ArgumentTypeError

    text = run_ptx("")
    with pytest.raises(ArgumentError, match="grid: got"):
        emulate(text, (1, 2, 3, 4), 32, [])
    with pytest.raises(ArgumentError, match="block: got"):
        emulate(text, 1, 0, [])
    with pytest.raises(ArgumentError, match="schedule: got 'no'"):
        emulate(text, 1, 32, [], schedule="no")
    with pytest.raises(ArgumentError, match="args: 1 values"):
        emulate(text, 1, 32, [1])
    with pytest.raises(ArgumentTypeError, match="kernel: got int"):
        emulate(3, 1, 32, [])
    with pytest.raises(EmulatorError, match="multiples of 32"):
        emulate(text, 1, 40, [])


def written_by_blocks(places, ordered):
    """Each block stores its number; `places` of them share the array's places."""

    def kernel(y, tickets):
        if cuda.threadIdx.x == 0:
            if ordered:
                cuda.atomic.add(tickets, 0, u32(1))
            y[cuda.blockIdx.x % places] = u32(cuda.blockIdx.x)

    return kernel


@pytest.mark.parametrize("ordered", [False, True])
def test_blocks_that_store_to_one_place(ordered):
    """Not with an atomic operation before: the last block may add up what the others left."""
    tickets = np.zeros(1, np.uint32)
    for grid in (3, 3000):  # in one batch, in several
        y = np.zeros(grid, np.uint32)
        emulate(written_by_blocks(grid, ordered), grid, 32, (y, tickets))
        assert np.array_equal(y, np.arange(grid))
        if ordered:
            emulate(written_by_blocks(grid - 1, True), grid, 32, (y, tickets))
        else:
            with pytest.raises(EmulatorError, match=r"race.*stored to by several blocks"):
                emulate(written_by_blocks(grid - 1, False), grid, 32, (y, tickets))


def test_blocks_that_load_what_another_stores():
    def kernel(y):
        y[cuda.blockIdx.x + 1] = y[cuda.blockIdx.x]

    for seed in range(3):
        with pytest.raises(EmulatorError, match="loaded, to which another block stores"):
            emulate(kernel, 99, 32, (np.zeros(100, np.uint32),), seed=seed)


def test_a_load_that_is_not_coherent():
    def kernel(x):
        t = cuda.threadIdx.x
        x[t] = u32(t)
        cuda.syncthreads()
        x[t] = ptx.bits(ptx.load_global_f32(ptx.global_address(x)))

    fails("race", "load_global_f32", kernel, words(), said=r"by ld\.global\.nc")


@pytest.mark.parametrize("schedule", ["random", "lockstep"])
def test_the_order_of_blocks(schedule):
    """Random ones do not begin with the first batch of 64."""

    def kernel(y, tickets):
        if cuda.threadIdx.x == 0:
            y[cuda.blockIdx.x] = cuda.atomic.add(tickets, 0, u32(1))

    y = np.zeros(300, np.uint32)
    emulate(kernel, 300, 32, (y, np.zeros(1, np.uint32)), schedule=schedule)
    assert np.array_equal(np.sort(y), np.arange(300))
    assert (y[:64].max() == 63) == (schedule == "lockstep")
