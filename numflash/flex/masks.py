"""Block masks: a mask function, and which blocks of queries and keys it lets pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError
from ..interop.arrays import import_array, import_integers
from .fused import Fused, fused_of
from .prepared import EMPTY, FULL, PARTIAL, Prepared, prepare

MaskFunction = Callable[[Any, Any, Any, Any], Any]
SHADES = {EMPTY: "  ", PARTIAL: "░░", FULL: "██"}
WIDEST = 64  # blocks of a printed picture
# kernels skip by blocks of a quarter of each side, unless there are too many
FINER = 4
MOST_FINER = 1 << 17


def _look_up(dense: np.ndarray) -> MaskFunction:
    """The mask function of a dense mask (B or 1, H or 1, L, S)."""
    nb, nh = dense.shape[:2]

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return dense[b if nb > 1 else 0, h if nh > 1 else 0, q_idx, kv_idx]

    return mask_mod


class BlockMask:
    """A mask function `mask_mod(b, h, q_idx, kv_idx)` and what is known of it by blocks.

    Made by `create_block_mask`, `BlockMask.from_dense` or `BlockMask.from_kv_blocks`. The blocks
    are those of the contents that captured arrays had when it was made: make it again when they
    change.

    Attributes
    ----------
    mask_mod : the function, True where a query may see a key
    states : (B or 1, H or 1, blocks of queries, blocks of keys) uint8
        0 where a block is empty, 2 where it is full, 1 where the function has to be asked.
    seq_lengths : (L, S)
    BLOCK_SIZE : (queries, keys) of a block
    shape : (B, H, L, S)
    by_function : bool
        The blocks say no more than `mask_mod`: for batch entries and heads that it tells apart and the
        blocks do not, kernels ask the function.
    """

    def __init__(
        self,
        mask_mod: MaskFunction,
        states: np.ndarray,
        seq_lengths: tuple[int, int],
        block_size: tuple[int, int],
        batch_and_heads: tuple[int, int],
        finer: tuple[np.ndarray, tuple[int, int]] | None = None,
    ) -> None:
        self.mask_mod, self.seq_lengths, self.BLOCK_SIZE = mask_mod, seq_lengths, block_size
        self.states = np.ascontiguousarray(states, np.uint8)
        self.shape = (*batch_and_heads, *seq_lengths)
        self._finer = (self.states, block_size) if finer is None else finer  # what kernels skip by
        self._last: Fused | None = None
        self._made: tuple[MaskFunction, Prepared] | None = None  # the function as it was then
        self._dense: np.ndarray | None = None  # what it looks up
        self.by_function = False

    def check_names(self) -> None:
        """Raise where the function would not be the one whose blocks these are: a number or an object
        that it names was changed.
        """
        if self._made is None or self._made[0] is not self.mask_mod:
            return
        capture = self._made[1].capture
        if capture.steady and not capture.names_hold():
            raise ArgumentError(
                "block_mask: what its function names has changed since the mask was made, and its blocks are of "
                "then; allowed: create_block_mask again, or a function that holds its own value (w=w)"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Without what is made from the function, which a copy makes anew."""
        state = {**self.__dict__, "_last": None, "_made": None}
        if self._dense is not None:
            state["mask_mod"] = None  # a closure, which cannot be pickled
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._dense is not None:
            self.mask_mod = _look_up(self._dense)

    def _fused(self, prepared: Prepared, entries: int, heads: int) -> Fused:
        """The functions with these blocks as a problem carries them; kept for the next call.

        Blocks of one entry or head say nothing of others that the function tells apart.
        """
        assert prepared.mask is not None
        sizes = (("b", self.shape[0], entries), ("h", self.shape[1], heads))
        if self.by_function and any(
            made < asked and name in prepared.mask.uses for name, made, asked in sizes
        ):
            return fused_of(prepared)
        found = self._last
        if found is None or found.prepared is not prepared:
            found = self._last = Fused(prepared, *self._finer)
        return found

    @classmethod
    def from_dense(cls, mask: Any, BLOCK_SIZE: Any = 128) -> BlockMask:
        """The block mask of an array.

        Parameters
        ----------
        mask : (L, S), (H, L, S) or (B, H, L, S) bool array
            True where a key may be seen; B and H may be 1, for all.
        BLOCK_SIZE : int or (queries, keys)
            Of a block.

        Returns
        -------
        BlockMask

        Raises
        ------
        ArgumentError, ArgumentTypeError
        """
        array = import_array("mask", mask).array
        if array.dtype != np.bool_:
            raise ArgumentTypeError(f"mask: got dtype {array.dtype}; allowed: bool")
        if not 2 <= array.ndim <= 4:
            raise ArgumentError(
                f"mask: got shape {array.shape}; allowed: 2 to 4 dimensions, (B, H, L, S)"
            )
        dense = np.array(array.reshape((1,) * (4 - array.ndim) + array.shape))
        nb, nh, length, s = dense.shape
        rows, keys = block = block_size(BLOCK_SIZE)
        seen = np.add.reduceat(
            np.add.reduceat(dense, np.arange(0, s, keys), -1, dtype=np.int64),
            np.arange(0, length, rows),
            -2,
        )
        size = np.minimum(rows, length - np.arange(0, length, rows))[:, None] * np.minimum(
            keys, s - np.arange(0, s, keys)
        )
        states = np.where(seen == 0, EMPTY, np.where(seen == size, FULL, PARTIAL))

        made = cls(_look_up(dense), states, (length, s), block, (nb, nh))
        made._dense = dense
        return made

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Any,
        kv_indices: Any,
        full_kv_num_blocks: Any = None,
        full_kv_indices: Any = None,
        BLOCK_SIZE: Any = 128,
        mask_mod: MaskFunction | None = None,
        seq_lengths: tuple[int, int] | None = None,
    ) -> BlockMask:
        """From lists of blocks, as PyTorch's `BlockMask.from_kv_blocks` takes them.

        Parameters
        ----------
        kv_num_blocks : (B, H, blocks of queries) integers
            How many blocks of keys each block of queries attends to in part.
        kv_indices : (B, H, blocks of queries, blocks of keys) integers
            Their numbers; those beyond the count are not looked at.
        full_kv_num_blocks, full_kv_indices
            The same for blocks that are seen in full.
        BLOCK_SIZE : int or (queries, keys)
            Of a block.
        mask_mod : function of (b, h, q_idx, kv_idx), optional
            True where a query may see a key in the blocks seen in part; all of them unless given.
        seq_lengths : (L, S), optional
            Whole blocks unless given.

        Returns
        -------
        BlockMask

        Raises
        ------
        ArgumentError
            Shapes, counts or numbers of blocks, or lengths that do not fit together.
        ArgumentTypeError
            What is no array of integers.
        """
        rows, keys = block = block_size(BLOCK_SIZE)
        indices = import_integers("kv_indices", kv_indices)
        if indices.ndim != 4:
            raise ArgumentError(
                f"kv_indices: got shape {indices.shape}; allowed: (B, H, blocks of L, blocks of S)"
            )
        states: Any = np.zeros(indices.shape, np.uint8)
        _fill(states, "kv", kv_num_blocks, indices, PARTIAL)
        if full_kv_num_blocks is not None:
            full = import_integers("full_kv_indices", full_kv_indices)
            _fill(states, "full_kv", full_kv_num_blocks, full, FULL)
        lengths: Any = seq_lengths
        if lengths is None:
            lengths = states.shape[2] * rows, states.shape[3] * keys
        if not whole(lengths, 2):
            raise ArgumentError(f"seq_lengths: got {lengths!r}; allowed: two integers")
        nb, nh, *blocks = states.shape
        if [-(-lengths[0] // rows), -(-lengths[1] // keys)] != blocks:
            raise ArgumentError(
                f"seq_lengths: got {tuple(lengths)}; allowed: what {blocks} blocks of {block} cover"
            )
        if mask_mod is not None and not callable(mask_mod):
            raise ArgumentTypeError(
                f"mask_mod: got {type(mask_mod).__name__}; allowed: a function, or None"
            )
        return cls(mask_mod or _everything, states, (lengths[0], lengths[1]), block, (nb, nh))

    def sparsity(self) -> float:
        """The part of all pairs that is in empty blocks, in percent.

        Blocks at the edges count as whole ones, as PyTorch has it: where they reach far beyond the
        sequences it is less than 0.
        """
        rows, keys = self.BLOCK_SIZE
        seen = int(np.count_nonzero(self.states)) * rows * keys
        return 100.0 * (1 - seen / (math.prod(self.states.shape[:2]) * math.prod(self.seq_lengths)))

    def to_dense(self) -> np.ndarray:
        """(B or 1, H or 1, blocks of L, blocks of S) bool: the blocks that are not empty."""
        return self.states != EMPTY

    @property
    def kv_num_blocks(self) -> np.ndarray:
        """(B, H, blocks of L) int32: blocks of keys that are seen in part."""
        return (self.states == PARTIAL).sum(-1, dtype=np.int32)

    @property
    def kv_indices(self) -> np.ndarray:
        """(B, H, blocks of L, blocks of S) int32.

        Their numbers first, in order, then the others'.
        """
        return np.argsort(self.states != PARTIAL, -1, kind="stable").astype(np.int32)

    @property
    def full_kv_num_blocks(self) -> np.ndarray:
        """The same of the blocks that are seen in full."""
        return (self.states == FULL).sum(-1, dtype=np.int32)

    @property
    def full_kv_indices(self) -> np.ndarray:
        """The same of the blocks that are seen in full."""
        return np.argsort(self.states != FULL, -1, kind="stable").astype(np.int32)

    def _of_head(self, b: int, h: int) -> np.ndarray:
        """(blocks of L, blocks of S)."""
        if not whole((b, h), 2):
            raise ArgumentError(f"b, h: got {b!r}, {h!r}; allowed: two integers")
        return self.states[min(b, len(self.states) - 1), min(h, self.states.shape[1] - 1)]

    def to_string(self, b: int = 0, h: int = 0, limit: int = WIDEST) -> str:
        """The blocks of one head as a picture: full ██, in part ░░, empty blank.

        Parameters
        ----------
        b, h : int
            Batch entry and head; of a mask that is the same for all, 0.
        limit : int
            Most blocks in a line and most lines; several blocks share a place where there are more.

        Returns
        -------
        str

        Raises
        ------
        ArgumentError, ArgumentTypeError
            No such batch entry, head or limit.
        """
        states = self._of_head(b, h)
        step = max(1, -(-max(states.shape) // _size("limit", limit)))
        lines = []
        for i in range(0, states.shape[0], step):
            cells = [states[i : i + step, j : j + step] for j in range(0, states.shape[1], step)]
            lines.append("".join(SHADES[_shade(cell)] for cell in cells).rstrip())
        return "\n".join(lines)

    def __str__(self) -> str:
        rows, keys = self.BLOCK_SIZE
        head = f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%, blocks of {rows} x {keys}"
        return f"{head})\n{self.to_string()}"

    def __repr__(self) -> str:
        return str(self)

    def plot(self, b: int = 0, h: int = 0, ax: Any = None) -> Any:
        """Draw the blocks of one head with matplotlib.

        Parameters
        ----------
        b, h : int
            Batch entry and head; of a mask that is the same for all, 0.
        ax : matplotlib.axes.Axes, optional
            The present axes unless given.

        Returns
        -------
        matplotlib.axes.Axes

        Raises
        ------
        ArgumentError, ArgumentTypeError
            No such batch entry or head.
        UnsupportedError
            matplotlib is not installed.
        """
        try:
            import matplotlib.pyplot as plt
        except ModuleNotFoundError:
            raise UnsupportedError(
                "plot: matplotlib is not installed; pip install 'numflash[plot]'"
            ) from None
        ax = plt.gca() if ax is None else ax
        states = self._of_head(b, h)
        extent = (0, self.seq_lengths[1], self.seq_lengths[0], 0)
        ax.imshow(
            states,
            cmap="Blues",
            vmin=0,
            vmax=2,
            extent=extent,
            aspect="auto",
            interpolation="nearest",
        )
        ax.set(
            xlabel="key", ylabel="query", title=f"{self.sparsity():.0f} % of the blocks are empty"
        )
        return ax


def _everything(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return True


def _shade(cell: np.ndarray) -> int:
    first = int(cell.flat[0])
    return first if (cell == first).all() else PARTIAL


def _fill(states: np.ndarray, name: str, counts: Any, indices: np.ndarray, value: int) -> None:
    counts = import_integers(f"{name}_num_blocks", counts)
    if counts.shape != states.shape[:3] or indices.shape[:3] != states.shape[:3]:
        raise ArgumentError(
            f"{name}_num_blocks: got shape {counts.shape}; allowed: {states.shape[:3]}"
        )
    if counts.min(initial=0) < 0 or counts.max(initial=0) > indices.shape[3]:
        raise ArgumentError(
            f"{name}_num_blocks: got {counts.max()}; allowed: 0 to {indices.shape[3]}"
        )
    b, h, q, place = np.nonzero(np.arange(indices.shape[3]) < counts[..., None])
    chosen = indices[b, h, q, place]
    if chosen.size and not (chosen.min() >= 0 and chosen.max() < states.shape[3]):
        raise ArgumentError(
            f"{name}_indices: got {chosen.max()}; allowed: 0 to {states.shape[3] - 1}"
        )
    states[b, h, q, chosen] = value


def whole(given: Any, count: int) -> bool:
    """Whether a value is a tuple or a list of so many integers."""
    return (
        isinstance(given, (tuple, list))
        and len(given) == count
        and all(isinstance(n, Integral) and not isinstance(n, bool) for n in given)
    )


def block_size(given: Any) -> tuple[int, int]:
    """(queries, keys) of a block from BLOCK_SIZE."""
    pair = given if isinstance(given, (tuple, list)) else (given, given)
    if len(pair) != 2 or any(
        isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1 for n in pair
    ):
        raise ArgumentError(
            f"BLOCK_SIZE: got {given!r}; allowed: a positive integer, or two of them"
        )
    return int(pair[0]), int(pair[1])


def _size(name: str, given: Any) -> int:
    if given is None and name in ("B", "H"):
        return 1
    if isinstance(given, bool) or not isinstance(given, (int, np.integer)) or given < 1:
        raise ArgumentError(f"{name}: got {given!r}; allowed: a positive integer")
    return int(given)


def create_block_mask(
    mask_mod: MaskFunction,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    BLOCK_SIZE: int | tuple[int, int] = 128,
) -> BlockMask:
    """Find which blocks of queries and keys a mask function allows.

    By interval arithmetic over the traced function: no pair is evaluated. A block whose bounds do
    not decide is PARTIAL, which is always right.

    Parameters
    ----------
    mask_mod : function of (b, h, q_idx, kv_idx)
        True where query q_idx of head h in batch entry b may see key kv_idx; in NumPy's, PyTorch's
        or plain operators. Captured arrays may be NumPy's or PyTorch's.
    B, H : int or None
        Batch entries and heads; None where the mask is the same for all. Where it is not, the
        function is asked for each pair.
    Q_LEN, KV_LEN : int
    BLOCK_SIZE : int or (queries, keys)
        Rows and keys of a block.

    Returns
    -------
    BlockMask
        For `flex_attention`; `print` shows its blocks as a picture.

    Raises
    ------
    ArgumentTypeError
        Showing the line of the function that cannot be traced, and what to write instead.
    ArgumentError
        A size that is not allowed, or a captured array that is too short for an index.
    """
    if mask_mod is None:
        raise ArgumentTypeError("mask_mod: got None; allowed: a function of (b, h, q_idx, kv_idx)")
    nb = _size("B", B)
    nh = _size("H", H)
    length = _size("Q_LEN", Q_LEN)
    s = _size("KV_LEN", KV_LEN)
    sizes = nb, nh, length, s
    block = block_size(BLOCK_SIZE)
    prepared = prepare(None, mask_mod)
    prepared.check(sizes)
    states = prepared.block_states(sizes, block)
    finer = None
    if not any(n % FINER for n in block) and states.size * FINER**2 <= MOST_FINER:
        small = block[0] // FINER, block[1] // FINER
        finer = prepared.block_states(sizes, small), small
    made = BlockMask(mask_mod, states, (length, s), block, (nb, nh), finer)
    made.by_function, made._made = True, (mask_mod, prepared)
    return made


def and_masks(*mask_mods: MaskFunction) -> MaskFunction:
    """A mask function that is True where all of the given ones are.

    Parameters
    ----------
    mask_mods : functions of (b, h, q_idx, kv_idx)
        None of them: a mask that hides nothing.

    Returns
    -------
    function of (b, h, q_idx, kv_idx)

    Raises
    ------
    ArgumentTypeError
        What is no function.
    """
    _check(mask_mods)

    def all_of(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        found = True
        for mask_mod in mask_mods:
            found = found & mask_mod(b, h, q_idx, kv_idx)
        return found

    return all_of


def or_masks(*mask_mods: MaskFunction) -> MaskFunction:
    """A mask function that is True where at least one of the given ones is.

    Parameters
    ----------
    mask_mods : functions of (b, h, q_idx, kv_idx)
        None of them: a mask that hides everything.

    Returns
    -------
    function of (b, h, q_idx, kv_idx)

    Raises
    ------
    ArgumentTypeError
        What is no function.
    """
    _check(mask_mods)

    def any_of(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        found = False
        for mask_mod in mask_mods:
            found = found | mask_mod(b, h, q_idx, kv_idx)
        return found

    return any_of


def _check(mask_mods: tuple[Any, ...]) -> None:
    for n, mask_mod in enumerate(mask_mods):
        if not callable(mask_mod):
            raise ArgumentTypeError(
                f"mask_mods[{n}]: got {type(mask_mod).__name__}; allowed: a function"
            )
