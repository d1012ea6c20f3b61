"""Every inline PTX operation of numflash, each with the section of the PTX ISA manual that defines
it. `inline_ptx.op` makes a function of each.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ..compile.target import intrinsic, signature, types
from .inline_ptx import Fragment, Immediate, inout, op, out

i32 = types.int32
i64 = types.int64
u32 = types.uint32
u64 = types.uint64
f32 = types.float32


# ---- addresses: an array's first element as a plain number
@intrinsic
def shared_address(typingctx, array):
    """32-bit address of a shared array in the shared window.

    A conversion of state spaces (PTX 5.1.6), which costs no instruction.
    """

    def lower(context, builder, sig, values):
        data = context.make_array(sig.args[0])(context, builder, values[0]).data
        return builder.ptrtoint(
            builder.addrspacecast(data, ir.PointerType(data.type.pointee, 3)), ir.IntType(32)
        )

    return signature(u32, array), lower


@intrinsic
def global_address(typingctx, array):
    """64-bit address of an array in global memory."""

    def lower(context, builder, sig, values):
        return builder.ptrtoint(
            context.make_array(sig.args[0])(context, builder, values[0]).data, ir.IntType(64)
        )

    return signature(u64, array), lower


# ---- arithmetic with a stated rounding: `.rn` keeps ptxas from contracting (PTX 9.7.3)
fma = op("fma.rn.f32 <r>, <a>, <b>, <c>;", f32, pure=True, a=f32, b=f32, c=f32)  # 9.7.3.6
fma_toward_zero = op("fma.rz.f32 <r>, <a>, <b>, <c>;", f32, pure=True, a=f32, b=f32, c=f32)
fma_saturate = op("fma.rn.sat.f32 <r>, <a>, <b>, <c>;", f32, pure=True, a=f32, b=f32, c=f32)
mul = op("mul.rn.f32 <r>, <a>, <b>;", f32, pure=True, a=f32, b=f32)  # 9.7.3.5
add = op("add.rn.f32 <r>, <a>, <b>;", f32, pure=True, a=f32, b=f32)  # 9.7.3.3
sub = op("sub.rn.f32 <r>, <a>, <b>;", f32, pure=True, a=f32, b=f32)  # 9.7.3.4
div = op("div.rn.f32 <r>, <a>, <b>;", f32, pure=True, a=f32, b=f32)  # 9.7.3.8
fmax = op("max.f32 <r>, <a>, <b>;", f32, pure=True, a=f32, b=f32)  # 9.7.3.12
# 9.7.3.12; NaN if one of them is, sm_80
fmax_nan = op("max.NaN.f32 <r>, <a>, <b>;", f32, pure=True, a=f32, b=f32)
fmin_nan = op("min.NaN.f32 <r>, <a>, <b>;", f32, pure=True, a=f32, b=f32)  # 9.7.3.11, sm_80
fmin = op("min.f32 <r>, <a>, <b>;", f32, pure=True, a=f32, b=f32)  # 9.7.3.11
rcp = op("rcp.rn.f32 <r>, <a>;", f32, pure=True, a=f32)  # 9.7.3.13
rcp_approx = op("rcp.approx.ftz.f32 <r>, <a>;", f32, pure=True, a=f32)  # 9.7.3.13, 1 ulp
ex2 = op("ex2.approx.ftz.f32 <r>, <a>;", f32, pure=True, a=f32)  # 9.7.3.21
lg2 = op("lg2.approx.f32 <r>, <a>;", f32, pure=True, a=f32)  # 9.7.3.20
tanh = op("tanh.approx.f32 <r>, <a>;", f32, pure=True, a=f32)  # 9.7.3.22, sm_75
imax = op("max.s32 <r>, <a>, <b>;", i32, pure=True, a=i32, b=i32)  # 9.7.1.14
imin = op("min.s32 <r>, <a>, <b>;", i32, pure=True, a=i32, b=i32)  # 9.7.1.13
umin = op("min.u32 <r>, <a>, <b>;", u32, pure=True, a=u32, b=u32)
multiply_add = op("mad.lo.u32 <r>, <a>, <b>, <c>;", u32, pure=True, a=u32, b=u32, c=u32)  # 9.7.1.4
# 9.7.1.8; Numba's `//` of 32-bit numbers takes 64 bits
udiv = op("div.u32 <r>, <a>, <b>;", u32, pure=True, a=u32, b=u32)
urem = op("rem.u32 <r>, <a>, <b>;", u32, pure=True, a=u32, b=u32)  # 9.7.1.9
# 9.7.8.9; by 32 and more: 0
shift_right = op("shr.u32 <r>, <a>, <n>;", u32, pure=True, a=u32, n=u32)
dot4 = op("dp4a.u32.u32 <r>, <a>, <b>, <c>;", i32, pure=True, a=u32, b=u32, c=i32)  # 9.7.1.23
to_int = op("cvt.rni.s32.f32 <r>, <a>;", i32, pure=True, a=f32)  # 9.7.9.21, ties to even
to_float = op("cvt.rn.f32.s32 <r>, <a>;", f32, pure=True, a=i32)
bits = op("mov.b32 <r>, <a>;", u32, pure=True, a=f32)
from_bits = op("mov.b32 <r>, <a>;", f32, pure=True, a=u32)
# what is computed from it is computed here, not ahead of a loop
fresh = op("mov.b32 <r>, <a>;", i32, memory=True, a=i32)
# nor is what is added to it put together in another way
fresh_address = op("mov.b64 <r>, <a>;", u64, memory=True, a=u64)
words = op("mov.b64 <r>, {<low>, <high>};", u64, pure=True, low=u32, high=u32)  # 9.7.9.5
half_bits = op("{.reg .b16 h;\ncvt.rn.f16.f32 h, <a>;\ncvt.u32.u16 <r>, h;}", u32, pure=True, a=f32)
half_to_float = op(
    "{.reg .b16 h;\ncvt.u16.u32 h, <a>;\ncvt.f32.f16 <r>, h;}", f32, pure=True, a=u32
)
unpack_half = op(
    "{.reg .b16 x, y;\nmov.b32 {x, y}, <a>;\ncvt.f32.f16 <d.0>, x;\ncvt.f32.f16 <d.1>, y;}",
    pure=True,
    d=out(2, f32),
    a=u32,
)
# 9.7.9.7
prmt = op("prmt.b32 <r>, <a>, <b>, <selector>;", u32, pure=True, a=u32, b=u32, selector=u32)
pack = {
    "float16": op(
        "cvt.rn.f16x2.f32 <r>, <high>, <low>;", u32, pure=True, low=f32, high=f32
    ),  # 9.7.9.21
    "bfloat16": op("cvt.rn.bf16x2.f32 <r>, <high>, <low>;", u32, pure=True, low=f32, high=f32),
}
pack_turing = op(
    "{.reg .b16 x, y;\ncvt.rn.f16.f32 x, <low>;\ncvt.rn.f16.f32 y, <high>;\nmov.b32 <r>, {x, y};}",
    u32,
    pure=True,
    low=f32,
    high=f32,
)  # the packed cvt is sm_80's

# ---- memory (9.7.9.8 ld, 9.7.9.11 st)
load_global_v4 = op(
    "ld.global.nc.v4.b32 <d>, [<address>];", memory=True, d=out(4, u32), address=u64
)
load_global_v2 = op(
    "ld.global.nc.v2.b32 <d>, [<address>];", memory=True, d=out(2, u32), address=u64
)
store_global_v4 = op(
    "st.global.v4.b32 [<address>], <s>;", memory=True, address=u64, s=Fragment(4, u32)
)
store_global_v2 = op(
    "st.global.v2.b32 [<address>], <s>;", memory=True, address=u64, s=Fragment(2, u32)
)
store_global = op("st.global.b32 [<address>], <s>;", memory=True, address=u64, s=u32)
store_global_f32 = op("st.global.f32 [<address>], <s>;", memory=True, address=u64, s=f32)
store_global_u16 = op(
    "{.reg .b16 h;\ncvt.u16.u32 h, <s>;\nst.global.b16 [<address>], h;}",
    memory=True,
    address=u64,
    s=u32,
)
load_global_f32 = op("ld.global.nc.f32 <r>, [<address>];", f32, memory=True, address=u64)
load_global_s32 = op("ld.global.nc.s32 <r>, [<address>];", i32, memory=True, address=u64)
load_global_u8 = op("ld.global.nc.u8 <r>, [<address>];", u32, memory=True, address=u64)
store_global_u8 = op(
    "{.reg .b16 h;\ncvt.u16.u32 h, <s>;\nst.global.b8 [<address>], h;}",
    memory=True,
    address=u64,
    s=u32,
)
load_global_u16 = op(
    "{.reg .b16 h;\nld.global.nc.u16 h, [<address>];\ncvt.u32.u16 <r>, h;}",
    u32,
    memory=True,
    address=u64,
)
# not .nc: the kernel writes it
load_global_written = op("ld.global.s32 <r>, [<address>];", i32, memory=True, address=u64)
# 9.7.13.7
atomic_add = op("atom.global.add.s32 <r>, [<address>], <n>;", i32, memory=True, address=u64, n=i32)
load_shared_v4 = op("ld.shared.v4.b32 <d>, [<address>];", memory=True, d=out(4, u32), address=u32)
load_shared_f32_v2 = op(
    "ld.shared.v2.f32 <d>, [<address>];", memory=True, d=out(2, f32), address=u32
)
store_shared_v4 = op(
    "st.shared.v4.b32 [<address>], <s>;", memory=True, address=u32, s=Fragment(4, u32)
)
store_shared_v2 = op(
    "st.shared.v2.b32 [<address>], <s>;", memory=True, address=u32, s=Fragment(2, u32)
)
store_shared_f32 = op("st.shared.f32 [<address>], <s>;", memory=True, address=u32, s=f32)
store_shared = op("st.shared.b32 [<address>], <s>;", memory=True, address=u32, s=u32)
store_shared_u16 = op(
    "{.reg .b16 h;\ncvt.u16.u32 h, <s>;\nst.shared.b16 [<address>], h;}",
    memory=True,
    address=u32,
    s=u32,
)
load_shared_s32 = op("ld.shared.s32 <r>, [<address>];", i32, memory=True, address=u32)
load_shared_f32 = op("ld.shared.f32 <r>, [<address>];", f32, memory=True, address=u32)
# 9.7.14.5.15; `_ahead`: the instruction adds a constant to the address
ldmatrix = op(
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 <d>, [<address>];",
    memory=True,
    d=out(4, u32),
    address=u32,
)
ldmatrix_trans = op(
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 <d>, [<address>];",
    memory=True,
    d=out(4, u32),
    address=u32,
)
ldmatrix_ahead = op(
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 <d>, [<address>+<ahead>];",
    memory=True,
    d=out(4, u32),
    address=u32,
    ahead=Immediate(i32),
)
ldmatrix_trans_ahead = op(
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 <d>, [<address>+<ahead>];",
    memory=True,
    d=out(4, u32),
    address=u32,
    ahead=Immediate(i32),
)

# ---- asynchronous copies to shared memory (9.7.9.25.3)
cp_async = op("cp.async.cg.shared.global [<to>], [<source>], 16;", memory=True, to=u32, source=u64)
cp_async_zfill = op(
    "cp.async.cg.shared.global [<to>+<ahead>], [<source>], 16, <size>;",
    memory=True,
    to=u32,
    ahead=Immediate(i32),
    source=u64,
    size=u32,
)
cp_async_commit = op("cp.async.commit_group;", memory=True)
cp_async_wait = {n: op(f"cp.async.wait_group {n};", memory=True) for n in range(4)}

# ---- warps and barriers
# 9.7.9.6
shuffle_xor = op("shfl.sync.bfly.b32 <r>, <a>, <lanes>, 0x1f, 0xffffffff;", f32, a=f32, lanes=u32)
shuffle_xor_i32 = op(
    "shfl.sync.bfly.b32 <r>, <a>, <lanes>, 0x1f, 0xffffffff;", i32, a=i32, lanes=u32
)
shuffle = op("shfl.sync.idx.b32 <r>, <a>, <lane>, 0x1f, 0xffffffff;", f32, a=f32, lane=i32)
uniform = op(
    "shfl.sync.idx.b32 <r>, <a>, 0, 0x1f, 0xffffffff;",
    i32,
    a=i32,
    # what all lanes agree on: ptxas then keeps it, and what follows from it, in one register of the
    # warp
)
# 9.7.13.8: 1 where it is not 0 in all lanes of the warp
vote_all = op(
    "{.reg .pred p;\nsetp.ne.s32 p, <a>, 0;\nvote.sync.all.pred p, p, 0xffffffff;\n"
    "selp.s32 <r>, 1, 0, p;}",
    i32,
    a=i32,
)
barrier = op("bar.sync <number>, <threads>;", memory=True, number=u32, threads=u32)  # 9.7.13.1
barrier_arrive = op("bar.arrive <number>, <threads>;", memory=True, number=u32, threads=u32)


# ---- tensor cores: mma.sync (9.7.14.5)
def _mma(shape: str, d: str, a: str, b: str, na: int, nb: int, accumulators: int, t: Any) -> Any:
    return op(
        f"mma.sync.aligned.{shape}.row.col.{d}.{a}.{b}.{d} <d>, <a>, <b>, <d>;",
        pure=True,
        d=inout(accumulators, t),
        a=Fragment(na, u32),
        b=Fragment(nb, u32),
    )


mma = {
    "float16": _mma("m16n8k16", "f32", "f16", "f16", 4, 2, 4, f32),
    "bfloat16": _mma("m16n8k16", "f32", "bf16", "bf16", 4, 2, 4, f32),
}
mma_f16_accumulate = _mma("m16n8k16", "f16", "f16", "f16", 4, 2, 2, u32)
mma_s8 = _mma("m16n8k32", "s32", "s8", "s8", 4, 2, 4, i32)
mma_u8s8 = _mma("m16n8k32", "s32", "u8", "s8", 4, 2, 4, i32)
mma_s8u8 = _mma("m16n8k32", "s32", "s8", "u8", 4, 2, 4, i32)
mma_tf32 = _mma(
    "m16n8k8", "f32", "tf32", "tf32", 4, 2, 4, f32
)  # the low 13 bits of an operand are not read


def _mma_turing(a: str, b: str = "s8") -> Any:
    """An m16n8k32 product of bytes as four m8n8k16 (the only shape of sm_75).

    Each multiplies half of the rows by half of k.
    """
    text = "".join(
        f"mma.sync.aligned.m8n8k16.row.col.s32.{a}.{b}.s32 {{<d.{2 * r}>, <d.{2 * r + 1}>}}, {{<a.{r + 2 * h}>}}, "
        f"{{<b.{h}>}}, {{<d.{2 * r}>, <d.{2 * r + 1}>}};\n"
        for r in range(2)
        for h in range(2)
    )
    return op(text, pure=True, d=inout(4, i32), a=Fragment(4, u32), b=Fragment(2, u32))


# an m16n8k16 product as two m16n8k8, half of k each (sm_75)
mma_turing_f16 = op(
    "".join(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {<d.0>, <d.1>, <d.2>, <d.3>}, "
        f"{{<a.{2 * h}>, <a.{2 * h + 1}>}}, {{<b.{h}>}}, {{<d.0>, <d.1>, <d.2>, <d.3>}};\n"
        for h in range(2)
    ),
    pure=True,
    d=inout(4, f32),
    a=Fragment(4, u32),
    b=Fragment(2, u32),
)


def products(dtype: str, turing: bool) -> tuple[Any, Any]:
    """(mma, pack): m16n8k16 products of halves, and two float32 packed into an operand's word."""
    return (mma_turing_f16, pack_turing) if turing else (mma[dtype], pack[dtype])


mma_turing_s8 = _mma_turing("s8")
mma_turing_u8s8 = _mma_turing("u8")
mma_turing_s8u8 = _mma_turing("s8", "u8")


# ---- Hopper: mbarrier (9.7.13.15), TMA (9.7.9.27), wgmma (9.7.15), setmaxnreg (9.7.19.5)
def _tma_load(coordinates: str, multicast: bool = False) -> Any:
    """A tile of a tensor map, at these coordinates, into shared memory; its bytes count at `bar`.

    multicast : into the same place of each of the `blocks` of a cluster (a bit for every rank)
    """
    at = ", ".join(f"<{name}>" for name in coordinates)
    copy = f"cp.async.bulk.tensor.{len(coordinates)}d.shared::cluster.global.tile"
    copy += ".mbarrier::complete_tx::bytes"
    places = f"[<to>], [<map>, {{{at}}}], [<bar>]"
    operands: dict[str, Any] = {
        "to": u32,
        "map": u64,
        **dict.fromkeys(coordinates, i32),
        "bar": u32,
    }
    if not multicast:
        return op(f"{copy} {places};", memory=True, **operands)
    mask = "{\n.reg .b16 mask;\ncvt.u16.u32 mask, <blocks>;\n"
    text = f"{mask}{copy}.multicast::cluster {places}, mask;\n}}"
    return op(text, memory=True, **operands, blocks=u32)


mbarrier_init = op(
    "mbarrier.init.shared::cta.b64 [<bar>], <count>;", memory=True, bar=u32, count=u32
)
mbarrier_expect = op(
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [<bar>], <size>;", memory=True, bar=u32, size=u32
)
# without an arrival: more bytes of the phase under way
mbarrier_expect_more = op(
    "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [<bar>], <size>;",
    memory=True,
    bar=u32,
    size=u32,
)
mbarrier_arrive = op("mbarrier.arrive.shared::cta.b64 _, [<bar>];", memory=True, bar=u32)
mbarrier_wait = op(
    "{\n.reg .pred p;\nwait_%=:\n"
    "mbarrier.try_wait.parity.shared::cta.b64 p, [<bar>], <parity>;\n@!p bra wait_%=;\n}",
    memory=True,
    bar=u32,
    parity=u32,
)
fence_mbarrier_init = op("fence.mbarrier_init.release.cluster;", memory=True)
fence_async = op("fence.proxy.async.shared::cta;", memory=True)
tensormap_acquire = op(
    "fence.proxy.tensormap::generic.acquire.gpu [<map>], 128;", memory=True, map=u64
)
tma_load_3d, tma_load_4d, tma_load_5d = (_tma_load(x) for x in ("xyz", "xyzw", "xyzwu"))
# clusters of blocks (9.7.13.4, 9.7.9.23): a copy into the same place of each of the `blocks` (a bit
# for every rank), an arrival by the first lanes of a warp, each at the mbarrier of one block
cluster_rank = op("mov.u32 <r>, %cluster_ctarank;", u32, pure=True)
cluster_address = op(
    "mapa.shared::cluster.u32 <r>, <address>, <rank>;", u32, pure=True, address=u32, rank=u32
)
cluster_arrive = op("barrier.cluster.arrive.release;", memory=True)
cluster_wait = op("barrier.cluster.wait.acquire;", memory=True)
mbarrier_arrive_cluster = op(
    "{\n.reg .pred p;\nsetp.lt.u32 p, <lane>, <lanes>;\n"
    "@p mbarrier.arrive.shared::cluster.b64 _, [<bar>];\n}",
    memory=True,
    bar=u32,
    lane=u32,
    lanes=u32,
)
tma_multicast_4d = _tma_load("xyzw", multicast=True)
wgmma_fence = op("wgmma.fence.sync.aligned;", memory=True)
wgmma_commit = op("wgmma.commit_group.sync.aligned;", memory=True)
wgmma_wait = {n: op(f"wgmma.wait_group.sync.aligned {n};", memory=True) for n in range(3)}
setmaxnreg_inc = {n: op(f"setmaxnreg.inc.sync.aligned.u32 {n};") for n in (160, 232, 240)}
setmaxnreg_dec = {n: op(f"setmaxnreg.dec.sync.aligned.u32 {n};") for n in (24, 40)}


def register_fence(n: int, t: Any = f32) -> Any:
    """An empty statement that claims to change n registers: nothing that uses them moves across."""
    return op("", memory=True, a=inout(n, t))


def wgmma(n: int, dtype: str, a_registers: bool, mn_major: bool | None = None) -> Any:
    """m64 x n accumulators += A (64 x k) . B (k x n).

    B comes by shared-memory descriptor, and so does A unless it is in registers.

    `keep` = 0 starts from zero. B is read MN-major (V as stored) or K-major (K as stored): as
    `mn_major` says, else MN-major with `a_registers`. For dtype "int8" it is always K-major, k is
    32, and an A in registers is unsigned (weights); n is 8, 24, or a multiple of 16 (9.7.15.2).
    """
    if dtype == "int8":
        d = "s32"
        kind = "u8.s8" if a_registers else "s8.s8"
        k = 32
        tail = ""
        t = i32
    else:
        short = {"float16": "f16", "bfloat16": "bf16"}[dtype]
        d = "f32"
        kind = f"{short}.{short}"
        k = 16
        turned = int(a_registers if mn_major is None else mn_major)
        tail = f", 1, 1, {turned}" if a_registers else f", 1, 1, 0, {turned}"
        t = f32
    return op(
        f"{{\n.reg .pred p;\nsetp.ne.b32 p, <keep>, 0;\n"
        f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{d}.{kind} <d>, <a>, <b>, p{tail};\n}}",
        memory=True,
        d=inout(n // 2, t),
        a=Fragment(4, u32) if a_registers else u64,
        b=u64,
        keep=i32,
    )
