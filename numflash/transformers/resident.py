"""A cache for transformers whose keys and values stay in `numflash.KVCache`, where the decode
kernels read them.

With transformers' own caches every step concatenates all keys and values, and numflash packs all of
them again. Here a step writes one token and reads the cache once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, get_layer_types_and_kwargs

from ..cache.arguments import integer
from ..cache.settings import DTYPES, MAX_LENGTH
from ..errors import ArgumentError, ArgumentTypeError, NumflashError, UnsupportedError
from ..interop.arguments import choice
from . import stored
from .latent_layer import LatentLayer
from .masks import Reading, read_mask
from .resident_layer import ResidentLayer

SLIDING = ("sliding_attention", "hybrid_sliding", "reference_sliding_attention")
# model type -> what its models have instead of a cache of keys and values
OTHER_MEMORY = {
    "openai-gpt": "which takes no cache",
    "reformer": "which keeps hashes of its own",
    "rwkv": "which has a state and no keys",
    "xlnet": "which keeps a memory of its own",
    "xlstm": "which has a state and no keys",
}


class ResidentCache(Cache):
    """Keys and values of a model in numflash's own layout, for `model.generate(ids, cache=cache)`
    (`past_key_values=cache` before transformers 5.24; `CACHE_ARGUMENT` is the name that counts).

    The model must run with `attn_implementation="numflash"` (or "numflash_int8",
    "numflash_int8_pv_int16"); with another one the first layer raises `ArgumentError`. Layers with
    a sliding window are rings that never grow. Padding takes no memory. Latents (DeepSeek V2, V3, MiniCPM3,
    ...) are stored as they come, and not expanded again.

    Parameters
    ----------
    config : the model's configuration
    dtype : "int8", "int4", "float32", "bfloat16" or "float16"
        Storage, and what the attention of prompts is computed in. "int8": a quarter of the memory
        and of the time; its error is in the guide "Long contexts on a CPU". "int4": an eighth of
        the memory, prompts as with "int8". "float32" gives the tokens of PyTorch's attention.
    max_length : int or None
        Most tokens of a sequence; more raise `CacheFullError`. None: the cache grows by powers of
        two.
    page_size : int or None
        A power of two from 128: sequences share pages, so repeating a prompt's cache for several
        answers (`batch_repeat_interleave`, beams) moves tables, not tokens.

    Attributes
    ----------
    nbytes : bytes allocated for keys, values and scales

    Raises
    ------
    ArgumentError, ArgumentTypeError
        A configuration with layers that are neither full nor sliding-window attention, or arguments
        as `KVCache` refuses them.
    CacheFullError
        From the model's call: more tokens than `max_length`. Nothing is stored then.
    """

    def __init__(
        self,
        config: Any,
        dtype: str = "int8",
        max_length: int | None = None,
        page_size: int | None = None,
    ) -> None:
        self.dtype = choice("dtype", dtype, DTYPES)
        self.max_length = stored.bound("max_length", max_length, 1, MAX_LENGTH)
        self.page_size = stored.bound("page_size", page_size, 128, 1 << 20)
        if page_size is not None and page_size & (page_size - 1):
            raise ArgumentError(f"page_size: got {page_size}; allowed: a power of two, 128 or more")
        text = _decoder(config)
        self.sizes = _sizes(text)
        rank = getattr(text, "kv_lora_rank", None)
        self.latent: Any = (rank, getattr(text, "qk_rope_head_dim", None)) if rank else None
        layer = ResidentLayer if self.latent is None else LatentLayer
        super().__init__(layers=[layer(self, *each) for each in _layers(text)])
        self._valid: np.ndarray | None = (
            None  # (B, tokens) False for padding; None where there is none
        )
        self._known = 0  # tokens that have been told from padding
        self._readings: dict[int | None, tuple[Tensor | None, int, int, Reading]] = {}
        self._moving = False

    # ---- what it holds
    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys, values and scales of all layers."""
        return sum(layer.store.nbytes for layer in self.layers if layer.store is not None)

    @property
    def lengths(self) -> np.ndarray:
        """(B,) int64 tokens of each sequence, without padding; empty before the first tokens."""
        store = self.layers[0].store
        return np.zeros(0, np.int64) if store is None else store.lengths

    def __repr__(self) -> str:
        """Kind, layers, tokens and bytes."""
        return (
            f"ResidentCache(dtype={self.dtype!r}, layers={len(self.layers)}, tokens={self.get_seq_length()}, "
            f"nbytes={self.nbytes})"
        )

    @property
    def precision(self) -> str | None:
        """What a prompt's attention is computed in; None for the query's own dtype."""
        return {"float32": None, "int4": "int8"}.get(self.dtype, self.dtype)

    # ---- one forward pass
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take the new tokens of a layer; see `ResidentLayer`."""
        self._refuse_parts()
        if layer_idx >= len(self.layers):
            raise ArgumentError(
                f"layer_idx: got {layer_idx}; allowed: 0 to {len(self.layers) - 1}, the cache was made for another model"
            )
        if layer_idx == 0:
            self._finish_or_undo()
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def _refuse_parts(self) -> None:
        if self._moving:
            raise NumflashError(
                "ResidentCache: an earlier call that reorders, cuts or empties the cache was interrupted half-way; "
                "reset() it"
            )

    def _finish_or_undo(self) -> None:
        """Undo a forward pass that ended between two layers."""
        self._refuse_parts()
        least = self.get_seq_length()
        if any(layer.seen > least or layer.unfinished for layer in self.layers):
            try:
                self._cut(least)
            except ArgumentError as error:
                raise NumflashError(
                    "ResidentCache: an earlier call was interrupted after a sliding-window layer had taken more tokens "
                    "than it can give back; reset() it"
                ) from error

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of every layer, padding included: those of an interrupted pass do not count."""
        return min(layer.seen for layer in self.layers)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys that a layer's mask for so many new tokens has, and the first of them."""
        return self.layers[layer_idx].mask_sizes(self.get_seq_length(), query_length)

    def reading(self, layer: ResidentLayer, mask: Tensor | None, batch: int, new: int) -> Reading:
        """What a mask says; layers of a kind get the same one, which is read once."""
        known = self._readings.get(layer.window)
        if known is not None and known[0] is mask and known[1:3] == (layer.seen, new):
            return known[3]
        keys, offset = layer.get_mask_sizes(new)
        past = None if self._valid is None else self._valid[:, : layer.seen]
        found = read_mask(mask, batch, new, past, offset, keys, layer.window)
        self._readings[layer.window] = mask, layer.seen, new, found
        return found

    def attended(self, layer: ResidentLayer, reading: Reading, batch: int, new: int) -> None:
        """Note which of the new tokens are padding, once for all layers."""
        if layer.seen <= self._known:
            return
        if reading.valid is not None or self._valid is not None:
            before = np.ones((batch, self._known), bool) if self._valid is None else self._valid
            valid = np.ones((batch, new), bool) if reading.valid is None else reading.valid
            self._valid = np.concatenate([before, valid], 1)
        self._known = layer.seen

    def physical_mask(self, layer: ResidentLayer, reading: Reading, keys: int) -> Tensor:
        """A mask over stored tokens (B, 1, n, keys) from the one over all tokens."""
        assert reading.mask is not None
        b, new, advertised = reading.mask.shape
        past = np.ones((b, advertised - new), bool)
        if self._valid is not None:
            past = self._valid[:, layer.seen - past.shape[1] : layer.seen]
        valid = np.ones((b, new), bool) if reading.valid is None else reading.valid
        columns = np.concatenate([past, valid], 1)
        found = np.zeros((b, new, keys), bool)
        stored_tokens = 0 if layer.store is None else layer.store.lengths
        held = (
            stored_tokens if layer.window is None else np.minimum(stored_tokens, layer.window - 1)
        )
        lengths = np.broadcast_to(held, b) + valid.sum(1)
        for i in range(b):
            chosen = np.flatnonzero(columns[i])
            found[i, :, lengths[i] - chosen.size : lengths[i]] = reading.mask[i][:, chosen]
        return torch.from_numpy(found)[:, None]

    # ---- all layers
    @contextmanager
    def _all_layers(self, change: Callable[[ResidentLayer], None]) -> Iterator[None]:
        """A change of every layer, rings first: what they refuse is refused before anything moves.

        What interrupts it leaves a mark, and the cache refuses to go on.
        """
        self._refuse_parts()
        self._moving = True
        self._readings = {}
        for n, layer in enumerate(sorted(self.layers, key=lambda each: each.window is None)):
            try:
                change(layer)
            except (NumflashError, MemoryError):  # its store is as it was
                self._moving = n > 0
                raise
        yield
        self._moving = False

    def reset(self) -> None:
        """Remove all tokens."""
        self._moving = True
        for layer in self.layers:
            layer.reset()
        self._valid, self._known, self._readings, self._moving = None, 0, {}, False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens (padding counts).

        A positive number is refused, as transformers does.

        Raises
        ------
        ArgumentError
            Also where a sliding-window layer no longer holds what came before: it keeps 64 tokens
            or more beyond its window.
        """
        held = self.get_seq_length()
        number = stored.bound("tokens_to_remove", tokens_to_remove, -held, 0)
        if not number:
            return
        try:
            self._cut(held + number)
        except ArgumentError as error:
            raise ArgumentError(
                f"tokens_to_remove: got {number}, more than a sliding-window layer can give back ({error})"
            ) from error

    def _cut(self, tokens: int) -> None:
        """Keep the first `tokens` tokens of every layer."""
        lengths = np.array(tokens)
        if self._valid is not None:
            lengths = self._valid[:, :tokens].sum(1)
        with self._all_layers(lambda layer: layer.truncate(tokens, lengths)):
            if self._valid is not None:
                self._valid = self._valid[:, :tokens]
            self._known = min(self._known, tokens)

    def _select(self, index: np.ndarray) -> None:
        """Sequence i becomes a copy of sequence index[i]; in an empty cache there are none yet."""
        with self._all_layers(lambda layer: layer.reorder(index)):
            if self._valid is not None:
                self._valid = self._valid[index]

    def _sequences(self) -> np.ndarray:
        return np.arange(self.lengths.size)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make sequence i a copy of sequence beam_idx[i]."""
        self._select(_indices("beam_idx", beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences `indices`, numbers or a mask."""
        held = self._sequences()
        try:
            chosen = held[_indices("indices", indices)]
        except IndexError as error:
            raise ArgumentError(
                f"indices: got {indices.tolist()}; allowed: numbers below {held.size}, or {held.size} booleans"
            ) from error
        self._select(chosen)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make `repeats` copies of every sequence, next to each other.

        One prompt, several answers.
        """
        self._select(self._sequences().repeat(integer("repeats", repeats, 1, 1 << 20)))

    def copy(self) -> ResidentCache:
        """An independent cache with the same tokens.

        For a system prompt that many conversations start with.
        """
        self._finish_or_undo()
        twin = object.__new__(ResidentCache)
        twin.__dict__.update(self.__dict__)
        twin._readings = {}
        twin.layers = [layer.twin(twin) for layer in self.layers]
        return twin

    def __deepcopy__(self, memo: Any) -> ResidentCache:
        """What transformers' guides call where a prompt's cache is used again: `copy`."""
        return self.copy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """No pickle, and no shallow copy, whose layers would be those of this cache."""
        raise UnsupportedError(
            "ResidentCache: got a call of pickle or copy.copy(); allowed: save(path) and load(path), or copy()"
        )

    # ---- on disk
    def save(self, path: str | Path) -> None:
        """Write the cache to one .npz file, whole or not at all.

        It holds the stored numbers, so a loaded cache continues bit for bit, on any machine.
        """
        self._finish_or_undo()
        stored.write(Path(path), self.describe(), self.layers, self._valid)

    @classmethod
    def load(
        cls,
        path: str | Path,
        config: Any,
        max_length: int | None = None,
        page_size: int | None = None,
    ) -> ResidentCache:
        """Read a file of `save` into a new cache for the model of this configuration.

        Raises
        ------
        ArgumentError
            The file is none of `save`, of another version, or of a model with other layers, heads
            or channels.
        CacheFullError
            It holds more tokens than `max_length`.
        """
        header, arrays = stored.read(Path(path))
        cache = cls(config, header["dtype"], max_length, page_size)
        stored.compare(header, cache.describe())
        for n, (layer, about) in enumerate(zip(cache.layers, header["layers"], strict=True)):
            layer.restore(about, stored.of_layer(arrays, n))
        cache._valid, cache._known = arrays.get("valid"), cache.get_seq_length()
        return cache

    def describe(self) -> dict[str, Any]:
        """What a file must fit: dtype, sizes, and the window, tokens and shape of each layer."""
        return {
            "dtype": self.dtype,
            "sizes": None if self.sizes is None else list(self.sizes),
            "layers": [layer.describe() for layer in self.layers],
        }


def _indices(name: str, x: Any) -> np.ndarray:
    """A tensor of indices as an array."""
    if not isinstance(x, Tensor):
        raise ArgumentTypeError(f"{name}: got {type(x).__name__}; allowed: a tensor")
    found: np.ndarray = x.cpu().numpy()
    return found


def _decoder(config: Any) -> Any:
    """The configuration of a decoder-only model, or of the text part of one that sees or hears."""
    if not isinstance(config, PreTrainedConfig):
        raise ArgumentTypeError(
            f"config: got {type(config).__name__}; allowed: the model's configuration (model.config)"
        )
    if config.is_encoder_decoder:
        raise ArgumentError(
            f"config: got {type(config).__name__} of an encoder-decoder model; allowed: decoder-only models"
        )
    return config.get_text_config(decoder=True)


def _layers(config: Any) -> list[tuple[int | None, bool]]:
    """Window of each layer that has keys and values of its own, and whether later ones share them.

    Raises
    ------
    ArgumentError
        A layer that is neither full nor sliding-window attention.
    """
    kind = getattr(config, "model_type", None)
    allowed = "allowed with a ResidentCache: full and sliding-window attention"
    if kind in OTHER_MEMORY:
        raise ArgumentError(
            f"config: got a model of type {kind!r}, {OTHER_MEMORY[kind]}; {allowed}"
        )
    if getattr(config, "cross_attention_layers", None):
        raise ArgumentError(
            f"config: got a model of type {kind!r} with cross-attention layers; {allowed}"
        )
    types, options = get_layer_types_and_kwargs(config)
    modes = getattr(config, "kv_sharing_modes", None) or [None] * len(types)
    own = len(types)
    while own and modes[own - 1] == "reuse":  # layers at the end that read an earlier layer's
        own -= 1
    for each in types[:own]:
        if each != "full_attention" and each not in SLIDING:
            raise ArgumentError(f"config: got a layer of type {each!r}; {allowed}")
    return [(options[n].get("sliding_window"), modes[n] == "store") for n in range(own)]


def _sizes(config: Any) -> tuple[int, int, int] | None:
    """(KV heads, channels of K, channels of V) that the configuration says of all layers, None where
    it does not.

    Models may deviate from it, so it only tells files apart.
    """
    found = {_sizes_of(each) for each in getattr(config, "per_layer_config", None) or [config]}
    return found.pop() if len(found) == 1 else None


def _sizes_of(config: Any) -> tuple[int, int, int] | None:
    """The same of one layer."""
    if getattr(config, "kv_lora_rank", None) or getattr(config, "global_head_dim", None):
        return None
    heads = getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return None
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    d = getattr(config, "head_dim", None) or hidden // heads
    return kv_heads, d, d
