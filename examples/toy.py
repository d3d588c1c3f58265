"""Stand-ins that let the examples run offline in seconds on a CPU: a tiny model with random weights, and quick settings.

In your own script MODEL is a name such as "Qwen/Qwen3-8B", and SETTINGS are yours.
"""

import tempfile
from pathlib import Path

from streamgrad.cli.train import save_embedded_model

MODEL = str(Path(tempfile.mkdtemp()) / "model")
save_embedded_model(Path(MODEL))

# bf16=False: TRL's default is True, which wants a GPU.
SETTINGS = {
    "output_dir": str(Path(MODEL).parent / "trained"),
    "per_device_train_batch_size": 8,
    "logging_steps": 5,
    "report_to": "none",
    "save_strategy": "no",
    "bf16": False,
    "dataloader_pin_memory": False,
}
