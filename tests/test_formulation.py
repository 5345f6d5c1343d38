"""Every formulation computes the same function; which one is taken where."""

from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curriculum.errors import InputError
from curriculum.model import layers as model_layers
from curriculum.model.formulation import (
    BY_BACKEND,
    attention_of,
    backend,
    layers_of,
    qkv_of,
    query_blocks,
    scan_problem,
)
from curriculum.model.loss import sum_nats
from curriculum.model.presets import HOW, LoraConfig, ModelConfig, ModelSection, RopeScaling, resolve_model
from curriculum.model.transformer import init_params, transformer
from curriculum.train.optimizer import OptimConfig, make_optimizer
from curriculum.train.step import init_state, make_train_step
from phases.batches import Batch

V, B, T = 13, 2, 6
GROUPED = ModelConfig(vocab_size=V, n_layer=2, n_head=4, n_kv_head=2, d_model=16, d_ff=12, max_seq_len=8)
CONFIGS = {  # and whether documents are kept apart
    "grouped, dropout": (replace(GROUPED, dropout=0.3), True),
    "adapters, full": (
        replace(GROUPED, qk_norm=True, lora=LoraConfig(rank=2, targets=("query", "down")), remat="full"),
        False,
    ),
    "gpt-2, window, bfloat16, dots": (
        replace(
            GROUPED,
            n_kv_head=4,
            pos_encoding="learned",
            mlp_type="gelu",
            norm_type="layernorm",
            bias=True,
            sliding_window=2,
            compute_dtype="bfloat16",
            tie_embeddings=False,
            remat="dots",
        ),
        False,
    ),
    "stretched, biases of query and key, padding": (
        replace(
            GROUPED,
            d_head=6,
            qkv_bias=True,
            rope_theta=100.0,
            rope_scaling=RopeScaling("linear", 2.0),
            no_rope_every=2,
            norm_eps=1e-3,
            num_ids=V - 1,
        ),
        True,
    ),
}
TOKENS_BT = np.array([[1, 5, 0, 12, 7, 7], [3, 2, 11, 12, 0, 4]], np.int32)
DOCUMENTS_BT = np.array([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 2]], np.int32)


@contextmanager
def taking(qkv):
    """Query, key and value `joined` or `apart`. A block is traced once for all of its shape: traces are forgotten."""
    with mock.patch.dict(BY_BACKEND, {backend(): replace(BY_BACKEND[backend()], qkv=qkv)}):
        jax.clear_caches()
        try:
            yield
        finally:
            jax.clear_caches()


@cache
def loss_and_gradient(config, documents, times=1, qkv="apart"):
    """(nats of the batch, their gradient) at parameters moved enough that every array shows."""
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda array: (array + rng.normal(0, 0.2, array.shape)).astype(np.float32), init_params(config, 0)
    )
    segment_ids_BT = np.repeat(DOCUMENTS_BT, times, axis=1) if documents else None
    tokens_BT = np.tile(TOKENS_BT, times)

    def nats(params, keys_B):
        targets_BT = np.roll(tokens_BT, -1, axis=1)
        return sum_nats(transformer(config), params, tokens_BT, targets_BT, targets_BT > 0, segment_ids_BT, keys_B)[0]

    keys_B = jax.random.split(jax.random.key(0), B) if config.dropout else None
    with taking(qkv):
        return jax.jit(jax.value_and_grad(nats))(params, keys_B)


def assert_alike(config, other, documents, times=1, qkv="apart"):
    """On TOKENS_BT `times` over; the documents are as many times longer. `qkv`: of the other."""
    loss, grads = loss_and_gradient(config, documents, times)
    other_loss, other_grads = loss_and_gradient(other, documents, times, qkv)
    # Sums in another order; bfloat16 has 8 bits, and activations are rounded to it at other places.
    share = 1e-5 if config.compute_dtype == "float32" else 0.03
    np.testing.assert_allclose(other_loss, loss, rtol=share)
    assert jax.tree.structure(other_grads) == jax.tree.structure(grads)
    largest = max(np.abs(one).max() for one in jax.tree.leaves(grads))
    for one, another in zip(jax.tree.leaves(grads), jax.tree.leaves(other_grads), strict=True):
        assert np.abs(one).max() > 0
        # A bias of keys changes no softmax: its gradient is rounding alone.
        np.testing.assert_allclose(another, one, atol=share * max(np.abs(one).max(), 0.02 * largest))


def test_each_field_of_the_architecture_is_off_its_default_in_one_of_these():
    """What a model computes, each attention has to: a field that is new belongs into CONFIGS."""
    alike = GROUPED.defaults_beside(())
    for config, _ in CONFIGS.values():
        alike = {name: default for name, default in alike.items() if getattr(config, name) == default}
    assert alike == {}


@pytest.mark.parametrize("name", [name for name, (config, _) in CONFIGS.items() if scan_problem(config) is None])
def test_scanned_layers_compute_what_unrolled_ones_do(name):
    config, documents = CONFIGS[name]
    plain = replace(config, layers="unrolled", attention="plain")
    assert_alike(plain, replace(plain, layers="scanned"), documents)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_librarys_attention_computes_what_the_plain_one_does(name):
    config, documents = CONFIGS[name]
    plain = replace(config, layers="unrolled", attention="plain")
    assert_alike(plain, replace(plain, attention="xla"), documents)


@pytest.mark.parametrize("name", CONFIGS)
def test_plain_attention_over_several_blocks_of_queries_computes_what_the_librarys_does(name):
    config, documents = CONFIGS[name]
    window = config.sliding_window and 70  # begins within a block
    config = replace(config, layers="unrolled", max_seq_len=150, sliding_window=window, compute_dtype="float32")
    assert len(query_blocks(150, window)) == 3
    assert_alike(replace(config, attention="plain"), replace(config, attention="xla"), documents, times=25)


@pytest.mark.parametrize("changed", [{"compute_dtype": "bfloat16"}, {"layers": "scanned"}], ids=str)
def test_several_blocks_in_bfloat16_and_in_scanned_layers(changed):
    config = replace(GROUPED, max_seq_len=150, **{"layers": "unrolled", **changed})
    assert_alike(replace(config, attention="plain"), replace(config, attention="xla"), True, times=25)


@pytest.mark.parametrize("function", ["_gelu", "_swiglu"])
def test_what_is_computed_again_for_the_gradient_is_what_autodiff_kept(function):
    rng = np.random.default_rng(0)
    gate_MF, up_MF, gradient_MF = rng.normal(0, 2, (3, 5, 7)).astype(np.float32)
    arguments, plain = {
        "_gelu": ((up_MF,), lambda up: jax.nn.gelu(up, approximate=True)),
        "_swiglu": ((gate_MF, up_MF), lambda gate, up: jax.nn.silu(gate) * up),
    }[function]
    found, way_back = jax.vjp(getattr(model_layers, function), *arguments)
    expected, way_back_expected = jax.vjp(plain, *arguments)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for one, another in zip(way_back(gradient_MF), way_back_expected(gradient_MF), strict=True):
        np.testing.assert_allclose(one, another, rtol=1e-5, atol=1e-6)
        assert np.abs(one).max() > 1


@pytest.mark.parametrize("layers", ["unrolled", "scanned"])
@pytest.mark.parametrize("name", CONFIGS)
def test_query_key_and_value_joined_are_what_they_are_apart(name, layers):
    config, documents = CONFIGS[name]
    if layers == "scanned" and scan_problem(config) is not None:
        pytest.skip("its layers differ")
    config = replace(config, layers=layers, attention="plain", lora=None)
    assert_alike(config, config, documents, qkv="joined")


def test_query_key_and_value_joined_are_one_product():
    def num_products(config, qkv):
        with taking(qkv):
            lowered = jax.jit(transformer(config).forward).lower(init_params(config, 0), TOKENS_BT, None, None)
        return lowered.as_text().count("dot_general")

    assert num_products(GROUPED, "apart") - num_products(GROUPED, "joined") == 2  # blocks are lowered once
    adapted = replace(GROUPED, lora=LoraConfig(rank=2, targets=("query",)))
    assert num_products(adapted, "joined") == num_products(adapted, "apart") > 0


@pytest.mark.parametrize("window", [None, 1, 2, 63, 64, 65, 500, 5000])
@pytest.mark.parametrize("seq_len", [1, 2, 63, 64, 65, 128, 150, 511, 512, 513, 1024, 2048, 4097])
def test_blocks_of_queries_hold_every_pair_that_sees_and_few_others(seq_len, window):
    count_T = np.arange(seq_len)
    visible_TS = count_T[:, None] >= count_T
    if window is not None:
        visible_TS &= count_T[:, None] - count_T < window
    blocks = query_blocks(seq_len, window)
    assert [first for _, first, _ in blocks] == [0, *(end for *_, end in blocks[:-1])] and blocks[-1][2] == seq_len
    assert len(blocks) <= 8
    computed_TS = np.zeros_like(visible_TS)
    for first_key, first, end in blocks:
        assert visible_TS[first:end, first_key].any()
        computed_TS[first:end, first_key:end] = True
    assert not (visible_TS & ~computed_TS).any()
    if window is None and seq_len >= 512:
        assert computed_TS.mean() < 0.57


def test_a_scanned_program_holds_one_layer_however_many_there_are():
    def num_products(num_layers, layers):
        config = replace(GROUPED, n_layer=num_layers, layers=layers)
        lowered = jax.jit(transformer(config).forward).lower(init_params(config, 0), TOKENS_BT, None, None)
        return lowered.compile().as_text().count(" dot(")

    assert num_products(2, "scanned") == num_products(5, "scanned") > 0
    assert num_products(5, "unrolled") == 2.5 * num_products(2, "unrolled")


def needs_nvidia(name):
    no_card = name == "cudnn" and backend() != "gpu"
    return pytest.param(name, marks=pytest.mark.skipif(no_card, reason="cuDNN computes on NVIDIA GPUs alone"))


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "adapters, full"])
def test_a_tpus_attention_computes_what_the_plain_one_does(name):
    """Interpreted, of 384 positions: with documents apart, a window, shared key heads and heads of odd widths."""
    config, documents = CONFIGS[name]
    plain = replace(config, n_layer=1, attention="plain", layers="unrolled", max_seq_len=64 * T)
    assert_alike(plain, replace(plain, attention="splash"), documents, times=64)


@pytest.mark.skipif(backend() != "gpu", reason="cuDNN computes on NVIDIA GPUs alone")
@pytest.mark.parametrize("name", CONFIGS)
def test_cudnns_attention_computes_what_the_plain_one_does(name):
    """Both in bfloat16, each as far from float32; with heads as wide as it takes, and with key heads that are shared."""
    config, documents = CONFIGS[name]
    exact = replace(config, layers="unrolled", attention="plain", compute_dtype="float32", d_head=8)
    plain = replace(exact, compute_dtype="bfloat16")
    (nats, grads), (_, plain_grads), (cudnn_nats, cudnn_grads) = (
        loss_and_gradient(config, documents) for config in (exact, plain, replace(plain, attention="cudnn"))
    )
    np.testing.assert_allclose(cudnn_nats, nats, rtol=0.01)
    largest = max(np.abs(one).max() for one in jax.tree.leaves(grads))
    for one, other, cudnns in zip(*map(jax.tree.leaves, (grads, plain_grads, cudnn_grads)), strict=True):
        # The gradients of norms of queries and keys are differences of large numbers.
        most = 2 * np.abs(other - one).max() + 0.02 * max(np.abs(one).max(), 0.02 * largest)
        np.testing.assert_allclose(cudnns, one, atol=most)


@pytest.mark.parametrize("attention", ["plain", "xla", needs_nvidia("cudnn")])
def test_documents_stay_apart_in_every_attention(attention):
    """A token that is changed changes no bit of another document, and one of each token after it in its own."""
    dtype = "bfloat16" if attention == "cudnn" else "float32"
    config = replace(GROUPED, n_layer=1, attention=attention, compute_dtype=dtype, max_seq_len=32, d_model=64)
    segment_ids_BT = np.repeat([0, 1, 2], [6, 7, 3])[None].astype(np.int32)
    tokens_BT = np.random.default_rng(0).integers(0, V, segment_ids_BT.shape, np.int32)
    params = jax.tree.map(lambda array: array * 5, init_params(config, 0))
    run = jax.jit(partial(transformer(config).forward, params, segment_ids_BT=segment_ids_BT, keys_B=None))
    before_BTD = np.asarray(run(tokens_BT), np.float32)
    for t in (2, 6, 13):
        changed_BT = tokens_BT.copy()
        changed_BT[0, t] = (changed_BT[0, t] + 1) % V
        same_T = (np.asarray(run(changed_BT), np.float32) == before_BTD).all(axis=-1)[0]
        seen_T = (segment_ids_BT[0] == segment_ids_BT[0, t]) & (np.arange(16) >= t)
        if dtype == "bfloat16":  # a token that is hardly attended to may change no bit
            assert same_T[~seen_T].all() and not same_T[t] and same_T[seen_T].mean() < 0.5
        else:
            np.testing.assert_array_equal(same_T, ~seen_T)


# ------------------------------------------------------------------------------------------- what is taken where


@pytest.mark.parametrize(
    ("changed", "on", "expected"),
    [
        ({}, "cpu", "plain"),
        ({"compute_dtype": "bfloat16"}, "cpu", "plain"),
        ({"compute_dtype": "bfloat16"}, "gpu", "cudnn"),
        ({}, "gpu", "plain"),  # float32
        ({"compute_dtype": "float16"}, "gpu", "plain"),  # no config can ask for it
        ({"compute_dtype": "bfloat16", "d_head": 12}, "gpu", "plain"),
        ({"compute_dtype": "bfloat16", "d_head": 256}, "gpu", "plain"),
        ({"compute_dtype": "bfloat16"}, "tpu", "plain"),  # of 8 positions
        ({"compute_dtype": "bfloat16"}, "other", "plain"),
        ({"compute_dtype": "bfloat16", "attention": "xla"}, "gpu", "xla"),
    ],
)
def test_attention_by_backend(changed, on, expected):
    config = replace(GROUPED, d_model=64, **changed)
    assert attention_of(config, on, seq_len=8) == expected


def test_heads_that_are_split_are_not_gathered():
    config = replace(GROUPED, d_model=64)
    split = {"seq_len": 8, "heads_split": True}
    assert [attention_of(config, on, **split) for on in ("cpu", "gpu", "other")] == ["xla"] * 3
    assert attention_of(replace(config, compute_dtype="bfloat16"), "gpu", **split) == "cudnn"
    assert attention_of(replace(config, attention="plain"), "cpu", **split) == "plain"


def test_an_odd_number_of_positions_is_beyond_cudnn():
    config = replace(GROUPED, d_model=64, compute_dtype="bfloat16")
    assert [attention_of(config, "gpu", seq_len=length) for length in (7, 8)] == ["plain", "cudnn"]


def test_on_a_tpu_flash_attention_takes_whole_registers_of_positions():
    found = [attention_of(GROUPED, "tpu", seq_len=length) for length in (64, 127, 128, 640)]
    assert found == ["plain", "plain", "splash", "splash"]
    assert attention_of(GROUPED, "tpu", seq_len=128, heads_split=True) == "splash"
    assert attention_of(GROUPED, "tpu", seq_len=64, heads_split=True) == "xla"
    assert attention_of(replace(GROUPED, attention="deterministic"), "tpu", seq_len=128) == "splash"
    assert attention_of(replace(GROUPED, attention="plain"), "tpu", seq_len=128) == "plain"


@pytest.mark.parametrize(
    ("changed", "on", "expected"),
    [
        ({}, "cpu", "unrolled"),
        ({}, "gpu", "unrolled"),
        ({}, "tpu", "unrolled"),
        ({}, "other", "scanned"),
        ({"no_rope_every": 2}, "other", "unrolled"),
        ({"no_rope_every": 2, "pos_encoding": "learned"}, "other", "scanned"),  # no layer turns positions
        ({"layers": "unrolled"}, "other", "unrolled"),
        ({"layers": "scanned"}, "cpu", "scanned"),
    ],
)
def test_layers_by_backend(changed, on, expected):
    assert layers_of(replace(GROUPED, **changed), on) == expected


def test_query_key_and_value_are_joined_on_a_cpu_unless_they_are_adapted_or_split():
    assert [qkv_of(GROUPED, on) for on in ("cpu", "gpu", "tpu", "other")] == ["joined", "apart", "apart", "apart"]
    assert qkv_of(replace(GROUPED, lora=LoraConfig(rank=2)), "cpu") == "apart"
    assert qkv_of(GROUPED, "cpu", heads_split=True) == "apart"


def test_the_backend_of_this_process_has_a_formulation():
    assert backend() in BY_BACKEND
    if jax.default_backend() == "cpu":
        assert backend() == "cpu"


def test_how_a_model_is_computed_is_no_part_of_what_it_is():
    assert {"attention", "layers"} <= set(HOW)
    assert replace(GROUPED, attention="xla", layers="scanned").architecture == GROUPED.architecture


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            {"attention": "cudnn"},
            "model.attention: got cudnn with compute_dtype float32, expected compute_dtype bfloat16; leave it out for "
            "auto",
        ),
        (
            {"attention": "cudnn", "compute_dtype": "bfloat16", "d_head": 20},
            "model.attention: got cudnn with a head width of 20, expected a multiple of 8 up to 128; leave it out for "
            "auto",
        ),
        (
            {"layers": "scanned", "no_rope_every": 4},
            "model.layers: got scanned, expected identical layers, but no_rope_every 4 makes them differ; leave it "
            "out for auto",
        ),
    ],
)
def test_a_choice_that_does_not_fit_is_refused(section, expected):
    with pytest.raises(InputError) as caught:
        resolve_model(ModelSection(preset="tiny", **section), V)
    assert caught.value.problems == (expected,)


@pytest.mark.skipif(backend() == "gpu", reason="this machine has such a card")
def test_cudnn_without_an_nvidia_card_is_refused():
    config = resolve_model(ModelSection(preset="tiny", attention="cudnn", compute_dtype="bfloat16"), V)
    with pytest.raises(InputError) as caught:
        transformer(config)
    (problem,) = caught.value.problems
    expected = f"got cudnn with jax backend {jax.default_backend()}, expected an NVIDIA GPU"
    assert problem == f"model.attention: {expected}, or auto"


# ------------------------------------------------------------------------------------------------ skipped updates


@cache
def updates(skip):
    """(the compiled update, the states after each of four: the third has no target, and is skipped)."""
    optimizer = make_optimizer(OptimConfig())
    step = make_train_step(transformer(GROUPED), optimizer, 1, grad_clip=1.0)
    state = jax.tree.map(jnp.asarray, init_state(init_params(GROUPED, 0), optimizer, 1))
    zeros = np.zeros((1, B, T), np.int32)
    batch = Batch(TOKENS_BT[None], TOKENS_BT[None, :, ::-1], zeros == 0, zeros, np.zeros((1, B), np.int32))
    unscored = batch._replace(loss_mask_ABT=zeros != 0)
    with mock.patch.dict(BY_BACKEND, {backend(): replace(BY_BACKEND[backend()], skip=skip)}):
        compiled = jax.jit(step, donate_argnums=0).lower(state, batch, np.float32(0.01), np.int32(0)).compile()
    states = []
    for one in (batch, batch, unscored, batch):
        state = compiled(state, one, np.float32(0.01), np.int32(0))
        states.append(jax.device_get(state))
    return compiled, states


@pytest.mark.parametrize("skip", ["branch", "select"])
def test_a_skipped_update_changes_no_bit(skip):
    _, (_, before, after, later) = updates(skip)
    assert (int(before.skipped_updates), int(after.skipped_updates), int(later.skipped_updates)) == (0, 1, 1)
    assert [int(state.step) for state in (before, after, later)] == [2, 3, 4]
    kept, still = (jax.tree.leaves((s.params, s.opt_state, s.window)) for s in (before, after))
    assert len(kept) > 10
    for one, another in zip(kept, still, strict=True):
        np.testing.assert_array_equal(one, another)
    assert any(
        (a != b).any() for a, b in zip(jax.tree.leaves(after.params), jax.tree.leaves(later.params), strict=True)
    )


def test_branch_and_select_train_alike():
    (_, branched), (_, selected) = map(updates, ("branch", "select"))
    for one, another in zip(jax.tree.leaves(branched[-1].params), jax.tree.leaves(selected[-1].params), strict=True):
        np.testing.assert_allclose(one, another, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(backend() != "cpu", reason="what the compiler for CPUs copies")
def test_a_branch_copies_no_moments():
    """Selecting makes it copy each of them: the parameter's update reads the old one after the new one is written."""
    num_moments = 2 * len(jax.tree.leaves(init_params(GROUPED, 0)))
    branch, select = (updates(skip)[0].as_text().count(" copy(") for skip in ("branch", "select"))
    assert select - branch > num_moments // 2  # most of them
