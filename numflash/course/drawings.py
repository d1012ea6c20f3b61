"""The moving pictures of the chapters, as `Frames`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .moving import BLUE, GREY, ORANGE, RED, SKY, YELLOW, Frames, box, grid, text

WHITE = "white"


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


def sweep(rows: int = 8, keys: int = 8, block_q: int = 4, block_k: int = 4) -> Frames:
    """The order in which a row by row kernel and a tiled one compute S, and what each reads from
    memory.
    """
    cell, frames = 18, []
    tiles = [(r, c) for r in range(0, rows, block_q) for c in range(0, keys, block_k)]
    per_tile = rows * keys // len(tiles)
    for n, (r, c) in enumerate(tiles):
        done = (n + 1) * per_tile // keys  # rows that the naive kernel finished in the same time
        naive = [[SKY if i < done else WHITE for _ in range(keys)] for i in range(rows)]
        tiled = [[WHITE] * keys for _ in range(rows)]
        for tr, tc in tiles[: n + 1]:
            now = (tr, tc) == (r, c)
            for i in range(tr, tr + block_q):
                for j in range(tc, tc + block_k):
                    tiled[i][j] = ORANGE if now else SKY
        by_row, by_tile = done * keys, (n + 1) * block_k
        drawing = grid(20, 40, cell, naive, "row by row")
        drawing += grid(260, 40, cell, tiled, f"tiles of {block_q} x {block_k}")
        drawing += box(20, 200, 2.2 * by_row, 14, BLUE) + text(20, 232, f"{by_row} rows of K read")
        drawing += box(260, 200, 2.2 * by_tile, 14, BLUE)
        drawing += text(260, 232, f"{by_tile} rows of K read")
        frames.append((drawing, f"{(n + 1) * per_tile} of {rows * keys} scores are done."))
    return Frames(frames, 460, 240, 1.5)


def online_softmax(scores: Sequence[float]) -> Frames:
    """The state (m, l) as scores arrive one by one; weights are powers of two."""
    frames, m, l = [], -np.inf, 0.0
    top, width = max(scores) + 1, 60
    for n, s in enumerate(scores):
        new = max(m, s)
        shrink = 2.0 ** (m - new)
        l, grown = l * shrink + 2.0 ** (s - new), new > m
        m = new
        drawing = text(10, 16, "score") + text(10, 190, "weight, relative to m")
        for j, x in enumerate(scores[: n + 1]):
            height = 150 * x / top
            drawing += box(
                40 + j * width, 170 - height, 40, height, ORANGE if j == n else SKY, f"{x:g}"
            )
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
        words = f"score {s:g}: "
        words += (
            f"a new maximum, so what was summed shrinks by {shrink:.3g}"
            if grown and n
            else "the first score"
            if not n
            else "the maximum stays; add its weight"
        )
        frames.append((drawing, words))
    return Frames(frames, 90 + len(scores) * width + 110, 272, 1.8)


def tile_against_cache(d: int, block_k: int, cache: int, sizes: Sequence[int]) -> Frames:
    """Working set of a float32 tile of each size of block_q against a cache of `cache` bytes."""
    frames = []
    colours = {"K, V": YELLOW, "Q, O": SKY, "scores": ORANGE, "m, l": GREY}
    for block_q in sizes:
        parts = {
            "K, V": 8 * block_k * d,
            "Q, O": 8 * block_q * d,
            "scores": 4 * block_q * block_k,
            "m, l": 8 * block_q,
        }
        total, x, drawing = sum(parts.values()), 20.0, ""
        scale = 300 / cache
        for name, nbytes in parts.items():
            wide = nbytes * scale
            drawing += box(x, 40, wide, 40, colours[name], name if wide > 40 else "")
            x += wide
        drawing += (
            f'<line x1="320" x2="320" y1="20" y2="100" stroke="{RED}" stroke-width="2"/>'
            + text(320, 16, f"cache: {cache / 1024:.0f} KiB", anchor="middle")
            + text(20, 110, f"K and V come from memory once per {block_q} rows")
        )
        fits = "fits" if total <= cache else "does not fit: the rest comes from the next cache"
        frames.append((drawing, f"block_q = {block_q}: {total / 1024:.1f} KiB, {fits}"))
    return Frames(frames, 640, 120, 1.5)


def fused_against_unfused(blocks: int = 3) -> Frames:
    """Which arrays exist when: scores and weights of `blocks` key blocks, fused and not."""
    parts = ("scores", "softmax", "merge", "values")
    unfused = [(part, b) for part in parts for b in range(blocks)]
    fused = [(part, b) for b in range(blocks) for part in parts]
    frames = []
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
                drawing += box(x + 90 * b, 30, 80, 50, colour, "S, P held" if held else "")
                drawing += text(x + 90 * b + 40, 98, f"key block {b}", 11, "middle")
            drawing += text(x, 125, f"now: {part} of block {block}")
            drawing += text(x, 145, f"blocks of scores alive: {alive}")
        frames.append((drawing, "the same twelve pieces of work in another order"))
    return Frames(frames, 640, 155, 1.2)


def ring_of_stages(tiles: int = 6, stages: int = 2) -> Frames:
    """A producer and a consumer with a ring of shared-memory stages, and the parity of each wait."""
    frames = []
    for n in range(tiles + 1):
        drawing = text(10, 20, "producer (one thread, TMA)") + text(10, 130, "consumers (wgmma)")
        for s in range(stages):
            held = [t for t in (n, n - 1) if 0 <= t < tiles and t % stages == s]
            fill = WHITE if not held else ORANGE if held[0] == n else SKY
            label = f"tile {held[0]}" if held else "empty"
            drawing += box(230 + 120 * s, 50, 100, 44, fill, label)
            drawing += text(280 + 120 * s, 112, f"stage {s}", 11, "middle")
        if n < tiles:
            drawing += text(10, 40, f"tile {n} -> stage {n % stages}")
            drawing += text(10, 58, f"waits: empty, parity {(n // stages + 1) % 2}")
        if n:
            drawing += text(10, 150, f"tile {n - 1} in stage {(n - 1) % stages}")
            drawing += text(10, 168, f"waits: full, parity {(n - 1) // stages % 2}")
        words = "orange arrives while blue is multiplied" if 0 < n < tiles else "start or end"
        frames.append((drawing, words))
    return Frames(frames, 250 + 120 * stages, 176, 1.8)


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
        frames.append((drawing, f"step {step}: rank r holds the keys of rank r - {step}"))
    return Frames(frames, 30 + 140 * ranks, 140, 1.8)
