"""Models that were written for transformers' eager attention alone.

Their classes say neither `_supports_sdpa` nor `_supports_attention_backend`, and transformers refuses
them "sdpa". So nothing in them keeps to what "sdpa" takes for granted: that a layer's `is_causal` is
right where the mask is None, and that no layer computes with the mask itself. They get what "eager"
gets: a float mask that hides later tokens, too, and None only where every key is attended to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor

# type of configuration -> whether its models are such; filled when a model takes one of our names,
# because torch.compile traces the look-up
_known: dict[type, bool] = {}


def _classes(of: Any = transformers.PreTrainedModel) -> Iterator[type]:
    for each in of.__subclasses__():
        yield each
        yield from _classes(each)


def _supports_more(model: Any) -> bool:
    return bool(model._supports_sdpa or model._supports_attention_backend)


def note(config: Any, *models: type) -> bool:
    """Whether no model of this configuration supports more than "eager"; noted for `eager_only`.

    models : classes known to have it, whatever they declare.
    """
    found = list(models)
    for kind in type(config).__mro__:  # a configuration of one's own for a model of transformers
        found += [each for each in _classes() if each.__dict__.get("config_class") is kind]
        if found:
            break
    _known[type(config)] = bool(found) and not any(map(_supports_more, found))
    return _known[type(config)]


def prepare(model: Any, name: str) -> None:
    """What a model needs that is about to take one of our names.

    A few choose a class for their layers by the name of the implementation and know only some (GIT,
    SAM): those layers stay what they are with "eager", as after `set_attn_implementation`.
    """
    note(model.config, type(model))
    for found, classes in vars(sys.modules[type(model).__module__]).items():
        if found.endswith("_ATTENTION_CLASSES") and "eager" in classes:
            classes.setdefault(name, classes["eager"])


def eager_only(config: Any) -> bool:
    """Whether the models of this configuration, or None, were written for "eager" alone."""
    if config is None:
        return False
    known = _known.get(type(config))
    return note(config) if known is None else known  # a model from a pickle has told nobody


def float_padding(padding: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask of one row for all queries as "eager" gets it: 0 and the least number of the dtype."""
    row = padding[:, :, :1]
    nothing = torch.zeros((), dtype=dtype, device=row.device)
    return torch.where(row, nothing, torch.finfo(dtype).min).expand(padding.shape)


def as_padding(mask: Tensor) -> Tensor:
    """A float mask of one row for all queries as bool, which `numflash.torch` reads as key lengths.

    Another mask as it is.
    """
    alike = mask.is_floating_point() and mask.shape[2] > 1 and not mask.stride(2)
    if not alike or torch.compiler.is_compiling():
        return mask
    row = mask[:, :, :1]
    hidden = row == torch.finfo(mask.dtype).min
    return (~hidden).expand(mask.shape) if bool((hidden | (row == 0)).all()) else mask
