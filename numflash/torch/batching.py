"""`torch.vmap` of the operators: the mapped dimension becomes a part of the batch, one call for all
samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# the dimensions of an option that has a batch, and how many it may lack, that one first
RANKS = {"attn_mask": (4, 4), "key_lengths": (1, 0), "alibi_slopes": (2, 1), "grad_lse": (3, 0)}


def _samples(x: Tensor, dim: int | None, size: int) -> Tensor:
    """x with the samples first; views of one where it is not mapped over."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _in_batch(x: Tensor, batch: int, rank: int, optional: int) -> Tensor:
    """(N * B, ...) of an option (N, ...) whose batch of B may be missing or, in a mask, be 1."""
    missing = rank - (x.dim() - 1)
    if not 0 <= missing <= optional:
        return x[0]  # which the operator refuses as it refuses one sample's
    x = x.reshape(x.shape[0], *(1,) * missing, *x.shape[1:])
    if x.shape[1] == 1 and (missing or rank == 4):
        x = x.expand(-1, batch, *x.shape[2:])
    return x.flatten(0, 1)


def _by_sample(x: Tensor, size: int, batch: int) -> Tensor:
    """A result (N * B, ...) as (N, B, ...); one that was not wanted, of shape (0,), as (N, 0)."""
    if x.dim() == 1:
        return x.expand(size, -1)
    return x.reshape(size, batch, *x.shape[1:])


def one_call(operator: Callable[..., tuple], operands: int, names: list[str]) -> Callable:
    """The rule of an operator for `register_vmap`: of its `operands` first arguments, all of which
    have a batch, and of options with these names.
    """
    sinks = operands + names.index("sinks")
    wanted = [operands + names.index(name) for name in ("of_mask", "of_sinks") if name in names]

    def rule(info: Any, in_dims: tuple, *arguments: Any) -> tuple[tuple[Tensor, ...], tuple]:
        size, (query_dim, *_), (query, *_) = info.batch_size, in_dims, arguments
        batch = _samples(query, query_dim, size).shape[1]
        of_samples = [
            _samples(x, dim, size) if isinstance(x, Tensor) else x
            for x, dim in zip(arguments, in_dims, strict=True)
        ]
        # sinks are for all batch entries, and their gradients sums over these: a call for each sample
        if in_dims[sinks] is not None or any(arguments[n] for n in wanted if n < len(arguments)):
            each = [
                operator(*(x[n] if isinstance(x, Tensor) else x for x in of_samples))
                for n in range(size)
            ]
            return tuple(map(torch.stack, zip(*each, strict=True))), (0,) * len(each[0])
        inputs = [x.flatten(0, 1) for x in of_samples[:operands]]
        options = zip(names, of_samples[operands:], arguments[operands:], strict=False)
        for name, x, given in options:
            has_batch = isinstance(x, Tensor) and name in RANKS
            inputs.append(_in_batch(x, batch, *RANKS[name]) if has_batch else given)
        found = operator(*inputs)
        return tuple(_by_sample(x, size, batch) for x in found), (0,) * len(found)

    return rule
