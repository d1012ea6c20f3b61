"""INT8 problems whose bits are compared, everywhere alike.

Run as a script it prints one digest per case for an instruction set.
"""

import hashlib
import sys
from dataclasses import replace

import numpy as np
from oracles import TAILS, draw, qkv

from numflash import quantize, validation
from numflash.numerics.quantization import QuantizedTensor, quantize_problem
from numflash.validation.options import Options

DIMS = (1, 3, 16, 33, 64, 80, 128, 72, 40, 100, 24, 256)
# some rows see nothing of a key block, some nothing at all
SEEN = (np.arange(70)[:, None] % 3 > 0) | (np.arange(200) >= 128) & (np.arange(70)[:, None] % 2 > 0)
OPTIONS = {
    "causal": {"is_causal": True},
    "lower_right": {"is_causal": True, "alignment": "lower_right"},
    "window": {"window": (40, 17)},
    "key_lengths": {"key_lengths": [190, 0]},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": [0.1, 0.5]},
    "bias": {"attn_mask": draw((2, 1, 70, 200))},
    "bool_mask": {"attn_mask": draw((70, 200)) > 0},
    "bias_inf": {"attn_mask": np.where(draw((70, 200)) > 1, 0, -np.inf).astype(np.float32)},
    "mask_hides_rows": {"attn_mask": SEEN},
    "bias_hides_rows": {"attn_mask": np.where(SEEN, draw((70, 200)), -np.inf).astype(np.float32)},
    "steep_alibi": {"alibi_slopes": [5.0, 50.0], "is_causal": True},
    "large_bias": {"attn_mask": draw((70, 200)) * np.float32(1e4)},
    "largest_bias": {
        "attn_mask": np.where(SEEN, draw((70, 200)), np.finfo(np.float32).min).astype(np.float32)
    },
    "rising_alibi_and_bias": {"alibi_slopes": [-1.3, -4.3], "attn_mask": 30 * draw((70, 200))},
    "everything": {
        "attn_mask": draw((70, 200)),
        "window": (50, 3),
        "alignment": "lower_right",
        "softcap": 3.0,
        "alibi_slopes": [0.1, 0.5],
        "key_lengths": [200, 100],
    },
}


def raw(q, k, v, q_scale=0.01, k_scale=0.01, **options):
    """A problem from int8 values; scales are numbers or one per row."""

    def rows(x, scale):
        return QuantizedTensor(
            x[None, None].astype(np.int8),
            np.broadcast_to(np.float32(scale), (1, 1, len(x), 1)).copy(),
            "row",
        )

    value = QuantizedTensor(
        v[None, None].astype(np.int8), np.full((1, 1, 1, v.shape[1]), 0.02, np.float32), "channel"
    )
    return validation.quantized_problem(
        rows(q, q_scale), rows(k, k_scale), value, Options(return_lse=True, **options)
    )


def int8(arrays, **options):
    return quantize_problem(
        validation.problem(*arrays, Options(precision="int8", return_lse=True, **options))
    )


def integers(rows, d, seed, low=-127, high=128):
    return np.random.default_rng(seed).integers(low, high, (rows, d))


def later_parts():
    """name, problem: keys from the middle of a sequence, few or none of which are first keys."""
    arrays = qkv(h=1, l=70, s=200, d=64)
    hidden = SEEN.copy()
    hidden[:, 4:128] = False  # of the first block, the first keys only
    hidden[:, :4] = True
    for count in (0, 1, 3):
        for name, options in (
            ("full", {}),
            ("causal", {"is_causal": True}),
            ("mask", {"attn_mask": hidden}),
            ("few keys", {"key_lengths": [2]}),
        ):
            problem = replace(int8(arrays, **options), first_keys=count)
            yield f"{count} first keys, {name}", problem


def extreme():
    """name, problem: what random data never reaches."""
    l = 30
    s = 200
    d = 64
    q = integers(l, d, 0)
    k = integers(s, d, 1)
    v = integers(s, d, 2)
    top = np.full((l, d), 127)
    yield "largest products", raw(top, np.full((s, d), 127), np.full((s, d), 127))
    signs = np.where(np.arange(s)[:, None] % 2, 127, -127) * np.ones((1, d))
    yield "largest products of both signs", raw(top, signs, -np.full((s, d), 127))
    lowest = np.full((s, d), -128)
    yield "nothing but -128", raw(lowest[:l], lowest, lowest)
    yield "-128 against 127", raw(top, lowest, np.where(signs > 0, 127, -128))
    yield "all of int8", raw(*(integers(n, d, seed, -128) for n, seed in ((l, 5), (s, 6), (s, 7))))
    for scale in (0.05, 1.0, 1e3, 1e10, 1e30, 3e38):
        yield f"scores at scale {scale}", raw(q, k, v, scale, 1.0)
    for scale in (1e-10, 1e-38, 1e-45, 0.0):
        yield f"scores at scale {scale}", raw(q, k, v, scale, 1.0)
    yield (
        "rows of zeros",
        raw(q * (np.arange(l) % 3 > 0)[:, None], k * (np.arange(s) % 5 > 0)[:, None], v),
    )
    yield "all zeros", raw(q * 0, k * 0, v * 0)
    yield (
        "one scale far above the others",
        raw(q, k, v, 0.01, np.where(np.arange(s) == 150, 1e4, 0.01)[None, None, :, None]),
    )
    yield (
        "octaves that grow with every block",
        raw(
            np.abs(q),
            np.abs(integers(1000, d, 3)),
            integers(1000, d, 4),
            0.01,
            (0.001 * 1.02 ** np.arange(1000))[None, None, :, None],
        ),
    )
    yield (
        "octaves that fall",
        raw(
            np.abs(q),
            np.abs(integers(1000, d, 3)),
            integers(1000, d, 4),
            0.01,
            (0.5 * 0.98 ** np.arange(1000))[None, None, :, None],
        ),
    )
    yield "negative scale", raw(q, k, v, scale=-0.3)
    for bad in (np.nan, np.inf):
        for which in range(3):
            arrays = [x.copy() for x in qkv(h=1, l=l, s=s, d=d)]
            arrays[which][0, 0, 7, 5] = bad
            for causal in (False, True):
                yield f"{bad} in {'qkv'[which]}, causal {causal}", int8(arrays, is_causal=causal)
    yield (
        "float32 at its limits",
        int8([np.tanh(x) * np.float32(3e38) for x in qkv(h=1, l=l, s=s, d=d)]),
    )
    arrays = qkv(l=l, s=s, d=d)
    yield (
        "key scale per block",
        validation.quantized_problem(
            quantize(arrays[0]),
            quantize(arrays[1], "block", True),
            quantize(arrays[2], "tensor"),
            Options(return_lse=True),
        ),
    )


def cases():
    """name, problem: all of them, a second's work for a kernel."""
    for i, (l, s) in enumerate(TAILS):
        for j in (0, 1):
            d = DIMS[(2 * i + j) % len(DIMS)]
            dv = DIMS[(3 * i + 5 * j) % len(DIMS)]
            arrays = qkv(h=2, l=l, s=s, d=d, dv=dv, seed=i)
            yield f"L={l} S={s} D={d} Dv={dv} causal={bool(j)}", int8(arrays, is_causal=bool(j))
    arrays = qkv(b=2, h=2, l=70, s=200, d=48, seed=5)
    for name, options in OPTIONS.items():
        yield name, int8(arrays, **options)
    yield "grouped heads", int8(qkv(h=6, hkv=2, l=50, s=140, d=32), enable_gqa=True)
    yield "wide values", int8(qkv(l=50, s=140, d=32, dv=130))
    yield "sizes of latents", int8(qkv(h=1, l=20, s=140, d=576, dv=512))
    yield from later_parts()
    yield from extreme()


def digest(out, lse) -> str:
    """Digest of both arrays; every NaN counts as the same."""
    h = hashlib.sha256()
    for x in (out, lse):
        x = np.ascontiguousarray(x, np.float32)
        h.update(np.where(np.isnan(x), np.float32(np.nan), x + np.float32(0)).tobytes())
    return h.hexdigest()


if __name__ == "__main__":
    import numba

    from numflash.cpu import launch

    isa = sys.argv[1]
    threads = int(sys.argv[2])
    numba.set_num_threads(threads)
    for name, problem in cases():
        print(digest(*launch.run(problem, isa)), name)
