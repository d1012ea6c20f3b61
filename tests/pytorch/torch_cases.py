"""What the tests of numflash.torch compute on, and with what they compare."""

import torch

SDPA = torch.nn.functional.scaled_dot_product_attention


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(b=2, h=4, l=5, s=7, d=8, dv=None, hkv=None, dtype=torch.float32):
    shapes = (b, h, l, d), (b, hkv or h, s, d), (b, hkv or h, s, dv or d)
    return tuple(draw(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))


Q, K, V = qkv()
KEEP = torch.rand(2, 4, 5, 7, generator=torch.Generator().manual_seed(3)) > 0.4
BIAS = draw(2, 4, 5, 7, seed=4)


def exact(q, k, v, attn_mask=None, **options):
    """PyTorch's own, in float64."""
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.double()
    return SDPA(q.double(), k.double(), v.double(), attn_mask, **options)


# PyTorch's leading dimensions, broadcast and grouped
SHAPES = [  # query, key, value, enable_gqa
    ((5, 8), (7, 8), (7, 3), False),
    ((4, 5, 8), (4, 7, 8), (4, 7, 8), False),
    ((2, 4, 5, 8), (1, 4, 7, 8), (1, 4, 7, 8), False),
    ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8), False),
    ((1, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), False),
    ((2, 1, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), False),
    ((2, 4, 5, 8), (1, 4, 7, 8), (2, 1, 7, 8), False),
    ((2, 4, 5, 8), (4, 7, 8), (7, 8), False),
    ((3, 2, 4, 5, 8), (3, 2, 4, 7, 8), (3, 2, 4, 7, 8), False),
    ((3, 2, 4, 5, 8), (1, 2, 4, 7, 8), (2, 4, 7, 8), False),
    ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), True),
    ((2, 4, 5, 8), (2, 2, 7, 8), (2, 1, 7, 8), True),
    ((4, 5, 8), (2, 7, 8), (2, 7, 8), True),
    ((2, 4, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8), True),
    ((3, 2, 4, 5, 8), (3, 2, 2, 7, 8), (3, 2, 2, 7, 3), True),
]


# the operator's options, in its order
DEFAULTS = {
    "attn_mask": None,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
    "left": None,
    "right": None,
    "alignment": "upper_left",
    "key_lengths": None,
    "softcap": 0.0,
    "alibi_slopes": None,
    "sinks": None,
    "precision": None,
    "pv": None,
    "impl": "auto",
}


def gradients(function, arrays, **options):
    """Of a sum of outputs with uneven weights, with respect to each array."""
    arrays = [x.detach().clone().requires_grad_() for x in arrays]
    out = function(*arrays, **options)
    (out * draw(*out.shape, seed=9).to(out.dtype)).sum().backward()
    return [x.grad for x in arrays]
