import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from noisy import noisy_params

from curriculum.model import layers
from curriculum.model.modules import Block, _dropout, _rows
from curriculum.model.presets import ModelConfig
from curriculum.model.transformer import forward, head, init_params, transformer

SMALL = ModelConfig(vocab_size=13, n_layer=2, n_head=4, n_kv_head=2, d_model=16, d_ff=12, max_seq_len=8)
TOKENS_BT = np.array([[1, 5, 0, 12, 7, 7], [3, 2, 11, 12, 0, 4]], np.int32)


def logits(config, params, tokens_BT, *rest):
    return forward(config, params, tokens_BT, *rest) @ head(params).T


# ------------------------------------------------- the model again, one token and one head at a time, in float64


def reference_logits(config, params, tokens):
    params = jax.tree.map(lambda array: np.asarray(array, np.float64), params)
    states = [params["embed"]["embedding"][token].copy() for token in tokens]
    if config.pos_encoding == "learned":
        states = [state + params["positions"]["embedding"][t] for t, state in enumerate(states)]
    for layer in range(config.n_layer):
        block = params["blocks"][f"{layer:03}"]
        normed = [reference_norm(config, block["attention_norm"], state) for state in states]
        attended = reference_attention(config, block["attention"], normed)
        states = [state + added for state, added in zip(states, attended, strict=True)]
        normed = [reference_norm(config, block["mlp_norm"], state) for state in states]
        states = [s + reference_mlp(config, block["mlp"], n) for s, n in zip(states, normed, strict=True)]
    head = params["embed"]["embedding"].T if config.tie_embeddings else params["head"]["kernel"]
    return np.array([reference_norm(config, params["norm"], state) @ head for state in states])


def linear(layer, x):
    return x @ layer["kernel"] + layer.get("bias", 0.0)


def reference_norm(config, norm, x):
    if config.norm_type == "layernorm":
        x = x - sum(x) / len(x)
    x = x / math.sqrt(sum(x * x) / len(x) + config.norm_eps)
    return x * norm["scale"] + norm.get("bias", 0.0)


def reference_mlp(config, mlp, x):
    up = linear(mlp["up"], x)
    if config.mlp_type == "gelu":
        inner = 0.5 * up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    else:
        gate = linear(mlp["gate"], x)
        inner = gate / (1 + np.exp(-gate)) * up
    return linear(mlp["down"], inner)


def reference_attention(config, attention, xs):
    K = config.d_model // config.n_head
    queries, keys, values = ([linear(attention[name], x) for x in xs] for name in ("query", "key", "value"))
    outputs = []
    for t in range(len(xs)):
        heads = []
        for h in range(config.n_head):
            group = h // (config.n_head // config.n_kv_head)
            query = turned(config, queries[t][h * K :][:K], t)
            scores = [query @ turned(config, keys[s][group * K :][:K], s) / math.sqrt(K) for s in range(t + 1)]
            shares = np.exp(scores) / np.exp(scores).sum()
            heads.append(sum(share * values[s][group * K :][:K] for s, share in enumerate(shares)))
        outputs.append(linear(attention["out"], np.concatenate(heads)))
    return outputs


def turned(config, x, position):
    if config.pos_encoding == "learned":
        return x
    half, out = len(x) // 2, np.zeros_like(x)
    for k in range(half):
        angle = position * config.rope_theta ** (-2 * k / len(x))
        pair = complex(x[k], x[k + half]) * complex(math.cos(angle), math.sin(angle))
        out[k], out[k + half] = pair.real, pair.imag
    return out


@pytest.mark.parametrize("pos_encoding", ["rope", "learned"])
@pytest.mark.parametrize("mlp_type", ["swiglu", "gelu"])
@pytest.mark.parametrize("norm_type", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize(
    ("n_kv_head", "bias", "tie_embeddings"),
    [(2, False, True), (2, True, False), (4, True, True), (1, False, False)],
)
def test_forward_equals_a_float64_loop(pos_encoding, mlp_type, norm_type, n_kv_head, bias, tie_embeddings):
    config = replace(
        SMALL,
        pos_encoding=pos_encoding,
        mlp_type=mlp_type,
        norm_type=norm_type,
        n_kv_head=n_kv_head,
        bias=bias,
        tie_embeddings=tie_embeddings,
        rope_theta=100.0,
    )
    params = noisy_params(config)
    with jax.disable_jit():  # 32 shapes; compiling each takes longer than running it op by op
        logits_BTV = logits(config, params, TOKENS_BT)
    expected_BTV = np.stack([reference_logits(config, params, tokens) for tokens in TOKENS_BT])
    assert np.abs(expected_BTV).max() > 0.5
    # float32 with sums of 16 terms through two layers
    np.testing.assert_allclose(logits_BTV, expected_BTV, rtol=1e-4, atol=2e-5)


def test_compiled_logits_equal_the_float64_loop():
    params = noisy_params(SMALL)
    logits_BTV = jax.jit(logits, static_argnums=0)(SMALL, params, TOKENS_BT)
    assert logits_BTV.dtype == jnp.float32 and logits_BTV.shape == (2, 6, 13)
    expected_BTV = np.stack([reference_logits(SMALL, params, tokens) for tokens in TOKENS_BT])
    np.testing.assert_allclose(logits_BTV, expected_BTV, rtol=1e-4, atol=2e-5)


def test_layernorm_of_a_large_mean_does_not_cancel():
    config = replace(SMALL, n_layer=1, norm_type="layernorm", tie_embeddings=False)
    params = noisy_params(config)
    params["embed"]["embedding"] += np.float32(300)
    with jax.disable_jit():
        logits_BTV = logits(config, params, TOKENS_BT)
    expected_BTV = np.stack([reference_logits(config, params, tokens) for tokens in TOKENS_BT])
    # float32 near 300 is 3e-5 apart; E[x^2] - E[x]^2 would be off by percents
    np.testing.assert_allclose(logits_BTV, expected_BTV, atol=2e-3 * np.abs(expected_BTV).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("centred", [True, False])
def test_the_norms_own_way_back_is_that_of_autodiff(centred, dtype):
    random = np.random.default_rng(0)
    x_MD = jnp.asarray(random.normal(2, 3, (7, 16)), dtype)
    scale_D, weight_MD = (jnp.asarray(random.normal(1, 1, shape), jnp.float32) for shape in ((16,), (7, 16)))

    def plain(x_MD, scale_D):
        x_MD = x_MD.astype(jnp.float32)
        x_MD -= centred * x_MD.mean(axis=-1, keepdims=True)
        return x_MD / jnp.sqrt((x_MD**2).mean(axis=-1, keepdims=True) + 1e-5) * scale_D

    found, expected = (
        jax.jit(jax.grad(lambda x, scale, norm=norm: (weight_MD * norm(x, scale)).sum(), argnums=(0, 1)))(x_MD, scale_D)
        for norm in (partial(layers._normed, centred, 1e-5), plain)
    )
    assert found[0].dtype == expected[0].dtype == dtype and found[1].dtype == jnp.float32
    assert np.abs(np.float32(expected[0])).max() > 0.2
    for one, other, rounding in zip(found, expected, (2**-7 if dtype == "bfloat16" else 1e-5, 1e-5), strict=True):
        np.testing.assert_allclose(np.float32(one), np.float32(other), rtol=rounding, atol=1e-5)


@pytest.mark.parametrize("pos_encoding", ["rope", "learned"])
def test_a_later_token_changes_no_earlier_logit(pos_encoding):
    config = replace(SMALL, pos_encoding=pos_encoding)
    params = noisy_params(config)
    run = jax.jit(lambda tokens_BT: logits(config, params, tokens_BT))
    before_BTV = np.asarray(run(TOKENS_BT))
    for t in range(1, TOKENS_BT.shape[1]):
        changed_BT = TOKENS_BT.copy()
        changed_BT[:, t] = (changed_BT[:, t] + 1) % config.vocab_size
        after_BTV = np.asarray(run(changed_BT))
        np.testing.assert_array_equal(after_BTV[:, :t], before_BTV[:, :t])
        assert (after_BTV[:, t:] != before_BTV[:, t:]).any(axis=-1).all()


def ids(*lengths):
    """segment_ids_BT of one row made of pieces of these lengths."""
    return np.repeat(np.arange(len(lengths)), lengths)[None].astype(np.int32)


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pos_encoding", ["rope", "learned"])
def test_a_document_isolated_by_the_mask_gives_the_logits_it_gives_alone(pos_encoding, compute_dtype, remat):
    config = replace(SMALL, pos_encoding=pos_encoding, compute_dtype=compute_dtype, remat=remat)
    params = noisy_params(config)
    documents = [np.array([4, 9, 1], np.int32), np.array([9, 9, 0, 5], np.int32), np.array([7], np.int32)]
    row_BT = np.concatenate(documents)[None]
    run = jax.jit(partial(logits, config))
    packed_TV = np.asarray(run(params, row_BT, ids(3, 4, 1)), np.float32)[0]
    joined_TV = np.asarray(run(params, row_BT), np.float32)[0]
    start = 0
    for document in documents:
        alone_TV = np.asarray(run(params, document[None]), np.float32)[0]
        within_TV = packed_TV[start : start + len(document)]
        # The same numbers are added, in sums of another length.
        np.testing.assert_allclose(within_TV, alone_TV, atol=1e-5 if compute_dtype == "float32" else 0.1)
        assert start == 0 or np.abs(joined_TV[start : start + len(document)] - alone_TV).max() > 0.3
        start += len(document)


def test_what_stands_in_one_document_changes_no_bit_of_another():
    params, row_BT = noisy_params(SMALL), np.array([[4, 9, 1, 9, 9, 0, 5, 7]], np.int32)
    run = jax.jit(partial(logits, SMALL))
    before_BTV = np.asarray(run(params, row_BT, ids(3, 4, 1)))
    for t in range(8):
        changed_BT = row_BT.copy()
        changed_BT[0, t] = (changed_BT[0, t] + 1) % SMALL.vocab_size
        after_BTV = np.asarray(run(params, changed_BT, ids(3, 4, 1)))
        same_T = (after_BTV == before_BTV).all(axis=-1)[0]
        own = ids(3, 4, 1)[0] == ids(3, 4, 1)[0, t]
        np.testing.assert_array_equal(same_T, ~(own & (np.arange(8) >= t)))


def test_padding_of_a_segment_of_its_own_stays_finite():
    """Packing marks it with -1."""
    segment_ids_BT = np.array([[0, 0, 0, -1, -1, -1]], np.int32)
    packed_BTV = logits(SMALL, noisy_params(SMALL), TOKENS_BT[:1], segment_ids_BT)
    assert np.isfinite(packed_BTV).all()


def some_loss(config, params, keys_B=None):
    return (logits(config, params, TOKENS_BT, None, keys_B).astype(jnp.float32) ** 2).sum()


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_computing_again_changes_no_gradient(remat):
    config = replace(SMALL, dropout=0.3)
    params, keys_B = noisy_params(config), jax.random.split(jax.random.key(0), 2)
    again = replace(config, remat=remat)
    kept, computed = (jax.jit(jax.grad(partial(some_loss, c)))(params, keys_B) for c in (config, again))
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(computed), strict=True):
        assert np.abs(a).max() > 0
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(a).max())


def test_less_is_kept_the_more_is_computed_again():
    """Of what the backward pass is handed; the compiler for CPUs merges what is computed again with what was there."""
    config = replace(SMALL, n_layer=6, d_model=64, d_ff=256, max_seq_len=128)
    shapes = transformer(config).shapes(), jax.ShapeDtypeStruct((4, 128), jnp.int32)

    def kept_bytes(remat):
        def way_back(params, tokens_BT):
            return jax.vjp(lambda p: forward(replace(config, remat=remat), p, tokens_BT), params)[1]

        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(jax.eval_shape(way_back, *shapes)))

    none, dots, full = map(kept_bytes, ("none", "dots", "full"))
    stream_bytes, params_bytes = 4 * 128 * 64 * 4, 4 * sum(a.size for a in jax.tree.leaves(shapes[0]))
    assert full < params_bytes + 10 * stream_bytes  # what enters each block, and what the last norm keeps
    assert full < 0.5 * dots < 0.3 * none


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_blocks_that_are_alike_are_traced_differentiated_and_lowered_once(monkeypatch, remat):
    traced, run = [], Block.__call__

    def counted(*inputs, **settings):
        traced.append(1)
        return run(*inputs, **settings)

    monkeypatch.setattr(Block, "__call__", counted)

    def num_products(num_layers):
        config = replace(SMALL, n_layer=num_layers, d_ff=28, remat=remat)
        loss = jax.value_and_grad(lambda params: forward(config, params, TOKENS_BT).sum())
        return jax.jit(loss).lower(init_params(config, 0)).as_text().count("dot_general")

    few = num_products(2)
    assert len(traced) == 1
    assert num_products(5) == few > 10
    assert len(traced) == 2


def equations_of(jaxpr):
    """The equations of a program and of the programs that it calls, as often as it calls them."""
    for equation in jaxpr.eqns:
        yield equation
        for called in jaxprs_in_params(equation.params):
            yield from equations_of(called)


def test_bfloat16_is_of_products_and_parameters_stay_float32():
    config = replace(SMALL, compute_dtype="bfloat16")
    params = noisy_params(config)
    assert {a.dtype for a in jax.tree.leaves(params)} == {np.dtype("float32")}
    features_BTD = forward(config, params, TOKENS_BT)
    assert features_BTD.dtype == jnp.bfloat16
    exact_BTD = forward(SMALL, params, TOKENS_BT)
    error = np.abs(np.asarray(features_BTD, np.float32) - exact_BTD)
    assert 1e-4 < error.max() < 0.1 * np.abs(exact_BTD).max()  # bfloat16 has 8 bits
    equations = list(equations_of(jax.make_jaxpr(jax.grad(partial(some_loss, config)))(params).jaxpr))
    products = [str(eqn.outvars[0].aval.dtype) for eqn in equations if eqn.primitive.name == "dot_general"]
    exponentials = {str(eqn.outvars[0].aval.dtype) for eqn in equations if eqn.primitive.name == "exp"}
    # In float32: attention's two products and the four of its backward pass; logits, their gradient and the head's.
    assert products.count("float32") == 6 * config.n_layer + 3
    assert products.count("bfloat16") == len(products) - 15 >= 19
    assert exponentials == {"float32"}
    grads = jax.grad(partial(some_loss, config))(params)
    assert {a.dtype for a in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


def test_dropout_zeroes_its_share_and_keeps_the_mean():
    config = replace(SMALL, dropout=0.25, n_layer=1)
    x_MD = jnp.ones((2 * 500, 16))
    rows = _rows(config, 500, None, jax.random.split(jax.random.key(3), 2))
    kept_MD = np.asarray(_dropout(config, x_MD, rows, site=1))
    assert set(np.unique(kept_MD)) == {0, np.float32(1 / 0.75)}
    assert (kept_MD == 0).mean() == pytest.approx(0.25, abs=0.015)  # 16,000 draws: deviation 0.0034
    other_MD = np.asarray(_dropout(config, x_MD, rows, site=2))
    # Sites and rows draw independently: two zeros together as often as 0.25 squared.
    assert ((kept_MD == 0) & (other_MD == 0)).mean() == pytest.approx(0.0625, abs=0.01)
    assert ((kept_MD[:500] == 0) & (kept_MD[500:] == 0)).mean() == pytest.approx(0.0625, abs=0.015)


def test_dropout_is_drawn_from_the_keys_alone_and_not_without_them():
    config, params = replace(SMALL, dropout=0.5), noisy_params(SMALL)
    keys_B = jax.random.split(jax.random.key(0), 2)
    run = jax.jit(partial(logits, config))
    first, again = run(params, TOKENS_BT, None, keys_B), run(params, TOKENS_BT, None, keys_B)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(
        run(params, TOKENS_BT), logits_jitted := jax.jit(partial(logits, SMALL))(params, TOKENS_BT)
    )
    assert np.abs(first - logits_jitted).max() > 0.1
    alone = run(params, TOKENS_BT[1:], None, keys_B[1:])
    np.testing.assert_allclose(alone[0], first[1], atol=1e-5)  # a row's draws do not depend on its neighbours


def test_initial_params_are_a_function_of_the_seed():
    first, again, other = (jax.tree.leaves_with_path(init_params(SMALL, seed)) for seed in (3, 3, 4))
    assert len(first) == 2 * 9 + 2  # arrays of two blocks, the embedding, the last norm
    for (path, array), (_, same), (_, different) in zip(first, again, other, strict=True):
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, same)
        is_random = path[-1].key != "scale"
        assert (array == different).all() != is_random


def test_initial_arrays_do_not_depend_on_the_other_layers():
    shallow, deep = init_params(replace(SMALL, n_layer=1), 0), init_params(SMALL, 0)
    np.testing.assert_array_equal(shallow["embed"]["embedding"], deep["embed"]["embedding"])
    query, other = (deep["blocks"][layer]["attention"]["query"]["kernel"] for layer in ("000", "001"))
    np.testing.assert_array_equal(shallow["blocks"]["000"]["attention"]["query"]["kernel"], query)
    assert (query != other).any()


def test_initial_deviations():
    config = ModelConfig(
        vocab_size=500, n_layer=8, n_head=2, n_kv_head=2, d_model=64, d_ff=256, max_seq_len=64, bias=True
    )
    params = init_params(config, seed=0)
    block = params["blocks"]["007"]
    for array, std in [
        (params["embed"]["embedding"], 0.02),
        (block["attention"]["query"]["kernel"], 0.02),
        (block["mlp"]["gate"]["kernel"], 0.02),
        (block["attention"]["out"]["kernel"], 0.005),  # 0.02 / sqrt(2 * 8)
        (block["mlp"]["down"]["kernel"], 0.005),
    ]:
        # 4,096 draws or more: the deviation is known to 1.1 %, the mean to 1.6 % of it
        assert array.std() == pytest.approx(std, rel=0.05) and abs(array.mean()) < 0.08 * std
    assert (block["mlp"]["up"]["bias"] == 0).all() and (block["mlp_norm"]["scale"] == 1).all()


def test_more_positions_than_the_model_has_are_refused():
    with pytest.raises(ValueError, match="got 9 positions, expected at most max_seq_len 8"):
        logits(SMALL, init_params(SMALL, 0), np.zeros((1, 9), np.int32))
