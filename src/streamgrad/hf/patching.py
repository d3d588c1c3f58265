"""Tools that replace a module's forward, for good or for one call, and that read the current one."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from streamgrad.engine.temporary import temporary_attributes
from streamgrad.ops.autograd import refuse_transforms

_MODULES_OF_TORCH = vars(sys.modules[nn.Module.__module__])  # where nn.Module is defined
_CHECKPOINT = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__
_WARNED: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()  # kinds of warnings a module has had


class InstalledForward:
    """The `forward` of an enabled module, which calls `function(module, stock, stream, *args, **kwargs)`.

    Its signature is the stock forward's, which Trainer and `generate` read. The module is an attribute, not a closure's variable,
    so that deep copies and pickles rebind it; a shallow copy of the module has this very object, and gets its own when called or
    asked for it. Once removed, it calls `stock`: another library may have wrapped it in the meantime.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any], stream: Any) -> None:
        self.module, self.function, self.stream = module, function, stream
        self._replaced: Callable[..., Any] | None = None
        self._wrapped: Callable[..., Any] | None = None  # by Accelerate, which may take its wrapper away again

    @classmethod
    def on(cls, module: nn.Module) -> InstalledForward | None:
        installed = module.__dict__.get("_streamgrad")
        return installed if installed is None or installed.module is module else installed._moved_to(module)

    def _moved_to(self, shallow_copy: nn.Module) -> InstalledForward:
        moved = copy.copy(self)
        moved.module = shallow_copy
        for name in ("forward", "_streamgrad"):
            if shallow_copy.__dict__.get(name) is self:
                shallow_copy.__dict__[name] = moved
        return moved

    def install(self) -> None:
        previous = self.on(self.module)
        if previous is not None:
            previous.remove()
        self._replaced, self._wrapped = (self.module.__dict__.get(name) for name in ("forward", "_original_forward"))
        # Straight into __dict__: these are settings of this instance, not submodules.
        self.module.__dict__["forward"] = self.module.__dict__["_streamgrad"] = self

    def remove(self) -> None:
        self.stream = None
        self.module.__dict__.pop("_streamgrad", None)
        if self._is_bound_in(self.module.__dict__.get("forward")):
            del self.module.__dict__["forward"]
            if self._replaced is not None:
                self.module.__dict__["forward"] = self.stock

    def _is_bound_in(self, forward: Any) -> bool:
        """Return whether a forward is this one, or this one bound to a module as a method."""
        function = getattr(forward, "__func__", None)
        return forward is self or function is self or isinstance(function, _Unbound)

    def is_called_by(self, forward: Callable[..., Any]) -> bool:
        """Return whether a forward is this one, or a wrapper of it, as Accelerate makes for autocast."""
        called = inspect.unwrap(forward, stop=self._is_bound_in)
        return self._is_bound_in(called) or isinstance(called, _Unbound)

    @property
    def stock(self) -> Callable[..., Any]:
        if self._wrapped is not None and "_original_forward" not in self.module.__dict__:
            return self._wrapped
        return self._replaced or types.MethodType(type(self.module).forward, self.module)

    @property
    def __func__(self) -> _Unbound:
        """Return what Accelerate wraps and binds to the module, as it does with the function of a method."""
        return _Unbound(self)

    __wrapped__ = __func__  # what it binds when it takes its wrapper away

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.stock)

    @torch.compiler.disable(recursive=False)  # so that a compiled caller still shows
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.stream is not None and get_eval_frame_callback() not in (None, False):
            _warn_of_compile(self.module)
        return self._called(*args, **kwargs)

    @torch.compiler.disable
    def _called(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.module:  # who takes it for a function binds it to the module
            args = args[1:]
        called = _module_under_call()
        if called is not None and called is not self.module and called.__dict__.get("_streamgrad") is self:
            return self._moved_to(called)(*args, **kwargs)
        if self.stream is None:
            return self.stock(*args, **kwargs)
        if torch.is_grad_enabled():  # else what is in a transform is left to stock
            refuse_transforms(type(self.module).__name__)
        return self.function(self.module, self.stock, self.stream, *args, **kwargs)


class _Unbound:
    """An `InstalledForward` that is called with the module first: a deep copy of the module binds it to the copy."""

    def __init__(self, installed: InstalledForward) -> None:
        self.installed = installed

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self.installed.module).forward)

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module is self.installed.module:
            return self.installed(*args, **kwargs)
        own = InstalledForward.on(module)
        if own is None or module.__dict__.get("forward") is own:  # the copy was disabled, or it is what has called this
            return type(module).forward(module, *args, **kwargs)
        return own(*args, **kwargs)


def warn_once(module: nn.Module, kind: str, text: str) -> None:
    """Warn, unless `module` has had a warning of this kind."""
    had = _WARNED.setdefault(module, set())
    if kind not in had:
        had.add(kind)
        warnings.warn(text, UserWarning, stacklevel=2)


def _warn_of_compile(module: nn.Module) -> None:
    warn_once(
        module,
        "compile",
        f"streamgrad: torch.compile of {type(module).__name__} is passed over, as it runs in chunks while streaming. Leave it "
        "out; fused_kernels= speeds up what it would have fused. Modules inside of layers may be compiled, and layers, by "
        "layer.compile() or compile_layers=True, for steps in which each of them keeps its whole graph.",
    )


def not_compiled(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Pass over `module.compile()` within the block, with a warning by the first of these modules."""
    compiled = [module for module in modules if module._compiled_call_impl is not None]
    for module in compiled[:1]:
        _warn_of_compile(module)
    return temporary_attributes((module, "_compiled_call_impl", None) for module in compiled)


def _module_under_call() -> nn.Module | None:
    """Return the module whose `__call__` is the innermost under way: an attribute that is called is not told whose it is.

    torch's `_call_impl` is known by its name and file, as tracers put a function of their own, which calls it, in its place.
    """
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_code.co_name == "_call_impl" and frame.f_globals is _MODULES_OF_TORCH):
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the module's current forward. Read it at each call: other libraries patch it between calls."""
    own = module.__dict__.get("forward")
    return own if own is not None else types.MethodType(type(module).forward, module)


def signature_of(forward: Callable[..., Any]) -> inspect.Signature:
    """Return `inspect.signature(forward)`, cached for methods: computing it takes as long as launching several kernels."""
    if isinstance(forward, types.MethodType):
        return _signature_of_method(forward.__func__)
    return inspect.signature(forward)


@functools.lru_cache(maxsize=256)
def _signature_of_method(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(types.MethodType(function, object()))


def named_arguments(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name; positional ones without a name are left out."""
    if not args:
        return dict(kwargs)
    own = forward.__func__ if isinstance(forward, types.MethodType) else None
    names = _positional_names(signature_of(forward)) if own is None else _names_of_method(own)
    return dict(zip(names, args, strict=False)) | kwargs


def tokens_of(arguments: dict[str, Any]) -> Tensor | None:
    """Return the input of a call: its tokens, or its embeddings where it is given those."""
    given = arguments.get("input_ids")
    return arguments.get("inputs_embeds") if given is None else given


@functools.lru_cache(maxsize=256)
def _names_of_method(function: Callable[..., Any]) -> list[str]:
    return _positional_names(_signature_of_method(function))


def _positional_names(signature: inspect.Signature) -> list[str]:
    parameters = signature.parameters.items()
    return [name for name, p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def not_checkpointed(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Let transformers checkpoint none of `modules` within the block.

    A streamed layer already recomputes itself, and a layer inside of it (Zamba 2's) would lose its cache.
    """
    name = "gradient_checkpointing"
    found = [module for module in modules if module.__dict__.get(name)]
    return temporary_attributes((module, "gradient_checkpointing", False) for module in found)


def is_checkpointed(within: types.CodeType) -> bool:
    """Return whether torch's checkpointing called the caller, within a call of the function with this code."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not within:
        if frame.f_code is _CHECKPOINT:
            return True
        frame = frame.f_back
    return False
