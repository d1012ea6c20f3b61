"""Who waits for what, in words: the report of a deadlock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from .parse import Instruction

if TYPE_CHECKING:
    from .machine import Group, Machine


def described(m: Machine, block: int) -> str:
    """The waits of a block's warps, each with its line and with what is missing for it to end."""
    found: dict[str, set[int]] = {}
    for g in m.groups:
        mask = g.mask & (m.block_of == block)
        for what, lanes in _of_group(m, g, mask, block) if mask.any() else ():
            found.setdefault(what, set()).update((m.warp[lanes] % m.warps_per_block).tolist())
    return "; ".join(
        _warps(sorted(warps)) + what
        for what, warps in sorted(found.items(), key=lambda x: min(x[1]))
    )


def _of_group(
    m: Machine, g: Group, mask: np.ndarray, block: int
) -> Iterator[tuple[str, np.ndarray]]:
    """(what these threads wait for, the threads)."""
    if g.wait[0] == "barrier":
        name, last = g.wait[1], m.program.code[g.pc - 1]  # the group is behind it
        state = m.barriers[block, name]
        alive = int((m.alive & (m.block_of == block)).sum())
        missing = -(-(state.expected or alive) // 32) - len(state.warps)
        yield f" at {_line(last)} at barrier {name} (warps missing: {missing})", np.nonzero(mask)[0]
        return
    i = m.program.code[g.pc]
    if g.wait[0] == "barrier.cluster":
        yield f" at {_line(i)} for the other blocks of the cluster", np.nonzero(mask)[0]
        return
    lanes = np.nonzero(mask)[0]
    base, offset = m.address(i.operands[1], "u32")
    address = np.broadcast_to(base, m.n)[lanes].astype(np.int64) + offset
    parity = np.broadcast_to(m.value(i.operands[2], "u32"), m.n)[lanes]
    for at, p in sorted(set(zip(address.tolist(), parity.tolist(), strict=True))):
        bar = m.copies.barriers[block, at]
        counts = {"arrivals": bar.missing, "bytes": bar.expected}
        lacks = ", ".join(f"{name} missing: {n}" for name, n in counts.items() if n)
        yield (
            f" at {_line(i)} for parity {p} of the mbarrier at shared byte {at - 1024} ({lacks})",
            lanes[(address == at) & (parity == p)],
        )


def _line(i: Instruction) -> str:
    return f"line {i.source[1]}" if i.source else f"PTX line {i.line}"


def _warps(numbers: list[int]) -> str:
    """As "warp 2", or "warps 0-1, 3"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    shown = ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)
    return ("warps " if len(numbers) > 1 else "warp ") + shown
