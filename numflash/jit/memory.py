"""Arrays that start at a cache line.

A vector that straddles two lines is loaded twice, a matrix tile sixteen times twice.

`zeros`, `uncleared`, `unpacked` and `reinterpret` are for kernels, where Numba compiles `np.zeros`,
`view` and `reshape` once for every dtype and shape.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic
from numba.np.numpy_support import as_dtype

from . import guard

LINE = guard.LINE


def empty(shape: tuple[int, ...], dtype: Any, name: str = "") -> np.ndarray:
    """np.empty, aligned; `name` is for `guard`, the caller's unless given."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if guard.ON:
        return guard.array(name or guard.caller(), shape, dtype, size, fill=True)
    room = np.empty(size + LINE, np.uint8)
    return np.ndarray(shape, dtype, room, -room.__array_interface__["data"][0] % LINE)


def _fresh(shape: Any, dtype: Any) -> np.ndarray:
    """np.empty, guarded."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return guard.array(guard.caller(), shape, dtype, size, fill=True)


fresh = _fresh if guard.ON else np.empty  # what a kernel writes all of


def _layout(context: Any, builder: Any, shape: Any, kinds: Any, itemsize: int) -> tuple[list, list]:
    """Sizes and strides of a contiguous array; `shape` is a tuple of integers of the types `kinds`."""
    given = zip(cgutils.unpack_tuple(builder, shape), kinds, strict=True)
    sizes = [context.cast(builder, n, kind, types.intp) for n, kind in given]
    strides = [ir.Constant(cgutils.intp_t, itemsize)]
    for n in sizes[:0:-1]:
        strides.insert(0, builder.mul(strides[0], n))
    return sizes, strides


def _allocator(clear: bool) -> Any:
    """Intrinsic f(shape, dtype, name) -> aligned array.

    `shape` is a tuple, `name` a literal that `guard` names in its errors.
    """

    def allocate(typingctx, shape, dtype, name):
        kind = types.Array(dtype.dtype, len(shape), "C")
        itemsize = as_dtype(kind.dtype).itemsize
        shown = f"{getattr(name, 'literal_value', 'scratch')}: {kind.dtype}"

        def codegen(context, builder, signature, args):
            sizes, strides = _layout(context, builder, args[0], signature.args[0], itemsize)
            size = builder.mul(strides[0], sizes[0])
            if guard.ON:
                meminfo = None
                data = _guarded(context, builder, size, shown, not clear)
            else:
                meminfo = context.nrt.meminfo_alloc_aligned(builder, size, LINE)
                data = context.nrt.meminfo_data(builder, meminfo)
                if clear:
                    cgutils.memset(builder, data, size, 0)
            element = context.get_data_type(kind.dtype).as_pointer()
            out = context.make_array(kind)(context, builder)
            context.populate_array(
                out,
                data=builder.bitcast(data, element),
                shape=sizes,
                strides=strides,
                itemsize=itemsize,
                meminfo=meminfo,
            )
            return out._getvalue()

        # Numba keeps one implementation for each signature, so the name stays part of it
        return kind(types.unliteral(shape), types.unliteral(dtype), name), codegen

    allocate.__name__ = allocate.__qualname__ = "zeros" if clear else "uncleared"
    return intrinsic(prefer_literal=True)(allocate)


def _guarded(context: Any, builder: Any, size: Any, name: str, fill: bool) -> Any:
    """The address of a buffer from `guard`, which owns it."""
    pointer = cgutils.voidptr_t
    word = cgutils.intp_t
    take = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(pointer, [word, pointer, ir.IntType(32)]),
        guard.SYMBOL,
    )
    text = context.insert_const_string(builder.module, name)
    return builder.call(take, [size, text, ir.Constant(ir.IntType(32), int(fill))])


@intrinsic(prefer_literal=True)
def arrays_together(typingctx, *arrays):
    """f(shape, dtype, name, shape, dtype, name, ...): as many arrays as `uncleared` makes one by one, in one
    allocation.

    An allocation takes as long as a query of 64 keys: a worker that needs thirty arrays would spend 3 us on them.
    """
    triples = tuple(zip(*[iter(arrays)] * 3, strict=True))
    kinds = [types.Array(dtype.dtype, len(shape), "C") for shape, dtype, _ in triples]
    names = [
        f"{name.literal_value}: {kind.dtype}"
        for (_, _, name), kind in zip(triples, kinds, strict=True)
    ]

    def codegen(context, builder, signature, args):
        shapes = cgutils.unpack_tuple(builder, args[0])[::3]
        # the types of the signature: those that were given hold constants of the first caller
        of_shapes = signature.args[0].types[::3]
        layouts = []
        for given, shape, kind in zip(shapes, of_shapes, kinds, strict=True):
            itemsize = as_dtype(kind.dtype).itemsize
            layouts.append((*_layout(context, builder, given, shape, itemsize), itemsize))
        places = [builder.mul(strides[0], sizes[0]) for sizes, strides, _ in layouts]
        if guard.ON:
            meminfo = None
            data = [
                _guarded(context, builder, n, name, True)
                for n, name in zip(places, names, strict=True)
            ]
        else:
            line = ir.Constant(cgutils.intp_t, LINE - 1)
            ends = [ir.Constant(cgutils.intp_t, 0)]
            for size in places:
                whole = builder.and_(builder.add(size, line), builder.not_(line))
                ends.append(builder.add(ends[-1], whole))
            meminfo = context.nrt.meminfo_alloc_aligned(builder, ends[-1], LINE)
            first = context.nrt.meminfo_data(builder, meminfo)
            data = [builder.gep(first, [place]) for place in ends[:-1]]
        made = []
        for at, kind, (sizes, strides, itemsize) in zip(data, kinds, layouts, strict=True):
            element = context.get_data_type(kind.dtype).as_pointer()
            out = context.make_array(kind)(context, builder)
            context.populate_array(
                out,
                data=builder.bitcast(at, element),
                shape=sizes,
                strides=strides,
                itemsize=itemsize,
                meminfo=meminfo,
            )
            made.append(out._getvalue())
            if meminfo is not None and len(made) > 1:
                context.nrt.incref(builder, kind, made[-1])
        return context.make_tuple(builder, signature.return_type, made)

    given = [
        kind
        for shape, dtype, name in triples
        for kind in (types.unliteral(shape), types.unliteral(dtype), name)
    ]
    return types.Tuple(kinds)(types.StarArgTuple(given)), codegen


zeros = _allocator(clear=True)  # np.zeros((n, ...), dtype), aligned, and a name
uncleared = _allocator(clear=False)  # the same, not cleared


@intrinsic
def array_at(typingctx, address, shape, dtype):
    """A contiguous array at an address; shape is a tuple. It counts no references.

    Its memory must outlive it.
    """
    kind = types.Array(dtype.dtype, len(shape), "C")
    itemsize = as_dtype(kind.dtype).itemsize

    def codegen(context, builder, signature, args):
        sizes, strides = _layout(context, builder, args[1], signature.args[1], itemsize)
        out = context.make_array(kind)(context, builder)
        data = builder.inttoptr(args[0], context.get_data_type(kind.dtype).as_pointer())
        context.populate_array(
            out, data=data, shape=sizes, strides=strides, itemsize=itemsize, meminfo=None
        )
        return out._getvalue()

    return kind(types.intp, shape, dtype), codegen


@intrinsic(prefer_literal=True)
def unpacked(typingctx, x, count):
    """The first `count` elements of a contiguous array as a tuple; `count` is a literal.

    Numba's `to_fixed_tuple` writes the whole tuple again for each element: of 50 elements 1 us.
    """
    n = count.literal_value

    def codegen(context, builder, signature, args):
        data = context.make_array(x)(context, builder, args[0]).data
        places = [cgutils.gep_inbounds(builder, data, i) for i in range(n)]
        found = [context.unpack_value(builder, x.dtype, at) for at in places]
        return context.make_tuple(builder, signature.return_type, found)

    return types.UniTuple(x.dtype, n)(x, count), codegen


@intrinsic
def reinterpret(typingctx, x, dtype):
    """x.view(dtype); elements of another size only where x is contiguous, and a row holds whole
    ones.
    """
    kind = x.copy(dtype=dtype.dtype)
    old, new = (as_dtype(t.dtype).itemsize for t in (x, kind))
    if old != new and x.layout != "C":
        return None

    def codegen(context, builder, signature, args):
        source = context.make_array(x)(context, builder, args[0])
        out = context.make_array(kind)(context, builder)
        shape, strides = (cgutils.unpack_tuple(builder, t) for t in (source.shape, source.strides))
        if old != new:
            shape[-1] = builder.udiv(
                builder.mul(shape[-1], ir.Constant(cgutils.intp_t, old)),
                ir.Constant(cgutils.intp_t, new),
            )
            strides[-1] = ir.Constant(cgutils.intp_t, new)
        data = builder.bitcast(source.data, out.data.type)
        context.populate_array(
            out,
            data=data,
            shape=shape,
            strides=strides,
            itemsize=new,
            meminfo=source.meminfo,
            parent=source.parent,
        )
        return impl_ret_borrowed(context, builder, kind, out._getvalue())

    return kind(x, dtype), codegen
