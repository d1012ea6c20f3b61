"""Every shipped CUDA kernel but INT8's forward ones, on every architecture.

What `python tests/cuda/sass_table.py` prints.

A row per kernel and set of options: registers, bytes of stack, spilled words. `variants` is what
the tests go through.
"""

import itertools
import sys

from numflash.cuda import launch_backward, launch_backward_hopper
from numflash.cuda.compile import ARCHITECTURES, compiled, sass
from numflash.cuda.kernels.backward import flash_backward
from numflash.cuda.kernels.backward_float32 import backward_float32
from numflash.cuda.kernels.backward_hopper import backward_hopper
from numflash.cuda.kernels.backward_rows import backward_rows
from numflash.cuda.kernels.decode_append import decode_append
from numflash.cuda.kernels.decode_combine import decode_combine
from numflash.cuda.kernels.decode_float import decode_float
from numflash.cuda.kernels.decode_int8 import decode_int8
from numflash.cuda.kernels.flash_float import flash_float
from numflash.cuda.kernels.flash_float32 import flash_float32
from numflash.cuda.kernels.flash_hopper import flash_hopper
from numflash.cuda.kernels.int8_quantize import int8_quantize
from numflash.cuda.kernels.int8_results import int8_results
from numflash.cuda.kernels.int8_statistics import int8_statistics
from numflash.tiling import CUDA_HEAD_DIMS, cuda_tiling

PLAIN = {}
MASKED = {"band": True, "group": 4, "mask": "bool"}
ALL = {"band": True, "group": 4, "mask": "float", "softcap": True, "alibi": True}
FLOAT32 = {"group": 4, "mask": True, "bias": True, "softcap": True, "alibi": True}
CHANNELS = (64, 128, 256)  # of INT8 keys, and of Hopper's tiles


def hopper_tile(d, options):
    """Constants of Hopper's float kernel for d channels: the tile that ships with these options."""
    plain = not any(options.get(x) for x in ("mask", "softcap", "alibi", "functions"))
    t = cuda_tiling("sm_90a", "float16", d, d, plain, options.get("band", False))
    tile = {"block_q": t.block_q, "block_k": t.key_block, "queries": t.buffers[0].copies}
    return {"d": d, "dv": d, **tile}


def variants(arch):
    """(factory, constants) of each kernel that `arch` may run."""
    turing = arch == "sm_75"
    hopper = arch == "sm_90a"
    dtypes = ("float16",) if turing else ("float16", "bfloat16")
    for d, dtype, options in itertools.product(
        CUDA_HEAD_DIMS, dtypes, (PLAIN, MASKED, {**ALL, "sinks": True})
    ):
        if dtype == "float16" or options:
            key_block = cuda_tiling("sm_75" if turing else "sm_80", dtype, d).key_block
            yield (
                flash_float,
                {
                    "d": d,
                    "dv": d,
                    "block_q": 64,
                    "block_k": key_block,
                    "dtype": dtype,
                    "turing": turing,
                    **options,
                },
            )
    if hopper:
        heads = {"group": 4, "packed": 4}
        sets = (
            PLAIN,
            {"band": True, "sinks": True, **heads},
            {**MASKED, **heads},
            {**ALL, **heads, "sinks": True},
        )
        for d, dtype, options, overlap in itertools.product(CHANNELS, dtypes, sets, (True, False)):
            yield (
                flash_hopper,
                {
                    **hopper_tile(d, options),
                    "dtype": dtype,
                    "overlap": overlap,
                    "ping_pong": d <= 128,
                    **options,
                },
            )
        for dtype in dtypes:
            yield flash_hopper, {**hopper_tile(256, PLAIN), "dtype": dtype, "cluster": 2}
        for d, dtype, which, band in itertools.product(
            (64, 128), dtypes, ("kv", "q"), (False, True)
        ):
            shape = launch_backward_hopper.shape_of(which, dtype, d)
            options = {"dtype": dtype, "band": True, "group": 4} if band else {"dtype": dtype}
            yield backward_hopper, {"gradients": which, **shape, **options}
    for d, dtype, options in itertools.product(
        CUDA_HEAD_DIMS, dtypes, (PLAIN, MASKED, {**MASKED, "mask": "float"}, ALL)
    ):
        for gradients in (
            launch_backward.passes(d, d) if dtype == "float16" or options == ALL else ()
        ):
            shape = launch_backward.shape_of(gradients, d, d, arch, "mask" in options)
            yield (
                flash_backward,
                {
                    "gradients": gradients,
                    "d": d,
                    "dv": d,
                    "dtype": dtype,
                    "turing": turing,
                    **shape,
                    **options,
                },
            )
    for d, options in itertools.product(CUDA_HEAD_DIMS, (PLAIN, FLOAT32)):
        yield flash_float32, {"d": d, "dv": d, **options, **({"sinks": True} if options else {})}
        for gradients in ("kv", "q"):
            yield backward_float32, {"gradients": gradients, "d": d, "dv": d, **options}
    for d, dtype in itertools.product(CUDA_HEAD_DIMS, dtypes):
        yield backward_rows, {"dv": d, "dtype": dtype}
    caches = ({}, {"direct": False, "paged": True}, {"ring": True, "paged": True})
    for d, rows, options in itertools.product(CUDA_HEAD_DIMS, (1, 2), (*caches, {"unified": True})):
        if rows == 1 or (d <= 128 and "unified" not in options):
            yield (
                decode_float,
                {
                    "d": d,
                    "dv": d,
                    "row_tiles": rows,
                    "dtype": dtypes[-1],
                    "turing": turing,
                    **options,
                },
            )
    for d, rows, options in itertools.product(CHANNELS, (4, 8, 16, 32), caches):
        if rows == 32 and d == 256:
            continue
        changes = ({},) if rows == 32 else ({}, {"changed": True})
        # a T4's shared memory does not hold bytes of 256 channels
        storages = (True,) if turing and d == 256 else (False, True)
        for packed, changed in itertools.product(storages, changes):
            sizes = {"d": d, "dv": d, "tile_rows": rows, "packed": packed}
            yield decode_int8, {**sizes, "turing": turing, **options, **changed}
    for d, dtype in itertools.product((64, 128, 256), (*dtypes, "int8", "int4")):
        yield (
            decode_append,
            {
                "d": d,
                "dv": d,
                "source": "float32",
                "dtype": dtype,
                "paged": True,
                "smooth": True,
                "turing": turing,
            },
        )
    for d, dtype in itertools.product(CHANNELS, ("float32", "bfloat16")):
        yield int8_statistics, {"d": d, "dv": d, "source": dtype}
        sizes = {"d": d, "dv": d, "smooth": True}
        yield int8_quantize, {**sizes, "width": d, "source": dtype}
        yield int8_results, {**sizes, "dtype": dtype, "sinks": True}
    for d, exact in itertools.product(CUDA_HEAD_DIMS, (False, True)):
        turned = {"turned": d} if exact else {}
        yield decode_combine, {"dv": d, "tile_rows": 16, "exact": exact, **turned}


def found(factory, arch, constants):
    """What ptxas made of a kernel."""
    return sass.resources(compiled(factory, arch, "cubin", **constants).code)


def main(architectures):
    """Print the table for the architectures, rows with a stack last and marked."""
    for arch in architectures or ARCHITECTURES:
        for factory, constants in variants(arch):
            item = found(factory, arch, constants)
            shown = " ".join(
                f"{k}={v}" for k, v in constants.items() if v is not False and k != "dv"
            )
            print(
                f"{'STACK' if item.stack else '     '} {arch:7}{factory.__name__:17} {item.registers:4} {item.stack:4} "
                f"{item.count('LDL') + item.count('STL'):4}  {shown}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
