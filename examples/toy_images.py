"""Stand-ins that let examples/sft_images.py run offline in seconds on a CPU: a tiny Gemma 3 with random weights, its processor.

In your own script MODEL is a name such as "google/gemma-3-4b-it", and its processor comes with it.
"""

import tempfile
from pathlib import Path

import torch
from toy import MODEL as TEXT_MODEL
from transformers import AutoTokenizer, Gemma3Config, Gemma3ForConditionalGeneration, Gemma3Processor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

MODEL = str(Path(tempfile.mkdtemp()) / "model")

special = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
tokenizer = AutoTokenizer.from_pretrained(TEXT_MODEL, extra_special_tokens=special)
text = {
    "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32,
    "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id,
}  # fmt: skip
vision = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 32, "patch_size": 8, "vision_use_head": False,
}  # fmt: skip
tokens = {f"{name.removesuffix('_token')}_token_index": tokenizer.convert_tokens_to_ids(word) for name, word in special.items()}
torch.manual_seed(0)
Gemma3ForConditionalGeneration(
    Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=16, **tokens)
).save_pretrained(MODEL)
Gemma3Processor(
    image_processor=Gemma3ImageProcessorPil(size={"height": 32, "width": 32}),
    tokenizer=tokenizer,
    image_seq_length=16,
    chat_template=(
        "{% for message in messages %}{% for part in message['content'] %}"
        "{{ '<start_of_image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{{ '\\n' }}{% endfor %}"
    ),
).save_pretrained(MODEL)
