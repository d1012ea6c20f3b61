"""Another tiling than the named one, for a block of code.

    with numflash.tiling.using(block_q=96) as t:
        numflash.attention(q, k, v, precision="int8")

Kernels are compiled for their register tile, so another one is another instruction set to them: its
name carries the tile (`"avx512_vnni:8x2"`), and everything that is made for that name (packing,
products, the fused kernel) has its sizes. `legal` has the rules; INT8 results have the same bits
under every tiling that it lets pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ArgumentError
from .named import TILINGS
from .override import CHOSEN
from .rules import changeable, changed
from .sizes import Tiling
from .tuned import saved


@contextmanager
def using(isa: str | Tiling | None = None, dtype: str = "int8", **changes: int) -> Iterator[Tiling]:
    """Calls in this block of code use another tiling.

    Parameters
    ----------
    isa : str, Tiling or None
        Instruction set, None for the one that this machine's INT8 kernels use; or a whole tiling.
    dtype : "int8", "float32" or "bfloat16"
        The operands of the kernels that change.
    changes : mr, nv, block_q, key_block
        New sizes. `mr` x `nv` vectors is the register tile, `block_q` the query rows of a tile;
        `key_block`, the keys of a block, can change in float kernels only. Of a new register tile
        they follow as near to the named sizes as whole tiles are.

    Yields the tiling. Only calls of this thread (and of this `contextvars` context) change, and the
    first one compiles its kernel. INT8 results keep their bits; float results change by rounding.

    Raises
    ------
    ArgumentError
        If no kernel can be made for it, with the rule that it breaks.
    UnsupportedError
        If the kernels have fixed sizes.
    """
    if isinstance(isa, Tiling):
        t = changed(isa, changes)
    else:
        if isa is None:
            from ..jit.target import ISAS, available

            if dtype != "int8":
                raise ArgumentError(
                    f"isa: needed with dtype {dtype!r}; allowed: as in {changeable()}"
                )
            isa = available(ISAS)[0]
        name = isa if isinstance(isa, str) and isa in TILINGS else f"{isa}-{dtype}"
        if name not in TILINGS:
            raise ArgumentError(f"tiling: got {name!r}; allowed: {', '.join(changeable())}")
        t = changed(TILINGS[name], changes)
    token = CHOSEN.set({**CHOSEN.get(), (t.isa, t.dtype): t})
    try:
        yield t
    finally:
        CHOSEN.reset(token)


def in_use(isa: str, dtype: str = "int8") -> Tiling:
    """The tiling that the next call takes.

    `using`'s, this machine's (`saved`), or the named one.
    """
    return (
        CHOSEN.get().get((isa, dtype)) or saved().get(f"{isa}-{dtype}") or TILINGS[f"{isa}-{dtype}"]
    )


def _with_tile(t: Tiling, named: Tiling) -> str:
    """An instruction set as kernels call it: with the register tile where that is not the named one's."""
    return t.isa if (t.mr, t.nv) == (named.mr, named.nv) else f"{t.isa}:{t.mr}x{t.nv}"


def chosen_float(isa: str, dtype: str) -> tuple[str, tuple[int, ...], int]:
    """For the float kernels of an instruction set: its name with the register tile in use,
    (key_block,) where that or the tile is not the named tiling's, and block_q.
    """
    t, named = in_use(isa, dtype), TILINGS[f"{isa}-{dtype}"]
    name = _with_tile(t, named)
    same = name == isa and t.key_block == named.key_block
    return name, () if same else (t.key_block,), t.block_q


def chosen(isa: str) -> tuple[str, tuple[int, ...]]:
    """For the INT8 kernels of an instruction set: its name with the register tile in use, and
    (block_q,) where that is not the named tiling's.
    """
    if isa == "portable":
        return isa, ()
    t, named = in_use(isa), TILINGS[f"{isa}-int8"]
    if t is named:
        return isa, ()
    name = _with_tile(t, named)
    return name, () if name == isa and t.block_q == named.block_q else (t.block_q,)
