"""What a trainer with a streamed model refuses, and odd data that it treats as stock TRL does."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModel
from trl import DPOConfig, DPOTrainer, GRPOConfig, SFTConfig, SFTTrainer
from trl.trainer import sft_trainer
from trl.trainer.utils import add_fused_lm_head

from streamgrad import StreamConfig
from streamgrad.parallel.launch import check_engine
from streamgrad.trl import StreamDPOTrainer, StreamGRPOTrainer, StreamSFTTrainer
from streamgrad.trl.scoring import add_streamed_head
from tiny import tiny_model
from trainers import completions, first_step, lora, pairs, prompts, reward, settings, texts, tokenizer

# Raised inside TRL, transformers and torch's data loader on a machine without an accelerator; none is about the model.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

STREAM = StreamConfig(chunk_size=7, head_chunk_size=5)
# Allowed rounding of float32 losses and gradients, seen up to 1e-6; a label more or fewer moves them by 1e-2.
ROUNDING = 1e-4


def model(family: str = "qwen3", **changes):
    return tiny_model(family, dtype=torch.float32, **changes)


def sft(tmp_path, *, network=None, dataset=None, kind=StreamSFTTrainer, extra=None, **options):
    stream = {"stream": STREAM} if kind is StreamSFTTrainer else {}
    return kind(
        model=network or model(), args=settings(SFTConfig, tmp_path, **options), processing_class=tokenizer(),
        train_dataset=dataset or texts(), **stream, **extra or {},
    )  # fmt: skip


def dpo(tmp_path, *, dataset=None, kind=StreamDPOTrainer, **options):
    return kind(
        model=model(), ref_model=model(seed=3), args=settings(DPOConfig, tmp_path, **options), processing_class=tokenizer(),
        train_dataset=dataset or pairs(), **({"stream": STREAM} if kind is StreamDPOTrainer else {}),
    )  # fmt: skip


def test_activation_offloading(tmp_path):
    with pytest.raises(ValueError, match=r'activation_offloading=True .*StreamConfig\(offload="host"\)'):
        sft(tmp_path, activation_offloading=True)


def of_bitsandbytes(parameters):
    """An optimizer whose class says that it is of bitsandbytes."""
    return type("AdamW8bit", (torch.optim.SGD,), {"__module__": "bitsandbytes.optim.adamw"})(parameters, lr=0.1)


def test_states_of_another_kind_of_optimizer(tmp_path):
    """They would raise a KeyError at the first step. What counts is the optimizer that there is, not the trainer's arguments."""
    saving = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    sft(tmp_path, **saving).train()
    network = model()
    trainer = sft(tmp_path, network=network, extra={"optimizers": (of_bitsandbytes(network.parameters()), None)}, max_steps=2)
    with pytest.raises(ValueError, match="checkpoint-1: the optimizer of that run was not one of bitsandbytes'"):
        trainer.train(resume_from_checkpoint=True)
    sft(tmp_path, **saving | {"max_steps": 2}).train(resume_from_checkpoint=True)

    class Own(StreamSFTTrainer):
        def create_optimizer(self, *args, **kwargs):
            self.optimizer = of_bitsandbytes(self.model.parameters())
            return self.optimizer

    with pytest.raises(ValueError, match="checkpoint-2: the optimizer of that run was not one of bitsandbytes'"):
        sft(tmp_path, kind=Own, max_steps=3).train(resume_from_checkpoint=True)


def test_an_engine_that_was_told_otherwise(tmp_path):
    """Before a model is touched: TRL hands a reference to DeepSpeed, which would fail at the size of batches."""
    config = {"gradient_accumulation_steps": 2, "gradient_clipping": "auto", "zero_optimization": {"stage": 3}}
    args = settings(DPOConfig, tmp_path, gradient_accumulation_steps=4, max_grad_norm=0.5)
    args.deepspeed_plugin = SimpleNamespace(deepspeed_config=config)
    words = "differ: gradient_accumulation_steps=2 there, gradient_accumulation_steps=4 here. Give both"
    with pytest.raises(ValueError, match=words):
        StreamDPOTrainer(model="no such model", args=args, train_dataset=pairs())
    args.gradient_accumulation_steps = 2
    check_engine(args)
    assert config["gradient_clipping"] == "auto"


def test_a_model_that_cannot_be_streamed(tmp_path):
    """The reason is streamgrad's own, and TRL is left as it was."""
    network = model("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    network.config.is_causal = False
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot be streamed: .*bidirectional"):
        sft(tmp_path, network=network)
    assert sft_trainer.add_fused_lm_head is add_fused_lm_head


def test_a_head_with_an_adapter(tmp_path):
    """LoRA on the head is refused by TRL; trained tokens of a tied head would be left out of the loss in silence."""
    with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        sft(tmp_path, network=model("llama"), extra={"peft_config": lora(target_modules=["lm_head"])})
    tokens = LoraConfig(r=3, target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [4, 5]})
    trainer = sft(tmp_path, extra={"peft_config": tokens})
    with pytest.raises(ValueError, match="head is a .*linear head only.* trainable_token_indices"):
        first_step(trainer)


def test_scoring_needs_labels_and_a_head(tmp_path):
    network = model()
    add_streamed_head(network, STREAM)
    with pytest.raises(ValueError, match="neither labels nor shift_labels"):
        network(input_ids=torch.ones(1, 4, dtype=torch.long), fused_lm_head=True)
    with pytest.raises(ValueError, match="has no language-modelling head"):
        add_streamed_head(tiny_model("qwen3", kind=AutoModel), STREAM)
    with pytest.raises(ValueError, match=r"temperature=0.0 must be positive"):
        add_streamed_head(model(), STREAM, temperature=0.0)


def test_unknown_losses(tmp_path):
    with pytest.raises(ValueError, match="nllll"):
        sft(tmp_path, loss_type="nllll")
    with pytest.raises(ValueError, match="Unknown loss type: sigmoidal"):
        first_step(dpo(tmp_path, loss_type=["sigmoidal"]))
    arguments = settings(GRPOConfig, tmp_path, loss_type="gnpo", num_generations=4, max_completion_length=4)
    trainer = StreamGRPOTrainer(
        model=model(), reward_funcs=reward, args=arguments, processing_class=tokenizer(), train_dataset=prompts(), stream=STREAM
    )
    with pytest.raises(ValueError, match="Unknown loss type: gnpo"):
        first_step(trainer)


def test_a_dataset_without_the_columns(tmp_path):
    with pytest.raises(KeyError, match="text"):
        sft(tmp_path, dataset=Dataset.from_dict({"words": ["t4 t5", "t6"]}))
    with pytest.raises(KeyError, match="rejected"):
        dpo(tmp_path, dataset=pairs().remove_columns("rejected"))


@pytest.mark.parametrize("limit", [7, 9])
def test_prompts_longer_than_the_limit(tmp_path, limit):
    """What truncation leaves without a completion is dropped, by the same rule as in stock: no example trains on its prompt."""
    ours, theirs = (
        sft(tmp_path, kind=kind, dataset=completions(), max_length=limit, per_device_train_batch_size=4)
        for kind in (StreamSFTTrainer, SFTTrainer)
    )
    assert 0 < len(ours.train_dataset) == len(theirs.train_dataset) < 8
    assert first_step(ours)[0].loss.item() == pytest.approx(first_step(theirs)[0].loss.item(), rel=ROUNDING)


def test_an_empty_completion(tmp_path):
    """The end token is all there is to learn."""
    dataset = Dataset.from_dict({"prompt": ["t4 t5 t6", "t7 t8"], "completion": ["", " t9"]})
    ours, theirs = (first_step(sft(tmp_path, kind=kind, dataset=dataset))[0] for kind in (StreamSFTTrainer, SFTTrainer))
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=ROUNDING)
    assert ours.loss.isfinite()


def test_a_pair_of_equal_sides(tmp_path):
    """Nothing to prefer: log 2, no margin, and no gradient but rounding."""
    same = Dataset.from_dict({"prompt": ["t4 t5 t6"] * 2, "chosen": ["t7 t8"] * 2, "rejected": ["t7 t8"] * 2})
    step, metrics = first_step(dpo(tmp_path, dataset=same))
    assert step.loss.item() == pytest.approx(math.log(2), rel=ROUNDING)
    assert metrics["rewards/margins"] == pytest.approx(0, abs=ROUNDING)
    assert max(gradient.abs().max() for gradient in step.gradients.values()) < ROUNDING
    stock, _ = first_step(dpo(tmp_path, dataset=same, kind=DPOTrainer))
    assert stock.loss.item() == pytest.approx(step.loss.item(), rel=ROUNDING)


def test_backward_hooks_on_the_head_are_refused(tmp_path):
    """Scores are differentiated without logits: the hook would not be called."""
    network = model()
    network.lm_head.register_full_backward_hook(lambda module, given, taken: (0.5 * given[0],))
    with pytest.raises(ValueError, match="a backward hook on the language-modelling head cannot be called"):
        first_step(sft(tmp_path, network=network))


def test_several_numbers_of_items(tmp_path):
    """As for `model(..., labels=...)`: a loss divided by two numbers would be two losses."""
    trainer = sft(tmp_path)
    inputs = next(iter(trainer.get_train_dataloader()))
    with pytest.raises(ValueError, match=r"num_items_in_batch has shape \(2,\)"):
        trainer.model(**inputs, fused_lm_head=True, num_items_in_batch=torch.tensor([3, 4]))
