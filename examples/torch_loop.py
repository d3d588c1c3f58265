"""A training loop in plain PyTorch: `streamgrad.enable(model)`, and a DPO step made of log-probabilities and an objective.

Run it:  python examples/torch_loop.py
"""

import torch
import toy
from transformers import AutoModelForCausalLM, AutoTokenizer

import streamgrad
from streamgrad.objectives import dpo_loss

tokenizer = AutoTokenizer.from_pretrained(toy.MODEL)
model, reference = (AutoModelForCausalLM.from_pretrained(toy.MODEL) for _ in range(2))
streamgrad.enable(model, chunk_size=16)
streamgrad.enable(reference, chunk_size=16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# Supervised: the model's own loss, as always.
batch = tokenizer(["A first sentence.", "And a second, longer one."], return_tensors="pt", padding=True)
labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
for step in range(5):
    loss = model(**batch, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")


def logprobs(network, encoded):
    """Return the log-probability of each token given those before it, without full logits."""
    hidden = network.model(**encoded).last_hidden_state[:, :-1]
    return streamgrad.token_logprobs(hidden, network.lm_head.weight, encoded["input_ids"][:, 1:], chunk_size=32)


# Preferences: an objective on log-probabilities. (No prompts here: every token but the first belongs to the answer.)
chosen = tokenizer(["I like tea.", "Yes, please."], return_tensors="pt", padding=True)
rejected = tokenizer(["I like nothing at all.", "No."], return_tensors="pt", padding=True)
masks = [encoded["attention_mask"][:, 1:] for encoded in (chosen, rejected)]
with torch.no_grad():
    references = [logprobs(reference, encoded) for encoded in (chosen, rejected)]
for step in range(5):
    policies = [logprobs(model, encoded) for encoded in (chosen, rejected)]
    loss = dpo_loss(*policies, *references, *masks, loss_type="sigmoid", beta=0.1)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: DPO loss {loss.item():.3f}")
