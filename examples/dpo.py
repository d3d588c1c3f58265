"""Direct preference optimization with TRL, streamed: policy and reference, whose model is made from the same name.

Run it:  python examples/dpo.py
"""

import toy
from datasets import Dataset
from trl import DPOConfig

from streamgrad.trl import StreamDPOTrainer

numbers = list(range(2, 34))
dataset = Dataset.from_dict(
    {
        "prompt": [f"Count to {n}: " for n in numbers],
        "chosen": [" ".join(map(str, range(1, n + 1))) for n in numbers],
        "rejected": ["I would rather not." for _ in numbers],
    }
)

trainer = StreamDPOTrainer(
    model=toy.MODEL,
    args=DPOConfig(**toy.SETTINGS, max_steps=10, learning_rate=1e-3, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.1]),
    train_dataset=dataset,
)
trainer.train()

margins = [entry["rewards/margins"] for entry in trainer.state.log_history if "loss" in entry]
trainer.accelerator.print(f"reward margin: {margins[0]:.2f} -> {margins[-1]:.2f}")
