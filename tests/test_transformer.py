import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curriculum.model.presets import ModelConfig
from curriculum.model.transformer import forward, init_params, nats_per_token

SMALL = ModelConfig(vocab_size=13, n_layer=2, n_head=4, n_kv_head=2, d_model=16, d_ff=12, max_seq_len=8)
TOKENS_BT = np.array([[1, 5, 0, 12, 7, 7], [3, 2, 11, 12, 0, 4]], np.int32)


def noisy_params(config, seed=0):
    """Initial parameters moved enough that biases, scales and attention all show in the logits."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda array: (array + rng.normal(0, 0.3, array.shape)).astype(np.float32), init_params(config, seed)
    )


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
        for head in range(config.n_head):
            group = head // (config.n_head // config.n_kv_head)
            query = turned(config, queries[t][head * K :][:K], t)
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
        logits_BTV = forward(config, params, TOKENS_BT)
    expected_BTV = np.stack([reference_logits(config, params, tokens) for tokens in TOKENS_BT])
    assert np.abs(expected_BTV).max() > 0.5
    # float32 with sums of 16 terms through two layers
    np.testing.assert_allclose(logits_BTV, expected_BTV, rtol=1e-4, atol=2e-5)


def test_compiled_logits_equal_the_float64_loop():
    params = noisy_params(SMALL)
    logits_BTV = jax.jit(forward, static_argnums=0)(SMALL, params, TOKENS_BT)
    assert logits_BTV.dtype == jnp.float32 and logits_BTV.shape == (2, 6, 13)
    expected_BTV = np.stack([reference_logits(SMALL, params, tokens) for tokens in TOKENS_BT])
    np.testing.assert_allclose(logits_BTV, expected_BTV, rtol=1e-4, atol=2e-5)


def test_layernorm_of_a_large_mean_does_not_cancel():
    config = replace(SMALL, n_layer=1, norm_type="layernorm", tie_embeddings=False)
    params = noisy_params(config)
    params["embed"]["embedding"] += np.float32(300)
    with jax.disable_jit():
        logits_BTV = forward(config, params, TOKENS_BT)
    expected_BTV = np.stack([reference_logits(config, params, tokens) for tokens in TOKENS_BT])
    # float32 near 300 is 3e-5 apart; E[x^2] - E[x]^2 would be off by percents
    np.testing.assert_allclose(logits_BTV, expected_BTV, atol=2e-3 * np.abs(expected_BTV).max())


@pytest.mark.parametrize("pos_encoding", ["rope", "learned"])
def test_a_later_token_changes_no_earlier_logit(pos_encoding):
    config = replace(SMALL, pos_encoding=pos_encoding)
    params = noisy_params(config)
    run = jax.jit(lambda tokens_BT: forward(config, params, tokens_BT))
    before_BTV = np.asarray(run(TOKENS_BT))
    for t in range(1, TOKENS_BT.shape[1]):
        changed_BT = TOKENS_BT.copy()
        changed_BT[:, t] = (changed_BT[:, t] + 1) % config.vocab_size
        after_BTV = np.asarray(run(changed_BT))
        np.testing.assert_array_equal(after_BTV[:, :t], before_BTV[:, :t])
        assert (after_BTV[:, t:] != before_BTV[:, t:]).any(axis=-1).all()


def test_nats_and_correctness_against_numpy():
    params = noisy_params(SMALL)
    targets_BT = np.roll(TOKENS_BT, -1, axis=1)
    nats_BT, correct_BT = nats_per_token(SMALL, params, TOKENS_BT, targets_BT)
    logits_BTV = np.asarray(forward(SMALL, params, TOKENS_BT), np.float64)
    best_BT = logits_BTV.argmax(-1)
    probabilities_BTV = np.exp(logits_BTV) / np.exp(logits_BTV).sum(-1, keepdims=True)
    expected_BT = [
        [-math.log(row[t][target]) for t, target in enumerate(targets)]
        for row, targets in zip(probabilities_BTV, targets_BT, strict=True)
    ]
    assert nats_BT.dtype == jnp.float32 and correct_BT.dtype == bool
    np.testing.assert_allclose(nats_BT, expected_BT, rtol=1e-5)
    _, correct_of_best_BT = nats_per_token(SMALL, params, TOKENS_BT, best_BT.astype(np.int32))
    assert correct_of_best_BT.all()
    np.testing.assert_array_equal(correct_BT, best_BT == targets_BT)


def test_nats_stay_finite_for_large_logits():
    params = jax.tree.map(lambda array: array * 100, noisy_params(SMALL))
    nats_BT, _ = nats_per_token(SMALL, params, TOKENS_BT, TOKENS_BT)
    assert np.isfinite(nats_BT).all() and np.max(nats_BT) > 100


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
        forward(SMALL, init_params(SMALL, 0), np.zeros((1, 9), np.int32))
