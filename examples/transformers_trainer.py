"""transformers' own Trainer with an enabled model: one line more.

Run it:  python examples/transformers_trainer.py
"""

import toy
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

import streamgrad

tokenizer = AutoTokenizer.from_pretrained(toy.MODEL)
model = AutoModelForCausalLM.from_pretrained(toy.MODEL)
streamgrad.enable(model, chunk_size=16)

texts = [f"Sentence number {n} is {'short' if n % 2 else 'a good deal longer'}." for n in range(40)]
trainer = Trainer(
    model=model,
    args=TrainingArguments(**toy.SETTINGS, max_steps=20, learning_rate=3e-3),
    train_dataset=Dataset.from_dict(dict(tokenizer(texts))),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()

losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
trainer.accelerator.print(f"loss: {losses[0]:.2f} -> {losses[-1]:.2f}")
