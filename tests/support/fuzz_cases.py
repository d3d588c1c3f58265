"""The cases of `make fuzz`: random training steps, each of a few plain values that say all of it."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

from families import LAYERS_TAKE_STATES_UP, STREAMED, STREAMED_SINCE_5_21
from tiny import FAMILIES

# Two have millions of parameters in parts that text does not reach.
LARGE = {"got_ocr2", "phi4_multimodal"}
OTHERS = sorted(STREAMED - FAMILIES.keys() - LARGE - (set() if LAYERS_TAKE_STATES_UP else STREAMED_SINCE_5_21))
EXPERTS = {"qwen3_moe", "gpt_oss", "deepseek_v3"}
CAPPED = {"gemma2", "vaultgemma"}
COUNTING = {"opt", "biogpt"}  # positions, by adding up the attention mask
# Families with a load-balancing loss on the logits of their routers.
BALANCED = {
    "qwen3_moe", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_next", "granitemoe", "jetmoe", "phimoe", "minimax_m2",
    "ernie4_5_moe", "flex_olmo", "dbrx", "qwen3_5_moe_text",
}  # fmt: skip
# PEFT fails on the router of the first, and refuses adapters on the output of the others' states.
NO_LORA = {"phimoe", "falcon_h1", "mamba2", "nemotron_h"}
WINDOWED = {"mistral", "gemma2", "gpt_oss"}


@dataclass(frozen=True)
class Case:
    """One training step, of which model, batches, objective and options are made again: to print it is enough to repeat it.

    The defaults are the simplest step, so that a failure is printed with no more than it needs. `lengths` has one entry a
    micro-batch; `layers` is a plan of its own for each layer, as (keep, chunk size).
    """

    seed: int = 0
    family: str = "llama"
    changes: tuple[tuple[str, Any], ...] = ()  # of the model's configuration
    dtype: str = "float64"  # or "autocast": float32 weights, bfloat16 products
    adapter: str = "none"
    frozen: str = "nothing"
    mask: str = "none"
    embedded: bool = False
    objective: str = "labels"
    balance: bool = False  # the load-balancing loss of experts
    rows: int = 1
    lengths: tuple[int, ...] = (5,)
    chunk_size: int | str = 2
    head_chunk_size: int | str = 2
    keep: str = "input"
    offload: str = "auto"
    attention: str = "auto"
    fused_kernels: str = "off"
    memory_budget: str | None = None
    layers: tuple[tuple[str, int], ...] = ()
    keys_at_once: int | None = None  # such that longer sequences take their keys in parts
    checkpointing: str = "off"
    chunks_in_forward: int = 1

    @property
    def options(self) -> dict[str, Any]:
        names = ("chunk_size", "head_chunk_size", "keep", "offload", "attention", "fused_kernels", "memory_budget")
        automatic = {"keep": "auto", "chunk_size": "auto"} if self.layers else {}
        return {name: getattr(self, name) for name in names} | automatic

    def __str__(self) -> str:
        changed = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]
        return f"Case({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"


CHOICES: dict[str, tuple] = {
    "dtype": ("float64",) * 8 + ("float32", "float32", "bfloat16", "float16", "autocast"),
    "adapter": ("none",) * 4 + ("lora", "lora", "dora"),
    "frozen": ("nothing",) * 3 + ("half", "lower layers", "head", "all but norms", "all but head"),
    "mask": ("none", "right", "left", "mixed", "holes", "packed", "packed flat", "dense", "dense bool"),
    "embedded": (False,) * 5 + (True,),
    "objective": ("labels",) * 3 + ("counted", "counted tensor", "shifted", "logits", "hidden", "dpo", "grpo"),
    "rows": (1, 2, 2, 3, 4),
    "keep": ("input", "attention", "all", "auto"),
    "offload": ("auto", "none", "host"),
    "attention": ("auto", "auto", "sdpa", "eager"),
    "fused_kernels": ("on", "off", "auto"),
    "memory_budget": (None,) * 9 + ("2GiB",),
    "keys_at_once": (None, None, None, 5),
    "checkpointing": ("off", "off", "off", "before", "after", "reentrant"),
}

# A run of `make fuzz` with another SEED draws other cases, if it has fewer than this.
CASES_OF_A_SEED = 1_000_000


def cases_of(seed: int, first: int, count: int) -> list[Case]:
    """Return cases `first`, `first + 1`, ... of a run with this seed."""
    return [draw(seed * CASES_OF_A_SEED + index) for index in range(first, first + count)]


def draw(seed: int) -> Case:
    """Return the case of this seed."""
    drawn = random.Random(seed)
    while True:
        family = drawn.choice([*FAMILIES] if drawn.random() < 0.5 else OTHERS)
        lengths = tuple(drawn.choice((1, 2, *range(5, 25))) for _ in range(drawn.choice((1, 1, 1, 2, 3))))
        sizes = [drawn.choice(("auto", 1, 2, *range(3, 14), 19, 27)) for _ in range(2)]
        layers = ((drawn.choice(("input", "attention", "all")), drawn.choice((*range(1, 14), 27))) for _ in range(2))
        case = Case(
            seed=seed, family=family, changes=_changes(family, drawn), lengths=lengths,
            chunk_size=sizes[0], head_chunk_size=sizes[1], layers=tuple(layers) if drawn.random() < 0.2 else (),
            chunks_in_forward=random.Random(-seed).choice((1, 2, 3, 9)),
            **{name: drawn.choice(choices) for name, choices in CHOICES.items()},
        )  # fmt: skip
        if is_meant(case):
            balanced = dataclasses.replace(case, balance=True)
            return balanced if drawn.random() < 0.7 and is_meant(balanced) else case


def _changes(family: str, drawn: random.Random) -> tuple[tuple[str, Any], ...]:
    """Return other heads, head sizes and windows for some models of the families that allow any."""
    if family not in WINDOWED | {"llama"} or drawn.random() < 0.5:
        return ()
    heads, key_heads = drawn.choice([(1, 1), (2, 1), (3, 3), (4, 2), (6, 2)])
    changes = {"num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": drawn.choice([2, 4, 10])}
    window = {"sliding_window": drawn.randint(1, 30)} if family in WINDOWED else {}
    return tuple((changes | {"hidden_size": 12, "tie_word_embeddings": drawn.random() < 0.3} | window).items())


def is_meant(case: Case) -> bool:
    """Whether the case is one that plain backpropagation has an answer to, and streaming is meant to have the same."""
    scored = case.objective in ("dpo", "grpo")
    return not (
        # In few bits a router may send a token to another expert, on either side.
        (case.dtype not in ("float64", "float32") and case.family in EXPERTS)
        or (case.dtype != "float64" and case.family in OTHERS)
        or (case.attention == "sdpa" and case.family in CAPPED)  # torch's has no softcap, which is an error
        or (case.mask == "packed flat" and (case.rows > 1 or case.family in {*OTHERS, "gpt_oss"}))  # stock sees no boundaries
        or (case.mask.startswith("dense") and case.family in COUNTING)
        or (case.balance and (case.family not in BALANCED or case.objective not in ("labels", "counted", "counted tensor")))
        or (case.balance and case.mask.startswith("dense"))  # stock balance losses take a mask of tokens only
        or (case.objective == "dpo" and case.rows % 2)
        or (scored and case.family in OTHERS)  # how they scale and cap their logits is not known here
        or (case.adapter != "none" and case.frozen not in ("nothing", "half"))
        or (case.adapter == "dora" and case.family in OTHERS)  # not for experts, says PEFT
        or (case.adapter == "lora" and case.family in NO_LORA)
        or (case.embedded and case.family.startswith("gemma4"))  # stock looks its tokens up again
        or (case.objective == "hidden" and case.frozen == "all but head")
        or (case.layers and (case.memory_budget or case.family in OTHERS))
        or (max(case.lengths) == 1 and case.objective not in ("labels", "counted", "hidden"))
    )
