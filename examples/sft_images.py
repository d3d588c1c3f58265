"""Supervised fine-tuning of a model of text and images with TRL, streamed: `SFTTrainer` becomes `StreamSFTTrainer`.

Run it:  python examples/sft_images.py
"""

import toy
import toy_images
from datasets import Dataset
from PIL import Image
from trl import SFTConfig

from streamgrad import StreamConfig
from streamgrad.trl import StreamSFTTrainer

colours = ["red", "green", "blue", "black", "white", "yellow", "purple", "orange"]
dataset = Dataset.from_dict(
    {
        "images": [[Image.new("RGB", (32, 32), colour)] for colour in colours],
        "prompt": [[{"role": "user", "content": "What colour is this?"}] for _ in colours],
        "completion": [[{"role": "assistant", "content": f"It is {colour}."}] for colour in colours],
    }
)

trainer = StreamSFTTrainer(
    model=toy_images.MODEL,
    args=SFTConfig(
        **toy.SETTINGS,
        max_steps=10,
        learning_rate=1e-2,
        max_length=None,  # so that no image is cut
        gradient_checkpointing=True,  # for the vision tower; the layers of the text are streamed in any case
    ),
    train_dataset=dataset,
    stream=StreamConfig(chunk_size=16),  # may be left out
)
trainer.train()

losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
trainer.accelerator.print(f"loss: {losses[0]:.2f} -> {losses[-1]:.2f}")
