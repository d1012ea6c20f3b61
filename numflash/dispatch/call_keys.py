"""What makes calls equal: a key of shapes, dtypes, and the values and types of options.

The numbers of masks, lengths, slopes and sinks are in no key: each call looks at them.
"""

from __future__ import annotations

import sys
from operator import itemgetter
from typing import Any

import numpy as np

from ..interop import device_tensors
from ..interop.arguments import NOT_MASKS
from ..numerics.quantization import QuantizedTensor
from ..validation.options import NAMES, OptionArrays

Key = tuple[Any, ...] | None
MASK, LENGTHS, SLOPES, SINKS = ARRAYS = [NAMES.index(name) for name in OptionArrays._fields]
WINDOW = NAMES.index("window")
BY_VALUE = frozenset(OptionArrays._fields)
arrays_of = itemgetter(*ARRAYS)  # of the values of `Options`
AN_ARRAY = object()  # in the key of a call, equal to no option


def _in_key(array: Any) -> Any:
    """What stands in a key for an option that is an array, whose numbers each call looks at.

    A number or flag, of which the check of masks has more to say, stays.
    """
    return array if array is None or isinstance(array, NOT_MASKS) else AN_ARRAY


def _kinds_of(window: Any) -> tuple[type, ...]:
    """The types of a window's numbers, or its own."""
    return tuple(map(type, window)) if type(window) is tuple else (type(window),)


def key_of(query: Any, key: Any, value: Any, given: tuple, impl: str) -> Key:
    """What equal calls have in common; None for a call that leaves no plan.

    `given` are the values of `Options`, unchecked.

    Types count: True, 1 and 1.0 are equal, and not all of them are allowed.
    """
    plain = given[MASK] is given[LENGTHS] is given[SLOPES] is given[SINKS] is None
    there: tuple[Any, ...] | None = ()
    if not _arrays_or_tensors(query, key, value):
        there = device_tensors.places(query, key, value) if plain else None
        if there is None or device_tensors.loses_grad(query, key, value):
            return None
    if not plain:
        asked = list(given)
        for n in ARRAYS:
            asked[n] = _in_key(asked[n])
        given = tuple(asked)
    kinds = tuple(map(type, given))
    if given[WINDOW] is not None:
        kinds += _kinds_of(given[WINDOW])
    shapes = query.shape, key.shape, value.shape
    return shapes, query.dtype, key.dtype, value.dtype, given, kinds, impl, there


def _arrays_or_tensors(*given: Any) -> bool:
    """Whether all are NumPy arrays, or all PyTorch's tensors on the CPU: no kinds of their own."""
    kind = type(given[0])
    for x in given:  # a generator for `all` takes as long as the rest of this function
        if type(x) is not kind:
            return False
    if kind is np.ndarray:
        return True
    torch = sys.modules.get("torch")
    if torch is None or kind is not torch.Tensor:
        return False
    return all(x.is_cpu for x in given)


def key_of_gradients(arrays: tuple, given: tuple, impl: str) -> Key:
    """The same for `attention_backward` on NumPy arrays of float32: `arrays` are grad_out, query, key,
    value, out, lse and grad_lse or None, `given` the values of `Options`.
    """
    grad_out, query, key, value, out, lse, grad_lse = arrays
    for x in arrays:
        if x is not None and not (type(x) is np.ndarray and x.dtype == np.float32):
            return None
    if grad_out is None or out is None or lse is None:
        return None
    shapes = grad_out.shape, out.shape, lse.shape, None if grad_lse is None else grad_lse.shape
    return "gradients", shapes, key_of(query, key, value, given, impl)


def key_of_packed(arrays: tuple, cu_seqlens: tuple, given: tuple, impl: str) -> Key:
    """The same for `attention_varlen`, whose sequences are cut alike.

    given : is_causal, return_lse, and (name, value) of each option
    """
    if not _arrays_or_tensors(*arrays) or not _arrays_or_tensors(*cu_seqlens):
        return None
    options = dict(given[2:])
    if not BY_VALUE.isdisjoint(options):
        return None
    try:
        cuts = [np.asarray(cu) for cu in cu_seqlens]
    except (TypeError, RuntimeError):  # tensors that NumPy has no type for
        return None
    if any(cu.dtype.kind not in "iu" or cu.ndim != 1 for cu in cuts):
        return None
    kinds = tuple(type(x[1]) if type(x) is tuple else type(x) for x in given)
    kinds += _kinds_of(options.get("window"))
    shapes = tuple((x.shape, x.dtype) for x in arrays)
    ends = tuple((cu.dtype, cu.tobytes()) for cu in cuts)
    return "packed", shapes, ends, given, kinds, impl


def key_of_quantized(query: Any, key: Any, value: Any, options: dict[str, Any], impl: str) -> Key:
    """The same for `attention_int8`.

    Its operands were looked at in earlier calls, and are contiguous: what a kernel takes as it is.
    """
    tensors = query, key, value
    for t in tensors:
        if type(t) is not QuantizedTensor or not t.checked or not t.is_contiguous():
            return None
    if (query.granularity, key.granularity, value.granularity) != ("row", "row", "channel"):
        return None
    if query.rotated is not key.rotated:
        return None
    if not BY_VALUE.isdisjoint(options):
        options = {name: _in_key(x) if name in BY_VALUE else x for name, x in options.items()}
    shapes = tuple(
        (t.data.shape, t.offset is None, t.nonfinite is None, t.low is None) for t in tensors
    )
    kinds = tuple(map(type, options.values()))
    if options.get("window") is not None:
        kinds += _kinds_of(options["window"])
    return (QuantizedTensor, shapes, tuple(options.items()), kinds, impl)
