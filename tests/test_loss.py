"""The chunked cross-entropy: its numbers, its gradient, and that no array of [B, T, V] is made."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from noisy import noisy_params

from curriculum.model import formulation
from curriculum.model.formulation import BY_BACKEND, backend
from curriculum.model.loss import _scores, sample_targets, score_targets, sum_nats
from curriculum.model.model import Model
from curriculum.model.presets import ModelConfig
from curriculum.model.transformer import forward, head, transformer

CONFIG = ModelConfig(vocab_size=37, n_layer=1, n_head=2, n_kv_head=1, d_model=8, d_ff=12, max_seq_len=16)
B, T, V = 3, 7, CONFIG.vocab_size
K = 128  # ids of a block
RNG = np.random.default_rng(0)
TOKENS_BT1 = RNG.integers(0, V, (B, T + 1)).astype(np.int32)
INPUTS_BT, TARGETS_BT = TOKENS_BT1[:, :-1], TOKENS_BT1[:, 1:]
MASK_BT = RNG.random((B, T)) < 0.7


def float64_log_probabilities(config, params):
    logits_BTV = np.asarray(forward(config, params, INPUTS_BT), np.float64) @ np.asarray(head(params), np.float64).T
    return logits_BTV - np.log(np.exp(logits_BTV).sum(-1, keepdims=True))


def float64_nats(config, params, targets_BT=TARGETS_BT):
    return -np.take_along_axis(float64_log_probabilities(config, params), targets_BT[..., None], -1)[..., 0]


@pytest.fixture(params=[1, 5], ids="{} tokens a chunk".format)
def chunk_tokens(request, monkeypatch):
    """One position at a time; or two, and a last one alone, filled up."""
    monkeypatch.setitem(BY_BACKEND, backend(), replace(BY_BACKEND[backend()], loss_tokens=request.param))
    monkeypatch.setattr(formulation, "LOSS_LOGITS", request.param * V)


def test_nats_and_correctness_against_float64(chunk_tokens):
    params = noisy_params(CONFIG, noise=0.4)
    measure = jax.jit(partial(score_targets, transformer(CONFIG)))
    scores = measure(params, INPUTS_BT, TARGETS_BT)
    assert scores["nats"].dtype == jnp.float32 and scores["correct"].dtype == bool
    np.testing.assert_allclose(scores["nats"], float64_nats(CONFIG, params), rtol=2e-5)
    best_BT = float64_log_probabilities(CONFIG, params).argmax(-1)
    np.testing.assert_array_equal(scores["correct"], best_BT == TARGETS_BT)
    assert measure(params, INPUTS_BT, best_BT.astype(np.int32))["correct"].all()


def test_sum_and_rows_count_masked_targets_only(chunk_tokens):
    params = noisy_params(CONFIG, noise=0.4)
    expected_B = np.where(MASK_BT, float64_nats(CONFIG, params), 0).sum(axis=1)
    assert (expected_B > 1).all() and not MASK_BT.all()
    for differentiated in (False, True):
        function = partial(sum_nats, transformer(CONFIG))
        if differentiated:
            function = jax.value_and_grad(function, has_aux=True)
        found = jax.jit(function)(params, INPUTS_BT, TARGETS_BT, MASK_BT)
        total, nats_B = found[0] if differentiated else found
        np.testing.assert_allclose(nats_B, expected_B, rtol=1e-5)
        np.testing.assert_allclose(total, expected_B.sum(), rtol=1e-5)


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_the_gradient_is_that_of_all_logits_at_once(chunk_tokens, tie_embeddings):
    config = replace(CONFIG, tie_embeddings=tie_embeddings)
    params = noisy_params(config)

    def plainly(params):
        logits_BTV = forward(config, params, INPUTS_BT) @ head(params).T
        nats_BT = -jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), TARGETS_BT[..., None], -1)[..., 0]
        return 0.3 * jnp.where(MASK_BT, nats_BT, 0).sum()

    def chunked(params):
        return 0.3 * sum_nats(transformer(config), params, INPUTS_BT, TARGETS_BT, MASK_BT)[0]

    expected, got = (jax.jit(jax.grad(loss))(params) for loss in (plainly, chunked))
    assert len(jax.tree.leaves(got)) > 10
    for (path, e), g in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(got), strict=True):
        assert np.abs(e).max() > 1e-3, path
        np.testing.assert_allclose(g, e, atol=2e-5, err_msg=str(path))  # float32 sums of 21 terms of about 1


def test_logits_that_overflow_a_float32_exponential_stay_finite():
    params = jax.tree.map(lambda array: array * 100, noisy_params(CONFIG, noise=0.4))
    both = jax.jit(jax.value_and_grad(partial(sum_nats, transformer(CONFIG)), has_aux=True))
    (total, nats_B), grads = both(params, INPUTS_BT, TARGETS_BT, MASK_BT)
    assert np.isfinite(nats_B).all() and total > 1000
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_a_model_without_a_head_gives_the_same_numbers():
    """Its features are the logits themselves."""
    params = noisy_params(CONFIG, noise=0.4)
    whole = transformer(CONFIG)
    bare = Model(whole.init, lambda p, *rest: forward(CONFIG, p, *rest) @ head(p).T)
    arguments = (params, INPUTS_BT, TARGETS_BT)
    found = [jax.jit(partial(score_targets, model))(*arguments) for model in (whole, bare)]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), *found)
    one, other = (
        jax.jit(jax.grad(partial(sum_nats, model), has_aux=True))(*arguments, MASK_BT)[0] for model in (whole, bare)
    )
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("num_ids", [None, 30])
def test_a_head_that_is_filled_up_gives_the_same_numbers(monkeypatch, num_ids):
    """Where all rows are ids, and where some are padding already; and the gradient that jax itself would take."""
    params, model = noisy_params(CONFIG, noise=0.4), transformer(replace(CONFIG, num_ids=num_ids))
    targets_BT = np.minimum(TARGETS_BT, 29)

    def numbers():
        (_, nats_B), grads = jax.value_and_grad(partial(sum_nats, model), has_aux=True)(
            params, INPUTS_BT, targets_BT, MASK_BT
        )
        return *score_targets(model, params, INPUTS_BT, targets_BT).values(), nats_B, grads

    def plainly(params):
        logits_BTV = (model.forward(params, INPUTS_BT, None, None) @ model.head(params).T)[..., :num_ids]
        of_targets_BT1 = jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), targets_BT[..., None], axis=-1)
        return -jnp.where(MASK_BT, of_targets_BT1[..., 0], 0).sum()

    expected = numbers()
    for a, b in zip(jax.tree.leaves(expected[-1]), jax.tree.leaves(jax.grad(plainly)(params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)
    programs = []
    for padding, block_ids in (("sliced", K), ("sliced", None), ("masked", None), ("masked", K)):
        changed = {"head_rows": 16, "padding": padding, "block_ids": block_ids}
        monkeypatch.setitem(BY_BACKEND, backend(), replace(BY_BACKEND[backend()], **changed))
        programs.append(str(jax.make_jaxpr(partial(sum_nats, model))(params, INPUTS_BT, targets_BT, MASK_BT)))
        for a, b in zip(jax.tree.leaves(numbers()), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert all("f32[48,8]" in program for program in programs) and programs[0] != programs[2]  # 37 rows


def array_sizes(compiled) -> list[int]:
    """Numbers in each array of a compiled program."""
    shapes = re.findall(r"\b(?:f32|bf16|f16|s32|u32|pred)\[([\d,]+)\]", compiled.as_text())
    assert len(shapes) > 50
    return [int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes]


@pytest.mark.parametrize("what", ["training", "eval"])
def test_no_array_holds_a_number_for_every_token_and_every_id(what):
    config = replace(CONFIG, vocab_size=6000, max_seq_len=256)
    rows, positions = 8, 256
    tokens_BT = jax.ShapeDtypeStruct((rows, positions), jnp.int32)
    mask_BT = jax.ShapeDtypeStruct((rows, positions), jnp.bool_)
    params = transformer(config).shapes()
    if what == "training":
        function = jax.value_and_grad(lambda p, *rest: sum_nats(transformer(config), p, *rest), has_aux=True)
        compiled = jax.jit(function).lower(params, tokens_BT, tokens_BT, mask_BT).compile()
    else:
        function = lambda p, *rest: score_targets(transformer(config), p, *rest)  # noqa: E731
        compiled = jax.jit(function).lower(params, tokens_BT, tokens_BT).compile()
    assert max(array_sizes(compiled)) <= 700 * 6000 < rows * positions * 6000  # 2 x 2^22 / 6000 tokens at a time


def test_sampled_targets_follow_the_models_probabilities():
    params, keys = noisy_params(CONFIG, noise=0.5), jax.random.split(jax.random.key(0), (4000, B))
    draw = jax.jit(jax.vmap(lambda keys_B: sample_targets(transformer(CONFIG), params, INPUTS_BT, None, keys_B)))
    drawn_NBT = np.asarray(draw(keys))
    share_BTV = (drawn_NBT[..., None] == np.arange(V)).mean(axis=0)
    expected_BTV = np.exp(float64_log_probabilities(CONFIG, params))
    # 4,000 draws: a deviation of at most 0.008; 777 shares are compared
    np.testing.assert_allclose(share_BTV, expected_BTV, atol=0.04)
    assert expected_BTV.max() > 0.3
    first, again = (draw(keys[:1]) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert len(np.unique(drawn_NBT[:, 0, 0])) > 5


def test_of_equally_likely_tokens_the_first_is_the_likeliest():
    logits_BTV = jnp.array([[[1, 3, 3, 0], [1, 3, 3, 0], [2, 2, 2, 2], [2, 2, 2, 2], [1, 2, 3, np.nan]]], jnp.float32)
    scores = _scores(logits_BTV, None, jnp.array([[1, 2, 0, 3, 2]]))
    assert scores["correct"].tolist() == [[True, False, True, False, False]]


@pytest.mark.parametrize(
    ("num_rows", "num_ids"),
    [(4 * K, None), (4 * K, 3 * K - 5), (4 * K, K), (300, 290)],
)
def test_logits_reduced_by_blocks_give_what_all_at_once_give(num_rows, num_ids):
    """Ties within a block and between blocks included, and padding that is larger than any logit."""
    random = np.random.default_rng(0)
    logits_BTW = random.integers(0, 4, (3, 200, num_rows)).astype(np.float32)  # every logit has its equals
    few_BTW = random.random((3, 200, num_rows)) < 2 / num_rows
    logits_BTW = np.where(few_BTW, logits_BTW + 4, logits_BTW)  # of the largest there are few, or one
    logits_BTV = logits_BTW[..., :num_ids].copy()
    logits_BTW[..., num_ids or num_rows :] = 9
    first_BT = logits_BTV.argmax(-1)
    exact_BTV = logits_BTV.astype(np.float64)
    log_sum_BT = np.log(np.exp(exact_BTV).sum(-1))
    for moved in (0, 1, K, -1):
        targets_BT = np.clip(first_BT + moved, 0, logits_BTV.shape[-1] - 1)
        scores = jax.jit(_scores, static_argnums=(1, 3))(logits_BTW, num_ids, targets_BT, K)
        np.testing.assert_array_equal(scores["correct"], targets_BT == first_BT)
        expected_BT = log_sum_BT - np.take_along_axis(exact_BTV, targets_BT[..., None], -1)[..., 0]
        np.testing.assert_allclose(scores["nats"], expected_BT, rtol=1e-6)
    last_BT = logits_BTV.shape[-1] - 1 - logits_BTV[..., ::-1].argmax(-1)
    assert (last_BT != first_BT).any() and (last_BT == first_BT).any()
    scores = _scores(logits_BTW, num_ids, last_BT, K)
    np.testing.assert_array_equal(scores["correct"], last_BT == first_BT)
