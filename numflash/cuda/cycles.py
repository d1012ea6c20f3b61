"""`python -m numflash.cuda.cycles`: what a kernel's main loop allows, from its machine code.

One warp's pass through the loop takes at least as many cycles of its quarter of a multiprocessor as
it has instructions (one is issued per cycle), 8 for each MUFU (4 lanes per cycle), and the time of
its products on the tensor core. The largest of the three is the limit when other warps fill every
wait; memory and latency are left out, so a card can only be slower. So are instructions that a
branch skips: what hides keys at the edges of a mask, what INT8 does where a row's octave rose.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..errors import UnsupportedError
from ..tiling import CUDA_SHARED_KEYS, KEY_BLOCK, cuda_tiling
from . import launch_backward, launch_backward_hopper
from .compile import Key, compiled, sass

QUARTERS = 4  # of a multiprocessor, each with a scheduler and a tensor core
MUFU_CYCLES = 8
WARP_ROWS = 16  # of a wgmma's 64


class Card(NamedTuple):
    """A card of an architecture: float16 multiplications per cycle and quarter; INT8 has twice.

    `warp` is for mma.sync, `group` for wgmma. Sources: NVIDIA's whitepapers; on Hopper mma.sync
    reaches 0.62 of wgmma's rate (Luo et al. 2024, "Dissecting the NVIDIA Hopper architecture"), and
    sm_100 is taken to be as fast with it, for which there is no published figure.
    """

    name: str
    multiprocessors: int
    gigahertz: float
    warp: float
    group: float = 0.0


CARDS = {
    "sm_80": Card("A100 SXM", 108, 1.41, 256),
    "sm_89": Card("L4", 58, 2.04, 128),
    "sm_90a": Card("H100 SXM", 132, 1.83, 0.62 * 512, 512),
    "sm_100": Card("B200", 148, 1.85, 0.62 * 512),
}


class Cycles(NamedTuple):
    """Of one warp and one pass through the main loop (a tile of keys)."""

    issue: int
    mufu: int
    tensor: float
    operations: int

    @property
    def limit(self) -> float:
        """The largest of the three."""
        return max(self.issue, self.mufu, self.tensor)

    def teraflops(self, card: Card) -> float:
        """Multiplications and additions of the products per second, in 1e12."""
        per_cycle = self.operations / self.limit * QUARTERS * card.multiprocessors
        return per_cycle * card.gigahertz / 1e3


def _products(loop: list[tuple[str, str]]) -> Iterator[tuple[str, int]]:
    """(opcode, multiplications of one warp) of each tensor-core instruction."""
    for opcode, operands in loop:
        if opcode.startswith(("HGMMA", "IGMMA")):
            n, k = re.match(r"x(\d+)x(\d+)", operands).groups()  # type: ignore[union-attr]
            yield opcode, WARP_ROWS * int(n) * int(k)
        elif opcode.startswith(("HMMA", "IMMA")):
            shape = opcode.split(".")[1]
            m = 8 if shape.startswith("88") else 16
            yield opcode, m * 8 * int(shape[len(str(m)) + 1 :])


def _weight(loop: list[tuple[str, str]]) -> int:
    return sum(n for _, n in _products(loop))


def main_loop(code: list[tuple[str, str]], products: int = 0) -> list[tuple[str, str]]:
    """The loop over tiles: the shortest with so many multiplications of a warp.

    Where their number is not known (0): of the loops with exponentials the one where products are
    densest. A wait that is placed behind the kernel's end makes loops that are none.
    """
    found = [loop for loop in sass.loops(code) if _weight(loop)]
    if products:
        return min((x for x in found if _weight(x) == products), key=len)
    exponential = [x for x in found if any(opcode.startswith("MUFU") for opcode, _ in x)]
    return max(exponential, key=lambda loop: _weight(loop) / len(loop))


def common_path(loop: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The instructions of a loop without those between a forward branch and its label.

    A part that begins with a label or ends with a branch is one of two ways, and stays.
    """
    places = {operands: n for n, (opcode, operands) in enumerate(loop) if not opcode}
    skipped: set[int] = set()
    for n, (opcode, operands) in enumerate(loop):
        target = re.search(r"\.L\w+", operands) if opcode == "BRA" else None
        stop = places.get(target.group(), 0) if target else 0
        if stop > n + 1 and loop[n + 1][0] and loop[stop - 1][0] != "BRA":
            skipped.update(range(n + 1, stop))
    return [x for n, x in enumerate(loop) if x[0] and n not in skipped]


def cycles(cubin: bytes, card: Card, products: int = 0) -> Cycles:
    """The main loop of a cubin, which has so many multiplications of a warp (0: not known)."""
    loop = common_path(main_loop(sass.instructions(cubin), products))
    mufu = sum(opcode.startswith("MUFU") for opcode, _ in loop)
    tensor = 0.0
    for opcode, n in _products(loop):
        rate = card.group if "GMMA" in opcode else card.warp
        rate *= 2 if opcode.startswith("I") else 0.5 if "TF32" in opcode else 1
        tensor += n / rate
    return Cycles(len(loop), MUFU_CYCLES * mufu, tensor, 2 * _weight(loop))


class Row(NamedTuple):
    """A kernel of the table, and the multiplications of a warp and tile where they are known."""

    name: str
    kernel: Key
    products: int

    def cycles(self) -> Cycles:
        """Compile the kernel, or find it in the cache, and read its main loop."""
        factory, arch, constants = self.kernel
        code = compiled(factory, arch, "cubin", **dict(constants)).code
        return cycles(code, CARDS[arch], self.products)


def kernels(arch: str) -> Iterator[Row]:
    """The rows: what ships for float16 and INT8, full attention.

    Decoding is left out: the memory limits it.
    """
    from .kernels.backward import flash_backward
    from .kernels.backward_hopper import backward_hopper
    from .kernels.flash_float import flash_float
    from .kernels.flash_hopper import flash_hopper
    from .kernels.flash_int8 import flash_int8
    from .kernels.flash_int8_hopper import flash_int8_hopper
    from .launch_int8 import hopper_tiling

    def row(name: str, factory: Any, products: int = 0, **constants: Any) -> Row:
        return Row(name, (factory, arch, tuple(sorted(constants.items()))), products)

    hopper = arch == "sm_90a"
    older = "sm_80"
    for d in (64, 128, 256):
        size = {"d": d, "dv": d}
        block_k = cuda_tiling(older, "float16", d).key_block
        tile = 2 * WARP_ROWS * d * block_k
        if hopper:
            kinds = [(False, 1), (True, 1)] + [(False, 2)] * (d >= CUDA_SHARED_KEYS)
            for band, cluster in kinds:
                t = cuda_tiling(arch, "float16", d, d, True, band)
                pairs = {"overlap": True, "ping_pong": d <= 128, "band": band, "cluster": cluster}
                kind = ", causal" if band else ", clusters" if cluster > 1 else ""
                name = f"float16 forward, D={d}{kind}"
                tile = 2 * WARP_ROWS * d * t.key_block
                copies = t.buffers[0].copies
                blocks = {"block_q": t.block_q, "block_k": t.key_block, "queries": copies}
                yield row(name, flash_hopper, tile, **size, **blocks, **pairs)
        else:
            yield row(
                f"float16 forward, D={d}", flash_float, tile, **size, block_q=64, block_k=block_k
            )
        tiling = cuda_tiling(older, "int8", d, d)
        halves = tiling.key_block // (tiling.nv * tiling.lanes)
        tile = 2 * WARP_ROWS * d * KEY_BLOCK // (1 if hopper else halves)
        if hopper:
            block_q = hopper_tiling(d, d, {}).block_q
            yield row(f"INT8 forward, D={d}", flash_int8_hopper, tile, **size, block_q=block_q)
        else:
            yield row(f"INT8 forward, D={d}", flash_int8, tile, **size, block_q=64, halves=halves)
    for d in (64, 128):
        for gradients in launch_backward.passes(d, d):
            name = f"float16 backward, d{' and d'.join(gradients.upper())}, D={d}"
            if hopper:
                shape = launch_backward_hopper.shape_of(gradients, "float16", d)
                tile = (2 + len(gradients)) * WARP_ROWS * d * shape["columns"]
                yield row(name, backward_hopper, tile, gradients=gradients, **shape)
            else:
                size = {"d": d, "dv": d, **launch_backward.shape_of(gradients, d, d, arch)}
                yield row(name, flash_backward, gradients=gradients, turing=False, **size)


def line(name: str, arch: str, found: Cycles) -> str:
    """A row of the table."""
    numbers = f"{found.issue} | {found.mufu} | {found.tensor:.0f}"
    return f"| {name} | {arch} | {numbers} | {found.teraflops(CARDS[arch]):.0f} |"


def rows(arch: str) -> Iterator[str]:
    """The table's rows of an architecture."""
    for row in kernels(arch):
        yield line(row.name, arch, row.cycles())


HEAD = """\
| kernel | architecture | issue | MUFU | tensor | TFLOP/s allowed |
|---|---|---|---|---|---|"""


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m numflash.cuda.cycles", description=__doc__.split("\n")[0]
    )
    words = "architectures (default: all of these)"
    parser.add_argument("--arch", choices=CARDS, nargs="+", default=list(CARDS), help=words)
    chosen = parser.parse_args(arguments).arch
    head: tuple[str, ...] = (HEAD,)
    try:
        for arch in chosen:
            for row in rows(arch):
                print(*head, row, sep="\n", flush=True)
                head = ()
    except UnsupportedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
