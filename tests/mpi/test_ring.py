"""Attention over MPI ranks against attention by its definition, and against a single process.

Values, bits, bytes, mistakes.

Each number of ranks is started once and runs every case (worker.py); the tests look at what rank 0
wrote.
"""

import json
import pickle

import numpy as np
import pytest
from oracles import naive, qkv

import numflash
from mpi.launch import HERE, needs_mpi, on_ranks
from mpi.problems import LONG, PROBLEMS, SMALL
from numflash.measure.metrics import errors
from numflash.mpi.model import LINKS, Ring

PARTS = {
    1: ["semantics"],
    2: ["semantics", "traffic"],
    3: ["semantics", "interfaces", "mistakes", "decoding"],
    4: ["semantics", "traffic", "repeats"],
    8: ["semantics", "decoding"],
}
LIMIT = {"float32": 1e-6, "int8": 0.03}
FIRST_LIMIT = 7e-4  # INT8 of "few", whose keys are all first keys: values of 13 bits, weights of 12
pytestmark = needs_mpi


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """(ranks, part) -> what the worker found."""
    known = {}

    def get(ranks, part):
        if (ranks, part) not in known:
            path = tmp_path_factory.mktemp("mpi") / "found.pickle"
            on_ranks(
                ranks, HERE / "worker.py", path, *([part] if part == "kernels" else PARTS[ranks])
            )
            known.update({(ranks, name): x for name, x in pickle.loads(path.read_bytes()).items()})
        return known[ranks, part]

    return get


@pytest.mark.parametrize("ranks", PARTS)
def test_semantics(found, ranks):
    exact = {}
    for (name, *how), (out, lse) in (
        (k, v) for k, v in found(ranks, "semantics").items() if len(k) == 4
    ):
        shape, options = PROBLEMS[name]
        if name not in exact:
            exact[name] = naive(*qkv(**shape), **options)
        want, want_lse = exact[name]
        precision = how[2]
        assert (
            out.shape == want.shape
            and lse.shape == want_lse.shape
            and out.dtype == lse.dtype == np.float32
        )
        np.testing.assert_array_equal(lse == -np.inf, want_lse == -np.inf, str((name, how)))
        np.testing.assert_allclose(
            lse, want_lse, atol=3e-6 if precision == "float32" else 0.06, err_msg=str((name, how))
        )
        limit = FIRST_LIMIT if (name, precision) == ("few", "int8") else LIMIT[precision]
        assert not want.any() or errors(out, want).relative_l1 <= limit, (name, how)
        assert want.any() or not out.any()


def test_gathered_int8_does_not_depend_on_the_split(found):
    """Offset, scales and key blocks are those of the whole sequence.

    Equal bits at any number of ranks.
    """
    alone = {k[0]: v for k, v in found(1, "semantics").items() if k[2:] == ("gather", "int8")}
    for ranks in PARTS:
        for (name, *how), result in (
            (k, v) for k, v in found(ranks, "semantics").items() if k[2:] == ("gather", "int8")
        ):
            for mine, other in zip(result, alone[name], strict=True):
                np.testing.assert_array_equal(mine, other, f"{ranks} ranks, {name}, {how}")


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_one_rank_is_the_single_process(found, precision):
    for name, (shape, options) in PROBLEMS.items():
        out, lse = next(
            v
            for k, v in found(1, "semantics").items()
            if (k[0], k[2:]) == (name, ("gather", precision))
        )
        whole, whole_lse = numflash.attention(
            *qkv(**shape),
            enable_gqa=True,
            precision=precision,
            return_lse=True,
            impl="reference",
            **options,
        )
        np.testing.assert_allclose(
            out, whole, atol=1e-6 if precision == "float32" else 1e-3, err_msg=name
        )
        np.testing.assert_allclose(lse, whole_lse, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("ranks", PARTS)
def test_nonfinite_keys_spoil_only_rows_that_see_them(found, ranks):
    arrays = list(qkv(**SMALL))
    arrays[1][0, 0, 20], arrays[1][0, 1, 33], arrays[2][1, 0, 7] = np.nan, np.inf, np.inf
    for precision in ("float32", "int8"):
        out, _ = found(ranks, "semantics")["nonfinite", precision]
        want = numflash.attention(
            *arrays, is_causal=True, enable_gqa=True, precision=precision, impl="reference"
        )
        np.testing.assert_array_equal(np.isfinite(out), np.isfinite(want))
        kept = np.isfinite(want)
        np.testing.assert_allclose(
            out[kept], want[kept], atol=1e-5 if precision == "float32" else 0.1
        )


@pytest.mark.parametrize("ranks", PARTS)
@pytest.mark.parametrize(("pv", "limit"), [("int16", 0.018), ("bf16", 0.015), ("fp32", 0.013)])
def test_weights_of_more_bits(found, ranks, pv, limit):
    """And gathered keys give the bits of one process."""
    arrays = qkv(**SMALL)
    got = found(ranks, "semantics")
    assert errors(got["pv", pv][0], naive(*arrays)[0]).relative_l1 <= limit
    options = {"enable_gqa": True, "precision": "int8", "pv": "int16", "impl": "reference"}
    np.testing.assert_array_equal(got["pv", "gather"][0], numflash.attention(*arrays, **options))


def test_layouts_dimensions_and_dtypes(found):
    got = found(3, "interfaces")
    arrays = qkv(**SMALL)
    want, want_lse = naive(*arrays, is_causal=True)
    np.testing.assert_allclose(got["blhd"][0], want, atol=1e-5)
    np.testing.assert_allclose(got["blhd"][1], want_lse, atol=1e-5)
    np.testing.assert_allclose(got["3d"], want[0], atol=1e-5)
    np.testing.assert_allclose(got["2d"], want[0, 0], atol=1e-5)
    np.testing.assert_allclose(got["float64"], want, atol=1e-5)
    assert (
        got["float64"].dtype == np.float32
        and got["float16"].dtype == np.float16
        and got["bfloat16"].dtype == np.uint16
    )
    np.testing.assert_allclose(got["float16"].astype(np.float32), want, atol=5e-3)
    np.testing.assert_allclose(
        (got["bfloat16"].astype(np.uint32) << 16).view(np.float32), want, atol=5e-2
    )


def test_equal_bits_whatever_the_timing(found):
    first, *others = found(4, "repeats")["repeats"]
    assert len(others) == 3
    for other in others:
        for mine, its in zip(first, other, strict=True):
            np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes(found, ranks):
    """Full attention sends every key and value (ranks - 1) times.

    Causal and windowed attention only what is seen further on.
    """
    h = LONG["h"]
    length = LONG["l"]
    d = LONG["d"]
    row = {"float32": 8 * d, "float16": 4 * d, "int8": 2 * d + 4}
    size = length // ranks
    for (name, split, precision), (_, reports) in found(ranks, "traffic").items():
        sent = [r["sent"] for r in reports]
        unit = h * row[precision]
        assert sum(sent) == sum(r["received"] for r in reports)
        if name == "full":
            assert sent == [(ranks - 1) * size * unit] * ranks
            assert [r["messages"] for r in reports] == [ranks - 1] * ranks
        elif name == "causal" and split == "plain":
            assert sum(sent) == sum(ranks - 1 - r for r in range(ranks)) * size * unit
            assert sent[-1] == 0
        elif (
            name == "window" and split == "plain"
        ):  # the last 127 keys of each shard, from a block edge on, to the next rank
            to_next = [128 * unit] * (ranks - 1)
            to_last = size * unit * (ranks - 1)
            assert sum(sent) >= sum(to_next) and sum(sent) <= sum(to_next) + to_last
        else:
            assert sum(sent) <= ranks * (ranks - 1) * size * unit
    full = {p: found(ranks, "traffic")["full", "plain", p][1][0]["sent"] for p in row}
    assert full["int8"] / full["float32"] == (2 * d + 4) / (8 * d)


def test_traffic_does_not_change_results(found):
    arrays = qkv(**LONG)
    for (name, split, precision), (out, _) in found(4, "traffic").items():
        options = {"full": {}, "causal": {"is_causal": True}, "window": {"window": (127, 0)}}[name]
        want = numflash.attention(*arrays, impl="reference", **options)
        limit = {"float32": 1e-6, "float16": 1e-3, "int8": 0.03}[precision]
        assert errors(out, want).relative_l1 <= limit, (name, split, precision)


MISTAKES = {
    "dtype": ("ArgumentTypeError", "rank 2: query: got dtype int64; allowed: float32"),
    "head_dim": ("ArgumentError", "rank 2: query's head_dim: got 4; allowed: that of rank 0, 8"),
    "key_heads": ("ArgumentError", "rank 2: key's heads: got 1; allowed: that of rank 0, 2"),
    "batch": ("ArgumentError", "rank 2: query's batch: got 2; allowed: that of rank 0, 1"),
    "value_length": ("ArgumentError", "rank 2: value: got 1 keys"),
    "option": ("ArgumentError", "rank 2: is_causal: got True; allowed: that of rank 0, False"),
    "window": ("ArgumentError", "rank 1: window: got (1, 0); allowed: that of rank 0, (0, 0)"),
    "lengths": ("ArgumentError", "key_lengths: got [99]; allowed: 0 to 9"),
    "padding": ("ArgumentError", "rank 1: key_lengths: got [1]; allowed: that of rank 0, [0]"),
    "precision": ("ArgumentError", "rank 0: precision: got 'int4'"),
    "split": ("ArgumentError", "rank 0: split: got 'striped'; allowed: 'plain', 'zigzag'"),
    "zigzag": (
        "ArgumentError",
        "rank 1: split: got 3 tokens; allowed: 2, from the zigzag split of 7",
    ),
    "ranks": (
        "ArgumentError",
        "split: got a split over 4 ranks; allowed: over 3, the communicator's",
    ),
    "kernel": ("ValueError", "rank 2: no luck"),
    "memory": ("MemoryError", "rank 2: full"),
    "odd": ("RuntimeError", "rank 2: Odd: (1, 2)"),
    "room, ring": ("MemoryError", "rank 2: full"),
    "room, gather": ("MemoryError", "rank 2: full"),
    "report": ("ArgumentTypeError", "rank 2: report: got True"),
    "unknown": ("ArgumentTypeError", "rank 2: casual: all_gather_attention does not take it"),
    "comm": ("ArgumentTypeError", "comm: got "),
    "none": ("ArgumentTypeError", "comm: got NoneType"),
    "chunks": ("ArgumentError", "chunks: got a chunk 2 to 5 where 3 is next"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_every_rank_raises_the_same(found, name):
    kind, message = MISTAKES[name]
    first, *others = found(3, "mistakes")[name]
    assert first is not None and first[0] == kind and message in first[1], first
    assert others == [first] * 2


def test_mistakes_leave_the_communicator_in_order(found):
    out, _ = found(3, "mistakes")["after"]
    assert errors(out, naive(*qkv(h=2, l=9, d=8))[0]).relative_l1 <= 1e-6


def test_compiled_kernels(found):
    arrays = qkv(h=2, hkv=1, l=1037, d=64)
    aligned = qkv(**LONG)
    for precision in ("int8", "float32"):  # compiled here, so that the ranks find them on disk
        whole = numflash.attention(*arrays, is_causal=True, enable_gqa=True, precision=precision)
        for call in ("ring", "gather"):
            for split in ("plain", "zigzag"):
                out, _ = found(2, "kernels")[precision, call, split]
                assert errors(out, whole).relative_l1 <= (
                    1e-6 if precision == "float32" else 0.01
                ), (precision, call, split)
    whole = numflash.attention(*aligned, is_causal=True, precision="int8")
    got = {k[1:]: v[0] for k, v in found(2, "kernels").items() if k[0] == "aligned"}
    for split in (
        "plain",
        "zigzag",
    ):  # chunks that start on key blocks: the rounding of the weights is the same
        assert errors(got["ring", split], whole).relative_l1 <= 2e-6, split
        np.testing.assert_array_equal(got["gather", split], got["gather", "plain"])


@pytest.mark.parametrize("ranks", [3, 8])
def test_decoding_over_ranks(found, ranks):
    got = found(ranks, "decoding")
    arrays = qkv(b=2, h=4, hkv=2, l=9, d=16, dv=8)
    want, want_lse = naive(*arrays, is_causal=True)
    np.testing.assert_allclose(got["steps"][0], want, atol=1e-6)
    np.testing.assert_allclose(got["steps"][1], want_lse, atol=1e-6)
    assert set(got["everywhere"]) == {
        got["steps"][0][:, :, 8:].tobytes()
    }  # equal bits on all ranks and from run to run
    assert got["float16"].dtype == np.float16
    np.testing.assert_allclose(got["float16"], want[:, :, 8:], atol=2e-3)
    np.testing.assert_array_equal(got["after"], got["steps"][0][:, :, 8:])


DECODING_MISTAKES = {
    "two tokens": (
        "ArgumentError",
        "rank 2: query: got shape (2, 4, 2, 16); allowed: (B, H, 1, D), one token of each sequence",
    ),
    "heads": (
        "ArgumentError",
        "rank 2: query's shape: got (2, 2, 1, 16); allowed: that of rank 0, (2, 4, 1, 16)",
    ),
    "scale": ("ArgumentError", "rank 2: scale: got 0.5; allowed: that of rank 0, None"),
    "width": ("ArgumentError", "rank 2: cache.value_dim: got 7; allowed: that of rank 0, 8"),
    "broken": ("ValueError", "rank 2: no cache"),
    "no cache": ("ArgumentTypeError", "rank 0: cache: got NoneType; allowed: a KVCache"),
    "flag": ("ArgumentTypeError", "rank 0: return_lse: got 1; allowed: True or False"),
}


@pytest.mark.parametrize("name", DECODING_MISTAKES)
def test_decoding_raises_the_same_everywhere(found, name):
    first, *others = found(3, "decoding")[name]
    assert first[:2] == DECODING_MISTAKES[name] and others == [first] * 2


def test_the_model_counts_the_bytes_that_are_sent(found):
    h = LONG["h"]
    length = LONG["l"]
    d = LONG["d"]
    for ranks in (2, 4):
        for precision in ("float32", "float16", "int8"):
            for report in found(ranks, "traffic")["full", "plain", precision][1]:
                assert (
                    Ring(1e9, LINKS[0], h, h, d, precision).sent(length // ranks, ranks)
                    == report["sent"]
                )


@pytest.mark.slow
def test_demo():
    result = json.loads(on_ranks(2, "-m", "numflash", "demo", "ring", "--json"))
    assert result["ranks"] == 2 and len(result["tables"]) == 4
    exact, balance, speed, model = result["tables"].values()
    assert all(r["relative_l1"] <= {"float32": 1e-6, "int8": 0.03}[r["precision"]] for r in exact)
    assert balance[0]["plain"] == pytest.approx(1.5, abs=0.01) and balance[0]["zigzag"] == 1.0
    full = {r["precision"]: r["sent"] for r in speed if r["case"] == "full"}
    assert full["int8"] / full["float32"] == 260 / 1024 and all(r["seconds"] > 0 for r in speed)
    assert {r["precision"] for r in model} == {"float32", "int8"}
