"""Bad input is refused before any work, with the model untouched, by an error that names the value, the cause and the fix."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, DynamicCache

import batches
import streamgrad
from gradients import run_step
from tiny import tiny_model, tokens


@pytest.fixture
def model():
    return tiny_model("llama")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"chunk_size": 0}, ValueError, "chunk_size=0 .*at least 1"),
        ({"chunk_size": -3}, ValueError, "chunk_size=-3"),
        ({"chunk_size": 2.5}, TypeError, "chunk_size=2.5 is a float"),
        ({"chunk_size": True}, TypeError, "chunk_size=True is a bool"),
        ({"head_chunk_size": 0}, ValueError, "head_chunk_size=0"),
        ({"keep": "everything"}, ValueError, "keep must be one of .*'input'.*, got 'everything'"),
        ({"offload": "disk"}, ValueError, "offload must be one of .*'host'.*, got 'disk'"),
        ({"attention": "fast"}, ValueError, "attention must be one of .*'eager'.*, got 'fast'"),
        ({"chunksize": 4}, TypeError, "'chunksize' is not a streamgrad option.*chunk_size"),
        ({"config": {"chunk_size": 4}}, TypeError, "StreamConfig"),
    ],
)
def test_bad_options(model, options, error, words):
    with pytest.raises(error, match=words):
        streamgrad.enable(model, **options)
    assert not streamgrad.is_enabled(model)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("thing", [None, "Qwen/Qwen3-8B", torch.nn.Linear(2, 2)])
def test_not_a_hugging_face_model(thing):
    with pytest.raises(TypeError, match="PreTrainedModel"):
        streamgrad.enable(thing)


def build(kind, model_type, **options):
    small = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return kind.from_config(AutoConfig.for_model(model_type, **(small | options)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: build(AutoModelForSeq2SeqLM, "t5", d_model=32, num_layers=2, num_heads=4, d_kv=8, d_ff=48), "encoder-decoder"),
        (lambda: build(AutoModel, "resnet", hidden_sizes=[8, 8], depths=[1, 1], embedding_size=8), "no list of decoder layers"),
        (
            lambda: build(AutoModelForCausalLM, "mamba", state_size=4),
            "MambaForCausalLM cannot be streamed: MambaBlock has the scan of Mamba 1",
        ),
        (lambda: build(AutoModelForCausalLM, "recurrent_gemma", lru_width=32, head_dim=8), "Conv1d, which mixes tokens"),
        (lambda: build(AutoModelForCausalLM, "bloom"), "BloomForCausalLM cannot be streamed"),
        (lambda: build(AutoModelForCausalLM, "falcon"), "FalconForCausalLM cannot be streamed"),
        (lambda: build(AutoModel, "bert"), "BertModel cannot be streamed"),
        (
            lambda: build(AutoModelForCausalLM, "gemma3_text", use_bidirectional_attention=True, head_dim=8),
            "bidirectional attention",
        ),
    ],
    ids=["t5", "resnet", "mamba", "recurrent_gemma", "bloom", "falcon", "bert", "bidirectional"],
)
def test_models_that_cannot_be_streamed_are_refused_by_name(make, words):
    model = make()
    with pytest.raises(ValueError, match=words) as refused:
        streamgrad.enable(model)
    assert "forward" not in vars(model)
    *_, next_step = str(refused.value).split(". ")
    assert next_step.startswith(
        ("Train it without streamgrad, with model.gradient_checkpointing_enable()", "Pass a decoder-only")
    )


def test_layers_of_unknown_types_are_refused_by_type():
    model = tiny_model("qwen3")
    model.config.layer_types = ["full_attention", "indexed_attention"]
    with pytest.raises(ValueError, match="indexed_attention, and only full"):
        streamgrad.enable(model)


def test_enabled_with_other_options(model):
    streamgrad.enable(model, chunk_size=4)
    assert streamgrad.enable(model, chunk_size=4) is model
    with pytest.raises(ValueError, match="already enabled.*chunk_size=4.*disable"):
        streamgrad.enable(model, chunk_size=5)
    assert model.model._streamgrad.stream.config.chunk_size == 4


def test_disable_twice_and_on_a_stock_model(model):
    streamgrad.disable(model)
    streamgrad.enable(model)
    streamgrad.disable(streamgrad.disable(model))
    assert "forward" not in vars(model)


@pytest.mark.parametrize("shape", [(2, 22), (3, 23), (46,)])
def test_labels_of_another_shape(model, shape):
    streamgrad.enable(model)
    with pytest.raises(ValueError, match="labels have shape .* but the input \\(2, 23\\)"):
        model(input_ids=tokens(2, 23), labels=torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("wrong", [61, 1000, -1])
def test_labels_outside_the_vocabulary(model, wrong):
    streamgrad.enable(model)
    batch = batches.plain(model)
    batch["labels"][1, 5] = wrong
    with pytest.raises(ValueError, match=f"target {wrong} is outside the vocabulary of 61"):
        model(**batch)


def test_a_label_on_a_fully_masked_row_of_a_4d_mask(model):
    streamgrad.enable(model)
    batch = batches.dense_mask(model)
    batch["attention_mask"][0, 0, 8] = torch.finfo(torch.float64).min
    with pytest.raises(ValueError, match=r"labels\[0, 9\]"):
        model(**batch)


def test_a_4d_mask_that_looks_ahead(model):
    streamgrad.enable(model, chunk_size=5)
    batch = batches.dense_mask(model)
    batch["attention_mask"][1, 0, 6, 9] = 0.0
    with pytest.raises(ValueError, match="lets token 6 see token 9"):
        model(**batch)


def test_a_4d_mask_of_another_length(model):
    streamgrad.enable(model)
    batch = batches.dense_mask(model)
    batch["attention_mask"] = batch["attention_mask"][..., :20]
    with pytest.raises(ValueError, match="4-D attention mask has shape"):
        model(**batch)


def test_a_2d_mask_of_another_length(model):
    streamgrad.enable(model)
    ids = tokens(2, 23)
    with pytest.raises(
        ValueError, match="23 queries see 30 keys: the attention mask or a key/value cache is not of the 23 tokens"
    ):
        model(input_ids=ids, labels=ids, attention_mask=torch.ones(2, 30, dtype=torch.long))


@pytest.mark.parametrize("ends", [[0, 20], [0, 9, 7, 23], [3, 23], [0, 9, 30], []], ids=str)
def test_boundaries_that_are_none(ends):
    """Too short, falling, late, beyond the end, empty."""
    model = streamgrad.enable(tiny_model("llama"), chunk_size=4)
    ends = torch.tensor(ends, dtype=torch.int32)
    with pytest.raises(ValueError, match="are not the boundaries of documents in a packed sequence of 23 tokens"):
        model(input_ids=tokens(1, 23), cu_seq_lens_q=ends, cu_seq_lens_k=ends)


def test_boundaries_of_queries_that_are_not_those_of_keys():
    model = streamgrad.enable(tiny_model("llama"), chunk_size=4)
    queries, keys = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 9, 23], [0, 11, 23]))
    with pytest.raises(ValueError, match="cu_seq_lens_q and cu_seq_lens_k differ"):
        model(input_ids=tokens(1, 23), cu_seq_lens_q=queries, cu_seq_lens_k=keys)


def test_several_numbers_of_items():
    model, ids = streamgrad.enable(tiny_model("llama"), chunk_size=4), tokens(1, 23)
    with pytest.raises(ValueError, match=r"num_items_in_batch has shape \(2,\)"):
        model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor([3, 4]))


@pytest.mark.parametrize("masked", [False, True])
def test_shift_labels_without_rows(masked):
    model, ids = streamgrad.enable(tiny_model("llama"), chunk_size=4), tokens(2, 23)
    mask = {"attention_mask": torch.ones_like(ids)} if masked else {}
    with pytest.raises(ValueError, match=r"shift_labels have shape \(46,\) but labels \(2, 23\)"):
        model(input_ids=ids, labels=ids, shift_labels=ids.roll(-1, 1).flatten(), **mask)


def test_what_needs_whole_layers_is_refused_while_gradients_are_computed(model):
    streamgrad.enable(model)
    with pytest.raises(ValueError, match="output_attentions=True cannot be streamed"):
        model(input_ids=tokens(1, 5), output_attentions=True)


def test_a_filled_cache_is_refused_and_one_that_is_left_empty_cannot_be_used(model):
    """As where a first call compresses the context of a second: that would not see it."""
    streamgrad.enable(model)
    with torch.no_grad():
        cache = model(input_ids=tokens(1, 5), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="past_key_values holds 5 tokens"):
        model(input_ids=tokens(1, 3), past_key_values=cache)
    own = DynamicCache()
    empty = [model(input_ids=tokens(1, 3)).past_key_values]
    with pytest.warns(UserWarning, match="use_cache=True is ignored"):
        empty.append(model(input_ids=tokens(1, 3), use_cache=True).past_key_values)
    with pytest.warns(UserWarning, match="use_cache=True is ignored"):
        model(input_ids=tokens(1, 3), past_key_values=own)
    for cache in (*empty, own):
        with pytest.raises((AttributeError, TypeError, ValueError), match=r"fills no cache while gradients .*torch\.no_grad"):
            model(input_ids=tokens(1, 3), past_key_values=cache)
    with torch.no_grad(), pytest.raises(ValueError, match="was passed to an earlier call, but streamgrad fills no cache"):
        model(input_ids=tokens(1, 3), past_key_values=own)
    assert model(input_ids=tokens(1, 3), use_cache=False).past_key_values is None


def test_an_explicit_kernel_that_cannot_do_the_job_says_why():
    model = streamgrad.enable(tiny_model("gemma2"), attention="sdpa")
    with pytest.raises(ValueError, match="sdpa: .*no softcap.*attention=.auto"):
        run_step(model, batches.plain(model))


def test_an_error_in_a_step_leaves_the_model_as_it_was(model):
    """A failing forward restores layers and configuration; the next step is right."""
    streamgrad.enable(model, chunk_size=5)
    before = {name: vars(module).keys() for name, module in model.named_modules()}
    with pytest.raises(IndexError):
        model(input_ids=torch.full((1, 9), 10_000))
    hook = model.model.layers[1].mlp.register_forward_hook(_explode)
    with pytest.raises(ArithmeticError):
        model(**batches.plain(model))
    hook.remove()
    assert model.config._attn_implementation == "sdpa"
    assert {name: vars(module).keys() for name, module in model.named_modules()} == before


def _explode(*_):
    raise ArithmeticError


@pytest.mark.parametrize("chunk_size", [2, 4])
def test_positions_of_another_length(model, chunk_size):
    """Not even where they are as long as a chunk, which would then have them again and again."""
    ids = tokens(2, 8)
    streamgrad.enable(model, chunk_size=chunk_size)
    with pytest.raises(RuntimeError, match="exceeds dimension size|must match the size"):
        model(input_ids=ids, labels=ids, position_ids=torch.arange(4)[None])
