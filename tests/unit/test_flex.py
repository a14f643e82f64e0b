"""A tree's attention through FlexAttention: its blocks, its gradients, where it is used and where it can't.

On a CPU torch refuses it gradients at the door, and has them behind it: the fixture `cpu_gradients` opens.
What needs a GPU is one test, skipped elsewhere.
"""

from __future__ import annotations

import random
import shutil

import numpy as np
import pytest
import torch
from fakes import tiny_models
from fakes.episodes import transition
from fakes.one_step import adapted, hand_gradient, make_trainer, recorded, relative, step_gradient
from fakes.reference_loss import reference_logprobs
from torch.nn.attention import flex_attention as torch_flex
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lightning_rl.errors import UserError
from lightning_rl.records import token_ids
from lightning_rl.trainer.batches import packing
from lightning_rl.trainer.batches.blocks import BLOCK, tree_blocks
from lightning_rl.trainer.batches.chunks import attention_chunks
from lightning_rl.trainer.batches.packing import ModelShape, cheapest_batches, cost
from lightning_rl.trainer.batches.rows import RowsBatch
from lightning_rl.trainer.batches.tree import TreeBatch, tree_batches
from lightning_rl.trainer.steps import attention, flex
from lightning_rl.trainer.steps.shape import CANT_SHARE, shape_of

FLEX = ModelShape(per_token=1e4, per_pair=10.0, shares_prefixes=True, attention="flex", layout="tree")


@pytest.fixture
def cpu_gradients(monkeypatch):
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def forest(num: int, seed: int) -> TreeBatch:
    """Prompts of many lengths that share beginnings of many lengths."""
    rng = random.Random(seed)
    made: list[list[int]] = [[1]]
    for _ in range(num):
        base = rng.choice(made)
        made.append(
            [*base[: rng.randint(1, len(base))], *(rng.randrange(9) for _ in range(rng.randint(1, 400)))]
        )
    (batch,) = tree_batches([transition(str(i), ids, [5]) for i, ids in enumerate(made)], 10**9)
    return batch


@pytest.mark.parametrize("seed", range(8))
def test_blocks_are_those_of_the_mask(seed):
    batch = forest(10, seed)
    blocks = tree_blocks(batch.exit)
    num = len(blocks.exit)
    assert num % BLOCK == 0
    assert num - len(batch.exit) < BLOCK
    seen = np.zeros((num, num), dtype=bool)
    seen[: len(batch.exit), : len(batch.exit)] = batch.attention_mask()
    padding = range(len(batch.exit), num)
    seen[padding, padding] = True
    by_block = seen.reshape(num // BLOCK, BLOCK, num // BLOCK, BLOCK)
    assert (blocks.full == by_block.all(axis=(1, 3))).all()
    assert (blocks.full | blocks.partial == by_block.any(axis=(1, 3))).all()
    assert not (blocks.full & blocks.partial).any()


def test_the_block_mask_is_what_torch_would_make_of_the_same_rule():
    batch = forest(8, 3)
    made = flex.block_mask(tree_blocks(batch.exit), torch.device("cpu"))
    length = made.shape[-1]
    expected = torch_flex.create_block_mask(made.mask_mod, None, None, length, length, device="cpu")
    assert made.full_kv_num_blocks.sum() > 0
    assert torch.equal(made.to_dense(), expected.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(made, name), getattr(expected, name)), name


@pytest.fixture(params=["qwen3", "llama", "lora"])
def model(request):
    return adapted() if request.param == "lora" else getattr(tiny_models, request.param)()


def test_gradients_of_flex_chunked_rows_and_a_loss_by_hand_agree(model, tmp_path, cpu_gradients):
    made = recorded(model)
    trainer = make_trainer(model, tmp_path)
    expected, expected_loss = hand_gradient(trainer.model, made)
    ways = {
        "flex": cheapest_batches(made, 4096, FLEX),
        "flex, several": cheapest_batches(made, 40, FLEX),
        "chunked": tree_batches(made, 4096),
        "rows": cheapest_batches(made, 4096, ModelShape(1.0, 1.0, shares_prefixes=False)),
    }
    assert len(ways["flex, several"]) > 1
    assert all(batch.attention == "flex" for batch in ways["flex"])
    for name, batches in ways.items():
        found, loss = step_gradient(trainer, batches)
        assert relative(found, expected) <= 1e-4, name
        assert loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-6), name


def test_a_long_tree_through_flex_has_the_gradients_of_the_chunks(tmp_path, cpu_gradients):
    """Several blocks, some of them full, some empty."""
    rng = random.Random(1)
    prompt = [rng.randrange(3, 60) for _ in range(200)]
    made = [
        transition(
            str(i),
            [*prompt, *(rng.randrange(3, 60) for _ in range(70))],
            [rng.randrange(3, 60) for _ in range(20)],
            behavior=[-4.0] * 20,
            advantage=rng.choice([-1.0, 1.0]),
        )
        for i in range(4)
    ]
    trainer = make_trainer(tiny_models.qwen3(), tmp_path)
    (tree,) = cheapest_batches(made, 4096, FLEX)
    blocks = tree_blocks(tree.exit)
    assert blocks.full.any()
    assert blocks.num_pairs < len(blocks.exit) * (len(blocks.exit) + BLOCK) // 2  # fewer than plain causal
    found, _ = step_gradient(trainer, [tree])
    expected, _ = step_gradient(trainer, tree_batches(made, 4096))
    assert relative(found, expected) <= 1e-4


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (6, 2)])
def test_flex_is_dense_attention_over_the_tree(heads, key_heads, cpu_gradients):
    for blocks in (3, 5):
        shape = flex.Heads(heads, key_heads, 16)
        apart = flex._apart_from_dense(torch.device("cpu"), torch.float32, shape, blocks)
        assert apart < 1e-5


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with g++")
@pytest.mark.parametrize("seed", [0, 1])
def test_a_compiled_kernel_reads_the_same_out_of_the_blocks(seed):
    """Forward alone: on a CPU torch compiles no backward pass. Here blocks are really skipped."""
    torch._dynamo.reset()
    batch = forest(6, seed)
    tree = flex.FlexTree.of(batch.exit, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn((1, heads, tree.mask.shape[-1], 16), generator=generator) for heads in (4, 2, 2)
    )
    compiled = torch.compile(torch_flex.flex_attention, dynamic=False)
    with torch.no_grad():
        found = compiled(query, key, value, block_mask=tree.mask, enable_gqa=True).transpose(1, 2)
        num = len(batch.exit)
        chunked = attention.ChunkedTree(attention_chunks(batch.depth, batch.exit), "cpu")
        expected = chunked.attend(query[:, :, :num], key[:, :, :num], value[:, :, :num], None)
    assert torch.allclose(found[:, :num], expected, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(4, 2, 64), (14, 2, 64), (16, 8, 128)])
def test_flex_works_on_this_gpu(heads, key_heads, width):
    assert flex.why_not(torch.device("cuda"), torch.bfloat16, flex.Heads(heads, key_heads, width)) is None


# where it is used


def test_short_trees_are_not_worth_its_blocks():
    made = [transition(str(i), [*range(700), 700 + i], [1]) for i in range(4)]
    shape = ModelShape(1e4, 10.0, shares_prefixes=True, attention="flex")
    (short,) = cheapest_batches(made, 4096, shape)
    assert isinstance(short, TreeBatch)
    assert short.attention == "chunked"
    made += [transition(f"b{i}", [*range(700), *range(800 + i, 1000)], [1]) for i in range(4)]
    (long,) = cheapest_batches(made, 4096, shape)
    assert len(long.input_ids) >= packing.FLEX_MIN_TOKENS
    assert long.attention == "flex"


def test_the_cost_of_flex_by_hand():
    # 200 tokens shared, two tails of 100: 400 tokens, four blocks of 128, no padding seen by anybody
    made = [
        transition(n, [*range(200), *range(start, start + 100)], [1]) for n, start in (("a", 300), ("b", 500))
    ]
    shape = ModelShape(10.0, 1.0, shares_prefixes=True, attention="flex", layout="tree")
    (tree,) = cheapest_batches(made, 4096, shape)
    # the tail of a reaches from 200 to 300, that of b on to 400: no block of them is empty, so 4 * 5 / 2
    assert cost(tree, shape) == pytest.approx(512 * 10 + 10 * 128 * 128 * 1.3)


def test_what_was_asked_for_is_what_is_computed():
    made = [transition(str(i), [*range(100), 100 + i], [1]) for i in range(4)]
    for asked, kind, name in (("rows", RowsBatch, None), ("chunked", TreeBatch, "chunked")):
        shape = shape_of(tiny_models.qwen3(), asked)
        for batch in cheapest_batches(made, 4096, shape):
            assert isinstance(batch, kind)
            assert getattr(batch, "attention", None) == name
        assert shape.note is None


def test_flex_on_a_cpu_is_refused_in_a_line():
    with pytest.raises(UserError, match=r"^attention = flex.*no gradients on a cpu; use auto$"):
        shape_of(tiny_models.qwen3(), "flex")


def test_a_kernel_that_fails_or_is_wrong_is_not_used(monkeypatch):
    def with_kernel(apart) -> str | None:
        monkeypatch.setattr(flex, "_apart_from_dense", apart)
        return flex.why_not(torch.device("cuda"), torch.float32, flex.Heads(4, 2, 8))

    def fails(*args):
        raise NotImplementedError("embedding dimension of the query,\nmust be at least 16")

    assert with_kernel(fails) == "embedding dimension of the query, must be at least 16"
    assert with_kernel(lambda *args: 0.3) == "its gradients are off by 30%"
    assert with_kernel(lambda *args: float("nan")) == "its gradients are off by nan%"
    assert with_kernel(lambda *args: 1e-3) is None
    lengths = iter([1e-3, 0.3])  # right for the first, wrong when it is compiled for any
    assert with_kernel(lambda *args: next(lengths)) == "its gradients are off by 30%"


# models that can't


def test_soft_caps_and_sliding_windows_are_known_from_the_configuration():
    gemma = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            layer_types=["full_attention", "full_attention"],
        )
    )
    shape = shape_of(gemma)
    assert not shape.shares_prefixes
    assert shape.note == CANT_SHARE
    with pytest.raises(UserError, match="attention = chunked, but this model can't share prefixes"):
        shape_of(gemma, "chunked")


def test_a_model_whose_attention_is_not_ours_is_found_out_by_trying():
    """The configuration says nothing of it."""
    attention.register()
    config = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    torch.manual_seed(0)
    plain = GPT2LMHeadModel(GPT2Config(**config, attn_implementation="sdpa"))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(4)
    assert not shape_of(plain).shares_prefixes
    ours = GPT2LMHeadModel(GPT2Config(**config, attn_implementation=attention.NAME))
    ours.load_state_dict(plain.state_dict())
    assert shape_of(ours).shares_prefixes


def test_a_probe_of_a_model_that_cant_share_is_of_each_sequence_alone(tmp_path):
    config = tiny_models.qwen3().config.to_dict() | {"use_sliding_window": True, "sliding_window": 4}
    config |= {"max_window_layers": 0, "layer_types": None, "attn_implementation": "sdpa"}
    torch.manual_seed(0)
    sliding = Qwen3ForCausalLM(Qwen3Config(**config))
    trainer = make_trainer(sliding, tmp_path)
    sequences = [token_ids([3, 4, 5, 6, 7, 8, 9]), token_ids([3, 4, 9, 10, 11, 12])]
    found = trainer.sequence_logprobs(sequences, 4096)
    for ids, values in zip(sequences, found, strict=True):
        with torch.no_grad():
            expected = reference_logprobs(sliding, transition("x", ids[:1].tolist(), ids[1:].tolist()))
        assert list(values) == pytest.approx(expected.tolist(), abs=1e-5)
