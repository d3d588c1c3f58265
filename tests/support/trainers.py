"""TRL's trainers on tiny models: words, datasets, arguments, one scored step with all it logs, and a stock TRL in float64."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import trl.trainer.distillation_trainer
import trl.trainer.utils
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gradients import Step
from tiny import VOCABULARY

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + ' t2 ' }}{% endgeneration %}{% else %}{{ message['content'] + ' ' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)

# Logged values that measure the machine or count, not the model.
TIMES = ("runtime", "per_second", "num_tokens", "epoch", "step", "total_flos", "peak_memory")


def tokenizer() -> PreTrainedTokenizerFast:
    """Words t0, t1, ...; a role of a conversation is a word as well."""
    names = {f"t{i}": i for i in range(VOCABULARY - 2)} | {"user": VOCABULARY - 2, "assistant": VOCABULARY - 1}
    words = Tokenizer(models.WordLevel(names, unk_token="t1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", unk_token="t1", bos_token="t1", eos_token="t2")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def sentences(count: int, shortest: int) -> list[str]:
    """Random words; each sentence is one word longer than the one before, so that no batch is rectangular."""
    draw = random.Random(shortest)
    return [" ".join(f"t{draw.randint(3, VOCABULARY - 3)}" for _ in range(shortest + i)) for i in range(count)]


def texts(count: int = 8) -> Dataset:
    return Dataset.from_dict({"text": sentences(count, 12)})


def completions(count: int = 8) -> Dataset:
    return Dataset.from_dict({"prompt": sentences(count, 4), "completion": [f" {text}" for text in sentences(count, 6)]})


def conversations(count: int = 8) -> Dataset:
    turns = zip(*(sentences(count, shortest) for shortest in (3, 4, 5, 6)), strict=True)
    roles = ("user", "assistant", "user", "assistant")
    return Dataset.from_dict(
        {"messages": [[{"role": role, "content": text} for role, text in zip(roles, four, strict=True)] for four in turns]}
    )


def pairs(count: int = 8) -> Dataset:
    """The two sides of a pair differ in length."""
    return Dataset.from_dict({"prompt": sentences(count, 5), "chosen": sentences(count, 6), "rejected": sentences(count, 9)})


def judged(count: int = 8) -> Dataset:
    """Completions, every other one of which is bad."""
    return completions(count).add_column("label", [i % 2 == 0 for i in range(count)])


def prompts(count: int = 8) -> Dataset:
    return Dataset.from_dict({"prompt": sentences(count, 5)})


def reward(completions, **_) -> list[float]:
    """Differs between the completions of a prompt, so that no advantage is zero."""
    return [completion.count("t7") + 0.1 * len(completion) for completion in completions]


def settings(kind: type, tmp_path, **options):
    """Arguments of a trainer, without what would write, report or print."""
    defaults = {
        "output_dir": str(tmp_path), "max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "bf16": False,
        "seed": 1,
    }  # fmt: skip
    return kind(**defaults | options)


def lora(**options) -> LoraConfig:
    return LoraConfig(**{"r": 3, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | options)


def history(trainer) -> list[dict[str, float]]:
    """Everything that training logged, but for times and counters."""
    trainer.train()
    return [
        {name: value for name, value in entry.items() if not any(part in name for part in TIMES)}
        for entry in trainer.state.log_history
        if "loss" in entry or any(name.startswith("eval_") for name in entry)
    ]


def first_step(trainer, *, drift: float = 0.0) -> tuple[Step, dict[str, float]]:
    """Loss, gradients and metrics of the trainer's first batch, computed as its training loop would.

    With `drift`, weights move at random between sampling and scoring, so that importance ratios are not 1.
    """
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    torch.manual_seed(5)  # completions are sampled
    (batch, *_), items = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, trainer.args.device)
    inputs = trainer._prepare_inputs(batch)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if drift and parameter.requires_grad:
                # Drawn in float32, whatever the weights are in: a float64 run is to be the truth of a float32 one.
                parameter += drift * torch.randn(parameter.shape, generator=generator)
    with trainer.compute_loss_context_manager():
        loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=items)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items() if values and "time" not in name}
    return Step(loss.detach(), gradients), metrics


class _FullLogits:
    """TRL's kernel as plain torch on full logits, in the dtype of its operands: TRL's own computes in float32 only."""

    @staticmethod
    def apply(hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs):
        logits = logit_scale * torch.nn.functional.linear(hidden, weight, bias)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits / temperature
        logp = logits.log_softmax(-1)
        scores = (
            logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1),
            -(logp.exp() * logp).sum(-1),
            (2 * logp.detach()).logsumexp(-1),
            logits.detach().mean(-1),
            logits.argmax(-1) == targets,
        )
        return tuple(
            score if name in ("log_probs", *outputs) else None
            for name, score in zip(("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1"), scores, strict=True)
        )


class _FullDivergence:
    """TRL's other kernel, for distillation, in the same way; without scales and caps."""

    @staticmethod
    def apply(hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, beta, temperature, *_):
        given = ((hidden, weight, bias), (teacher_hidden, teacher_weight, teacher_bias))
        logp, logq = ((torch.nn.functional.linear(*side) / temperature).log_softmax(-1) for side in given)
        logm = (beta * logq.exp() + (1 - beta) * logp.exp()).log()

        def kl(left, right):
            return (left.exp() * (left - right)).sum(-1)

        divergence = beta * kl(logq, logm) + (1 - beta) * kl(logp, logm)
        if beta in (0.0, 1.0):
            divergence = kl(logp, logq) if beta else kl(logq, logp)
        return divergence, -(logp.exp() * logp).sum(-1)


@contextmanager
def trl_on_full_logits() -> Iterator[None]:
    with (
        mock.patch.object(trl.trainer.utils, "_ChunkedLogProbFunction", _FullLogits),
        mock.patch.object(trl.trainer.distillation_trainer, "ChunkedDivergenceFunction", _FullDivergence),
    ):
        yield
