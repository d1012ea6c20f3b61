"""What the AArch64 kernels cost: instructions by the emulator at three vector lengths, cycles by llvm-mca's model.

    python -m tests.aarch64.costs [--cpu a64fx]

No hardware was measured. Instructions are exact. Cycles are llvm-mca's model of the straight line of instructions that the
emulator executed: its caches never miss, its branches are never wrong, and its front end hands out what the model says. Read
the ratios, not the figures.
"""
from __future__ import annotations

import argparse
import re
import shutil
import subprocess

import numpy as np
from numba import njit
from unicorn import UC_HOOK_CODE

from numflash import assembly, codegen
from numflash.cpu import microkernels, packing, portable
from numflash.cpu.isas import VECTOR_ISAS, lanes_of
from numflash.tiling import KEY_BLOCK

from .emulator import CODE, CODE_SIZE, Emulated

ROWS = 24
MCA = next((tool for tool in ("llvm-mca-22", "llvm-mca") if shutil.which(tool)), None)
RNG = np.random.default_rng(0)


def tile_block(isa: str, d: int):
    """Kernels of one key block and ROWS query rows: scores, softmax, values, as the fused kernel calls them."""
    score, value = microkernels.score_tile(isa, 6), microkernels.value_tile(isa, 6, VECTOR_ISAS[isa].nv)
    octaves, weights = microkernels.block_octaves(isa, KEY_BLOCK), microkernels.row_weights(isa, KEY_BLOCK)
    totals, vector_lanes, nv = microkernels.block_totals(isa), lanes_of(isa), VECTOR_ISAS[isa].nv

    @njit(error_model="numpy")
    def scores(q, k, start, ck, cq, x):
        panel = nv * vector_lanes()
        for c in range(0, KEY_BLOCK, panel):
            for i in range(0, ROWS, 6):
                score(q, i * d, d, k, c * d, d // 4, start, ck, c, cq, i, x, i * KEY_BLOCK + c, KEY_BLOCK)

    @njit(error_model="numpy")
    def softmax(x, octave, octave_q8, p, sums, total):
        lanes = vector_lanes()
        for i in range(0, ROWS, 8):
            octaves(x, i * KEY_BLOCK, KEY_BLOCK, octave, octave_q8, i)
        for i in range(ROWS):
            weights(x, i * KEY_BLOCK, octave_q8, i, p, i * KEY_BLOCK, sums, i * lanes)
        for i in range(0, ROWS, 8):
            totals(sums, total, i)

    @njit(error_model="numpy")
    def values(p, v, scale, total, o):
        panel = nv * vector_lanes()
        for t in range(0, d, panel):
            for i in range(0, ROWS, 6):
                value(p, i * KEY_BLOCK, KEY_BLOCK, v, t * KEY_BLOCK, KEY_BLOCK // 4, scale, total, i, o, i * d + t, d)
    return scores, softmax, values


def tile_parts(isa: str, cpu: str, bits: int, d: int) -> dict[str, tuple[Emulated, tuple]]:
    lanes = bits // 32
    q, k, v = (RNG.integers(-127, 128, (n, d)).astype(np.int8) for n in (ROWS, KEY_BLOCK, KEY_BLOCK))
    keys = packing.pack_keys(isa, k[None], np.ones((1, KEY_BLOCK), np.float32), lanes)
    floats, ints = np.zeros(ROWS, np.float32), np.zeros(ROWS, np.int32)
    x, p = RNG.integers(-3000, 0, (ROWS, KEY_BLOCK)).astype(np.int16), np.zeros((ROWS, KEY_BLOCK), np.uint8)
    scores, softmax, values = tile_block(isa, d)
    return {
        "scores": (Emulated(scores, "void(int8[:,::1], int8[::1], int32[::1], float32[::1], float32[::1], int16[:,::1])", cpu,
                            vector_bits=bits), (q, keys.data[0], keys.start[0], keys.scale[0], floats, x.copy())),
        "softmax": (Emulated(softmax, "void(int16[:,::1], int32[::1], int16[::1], uint8[:,::1], int32[::1], int32[::1])", cpu,
                             vector_bits=bits), (x, ints.copy(), np.zeros(ROWS, np.int16), p, np.zeros(ROWS * lanes, np.int32),
                                                 ints.copy())),
        "values": (Emulated(values, "void(uint8[:,::1], int8[::1], float32[::1], int32[::1], float32[:,::1])", cpu,
                            vector_bits=bits), (p, packing.pack_values(isa, v[None], lanes)[0], floats, ints,
                                                np.zeros((ROWS, d), np.float32))),
    }


def portable_parts(cpu: str, bits: int, d: int) -> dict[str, tuple[Emulated, tuple]]:
    q, k = (RNG.integers(-127, 128, (n, d)).astype(np.int8) for n in (ROWS, KEY_BLOCK))
    floats, signature = np.zeros(KEY_BLOCK, np.float32), {name: codegen.KERNELS[name].signature for name in codegen.KERNELS}
    weights, v = np.zeros((ROWS, KEY_BLOCK), np.int8), np.zeros((d, KEY_BLOCK), np.int8)
    return {
        "scores": (Emulated(portable.score_block, signature["portable-scores"], cpu, vector_bits=bits),
                   (q, k, floats, floats, np.zeros((ROWS, KEY_BLOCK), np.float32))),
        "softmax": (Emulated(portable.softmax_row, signature["portable-softmax"], cpu, vector_bits=bits),
                    (RNG.integers(-3000, 0, KEY_BLOCK).astype(np.int16), 0, weights[0].copy())),
        "values": (Emulated(portable.value_block, signature["portable-values"], cpu, vector_bits=bits),
                   (weights, v, floats, np.zeros((ROWS, d), np.float32))),
    }


def executed(part: Emulated, arguments: tuple) -> list[str]:
    """The instructions of one call, in the order they were executed, as text."""
    where: dict[int, str] = {}
    at = None
    for raw in part.code.assembly.splitlines():
        line = raw.split("//")[0].strip()
        name = line.rstrip(":").strip('"')
        aligned = re.match(r"\.p2align\s+(\d+)(?:,\s*,\s*(\d+))?", line)
        if line.endswith(":") and name in part.symbols:
            at = part.symbols[name][0]
        elif line.startswith(".Lfunc_end"):
            at = None
        elif at is not None and aligned:
            padding = -at % (1 << int(aligned[1]))
            at += padding if padding <= int(aligned[2] or padding) else 0
        elif at is not None and line and not line.startswith(".") and not line.endswith(":"):
            where[at] = line
            at += 4
    trace: list[int] = []
    hook = part._uc.hook_add(UC_HOOK_CODE, lambda uc, at, size, user: trace.append(at), begin=CODE, end=CODE + CODE_SIZE)
    part._uc.ctl_flush_tb()
    part(*arguments)
    part._uc.hook_del(hook)
    part._uc.ctl_flush_tb()
    return [where[at] for at in trace if at in where]                       # nops of alignment are not in the text


def dot_products(instructions) -> int:
    return sum(line.startswith("sdot ") for line in instructions)


def cycles(trace: list[str], cpu: str) -> float | None:
    """llvm-mca's cycles of the instructions in steady state; branches are left out."""
    if MCA is None:
        return None
    text = "\n".join(line for line in trace if not re.match(r"(b|b\.\w+|cbn?z|tbn?z|ret|bl)\s|ret$", line)) + "\n"
    total = []
    for n in (2, 4):
        done = subprocess.run([MCA, "-mtriple=aarch64", f"-mcpu={cpu}", f"-iterations={n}"], input=text, capture_output=True,
                              text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-500:])
        total.append(int(re.search(r"Total Cycles:\s+(\d+)", done.stdout).group(1)))       # type: ignore[union-attr]
    return (total[1] - total[0]) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", default="a64fx", choices=[c for c, t in codegen.TRIPLES.items() if t == codegen.AARCH64])
    parser.add_argument("--head-dim", type=int, default=128)
    cpu, d = (given := parser.parse_args()).cpu, given.head_dim
    isa = "neon_dot" if cpu == "neoverse-n1" else "sve"
    print(f"{cpu}, D = {d}, {ROWS} rows x {KEY_BLOCK} keys: instructions per 64 multiply-adds (softmax: per 16 scores)")
    print(f"{'kernel':10s} {'bits':>5s} {'scores':>8s} {'softmax':>8s} {'values':>8s}")
    macs, scores = ROWS * KEY_BLOCK * d / 64, ROWS * KEY_BLOCK / 16
    for bits in (128,) if isa == "neon_dot" else (128, 256, 512):
        for name, parts, rows in ((isa, tile_parts(isa, cpu, bits, d), ROWS), ("portable", portable_parts(cpu, bits, d), 1)):
            counts = {}
            for part, (emulated, arguments) in parts.items():
                emulated(*arguments, count=True)
                counts[part] = emulated.instructions / (scores * rows / ROWS if part == "softmax" else macs)
            print(f"{name:10s} {bits:5d} {counts['scores']:8.2f} {counts['softmax']:8.2f} {counts['values']:8.2f}")
    if MCA is None:
        print("llvm-mca is not installed: no cycles")
        return
    bits = {"neoverse-v1": 256, "a64fx": 512}.get(cpu, 128)
    print(f"\nllvm-mca's cycles at {bits} bits ({MCA}; two pipes: {256 / bits:.2f} per 64 multiply-adds at best, A64FX)")
    loop = tile_parts(isa, cpu, bits, d)["scores"][0]
    body = max((x.instructions for x in assembly.loops(loop.code.assembly)), key=lambda x: dot_products(x) / len(x))
    dots = dot_products(body)
    print(f"loop of the 6x4 tile: {cycles(list(body) * 20, cpu) / 20 / dots * 512 / bits:.3f}")        # type: ignore[operator]
    for dim in (64, 128):
        found = {part: cycles(executed(*call), cpu) for part, call in tile_parts(isa, cpu, bits, dim).items()}
        work = ROWS * KEY_BLOCK * dim / 64
        whole, best = sum(found.values()), 2 * work * 256 / bits                            # type: ignore[arg-type]
        print(f"whole tiles, D={dim}: scores {found['scores'] / work:.3f}, values {found['values'] / work:.3f}; "
              f"softmax {found['softmax'] / (ROWS * KEY_BLOCK / 16):.2f} per 16 scores; "
              f"not dot products: {100 * (1 - best / whole):.0f} % of the block")


if __name__ == "__main__":
    main()
