"""The memory estimate: its parts by hand, what autodiff keeps, and what the compiler says of the whole update."""

import json
import math
from dataclasses import replace

import check_memory
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from curriculum.config import build_config
from curriculum.model import loss, memory
from curriculum.model.counts import num_parameters, num_projections, num_trained
from curriculum.model.formulation import backend, loss_positions
from curriculum.model.memory import kept_bytes, memory_estimate
from curriculum.model.presets import PRESETS, LoraConfig, ModelConfig, resolve_model
from curriculum.model.transformer import transformer
from curriculum.plan import MUON_ARRAYS
from curriculum.plan import _memory as plan_memory
from curriculum.scheduling import resolve_schedule
from curriculum.train.mesh import AXES, state_shardings
from curriculum.train.optimizer import OptimConfig, make_optimizer

TINY, GPT2 = PRESETS["tiny"], PRESETS["gpt2-124m"]
LLAMA_7B = ModelConfig(
    vocab_size=32_000, n_layer=32, n_head=32, n_kv_head=32, d_model=4096, d_ff=11_008, max_seq_len=4096,
    tie_embeddings=False,
)  # fmt: skip


def test_the_parts_by_hand():
    """1 block of 2 heads 4 wide, gelu of 12, 10 ids, 6 positions: 10*8 + 6*8 + 4*64 + 2*8*12 + 3*8 = 600 numbers."""
    config = ModelConfig(
        vocab_size=10, n_layer=1, n_head=2, n_kv_head=2, d_model=8, d_ff=12, max_seq_len=6, pos_encoding="learned",
        mlp_type="gelu", norm_type="layernorm",
    )  # fmt: skip
    assert num_parameters(config) == 600
    parts = memory_estimate(config, rows=3, seq_len=6, grad_accum=2).to_json()
    # 18 tokens. A norm keeps 2 x 8 numbers and 2 sums a token; attention 4 x 8; each of 2 heads 6 exponentials and their
    # sum; gelu 2 x 12: 2 * 18 * 4 + 128 + 2 * 28 + 96 = 424 bytes. Outside of the block: an id and what comes into a
    # norm, 8 + 2 numbers: 44 bytes.
    assert parts == {
        "params": 2400,
        "gradients": 4800,
        "moments": 4800,
        "ema": 0,
        "activations": 18 * (424 + 44),
        "logits": 2 * 18 * 8 * 4 + 2 * 4 * 3 * 6 * 10,  # all positions in one chunk
        "stacked": 0,
        "gathered": 0,
        "update": 0,
        "batch": 2 * (18 * 13 + 3 * 4),
        "total": 2400 + 4800 + 4800 + 8424 + 2592 + 492,
    }


def test_the_state_follows_optimizer_average_and_shards():
    one = memory_estimate(TINY, rows=2, seq_len=64)
    params = 4 * num_parameters(TINY)
    assert (one.params, one.gradients, one.moments, one.ema) == (params, params, 2 * params, 0)
    lion = memory_estimate(TINY, rows=2, seq_len=64, moments_per_parameter=1, ema=True)
    assert (lion.moments, lion.ema) == (params, params)
    bare = memory_estimate(TINY, rows=2, seq_len=64, moments_per_parameter=0)
    assert bare.moments == 0
    mixed = memory_estimate(TINY, rows=2, seq_len=64, moments_per_parameter=1.25)
    assert mixed.moments == 1.25 * params
    split = memory_estimate(TINY, rows=2, seq_len=64, fsdp=2, tensor=2)
    norms = 4 * (2 * TINY.n_layer + 1) * 128  # whole
    assert (split.params, split.moments) == ((params - norms) // 4 + norms, 2 * ((params - norms) // 4 + norms))


@pytest.mark.parametrize(
    "optim",
    [
        {"name": "adamw"},
        {"name": "lion"},
        {"name": "sophia"},
        {"name": "muon"},
        {"name": "muon", "muon": {"rest": "lion"}},
        {"name": "muon", "muon": {"allow_tied_embed": True}},
        {"name": "muon", "muon": {"allow_all_2d": True}},
    ],
    ids=str,
)
@pytest.mark.parametrize("mesh", [{"data": 2}, {"data": 1, "fsdp": 2, "tensor": 4}], ids=str)
def test_the_plan_counts_the_moments_that_the_optimizer_keeps(optim, mesh):
    """On a device of the mesh, whose `tensor` does not divide the vocabulary of 257."""
    data = {
        "tokenizer": {"kind": "byte"},
        "model": {"preset": "tiny"},
        "sources": {"web": {"path": "nowhere", "held_out": "10%"}},
        "phases": [{"name": "a", "until": "end", "mixture": {"web": 1.0}}],
        "evalsets": {"primary": {"held_out_of": "web"}},
        "train": {"steps": 300, "batch_size": 16, "grad_accum": 2, "seq_len": 64},
        "optim": optim,
        "mesh": mesh,
    }
    config = build_config(data, check_paths=False)
    model = resolve_model(config.model, 257)
    found = plan_memory(config, model, resolve_schedule(config, {"web": None}), 0)
    assert (found["rows"], found["seq_len"]) == (4, 64)
    assert found["stacked"] == 0
    scanned = plan_memory(config, replace(model, layers="scanned"), resolve_schedule(config, {"web": None}), 0)
    assert scanned["stacked"] == 4 * num_projections(model) // (8 if "fsdp" in mesh else 1)
    state = jax.eval_shape(make_optimizer(config.optim).init, transformer(model).shapes())
    placed = state_shardings(AbstractMesh((1, mesh.get("fsdp", 1), mesh.get("tensor", 1)), AXES), state)
    held = jax.tree.map(lambda array, sharding: math.prod(sharding.shard_shape(array.shape)), state, placed)
    assert found["moments"] == pytest.approx(4 * sum(jax.tree.leaves(held)), rel=0.013)  # vectors, counts


def test_the_tool_writes_what_it_shows(tmp_path, capsys):
    arguments = ["--presets", "tiny", "--layers", "1", "--rows", "2", "--seq-len", "64", "--json"]
    check_memory.main([*arguments, str(tmp_path / "found.json")])
    (found,) = json.loads((tmp_path / "found.json").read_text())
    assert (found["preset"], found["n_layer"]) == ("tiny", 1)
    none, dots, full = found["kept_bytes"]
    assert found["jax_vjp_bytes"] == pytest.approx([none, dots, full], rel=0.02) and none > dots > full > 0
    shown = capsys.readouterr().out.splitlines()[-1]
    assert f"| tiny | 1 | {found['estimate_bytes'] / 1e6:.0f} | {found['compiler_bytes'] / 1e6:.0f} |" in shown


def test_muon_needs_room_of_its_own_where_activations_leave_little():
    config = ModelConfig(vocab_size=257, n_layer=2, n_head=4, n_kv_head=4, d_model=128, d_ff=512, max_seq_len=32)
    compiled = check_memory.compiled_bytes(config, 2, 16, optim=OptimConfig(name="muon"))
    sizes = {"rows": 2, "seq_len": 16, "moments_per_parameter": 1.1}
    without = memory_estimate(config, **sizes)
    assert without.total / compiled < 0.6
    counted = memory_estimate(config, **sizes, update_bytes=MUON_ARRAYS * 4 * num_projections(config))
    assert 0.85 < counted.total / compiled < 1.25
    assert counted.update > 0 and counted.total - counted.update == without.total


def test_under_fsdp_a_device_holds_parameters_and_gradient_whole_as_well():
    config = PRESETS["gpt2-124m"]
    one, split = (memory_estimate(config, rows=1, seq_len=64, fsdp=n) for n in (1, 8))
    assert one.gathered == 0 and split.gathered == 2 * one.params
    vectors = 4 * (12 * (4 * 768 + 3 * 768 + 768 + 3072 + 768) + 2 * 768)
    assert split.params == (one.params - vectors) // 8 + vectors
    # Blocks that are computed again gather theirs again: one at a time, beside what is outside of all blocks.
    again = memory_estimate(replace(config, remat="dots"), rows=1, seq_len=64, fsdp=8)
    others = 11 * (4 * 768 * 768 + 2 * 768 * 3072)
    assert again.gathered == pytest.approx(2 * (one.params - 4 * others), rel=1e-6)


def test_what_a_mesh_does_not_divide_is_counted_whole():
    """gpt2-124m over 8: the 50,257 rows of its embedding, and vectors."""
    estimate = memory_estimate(GPT2, rows=1, seq_len=64, tensor=8)
    embedding, vectors = 50_257 * 768, 12 * (4 * 768 + 3 * 768 + 768 + 3072 + 768) + 2 * 768
    rest = num_parameters(GPT2) - embedding - vectors
    assert estimate.params == 4 * (embedding + vectors + rest // 8)
    assert round((estimate.params + estimate.moments) / 1e6) == 593
    padded = memory_estimate(replace(GPT2, vocab_size=50_304, num_ids=50_257), rows=1, seq_len=64, tensor=8)
    assert round((padded.params + padded.moments) / 1e6) == 188


def test_heads_that_are_split_have_the_attention_that_the_run_takes():
    """Not plain, of whose scores a part is never computed (`attention_of`)."""
    split = memory_estimate(TINY, rows=8, seq_len=1024, tensor=2)
    assert split.activations == memory_estimate(replace(TINY, attention="xla"), rows=8, seq_len=1024).activations
    assert split.activations > memory_estimate(TINY, rows=8, seq_len=1024).activations


def test_seven_billion_parameters_need_more_than_a_card_of_80_gb():
    bare = memory_estimate(LLAMA_7B, rows=1, seq_len=2048)
    assert bare.params == 4 * 6_738_415_616
    assert bare.params + bare.gradients + bare.moments == pytest.approx(107.8e9, rel=1e-3)
    lighter = memory_estimate(replace(LLAMA_7B, compute_dtype="bfloat16", remat="full"), rows=1, seq_len=2048)
    # 32 block inputs of 16.8 MB each, one block of 0.8 GB computed again, and the last norm
    assert bare.activations > 25e9 and 1e9 < lighter.activations < 1.5e9


def test_a_block_computed_again_takes_the_place_of_the_logits():
    few, many = (replace(TINY, remat="full", vocab_size=size) for size in (64, 65_536))
    block = memory.block_bytes(TINY, 8, 256, "none")
    assert memory_estimate(many, rows=8, seq_len=256).activations == kept_bytes(many, 8, 256)
    estimate = memory_estimate(few, rows=8, seq_len=256)
    chunk = 2 * 4 * 8 * 256 * 64  # all in one
    assert estimate.activations == kept_bytes(few, 8, 256) + block - chunk
    assert estimate.logits == 2 * 8 * 256 * 128 * 4 + chunk
    low = memory_estimate(replace(few, compute_dtype="bfloat16"), rows=8, seq_len=256)
    assert low.logits == 2 * 8 * 256 * 128 * 2 + chunk + 64 * 128 * 2  # the head in bfloat16


@pytest.mark.parametrize("vocab_size", [64, 4096, 50_257])
@pytest.mark.parametrize(("rows", "seq_len"), [(1, 2), (3, 7), (16, 128), (2, 4096)])
def test_chunks_are_those_of_the_loss(vocab_size, rows, seq_len):
    """On each of the devices that share the rows, so that none adds small parts to the head's gradient."""
    expected = loss_positions(rows, seq_len, vocab_size, backend())
    for devices in (1, 4):
        whole_BT = jnp.zeros((rows * devices, seq_len), jnp.int8)
        (chunks_CBt,) = loss._split((whole_BT,), jnp.zeros((vocab_size, 1), jnp.int8), devices)
        assert chunks_CBt.shape[1:] == (rows * devices, expected)


SHAPES = {
    "tiny": replace(TINY, n_layer=2),
    "gpt2": replace(GPT2, n_layer=2, vocab_size=1000),
    "swiglu, learned, biases": replace(TINY, n_layer=2, pos_encoding="learned", bias=True, tie_embeddings=False),
    "gelu, rope": replace(GPT2, n_layer=1, vocab_size=1000, pos_encoding="rope", norm_type="rmsnorm", bias=False),
    "window": replace(TINY, n_layer=2, sliding_window=40),
}


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_kept_is_what_autodiff_keeps(shape, compute_dtype, remat):
    config = replace(SHAPES[shape], compute_dtype=compute_dtype, remat=remat)
    for dropout, document_mask in ((0.0, False), (0.1, True)):
        config = replace(config, dropout=dropout)
        expected = check_memory.residual_bytes(config, 2, 96, document_mask=document_mask)
        # Beside the arrays of M rows there are scalars, norm scales as [1, D] and, recomputing, positions and keys.
        assert kept_bytes(config, 2, 96, document_mask) == pytest.approx(
            expected, rel=0.002 if remat == "none" else 0.005
        )
        assert expected > 150_000


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", ["tiny", "gpt2"])
def test_scanned_layers_keep_a_stacked_copy_and_once_what_is_alike(shape, compute_dtype, remat):
    config = replace(SHAPES[shape], compute_dtype=compute_dtype, remat=remat, layers="scanned", n_layer=3)
    stacked = memory_estimate(config, rows=2, seq_len=96).stacked
    assert stacked == num_projections(config) * (4 if compute_dtype == "float32" else 2) > 800_000
    assert memory_estimate(config, rows=2, seq_len=96, tensor=4).stacked == stacked // 4
    assert memory_estimate(replace(config, layers="unrolled"), rows=2, seq_len=96).stacked == 0
    for dropout, document_mask in ((0.0, False), (0.1, True)):
        config = replace(config, dropout=dropout)
        expected = check_memory.residual_bytes(config, 2, 96, document_mask=document_mask)
        # Vectors, which are stacked too, are not counted.
        assert kept_bytes(config, 2, 96, document_mask) + stacked == pytest.approx(expected, rel=0.003)


@pytest.mark.parametrize(
    ("shape", "targets"), [("tiny", ("query", "gate")), ("gpt2", ("down",)), ("gpt2", ("key", "out", "up"))], ids=str
)
def test_beside_adapters_a_block_hands_over_what_autodiff_keeps_of_it(shape, targets):
    """As much as one block more makes: of the first, nothing is kept before its first adapter."""
    for remat, compute_dtype in (("none", "bfloat16"), ("dots", "float32")):
        config = replace(SHAPES[shape], remat=remat, compute_dtype=compute_dtype, lora=LoraConfig(8, 16.0, targets))
        two, three = (check_memory.residual_bytes(replace(config, n_layer=n), 2, 96) for n in (2, 3))
        found = memory.block_bytes(config, 2, 96, remat)
        assert found == pytest.approx(three - two, rel=0.001) and found > 40_000
        assert kept_bytes(config, 2, 96) > 0.99 * two


def test_only_adapters_have_gradients_moments_and_averages():
    config = replace(TINY, lora=LoraConfig(8, 16.0, ("query", "value")))
    whole, adapters = 4 * num_parameters(config), 4 * num_trained(config)
    assert adapters == 4 * TINY.n_layer * 8 * (128 + 128 + 128 + 64) and whole == 4 * num_parameters(TINY) + adapters
    one = memory_estimate(config, rows=2, seq_len=64, grad_accum=2, ema=True)
    assert (one.params, one.gradients, one.moments, one.ema) == (whole, 2 * adapters, 2 * adapters, adapters)
    assert one.logits == memory_estimate(TINY, rows=2, seq_len=64).logits
    split = memory_estimate(config, rows=2, seq_len=64, fsdp=4)
    norms, second = 4 * (2 * TINY.n_layer + 1) * 128, 4 * TINY.n_layer * 8 * (128 + 64)
    assert split.params == (whole - norms - second) // 4 + norms + second  # B is split over its outputs alone
    assert split.gathered == whole + adapters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "rows", "seq_len", "options"),
    [
        (TINY, 8, 256, {"grad_accum": 2, "document_mask": True}),
        (replace(TINY, n_layer=2), 4, 1024, {}),
        (replace(GPT2, n_layer=2), 1, 64, {"ema": True}),
        (replace(GPT2, n_layer=2), 4, 256, {"grad_accum": 2}),
        (replace(PRESETS["llama-360m"], n_layer=2, tie_embeddings=False), 2, 512, {}),
        (replace(TINY, n_layer=4, lora=LoraConfig(8, 16.0)), 8, 256, {"grad_accum": 2}),
        (replace(TINY, n_layer=4, layers="scanned"), 1, 64, {}),
        (replace(GPT2, n_layer=2, vocab_size=1000, layers="scanned"), 1, 64, {}),
    ],
)
def test_the_compiler_says_nearly_the_same_of_the_whole_update(config, rows, seq_len, options):
    """The estimate is below it by the gradient of a tied embedding's second use, which few activations leave no room
    for.
    """
    compiled = check_memory.compiled_bytes(config, rows, seq_len, **options)
    estimate = memory_estimate(config, rows=rows, seq_len=seq_len, **options).total
    assert 0.89 < estimate / compiled < 1.1


def test_scanned_layers_are_not_copied_once_more_where_one_device_uses_them():
    config = ModelConfig(vocab_size=64, n_layer=4, n_head=2, n_kv_head=2, d_model=64, d_ff=256, max_seq_len=16)
    config = replace(config, layers="scanned")
    assert 0.92 < memory_estimate(config, rows=1, seq_len=16).total / check_memory.compiled_bytes(config, 1, 16) < 1


GPT2_124M, LLAMA_360M, LLAMA_1B = (
    replace(PRESETS[name], compute_dtype="bfloat16") for name in ("gpt2-124m", "llama-360m", "llama-1b")
)


@pytest.mark.parametrize(
    ("config", "rows", "seq_len", "options", "compiled_gb"),
    [
        (GPT2_124M, 32, 1024, {}, 13.03),
        (GPT2_124M, 32, 1024, {"document_mask": True}, 13.05),
        (replace(GPT2_124M, layers="scanned"), 32, 1024, {}, 13.75),
        (replace(GPT2_124M, remat="dots"), 32, 1024, {}, 8.56),
        (LLAMA_360M, 16, 1024, {}, 21.36),
        (LLAMA_1B, 4, 2048, {}, 31.57),
        (replace(LLAMA_1B, remat="dots"), 4, 2048, {"fsdp": 8}, 13.12),
    ],
)
def test_the_estimate_for_a_gpu_is_near_what_was_compiled_for_one(config, rows, seq_len, options, compiled_gb):
    """For an H100, by `tools/check_gpu_program.py`, which needs a compiler that is not installed here."""
    estimate = memory_estimate(config, rows=rows, seq_len=seq_len, backend="gpu", **options).total
    assert 0.95 < estimate / 1e9 / compiled_gb < 1.2
