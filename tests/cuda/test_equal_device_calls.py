"""Equal calls with arrays on a card, against a driver that does nothing.

What a kept plan launches is what a call that is looked at in full launches; a call that differs in
anything gets a plan of its own; errors stay; nothing is kept alive.
"""

import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from test_driver_rules import START
from test_stub_driver import driver, run  # noqa: F401
from test_stub_driver import pytestmark as needs_compiler

pytestmark = needs_compiler

# `launched` holds kernel, grid, stream and arguments of each launch, with the content in place of
# the address of what came from the host; `planned` the calls that were looked at in full
WATCH = """
import gc, threading, weakref
from numflash.cuda.arrays import calls, operands, plans
from numflash.cuda.device import constants
from numflash.dispatch import plan_store as dispatched

launched, planned, pool, taken, found = [], [], {}, [], {}
address_of, hold_of = constants.Constants.address, constants.Constants.hold
launch = card.Kernel.launch

def address(self, key, content, stream, captured):
    at = address_of(self, key, content, stream, captured)
    found[at] = key
    return at
constants.Constants.address = address

def hold(self, content, holder):
    copy = hold_of(self, content, holder)
    found[copy.address] = content
    return copy
constants.Constants.hold = hold

def kernel(self, grid, stream, block):
    numbers = [x.value for x in block.slots]
    launched.append((self.item.code, grid, stream, *(found.get(x, x) for x in numbers)))
    launch(self, grid, stream, block)
card.Kernel.launch = kernel

for name in ("_forward", "_backward"):
    def full(*given, make=getattr(calls, name)):
        planned.append(given)
        return make(*given)
    setattr(calls, name, full)

def empty(shape, dtype, device):  # the first of a call is where the first of the last call was
    place = len(taken), tuple(shape), dtype, device
    taken.append(pool.setdefault(place, Tensor(shape, dtype, device)))
    return taken[-1]
torch.empty = empty

def forget():  # all plans: those of arrays, and of PyTorch's tensors
    plans.plans.plans.clear(), dispatched._plans.plans.clear()

def launches(work):
    launched.clear(), taken.clear()
    work()
    return list(launched)

def T(*shape, dtype="float16", **more):
    return Tensor(shape, "torch." + dtype, **more)
torch.bool = "torch.bool"
"""


def lines(driver, code, capability="90", **more):  # noqa: F811
    done = run(driver, START + WATCH + code, capability, **more)
    assert "stub:" not in done.stderr, done.stderr
    return done.stdout.splitlines()


EQUAL = """
def case(name, arrays, moved=0, **options):
    sets = [tuple(T(*shape, dtype=dtype) for shape, dtype in arrays) for _ in range(2)]
    for given in sets:
        given[0].at += moved
        for x in given:  # as PyTorch has it
            x.at = x.at if np.prod(x.shape) else 0
    on_card = [x for x in ("attn_mask", "sinks") if options.get(x) is torch]
    def call(given):
        named = dict(zip(on_card, given[3:]))
        return numflash.attention(*given[:3], **{**options, **named})
    compare(name, call, sets)

def compare(name, call, sets):
    forget(), planned.clear()
    streams[0] = 0x77
    first = launches(lambda: call(sets[0]))
    streams[0] = 0x88
    kept = launches(lambda: call(sets[1]))
    full = len(planned)
    forget()
    fresh = launches(lambda: call(sets[1]))
    made, count, symbol = list(taken), len(planned[-1][0].names), operands.place
    operands.place = lambda operand, address=0: address or made[operand - 1 - count].at
    forget()
    absolute = launches(lambda: call(sets[1]))  # of arrays that lie where they say
    operands.place = symbol
    print(name, full, kept == fresh == absolute, kept != first, len(kept))

half, single = "float16", "float32"
q, k = (2, 4, 70, 64), (2, 2, 90, 64)
plain = [(q, half), (q, half), (q, half)]
grouped = [(q, half), (k, half), (k, half)]
lengths, slopes = np.array([60, 70]), np.linspace(0.1, 0.4, 4)
case("plain", plain)
case("causal", grouped, is_causal=True, enable_gqa=True, return_lse=True)
case("few", [((2, 4, 1, 64), half), (k, half), (k, half)], enable_gqa=True)
case("blhd", plain, layout="blhd", return_lse=False)
case("window", plain, window=(9, 3), softcap=20.0, scale=0.3)
case("lengths", plain, key_lengths=lengths, alignment="lower_right")
case("slopes", plain, alibi_slopes=slopes)
case("sinks", plain, sinks=slopes)
case("bool mask", [*plain, ((2, 1, 70, 70), "bool")], attn_mask=torch)
case("float mask", [*plain, ((1, 4, 70, 70), single), ((4,), single)], attn_mask=torch, sinks=torch)
case("bfloat16", [(x, "bfloat16") for x, _ in plain])
case("float32", [(x, single) for x, _ in plain], is_causal=True)
case("at 4 bytes", [(x, single) for x, _ in plain], moved=4)
case("int8", grouped, precision="int8", enable_gqa=True, is_causal=True, key_lengths=lengths)
case("int8 capped", [*plain, ((4,), single)], precision="int8", softcap=15.0, sinks=torch)
case("no keys", [(q, half), ((2, 4, 0, 64), half), ((2, 4, 0, 64), half)])
case("nothing", [((2, 4, 0, 64), half), (q, half), (q, half)])
for dtype in (half, single):
    sets = [(*(T(*q, dtype=dtype) for _ in range(5)), T(*q[:3], dtype=single), T(1, 1, 70, 70, dtype="bool")) for _ in range(2)]
    def gradient(x):
        return numflash.attention_backward(*x[:6], attn_mask=x[6], key_lengths=lengths)
    compare("gradients " + dtype, gradient, sets)
def plain_gradient(x):
    return numflash.attention_backward(*x[:6], key_lengths=lengths)
sets = [(*(T(*q, dtype=half) for _ in range(5)), T(*q[:3], dtype=single)) for _ in range(2)]
compare("gradients by tensor maps", plain_gradient, sets)
def gradient_of_lse(x):
    return numflash.attention_backward(*x[:6], grad_lse=x[6])
sets = [
    (*(T(*q, dtype=half) for _ in range(5)), *(T(*q[:3], dtype=single) for _ in range(2)))
    for _ in range(2)
]
compare("gradients of the lse", gradient_of_lse, sets)
forget()
for x in sets:  # the kernel that prepares the rows reads it, in a first call and in an equal one
    print("read", [x[6].at in made for made in launches(lambda: gradient_of_lse(x))])
"""


@pytest.mark.parametrize("capability", [pytest.param("80", marks=pytest.mark.slow), "90"])
def test_an_equal_call_launches_what_a_fresh_one_does(driver, capability):  # noqa: F811
    out = lines(driver, EQUAL, capability)
    steps = {
        "nothing": 0,
        "int8": 4,
        "int8 capped": 4,
        "gradients float16": 3,
        "gradients float32": 2,
        "gradients by tensor maps": 3,
        "gradients of the lse": 3,
    }
    reads = [line for line in out if line.startswith("read ")]
    assert reads == ["read [True, False, False]"] * 2
    out = [line for line in out if line not in reads]
    assert len(out) == 21 and {*steps} < {line.rsplit(" ", 4)[0] for line in out}
    for line in out:
        name, full, same, moved, count = line.rsplit(" ", 4)
        wanted = steps.get(name, 1)
        assert (full, same, moved, count) == ("1", "True", str(wanted > 0), str(wanted)), line


DIFFERENT = """
x = [T(2, 4, 70, 64) for _ in range(3)]
wide = [T(2, 4, 70, 128) for _ in range(3)]
y = [T(2, 4, 70, 64, dtype="float32") for _ in range(3)]
far = [T(2, 4, 70, 64, device=1) for _ in range(3)]
turned = [T(2, 4, 70, 64, strides=(17920, 64, 256, 1)) for _ in range(3)]
moved = [T(2, 4, 70, 64, dtype="float32") for _ in range(3)]
moved[0].at += 4  # the float32 kernel takes it
card.device(1).arch = "sm_80"
masks = [T(2, 4, 70, 70, dtype="bool"), T(2, 4, 70, 70, dtype="float32"), T(2, 1, 70, 70, dtype="bool")]
sinks = T(4, dtype="float32")
lengths = [np.array([60, 70]), np.array([60, 69]), np.array([60, 69], np.int32)]
given = [
    (x, {}), (y, {}), (moved, {}), (turned, {}), (wide, {}), (far, {}), ((*x[:2], wide[0]), {}),
    ((turned[0], *x[1:]), {}), (x, {"is_causal": True}), (x, {"scale": 0.5}), (x, {"window": (3, None)}),
    (x, {"window": (None, 3)}), (x, {"softcap": 2.0}), (x, {"layout": "blhd"}), (x, {"return_lse": True}),
    (x, {"precision": "int8"}), (x, {"precision": "int8", "pv": "int16"}), (x, {"sinks": sinks}),
    (x, {"sinks": np.ones(4)}), (x, {"sinks": np.zeros(4)}), (x, {"alibi_slopes": np.ones(4)}),
    (x, {"alibi_slopes": np.ones((2, 4))}), *((x, {"attn_mask": m}) for m in masks),
    *((x, {"key_lengths": n}) for n in lengths), (x, {"key_lengths": lengths[0], "alignment": "lower_right"}),
]
for arrays, options in given * 2:
    numflash.attention(*arrays, **options)
    print(len(planned))
for value in (50, 40):
    lengths[0][1] = value
    (_, _, _, *arguments), = launches(lambda: numflash.attention(*x, key_lengths=lengths[0]))
    print(np.array([60, value], np.int32).tobytes() in arguments)
on = {}
for arrays in (x, far):
    (code, *_), = launches(lambda: numflash.attention(*arrays))
    on[code] = arrays
print(len(on))
"""


def test_a_call_that_differs_in_one_thing_gets_its_own_plan(driver):  # noqa: F811
    """Strides, alignment, dtypes, devices and their architecture, options, what the host holds."""
    *counts, first, second, kernels = lines(driver, DIFFERENT, "90", STUB_DEVICES="2")
    half = len(counts) // 2
    assert counts == [str(n) for n in range(1, half + 1)] + [str(half)] * half
    assert (first, second, kernels) == ("True", "True", "2")


REFUSED = """
torch.is_grad_enabled = lambda: True
x, far = [T(2, 4, 70, 64) for _ in range(3)], T(2, 4, 70, 64, device=1)
other, long = T(2, 4, 70, 64, dtype="float32"), T(2, 4, 71, 64)
odd = T(2, 4, 70, 64)
odd.at += 2
watched, negated = T(2, 4, 70, 64), T(2, 4, 70, 64)
watched.requires_grad, negated.is_neg = True, lambda: True
on_host = np.zeros((2, 4, 70, 64), np.float16)
mask = T(2, 4, 70, 70, dtype="bool")
lse, row = T(2, 4, 70, dtype="float32"), T(4, dtype="float32")
bad = [
    ((*x[:2], far), {}), ((x[0], other, x[2]), {}), ((*x[:2], long), {}), ((x[0], on_host, x[2]), {}),
    ((odd, *x[1:]), {}), ((x[0], None, x[2]), {}), (x, {"attn_mask": np.ones((70, 70), bool)}),
    (x, {"attn_mask": other}), (x, {"attn_mask": True}), (x, {"sinks": T(3, dtype="float32")}), (x, {"sinks": mask}),
    (x, {"sinks": np.full(4, np.nan)}), (x, {"key_lengths": np.array([1, 71])}), (x, {"key_lengths": [1.0, 2.0]}),
    (x, {"key_lengths": row}), (x, {"alibi_slopes": np.ones(3)}), (x, {"scale": np.nan}), (x, {"is_causal": 1}),
    (x, {"return_lse": 1}), (x, {"window": (-1, 0)}), (x, {"precision": "float32"}), (x, {"pv": "int8"}),
    (x, {"precision": "int8", "pv": "fp32"}), (x, {"dropout_p": 0.5}), ((*x[:2], watched), {}), ((x[0], negated, x[2]), {}),
]
wrong = [(x[0], *x, other, lse), (x[0], *x, x[0], x[0]), (x[0], *x, x[0], far), (long, *x, x[0], lse)]
def words():
    said = [refused(lambda: numflash.attention(*arrays, **options)) for arrays, options in bad]
    return said + [refused(lambda: numflash.attention_backward(*arrays)) for arrays in wrong]
before = words()
print(len(plans.plans.plans), "nothing" in before)
for options in ({}, {"attn_mask": mask}, {"sinks": row}, {"key_lengths": np.array([1, 70])}, {"precision": "int8"},
                {"is_causal": True}, {"return_lse": True}):
    numflash.attention(*x, **options)
numflash.attention_backward(x[0], *x, x[0], lse)
print(len(plans.plans.plans), words() == before)
print(refused(lambda: numflash.attention(x[0], other, x[2], key_lengths=row)))
"""


def test_errors_come_after_a_good_call_too(driver):  # noqa: F811
    *counts, first = lines(driver, REFUSED, "90", STUB_DEVICES="2")
    assert counts == ["0 False", "8 True"]
    assert first.startswith("ArgumentTypeError: key: got dtype float32")  # of two reasons


ALIVE = """
x, y = ([T(2, 4, 70, 64) for _ in range(3)] for _ in range(2))
more = {"attn_mask": T(70, 70, dtype="float32"), "sinks": T(4, dtype="float32")}
lse = T(2, 4, 70, dtype="float32")
def calls(x):
    for options in ({}, more, {"precision": "int8"}):
        numflash.attention(*x, **options)
    numflash.attention_backward(x[0], *x, x[0], lse)
calls(x), calls(y)
watched = [weakref.ref(t) for t in (*x, *y, *more.values(), lse, *pool.values())]
print(len(plans.plans.plans), len(watched) > 12)
del x, y, more, lse
pool.clear(), taken.clear(), planned.clear(), gc.collect()
print(sum(t() is not None for t in watched))
from numflash.tiling import plan_cache
plan_cache.MOST = 3
for n in range(1, 9):
    numflash.attention(*(T(1, 1, 8 * n, 64) for _ in range(3)))
print(len(plans.plans.plans))
"""


def test_plans_keep_no_array_alive_and_are_bounded(driver):  # noqa: F811
    assert lines(driver, ALIVE) == ["4 True", "0", "3"]


THREADS = """
torch.empty = lambda shape, dtype, device: Tensor(shape, dtype, device)
sets = [[T(1, 2, 70, 64) for _ in range(3)] for _ in range(2)]
options = [{"key_lengths": np.array([n])} for n in (40, 50)]
sys.setswitchinterval(1e-5)
def work(n):
    for _ in range(200):
        numflash.attention(*sets[n % 2], **options[n // 2])
    for _ in range(200):
        numflash.attention(*sets[n % 2])
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
for t in threads: t.start()
for t in threads: t.join()
seen = {}
for _, _, _, *arguments in launched:
    which = tuple(arguments[:3])
    held = next(n for n in (40, 50, 70) if np.array([n], np.int32).tobytes() in arguments)
    seen[which, held] = seen.get((which, held), 0) + 1
print(sorted(seen.values()), {which for which, _ in seen} == {tuple(t.at for t in x) for x in sets})
print(len(planned) <= 3 * 4)
"""


def test_threads_call_at_once(driver):  # noqa: F811
    """Each launch has the arrays of one call, and the lengths of that call."""
    assert lines(driver, THREADS, "80") == ["[200, 200, 200, 200, 400, 400] True", "True"]
