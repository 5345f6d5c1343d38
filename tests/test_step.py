import math
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from curriculum.model.presets import ModelConfig
from curriculum.model.transformer import forward, head, init_params, transformer
from curriculum.schema.sections import MeshConfig
from curriculum.train.mesh import make_mesh, place_batch, place_state
from curriculum.train.optimizer import OptimConfig, make_optimizer
from curriculum.train.step import clear_window, init_state, make_train_step, read_window, window_for
from phases.batches import Batch

CONFIG = ModelConfig(vocab_size=13, n_layer=1, n_head=2, n_kv_head=1, d_model=8, d_ff=12, max_seq_len=8)
SOURCES = ("code", "law", "web")  # law is never drawn below
ROWS, POSITIONS = 8, 6
LR = np.float32(0.01)
MODEL = transformer(CONFIG)
ADAMW, IDENTITY = make_optimizer(OptimConfig()), optax.with_extra_args_support(optax.identity())


def make_batch(grad_accum=1, seed=0):
    """8 rows of 6 tokens of code and web; about a third of the targets, and all of row 3, are not scored."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, CONFIG.vocab_size, (grad_accum, ROWS // grad_accum, POSITIONS + 1), dtype=np.int32)
    loss_mask = rng.random((ROWS, POSITIONS)) < 0.7
    loss_mask[3] = False
    return Batch(
        inputs_ABT=tokens[..., :-1],
        targets_ABT=tokens[..., 1:],
        loss_mask_ABT=loss_mask.reshape(tokens[..., 1:].shape),
        segment_ids_ABT=np.zeros_like(tokens[..., 1:]),
        source_ids_AB=np.array([0, 2, 2, 0, 2, 2, 2, 0], np.int32).reshape(grad_accum, -1),
    )


def initial_state(optimizer=ADAMW):
    return jax.tree.map(jnp.asarray, init_state(init_params(CONFIG, 0), optimizer, len(SOURCES)))


@cache
def train_step(optimizer=ADAMW, grad_clip=1.0):
    return jax.jit(make_train_step(MODEL, optimizer, len(SOURCES), grad_clip=grad_clip))


@cache
def gradient(grad_clip, grad_accum=1):
    """(gradient as the optimizer gets it, metrics row) of the first batch: what the identity adds at a rate of 1."""
    state = initial_state(IDENTITY)
    after = train_step(IDENTITY, grad_clip)(state, make_batch(grad_accum), np.float32(1))
    return jax.tree.map(jnp.subtract, after.params, state.params), read_window(after.window, SOURCES)


def numpy_nats(params, batch):
    """Nats of every target, in float64 from the model's logits, [rows, positions]."""
    inputs, targets = (array.reshape(ROWS, POSITIONS) for array in (batch.inputs_ABT, batch.targets_ABT))
    logits = np.asarray(forward(CONFIG, params, inputs) @ head(params).T, np.float64)
    return np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, targets[..., None], -1)[..., 0]


def assert_trees_equal(left, right):
    left, right = jax.tree.leaves(left), jax.tree.leaves(right)
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a, b)


def test_loss_of_each_source_against_numpy():
    state, batch = initial_state(), make_batch()
    row = read_window(train_step()(state, batch, LR).window, SOURCES)
    nats, mask, source = numpy_nats(state.params, batch), batch.loss_mask_ABT[0], batch.source_ids_AB[0]
    expected = {name: nats[source == i][mask[source == i]].mean() for i, name in enumerate(SOURCES) if name != "law"}
    assert row["source_loss"].pop("law") is None
    assert row["source_loss"] == pytest.approx(expected, rel=1e-6)  # float32 sums of at most 30 terms
    assert row["loss"] == pytest.approx(nats[mask].mean(), rel=1e-6)
    assert row["loss"] != pytest.approx(nats.mean(), rel=1e-6)


def test_the_window_is_a_mean_over_tokens_of_all_its_updates():
    state = initial_state()
    total_nats = total_tokens = 0
    for seed in (1, 2, 3):
        batch = make_batch(seed=seed)
        mask = batch.loss_mask_ABT[0]
        total_nats += numpy_nats(state.params, batch)[mask].sum()
        total_tokens += mask.sum()
        state = train_step()(state, batch, LR)
    assert int(state.window.num_updates) == 3 and int(state.step) == 3
    means = read_window(state.window, SOURCES)
    assert means["loss"] == pytest.approx(total_nats / total_tokens, rel=1e-6)
    assert means["scored_tokens"] == total_tokens / 3 and 0 < total_tokens < 3 * ROWS * POSITIONS


def test_an_empty_window_has_no_means():
    state = train_step()(initial_state(), make_batch(), LR)
    empty = {"source_loss": dict.fromkeys(SOURCES)}
    empty |= dict.fromkeys(("loss", "grad_norm", "filled_tokens", "scored_tokens"))
    assert read_window(clear_window(state.window), SOURCES) == empty != read_window(state.window, SOURCES)


def test_a_window_follows_its_sources_by_name():
    state = train_step()(initial_state(), make_batch(), LR)
    before = read_window(state.window, SOURCES)
    wanted = ("web", "wiki", "code")
    after = read_window(window_for(state.window, SOURCES, wanted), wanted)
    assert after == before | {"source_loss": {name: before["source_loss"].get(name) for name in wanted}}
    assert after["source_loss"]["web"] != after["source_loss"]["code"]


def test_a_window_counts_beyond_what_float32_can():
    state = initial_state()
    start = np.float32(2**24)  # the next float32 is two away
    window = state.window._replace(
        tokens_S2=np.array([[start, 0], [0, 0], [0, 0]], np.float32),
        nats_S2=np.array([[start, 0], [0, 0], [0, 0]], np.float32),
    )
    state = state._replace(window=window)
    batch = make_batch()
    batch = batch._replace(loss_mask_ABT=np.zeros_like(batch.loss_mask_ABT))
    batch.loss_mask_ABT[0, 0, 0] = True  # one token of code each time
    for _ in range(5):
        state = train_step()(state, batch, np.float32(0))
    assert np.asarray(state.window.tokens_S2, np.float64)[0].sum() == 2**24 + 5
    expected = 5 * numpy_nats(state.params, batch)[0, 0]
    assert np.asarray(state.window.nats_S2, np.float64)[0].sum() - 2**24 == pytest.approx(expected, rel=1e-6)


def test_micro_steps_change_gradient_and_row_by_rounding_only():
    (whole, whole_row), (split, split_row) = gradient(grad_clip=0), gradient(grad_clip=0, grad_accum=4)
    assert optax.tree.norm(whole) > 0.1
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(split), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)  # sums of at most 48 terms below 1, in another order
    assert whole_row["loss"] == pytest.approx(split_row["loss"], rel=1e-6)
    assert whole_row["grad_norm"] == pytest.approx(split_row["grad_norm"], rel=1e-5)
    for name in ("code", "web"):
        assert whole_row["source_loss"][name] == pytest.approx(split_row["source_loss"][name], rel=1e-6)


def test_the_gradient_is_that_of_the_mean_loss():
    """Against a central difference of the mean over valid tokens, along a random direction."""
    params, batch = init_params(CONFIG, 0), make_batch(4)
    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda p: rng.standard_normal(p.shape).astype(np.float32) * 0.01, params)

    def mean_loss(amount):
        moved = jax.tree.map(lambda p, d: p + np.float32(amount) * d, params, direction)
        return numpy_nats(moved, batch)[batch.loss_mask_ABT.reshape(ROWS, POSITIONS)].mean()

    slope = (mean_loss(0.1) - mean_loss(-0.1)) / 0.2
    pairs = zip(jax.tree.leaves(gradient(0, 4)[0]), jax.tree.leaves(direction), strict=True)
    along = sum(float((g * d).sum()) for g, d in pairs)
    assert abs(slope) > 1e-3
    assert along == pytest.approx(slope, rel=5e-3)  # float32 logits, a curved loss


def test_the_gradient_is_clipped_to_its_global_norm_and_the_row_tells_the_norm_before():
    whole, row = gradient(grad_clip=0)
    norm = math.sqrt(sum(float((np.asarray(g, np.float64) ** 2).sum()) for g in jax.tree.leaves(whole)))
    assert norm > 0.1 and row["grad_norm"] == pytest.approx(norm, rel=1e-5)
    clipped, clipped_row = gradient(grad_clip=0.05)
    untouched, _ = gradient(grad_clip=50.0)
    for w, c, u in zip(*map(jax.tree.leaves, (whole, clipped, untouched)), strict=True):
        np.testing.assert_allclose(c, w * (0.05 / norm), atol=1e-6)
        np.testing.assert_array_equal(u, w)
    assert clipped_row["grad_norm"] == row["grad_norm"]


def test_dropout_does_not_depend_on_the_micro_steps():
    model = transformer(replace(CONFIG, dropout=0.4))
    step = jax.jit(make_train_step(model, IDENTITY, len(SOURCES)))
    whole, split = (step(initial_state(IDENTITY), make_batch(a), np.float32(1), seed=np.uint32(5)) for a in (1, 4))
    plain = train_step(IDENTITY, 0.0)(initial_state(IDENTITY), make_batch(), np.float32(1))
    for a, b in zip(jax.tree.leaves(whole.params), jax.tree.leaves(split.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)  # sums of at most 48 terms, in another order
    loss, without = (read_window(s.window, SOURCES)["loss"] for s in (whole, plain))
    assert abs(loss - without) > 1e-3
    # Another step, or another seed, draws anew.
    at_7 = initial_state(IDENTITY)._replace(step=jnp.int32(7))
    later = step(at_7, make_batch(), np.float32(1), seed=np.uint32(5))
    other = step(initial_state(IDENTITY), make_batch(), np.float32(1), seed=np.uint32(6))
    assert len({read_window(s.window, SOURCES)["loss"] for s in (whole, later, other)}) == 3


def test_a_deterministic_step_has_no_dropout():
    step = make_train_step(transformer(replace(CONFIG, dropout=0.4)), IDENTITY, len(SOURCES), deterministic=True)
    after = jax.jit(step)(initial_state(IDENTITY), make_batch(), np.float32(1))
    plain = train_step(IDENTITY, 0.0)(initial_state(IDENTITY), make_batch(), np.float32(1))
    assert_trees_equal(after, plain)


def test_the_document_mask_reaches_the_model():
    batch = make_batch()
    segment_ids = np.zeros_like(batch.segment_ids_ABT)
    segment_ids[..., 3:] = 1
    segment_ids[0, 2, 4:] = -1  # two slots of padding
    batch = batch._replace(segment_ids_ABT=segment_ids)
    masked = jax.jit(make_train_step(MODEL, IDENTITY, len(SOURCES), document_mask=True))
    masked = read_window(masked(initial_state(IDENTITY), batch, np.float32(0)).window, SOURCES)
    joined = read_window(train_step(IDENTITY, 0.0)(initial_state(IDENTITY), batch, np.float32(0)).window, SOURCES)
    params, inputs = initial_state().params, batch.inputs_ABT[0]
    logits = np.asarray(forward(CONFIG, params, inputs, segment_ids[0]) @ head(params).T, np.float64)
    nats = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, batch.targets_ABT[0][..., None], -1)[..., 0]
    assert masked["loss"] == pytest.approx(nats[batch.loss_mask_ABT[0]].mean(), rel=1e-6)
    assert joined["loss"] != pytest.approx(masked["loss"], rel=1e-5)
    assert masked["filled_tokens"] == joined["filled_tokens"] == ROWS * POSITIONS - 2


def test_the_moving_average_against_a_loop():
    step = jax.jit(make_train_step(MODEL, ADAMW, len(SOURCES), ema_decay=0.3))
    state = jax.tree.map(jnp.asarray, init_state(init_params(CONFIG, 0), ADAMW, len(SOURCES), ema=True))
    expected = jax.tree.map(lambda p: np.asarray(p, np.float64), state.params)
    for i in range(4):
        state = step(state, make_batch(seed=i), LR)
        decay = [0.1, 2 / 11, 0.25, 0.3][i]  # (1 + i) / (10 + i) up to 0.3
        expected = jax.tree.map(lambda e, p: decay * e + (1 - decay) * np.asarray(p), expected, state.params)  # noqa: B023
    for e, average, p in zip(*map(jax.tree.leaves, (expected, state.ema, state.params)), strict=True):
        np.testing.assert_allclose(average, e, atol=1e-6)
        assert np.abs(average - p).max() > 1e-5
    empty = make_batch()._replace(loss_mask_ABT=np.zeros_like(make_batch().loss_mask_ABT))
    assert_trees_equal(step(state, empty, LR).ema, state.ema)  # a skipped update moves nothing


def test_training_goes_on_after_a_skipped_batch_as_if_it_had_not_been():
    """A batch without a valid token has no loss: 0/0."""
    step, good = train_step(), make_batch()
    empty = good._replace(loss_mask_ABT=np.zeros_like(good.loss_mask_ABT))
    once = step(initial_state(), good, LR)
    state = step(once, empty, LR)
    assert (int(state.step), int(state.skipped_updates)) == (2, 1)
    assert_trees_equal(_params_opt_window(state), _params_opt_window(once))
    state, other = step(state, make_batch(seed=9), LR), step(once, make_batch(seed=9), LR)
    assert (int(state.step), int(state.skipped_updates), int(other.step)) == (3, 1, 2)
    assert_trees_equal(_params_opt_window(state), _params_opt_window(other))


def test_a_finite_loss_with_an_infinite_gradient_is_skipped():
    """Tiny embeddings under a huge last norm: their products are moderate, the slope's square overflows."""
    state = initial_state()
    state.params["embed"]["embedding"] *= np.float32(1e-17)
    state.params["norm"]["scale"] *= np.float32(1e36)
    batch = make_batch()
    assert np.isfinite(numpy_nats(state.params, batch)).all()
    after = train_step()(state, batch, LR)
    assert int(after.skipped_updates) == 1
    assert_trees_equal(_params_opt_window(after), _params_opt_window(state))


def _params_opt_window(state):
    return state.params, state.opt_state, state.window


def test_one_program_whatever_the_rate_the_sources_and_the_window():
    num_traces = 0
    inner = make_train_step(MODEL, ADAMW, len(SOURCES), grad_clip=1.0)

    def counted(state, batch, lr):
        nonlocal num_traces
        num_traces += 1
        return inner(state, batch, lr)

    step, mesh = jax.jit(counted, donate_argnums=0), make_mesh(MeshConfig())
    state = place_state(mesh, init_state(init_params(CONFIG, 0), ADAMW, len(SOURCES)))
    for i, lr in enumerate(np.linspace(0, 1e-2, 5, dtype=np.float32)):
        batch = make_batch(seed=i)
        batch = batch._replace(source_ids_AB=np.full_like(batch.source_ids_AB, i % 3))
        state = step(state, place_batch(mesh, batch, batch.inputs_ABT.shape[1]), lr)
        assert read_window(state.window, SOURCES)["loss"] > 0
        state = state._replace(window=clear_window(state.window))
    assert int(state.step) == 5
    assert num_traces == 1
    assert step._cache_size() == 1  # nor was it compiled again for where its arguments lie


def test_the_rate_scales_the_update_and_training_learns():
    state, batch = initial_state(), make_batch()
    moved = {
        lr: jax.tree.map(jnp.subtract, train_step()(state, batch, np.float32(lr)).params, state.params)
        for lr in (0.0, 0.001, 0.002)
    }
    assert optax.tree.norm(moved[0.0]) == 0
    for one, two in zip(jax.tree.leaves(moved[0.001]), jax.tree.leaves(moved[0.002]), strict=True):
        np.testing.assert_allclose(2 * one, two, atol=3e-7)  # the difference of float32 near 1
    before = numpy_nats(state.params, batch)[batch.loss_mask_ABT[0]].mean()
    for _ in range(30):
        state = train_step()(state, batch, LR)
    assert numpy_nats(state.params, batch)[batch.loss_mask_ABT[0]].mean() < 0.7 * before
    assert before == pytest.approx(math.log(CONFIG.vocab_size), abs=0.1)


def test_the_same_step_twice_is_the_same_bit_for_bit():
    first, again = (train_step()(initial_state(), make_batch(2), LR) for _ in range(2))
    assert_trees_equal(first, again)
    assert (np.asarray(first.params["norm"]["scale"]) != 1).any()
