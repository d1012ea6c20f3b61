"""Tasks on Numba's threads: one `prange`, compiled once, for all kernels.

A `prange` of its own costs a kernel most of a second to compile, whatever its body does: Numba
makes its body a function of its own, that a generalised ufunc, and that a call with one argument
for every dimension of every array. Here the loop calls a task by its address; what it works on
waits in the kernel's frame.

    @inline
    def task(n, x, out): ...                     # one of `count` tasks, n = 0 .. count - 1

    @kernel
    def run(x, out):
        over_tasks(task, x.shape[0], (x, out))
"""

from __future__ import annotations

from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from .compiler import bare, separate

I8 = ir.IntType(8)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
TASK = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I64])  # (frame, number of the task)


@intrinsic
def _call(typingctx, task, frame, n):
    """f(task, frame, n).

    The function at the address `task`, with its frame and the number of the task.
    """

    def codegen(context, b, sig, args):
        address, frame, n = args
        b.call(b.inttoptr(address, TASK.as_pointer()), [b.inttoptr(frame, I8.as_pointer()), n])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), codegen


@intrinsic
def threads_now(typingctx):
    """f(): Numba's number of threads.

    Numba's own function holds an address, so that its callers cannot be cached on disk.
    """

    def codegen(context, b, sig, args):
        kind = ir.FunctionType(I64, [])  # declared as Numba does; in C it returns an int
        function = cgutils.get_or_insert_function(b.module, kind, "get_num_threads")
        return b.sext(b.trunc(b.call(function, []), I32), I64)

    return types.intp(), codegen


@intrinsic
def use_threads(typingctx, n):
    """f(n): from here on n threads, from 1 to as many as Numba started with.

    Numba's own function holds an address, so that its callers could not be kept on disk.
    """

    def codegen(context, b, sig, args):
        kind = ir.FunctionType(ir.VoidType(), [I32])
        function = cgutils.get_or_insert_function(b.module, kind, "set_num_threads")
        b.call(function, [b.trunc(args[0], I32)])
        return context.get_dummy_value()

    return types.void(types.intp), codegen


@bare
def limit_threads(workers):
    """Use at most so many threads; the number that there was."""
    threads = threads_now()
    if workers < threads:
        use_threads(workers)
    return threads


@separate(parallel=True)
def share(count, task, frame):
    """All tasks of one kernel: each thread takes an equal run of them.

    One thread alone wakes no others.
    """
    if count == 1 or threads_now() == 1:
        for n in range(count):
            _call(task, frame, n)
    else:
        for n in prange(count):
            _call(task, frame, n)


def _borrowed(b, value, kind):
    """The same value, whose arrays have no owner.

    Reference counts of shared arrays would be locked instructions in every thread.

    The caller of the tasks owns the arrays until all tasks are done.
    """
    if isinstance(kind, types.Array):
        for field in (0, 1):  # meminfo and parent
            value = b.insert_value(value, ir.Constant(value.type.elements[field], None), field)
    elif isinstance(kind, types.BaseTuple):
        for i, element in enumerate(kind):
            value = b.insert_value(value, _borrowed(b, b.extract_value(value, i), element), i)
    return value


@intrinsic
def over_tasks(typingctx, body, count, args):
    """f(body, count, args): body(n, *args) for n = 0 .. count - 1, on Numba's threads.

    `body` is a jitted function.

    Raises
    ------
    MemoryError
        If a task failed: allocating its buffers is all that fails in them.
    """
    share_type = typingctx.resolve_value_type(share)
    called = body.get_call_type(typingctx, (types.intp, *args), {})
    shared = share_type.get_call_type(typingctx, (types.intp, types.intp, types.intp), {})

    def codegen(context, b, sig, values):
        # whether a task failed; its arguments
        frame_type = ir.LiteralStructType([I32, context.get_value_type(args)])
        frame = cgutils.alloca_once(b, frame_type)
        b.store(ir.Constant(I32, 0), cgutils.gep_inbounds(b, frame, 0, 0))
        b.store(values[2], cgutils.gep_inbounds(b, frame, 0, 1))

        compiled = body.dispatcher.overloads[called.args]
        context.add_linking_libs([compiled.library])
        task = ir.Function(b.module, TASK, b.module.get_unique_name(f"{b.function.name}.task"))
        task.linkage = "internal"
        t = ir.IRBuilder(task.append_basic_block("entry"))
        own = t.bitcast(task.args[0], frame_type.as_pointer())
        frame_args = t.load(cgutils.gep_inbounds(t, own, 0, 1))
        operands = [
            _borrowed(t, x, kind)
            for x, kind in zip(cgutils.unpack_tuple(t, frame_args, len(args)), args, strict=True)
        ]
        status, _ = context.call_conv.call_function(
            t,
            context.declare_function(b.module, compiled.fndesc),
            called.return_type,
            called.args,
            [task.args[1], *operands],
        )
        with cgutils.if_unlikely(t, status.is_error):
            t.store(ir.Constant(I32, 1), cgutils.gep_inbounds(t, own, 0, 0))
        t.ret_void()

        context.get_function(share_type, shared)(
            b,
            [
                context.cast(b, values[1], sig.args[1], types.intp),
                b.ptrtoint(task, I64),
                b.ptrtoint(frame, I64),
            ],
        )
        with cgutils.if_unlikely(
            b, cgutils.is_not_null(b, b.load(cgutils.gep_inbounds(b, frame, 0, 0)))
        ):
            context.call_conv.return_user_exc(
                b, MemoryError, ("a kernel could not allocate its buffers",)
            )
        return context.get_dummy_value()

    return types.void(body, count, args), codegen
