"""`use`: PyTorch's own attention functions answered by numflash inside a `with` block."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ..errors import NumflashError, UnsupportedError
from ..interop.arguments import choice, flag
from ..interop.eager import eager
from ..validation.options import PRECISIONS, PV, check_weights
from .flex import flex_attention
from .rebinding import Rebinding
from .sdpa import PYTORCH, scaled_dot_product_attention
from .varlen import varlen_attn

logger = logging.getLogger("numflash")
_MULTI_HEAD = torch.nn.functional.multi_head_attention_forward
WEIGHTS = "torch.nn.MultiheadAttention that returns its weights; allowed: need_weights=False"
MOST_REASONS = 100  # which may differ in a length alone: the rest are one
OTHER_REASONS = f"other reasons, beyond the first {MOST_REASONS}"
_FUSED = (torch._transformer_encoder_layer_fwd, torch._native_multi_head_attention)
_DERIVE = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


def _body(func: Any, **names: Any) -> Any:
    """A function of PyTorch's that a mode receives as one call, with some of its global names
    bound anew; it does not look for the mode again.
    """
    no_mode = dict.fromkeys(
        ("has_torch_function", "has_torch_function_unary"), lambda tensors: False
    )
    bound = {**func.__globals__, **no_mode, **names}
    return FunctionType(func.__code__, bound, func.__name__, func.__defaults__)


class use(TorchFunctionMode):
    """Inside this context, calls of `torch.nn.functional.scaled_dot_product_attention`, of
    `torch.nn.attention.flex_attention.flex_attention` and of `torch.nn.attention.varlen.varlen_attn`
    are answered by numflash.

    However the model got hold of the function, and whatever calls it: `torch.nn.MultiheadAttention`
    without weights and `torch.nn.TransformerEncoder` do. It holds for the thread that enters it,
    nests (the innermost decides), and ends with the block, also by an exception. `flex_attention`
    and what `torch.compile` has made of it are found by the names under which modules hold them; what
    an object or a function holds stays PyTorch's.

    Parameters
    ----------
    precision : "int8", "float32", "bfloat16", "float16" or None
        As `scaled_dot_product_attention` takes it.
    pv : "int8", "int16", "bf16", "fp32" or None
        The weights of precision "int8", as `numflash.attention` takes them; of no other.
    fallback : bool
        What numflash refuses goes to PyTorch instead of raising; each reason is logged once and
        counted.

    Attributes
    ----------
    calls : int
        Calls that numflash has answered.
    fallbacks : Counter
        Calls that went to PyTorch, by reason.

    Code of `torch.compile` counts as one call, however often it runs.
    """

    def __init__(
        self, precision: str | None = None, fallback: bool = False, *, pv: str | None = None
    ) -> None:
        super().__init__()
        if precision is not None:
            choice("precision", precision, PRECISIONS)
        if pv is not None:
            check_weights(choice("pv", pv, PV), precision)
        self.precision, self.pv, self.fallback = precision, pv, flag("fallback", fallback)
        self.fallbacks: Counter[str] = Counter()
        self._calls, self._compiled = 0, False
        self._logged: set[str] = set()
        self._entered: list[contextlib.ExitStack] = []

    def __repr__(self) -> str:
        return f"<numflash.torch.use: {self.calls} calls, {self.fallbacks.total()} fallbacks>"

    @property
    def calls(self) -> int:
        """Calls that numflash has answered."""
        return self._calls + self._compiled

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is PYTORCH:
            return self._answer(*args, **kwargs)
        if func is _MULTI_HEAD or func in _FUSED:
            return self._multi_head(func, *args, **kwargs)
        if func in _DERIVE and not torch.compiler.is_compiling() and {Tensor}.issuperset(types):
            return self._derive(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _derive(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """A backward pass, in which torch.utils.checkpoint may run a forward pass again: that has to
        be answered as the first one was, but a mode is off inside of what it receives.
        """
        super().__enter__()
        try:
            return _body(func)(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)

    def _multi_head(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """PyTorch's multi-head attention, with its attention function replaced by ours.

        A mode receives it as one call and is off inside, so its body runs here with that name bound
        to ours.
        """
        if func is not _MULTI_HEAD or torch.compiler.is_compiling():
            if self.fallback:
                self._note("torch.nn.MultiheadAttention inside torch.compile")
                return func(*args, **kwargs)
            raise UnsupportedError(
                "torch.nn.MultiheadAttention: not routed inside torch.compile; allowed: uncompiled, or "
                "use(fallback=True)"
            )
        answered = []  # the counts do not tell: compiled code counts once

        def answer(*args: Any, **kwargs: Any) -> Tensor:
            answered.append(True)
            return self._answer(*args, **kwargs)

        out = _body(func, scaled_dot_product_attention=answer)(*args, **kwargs)
        # to return its weights it multiplies by itself, and never calls the attention function
        if not answered:
            self._note(WEIGHTS)
        return out

    def _note(self, reason: str) -> None:
        """Count a call that went to PyTorch.

        Code of torch.compile is compiled again where a number that it reads has changed, which a
        count does in each call. So there a reason is only entered, and logged at the block's end.
        """
        if torch.compiler.is_compiling():
            if reason not in self.fallbacks:
                self.fallbacks[reason] = 1
            return
        if reason not in self.fallbacks and len(self.fallbacks) >= MOST_REASONS:
            reason = OTHER_REASONS
        self.fallbacks[reason] += 1
        self._log()

    def _log(self) -> None:
        """Log the reasons that are new."""
        for reason in self.fallbacks.keys() - self._logged:
            logger.warning("PyTorch's attention takes over: %s", reason)
        self._logged |= self.fallbacks.keys()

    def __enter__(self) -> Any:
        with contextlib.ExitStack() as entered:
            for rebound in _rebound():
                rebound.enter()
                entered.callback(rebound.leave)
            super().__enter__()
            self._entered.append(entered.pop_all())
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._entered.pop().close()
        self._log()

    def _answer(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.answer(scaled_dot_product_attention, PYTORCH, args, kwargs)

    def answer(self, ours: Any, theirs: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call of PyTorch's function `theirs` by our function of the same signature."""
        try:
            out = ours(*args, **kwargs, precision=self.precision, pv=self.pv)
        except NumflashError as error:
            if not self.fallback:
                raise
            self._note(str(error))
            return theirs(*args, **kwargs)
        if torch.compiler.is_compiling():
            self._compiled = True  # not counted, see `_note`
        else:
            self._calls += 1
        return out


def _routed(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's function while a thread is inside `use`, numflash's in that thread."""

    @eager
    @functools.wraps(theirs, updated=())  # not what marks code of torch.compile
    def routed(*args: Any, **kwargs: Any) -> Any:
        for mode in reversed(_get_current_function_mode_stack()):
            if isinstance(mode, use):
                return mode.answer(ours, theirs, args, kwargs)
        return theirs(*args, **kwargs)

    return routed


# PyTorch calls no mode for these functions
_flex = Rebinding(torch_flex.flex_attention, functools.partial(_routed, flex_attention), torch_flex)
# The compiler calls no mode for these either, and a graph that holds one hides it from the mode for
# good. Outside of the graph the mode is called.
_outside = functools.cache(eager)
_fused = [Rebinding(x, _outside, torch, at_home=True) for x in _FUSED]


@functools.cache
def _varlen(home: Any) -> Rebinding:
    """The same for `varlen_attn`, of the module that defines it: releases before 2.10 have none."""
    return Rebinding(home.varlen_attn, functools.partial(_routed, varlen_attn), home)


def _rebound() -> list[Rebinding]:
    """Of the functions that may have been imported."""
    home = sys.modules.get("torch.nn.attention.varlen")
    return [_flex, *_fused] if home is None else [_flex, *_fused, _varlen(home)]
