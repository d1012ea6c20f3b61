"""A `ResidentCache` in a file.

A NumPy archive of the stored numbers and a header that says for which model they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..cache.arguments import integer
from ..errors import ArgumentError
from ..jit.whole import new_file

FORMAT = "numflash.ResidentCache"
VERSION = 1


def bound(name: str, value: Any, low: int, high: int) -> Any:
    """An integer in its range, or None."""
    return None if value is None else integer(name, value, low, high)


def write(
    path: Path, about: dict[str, Any], layers: Sequence[Any], valid: np.ndarray | None
) -> None:
    """Write header and states to a file; a reader finds the old one or the new one."""
    arrays = {
        f"{n}.{name}": x for n, layer in enumerate(layers) for name, x in layer.state().items()
    }
    header = json.dumps({"format": FORMAT, "version": VERSION, **about})
    if valid is not None:
        arrays["valid"] = valid
    with new_file(path) as file:
        np.savez(file, header=np.array(header), **arrays)


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header and the arrays of a file.

    Raises
    ------
    ArgumentError
    """
    try:
        with np.load(path, allow_pickle=False) as found:
            arrays = {name: found[name] for name in found.files}
        header = json.loads(str(arrays.pop("header")))
        form = header["format"]
        version = header["version"]
        if (form, version) == (FORMAT, VERSION):
            _check(header, arrays)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # what an archive raises depends on the bits that are wrong
        raise ArgumentError(f"path: {path} is no file of ResidentCache.save ({error})") from error
    if form != FORMAT or version != VERSION:
        raise ArgumentError(
            f"path: {path} is {form!r} of version {version}; allowed: {FORMAT!r} of version {VERSION}"
        )
    return header, arrays


def _check(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Raise unless the header says what `write` says of such arrays.

    A layer's own sizes and numbers are looked at where they are read.
    """
    layers, valid = header["layers"], arrays.get("valid")
    header["dtype"], header["sizes"], [layer["window"] for layer in layers]
    seen = [layer["seen"] for layer in layers]
    if any(type(n) is not int or n < 0 or n != seen[0] for n in seen):
        raise ValueError(f"its layers hold {seen} tokens")
    for number, layer in enumerate(layers):
        if "shape" not in layer:
            if layer["seen"]:
                raise ValueError(f"layer {number} has no shape")
            continue
        sizes, balance = layer["shape"], layer.get("balance", 1.0)
        kinds = [type(x) for x in (*sizes, balance, layer["smooth"], layer.get("latent", False))]
        if kinds != [int] * 4 + [float, bool, bool] or not 0 < balance < math.inf:
            raise ValueError(f"layer {number} is described as {layer}")
        lengths = of_layer(arrays, number)["lengths"]
        if valid is None:
            expected = np.full(lengths.shape, seen[0])
        elif valid.dtype == bool and valid.shape == (*lengths.shape, seen[0]):
            expected = valid.sum(1)
        else:
            raise ValueError(f"its padding is {valid.dtype} of shape {valid.shape}")
        if lengths.shape != (sizes[0],) or not np.array_equal(lengths, expected):
            raise ValueError(f"layer {number} holds {lengths.tolist()} tokens")


def of_layer(arrays: dict[str, np.ndarray], n: int) -> dict[str, np.ndarray]:
    """The state of one layer."""
    start = f"{n}."
    return {name[len(start) :]: x for name, x in arrays.items() if name.startswith(start)}


def compare(header: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse a file of another model.

    Raises
    ------
    ArgumentError
    """
    if len(header["layers"]) != len(wanted["layers"]):
        raise ArgumentError(
            f"path: the file holds {len(header['layers'])} layers; allowed: {len(wanted['layers'])}, as the model has"
        )
    if header["sizes"] != wanted["sizes"]:
        raise ArgumentError(
            f"path: the file holds {header['sizes']} KV heads and channels; allowed: {wanted['sizes']}, as the model has"
        )
    for n, (given, layer) in enumerate(zip(header["layers"], wanted["layers"], strict=True)):
        if given["window"] != layer["window"]:
            raise ArgumentError(
                f"path: layer {n} of the file has the window {given['window']}; allowed: {layer['window']}, as in the model"
            )
