"""Notes whether something is chosen by values, as a router chooses experts.

    with ValueChoices() as choices:
        layer(h)
    choices.made

Where two values are nearly equal, rounding decides. A product of several chunks rounds in another way than that of one, so a
layer that chooses has to run forward as it is run again in backward, chunk by chunk: else a token's gradient could be of another
expert than its loss.

Operators that are known to be continuous choose nothing, nor do those without floating-point arguments. Everything else counts as
a choice: operators of other libraries, comparisons, conversions to integers, values that the program reads.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# By name, without a trailing underscore, in torch's own namespace.
_CONTINUOUS = {
    "abs", "add", "addbmm", "addcdiv", "addcmul", "addmm", "addmv", "alias", "as_strided", "baddbmm", "bmm", "cat", "celu",
    "clamp", "clamp_max", "clamp_min", "clone", "constant_pad_nd", "contiguous", "convolution", "copy", "cos", "cosh",
    "cumprod", "cumsum", "detach", "div", "dot", "elu", "embedding", "empty_like", "erf", "erfc", "exp", "exp2",
    "expand", "expm1", "fill", "flatten", "flip", "full_like", "gather", "gelu", "glu", "hardsigmoid", "hardswish",
    "hardtanh", "index", "index_add", "index_copy", "index_fill", "index_put", "index_select", "leaky_relu", "lerp",
    "lift_fresh", "linalg_vector_norm", "linear", "log", "log10", "log1p", "log2", "log_sigmoid_forward", "log_softmax",
    "logaddexp", "logsumexp", "masked_fill", "matmul", "maximum", "mean", "minimum", "mish", "mm", "mul", "mv",
    "native_batch_norm", "native_dropout", "native_group_norm", "native_layer_norm", "neg", "new_empty", "new_empty_strided",
    "new_full", "new_ones", "new_zeros", "norm", "ones_like", "outer", "permute", "pow", "prelu", "prod", "rand_like",
    "randn_like", "reciprocal", "relu", "relu6", "repeat", "reshape", "rms_norm", "roll", "rsqrt", "rsub",
    "scaled_dot_product_attention", "scatter", "scatter_add", "select", "select_scatter", "sigmoid", "silu", "sin", "sinh",
    "slice", "slice_scatter", "softmax", "softplus", "split", "split_with_sizes", "sqrt", "square", "squeeze", "stack", "std",
    "sub", "sum", "t", "tan", "tanh", "transpose", "tril", "triu", "unbind", "unfold", "unsqueeze", "var", "var_mean", "vdot",
    "view", "view_as", "view_as_complex", "view_as_real", "where", "xlogy", "zero", "zeros_like",
    "_efficient_attention_forward", "_flash_attention_forward", "_fused_rms_norm", "_log_softmax", "_reshape_alias",
    "_scaled_dot_product_attention_math", "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu", "_softmax", "_to_copy",
    "_trilinear", "_unsafe_index", "_unsafe_view",
}  # fmt: skip
# Of bitsandbytes' 4-bit maps, whose products are torch's own (those in 8 bits scale all tokens by the largest value), and of
# tensors without values, which are asked where they are.
_CONTINUOUS_ELSEWHERE = {
    "bitsandbytes::dequantize_4bit", "bitsandbytes::dequantize_blockwise", "bitsandbytes::gemv_4bit", "prim::device",
}  # fmt: skip


class ValueChoices(TorchDispatchMode):
    """Sets `made` if an operation within the block may choose by values, and `operator` to its name.

    Compiled functions run as they are written within it: torch.compile would give them up for good.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made, self.operator = False, ""

    def __enter__(self) -> ValueChoices:
        self._not_compiled = torch.compiler.set_stance("force_eager")
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._not_compiled.__exit__(*error)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if not self.made and _may_choose(function, args, kwargs or {}, result):
            self.made, self.operator = True, function.name()
        return result


def _may_choose(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and _is_floating(leaf)]
    if not given:
        return False
    library, _, name = function.name().partition("::")
    name = name.partition(".")[0]
    if f"{library}::{name}" in _CONTINUOUS_ELSEWHERE:
        return False
    if library != "aten" or name.removesuffix("_") not in _CONTINUOUS or kwargs.get("rounding_mode") is not None:
        return True
    # To integers, or to where the program reads it.
    return isinstance(result, Tensor) and not (_is_floating(result) and result.device == given[-1].device)


def _is_floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


# By what each layer consisted of, whether it chose.
_SEEN: weakref.WeakKeyDictionary[nn.Module, list[tuple[Hashable, bool]]] = weakref.WeakKeyDictionary()


def chose_before(layer: nn.Module, contents: Hashable) -> bool | None:
    """Return whether the layer chose when it consisted of `contents`; None if nobody has looked."""
    return next((made for known, made in _SEEN.get(layer, ()) if known == contents), None)


def note_choice(layer: nn.Module, contents: Hashable, made: bool) -> None:
    """Remember whether the layer chose, for a few contents."""
    _SEEN[layer] = [*_SEEN.get(layer, ())[-7:], (contents, made)]
