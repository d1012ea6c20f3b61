"""The named tilings: what the kernels use on each device, and those of the A64FX notes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..errors import ArgumentError
from .sizes import CUDA_HEAD_DIMS, KEY_BLOCK, SWIZZLED_HEAD_DIMS, Buffer, Tiling


def _int8_buffers(score: str, weight: str, packed: str = "int8") -> tuple[Buffer, ...]:
    return (
        Buffer("Q tile", "block_q", "d", "uint8" if packed == "int8" else packed),
        Buffer("K block", "key_block", "d", packed),
        Buffer("V block", "key_block", "dv", packed),
        Buffer("start, scale of K", "key_block", 2, "float32"),
        Buffer("S scores", "block_q", "key_block", score),
        Buffer("P weights", "block_q", "key_block", weight),
        Buffer("sums of P", "block_q", "lanes", "int32"),
        Buffer("O accumulator", "block_q", "dv", "float32"),
        Buffer("m, l, octaves, scales, sums", "block_q", 6, "float32"),
        Buffer("tops", "block_q", 1, "int16"),
    )


def _float_buffers(operand: str) -> tuple[Buffer, ...]:
    weights = (
        () if operand == "float32" else (Buffer("P weights", "block_q", "key_block", operand),)
    )
    return (
        Buffer("Q tile", "block_q", "d", operand),
        Buffer("K block", "key_block", "d", operand),
        Buffer("V block", "key_block", "dv", operand),
        Buffer("S scores", "block_q", "key_block", "float32"),
        *weights,
        Buffer("O accumulator", "block_q", "dv", "float32"),
        Buffer("m, l", "block_q", 2, "float32"),
    )


_INT8 = _int8_buffers("int16", "uint8")
_FLOAT32 = _float_buffers("float32")
_BFLOAT16 = _float_buffers("bfloat16")


def _cpu(
    isa: str,
    dtype: str,
    buffers: tuple[Buffer, ...],
    *,
    mr: int = 6,
    nv: int,
    lanes: int,
    block_q: int,
    key_block: int = KEY_BLOCK,
    name: str = "",
    source: str = "",
) -> Tiling:
    name = name or f"{isa}-{dtype}"
    return Tiling(
        name, "cpu", isa, dtype, mr, nv, lanes, block_q, key_block, buffers, source=source
    )


def _cuda(
    arch: str,
    dtype: str,
    buffers: tuple[Buffer, ...],
    *,
    kind: str = "",
    mr: int,
    nv: int,
    lanes: int = 8,
    block_q: int,
    key_block: int,
    source: str = "",
    head_dims: tuple[int, ...] = CUDA_HEAD_DIMS,
    value_dims: tuple[int, ...] = (),
) -> Tiling:
    name = f"{arch}-{dtype}{kind}"
    return Tiling(
        name, "cuda", arch, dtype, mr, nv, lanes, block_q, key_block, buffers, source, head_dims,
        value_dims,
    )  # fmt: skip


def _cuda_float(arch: str, dtype: str, key_block: int, kind: str = "") -> Tiling:
    """FlashAttention-2: four warps of 16 rows; the output leaves through Q's place.

    Two stages by cp.async, one on sm_75.
    """
    stages = 1 if arch == "sm_75" else 2
    buffers = (
        Buffer("Q, then O", "block_q", "widest", dtype),
        Buffer("K tile", "key_block", "d", dtype, stages),
        Buffer("V tile", "key_block", "dv", dtype, stages),
    )
    nv = key_block // 8
    return _cuda(arch, dtype, buffers, kind=kind, mr=16, nv=nv, block_q=64, key_block=key_block)


def _hopper(
    dtype: str, key_block: int, kind: str = "", block_q: int = 128, queries: int = 1
) -> Tiling:
    """FlashAttention-3: two or three warpgroups of 64 rows, a ring of two stages by TMA.

    Head sizes are multiples of 64. The largest tiles that ptxas keeps in registers: "-narrow" for 64
    channels and "-full" for 128 where no option touches the scores, the latter without a band. Where
    two tiles of Q have room (`queries`) the next one is loaded beside this one's scores.
    """
    buffers = (
        Buffer("Q tile", "block_q", "d", dtype, queries),
        Buffer("K tile", "key_block", "d", dtype, 2),
        Buffer("V tile", "key_block", "dv", dtype, 2),
        Buffer("sums that order the softmax", 2, "block_q", "float32"),
        Buffer("barriers, alignment", 1, 2048, "int8"),
    )
    return _cuda(
        "sm_90a", dtype, buffers, kind=kind, mr=64, nv=key_block // 8, block_q=block_q,
        key_block=key_block, head_dims=SWIZZLED_HEAD_DIMS,
    )  # fmt: skip


def _hopper_gradient(dtype: str, of_keys: bool, columns: int, stages: int, kind: str) -> Tiling:
    """A pass over gradients: two warpgroups own 64 rows each of one side, whose tiles stay, and tiles
    of `columns` rows of the other side go through a ring by TMA.

    Equal head sizes, multiples of 64. Of the keys' pass the register tile of scores is on its side.
    """
    own, other = ("key_block", "block_q") if of_keys else ("block_q", "key_block")
    names = ("K", "V", "Q", "dO") if of_keys else ("Q", "dO", "K", "V")
    statistics = (Buffer("LSE and D", other, 2, "float32", stages),) if of_keys else ()
    buffers = (
        *(Buffer(f"{name} tile", own, "d", dtype) for name in names[:2]),
        *(Buffer(f"{name} tile", other, "d", dtype, stages) for name in names[2:]),
        *statistics,
        Buffer("barriers, alignment", 1, 2048, "int8"),
    )
    sizes = (columns, 128, columns, 64) if of_keys else (128, columns, 64, columns)
    block_q, key_block, mr, wide = sizes
    return _cuda(
        "sm_90a", dtype, buffers, kind=f"-{'kv' if of_keys else 'q'}{kind}", mr=mr, nv=wide // 8,
        block_q=block_q, key_block=key_block, head_dims=(64, 128),
    )  # fmt: skip


def _cuda_int8(arch: str, buffers: tuple[Buffer, ...], kind: str = "", halves: int = 1) -> Tiling:
    """A warp owns 16 rows.

    Of wide heads half of the keys and channels of them, and a second warp the rest (`halves`).
    """
    buffers = (
        Buffer("Q tile", "block_q", "d", "int8"),
        *buffers,
        Buffer("scales of K", "key_block", 1, "float32"),
        Buffer("row table", "block_q", 8, "float32", halves),
    )
    return _cuda(
        arch, "int8", buffers, kind=kind, mr=16, nv=KEY_BLOCK // 8 // halves, block_q=64,
        key_block=KEY_BLOCK, head_dims=SWIZZLED_HEAD_DIMS, value_dims=CUDA_HEAD_DIMS,
    )  # fmt: skip


def _hopper_int8(stages: int, kind: str = "", block_q: int = 128) -> Tiling:
    """Two or three warpgroups of 64 rows, a ring by TMA.

    Three are "-full", where ptxas keeps their rows in registers: up to 64 channels of V, or up to 128
    where no option touches the scores but a softcap.

    Rows of Q and K are padded to whole swizzles of 128 bytes by the copies.
    """
    buffers = (
        Buffer("Q tile", "block_q", "d", "int8"),
        Buffer("K block", "key_block", "d", "int8", stages),
        Buffer("V block", "key_block", "dv", "int8", stages),
        Buffer("scales of K", "key_block", 1, "float32", stages),
        Buffer("row table", "block_q", 8, "float32"),
        Buffer("barriers, alignment", 1, 2048, "int8"),
    )
    return _cuda(
        "sm_90a", "int8", buffers, kind=kind, mr=64, nv=KEY_BLOCK // 8, block_q=block_q,
        key_block=KEY_BLOCK, head_dims=(128, 256), value_dims=CUDA_HEAD_DIMS,
    )  # fmt: skip


_NOTES_FUSED = (
    Buffer("Q tile", "block_q", "d", "int8"),
    Buffer("K chunk", "key_block", "d", "int8"),
    Buffer("V chunk", "key_block", "dv", "int8"),
    Buffer("O tile", "block_q", "dv", "float32"),
    Buffer("S chunk", "block_q", "key_block", "int32"),
    Buffer("state", "block_q", 4, "float32"),
)
_NOTES_UNFUSED = (
    Buffer("Q tile", "block_q", "d", "int8"),
    Buffer("K tile", "key_block", "d", "int8"),
    Buffer("S tile", "block_q", "key_block", "int32", 2),
)
_KV = Buffer("K block", "key_block", "d", "int8"), Buffer("V block", "key_block", "dv", "int8")
_KV_WEIGHTS = Buffer("K block, then P", "key_block", "d", "int8"), _KV[1]
_FLOAT_VALUES = Buffer("V part", 32, "dv", "float32"), Buffer("padding of V", 32, 4, "float32")
_WIDEST = "key_block", "widest", "int8"

TILINGS = {
    t.name: t
    for t in (
        _cpu("amx_int8", "int8", _INT8, mr=32, nv=4, lanes=16, block_q=128),
        _cpu("avx512_vnni", "int8", _INT8, nv=4, lanes=16, block_q=48),
        _cpu("avx_vnni", "int8", _INT8, nv=2, lanes=8, block_q=24),
        _cpu("avx2", "int8", _int8_buffers("int16", "int16", "int16"), nv=2, lanes=8, block_q=24),
        # 24 rows fill nine tenths of an L1 of 64 KiB at D = 128; on A64FX a row of a panel is a line
        _cpu("sve", "int8", _INT8, nv=4, lanes=16, block_q=24),
        _cpu("neon_dot", "int8", _INT8, nv=4, lanes=4, block_q=24),
        _cpu("portable", "int8", _int8_buffers("int32", "uint8"), mr=4, nv=4, lanes=1, block_q=32),
        _cpu("portable", "float32", _FLOAT32, mr=1, nv=1, lanes=1, block_q=1, key_block=256),
        _cpu("avx512", "float32", _FLOAT32, nv=4, lanes=16, block_q=192, key_block=256),
        _cpu("avx2", "float32", _FLOAT32, nv=2, lanes=8, block_q=192, key_block=128),
        _cpu("sve512", "float32", _FLOAT32, nv=4, lanes=16, block_q=192, key_block=128),
        _cpu("sve256", "float32", _FLOAT32, nv=4, lanes=8, block_q=192, key_block=128),
        _cpu("neon", "float32", _FLOAT32, nv=4, lanes=4, block_q=192, key_block=128),
        _cpu("avx512_bf16", "bfloat16", _BFLOAT16, nv=4, lanes=16, block_q=192, key_block=128),
        _cpu("amx_bf16", "bfloat16", _BFLOAT16, mr=32, nv=4, lanes=16, block_q=384, key_block=128),
        _cpu(
            "sve", "int8", _NOTES_FUSED, nv=4, lanes=16, block_q=48, key_block=64,
            name="a64fx-fused-48x64", source="Fused FlashAttention V2, Tile Sizes (L1D Optimized)",
        ),
        _cpu(
            "sve", "int8", _NOTES_UNFUSED, nv=4, lanes=16, block_q=48, key_block=128,
            name="a64fx-unfused-48x128",
            source="INT8 GEMM + FlashAttention status, Working Set Analysis",
        ),
        _cuda_float("sm_75", "float16", key_block=64),
        _cuda_float("sm_75", "float16", key_block=16, kind="-wide"),
        _cuda_float("sm_80", "float16", key_block=64),
        _cuda_float("sm_80", "float16", key_block=32, kind="-wide"),
        _cuda_float("sm_80", "bfloat16", key_block=64),
        _cuda_float("sm_80", "bfloat16", key_block=32, kind="-wide"),
        *(
            tiling
            for dtype in ("float16", "bfloat16")
            for tiling in (
                _hopper(dtype, key_block=128, queries=2),
                _hopper(dtype, key_block=64, kind="-wide"),
                _hopper(dtype, key_block=128, kind="-narrow", block_q=192, queries=2),
                _hopper(dtype, key_block=176, kind="-full"),
                _hopper_gradient(dtype, True, columns=64, stages=4, kind=""),
                _hopper_gradient(dtype, False, columns=64, stages=4, kind=""),
                _hopper_gradient(dtype, True, columns=80, stages=4, kind="-narrow"),
                _hopper_gradient(dtype, False, columns=128, stages=4, kind="-narrow"),
            )
        ),
        _cuda_int8("sm_75", (Buffer("K, then V", *_WIDEST),)),
        _cuda_int8("sm_75", (Buffer("K, then P, V", *_WIDEST),), kind="-wide", halves=2),
        _cuda_int8("sm_80", _KV),
        _cuda_int8("sm_80", _KV_WEIGHTS, kind="-wide", halves=2),
        _cuda_int8("sm_80", (_KV[0], *_FLOAT_VALUES), kind="-fp32"),
        _cuda_int8(
            "sm_80", (Buffer("K block, then P", *_WIDEST), *_FLOAT_VALUES), kind="-fp32-wide",
            halves=2,
        ),
        _hopper_int8(stages=4),
        _hopper_int8(stages=4, kind="-full", block_q=192),
        _hopper_int8(stages=2, kind="-wide"),
        _cuda(
            "sm_80", "float32", (), mr=1, nv=1, lanes=1, block_q=4, key_block=1,
            source="a warp per row, all in registers",
        ),
    )
}  # fmt: skip


def tiling(isa: str, dtype: str = "int8", **changes: Any) -> Tiling:
    """The tiling that the kernels for `isa` and `dtype` use.

    Keyword arguments replace single sizes, checked again.
    """
    name = f"{isa}-{dtype}"
    if name not in TILINGS:
        raise ArgumentError(
            f"tiling: no tiling for isa {isa!r} and dtype {dtype!r}; allowed: {', '.join(sorted(TILINGS))}"
        )
    return replace(TILINGS[name], **changes) if changes else TILINGS[name]
