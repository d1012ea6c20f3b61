"""A layer of a `ResidentCache` for models with latent attention (DeepSeek V2 and V3, MiniCPM3, ...).

Such a model caches one latent for each token, from which `kv_b_proj` makes keys and values of every
head. With transformers' own caches every step expands all cached tokens again. Here the latents stay
in a `KVCache`, as one KV head whose value is the first part of its key, and a step attends to them as
they are. The projection is absorbed into the query and the result (DeepSeek-V2, 2024, section 2.1):

    query of head h   [q_nope . W_k(h), q_rope], rank + rope channels
    result of head h  (weights . latents) . W_v(h)

A prompt is expanded once and takes the attention kernel, which has fewer channels to multiply then.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..cache.kvcache import KVCache
from ..cache.settings import SHARED_DTYPES
from ..errors import ArgumentError
from .masks import Reading
from .resident_layer import ResidentLayer, as_numpy
from .standin import StandIn

# New tokens up to which a past is attended to as it is. Absorbed, a score and its value take two to four
# times the products; expanding takes rank x (nope + value) more for each cached token and head.
FEW_TOKENS = 128


class LatentLayer(ResidentLayer):
    """Latents of one attention layer; of models that expand keys and values before they cache them,
    these, as in `ResidentLayer`.

    Attributes
    ----------
    latent : whether latents are cached
    module : the model's layer, once it has asked for keys and values
    """

    def __init__(self, cache: Any, window: int | None, shared: bool = False) -> None:
        super().__init__(cache, window, shared)
        self.module: Any = None
        self._balance = 1.0
        self._made: tuple[Any, Any] | None = None  # a projection, and its weight as it was made

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep the new latents (B, 1, n, rank) and rotated keys (B, 1, n, rope) for `attend`."""
        if self.store is None:
            channels = key_states.shape[3], value_states.shape[3]
            self.latent = key_states.shape[1] == 1 and channels == self.cache.latent
            if self.latent:
                _check_dtype(self.cache.dtype)
                _pass_placeholders_on()
        return super().update(key_states, value_states, *args, **kwargs)

    def placeholders(self, module: Any, latents: StandIn) -> tuple[StandIn, StandIn]:
        """Keys and values of every head, of which nothing is computed."""
        self.module = module
        b, _, tokens, _ = latents.shape
        heads = b, module.config.num_attention_heads, tokens
        channels = module.qk_nope_head_dim + module.qk_rope_head_dim, module.v_head_dim
        key, value = (StandIn.shaped((*heads, d), latents.dtype, self) for d in channels)
        return key, value

    def reset(self) -> None:
        """Remove all tokens, and what was made of a projection: an adapter may be switched since."""
        super().reset()
        self._made = None

    def twin(self, cache: Any) -> ResidentLayer:
        """The same tokens in a layer of another cache."""
        new: Any = super().twin(cache)
        new.latent, new._balance = self.latent, self._balance
        return new

    # ---- in a file
    def describe(self) -> dict[str, Any]:
        """Window, tokens, and the arguments of the store."""
        return {**super().describe(), "latent": self.latent, "balance": self._balance}

    def restore(self, about: dict[str, Any], state: dict[str, np.ndarray]) -> None:
        """Take over what `describe` and `state` gave."""
        self.latent, self._balance = about.get("latent", False), about.get("balance", 1.0)
        super().restore(about, state)
        if self.latent:
            _pass_placeholders_on()

    # ---- the store
    def _create(self, key: Tensor, value: Tensor, capped: bool) -> KVCache:
        if not self.latent:
            return super()._create(key, value, capped)
        b, _, n, rank = key.shape
        return self._store((b, 1, rank + value.shape[3], rank), n, False, False)

    def _begin(self, key: Tensor, value: Tensor, valid: np.ndarray | None) -> None:
        if not self.latent or self.cache.dtype != "int8":
            return
        latents, rotated = key[:, 0], value[:, 0]
        if valid is not None:
            there = torch.from_numpy(valid)
            latents, rotated = latents[there], rotated[there]
        if latents.numel():
            self._balance = _balance(latents, rotated)

    def _held_sizes(self, held: KVCache) -> tuple[int, int, int]:
        if not self.latent:
            return super()._held_sizes(held)
        return 1, held.value_dim, held.head_dim - held.value_dim

    def _tokens(self, key: Tensor, value: Tensor) -> tuple[np.ndarray, np.ndarray | None]:
        if not self.latent:
            return super()._tokens(key, value)
        return as_numpy(torch.cat((key, value * self._balance), -1)), None

    def _read(self, i: int, keys: np.ndarray, values: np.ndarray) -> None:
        if not self.latent:
            super()._read(i, keys, values)
            return
        assert self.store is not None
        held, _ = self.store.tail(i, self.window)
        n, rank = held.shape[1], keys.shape[2]
        keys[:, :n], values[:, :n] = held[..., :rank], held[..., rank:] / self._balance

    # ---- attention
    def _suits_decode(self, n: int, group: int) -> bool:
        if not self.latent:
            return super()._suits_decode(n, group)
        return n <= (FEW_TOKENS if self.seen else 1) and self._weight() is not None

    def _expanded(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if not self.latent:
            return super()._expanded(keys, values)
        if not keys.shape[2]:  # new tokens that are all padding: models cannot reshape nothing
            module, (b, _, none, _) = self.module, keys.shape
            channels = module.qk_nope_head_dim + module.qk_rope_head_dim, module.v_head_dim
            shape = b, module.config.num_attention_heads, none
            return keys.new_empty((*shape, channels[0])), keys.new_empty((*shape, channels[1]))
        found: tuple[Tensor, Tensor] = self.module.expand_kv(keys, values)
        return found

    def _decode(
        self, query: Tensor, key: Tensor, value: Tensor, reading: Reading, options: dict[str, Any]
    ) -> Tensor:
        if not self.latent:
            return super()._decode(query, key, value, reading, options)
        weight, module = self._weight(), self.module
        by_head = weight.reshape(query.shape[1], -1, weight.shape[1])  # (H, nope + value, rank)
        of_keys, of_values = by_head.split([module.qk_nope_head_dim, module.v_head_dim], 1)
        nope, rope = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], 3)
        rows = torch.cat((nope @ of_keys, rope / self._balance), -1)
        if options["scale"] is None:
            options = {**options, "scale": query.shape[3] ** -0.5}
        return super()._decode(rows, key, value, reading, options) @ of_values.transpose(1, 2)

    def _weight(self) -> Any:
        """What `kv_b_proj` multiplies latents by, (H * (nope + value), rank); None if it adds something, too.

        Of a plain linear layer it is the weight; of another, one that is quantised, adapted, hooked or
        offloaded, what it makes of the unit vectors, once.
        """
        projection, dtype = self.module.kv_b_proj, self.dtype
        if _is_plain(projection) and projection.weight.dtype is dtype:
            return projection.weight.detach() if projection.bias is None else None
        if self._made is None or self._made[0] is not projection:
            with torch.no_grad():
                unit = torch.eye(self.module.kv_lora_rank, dtype=dtype)
                constant, made = projection(torch.zeros_like(unit[:1])), projection(unit)
            self._made = projection, None if constant.any() else made.T
        return self._made[1]


def _is_plain(projection: Any) -> bool:
    """Whether a layer does no more than its weight and its bias say."""
    changed = (
        projection._forward_hooks or projection._forward_pre_hooks or "forward" in vars(projection)
    )
    return type(projection) is nn.Linear and not changed


def _balance(latents: Tensor, rotated: Tensor) -> float:
    """A power of two that makes rotated keys as large as latents.

    INT8 has one scale for both; without this the smaller ones would have few of its levels.
    """
    sizes = [x.detach().abs().amax(-1).float().median() for x in (latents, rotated)]
    ratio = float(sizes[0] / sizes[1]) if sizes[1] > 0 else 1.0
    found = 2.0 ** round(math.log2(ratio)) if 2.0**-20 < ratio < 2.0**20 else 1.0
    return found


def _check_dtype(dtype: str) -> None:
    if dtype not in SHARED_DTYPES:
        raise ArgumentError(
            f"dtype: got {dtype!r} for a model that caches latents; allowed: {', '.join(map(repr, SHARED_DTYPES))}"
        )


def _pass_placeholders_on() -> None:
    """Replace `expand_kv` of all models that are loaded by one that knows placeholders."""
    for path, source in list(sys.modules.items()):
        if path.startswith("transformers") and ".modeling_" in path:
            for found in list(vars(source).values()):
                original = vars(found).get("expand_kv") if isinstance(found, type) else None
                if original is not None and not hasattr(original, "__wrapped__"):
                    found.expand_kv = _knowing_placeholders(original)


def _knowing_placeholders(original: Any) -> Any:
    @functools.wraps(original)
    def expand_kv(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(kv_nope, StandIn):
            found: tuple[Tensor, Tensor] = kv_nope.layer.placeholders(self, kv_nope)
            return found
        expanded: tuple[Tensor, Tensor] = original(self, kv_nope, k_rot)
        return expanded

    return expand_kv
