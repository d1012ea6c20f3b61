"""Which block of a launch wrote each byte of global memory.

Blocks run in any order on a card, and at once: two that store to one place leave the number of
whichever was last. Here they run one after the other, so the result looks right, and the launch is
refused, as is a load of what another block stores. A block that has done an atomic operation may
follow one (the last block that adds up what the others left); its accesses are taken to be in order.
"""

from __future__ import annotations

import numpy as np

from .errors import Fault


class Writers:
    """The last block that stored to each byte: its number from 1 on, 0 for none."""

    def __init__(self) -> None:
        self._last: dict[int, np.ndarray] = {}

    def note(
        self, data: np.ndarray, index: np.ndarray, size: int, blocks: np.ndarray, free: np.ndarray
    ) -> None:
        """A store of `size` bytes at each of these offsets of a buffer; Fault where another block's
        bytes are overwritten.

        Parameters
        ----------
        blocks : number of each lane's block;  free : bool, whether that has done an atomic operation
        """
        last = self._last.get(data.ctypes.data)
        if last is None:
            last = self._last[data.ctypes.data] = np.zeros(data.size, np.int32)
        at = index[:, None] + np.arange(size)
        before, own = last[at], blocks[:, None]
        last[at] = own
        wrong = ((before != 0) & (before != own)) | (last[at] != own)
        wrong &= ~free[:, None]
        if wrong.any():
            lane = int(np.nonzero(wrong.any(1))[0][0])
            raise Fault(
                "race",
                f"byte {int(index[lane])} of an array of {data.size} is stored to by several blocks, "
                "whose order nothing decides",
            )

    def check_read(
        self, data: np.ndarray, index: np.ndarray, size: int, blocks: np.ndarray, free: np.ndarray
    ) -> None:
        """A load of `size` bytes at each of these offsets of a buffer; Fault where another block of
        this launch has stored to them, whose order nothing decides either.

        Parameters
        ----------
        blocks, free : as in `note`; of a load through the path that is not coherent (`ld.global.nc`),
            which may not see the block's own stores, 0 and False
        """
        last = self._last.get(data.ctypes.data)
        if last is None:
            return
        before = last[index[:, None] + np.arange(size)]
        wrong = (before != 0) & (before != blocks[:, None]) & ~free[:, None]
        if wrong.any():
            lane = int(np.nonzero(wrong.any(1))[0][0])
            raise Fault(
                "race",
                f"byte {int(index[lane])} of an array of {data.size} is loaded, to which "
                + (
                    "another block stores"
                    if blocks[lane]
                    else "this launch stores, by ld.global.nc"
                ),
            )
