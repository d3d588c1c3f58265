"""On a CUDA device: every kernel, policy and kind of batch against plain backpropagation on the same device."""

from __future__ import annotations

import math

import pytest
import torch

import batches
import streamgrad
from gradients import assert_same_step, no_float32, relative_error, run_step, total_gradient_error
from streamgrad.attention.backends import Block, backends_named, flash_implementation
from streamgrad.attention.backends.block import visible_mask
from streamgrad.attention.masks import CausalMask
from streamgrad.attention.varlen import Segment, VarlenMask
from streamgrad.engine.kv_chunk import Attended
from stretches import chunks_in_forward
from tiny import tiny_model, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:`make_fragment` is deprecated:DeprecationWarning"),  # FlashAttention-4, of its compiler
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KERNELS = ("cudnn", "cudnn in pieces", "flash", "FA3", "FA4", "sdpa", "eager")
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


@pytest.fixture
def name(request, monkeypatch):
    """A backend's name. In pieces, cuDNN cuts these short keys too; for FA3 and FA4, torch's flash operators run that package."""
    if request.param == "cudnn in pieces":
        monkeypatch.setattr("streamgrad.attention.backends.cudnn.KEYS_AT_ONCE", 48)
        yield "cudnn"
        return
    if request.param not in ("FA3", "FA4"):
        yield request.param
        return
    try:
        torch.nn.attention.activate_flash_attention_impl(request.param)
    except ImportError as error:
        pytest.skip(f"{request.param} is not installed: {error}")
    yield "flash"
    torch.nn.attention.restore_flash_attention_impl()


def on_gpu(batch: dict) -> dict:
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


# 96 queries and 161 keys: documents, one of a single token, and padding after them; padding before; a row that sees nothing.
SEGMENTS = {
    1: [
        Segment(0, 0, 40, 7, 60, True), Segment(0, 40, 41, 60, 61, True), Segment(0, 41, 70, 61, 90, True),
        Segment(0, 70, 96, 61, 90, False),
    ],
    3: [
        Segment(0, 0, 33, 0, 98, True), Segment(0, 33, 96, 98, 161, True), Segment(2, 17, 80, 3, 99, True),
        Segment(2, 80, 96, 3, 99, False),
    ],
}  # fmt: skip
KINDS = [
    "dense",
    "causal",
    "chunk",
    "window",
    "one segment a query",
    "segments of a row",
    "segments",
    "segments and window",
    "mask",
]


def block_of(kind: str, size: int) -> tuple[Block, int, int, int]:
    """The block, and how many rows, queries and keys it has."""
    scale, queries, keys = size**-0.5, 96, 96 if kind == "causal" else 161
    if kind == "mask":
        return Block(scale=scale, mask=torch.rand(2, 1, queries, keys, device="cuda") < 0.5), 2, queries, keys
    if kind == "one segment a query":
        segments = [Segment(0, query, query + 1, 2 * query, 2 * query + 2, query % 2 == 0) for query in range(80)]
        return Block(scale=scale, varlen=VarlenMask(tuple(segments), 1, queries)), 1, queries, keys
    if "segments" in kind:
        batch = 1 if kind == "segments of a row" else 3
        window = 20 if "window" in kind else None
        return Block(scale=scale, window=window, varlen=VarlenMask(tuple(SEGMENTS[batch]), batch, queries)), batch, queries, keys
    return Block(scale=scale, causal=kind != "dense", window=20 if kind == "window" else None), 2, queries, keys


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("name", KERNELS, indirect=True)
def test_a_block_and_its_part_of_a_larger_softmax(name, size, kind):
    """Forward, backward, and backward with the output and log-sum-exp of a row twice as long."""
    torch.manual_seed(0)
    block, batch, rows, keys = block_of(kind, size)
    query, key, value, dout = (
        torch.randn(batch, heads, length, size, device="cuda", dtype=torch.bfloat16)
        for heads, length in ((4, rows), (2, keys), (2, keys), (4, rows))
    )
    (backend,), (reference,) = backends_named(name), backends_named("eager")
    refusal = backend.refusal(query, key, value, block)
    if refusal:
        pytest.skip(refusal)
    exact = [tensor.double() for tensor in (query, key, value)]
    as_mask = Block(scale=block.scale, mask=visible_mask(block, rows, keys, query.device))
    done, truth = backend.forward(query, key, value, block), reference.forward(*exact, as_mask)
    assert relative_error(done.out_BHLD, truth.out_BHLD) < 5e-3
    torch.testing.assert_close(done.lse_BHL.double(), truth.lse_BHL, rtol=0.0, atol=1e-2)
    larger = Attended(truth.out_BHLD * 0.5, truth.lse_BHL + 0.7)
    expected = reference.backward(dout.double(), *exact, larger, as_mask)
    rounded = Attended(larger.out_BHLD.bfloat16(), larger.lse_BHL.float())
    actual = backend.backward(dout, query, key, value, rounded, block)
    for ours, theirs in zip(*(added_up(result, key) for result in (actual, expected)), strict=True):
        assert ours.isfinite().all()
        assert relative_error(ours, theirs) < 1e-2


def added_up(result, key):
    """A kernel's `(dquery, pieces)` as `(dquery, dkey, dvalue)`."""
    dquery, pieces = result
    dkey, dvalue = torch.zeros_like(key, dtype=torch.float64), torch.zeros_like(key, dtype=torch.float64)
    for first, last, dkey_piece, dvalue_piece in pieces:
        dkey[:, :, first:last] += dkey_piece
        dvalue[:, :, first:last] += dvalue_piece
    return dquery, dkey, dvalue


@pytest.mark.parametrize(("keep", "chunk_size"), [("input", 7), ("attention", 7), ("input", 64)])
@pytest.mark.parametrize("kind", [kind for kind in batches.KINDS if kind != "unlabelled"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_fp32_gradients_on_the_device(family, kind, keep, chunk_size):
    if (family, kind) == ("gpt_oss", "packed_flat"):
        pytest.skip("stock gpt-oss with eager attention ignores the boundaries")
    model = tiny_model(family, dtype=torch.float32).cuda()
    batch = on_gpu(batches.KINDS[kind](model))
    expected = run_step(model, batch)
    streamgrad.enable(model, chunk_size=chunk_size, head_chunk_size=5, keep=keep)
    assert_same_step(run_step(model, batch), expected, 2e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_fp64_gradients_on_the_device(family):
    model = tiny_model(family).cuda()
    batch = on_gpu(batches.right_padded(model))
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, chunk_size=7)
        assert_same_step(run_step(model, batch), expected, 1e-10)


def long_batch(kind: str, seed: int) -> dict:
    """Two rows of 1,024 tokens."""
    length = 1024
    ids = tokens(2, length, seed=seed).cuda()
    batch = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
    position = torch.arange(length, device="cuda").expand(2, -1)
    first, last = {"left": (300, length), "right": (0, 700)}.get(kind, (0, length))
    if kind in ("left", "right"):
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1] = (position[1] >= first) & (position[1] < last)
        batch["labels"][1] = batch["labels"][1].masked_fill((position[1] <= first) | (position[1] >= last), -100)
    if "packed" in kind:
        batch["position_ids"] = position % torch.tensor([[170], [411]], device="cuda")
    return batch


def with_truth(kind: str, seed: int, shape: dict) -> tuple:
    """A bf16 model, a batch for it, and the gradients of the same weights in fp32."""
    model = tiny_model(LONG[kind], dtype=torch.bfloat16, seed=seed, **shape).cuda()
    truth_model = tiny_model(LONG[kind], dtype=torch.float32, seed=seed, **shape).cuda()
    truth_model.load_state_dict(model.state_dict())
    batch = long_batch(kind, seed)
    return model, batch, run_step(truth_model, batch).gradients


LONG = {"plain": "llama", "right": "llama", "left": "llama", "packed": "llama", "window": "mistral", "packed window": "mistral"}


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("name", ["auto", *KERNELS], indirect=True)
def test_bf16_error_is_that_of_plain_bf16(name, kind):
    """At most 1.02 times plain bf16's error against fp32, pooled over parameters and random models."""
    if kind != "plain" and name == "cudnn":
        pytest.skip("takes plain blocks only")
    if "window" in kind and name == "flash":
        heads = torch.empty(1, 4, 8, 64, dtype=torch.bfloat16, device="cuda")
        refusal = backends_named(name)[0].refusal(heads, heads, heads, Block(scale=1.0, causal=True, window=4))
        if refusal:
            pytest.skip(refusal)
    length, squares = 1024, dict.fromkeys((0, 8, 64), 0.0)
    shape = SHAPE | ({"sliding_window": 200} if "window" in kind else {})
    for seed in range(4):
        model, batch, truth = with_truth(kind, seed, shape)
        for chunks in squares:
            if chunks:
                streamgrad.enable(model, chunk_size=length // chunks, head_chunk_size=length // chunks, attention=name)
            squares[chunks] += total_gradient_error(run_step(model, batch).gradients, truth) ** 2
            streamgrad.disable(model)
    for chunks in (8, 64):
        ratio = math.sqrt(squares[chunks] / squares[0])
        assert ratio <= 1.02, f"{chunks} chunks: {ratio:.4f} times plain bf16"


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("keep", ["input", "attention"])
def test_bf16_error_of_chunks_that_run_forward_together(keep, kind):
    """The same rule for eight chunks by four, whose keys and attention are cut out of what four gave."""
    shape, squares = SHAPE | ({"sliding_window": 200} if "window" in kind else {}), {"stock": 0.0, "by four": 0.0}
    for seed in range(4):
        model, batch, truth = with_truth(kind, seed, shape)
        squares["stock"] += total_gradient_error(run_step(model, batch).gradients, truth) ** 2
        streamgrad.enable(model, chunk_size=128, keep=keep, offload="none")
        with chunks_in_forward(4):
            squares["by four"] += total_gradient_error(run_step(model, batch).gradients, truth) ** 2
    assert math.sqrt(squares["by four"] / squares["stock"]) <= 1.02, squares


# torch.compile reads .grad of tensors that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("kind", ["plain", "right", "packed", "window"])
@pytest.mark.parametrize(
    ("options", "graph_seconds"),
    [({}, 0.0), ({"compile_layers": True}, 1.0), ({"compile_layers": True}, 0.0), ({"attention": "fa4"}, 0.0)],
    ids=["eager", "compiled", "compiled for cuDNN", "fa4"],
)
def test_bf16_error_of_plain_steps_is_that_of_plain_bf16(options, graph_seconds, kind, monkeypatch):
    """Steps that keep everything: the first through the engine, then plain ones, by flash and at last by cuDNN."""
    for name in ("PLAN_SECONDS", "QUEUED_PLAN_SECONDS"):
        monkeypatch.setattr(f"streamgrad.attention.backends.cudnn_plans.{name}", 0.5e-5)
    monkeypatch.setattr("streamgrad.hf.whole.attention.GRAPH_SECONDS", graph_seconds)
    before, shape = flash_implementation(), SHAPE | ({"sliding_window": 200} if kind == "window" else {})
    steps, squares = ("stock", "engine", "plain", "again", "once more"), {}
    for seed in range(4):
        model, batch, truth = with_truth(kind, seed, shape)
        for step in steps:
            if step == "engine":
                try:
                    streamgrad.enable(model, **options)
                except ValueError as error:
                    pytest.skip(str(error))
            squares[step] = squares.get(step, 0.0) + total_gradient_error(run_step(model, batch).gradients, truth) ** 2
    if flash_implementation() != before:
        torch.nn.attention.restore_flash_attention_impl()
    for step in steps[1:]:
        assert math.sqrt(squares[step] / squares["stock"]) <= 1.02, (step, squares)


@pytest.mark.parametrize("kind", LONG)
def test_no_mask_is_made_on_the_device(kind, monkeypatch):
    """Padding at the ends of rows, documents and windows go to the kernels as they are."""
    model = tiny_model(LONG[kind], dtype=torch.bfloat16, **SHAPE | ({"sliding_window": 200} if "window" in kind else {})).cuda()
    streamgrad.enable(model, chunk_size=128)

    def refuse(*args, **kwargs):
        raise AssertionError("a mask was made")

    monkeypatch.setattr(CausalMask, "visible", refuse)
    monkeypatch.setattr(VarlenMask, "visible", refuse)
    run_step(model, long_batch(kind, seed=0))


def test_dropout_on_the_device_uses_one_mask():
    """The CUDA generator is replayed too: with one chunk, stock and streamed draw the same numbers."""
    model = tiny_model("gpt_neox", dtype=torch.float32, hidden_dropout=0.3).cuda()
    batch = on_gpu(batches.plain(model))

    def seeded(model, batch):
        torch.manual_seed(5)
        return model(**batch).loss

    expected = run_step(model, batch, forward=seeded)
    streamgrad.enable(model, chunk_size=batches.LENGTH)
    assert_same_step(run_step(model, batch, forward=seeded), expected, 2e-5)


@pytest.mark.parametrize("keep", ["input", "attention"])
def test_host_offload_is_bitwise_equal_and_reuses_its_buffers(keep):
    """Several lengths, two backward passes in flight and a retained graph, against the same with tensors on the device.

    By eager attention: FlashAttention's backward adds in any order, which shows in one bit of a gradient now and then.
    """
    outcomes, pools = [], []
    for offload in ("none", "host"):
        model = tiny_model("llama", dtype=torch.bfloat16, num_hidden_layers=4, **SHAPE).cuda()
        streamgrad.enable(model, chunk_size=64, keep=keep, offload=offload, attention="eager")
        batch = {length: tokens(2, length, seed=length).cuda() for length in (200, 333, 120)}

        def step(*lengths, model=model, batch=batch):
            losses = [model(input_ids=batch[length], labels=batch[length]).loss for length in lengths]
            losses[0].backward(retain_graph=True)
            for loss in losses:
                loss.backward()

        for lengths in ((200,), (333, 120), (120, 333), (333,)):
            step(*lengths)
        torch.cuda.synchronize()
        # Not the embeddings: torch's own backward of those is not repeatable.
        outcomes.append({name: parameter.grad.clone() for name, parameter in model.named_parameters() if "embed" not in name})
        pools.append(model.model._streamgrad.stream.host_store)
    for name, gradient in outcomes[0].items():
        assert torch.equal(gradient, outcomes[1][name]), name
    pool = pools[1].pool(torch.device("cuda", torch.cuda.current_device()))
    grown_bytes = pool.total_bytes
    step(333)
    assert pool.total_bytes == grown_bytes > 0
    assert sum(buffer.numel() for buffer in pool._free) == grown_bytes, "a buffer was not returned"


@pytest.mark.parametrize("offload", ["none", "host"])
def test_recomputed_layers_are_bitwise_equal(offload):
    """A group's layers run forward again from its first input: the same chunks, so the same numbers, and several lengths."""
    outcomes = {}
    for count in (1, 2, 3):
        model = tiny_model("llama", dtype=torch.bfloat16, num_hidden_layers=5, **SHAPE).cuda()
        streamgrad.enable(model, chunk_size=64, keep="input", offload=offload, recompute_layers=count, attention="eager")
        for length in (200, 333, 120, 333):
            ids = tokens(2, length, seed=length).cuda()
            model(input_ids=ids, labels=ids).loss.backward()
        torch.cuda.synchronize()
        # Not the embeddings: torch's own backward of those is not repeatable.
        outcomes[count] = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if "embed" not in name}
    for count in (2, 3):
        for name, gradient in outcomes[1].items():
            assert torch.equal(gradient, outcomes[count][name]), (count, name)


def test_host_offload_frees_the_device():
    """Device memory of a step no longer holds the kept inputs of the layers."""
    peaks = {}
    for offload in ("none", "host"):
        model = tiny_model("llama", dtype=torch.bfloat16, num_hidden_layers=16, **SHAPE).cuda()
        streamgrad.enable(model, chunk_size=256, head_chunk_size=256, offload=offload)
        ids = tokens(1, 8192).cuda()
        for _ in range(2):
            model.zero_grad(set_to_none=False)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(input_ids=ids, labels=ids).loss.backward()
            torch.cuda.synchronize()
            peaks[offload] = torch.cuda.max_memory_allocated() - before
    kept_bytes = 16 * 8192 * SHAPE["hidden_size"] * 2
    assert peaks["none"] - peaks["host"] > 0.7 * kept_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_on_the_device(dtype):
    torch.manual_seed(0)
    hidden = torch.randn(300, 64, device="cuda", dtype=dtype, requires_grad=True)
    weight = (0.3 * torch.randn(1001, 64, device="cuda")).to(dtype).requires_grad_()
    targets = torch.randint(0, 1001, (300,), device="cuda")
    truth = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    torch.nn.functional.cross_entropy(truth[0] @ truth[1].mT, targets).backward()
    streamgrad.linear_cross_entropy(hidden, weight, targets, chunk_size=37).backward()
    for ours, theirs in zip((hidden, weight), truth, strict=True):
        assert relative_error(ours.grad, theirs.grad) < (1e-5 if dtype == torch.float32 else 5e-3)
