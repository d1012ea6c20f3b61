"""`cache_implementation="numflash_int8"` in `generate`.

transformers has no registry for caches, so two names are wrapped.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers.generation import configuration_utils, utils

from ..errors import ArgumentError
from .resident import ResidentCache

CACHES = {
    "numflash": "float32",
    "numflash_bfloat16": "bfloat16",
    "numflash_float16": "float16",
    "numflash_int8": "int8",
    "numflash_int4": "int4",
}  # name -> dtype
# models take a cache by this keyword: "cache" from transformers 5.24 on, "past_key_values" before
CACHE_ARGUMENT = utils.ALL_CACHE_NAMES[0]


def register_caches(implementations: tuple[str, ...]) -> None:
    """Let `generate` and generation configurations take the names of `CACHES`. May be called again.

    implementations : names of attention functions that serve a resident cache.
    """
    known = configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    configuration_utils.ALL_CACHE_IMPLEMENTATIONS = known + tuple(
        x for x in CACHES if x not in known
    )
    original = utils.GenerationMixin._prepare_cache_for_generation
    if original.__module__ == __name__:
        return

    @functools.wraps(original, assigned=("__doc__", "__name__", "__qualname__"))
    def prepare(
        self: Any, generation_config: Any, model_kwargs: Any, *rest: Any, **options: Any
    ) -> Any:
        dtype = CACHES.get(generation_config.cache_implementation)
        none = generation_config.use_cache is False
        if dtype is None or none or model_kwargs.get(CACHE_ARGUMENT) is not None:
            return original(self, generation_config, model_kwargs, *rest, **options)
        config = self.config.get_text_config(decoder=True)
        if config._attn_implementation not in implementations:
            if not self._can_set_attn_implementation():
                raise ArgumentError(
                    f"cache_implementation: got {generation_config.cache_implementation!r} for {type(self).__name__}, which "
                    "has an attention of its own and cannot read it; allowed: models that take transformers' "
                    "attention functions"
                )
            raise ArgumentError(
                f"cache_implementation: got {generation_config.cache_implementation!r} with attn_implementation "
                f"{config._attn_implementation!r}; allowed: model.set_attn_implementation('numflash')"
            )
        if self.config.is_encoder_decoder:
            raise ArgumentError(
                f"cache_implementation: got {generation_config.cache_implementation!r} for an encoder-decoder model; "
                "allowed: decoder-only models"
            )
        model_kwargs[CACHE_ARGUMENT] = ResidentCache(self.config, dtype)
        # an assistant is given the same configuration, and keeps a cache of its own between its calls
        generation_config.cache_implementation = None
        return None

    utils.GenerationMixin._prepare_cache_for_generation = prepare
