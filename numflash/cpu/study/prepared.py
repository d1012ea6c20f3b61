"""One problem for the switched kernel of `fused`: quantised, and packed for every kind of P.V."""

from __future__ import annotations

from dataclasses import dataclass, field

import numba
import numpy as np

from ...errors import UnsupportedError
from ...jit import target
from ...numerics.quantization import quantize_problem
from ...numerics.scores import combined_scale
from ...tiling import tiling
from ...validation import Problem, problem
from ...validation.options import Options
from ..int8.packing import PackedKeys, bfloat16_pairs, float_rows, pack_keys, pack_values
from ..isa.isas import VECTOR_ISAS, padded, running_lanes
from .fused import HALF_WIDTH, make_fused

F, I = np.float32, np.int32
# register tiles of 6 rows: the summary's shape
ISAS = ("avx512_vnni", "avx_vnni", "avx2", "sve", "neon_dot")


@dataclass(frozen=True)
class Prepared:
    """One problem quantised and packed for every kind of P.V that this machine has."""

    forward: Problem
    isa: str
    q: np.ndarray
    cq: np.ndarray
    keys: PackedKeys
    values: dict[str, np.ndarray] = field(repr=False)
    columns: int
    v_scale: np.ndarray

    def run(self, exp2: str = "vectors", pv: str = "int8", ahead: bool = False) -> np.ndarray:
        """Attention by the kernel with these switches, on as many threads as are allowed now."""
        nb, nh, nkv, length, s, _, dv = self.forward.shape
        out = np.empty((nb * nh, length, dv), F)
        m = np.empty((nb * nh, length), I)
        l = np.empty((nb * nh, length), F)
        make_fused(self.isa, exp2, pv)(
            self.q,
            self.cq,
            self.keys,
            self.values[pv],
            self.columns,
            nh // nkv,
            self.forward.right is not None,
            ahead,
            s,
            numba.get_num_threads(),
            np.zeros(1, np.int64),
            out,
            m,
            l,
        )
        if pv == "int8":
            out *= np.repeat(self.v_scale, nh // nkv, 0)[:, None]
        return out.reshape(nb, nh, length, dv)


def prepare(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, is_causal: bool = False
) -> Prepared:
    """Quantise and pack float32 arrays (B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, Dv), as
    `precision="int8"` does.

    Raises
    ------
    UnsupportedError
        On a target without integer register tiles.
    """
    isa = next((name for name in target.available() if name in ISAS), None)
    if isa is None:
        raise UnsupportedError(
            f"isa: the target {target.cpu_name()!r} has no such tiles; allowed: {', '.join(map(repr, ISAS))}"
        )
    forward = problem(
        query, key, value, Options(is_causal=is_causal, enable_gqa=True, precision="float32")
    )
    quantised = quantize_problem(
        problem(query, key, value, Options(is_causal=is_causal, enable_gqa=True, precision="int8"))
    )
    nb, nh, nkv, length, s, d, dv = forward.shape
    instructions, rows = VECTOR_ISAS[isa], tiling(isa).block_q
    q = np.zeros(
        (nb * nh, padded(length, rows), padded(d, instructions.group)),
        np.uint8 if instructions.group == 4 else np.int16,
    )
    q[:, :length, :d] = (
        quantised.query.data.reshape(nb * nh, length, d).astype(np.int16) + instructions.q_offset
    )
    cq, ck = combined_scale(quantised.query, quantised.key, forward.scale)
    factors = np.zeros(q.shape[:2], F)
    factors[:, :length] = cq.reshape(nb * nh, length)
    floats = np.ascontiguousarray(forward.value, F).reshape(nb * nkv, s, dv)
    integers = quantised.value.data.reshape(nb * nkv, s, dv)
    columns = padded(dv, running_lanes(isa))
    values = {
        "fp32": float_rows(isa, floats, np.zeros((nb * nkv, s), bool)),
        "int8": pack_values(isa, integers),
    }
    if not target.missing(HALF_WIDTH, target.BFLOAT16_ISAS) and columns == padded(dv, 16):
        bits = floats.view(np.uint32)
        high = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # ties to even
        values["bf16"] = bfloat16_pairs(isa, high.astype(np.uint16))
    keys = pack_keys(
        isa,
        quantised.key.data.reshape(nb * nkv, s, d),
        np.ascontiguousarray(ck.reshape(nb * nkv, s)),
    )
    return Prepared(
        forward, isa, q, factors, keys, values, columns, quantised.value.scale.reshape(nb * nkv, dv)
    )
