"""Group-relative policy optimization with TRL, streamed: a model learns to write vowels, from a reward alone.

Run it:  python examples/grpo.py
"""

import toy
from datasets import Dataset
from trl import GRPOConfig

from streamgrad.trl import StreamGRPOTrainer


def share_of_vowels(completions: list[str], **_) -> list[float]:
    return [sum(letter in "aeiou" for letter in completion) / max(len(completion), 1) for completion in completions]


dataset = Dataset.from_dict({"prompt": ["Say something: ", "Sing: ", "Tell me more: ", "And then? "]})

trainer = StreamGRPOTrainer(
    model=toy.MODEL,
    reward_funcs=share_of_vowels,
    args=GRPOConfig(**toy.SETTINGS, max_steps=50, learning_rate=5e-3, num_generations=8, max_completion_length=12),
    train_dataset=dataset,
)
trainer.train()

rewards = [entry["reward"] for entry in trainer.state.log_history if "loss" in entry]
trainer.accelerator.print(f"reward: {rewards[0]:.2f} -> {rewards[-1]:.2f}")
