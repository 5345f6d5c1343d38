import math
import subprocess
import sys
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from curriculum.model.presets import ModelConfig
from curriculum.model.transformer import forward, init_params
from curriculum.train.mesh import make_mesh, place_batch, place_state
from curriculum.train.optimizer import OptimConfig, make_optimizer
from curriculum.train.step import clear_window, init_state, make_train_step, read_window
from phases.batches import Batch

CONFIG = ModelConfig(vocab_size=13, n_layer=1, n_head=2, n_kv_head=1, d_model=8, d_ff=12, max_seq_len=8)
SOURCES = ("code", "law", "web")  # law is never drawn below
ROWS, POSITIONS = 8, 6
LR = np.float32(0.01)


def make_batch(grad_accum=1, seed=0):
    """8 rows of 6 tokens; about a third of the targets, and all of row 3, are not scored."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, CONFIG.vocab_size, (ROWS, POSITIONS + 1), dtype=np.int32)
    loss_mask = rng.random((ROWS, POSITIONS)) < 0.7
    loss_mask[3] = False
    source_ids = np.array([0, 2, 2, 0, 2, 2, 2, 0], np.int32)
    split = partial(np.reshape, shape=(grad_accum, ROWS // grad_accum, -1))
    return Batch(
        inputs_ABT=split(tokens[:, :-1]),
        targets_ABT=split(tokens[:, 1:]),
        loss_mask_ABT=split(loss_mask),
        segment_ids_ABT=np.zeros_like(split(tokens[:, :-1])),
        source_ids_AB=split(source_ids)[..., 0] if False else source_ids.reshape(grad_accum, -1),
    )


def initial_state(optimizer=None):
    optimizer = optimizer or make_optimizer(OptimConfig())
    return jax.tree.map(jnp.asarray, init_state(init_params(CONFIG, 0), optimizer, len(SOURCES)))


@cache
def train_step(grad_clip=1.0):
    return jax.jit(make_train_step(CONFIG, make_optimizer(OptimConfig()), grad_clip, len(SOURCES)))


def plain_sgd_step(grad_clip):
    """The step whose update is the (clipped) gradient itself, at a rate of -1 added to the parameters."""
    optimizer = optax.identity()
    step = jax.jit(make_train_step(CONFIG, optimizer, grad_clip, len(SOURCES)))
    state = initial_state(optimizer)
    return lambda batch: jax.tree.map(jnp.subtract, step(state, batch, np.float32(1)).params, state.params)


def numpy_nats(params, batch):
    """Nats of every target, in float64 from the model's logits, [rows, positions]."""
    inputs, targets = (array.reshape(ROWS, POSITIONS) for array in (batch.inputs_ABT, batch.targets_ABT))
    logits = np.asarray(forward(CONFIG, params, inputs), np.float64)
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
    expected = {
        name: nats[source == i][mask[source == i]].mean() for i, name in enumerate(SOURCES) if name != "law"
    }
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
    assert read_window(state.window, SOURCES)["loss"] == pytest.approx(total_nats / total_tokens, rel=1e-6)


def test_an_empty_window_has_no_means():
    state = train_step()(initial_state(), make_batch(), LR)
    empty = {"loss": None, "source_loss": dict.fromkeys(SOURCES), "grad_norm": None}
    assert read_window(clear_window(state.window), SOURCES) == empty != read_window(state.window, SOURCES)


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
    assert state.window.tokens_S2.sum(-1, dtype=np.float32)[0] != 2**24 + 5
    assert np.asarray(state.window.tokens_S2, np.float64)[0].sum() == 2**24 + 5
    expected = 5 * numpy_nats(state.params, batch)[0, 0]
    assert np.asarray(state.window.nats_S2, np.float64)[0].sum() - 2**24 == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("grad_accum", [2, 4, 8])
def test_micro_steps_change_the_gradient_by_rounding_only(grad_accum):
    gradient = plain_sgd_step(grad_clip=0)
    whole, split = gradient(make_batch(1)), gradient(make_batch(grad_accum))
    assert optax.tree.norm(whole) > 0.1
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(split), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)  # sums of at most 48 terms below 1, in another order


def test_micro_steps_change_the_row_by_rounding_only():
    rows = [
        read_window(train_step()(initial_state(), make_batch(grad_accum), LR).window, SOURCES)
        for grad_accum in (1, 4)
    ]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-6)
    assert rows[0]["grad_norm"] == pytest.approx(rows[1]["grad_norm"], rel=1e-5)
    assert rows[0]["source_loss"] == pytest.approx(rows[1]["source_loss"], rel=1e-6)


def test_the_gradient_is_that_of_the_mean_loss():
    """Against central differences of the float64 mean, along a random direction."""
    params, batch = init_params(CONFIG, 0), make_batch(2)
    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda p: rng.standard_normal(p.shape).astype(np.float32) * 0.01, params)
    mask = batch.loss_mask_ABT.reshape(ROWS, POSITIONS)

    def mean_loss(amount):
        moved = jax.tree.map(lambda p, d: p + np.float32(amount) * d, params, direction)
        return numpy_nats(moved, batch)[mask].mean()

    slope = (mean_loss(0.5) - mean_loss(-0.5)) / 1.0
    gradient = plain_sgd_step(grad_clip=0)(batch)
    along = sum(float((g * d).sum()) for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True))
    assert abs(slope) > 1e-4
    assert along == pytest.approx(slope, rel=0.02)  # float32 logits and a curved loss


def test_the_gradient_is_clipped_to_its_global_norm():
    batch = make_batch()
    whole, half = plain_sgd_step(grad_clip=0)(batch), float(optax.tree.norm(plain_sgd_step(0)(batch))) / 2
    clipped, untouched = plain_sgd_step(grad_clip=half)(batch), plain_sgd_step(grad_clip=half * 3)(batch)
    assert float(optax.tree.norm(clipped)) == pytest.approx(half, rel=1e-5)
    for w, c, u in zip(*map(jax.tree.leaves, (whole, clipped, untouched)), strict=True):
        np.testing.assert_allclose(c, w / 2, atol=1e-7)
        np.testing.assert_array_equal(u, w)


def test_the_row_tells_the_norm_before_clipping():
    norms = [
        read_window(train_step(grad_clip)(initial_state(), make_batch(), LR).window, SOURCES)["grad_norm"]
        for grad_clip in (0, 0.01)
    ]
    expected = float(optax.tree.norm(plain_sgd_step(0)(make_batch())))
    assert norms == pytest.approx([expected, expected], rel=1e-5) and expected > 0.1


def planted_nan_state():
    state = initial_state()
    embedding = np.array(state.params["embed"]["embedding"])
    embedding[7] = np.nan
    state.params["embed"]["embedding"] = jnp.asarray(embedding)
    return state


def test_a_batch_that_is_not_finite_is_skipped():
    step, good = train_step(), make_batch()
    state = step(planted_nan_state(), good, LR)  # every logit row holds the NaN of token 7
    assert int(state.step) == 1 and int(state.skipped_updates) == 1
    assert_trees_equal((state.params, state.opt_state, state.window), _params_opt_window(planted_nan_state()))
    assert read_window(state.window, SOURCES)["loss"] is None


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
    def explode(params, key):  # the norm's square is above the largest float32
        return jax.tree.map(lambda array: array * np.float32(1e30) if array.ndim > 1 else array, params)

    state = initial_state()
    state = state._replace(
        params=state.params | {"norm": {"scale": state.params["norm"]["scale"] * np.float32(1e30)}}
    )
    before = _params_opt_window(state)
    batch = make_batch()
    assert np.isfinite(np.asarray(forward(CONFIG, state.params, batch.inputs_ABT[0]))).all()
    after = train_step()(state, batch, LR)
    assert int(after.skipped_updates) == 1
    assert_trees_equal(_params_opt_window(after), before)


def _params_opt_window(state):
    return state.params, state.opt_state, state.window


def test_one_program_whatever_the_rate_the_sources_and_the_window():
    num_traces = 0
    inner = make_train_step(CONFIG, make_optimizer(OptimConfig()), 1.0, len(SOURCES))

    def counted(state, batch, lr):
        nonlocal num_traces
        num_traces += 1
        return inner(state, batch, lr)

    step, mesh = jax.jit(counted, donate_argnums=0), make_mesh()
    state = place_state(mesh, init_state(init_params(CONFIG, 0), make_optimizer(OptimConfig()), len(SOURCES)))
    for i, lr in enumerate(np.linspace(0, 1e-2, 5, dtype=np.float32)):
        batch = make_batch(seed=i)
        batch = batch._replace(source_ids_AB=np.full_like(batch.source_ids_AB, i % 3))
        state = step(state, place_batch(mesh, batch), lr)
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


@pytest.mark.skipif(sys.platform != "linux", reason="page faults are counted as Linux does, malloc is glibc's")
def test_freed_blocks_stay_with_the_process_in_every_thread():
    program = """
import ctypes, platform, resource, sys, threading
from curriculum.train.step import tune_malloc
if platform.libc_ver()[0] != "glibc":
    sys.exit("no glibc")
if sys.argv[1] == "tuned":
    tune_malloc()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def touch():
    block = libc.malloc(200 << 20)
    ctypes.memset(block, 1, 200 << 20)
    libc.free(block)
def run():
    touch()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    touch()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
run()
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""
    faults = {}
    for setting in ("tuned", "plain"):
        done = subprocess.run([sys.executable, "-c", program, setting], capture_output=True, text=True)
        if "no glibc" in done.stderr:
            pytest.skip("not glibc")
        assert done.returncode == 0, done.stderr
        faults[setting] = [int(line) for line in done.stdout.split()]
    assert len(faults["tuned"]) == 2
    assert max(faults["tuned"]) < 100 < min(faults["plain"])
