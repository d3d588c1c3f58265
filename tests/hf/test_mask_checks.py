"""Masks of every shape and dtype: the stock model's gradients whatever the chunk size, or an error that says what to pass."""

from __future__ import annotations

import warnings

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import DataCollatorForLanguageModeling, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutputWithPast

import streamgrad
from gradients import assert_same_step, no_float32, run_step
from image_families import small_image_model
from lora import with_lora
from streamgrad.hf.mask_checks import _warn_of_blind_predictions
from tiny import VOCABULARY, tiny_model, tokens

LENGTH, BLIND = 13, 5
MIN, INF = torch.finfo(torch.float64).min, float("-inf")


def assert_exact(model, batch, *, chunk_sizes=(4, 5, 32)) -> None:
    """Assert that a step equals plain backpropagation's for chunks that end before, in and after what is hidden."""
    with no_float32():
        expected = run_step(model, batch)
        for chunk_size in chunk_sizes:
            streamgrad.enable(model, chunk_size=chunk_size)
            assert_same_step(run_step(model, batch), expected, 1e-10)
            streamgrad.disable(model)


# --- left padding -------------------------------------------------------------------------------------------------------


@pytest.fixture
def already_warned():
    """Have the one warning given before a test that is not about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _warn_of_blind_predictions()


def collated(lengths: tuple[int, ...] = (13, 9, 4)) -> dict:
    """A batch as transformers' own collator pads it on the left: the first real token of a row is predicted from padding."""
    vocabulary = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t1"))
    words = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="t0", padding_side="left")
    rows = [{"input_ids": tokens(1, length, seed=length)[0].tolist()} for length in lengths]
    batch = dict(DataCollatorForLanguageModeling(words, mlm=False)(rows))
    assert batch["attention_mask"][-1, 0] == 0 and batch["labels"][-1, -lengths[-1]] != -100
    return batch


@pytest.mark.usefixtures("already_warned")
@pytest.mark.parametrize("family", ["qwen3", "mistral", "deepseek_v3", "gpt_oss"])
def test_left_padded_batches_of_transformers_collator(family):
    """Attention of gpt-oss is eager, but with a sink, which takes all the weight of a token that sees no key."""
    assert_exact(tiny_model(family), collated())


@pytest.mark.usefixtures("already_warned")
@pytest.mark.parametrize("lengths", [(13, 9, 4), (7, 1)], ids=str)
def test_left_padding_of_whole_chunks(lengths):
    assert_exact(tiny_model("llama"), collated(lengths), chunk_sizes=(1, 3, 7))


@pytest.mark.usefixtures("already_warned")
def test_left_padded_batches_with_lora():
    assert_exact(with_lora(tiny_model("llama")), collated())


@pytest.mark.usefixtures("already_warned")
def test_a_label_on_a_padded_row_whose_window_holds_only_padding():
    ids, real = tokens(2, LENGTH), torch.arange(LENGTH) < torch.tensor([[LENGTH], [3]])
    assert_exact(tiny_model("mistral"), {"input_ids": ids, "attention_mask": real.long(), "labels": ids})


def test_labels_predicted_from_padding_are_warned_of_once():
    _warn_of_blind_predictions.cache_clear()
    model = streamgrad.enable(tiny_model("llama"), chunk_size=4)
    with pytest.warns(UserWarning, match="first real token of each row is predicted from padding.*set them to -100") as caught:
        run_step(model, collated())
    assert len(caught) == 1
    run_step(model, collated())  # in which a warning would be an error


def test_labels_predicted_from_padding_are_refused_with_eager_attention():
    """It takes the mean of all values for a token that sees none, later ones included."""
    model, batch = tiny_model("llama"), collated()
    model.set_attn_implementation("eager")
    streamgrad.enable(model, chunk_size=4)
    with pytest.raises(ValueError, match=r"labels\[1, 4\] would be predicted from token 3.*-100 .*set_attn_implementation"):
        model(**batch)
    streamgrad.disable(model)
    batch["labels"][1, 4] = batch["labels"][2, 9] = -100
    assert_exact(model, batch)


class ShiftsItself(LlamaForCausalLM):
    """Computes its loss as remote code did: it shifts the labels itself."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **options):
        logits = self.lm_head(self.model(input_ids=input_ids, attention_mask=attention_mask)[0])
        loss = torch.nn.CrossEntropyLoss()(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits)


@pytest.mark.parametrize("chunk_size", [4, 32])
def test_a_model_that_shifts_labels_itself(chunk_size):
    model, batch = tiny_model("llama"), collated()
    model.__class__ = ShiftsItself
    model.set_attn_implementation("eager")
    streamgrad.enable(model, chunk_size=chunk_size)
    with pytest.raises(ValueError, match=r"labels\[1, 4\] would be predicted from token 3"):
        model(**batch)
    streamgrad.disable(model)
    batch["labels"][1, 4] = batch["labels"][2, 9] = -100
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, chunk_size=chunk_size)
        assert_same_step(run_step(model, batch), expected, 1e-10)


# --- 4-D masks ----------------------------------------------------------------------------------------------------------


def dense(hidden: float | bool, *, blind: float | bool | None = None, is_seen: bool = True) -> dict:
    """A causal 4-D mask that hides keys by `hidden`; and every key from one token, which others may see, by `blind`."""
    ids, causal = tokens(2, LENGTH), torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    mask = causal.repeat(2, 1, 1, 1)
    if hidden is not False:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, hidden)
    labels = ids.clone()
    if blind is not None:
        mask[1, :, BLIND, : BLIND + 1] = blind
        labels[1, BLIND + 1] = -100
        if not is_seen:
            mask[1, :, :, BLIND] = blind
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("chunk_size", [1, 32])
@pytest.mark.parametrize("value", [MIN, -1e4, -6e3])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_token_that_others_see_and_that_sees_no_key_by_finite_values(implementation, value, chunk_size):
    """Stock softmax is over all keys, later ones included."""
    model = tiny_model("llama")
    model.set_attn_implementation(implementation)
    streamgrad.enable(model, chunk_size=chunk_size)
    with pytest.raises(ValueError, match="hides every key from token 5 of row 1.*finite values.*let the token see itself"):
        model(**dense(MIN if value == MIN else -1e4, blind=value))


def test_a_token_that_sees_no_key_in_one_head():
    model, batch = streamgrad.enable(tiny_model("llama"), chunk_size=4), dense(MIN)
    batch["attention_mask"] = batch["attention_mask"].repeat(1, 4, 1, 1)
    batch["attention_mask"][0, 2, 7] = MIN
    with pytest.raises(ValueError, match="hides every key from token 7 of row 0"):
        model(**batch)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_padding_that_sees_no_key_by_finite_values(implementation):
    """Nothing depends on it; and what streaming makes of it depends on no chunk size."""
    model, batch = tiny_model("llama"), dense(MIN, blind=MIN, is_seen=False)
    model.set_attn_implementation(implementation)
    assert_exact(model, batch)
    hidden = []
    for chunk_size in (2, 7):
        streamgrad.enable(model, chunk_size=chunk_size)
        hidden.append(model.model(**{name: batch[name] for name in ("input_ids", "attention_mask")}).last_hidden_state)
        streamgrad.disable(model)
    torch.testing.assert_close(*hidden, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("hidden", [False, INF], ids=["boolean", "infinite"])
def test_a_token_that_others_see_and_that_sees_no_key_with_sdpa(hidden):
    """It gets zeros, and so does the label that is predicted from it."""
    assert_exact(tiny_model("llama"), dense(hidden, blind=hidden))


@pytest.mark.usefixtures("already_warned")
@pytest.mark.parametrize("hidden", [False, INF], ids=["boolean", "infinite"])
def test_a_label_on_a_token_that_a_4d_mask_blinds(hidden):
    batch = dense(hidden, blind=hidden)
    batch["labels"] = batch["input_ids"]
    assert_exact(tiny_model("llama"), batch)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2"])
def test_boolean_4d_masks_with_eager_attention_are_refused(family):
    """It adds them to scores, as 0 and 1."""
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    streamgrad.enable(model, chunk_size=4)
    with pytest.raises(ValueError, match=r"boolean, and eager attention.*floating-point mask.*set_attn_implementation\('sdpa'\)"):
        model(**dense(False))


def test_masks_by_type_of_layer_are_checked_too():
    model, batch = tiny_model("gemma3_text"), dense(MIN)
    batch["attention_mask"] = dict.fromkeys(("full_attention", "sliding_attention"), batch["attention_mask"])
    assert_exact(model, batch)
    batch["attention_mask"]["full_attention"] = dense(MIN, blind=MIN)["attention_mask"]
    streamgrad.enable(model, chunk_size=4)
    with pytest.raises(ValueError, match=r"labels\[1, 6\] would be predicted from token 5"):
        model(**batch)


# --- other shapes and dtypes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.5, -1.0])
def test_float_2d_masks_hide_where_they_are_zero(scale):
    ids, real = tokens(2, LENGTH), torch.arange(LENGTH) < torch.tensor([[LENGTH], [8]])
    labels = ids.masked_fill(~real, -100)
    assert_exact(tiny_model("llama"), {"input_ids": ids, "attention_mask": real * scale, "labels": labels})


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(2, LENGTH, LENGTH), r"shape \(2, 13, 13\) in a batch of 2. Pass \(batch, tokens\)"),
        (torch.ones(2, 1, LENGTH), r"shape \(2, 1, 13\)"),
        (torch.ones(1, LENGTH), r"shape \(1, 13\) in a batch of 2"),
        (dense(MIN)["attention_mask"].long(), "4-D attention mask is torch.int64.*Pass a boolean"),
        (dense(MIN)["attention_mask"].repeat(1, 3, 1, 1), r"shape \(2, 3, 13, 13\) for 2 rows and 4 heads"),
        (dense(MIN)["attention_mask"].repeat(2, 1, 1, 1)[:3], r"shape \(3, 1, 13, 13\) for 2 rows and 4 heads"),
        (dense(float("nan"))["attention_mask"], "lets token 0 see token 1"),
    ],
    ids=["3-D", "3-D of keys", "other batch", "integers", "other heads", "4-D, other batch", "nan"],
)
def test_masks_that_mean_nothing_are_refused(mask, words):
    """With every kernel still there for the next batch."""
    model, ids = streamgrad.enable(tiny_model("llama"), chunk_size=4), tokens(2, LENGTH)
    kernels = list(model.model._streamgrad.stream.backends)
    with pytest.raises(ValueError, match=words):
        model(input_ids=ids, labels=ids, attention_mask=mask)
    assert model.model._streamgrad.stream.backends == kernels


@pytest.mark.parametrize("mask", [None, torch.ones(1, 12), torch.tensor([[1] * 5 + [2] * 7])], ids=["none", "ones", "numbers"])
@pytest.mark.parametrize(
    ("positions", "starts"),
    [
        ([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6], [0, 5]),
        ([3, 4, 5, 3, 4, 3, 4, 5, 6, 7, 8, 9], [0, 3, 5]),
        ([0, 1, 2, 3, 7, 8, 9, 10, 11, 12, 13, 14], [0]),
        ([0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8], [0]),
    ],
    ids=["restart", "restart above 0", "gap", "back"],
)
def test_documents_are_those_of_flash_attention(positions, starts, mask):
    """It takes a mask without padding for none; a document then begins wherever the positions are at their lowest."""
    model, ids = tiny_model("llama"), tokens(1, 12)
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.tensor([positions]), "use_cache": False}
    document_T = torch.isin(torch.arange(12), torch.tensor(starts)).cumsum(0)
    seen = (document_T[:, None] == document_T).tril()[None, None]
    with no_float32():
        expected = run_step(model, batch | {"attention_mask": seen})
        model.config._attn_implementation = "flash_attention_2"  # as in a model that runs on a GPU
        streamgrad.enable(model, chunk_size=5, attention="eager")
        assert_same_step(run_step(model, batch | {"attention_mask": mask}), expected, 1e-10)


def test_documents_of_flash_attention_in_a_model_of_text_and_images():
    """The model around the decoder has put streamed attention into its configuration by then."""
    model, ids = small_image_model("llava"), tokens(1, 12)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions, "use_cache": False}
    with no_float32():
        expected = run_step(model, batch)
        for config in (model.config.get_text_config(decoder=True), model.get_decoder().config):
            config._attn_implementation_internal = "flash_attention_2"  # as in a model that runs on a GPU
        streamgrad.enable(model, chunk_size=5)
        assert_same_step(run_step(model, batch | {"attention_mask": torch.ones(1, 12)}), expected, 1e-10)
