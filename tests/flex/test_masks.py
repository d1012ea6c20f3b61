"""Block masks: states, pictures, lists of blocks as PyTorch has them."""

import copy
import pickle
import sys

import numpy as np
import pytest

import numflash
from flex import gallery as g
from numflash.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from numflash.flex.fused import spans

EXACT = [g.causal, g.sliding_window, g.prefix_lm, g.documents, g.padded, g.local_and_sinks]


def true_states(mask_mod, size):
    seen = np.broadcast_to(mask_mod(*g.indices()), (g.B, g.H, g.L, g.S))
    return numflash.BlockMask.from_dense(seen, size).states


@pytest.mark.parametrize("mask_mod", g.MASKS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("size", [16, (32, 8)])
def test_states_are_right_and_mostly_exact(mask_mod, size):
    mask = numflash.create_block_mask(mask_mod, g.B, g.H, g.L, g.S, size)
    found, wanted = np.broadcast_arrays(mask.states, true_states(mask_mod, size))
    assert np.array_equal(found[found != 1], wanted[found != 1])
    if mask_mod in EXACT:
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize(
    "compared",
    [
        lambda i, j: (i + 1) * 1e38 == (j + 1) * 1e38,  # infinity == infinity
        lambda i, j: (i + 1) * 1e38 < (j + 1) * 1e38,
        lambda i, j: (i + 1) * 1e30 * 1e30 * 0.0 < 1.0,  # NaN
    ],
)
def test_masks_of_numbers_that_float32_does_not_hold(compared):
    q, k, v = g.operands()

    def mask_mod(b, h, q, k):
        return compared(q, k) | (k == 0)

    with np.errstate(over="ignore", invalid="ignore"):
        i, j = np.arange(g.L, dtype=np.float32)[:, None], np.arange(g.S, dtype=np.float32)
        seen = compared(i, j) | (j == 0)
    wanted = numflash.attention(q, k, v, seen)
    for size in (16, 128):
        mask = numflash.create_block_mask(mask_mod, None, None, g.L, g.S, size)
        found = numflash.flex_attention(q, k, v, block_mask=mask)
        assert np.abs(found - wanted).max() < 2e-6


def test_blocks_of_one_entry_or_head_are_not_those_of_others():
    """B and H None for a function that depends on them: its own word counts, as in PyTorch."""
    q, k, v = g.operands()

    def by_head(b, h, q, k):
        return (k < 40) | (h > 1)

    for function in (g.padded, by_head):
        mask = numflash.create_block_mask(function, None, None, g.L, g.S, 32)
        out = numflash.flex_attention(q, k, v, block_mask=mask)
        assert np.abs(out - g.oracle(q, k, v, mask_mod=function)[0]).max() < 2e-6


def test_a_cast_beyond_32_bits_decides_no_block_that_kernels_see_otherwise():
    def near(b, h, q, k):
        return (k * 1e9).astype(int) >= 2147483600

    mask = numflash.create_block_mask(near, None, None, 4, 8, 1)
    assert (mask.states[..., 3:] == 1).all() and (mask.states[..., :3] == 0).all()


def test_a_picture_in_the_terminal():
    mask = numflash.create_block_mask(g.causal, None, None, 64, 64, 16)
    assert mask.to_string() == "░░\n██░░\n████░░\n██████░░"
    assert str(mask).startswith(
        "BlockMask(shape=(1, 1, 64, 64), sparsity=37.50%, blocks of 16 x 16)\n"
    )
    wide = numflash.create_block_mask(g.causal, None, None, 10_000, 10_000, 16)
    assert len(wide.to_string().splitlines()) <= 64


def test_copies_and_pickles():
    """Also of a mask that kernels have used, and of a dense one, whose function is a closure."""
    q, k, v = g.operands()
    dense = np.tri(g.L, g.S, dtype=bool)
    for mask in (
        numflash.create_block_mask(g.causal, None, None, g.L, g.S),
        numflash.BlockMask.from_dense(dense),
    ):
        options = {"block_mask": mask, "enable_gqa": True}
        wanted = numflash.flex_attention(q, k, v, **options)
        for other in (copy.deepcopy(mask), copy.copy(mask), pickle.loads(pickle.dumps(mask))):
            assert np.array_equal(other.states, mask.states) and other.shape == mask.shape
            found = numflash.flex_attention(q, k, v, **{**options, "block_mask": other})
            np.testing.assert_array_equal(found, wanted)


def test_names_that_change_after_a_mask_was_made():
    """Its blocks are of one function, the other would be asked within them."""
    q, k, v = g.operands()
    width = 3
    mask = numflash.create_block_mask(lambda b, h, i, j: i - j < width, None, None, g.L, g.S)
    numflash.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    width = 30
    with pytest.raises(ArgumentError, match="what its function names has changed since the mask"):
        numflash.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    mask.mask_mod = lambda b, h, i, j: i - j < width  # another function, as for another offset
    numflash.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def test_plot_needs_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(UnsupportedError, match=r"plot: .*pip install 'numflash\[plot\]'"):
        numflash.create_block_mask(g.causal, None, None, 64, 64, 16).plot()


def test_plot():
    pytest.importorskip("matplotlib").use("Agg")
    axes = numflash.create_block_mask(g.causal, None, None, 64, 64, 16).plot()
    assert axes.get_xlabel() == "key"


def test_and_or():
    both = numflash.and_masks(g.causal, g.documents, lambda b, h, q, k: k != 3)
    either = numflash.or_masks(g.causal, lambda b, h, q, k: k < 20)
    q, k, v = g.operands()
    at = g.indices()
    for function, wanted in (
        (both, g.causal(*at) & g.documents(*at) & (at[3] != 3)),
        (either, g.causal(*at) | (at[3] < 20)),
    ):
        mask = numflash.create_block_mask(function, None, None, g.L, g.S, 32)
        out = numflash.flex_attention(q, k, v, block_mask=mask)
        assert np.abs(out - g.oracle(q, k, v, hidden=~wanted)[0]).max() < 2e-6
    assert numflash.create_block_mask(numflash.and_masks(), None, None, 9, 9).states.item() == 2


def test_from_dense_and_from_blocks():
    dense = np.random.default_rng(0).random((g.B, 1, g.L, g.S)) < 0.02
    mask = numflash.BlockMask.from_dense(dense, 32)
    q, k, v = g.operands()
    out = numflash.flex_attention(q, k, v, block_mask=mask)
    assert np.abs(out - g.oracle(q, k, v, hidden=~dense)[0]).max() < 2e-6
    again = numflash.BlockMask.from_kv_blocks(
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices, 32,
        mask.mask_mod, mask.seq_lengths,
    )  # fmt: skip
    assert np.array_equal(again.states, mask.states)


def test_blocks_are_those_of_torch():
    torch = pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    documents = torch.arange(200) // 64

    def mask_mod(b, h, q, k):
        return (q >= k) & (documents[q] == documents[k])

    theirs = flex.create_block_mask(mask_mod, None, None, 200, 200, device="cpu", BLOCK_SIZE=32)
    ours = numflash.create_block_mask(mask_mod, None, None, 200, 200, BLOCK_SIZE=32)
    assert np.array_equal(ours.to_dense(), theirs.to_dense().numpy())
    assert np.array_equal(ours.kv_num_blocks, theirs.kv_num_blocks.numpy())
    assert np.array_equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks.numpy())
    assert ours.sparsity() == pytest.approx(theirs.sparsity())


def test_bad_sizes():
    with pytest.raises(ArgumentError, match="Q_LEN: got 0"):
        numflash.create_block_mask(g.causal, None, None, 0, 5)
    with pytest.raises(ArgumentError, match="BLOCK_SIZE: got -1"):
        numflash.create_block_mask(g.causal, None, None, 5, 5, -1)
    with pytest.raises(ArgumentTypeError, match="mask_mods\\[1\\]: got int"):
        numflash.and_masks(g.causal, 1)
    with pytest.raises(ArgumentTypeError, match="mask: got dtype"):
        numflash.BlockMask.from_dense(np.zeros((4, 4)))
    with pytest.raises(ArgumentError, match="is indexed by q"):
        numflash.create_block_mask(g.documents, None, None, 151, 150)


def test_spans_of_rows_of_blocks():
    """First and end of what is seen, the longest full run, empty blocks between."""
    states = np.random.default_rng(5).integers(0, 3, (1, 2, 200, 7)).astype(np.uint8)
    states[0, 0, :4] = [[0] * 7, [2] * 7, [1] * 7, [0, 0, 2, 2, 1, 0, 0]]
    for row, found in zip(states.reshape(-1, 7), spans(states, 32).reshape(-1, 5), strict=True):
        seen = np.flatnonzero(row)
        first, end = (seen[0], seen[-1] + 1) if seen.size else (0, 0)
        runs = [(b - a, -a) for a in range(7) for b in range(a + 1, 8) if (row[a:b] == 2).all()]
        length, start = max(runs, default=(0, 0))
        assert list(found[:2]) == [32 * first, 32 * end]
        assert found[3] - found[2] == 32 * length and (not length or found[2] == -32 * start)
        assert found[4] == (0 in row[first:end])
