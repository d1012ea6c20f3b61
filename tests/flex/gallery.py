"""Well-known score and mask functions, written in NumPy's style.

Torch's differs only where it must.
"""

import numpy as np

B = 2
H = 4
L = 150
S = 150
D = 32
rng = np.random.default_rng(7)
SLOPES = 2.0 ** -np.arange(1, H + 1)
RELATIVE = rng.standard_normal((H, 2 * L + 1)).astype(np.float32)
BUCKETS = rng.standard_normal((H, 32)).astype(np.float16)
DOCUMENTS = np.repeat(np.arange(5), 30)
LENGTHS = np.array([100, 150], np.int32)
PREFIX = np.array([20, 70], np.uint8)
HOPS = rng.integers(0, 6, (L, S))
HOP_BIAS = rng.standard_normal((6, H)).astype(np.float32)
LATENT_Q, LATENT_K = (rng.standard_normal((B, L, 8)).astype(np.float32) for _ in "qk")
WIDTH = 10  # of a picture of 15 rows


def alibi(score, b, h, q, k):
    return score - SLOPES[h] * abs(q - k)


def relative_bias(score, b, h, q, k):
    return score + RELATIVE[h, q - k + L]


def softcap(score, b, h, q, k):
    return 20.0 * np.tanh(score / 20.0)


def softcap_rational(score, b, h, q, k):
    """The approximation x (27 + x^2) / (27 + 9 x^2), clipped."""
    x = np.clip(score / 3.0, -3.0, 3.0)
    return 3.0 * (x * (27.0 + x * x) / (27.0 + 9.0 * x * x))


def t5_bias(score, b, h, q, k):
    """Buckets of distances: exact up to 8, then logarithmic; signs apart."""
    far = abs(k - q)
    large = 8 + (np.log(np.maximum(far, 1) / 8.0) / np.log(128 / 8.0) * 8).astype(int)
    bucket = np.where(far < 8, far, np.minimum(large, 15)) + np.where(k > q, 16, 0)
    return score + BUCKETS[h, bucket]


def graphormer(score, b, h, q, k):
    return score + HOP_BIAS[HOPS[q, k], h]


def rotary_latent(score, b, h, q, k):
    total = score
    for d in range(8):
        total = total + LATENT_Q[b, q, d] * LATENT_K[b, k, d]
    return total


def distance_wave(score, b, h, q, k):
    return score + np.sin(score * 3.0) + np.cos((q - k) * 0.05)


def checkerboard(score, b, h, q, k):
    return np.where((q % 2) == (k % 2), score * 0.5, np.where(k % 3 == 0, score * 2.0, score))


def causal_in_score(score, b, h, q, k):
    return np.where(q >= k, score, -np.inf)


def powers(score, b, h, q, k):
    return score + np.exp2(-((h + 1) * 8.0 / H)) * (k - q)


SCORES = [
    alibi, relative_bias, softcap, softcap_rational, t5_bias, graphormer, rotary_latent,
    distance_wave, checkerboard, causal_in_score, powers,
]  # fmt: skip


def causal(b, h, q, k):
    return q >= k


def sliding_window(b, h, q, k):
    return (q >= k) & (q - k <= 25)


def prefix_lm(b, h, q, k):
    return (k < PREFIX[b]) | (q >= k)


def documents(b, h, q, k):
    return (DOCUMENTS[q] == DOCUMENTS[k]) & (q >= k)


def padded(b, h, q, k):
    return (q < LENGTHS[b]) & (k < LENGTHS[b])


def dilated(b, h, q, k):
    return (abs(q - k) <= 30) & ((q - k) % 3 == 0)


def neighbourhood(b, h, q, k):
    """7 x 7 pixels around each pixel of a picture, moved inside at its edges."""
    row = q // WIDTH
    column = q % WIDTH
    row = np.clip(row, 3, 15 - 1 - 3)
    column = np.clip(column, 3, WIDTH - 1 - 3)
    return (abs(row - k // WIDTH) <= 3) & (abs(column - k % WIDTH) <= 3)


def strided_heads(b, h, q, k):
    return ((q >> 4) == (k >> 4)) | ((k & 15) == h) & (q >= k)


def local_and_sinks(b, h, q, k):
    return (k < 4) | ((q - k < 32) & (q - k >= 0))


def nothing_for_some(b, h, q, k):
    return (q % 50 != 7) & (k > q - 20)


MASKS = [
    causal, sliding_window, prefix_lm, documents, padded, dilated, neighbourhood, strided_heads,
    local_and_sinks, nothing_for_some,
]  # fmt: skip


def operands(seed=0, hkv=H, length=L, s=S, d=D):
    made = np.random.default_rng(seed)
    q = made.standard_normal((B, H, length, d)).astype(np.float32)
    k, v = (made.standard_normal((B, hkv, s, d)).astype(np.float32) for _ in "kv")
    return q, k, v


def indices(length=L, s=S):
    """b, h, q, k as arrays that broadcast to (B, H, L, S)."""
    sizes = B, H, length, s
    return [
        np.arange(n).reshape([-1 if i == axis else 1 for i in range(4)])
        for axis, n in enumerate(sizes)
    ]


def oracle(q, k, v, score_mod=None, mask_mod=None, hidden=None):
    """out and lse in float64: the functions called with all indices at once."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1).astype(np.float64) for x in (k, v))
    scores = q.astype(np.float64) @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    at = indices(q.shape[2], k.shape[2])
    with np.errstate(all="ignore"):
        if score_mod is not None:
            scores = np.broadcast_to(score_mod(scores, *at), scores.shape)
        if mask_mod is not None:
            scores = np.where(mask_mod(*at), scores, -np.inf)
        if hidden is not None:
            scores = np.where(hidden, -np.inf, scores)
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - np.where(np.isinf(top), 0, top))
        total = weights.sum(-1, keepdims=True)
        lse = np.where(total > 0, np.where(np.isinf(top), 0, top) + np.log(total), -np.inf)[..., 0]
        return np.where(total > 0, weights @ v / total, 0), lse
