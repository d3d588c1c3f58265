"""Supervised fine-tuning with TRL, streamed: `SFTTrainer` becomes `StreamSFTTrainer`.

Run it:  python examples/sft.py
"""

import toy
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig

from streamgrad import StreamConfig
from streamgrad.trl import StreamSFTTrainer

animals = ["cat", "dog", "cow", "owl", "bee", "ant", "fox", "hen"]
dataset = Dataset.from_dict(
    {"prompt": [f"The {name} says: " for name in animals], "completion": [f"I am a {name}." for name in animals]}
)

trainer = StreamSFTTrainer(
    model=toy.MODEL,
    args=SFTConfig(**toy.SETTINGS, max_steps=20, learning_rate=1e-2),
    train_dataset=dataset,
    peft_config=LoraConfig(target_modules="all-linear"),
    stream=StreamConfig(chunk_size=16),  # may be left out
)
trainer.train()

losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
trainer.accelerator.print(f"loss: {losses[0]:.2f} -> {losses[-1]:.2f}")
