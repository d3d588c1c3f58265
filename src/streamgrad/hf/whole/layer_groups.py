"""Groups of neighbouring layers that run as one compiled graph, where nothing can see what goes from one to the next.

Calling a graph takes Python as long as a short layer takes the device. So the first layer of a group runs all of it, and the
others return what they are given:

    h_1 = first(h_0),  h_2 = second(h_1)        is        h_1 = second(first(h_0)),  h_2 = h_1

Nobody may look at h_1 then. Layers are grouped only where that is certain: in transformers' own decoders and layers, whose loop
over the layers does nothing but call the next one (`passes_on_alone`), without a hook on a layer, on a part or parameter of it,
or on all modules, and without code of the user's in a layer. Every layer checks, in every call, that it is the next one and is
given what the first of its group was; if it is not, or is left out, `CalledOtherwise` is raised, and the step is run once more
with layers one by one.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import operator
import sys
import textwrap
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from streamgrad.engine.module_walk import modules_of, parameters_in

# Layers of a group: the first of these that leaves no smaller group, which would be one more graph to compile.
_SIZES = (4, 5, 3, 2)
# What loops over all layers, in order.
_LOOPS = tuple(
    loop for each in ("self.layers", "self.layers[:self.config.num_hidden_layers]") for loop in (each, f"enumerate({each})")
)
_CALLED = frozenset({"__call__", "_call_impl", "forward"})  # when a module is called
_PACKAGES = "torch", "transformers", "peft", "bitsandbytes"  # whose modules keep nothing of what they are given


class CalledOtherwise(RuntimeError):
    """A layer was not called as its group expects."""


class LayerGroups:
    """The forwards of a decoder's layers in one step: `alone(layer)` is one's own, `together(layers)` that of a group."""

    def __init__(
        self,
        groups: Sequence[Sequence[nn.Module]],
        alone: Callable[[nn.Module], Callable[..., Any]],
        together: Callable[[Sequence[nn.Module]], Callable[..., Any]],
    ) -> None:
        self._groups, self._alone, self._together = groups, alone, together
        self._expected = deque(layer for group in groups for layer in group)
        self._waiting = 0  # layers that a graph has run, and that are yet to be called
        self._output: Any = None  # of that graph
        self._version = 0  # of that output
        self._given: tuple[tuple[Any, ...], dict[str, Any]] = (), {}  # beside hidden states
        self._known: dict[type, frozenset[str] | None] = {}  # the methods of classes without code of the user's

    def forwards(self) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
        """Yield each layer with what its forward is in this step."""
        for group in self._groups:
            for layer in group:
                yield layer, functools.partial(self._called, layer, group)

    def check_that_all_ran(self) -> None:
        """Raise if the decoder has returned without a call of each layer."""
        if self._expected:
            raise CalledOtherwise(f"{len(self._expected)} layers were not called")

    def _called(self, layer: nn.Module, group: Sequence[nn.Module], /, *args: Any, **kwargs: Any) -> Any:
        if not self._expected or self._expected.popleft() is not layer:
            raise CalledOtherwise("layers were called in another order")
        if self._waiting:
            return self._hand_on(args, kwargs)
        if layer is not group[0] or len(group) == 1 or not _runs_as_one(group, self._known):
            return self._alone(layer)(*args, **kwargs)
        output = self._together(group)(*args, **kwargs) if args else None
        if not isinstance(output, Tensor):
            raise CalledOtherwise(f"{type(layer).__name__} takes or returns something else than one tensor")
        self._waiting, self._output, self._given = len(group) - 1, output, (args[1:], kwargs)
        self._version = output._version
        return output

    def _hand_on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output, (rest, named) = self._output, self._given
        same = (
            len(args) == len(rest) + 1
            and kwargs.keys() == named.keys()
            and all(value is other for value, other in zip(args, (output, *rest), strict=True))
            and output._version == self._version
            and all(value is named[key] for key, value in kwargs.items())
        )
        if not same:
            raise CalledOtherwise("layers get different arguments")
        self._waiting -= 1
        if not self._waiting:
            self._output, self._given = None, ((), {})
        return output


def groups_of(decoder: Any, forward: Callable[..., Any], layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Return the layers of a decoder, which runs by `forward`, in groups of neighbours of one class and kind of attention.

    Each is alone where something might see what goes from one to the next.
    """
    listed, config = getattr(decoder, "layers", None), decoder.config
    count = getattr(config, "num_hidden_layers", None)
    is_known = (
        type(listed) is nn.ModuleList
        and len(listed) == len(layers) == count
        and all(map(operator.is_, listed, layers))
        and all(map(_is_of_transformers, {type(decoder), *map(type, layers)}))
        and isinstance(forward, types.MethodType)
        and forward.__self__ is decoder
        and passes_on_alone(forward.__func__)
    )
    if not is_known:
        return [[layer] for layer in layers]
    named = getattr(config, "layer_types", None) or ()
    kinds = named[: len(layers)] if len(named) >= len(layers) else [None] * len(layers)  # removed layers may have left theirs
    found: list[list[nn.Module]] = []
    for _, neighbours in groupby(zip(layers, kinds, strict=True), key=lambda each: (type(each[0]), each[1])):
        alike = [layer for layer, _ in neighbours]
        size = next((each for each in _SIZES if len(alike) % each == 0), _SIZES[0])
        found += (alike[start : start + size] for start in range(0, len(alike), size))
    return found


def _is_of_transformers(kind: type) -> bool:
    return kind.__module__.startswith("transformers.models.")


def _runs_as_one(group: Sequence[nn.Module], known: dict[type, frozenset[str] | None]) -> bool:
    """Return whether the layers run as one graph: nothing sees what goes from one to the next, and they are trained alike.

    What sees it is a hook, or code of the user's: a part, or a function in the place of a known class's. Layers that are not
    trained alike would need a graph for each pattern, and torch has room for a few. `known` holds what this step has found of
    classes, since each of them has many modules.
    """
    trained = set()
    for layer in group:
        parts = modules_of(layer)
        for part in parts:
            kind, own = type(part), part.__dict__
            if kind not in known:
                known[kind] = _known_methods(kind)
            methods = known[kind]
            ours = {"forward"} if part is layer else set()
            if methods is None or own.keys() & methods != ours:
                return False
            if own["_forward_pre_hooks"] or own["_forward_hooks"] or own["_backward_pre_hooks"] or own["_backward_hooks"]:
                return False
        parameters = parameters_in(parts)
        if any(parameter._post_accumulate_grad_hooks for parameter in parameters):
            return False
        trained.add(tuple(parameter.requires_grad for parameter in parameters))
    return len(trained) == 1 and not _has_any_global_hook()


def _known_methods(kind: Any) -> frozenset[str] | None:
    """Return the names of the class's functions and of those that call a module; None if one is the user's."""
    methods = _methods_of(kind)
    is_known = all(each.__module__.partition(".")[0] in _PACKAGES for each in kind.__mro__[:-1])  # the last is object
    return methods if is_known and all(_is_defined_in(getattr(kind, name), _PACKAGES) for name in methods) else None


@functools.cache
def _methods_of(kind: type) -> frozenset[str]:
    own = [vars(each).items() for each in kind.__mro__ if each not in (nn.Module, object)]
    return _CALLED | {name for name, value in chain(*own) if isinstance(value, types.FunctionType)}


@functools.cache
def _is_defined_in(function: Callable[..., Any], packages: tuple[str, ...]) -> bool:
    """Return whether the code of the function, and of all that it wraps, is in the files of these packages."""
    modules = [module for module in map(sys.modules.get, packages) if getattr(module, "__file__", None) is not None]
    known = [contextlib.__file__, *(folder for module in modules for folder in getattr(module, "__path__", ()))]
    return all(
        isinstance(each, types.FunctionType) and any(map(Path(each.__code__.co_filename).is_relative_to, known))
        for each in _wrapped_by(function)
    )


def _wrapped_by(function: Any) -> Iterator[Any]:
    """Yield the function, what it wraps, and so on; the last is what is run in the end."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


@functools.cache
def passes_on_alone(forward: Callable[..., Any]) -> bool:
    """Return whether `forward` is transformers' and has one loop over `self.layers`, `for layer in ...: x = layer(x, ...)`.

    The loop is over all layers in order, and no part of another. Further arguments may be names, attributes and items of
    something, which change nothing.
    """
    return _is_defined_in(forward, ("transformers",)) and _loops_alone([*_wrapped_by(forward)][-1])


def _loops_alone(forward: Callable[..., Any]) -> bool:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, SyntaxError):
        return False
    mentions = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "layers"]
    match tree.body:
        case [ast.FunctionDef(body=statements)]:
            loops = [each for each in statements if isinstance(each, ast.For) and ast.unparse(each.iter) in _LOOPS]
        case _:
            return False
    if len(mentions) != 1 or len(loops) != 1:
        return False
    match loops[0]:
        case ast.For(
            target=ast.Name(id=called) | ast.Tuple(elts=[ast.Name(), ast.Name(id=called)]),
            body=[
                ast.Assign(
                    targets=[ast.Name(id=bound)],
                    value=ast.Call(func=ast.Name(id=name), args=[ast.Name(id=given), *others], keywords=keywords),
                )
            ],
            orelse=[],
        ):
            plain = ast.Name | ast.Attribute | ast.Subscript | ast.Constant | ast.expr_context
            values = [*others, *(keyword.value for keyword in keywords)]
            is_plain = all(isinstance(part, plain) for value in values for part in ast.walk(value))
            own = {ast.unparse(part) for part in ast.walk(loops[0].target)}  # a layer and its number are no other layer's
            return bound == given != called == name and is_plain and own.isdisjoint(map(ast.unparse, values))
    return False
