"""What the attention mask of one forward pass says about its new tokens.

Which are padding, and who attends to whom.

A resident cache stores no padding, so it must distinguish padding from the rule of the layer
(causal, with or without a window). All layers of a kind get the same mask, so it is read once per
pass.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import ArgumentError


class Reading(NamedTuple):
    """New tokens of one pass.

    valid : (B, n) bool, False for padding; None where there is none
    standard : every token attends to all earlier valid tokens in its window and to itself, and to
        no others
    mask : (B, n, S) bool where that is not so, S the keys that the layer advertised
    """

    valid: np.ndarray | None
    standard: bool
    mask: np.ndarray | None

    @property
    def counts(self) -> np.ndarray | None:
        """(B,) tokens of each sequence that are not padding."""
        return None if self.valid is None else self.valid.sum(1)


PLAIN = Reading(None, True, None)


def read_mask(
    mask: Tensor | None,
    batch: int,
    new: int,
    past: np.ndarray | None,
    offset: int,
    keys: int,
    window: int | None,
) -> Reading:
    """Read a mask (B or 1, 1, n, S) bool or float.

    Parameters
    ----------
    batch : B, of the tokens
    new : n
    past : (B, tokens) bool, which of the earlier tokens are not padding; None where all are
    offset, keys : the first token of the mask's columns, and S
    window : of the layer

    Raises
    ------
    ArgumentError
        A mask for each head, of numbers other than 0 and -inf, or of another shape.
    """
    if mask is None:
        return PLAIN
    seen = _as_bool(mask)
    if seen.shape[1] != 1 or seen.shape[2:] != (new, keys) or seen.shape[0] not in (1, batch):
        raise ArgumentError(
            f"attention_mask: got shape {tuple(mask.shape)}; allowed with a ResidentCache: ({batch}, 1, {new}, "
            f"{keys}), the same for all heads"
        )
    given = np.broadcast_to(seen[:, 0].numpy(), (batch, new, keys))
    own = given[:, :, keys - new :]
    valid = np.ascontiguousarray(own[:, np.arange(new), np.arange(new)])
    columns = (
        np.ones((batch, keys - new), bool)
        if past is None
        else past[:, offset : offset + keys - new]
    )
    columns = np.concatenate([columns, valid], 1)
    expected = _rule(new, keys, window) & columns[:, None]
    rows = valid[:, :, None]  # what padding before and between tokens attends to does not matter
    standard = bool(((given == expected) | ~rows).all())
    if not valid[:, -1:].all():  # but the last row's output is what `generate` reads
        standard = False
    if window is not None and _padding_inside(columns, past, offset):
        standard = False  # it counts as distance in the window, and the cache does not store it
    return Reading(
        None if valid.all() else valid, standard, None if standard else np.ascontiguousarray(given)
    )


def _padding_inside(columns: np.ndarray, past: np.ndarray | None, offset: int) -> bool:
    """Whether padding in the window (B, S) is between tokens, those before the window included."""
    before = np.zeros(columns.shape[0], bool) if past is None else past[:, :offset].any(1)
    first = np.where(before, -1, columns.argmax(1))
    last = columns.shape[1] - 1 - columns[:, ::-1].argmax(1)
    at = np.arange(columns.shape[1])
    inside = (at > first[:, None]) & (at < last[:, None])
    return bool((inside & ~columns).any())


def _as_bool(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise ArgumentError(f"attention_mask: got dtype {mask.dtype}; allowed: bool or floats")
    hidden = mask <= torch.finfo(mask.dtype).min
    if not ((mask == 0) | hidden).all():
        raise ArgumentError(
            "attention_mask: got numbers other than 0 and -inf; allowed with a ResidentCache: masks, no biases"
        )
    return ~hidden


def _rule(new: int, keys: int, window: int | None) -> np.ndarray:
    """(n, S) bool: causal, with a window."""
    away = (np.arange(new) + keys - new)[:, None] - np.arange(keys)
    seen: np.ndarray = away >= 0
    return seen if window is None else seen & (away < window)


def to_front(valid: np.ndarray) -> Tensor:
    """(B, n) order that brings valid tokens to the front, keeping their order."""
    return torch.from_numpy(np.argsort(~valid, axis=1, kind="stable"))


def to_back(valid: np.ndarray) -> Tensor:
    """(B, n) order that brings valid tokens to the end, keeping their order."""
    return torch.from_numpy(np.argsort(valid, axis=1, kind="stable"))


def gathered(x: Tensor, order: Tensor) -> Tensor:
    """x (B, H, n, D) with its tokens in the given order (B, n)."""
    return x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def scattered(x: Tensor, order: Tensor) -> Tensor:
    """The inverse of `gathered`."""
    return torch.empty_like(x).scatter_(
        2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]), x
    )
