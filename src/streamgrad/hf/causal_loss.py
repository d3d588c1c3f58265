"""The loss of a causal language model: which one is streamed, of which labels, and which calls of it are refused.

The streamed head computes transformers' `ForCausalLMLoss` of the arguments that the model was called with. Another loss is given
full logits. A forward that passes its loss other arguments is refused, as is a label whose meaning the stock model leaves open.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss import loss_utils

from streamgrad.engine.kv_chunk import SeamError
from streamgrad.head.targets import IGNORED
from streamgrad.hf.mask_checks import check_predictions
from streamgrad.hf.patching import tokens_of
from streamgrad.hf.sequence_slices import shared_sequence_group

# Equal to torch's, with kernels of its own; `apply_liger_kernel_to_...(cross_entropy=True)` puts it in torch's place.
_EQUALS_CROSS_ENTROPY = "liger_kernel.transformers.functional"


def why_full_logits(model: Any) -> str | None:
    """Return why the model's loss must be given full logits: it is not transformers' own, or calls a function that is not."""
    if not _is_of(loss_utils, model.loss_function, "ForCausalLMLoss"):
        name = getattr(model.loss_function, "__name__", type(model.loss_function).__name__)
        return f"its loss_function, {name!r}, needs full logits"
    if not _is_of(loss_utils, loss_utils.fixed_cross_entropy, "fixed_cross_entropy"):
        return "transformers.loss.loss_utils.fixed_cross_entropy has been replaced"
    function = nn.functional.cross_entropy
    if not _is_of(nn.functional, function, "cross_entropy") and function.__module__ != _EQUALS_CROSS_ENTROPY:
        return "torch.nn.functional.cross_entropy has been replaced"
    return None


def _is_of(module: ModuleType, function: Any, name: str) -> bool:
    """Return whether `function` is what the module's own code defines under that name, whatever stands there now."""
    return getattr(function, "__name__", None) == name and getattr(function, "__globals__", None) is vars(module)


def refuse_other_arguments(
    called_with: dict[str, Any],
    labels: Tensor | None = None,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = IGNORED,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> None:
    """Raise if a forward passes `ForCausalLMLoss` other arguments than it was called with, which the streamed head has used.

    As a forward does that masks labels, has shifted them already, or drops `num_items_in_batch`.
    """
    received = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index, "shift_labels": shift_labels}
    if shift_labels is None:  # else labels are not read
        received["labels"] = labels
    for name, passed in received.items():
        if not _equal(passed, called_with.get(name, IGNORED if name == "ignore_index" else None)):
            raise SeamError(
                f"its forward passes self.loss_function another {name} than it was called with, which the streamed head has "
                "used; change it before you call the model"
            )


def _equal(passed: Any, given: Any) -> bool:
    if passed is given:
        return True
    if passed is None or given is None:
        return False
    if isinstance(passed, Tensor) and isinstance(given, Tensor):
        return passed.shape == given.shape and torch.equal(passed, given.to(passed))
    return bool(passed == given)


def refuse_labels_to_be_shifted(model: Any, arguments: dict[str, Any]) -> None:
    """Raise for labels that the model would shift itself, where ranks share a sequence."""
    if arguments.get("labels") is None or arguments.get("shift_labels") is not None:
        return
    if shared_sequence_group(model) is not None:
        raise ValueError(
            "labels cannot be shifted inside the model where ranks share a sequence: the last token of a slice predicts the "
            "first of the next. Shift the labels of the whole sequence, and pass each rank its slice of them both as labels and "
            "as shift_labels."
        )


def check_labels(model: Any, arguments: dict[str, Any]) -> None:
    """Raise unless there is one label per token, predicted as in the stock model if that token sees no key, and one divisor."""
    refuse_labels_to_be_shifted(model, arguments)
    items = arguments.get("num_items_in_batch")
    if isinstance(items, Tensor) and items.numel() != 1:
        raise ValueError(
            f"num_items_in_batch has shape {tuple(items.shape)}, and the loss is divided by one number. Pass the number of "
            "predicted tokens in the whole batch, an int or a tensor with one element."
        )
    tokens = tokens_of(arguments)
    labels, shifted = arguments.get("labels"), arguments.get("shift_labels")
    if tokens is None or not isinstance(labels, Tensor):
        return
    if labels.shape != tokens.shape[:2]:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)} but the input {tuple(tokens.shape[:2])}: there must be one label per "
            "token. Pass labels of the input's shape, -100 where nothing is to be predicted; they are shifted inside the model."
        )
    if isinstance(shifted, Tensor) and shifted.shape != labels.shape:
        raise ValueError(
            f"shift_labels have shape {tuple(shifted.shape)} but labels {tuple(labels.shape)}: there must be one label per "
            "token. Pass both of the input's shape, shift_labels with what each token is to predict."
        )
    if arguments.get("attention_mask") is None or shared_sequence_group(model) is not None:
        return  # slices are checked in `sequence_slices`
    ignore_index = arguments.get("ignore_index", IGNORED)
    predicts_BT = nn.functional.pad(labels[:, 1:], (0, 1), value=ignore_index) if shifted is None else shifted
    check_predictions(arguments.get("attention_mask"), predicts_BT != ignore_index, model.get_decoder())
