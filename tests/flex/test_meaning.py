"""What functions mean is what NumPy and PyTorch mean: options, integers, booleans, slopes at kinks.

The oracle evaluates the same function with PyTorch's float64 tensors.
"""

import copy
import pickle

import numpy as np
import pytest

import numflash
from numflash.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from numflash.flex.prepared import prepare

torch = pytest.importorskip("torch")
import numflash.torch  # noqa: E402

F = torch.nn.functional
L = 40
BITS = np.random.default_rng(1).integers(0, 2**63, L)
ROWS = np.random.default_rng(3).standard_normal((L, 4))
HOLES = np.where(np.arange(L) % 3, 0.25, np.nan)
SMALL = torch.from_numpy(np.random.default_rng(2).integers(-5, 6, L))


def operands(seed=0, length=L, dim=4):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((1, 1, length, dim), np.float32) for _ in range(3)]


def of_pytorch(q, k, v, score_mod=None, mask_mod=None):
    """Output, and gradients of the sum of it, in float64 on whole tensors."""
    q, k, v = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (q, k, v))
    zero = torch.zeros((), dtype=torch.int64)
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
    scores = q @ k.mT * q.shape[3] ** -0.5
    if score_mod is not None:
        scores = score_mod(scores, zero, zero, i, j).to(torch.float64)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(zero, zero, i, j), -torch.inf)
    weights = torch.softmax(scores, -1)
    out = torch.nan_to_num(weights) @ v
    return out, torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True)


SCORES = {
    "div floor": lambda s, b, h, i, j: torch.div(s * 4, 3, rounding_mode="floor"),
    "div trunc": lambda s, b, h, i, j: torch.div(s * 4, 3, rounding_mode="trunc"),
    "div trunc of integers": lambda s, b, h, i, j: s + torch.div(i - j, 3, rounding_mode="trunc"),
    "add alpha": lambda s, b, h, i, j: torch.add(s, j * 0.1, alpha=3),
    "method sub alpha": lambda s, b, h, i, j: s.sub(j * 0.1, alpha=2),
    "rsub alpha": lambda s, b, h, i, j: torch.rsub(s, j * 0.1, alpha=3),
    "leaky slope": lambda s, b, h, i, j: F.leaky_relu(s, 0.2),
    "softplus": lambda s, b, h, i, j: F.softplus(s, 3.0, 1.0),
    "log_sigmoid": lambda s, b, h, i, j: F.logsigmoid(s),
    "booleans add": lambda s, b, h, i, j: s * ((i > j) + (j > 3)),
    "booleans multiply": lambda s, b, h, i, j: s + 1.0 * ((i > j) * (j > 3)),
    "sum of booleans": lambda s, b, h, i, j: s + 1.0 * ((i > j).int() + (j > 3).int()),
    "round": lambda s, b, h, i, j: s + torch.round(j * 0.3, decimals=0),
    "power of integers": lambda s, b, h, i, j: s + ((i - j) ** 2) * 0.01,
    "large power of integers": lambda s, b, h, i, j: s + (j**13 % 7 + (j - i) ** 27 % 5) * 0.1,
    "to the dtype of another": lambda s, b, h, i, j: (
        s + 0.5 * (s * 3).to(torch.tensor(1)) + i.to(s) * 0.1
    ),
    "fmax": lambda s, b, h, i, j: torch.fmax(s, torch.tensor(HOLES)[j]).fmin(torch.tensor(0.5)),
    "logaddexp": lambda s, b, h, i, j: torch.logaddexp(
        torch.where(i < j, -torch.inf, s), torch.where(j > 9, -torch.inf, s * 0.5)
    ),
    "power of zero": lambda s, b, h, i, j: (
        (j % 3) ** s.abs() + (s * (j % 2)).abs() ** (s.abs() * 0.1 + 1)
    ),
    "shift by 32 and more": lambda s, b, h, i, j: s + ((torch.tensor(BITS)[i] >> j) & 3),
    "shift of one": lambda s, b, h, i, j: s + ((torch.ones_like(j) << j) & 0xFF00000000) * 1e-11,
    "float_power": lambda s, b, h, i, j: s + torch.float_power(j, 2).to(s.dtype) * 0.001,
    "detach": lambda s, b, h, i, j: s * 2 - s.detach(),
    "power of an index": lambda s, b, h, i, j: torch.relu(s) ** (j % 3),
    "clamp": lambda s, b, h, i, j: s.clamp(-0.2, 0.3),
    "relu": lambda s, b, h, i, j: F.relu(s, inplace=False),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores(name):
    q, k, v = operands()
    f = SCORES[name]
    want, gradients = of_pytorch(q, k, v, f)
    out, lse = numflash.flex_attention(q, k, v, f, return_lse=True)
    assert np.abs(out - want.detach().numpy()).max() < 2e-5
    found = numflash.attention_backward(np.ones_like(out), q, k, v, out, lse, score_mod=f)
    for x, y in zip(found, gradients, strict=True):
        assert np.abs(x - (0 if y is None else y.numpy())).max() < 1e-4


@pytest.mark.parametrize(
    "name", ["relu", "clamp_min", "clamp at its bound", "detach", "power of 0"]
)
def test_slopes_at_kinks_are_those_of_pytorch(name):
    """Every score is 0, as those of padding are."""
    f = {
        "relu": lambda s, b, h, i, j: torch.relu(s) + 0.1 * j,
        "clamp_min": lambda s, b, h, i, j: s.clamp(min=0) + 0.1 * j,
        "clamp at its bound": lambda s, b, h, i, j: s.clamp(0, 1) + 0.1 * j,
        "detach": lambda s, b, h, i, j: s.detach() + 0.1 * j,
        "power of 0": lambda s, b, h, i, j: s ** (j % 3) + 0.1 * j,
    }[name]
    q, k, v = operands(dim=2, length=6)
    q[:] = 0
    _, gradients = of_pytorch(q, k, v, f)
    out, lse = numflash.flex_attention(q, k, v, f, return_lse=True)
    found = numflash.attention_backward(np.ones_like(out), q, k, v, out, lse, score_mod=f)
    for x, y in zip(found, gradients, strict=True):
        assert np.isfinite(x).all()
        assert np.abs(x - (0 if y is None else y.numpy())).max() < 1e-5


def test_integers_of_a_mask_are_exact():
    """A bitmask of 64 keys, and a square beyond float32's integers."""
    mask = numflash.create_block_mask(
        lambda b, h, i, j: ((BITS[i] >> j) & 1) == 1, None, None, L, L
    )
    q, k, v = operands()
    want, _ = of_pytorch(q, k, v, None, lambda b, h, i, j: ((torch.tensor(BITS)[i] >> j) & 1) == 1)
    assert np.abs(numflash.flex_attention(q, k, v, None, mask) - want.detach().numpy()).max() < 1e-5
    keys = np.zeros((1, 1, 6000, 1), np.float32)
    odd = numflash.create_block_mask(lambda b, h, i, j: (j**2) % 2 == 1, None, None, 1, 6000)
    _, lse = numflash.flex_attention(keys[:, :, :1], keys, keys, None, odd, return_lse=True)
    assert np.exp(lse[0, 0, 0]) == pytest.approx(3000)


def test_integers_may_outgrow_32_bits_between_two_calls():
    """Code is for 32 bits while contents allow it."""
    q, k, v = operands()
    few, many = np.zeros(L, np.int64), np.zeros((1 << 18) + 1, np.int64)

    def of_few(s, b, h, i, j):
        return s - 3.0 * (few[j] > 5)

    def of_many(s, b, h, i, j):
        return s - 3.0 * (many[j] > 5)

    for table, f in ((few, of_few), (many, of_many)):
        for value in (0, 2**40):
            table[: L // 2] = value
            of_torch = torch.tensor(table)
            want, _ = of_pytorch(q, k, v, lambda s, b, h, i, j, t=of_torch: s - 3.0 * (t[j] > 5))
            assert np.abs(numflash.flex_attention(q, k, v, f) - want.detach().numpy()).max() < 1e-5


def test_indices_of_an_axis_beyond_32_bits():
    """Of 4 GiB that nothing has touched but the ends."""
    long = np.zeros(2**32 + 3, np.int8)
    long[:L], long[-L:] = 1, 7
    q, k, v = operands()
    out = numflash.flex_attention(q, k, v, lambda s, b, h, i, j: s + 0.1 * long[i - j])
    want, _ = of_pytorch(
        q, k, v, lambda s, b, h, i, j: s + 0.1 * torch.where(i < j, 7.0, 1.0).to(s.dtype)
    )
    assert np.abs(out - want.detach().numpy()).max() < 1e-5


def test_rows_are_reduced_along_their_axis():
    q, k, v = operands()
    rows = torch.tensor(ROWS)
    for f in (
        lambda s, b, h, i, j: s + ROWS[j].max(0) + np.min(ROWS[j], 0) + np.sum(ROWS[j], axis=-1),
        lambda s, b, h, i, j: s + rows[j].amax(-1) + rows[j].amin(dim=0) + torch.sum(rows[j], 0),
        lambda s, b, h, i, j: s + torch.max(rows[j], 0) + rows[j].min() + 0.5 * np.sum(j >= 0)
        + rows[j].sum(-1) - 0.25 * (np.sum(j >= 0) + np.sum(i >= 0)),
    ):  # fmt: skip
        out = numflash.flex_attention(q, k, v, f)
        change = rows.amax(-1) + rows.amin(-1) + rows.sum(-1)
        want, _ = of_pytorch(q, k, v, lambda s, b, h, i, j, t=change: s + t[j])
        assert np.abs(out - want.detach().numpy()).max() < 1e-5


def test_contents_that_change_a_little_are_not_traced_again():
    offset, bias = np.array(100), np.zeros(L, np.float32)

    def f(s, b, h, i, j):
        return s + bias[j] * (j < offset + i)

    q, k, v = operands()
    numflash.flex_attention(q, k, v, f)
    before = prepare(f, None)
    assert "wide False" in numflash.flex.listing(f, shape=(1, 1, L, L))
    offset[...], bias[:] = 101, np.nan
    assert prepare(f, None) is before
    offset[...] = -1
    assert prepare(f, None) is not before


REFUSED = {
    "where of a ufunc": lambda s, b, h, i, j: np.add(s, 1.0, where=SMALL.numpy() > 0),
    "decimals": lambda s, b, h, i, j: torch.round(s, decimals=1),
    "isin": lambda s, b, h, i, j: np.isin(i - j, 5) * 3.0,
    "three operands": lambda s, b, h, i, j: pow(s, 2, 3),
    "power of an integer number": lambda s, b, h, i, j: s + (2**j) % 7,
    "negative power of integers": lambda s, b, h, i, j: s + (j + 1) ** -1,
    "narrow cast": lambda s, b, h, i, j: s + (i - j).to(torch.uint8),
    "unsigned cast": lambda s, b, h, i, j: np.where((i - j).astype(np.uint32) < 5, s, -np.inf),
    "cast to float8": lambda s, b, h, i, j: s.to(torch.float8_e4m3fn),
    "complex cast": lambda s, b, h, i, j: s.astype(complex),
    "type by name": lambda s, b, h, i, j: s.type("torch.LongTensor"),
    "sum of some": lambda s, b, h, i, j: s + np.sum(ROWS[j], where=ROWS[0] > 0),
    "largest of more": lambda s, b, h, i, j: s + np.max(ROWS[j], initial=3.0),
    "second axis": lambda s, b, h, i, j: s + ROWS[j].sum(1),
    "view as bits": lambda s, b, h, i, j: s.view(torch.int32),
    "difference of booleans": lambda s, b, h, i, j: s * ((i > j) - (j > 3)),
    "two digits": lambda s, b, h, i, j: round(s, 2),
    "masked array": lambda s, b, h, i, j, t=np.ma.masked_array(np.zeros(L), [True] * L): s + t[j],  # noqa: B008
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_mean_something_else_is_refused(name):
    with pytest.raises(ArgumentTypeError):
        numflash.flex_attention(*operands(), REFUSED[name])


def test_captured_arrays_that_kernels_cannot_address_are_copied_in_each_call():
    """Another byte order, and a field of a record: contents are read when the attention runs."""
    record = np.zeros(L, [("x", "u1"), ("w", "<f4")])
    for table in (np.zeros(L, ">f4"), record["w"], np.zeros(L, np.longdouble)):
        q, k, v = operands()
        for step in range(3):
            table[:] = np.arange(L) * 0.1 * step
            want, _ = of_pytorch(q, k, v, lambda s, b, h, i, j, n=step: s + j * 0.1 * n)
            out = numflash.flex_attention(q, k, v, lambda s, b, h, i, j, t=table: s + t[j])
            assert np.abs(out - want.detach().numpy()).max() < 1e-5
    big = np.zeros(3_000_000, ">f4")  # freed at once by the allocator if nobody keeps the copy
    plain = numflash.flex_attention(q, k, v, lambda s, b, h, i, j: s + big[j])
    wanted = numflash.flex_attention(q, k, v, lambda s, b, h, i, j: s)
    np.testing.assert_allclose(plain, wanted, atol=1e-6)


class Settings:
    slope = 0.5


STATE = {"slope": 0.5}
HELD = np.array([0.5, 2.0])
GIVEN = torch.tensor([0.5, 2.0])
SCALAR = np.array(0.5)
BYTES = bytearray(b"\x01")


def _set_module():
    import sys
    import types

    module = types.ModuleType("torch_settings")
    module.slope = 0.5
    sys.modules["torch_settings"] = module
    return module


CHANGES = {
    "an element": (lambda s, b, h, i, j: s + HELD[0] * j, lambda x: HELD.__setitem__(0, x)),
    "float of an array": (lambda s, b, h, i, j: s + float(SCALAR) * j, lambda x: SCALAR.fill(x)),
    "item of a tensor": (lambda s, b, h, i, j: s + GIVEN[0].item() * j, lambda x: GIVEN.fill_(x)),
    "memory of an array": (
        lambda s, b, h, i, j: s + np.asarray(HELD)[0] * j,
        lambda x: HELD.__setitem__(0, x),
    ),
    "text of an array": (
        lambda s, b, h, i, j: s + float(f"{SCALAR}") * j,
        lambda x: SCALAR.fill(x),
    ),
    "array of a tensor": (lambda s, b, h, i, j: s + GIVEN.numpy()[0] * j, lambda x: GIVEN.fill_(x)),
    "text of a tensor": (
        lambda s, b, h, i, j: s + float(f"{GIVEN[0]:.1f}") * j,
        lambda x: GIVEN.fill_(x),
    ),
    "a name by eval": (
        lambda s, b, h, i, j: s + eval("NUMBER") * j,
        lambda x: globals().__setitem__("NUMBER", x),
    ),
    "a bound method": (
        lambda s, b, h, i, j, get=STATE.get: s + get("slope") * j,
        lambda x: STATE.__setitem__("slope", x),
    ),
    "a bytearray": (lambda s, b, h, i, j: s + BYTES[0] * j, lambda x: BYTES.__setitem__(0, int(x))),
    "a class": (
        lambda s, b, h, i, j: s + Settings.slope * j,
        lambda x: setattr(Settings, "slope", x),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_trace_has_read_is_read_again(name):
    f, change = CHANGES[name]
    q, k, v = operands()
    for value in (1.0, 3.0):
        change(value)
        want, _ = of_pytorch(q, k, v, lambda s, b, h, i, j, n=value: s + n * j)
        assert np.abs(numflash.flex_attention(q, k, v, f) - want.detach().numpy()).max() < 1e-5


def test_modules_are_known_by_their_whole_name():
    module = _set_module()
    q, k, v = operands()

    def f(s, b, h, i, j):
        return s + module.slope * j

    def imports(s, b, h, i, j):
        import torch_settings

        return s + torch_settings.slope * j

    for value in (1.0, 3.0):
        module.slope = value
        want, _ = of_pytorch(q, k, v, lambda s, b, h, i, j, n=value: s + n * j)
        for function in (f, imports):
            out = numflash.flex_attention(q, k, v, function)
            assert np.abs(out - want.detach().numpy()).max() < 1e-5


def test_a_tensor_with_other_memory_or_an_array_of_another_shape_is_another():
    table, grid = torch.zeros(L), np.arange(2.0 * L)
    q, k, v = operands()

    def f(s, b, h, i, j):
        return s + table[j]

    for n in (1, 2):
        table.data = torch.arange(L) * 0.1 * n
        want, _ = of_pytorch(q, k, v, lambda s, b, h, i, j, n=n: s + j * 0.1 * n)
        assert np.abs(numflash.flex_attention(q, k, v, f) - want.detach().numpy()).max() < 1e-5

    def count(s, b, h, i, j):
        return s * grid.ndim

    for n, shape in ((1, 2 * L), (2, (2, L))):
        grid.shape = shape
        want, _ = of_pytorch(q, k, v, lambda s, b, h, i, j, n=n: s * n)
        assert np.abs(numflash.flex_attention(q, k, v, count) - want.detach().numpy()).max() < 1e-5


def test_second_derivatives_are_refused():
    q, k, v = (torch.randn(1, 1, 8, 4, requires_grad=True) for _ in range(3))
    out = numflash.torch.flex_attention(q, k, v)
    (slope,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="first derivatives only"):
        slope.pow(2).sum().backward()


def test_block_lists_of_other_kinds_are_refused():
    counts, places = np.ones((1, 1, 2), int), np.zeros((1, 1, 2, 2), int)
    for indices, lengths in (
        (places[0], None),
        (places, (5,)),
        (places, (256.0, 256)),
        (places, 5),
    ):
        with pytest.raises(ArgumentError):
            numflash.BlockMask.from_kv_blocks(counts, indices, seq_lengths=lengths)
    for more in (
        (counts * 1.0, places),
        (counts, places * 1.0),
        (counts, places, counts, places * 1.0),
    ):
        with pytest.raises(ArgumentTypeError, match=r"got dtype float64; allowed: integers"):
            numflash.BlockMask.from_kv_blocks(*more)
    with pytest.raises(ArgumentTypeError, match="mask_mod: got int"):
        numflash.BlockMask.from_kv_blocks(counts, places, mask_mod=3)
    mask = numflash.BlockMask.from_kv_blocks(counts, places)
    for wrong, words in (({"limit": 0}, "limit: got 0"), ({"b": 0.5}, r"b, h: got 0\.5")):
        with pytest.raises(ArgumentError, match=words):
            mask.to_string(**wrong)
    for shape in ((1, 1), (1, 1, -3, 2)):
        with pytest.raises(ArgumentError, match="shape: got"):
            numflash.flex.listing(SCORES["relu"], shape=shape)


def test_caches_are_copied_and_not_pickled():
    cache = numflash.KVCache(1, 1, 4, 16, "float32")
    q, k, v = operands(length=3)
    cache.append(k, v)
    for other in (copy.copy(cache), copy.deepcopy(cache)):
        other.append(k, v)
        assert cache.lengths.tolist() == [3] and other.lengths.tolist() == [6]
    with pytest.raises(ArgumentTypeError, match="state"):
        pickle.dumps(cache)
