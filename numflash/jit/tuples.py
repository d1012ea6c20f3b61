"""The package's named tuples as arguments of compiled functions: one LLVM value each.

Numba passes a tuple as all of its fields, those of the tuples and arrays in it too, and the function
that is called puts it together again. With tuples of some hundred fields, which kernels hand from
one function to the next, that was half of the LLVM IR of the INT8 kernels, all of it made, printed,
parsed and removed again. In machine code both are the same: fields in registers, then on the stack.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core.datamodel import DataModelManager, models

PACKAGE = f"{__name__.partition('.')[0]}."


def _whole(model: type) -> type:
    """The data model of a tuple, passed as it is."""

    class Whole(model):
        def get_argument_type(self) -> Any:
            return self.get_value_type()

        def as_argument(self, builder: Any, value: Any) -> Any:
            return value

        def from_argument(self, builder: Any, value: Any) -> Any:
            return value

    return Whole


def _for_package(model: type) -> Any:
    """What makes the model of a type: Numba's own where the tuple is not one of the package."""
    whole = _whole(model)

    def make(manager: Any, kind: Any) -> Any:
        ours = kind.instance_class.__module__.startswith(PACKAGE)
        return (whole if ours else model)(manager, kind)

    return make


def pass_whole(context: Any) -> None:
    """Let a target context pass the package's named tuples as one value; other targets do not."""
    own = DataModelManager(
        {
            types.NamedTuple: _for_package(models.TupleModel),
            types.NamedUniTuple: _for_package(models.UniTupleModel),
        }
    )
    context.data_model_manager = own.chain(context.data_model_manager)
