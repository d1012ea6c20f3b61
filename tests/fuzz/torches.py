"""numflash.torch on tensors of any strides, with gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import oracle
from .arrays import numbers
from .checks import axis_of, expected, held, make_options, with_other_arrays
from .compare import WrongError, close


def padding_as_lengths(o: dict, sizes: tuple[int, int]) -> dict:
    """Options with a mask that is one row for all queries and hides only the last keys as
    `key_lengths`, as docs/pytorch.md promises: INT8's scales then do not see what is hidden.

    sizes (batch, keys).
    """
    mask = o.get("attn_mask")
    if (
        mask is None
        or mask.dtype != np.bool_
        or mask.shape != (sizes[0], 1, 1, sizes[1])
        or 0 in sizes
        or "key_lengths" in o
        or "alignment" in o
    ):
        return o
    lengths = mask.sum(-1).reshape(-1)
    if not np.array_equal(mask[:, 0, 0], np.arange(sizes[1]) < lengths[:, None]):
        return o
    return {n: x for n, x in o.items() if n != "attn_mask"} | {"key_lengths": lengths}


def leave_a_plan(run: Callable[[dict], tuple], call: dict, others: dict) -> None:
    """`run` with other numbers in the options' tensors, of the dtypes that `call` has."""
    import torch as t

    tensors = {
        name: t.from_numpy(x).to(call[name].dtype).requires_grad_(call[name].requires_grad)
        for name, x in others.items()
        if isinstance(x, np.ndarray)
    }
    run(call | tensors)


def torch(c: dict) -> None:
    import torch as t

    import numflash.torch

    shapes = {
        "q": (c["b"], c["h"], c["l"], c["d"]),
        "k": (c["b"], c["g"], c["s"], c["d"]),
        "v": (c["b"], c["g"], c["s"], c["dv"]),
        "do": (c["b"], c["h"], c["l"], c["dv"]),
    }
    kept = getattr(t, c["dtype"])
    made = {
        n: t.from_numpy(numbers(shape, c[n]["draw"], c[n]["seed"], "float32")).to(kept)
        for n, shape in shapes.items()
    }
    back = {n: np.argsort(c[n]["order"]).tolist() for n in shapes}
    made = {n: x.permute(c[n]["order"]).contiguous().permute(back[n]) for n, x in made.items()}
    given, o = make_options(c["options"], c["b"], c["h"], c["l"], c["s"])
    call = {n: t.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    if "attn_mask" in call and call["attn_mask"].is_floating_point():
        call["attn_mask"] = call["attn_mask"].float()
        o["attn_mask"] = call["attn_mask"].numpy()
    o = padding_as_lengths(o, (c["b"], c["s"]))
    q, k, v = (made[n].requires_grad_(c["grad"]) for n in "qkv")
    trained = {n: call[n] for n in ("attn_mask", "sinks") if n in call and c["grad"]}
    trained = {n: x.requires_grad_() for n, x in trained.items() if x.is_floating_point()}
    precision = {"precision": c["precision"]} if c["precision"] else {}
    of_lse = None
    if c.get("grad_lse"):
        rows = shapes["q"][:3]
        of_lse = t.from_numpy(numbers(rows, c["do"]["draw"], c["do"]["seed"], "float32"))

    def run(call: dict) -> tuple:
        lse = None
        options = {**call, **precision, "enable_gqa": c["g"] != c["h"]}
        with t.set_grad_enabled(c["grad"]):
            if c["call"] == "sdpa":
                out = numflash.torch.scaled_dot_product_attention(q, k, v, **options)
            else:
                out, lse = numflash.torch.attention(q, k, v, **options, return_lse=True)
            if c["grad"]:
                if of_lse is not None:
                    t.autograd.backward((out, lse), (made["do"], of_lse))
                else:
                    out.backward(made["do"])
        return out, lse

    others = with_other_arrays(given, c["s"])
    if others:
        leave_a_plan(run, call, others)
        q.grad = k.grad = v.grad = None
    out, lse = run(call)
    if out.dtype != kept or tuple(out.shape) != shapes["do"]:
        raise WrongError(f"out: got {out.dtype} {tuple(out.shape)}")
    arrays = {n: made[n].detach().float().numpy() for n in shapes}
    name = c["precision"] or c["dtype"]
    found = expected(arrays["q"], arrays["k"], arrays["v"], o, name, None)
    got = out.detach().float().numpy()
    if 0 in shapes["q"] or 0 in shapes["k"]:
        return
    held(
        found,
        got,
        found.lse if lse is None else lse.detach().numpy(),
        arrays["v"].astype(np.float64),
        c["dtype"],
        name,
    )
    if c["grad"]:
        wide = {n: x.astype(np.float64) for n, x in arrays.items()}
        exact = oracle.attention(wide["q"], wide["k"], wide["v"], o)
        want, error = oracle.gradients(
            *(wide[n] for n in ("q", "k", "v", "do")),
            o,
            got.astype(np.float64),
            exact.lse,
            name,
            None if of_lse is None else of_lse.double().numpy(),
        )
        if (np.abs(exact.lse[np.isfinite(exact.lse)]) > 2.0**20).any():
            return
        for n, x, x_want, e in zip("qkv", (q, k, v), want, error, strict=False):
            grad = np.zeros(x_want.shape) if x.grad is None else x.grad.float().numpy()
            close(f"d{n}", grad, x_want, e, c["dtype"])
        if "attn_mask" in trained:
            grad = trained["attn_mask"].grad.numpy()
            axes = axis_of(grad.shape, want[3].shape)
            total, room = (x[3].sum(axes).reshape(grad.shape) for x in (want, error))
            close("attn_mask", grad, total, room, "float32")
        if "sinks" in trained:
            terms = wide["do"] * got
            added = np.zeros(exact.lse.shape) if of_lse is None else of_lse.double().numpy()
            weight = np.exp(np.minimum(o["sinks"][:, None] - exact.lse, 0))
            size = np.abs(terms).sum(-1) + np.abs(added)
            room = weight * size * (1e-5 + 4 * oracle.EPS * np.abs(exact.lse))
            grad = trained["sinks"].grad.numpy()
            total = -(weight * (terms.sum(-1) - added)).sum((0, 2))
            close("sinks", grad, total, room.sum((0, 2)), "float32")
