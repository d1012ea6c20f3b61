"""The named tilings: what the kernels use on each device, and those of the A64FX notes."""

from __future__ import annotations

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
        Buffer("m, l, scales, sums", "block_q", 6, "float32"),
        Buffer("octaves", "block_q", 1, "int16"),
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


def _arm(cpu: str, isa: str, lanes: int) -> Tiling:
    """24 rows fill nine tenths of an L1 of 64 KiB at D = 128.

    On A64FX a row of a packed panel is one 256-byte line.
    """
    return Tiling(
        f"{cpu}-int8",
        "cpu",
        isa,
        "int8",
        6,
        4,
        lanes,
        24,
        KEY_BLOCK,
        _int8_buffers("int16", "uint8"),
    )


def _cuda_float(arch: str, dtype: str, key_block: int, wide: str = "") -> Tiling:
    """FlashAttention-2: four warps of 16 rows; the output leaves through Q's place.

    Two stages by cp.async, one on sm_75.
    """
    stages = 1 if arch == "sm_75" else 2
    return Tiling(
        f"{arch}-{dtype}{wide}",
        "cuda",
        arch,
        dtype,
        16,
        key_block // 8,
        8,
        64,
        key_block,
        (
            Buffer("Q, then O", "block_q", "widest", dtype),
            Buffer("K tile", "key_block", "d", dtype, stages),
            Buffer("V tile", "key_block", "dv", dtype, stages),
        ),
        head_dims=CUDA_HEAD_DIMS,
    )


def _hopper(dtype: str, key_block: int, kind: str = "", block_q: int = 128) -> Tiling:
    """FlashAttention-3: two or three warpgroups of 64 rows, a ring of two stages by TMA.

    Head sizes are multiples of 64. The largest tiles that ptxas keeps in registers: "-narrow" for 64
    channels and "-full" for 128 where no option touches the scores, the latter without a band.
    """
    return Tiling(
        f"sm_90a-{dtype}{kind}",
        "cuda",
        "sm_90a",
        dtype,
        64,
        key_block // 8,
        8,
        block_q,
        key_block,
        (
            Buffer("Q tile", "block_q", "d", dtype),
            Buffer("K tile", "key_block", "d", dtype, 2),
            Buffer("V tile", "key_block", "dv", dtype, 2),
            Buffer("sums that order the softmax", 2, "block_q", "float32"),
            Buffer("barriers, alignment", 1, 2048, "int8"),
        ),
        head_dims=SWIZZLED_HEAD_DIMS,
    )


def _cuda_int8(arch: str, buffers: tuple[Buffer, ...], name: str = "", halves: int = 1) -> Tiling:
    """A warp owns 16 rows.

    Of wide heads half of the keys and channels of them, and a second warp the rest (`halves`).
    """
    return Tiling(
        f"{arch}-int8{name}",
        "cuda",
        arch,
        "int8",
        16,
        KEY_BLOCK // 8 // halves,
        8,
        64,
        KEY_BLOCK,
        (
            Buffer("Q tile", "block_q", "d", "int8"),
            *buffers,
            Buffer("scales of K", "key_block", 1, "float32"),
            Buffer("row table", "block_q", 8, "float32", halves),
        ),
        head_dims=SWIZZLED_HEAD_DIMS,
        value_dims=CUDA_HEAD_DIMS,
    )


_FLOAT_VALUES = Buffer("V part", 32, "dv", "float32"), Buffer("padding of V", 32, 4, "float32")


def _hopper_int8(stages: int, wide: str = "") -> Tiling:
    """Two warpgroups of 64 rows, a ring by TMA.

    Rows of Q and K are padded to whole swizzles of 128 bytes by the copies.
    """
    return Tiling(
        f"sm_90a-int8{wide}",
        "cuda",
        "sm_90a",
        "int8",
        64,
        KEY_BLOCK // 8,
        8,
        128,
        KEY_BLOCK,
        (
            Buffer("Q tile", "block_q", "d", "int8"),
            Buffer("K block", "key_block", "d", "int8", stages),
            Buffer("V block", "key_block", "dv", "int8", stages),
            Buffer("scales of K", "key_block", 1, "float32", stages),
            Buffer("row table", "block_q", 8, "float32"),
            Buffer("barriers, alignment", 1, 2048, "int8"),
        ),
        head_dims=(128, 256),
        value_dims=CUDA_HEAD_DIMS,
    )


_DOCUMENT = "Fused FlashAttention V2, Tile Sizes (L1D Optimized)"

TILINGS = {
    t.name: t
    for t in (
        Tiling(
            "amx_int8-int8",
            "cpu",
            "amx_int8",
            "int8",
            32,
            4,
            16,
            128,
            KEY_BLOCK,
            _int8_buffers("int16", "uint8"),
        ),
        Tiling(
            "avx512_vnni-int8",
            "cpu",
            "avx512_vnni",
            "int8",
            6,
            4,
            16,
            48,
            KEY_BLOCK,
            _int8_buffers("int16", "uint8"),
        ),
        Tiling(
            "avx_vnni-int8",
            "cpu",
            "avx_vnni",
            "int8",
            6,
            2,
            8,
            24,
            KEY_BLOCK,
            _int8_buffers("int16", "uint8"),
        ),
        Tiling(
            "avx2-int8",
            "cpu",
            "avx2",
            "int8",
            6,
            2,
            8,
            24,
            KEY_BLOCK,
            _int8_buffers("int16", "int16", "int16"),
        ),
        Tiling(
            "sve-int8",
            "cpu",
            "sve",
            "int8",
            6,
            4,
            16,
            24,
            KEY_BLOCK,
            _int8_buffers("int16", "uint8"),
        ),
        Tiling(
            "neon_dot-int8",
            "cpu",
            "neon_dot",
            "int8",
            6,
            4,
            4,
            24,
            KEY_BLOCK,
            _int8_buffers("int16", "uint8"),
        ),
        _arm("a64fx", "sve", 16),
        _arm("neoverse-v1", "sve", 8),
        _arm("neoverse-v2", "sve", 4),
        _arm("neoverse-n1", "neon_dot", 4),
        Tiling(
            "portable-int8",
            "cpu",
            "portable",
            "int8",
            4,
            4,
            1,
            32,
            KEY_BLOCK,
            _int8_buffers("int32", "uint8"),
        ),
        Tiling(
            "portable-float32",
            "cpu",
            "portable",
            "float32",
            1,
            1,
            1,
            1,
            256,
            _float_buffers("float32"),
        ),
        Tiling(
            "avx512-float32",
            "cpu",
            "avx512",
            "float32",
            6,
            4,
            16,
            192,
            256,
            _float_buffers("float32"),
        ),
        Tiling(
            "avx2-float32", "cpu", "avx2", "float32", 6, 2, 8, 192, 128, _float_buffers("float32")
        ),
        *(
            Tiling(
                f"sve{32 * lanes}-float32",
                "cpu",
                f"sve{32 * lanes}",
                "float32",
                6,
                4,
                lanes,
                192,
                128,
                _float_buffers("float32"),
            )
            for lanes in (16, 8)
        ),
        Tiling(
            "neon-float32", "cpu", "neon", "float32", 6, 4, 4, 192, 128, _float_buffers("float32")
        ),
        Tiling(
            "avx512_bf16-bfloat16",
            "cpu",
            "avx512_bf16",
            "bfloat16",
            6,
            4,
            16,
            192,
            128,
            _float_buffers("bfloat16"),
        ),
        Tiling(
            "amx_bf16-bfloat16",
            "cpu",
            "amx_bf16",
            "bfloat16",
            32,
            4,
            16,
            192,
            256,
            _float_buffers("bfloat16"),
        ),
        Tiling(
            "a64fx-fused-48x64",
            "cpu",
            "sve",
            "int8",
            6,
            4,
            16,
            48,
            64,
            (
                Buffer("Q tile", "block_q", "d", "int8"),
                Buffer("K chunk", "key_block", "d", "int8"),
                Buffer("V chunk", "key_block", "dv", "int8"),
                Buffer("O tile", "block_q", "dv", "float32"),
                Buffer("S chunk", "block_q", "key_block", "int32"),
                Buffer("state", "block_q", 4, "float32"),
            ),
            _DOCUMENT,
        ),
        Tiling(
            "a64fx-unfused-48x128",
            "cpu",
            "sve",
            "int8",
            6,
            4,
            16,
            48,
            128,
            (
                Buffer("Q tile", "block_q", "d", "int8"),
                Buffer("K tile", "key_block", "d", "int8"),
                Buffer("S tile", "block_q", "key_block", "int32", 2),
            ),
            "INT8 GEMM + FlashAttention status, Working Set Analysis",
        ),
        _cuda_float("sm_75", "float16", 64),
        _cuda_float("sm_75", "float16", 16, "-wide"),
        _cuda_float("sm_80", "float16", 64),
        _cuda_float("sm_80", "float16", 32, "-wide"),
        _cuda_float("sm_80", "bfloat16", 64),
        _cuda_float("sm_80", "bfloat16", 32, "-wide"),
        *(
            _hopper(dtype, *sizes)
            for dtype in ("float16", "bfloat16")
            for sizes in ((128,), (64, "-wide"), (128, "-narrow", 192), (176, "-full"))
        ),
        _cuda_int8("sm_75", (Buffer("K, then V", "key_block", "widest", "int8"),)),
        _cuda_int8("sm_75", (Buffer("K, then P, V", "key_block", "widest", "int8"),), "-wide", 2),
        _cuda_int8(
            "sm_80",
            (
                Buffer("K block", "key_block", "d", "int8"),
                Buffer("V block", "key_block", "dv", "int8"),
            ),
        ),
        _cuda_int8(
            "sm_80",
            (
                Buffer("K block, then P", "key_block", "d", "int8"),
                Buffer("V block", "key_block", "dv", "int8"),
            ),
            "-wide",
            2,
        ),
        _cuda_int8("sm_80", (Buffer("K block", "key_block", "d", "int8"), *_FLOAT_VALUES), "-fp32"),
        _cuda_int8(
            "sm_80",
            (Buffer("K block, then P", "key_block", "widest", "int8"), *_FLOAT_VALUES),
            "-fp32-wide",
            2,
        ),
        _hopper_int8(4),
        _hopper_int8(2, "-wide"),
        Tiling(
            "sm_80-float32",
            "cuda",
            "sm_80",
            "float32",
            1,
            1,
            1,
            4,
            1,
            (),
            "a warp per row, all in registers",
            head_dims=CUDA_HEAD_DIMS,
        ),
    )
}
