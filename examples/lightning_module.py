"""Lightning with an enabled model: one line more, where the module makes its model.

Run it:  python examples/lightning_module.py  (after pip install lightning)
"""

import lightning
import torch
import toy
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

import streamgrad

tokenizer = AutoTokenizer.from_pretrained(toy.MODEL)


class FineTuned(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(toy.MODEL).train()  # Lightning leaves it in the mode that it finds
        streamgrad.enable(self.model, chunk_size=16)
        self.losses = []

    def training_step(self, batch):
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


texts = [f"Sentence number {n} is {'short' if n % 2 else 'a good deal longer'}." for n in range(40)]
rows = [{"input_ids": ids} for ids in tokenizer(texts)["input_ids"]]
loader = torch.utils.data.DataLoader(rows, batch_size=8, collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False))
module = FineTuned()
trainer = lightning.Trainer(max_epochs=4, logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(module, loader)
trainer.print(f"loss: {module.losses[0]:.2f} -> {module.losses[-1]:.2f}")
