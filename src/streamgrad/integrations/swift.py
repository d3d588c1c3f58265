"""A callback for ms-swift: `swift sft --external_plugins "$(python -m streamgrad.integrations.swift)" --callbacks streamgrad`.

ms-swift imports the files that `--external_plugins` names and makes the callbacks that `--callbacks` names from its own table, as
`callbacks_map[name](args, trainer)`. Importing this file adds `streamgrad` to that table; running it prints where it is.
Options of `StreamConfig` are read as JSON from the environment variable STREAMGRAD, since ms-swift refuses arguments that it does
not know.
"""

from __future__ import annotations

from typing import Any

from streamgrad.hf.discover import unwrap
from streamgrad.hf.unusable import NoLogits
from streamgrad.integrations.callback import StreamgradCallback
from streamgrad.integrations.environment import config_from_environment


class SwiftCallback(StreamgradCallback):
    """`StreamgradCallback`, made in ms-swift's way, for a trainer that looks at the logits of each step unless they are None."""

    def __init__(self, args: Any, trainer: Any) -> None:
        super().__init__(config_from_environment())
        if args.use_logits_to_keep:
            raise ValueError(
                "use_logits_to_keep=True cuts labels to the logits that it keeps, and no logits are made while streaming. "
                "Leave it out: it would save no memory."
            )
        args.use_logits_to_keep = False  # None lets ms-swift choose True

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Enable the model, and let steps return None for the logits that are not made: ms-swift then logs no `token_acc`."""
        super().on_train_begin(args, state, control, model=model, **kwargs)
        unwrap(model).register_forward_hook(_without_logits)


def _without_logits(model: Any, args: Any, output: Any) -> Any:
    if isinstance(getattr(output, "logits", None), NoLogits):
        output["logits"] = None
    return output


if __name__ == "__main__":
    print(__file__)
else:
    from swift.callbacks import callbacks_map

    callbacks_map["streamgrad"] = SwiftCallback
