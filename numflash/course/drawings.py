"""The moving pictures of the chapters, as `Frames`.

What `movable` names can be changed with sliders in Jupyter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .moving import BLUE, GREY, ORANGE, RED, SKY, YELLOW, Frames, box, grid, movable, text

WHITE, MIDDLE = "white", "#7FBCE0"


@movable(length=(4, 6, 8), keys=(4, 6, 8), d=(2, 3, 4))
def shapes(length: int = 8, keys: int = 8, d: int = 4) -> Frames:
    """Q, K, S, P, V and O of one head, one step of the definition per frame."""
    cell = 16

    def matrix(x: float, y: float, rows: int, columns: int, fill: str, label: str) -> str:
        return grid(x, y, cell, [[fill] * columns] * rows, label)

    q = matrix(10, 30, length, d, SKY, "Q: L x D")
    k = matrix(100, 30, keys, d, YELLOW, "K: S x D")
    s = matrix(190, 30, length, keys, ORANGE, "S = Q K^T: L x S")
    p = matrix(345, 30, length, keys, RED, "P = softmax(S)")
    v = matrix(500, 30, keys, d, YELLOW, "V: S x D")
    o = matrix(590, 30, length, d, SKY, "O = P V: L x D")
    return Frames(
        [
            (q + k + v, "The inputs: a row of Q per query, a row of K and of V per key."),
            (q + k + v + s, "Every query row meets every key row: one score each."),
            (q + k + v + s + p, "Softmax turns each row of scores into weights that sum to one."),
            (q + k + v + s + p + o, "Each output row is the weighted mean of the rows of V."),
        ],
        670,
        170,
        2.0,
    )


@movable(block_q=(1, 2, 4, 8), block_k=(1, 2, 4, 8))
def sweep(rows: int = 8, keys: int = 8, block_q: int = 4, block_k: int = 4) -> Frames:
    """The order in which a row by row kernel and a tiled one compute S, and what each reads from
    memory.
    """
    cell, frames = 18, []
    tiles = [(r, c) for r in range(0, rows, block_q) for c in range(0, keys, block_k)]
    per_tile = block_q * block_k
    whole = keys * rows  # rows of K that the row by row kernel reads in all
    for n, (r, c) in enumerate(tiles):
        done = (n + 1) * per_tile
        naive = [[SKY if i * keys + j < done else WHITE for j in range(keys)] for i in range(rows)]
        tiled = [[WHITE] * keys for _ in range(rows)]
        for tr, tc in tiles[: n + 1]:
            now = (tr, tc) == (r, c)
            for i in range(tr, tr + block_q):
                for j in range(tc, tc + block_k):
                    tiled[i][j] = ORANGE if now else SKY
        by_tile = (n + 1) * block_k
        drawing = grid(20, 40, cell, naive, "row by row")
        drawing += grid(260, 40, cell, tiled, f"tiles of {block_q} x {block_k}")
        for x, came in ((20, done), (260, by_tile)):
            drawing += box(x, 200, 140 * came / whole, 14, BLUE)
            drawing += text(x, 232, f"{came} rows of K read")
        frames.append((drawing, f"{done} of {rows * keys} scores are done."))
    return Frames(frames, 460, 240, 1.5 if len(frames) < 9 else 0.4)


@movable(
    scores=((1, 2, 3, 4, 5, 6), (6, 5, 4, 3, 2, 1), (2, 2, 2, 2, 2, 2), (1, 1, 9, 1, 1, 1)),
    block=(1, 2, 3, 6),
)
def online_softmax(scores: Sequence[float], block: int = 1) -> Frames:
    """The state (m, l) as scores arrive, `block` at a time; weights are powers of two."""
    frames, m, l = [], -np.inf, 0.0
    top, width = max(scores) + 1, 60
    for first in range(0, len(scores), block):
        came = scores[first : first + block]
        new = max(m, *came)
        shrink = 2.0 ** (m - new)
        l = l * shrink + sum(2.0 ** (s - new) for s in came)
        grown, m = new > m, new
        drawing = text(10, 16, "score") + text(10, 190, "weight, relative to m")
        for j, x in enumerate(scores[: first + len(came)]):
            height = 150 * x / top
            colour = ORANGE if j >= first else SKY
            drawing += box(40 + j * width, 170 - height, 40, height, colour, f"{x:g}")
            weight = 2.0 ** (x - m)
            drawing += box(40 + j * width, 250 - 50 * weight, 40, 50 * weight, BLUE)
            drawing += text(60 + j * width, 265, f"{weight:.3g}", 11, "middle")
        drawing += (
            f'<line x1="30" x2="{40 + len(scores) * width}" y1="{170 - 150 * m / top:g}" '
            f'y2="{170 - 150 * m / top:g}" stroke="{RED}" stroke-width="2" stroke-dasharray="5 3"/>'
        )
        x = 60 + len(scores) * width
        drawing += text(x, 60, f"m = {m:g}", 15) + text(x, 85, f"shrink = {shrink:.3g}", 15)
        drawing += text(x, 110, f"l = {l:.4g}", 15)
        words = "score " + ", ".join(f"{s:g}" for s in came) + ": "
        if not first:
            words += "nothing was summed before"
        elif grown:
            words += f"a new maximum, so what was summed shrinks by {shrink:.3g}"
        else:
            words += "the maximum stays; add the weight"
        frames.append((drawing, words))
    return Frames(frames, 90 + len(scores) * width + 110, 272, 1.8)


@movable(
    d=(32, 64, 128, 256),
    block_k=(16, 32, 64, 128, 256),
    cache_kib=(16, 32, 48, 64, 128, 256, 512, 1024, 2048),
)
def tile_against_cache(d: int, block_k: int, cache_kib: int, sizes: Sequence[int]) -> Frames:
    """Working set of a float32 tile of each size of block_q against a cache of `cache_kib` KiB."""
    frames, cache = [], 1024 * cache_kib
    colours = {"K, V": YELLOW, "Q, O": SKY, "scores": ORANGE, "m, l": GREY}
    for block_q in sizes:
        parts = {
            "K, V": 8 * block_k * d,
            "Q, O": 8 * block_q * d,
            "scores": 4 * block_q * block_k,
            "m, l": 8 * block_q,
        }
        total, x, drawing = sum(parts.values()), 20.0, ""
        scale = min(300 / cache, 600 / total)  # the whole tile stays in the picture
        for name, nbytes in parts.items():
            wide = nbytes * scale
            drawing += box(x, 40, wide, 40, colours[name], name if wide > 40 else "")
            x += wide
        end = 20 + cache * scale
        drawing += (
            f'<line x1="{end:g}" x2="{end:g}" y1="20" y2="100" stroke="{RED}" stroke-width="2"/>'
            + text(end, 16, f"cache: {cache_kib} KiB", anchor="middle")
            + text(20, 110, f"K and V come from memory once per {block_q} rows")
        )
        fits = "fits" if total <= cache else "does not fit: the rest comes from the next cache"
        frames.append((drawing, f"block_q = {block_q}: {total / 1024:.1f} KiB, {fits}"))
    return Frames(frames, 640, 120, 1.5)


@movable(mr=(1, 2, 4, 6, 8), nv=(1, 2, 4), registers=(16, 32))
def register_tile(mr: int = 6, nv: int = 4, registers: int = 32) -> Frames:
    """One step of a register tile: its loads and its dots, and the registers that they take."""
    w, h, x0, y0 = 62, 26, 150, 60
    held = [(BLUE, "of sums", mr * nv), (YELLOW, "of K", nv), (ORANGE, "for the word of Q", 1)]
    need = sum(n for _, _, n in held)
    kinds = ", ".join(f"{n} {name}" for _, name, n in held)
    strip, at = (
        text(10, y0 + mr * h + 34, f"{need} of {registers} vector registers: {kinds}"),
        0,
    )
    for colour, _, n in held:
        for _ in range(n):
            strip += box(10 + 14 * at, y0 + mr * h + 42, 12, 16, colour)
            at += 1
    end = 9 + 14 * registers
    strip += (
        f'<line x1="{end}" x2="{end}" y1="{y0 + mr * h + 36}" y2="{y0 + mr * h + 64}" '
        f'stroke="{RED}" stroke-width="2"/>'
    )
    frames = []
    for row in range(-1, mr):
        drawing = strip + text(x0, 20, f"{nv} vectors of K: 16 keys each, the same channels")
        for n in range(nv):
            drawing += box(x0 + n * w, 28, w - 4, h - 4, YELLOW, f"K{n}")
        for i in range(mr):
            drawing += box(
                40, y0 + i * h, 90, h - 4, ORANGE if i == row else WHITE, f"row {i} of Q"
            )
            for n in range(nv):
                fill = MIDDLE if i == row else SKY if i < row else WHITE
                drawing += box(x0 + n * w, y0 + i * h, w - 4, h - 4, fill, f"s{i},{n}")
        words = f"load {nv} vectors of K: they stay in registers for this step"
        if row >= 0:
            words = f"load one word of row {row} into all lanes: {nv} dots, each into its own sum"
        frames.append((drawing, words))
    loads = f"{mr + nv} loads for {mr * nv} dots, {(mr + nv) / (mr * nv):.2f} loads per dot"
    spill = "; the sums beyond the line are kept in memory" if need > registers else ""
    frames.append((frames[-1][0], f"the step is done: {loads}{spill}"))
    return Frames(frames, max(560, x0 + nv * w, 20 + 14 * need), y0 + mr * h + 70, 1.2)


@movable(blocks=(2, 3, 4, 5))
def fused_against_unfused(blocks: int = 3) -> Frames:
    """Which arrays exist when: scores and weights of `blocks` key blocks, fused and not."""
    parts = ("scores", "softmax", "merge", "values")
    unfused = [(part, b) for part in parts for b in range(blocks)]
    fused = [(part, b) for b in range(blocks) for part in parts]
    frames, step = [], 270 / blocks
    most = {"unfused": 0, "fused": 0}
    for n, (left, right) in enumerate(zip(unfused, fused, strict=True)):
        drawing = ""
        for x, order, (part, block), name in (
            (20, unfused, left, "unfused"),
            (340, fused, right, "fused"),
        ):
            drawing += text(x, 16, name, 14)
            alive = 0
            for b in range(blocks):
                done = {p for p, c in order[: n + 1] if c == b}
                held = ("scores" in done and "values" not in done) or (part, block) == ("values", b)
                alive += held
                colour = ORANGE if b == block else SKY if held else WHITE
                drawing += box(x + step * b, 30, step - 10, 50, colour, "S, P held" if held else "")
                drawing += text(x + step * b + step / 2 - 5, 98, f"key block {b}", 11, "middle")
            drawing += text(x, 125, f"now: {part} of block {block}")
            most[name] = max(most[name], alive)
            drawing += text(x, 145, f"blocks held: {alive}, at most so far {most[name]}")
        words = f"step {n + 1}: unfused does the {left[0]} of block {left[1]}, "
        frames.append((drawing, words + f"fused the {right[0]} of block {right[1]}"))
    return Frames(frames, 640, 155, 1.2)


@movable(stages=(1, 2, 3, 4), copy=(1, 2, 3), work=(1, 2, 3))
def ring_of_stages(stages: int = 2, copy: int = 2, work: int = 2, tiles: int = 5) -> Frames:
    """A producer and its consumers with a ring of shared-memory stages: who waits for which phase.

    copy, work : time that a tile takes to come, and to be multiplied
    """
    came: list[int] = []  # when each tile is there
    done: list[int] = []  # when it is used up
    starts: list[tuple[int, int]] = []  # of its copy and of its use
    for n in range(tiles):
        fetch = max(came[-1] if came else 0, done[n - stages] if n >= stages else 0)
        came.append(fetch + copy)
        use = max(came[n], done[-1] if done else 0)
        done.append(use + work)
        starts.append((fetch, use))
    end, x0 = done[-1], 150
    unit = 480 / end
    bars = text(10, 158, "producer (TMA)") + text(10, 184, "consumers (wgmma)")
    for n, (fetch, use) in enumerate(starts):
        bars += box(x0 + fetch * unit, 144, copy * unit, 20, ORANGE, f"{n}")
        bars += box(x0 + use * unit, 170, work * unit, 20, SKY, f"{n}")
    frames = []
    for now in range(end):
        drawing = bars
        for s in range(stages):
            fill, label = _stage_at(now, s, stages, starts, came, done)
            drawing += box(150 + 120 * s, 20, 110, 40, fill, label)
            drawing += text(205 + 120 * s, 76, f"stage {s}", 11, "middle")
        drawing += text(10, 100, _waits(now, "producer", starts, came, stages))
        drawing += text(10, 120, _waits(now, "consumers", starts, done, stages))
        x = x0 + (now + 0.5) * unit
        drawing += (
            f'<line x1="{x:g}" x2="{x:g}" y1="138" y2="196" stroke="{RED}" stroke-width="2"/>'
        )
        idle = end - tiles * work
        frames.append((drawing, f"time {now} of {end}; the consumers wait for {idle} in all"))
    return Frames(frames, 650, 200, 1.4)


def _stage_at(
    now: int,
    stage: int,
    stages: int,
    starts: Sequence[tuple[int, int]],
    came: Sequence[int],
    done: Sequence[int],
) -> tuple[str, str]:
    """(colour, label) of a stage of the ring at a time."""
    for n, (fetch, use) in enumerate(starts):
        if n % stages == stage and fetch <= now < done[n]:
            if now < came[n]:
                return ORANGE, f"tile {n} arrives"
            return (SKY, f"tile {n} in use") if now >= use else (YELLOW, f"tile {n} is full")
    return WHITE, "empty"


def _waits(
    now: int, who: str, starts: Sequence[tuple[int, int]], ends: Sequence[int], stages: int
) -> str:
    """What the producer or the consumers do at a time, and the parity of the wait."""
    side = 0 if who == "producer" else 1
    for n, begin in enumerate(starts):
        use = n // stages
        barrier, parity = ("full", use % 2) if side else ("empty", (use + 1) % 2)
        wait = f"{barrier} of stage {n % stages}, parity {parity}"
        if now < begin[side]:
            return f"{who}: WAIT for {wait} (tile {n})"
        if now < ends[n]:
            verb = "multiply" if side else "copies"
            return f"{who}: {verb} tile {n}, after {wait}"
    return f"{who}: done"


@movable(barrier=(False, True))
def race(barrier: bool = False) -> Frames:
    """Two warps write a word each and read the other's; warp 0 is fast. With and without a barrier."""
    old, new = ("0", GREY), ("new", SKY)
    if barrier:
        steps = [
            ("writes a", "-", new, old, "warp 0 is fast: it has written its word"),
            ("waits", "-", new, old, "at the barrier it waits for warp 1"),
            ("waits", "writes b", new, new, "warp 1 writes its word and comes to the barrier"),
            ("reads b: new", "reads a: new", new, new, "all have written, so all read what is new"),
        ]
    else:
        steps = [
            ("writes a", "-", new, old, "warp 0 is fast: it has written its word"),
            ("reads b: 0", "-", new, old, "it reads b before warp 1 has written it: the old value"),
            ("done", "writes b", new, new, "warp 1 writes too late"),
            (
                "done",
                "reads a: new",
                new,
                new,
                "in another run warp 1 is first, and the fault goes unnoticed",
            ),
        ]
    frames = []
    for n, (first, second, a, b, words) in enumerate(steps):
        drawing = text(10, 20, "with a barrier" if barrier else "without a barrier", 14)
        for x, name, does in ((10, "warp 0", first), (390, "warp 1", second)):
            wrong = does.endswith(": 0")
            drawing += text(x, 50, name) + box(x, 58, 130, 34, RED if wrong else ORANGE, does)
        drawing += text(170, 50, "shared memory")
        drawing += box(170, 58, 90, 34, a[1], f"a: {a[0]}") + box(
            270, 58, 90, 34, b[1], f"b: {b[0]}"
        )
        if barrier and n:
            drawing += text(170, 112, "barrier", 12)
        frames.append((drawing, words))
    return Frames(frames, 540, 120, 1.8)


@movable(ranks=(2, 3, 4, 5, 6))
def ring_of_ranks(ranks: int = 4) -> Frames:
    """Queries stay, keys are sent on: which block of keys each rank holds at each step."""
    colours = (SKY, ORANGE, YELLOW, GREY, BLUE, RED)
    frames = []
    for step in range(ranks):
        drawing = ""
        for r in range(ranks):
            owner = (r - step) % ranks
            x = 20 + 140 * r
            drawing += box(x, 30, 110, 34, colours[r % 6], f"rank {r}: Q{r}")
            drawing += box(x, 74, 110, 34, colours[owner % 6], f"K{owner}, V{owner}")
            seen = ", ".join(str((r - t) % ranks) for t in range(step + 1))
            drawing += text(x, 128, f"merged: {seen}", 11)
            drawing += text(x + 112, 96, "→", 18)
        frames.append(
            (drawing, f"step {step}: rank r holds the keys of rank r - {step} (modulo {ranks})")
        )
    return Frames(frames, 30 + 140 * ranks, 140, 1.8)
