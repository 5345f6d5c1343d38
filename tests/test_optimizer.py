"""The optimizers: each rule against numpy, what muon takes, what is decayed, resumed, refused."""

import json
import math
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import compare_optimizers as tool
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compared_runs import saved_arrays

from curriculum.config import build_config, load_config
from curriculum.errors import InputError
from curriculum.evaluate import evaluate
from curriculum.model.presets import PRESETS, ModelConfig
from curriculum.model.transformer import forward, head, init_params, transformer
from curriculum.run import load_run
from curriculum.train.optimizer import (
    OPTIMIZERS,
    AdamConfig,
    LionConfig,
    MuonConfig,
    OptimConfig,
    Rule,
    SophiaConfig,
    make_optimizer,
    matrices,
    muon_partition,
    state_layout,
)
from curriculum.train.sophia import scale_by_sophia
from curriculum.train.step import init_state, make_train_step
from curriculum.train.trainer import train
from curriculum.views.inspection import inspect_run
from phases.batches import Batch

TINY = ModelConfig(vocab_size=13, n_layer=1, n_head=2, n_kv_head=1, d_model=8, d_ff=12, max_seq_len=8)
MUON_LION = OptimConfig(name="muon", muon=MuonConfig(rest="lion"))
EACH = {
    "adamw": OptimConfig(),
    "nesterov": OptimConfig(adam=AdamConfig(nesterov=True)),
    "lion": OptimConfig(name="lion"),
    "muon": OptimConfig(name="muon"),
    "muon with lion": MUON_LION,
    "sophia": OptimConfig(name="sophia", sophia=SophiaConfig(every=2)),
}
each = pytest.mark.parametrize("config", EACH.values(), ids=EACH)


def run_rule(config, params, gradients, hessians=()):
    """The updates of a few steps at a rate of 1, the parameters left where they are; all by name."""

    def float32(tree):
        return {name: jnp.asarray(array, jnp.float32) for name, array in tree.items()}

    optimizer, params, out = make_optimizer(config), float32(params), []

    @jax.jit
    def update(gradient, state, hessian):
        return optimizer.update(gradient, state, params, hessian_diagonal=lambda: hessian)

    state = optimizer.init(params)
    for gradient, hessian in zip(gradients, hessians or gradients, strict=True):
        updates, state = update(float32(gradient), state, float32(hessian))
        out.append(updates)
    return out


@pytest.mark.parametrize("nesterov", [False, True])
def test_adamw_by_the_formula(nesterov):
    b1, b2, eps, decay = 0.8, 0.9, 1e-3, 0.5
    config = OptimConfig(b1=b1, b2=b2, eps=eps, weight_decay=decay, adam=AdamConfig(nesterov))
    gradients = [0.25, -2.0, 1.0]
    updates = run_rule(config, {"w": [[3.0]]}, [{"w": [[g]]} for g in gradients])
    first_moment = second_moment = 0.0
    for step, (gradient, update) in enumerate(zip(gradients, updates, strict=True), start=1):
        first_moment = b1 * first_moment + (1 - b1) * gradient
        second_moment = b2 * second_moment + (1 - b2) * gradient**2
        unbiased = first_moment / (1 - b1**step)
        if nesterov:  # Dozat 2016, with a constant decay
            unbiased = b1 * first_moment / (1 - b1 ** (step + 1)) + (1 - b1) * gradient / (1 - b1**step)
        expected = -(unbiased / (math.sqrt(second_moment / (1 - b2**step)) + eps) + decay * 3.0)
        assert float(update["w"][0, 0]) == pytest.approx(expected, rel=1e-5)  # float32


def test_lion_by_the_formula():
    b1, b2, decay = 0.6, 0.7, 0.5
    config = OptimConfig(name="lion", weight_decay=decay, lion=LionConfig(b1, b2))
    gradients = [1.0, -0.5, -0.05, -5.0, 0.1]
    updates = run_rule(config, {"w": [[3.0]], "v": [3.0]}, [{"w": [[g]], "v": [g]} for g in gradients])
    momentum, signs = 0.0, []
    for gradient, update in zip(gradients, updates, strict=True):
        signs.append(np.sign(b1 * momentum + (1 - b1) * gradient))
        momentum = b2 * momentum + (1 - b2) * gradient
        assert float(update["v"][0]) == -signs[-1]
        assert float(update["w"][0, 0]) == pytest.approx(-signs[-1] - decay * 3.0)
    assert signs == [1, -1, 1, -1, -1]  # neither the gradient's sign nor the momentum's


def newton_schulz(matrix, num_steps):
    """The singular values of a matrix divided by its norm, through the quintic polynomial; float64."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values /= np.sqrt((values**2).sum())
    for _ in range(num_steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ np.diag(values) @ right


@pytest.mark.parametrize("own", [MuonConfig(), MuonConfig(2.0, 3.0, None, momentum=0.6, ns_steps=3, nesterov=False)])
def test_muon_by_the_formula(own):
    rng = np.random.default_rng(0)
    config = OptimConfig(name="muon", weight_decay=0.5, muon=own)
    kernels = {str(shape): rng.normal(size=shape) for shape in ((6, 4), (4, 6), (5, 5))}
    gradients = [{name: rng.normal(size=kernel.shape) for name, kernel in kernels.items()} for _ in range(3)]
    updates = run_rule(config, kernels, gradients)
    for name, kernel in kernels.items():
        momentum, b = np.zeros(kernel.shape), own.momentum
        for step in range(3):
            gradient, t = gradients[step][name], step + 1
            momentum = b * momentum + (1 - b) * gradient
            ahead = momentum / (1 - b**t)
            if own.nesterov:
                ahead = b * momentum / (1 - b ** (t + 1)) + (1 - b) * gradient / (1 - b**t)
            direction = newton_schulz(ahead, own.ns_steps)
            if own.consistent_rms is None:
                direction *= math.sqrt(max(1, kernel.shape[1] / kernel.shape[0]))
            else:
                direction *= own.consistent_rms * math.sqrt(max(kernel.shape))
            expected = -own.lr_scale * (direction + 0.5 * own.weight_decay_mult * kernel)
            np.testing.assert_allclose(updates[step][name], expected, rtol=0, atol=2e-5)  # float32 products


def test_sophia_by_the_formula():
    own = SophiaConfig(b1=0.6, b2=0.5, gamma=0.25, eps=1e-2, every=2)
    config = OptimConfig(name="sophia", weight_decay=0.5, sophia=own)
    gradients = np.array([[4.0, 0.1, -0.02], [-1.0, 0.2, 0.01], [0.5, 0.3, 0.0], [0.5, -3.0, 0.02]])[:, None]
    hessians = np.array([[2.0, 1.0, 0.0], [9.0, 9.0, 9.0], [4.0, 8.0, 0.0], [7.0, 7.0, 7.0]])[:, None]
    updates = run_rule(config, {"w": np.full((1, 3), 3.0)}, [{"w": g} for g in gradients], [{"w": h} for h in hessians])
    momentum, hessian, clipped = np.zeros((1, 3)), np.zeros((1, 3)), 0
    for step, update in enumerate(updates):
        momentum = 0.6 * momentum + 0.4 * gradients[step]
        if step in (0, 2):
            hessian = 0.5 * hessian + 0.5 * hessians[step]
        ratio = momentum / np.maximum(0.25 * hessian, 1e-2)
        clipped += (np.abs(ratio) > 1).sum()
        np.testing.assert_allclose(update["w"], -np.clip(ratio, -1, 1) - 0.5 * 3.0, rtol=1e-5)
    assert 3 <= clipped <= 9  # of 12: both sides of the clip are seen


def test_sophia_estimates_every_k_updates_inside_one_compiled_step():
    rule = scale_by_sophia(0.9, 0.99, 0.05, 1e-12, every=3)
    params = {"w": jnp.ones((2, 2))}
    estimated_at, traces = [], []

    @jax.jit
    def update(state, step):
        traces.append(1)

        def estimate():
            jax.debug.callback(lambda s: estimated_at.append(int(s)), step)
            return params

        return rule.update(params, state, params, hessian_diagonal=estimate)[1]

    state = rule.init(params)
    for step in range(8):
        state = update(state, jnp.int32(step))
    jax.effects_barrier()
    assert estimated_at == [0, 3, 6] and len(traces) == 1
    assert int(state.count) == 8 and state.count.dtype == jnp.int32


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_an_estimate_that_is_not_finite_is_left_out(wrong):
    rule = scale_by_sophia(0.9, 0.5, 0.05, 1e-12, every=1)
    params = {"v": jnp.ones(3), "w": jnp.ones((2, 2))}
    _, state = rule.update(params, rule.init(params), params, hessian_diagonal=lambda: params)
    broken = params | {"v": jnp.array([1.0, wrong, 1.0])}
    _, after = rule.update(params, state, params, hessian_diagonal=lambda: broken)
    for name in params:
        np.testing.assert_array_equal(after.hessian[name], np.full(params[name].shape, 0.5))
    assert int(after.count) == 2 and float(after.momentum["v"][1]) == pytest.approx(0.19)


def make_batch(grad_accum=1, num_rows=8, num_positions=6):
    """Counting upwards from a token that differs by row: easy to learn. A third of the targets are not scored."""
    rng = np.random.default_rng(0)
    tokens = (rng.integers(0, 13, (num_rows, 1)) + np.arange(num_positions + 1)).astype(np.int32) % 13
    tokens = tokens.reshape(grad_accum, num_rows // grad_accum, -1)
    mask = (rng.random((num_rows, num_positions)) < 0.7).reshape(grad_accum, -1, num_positions)
    zeros_AB = np.zeros(tokens.shape[:2], np.int32)
    return Batch(tokens[..., :-1], tokens[..., 1:], mask, np.zeros_like(tokens[..., 1:]), zeros_AB)


def test_the_steps_estimate_is_what_the_hessian_is_on_average():
    """Its mean over many draws, against the Gauss-Newton diagonal: what Algorithm 2 of arXiv:2305.14342 estimates."""

    def update(grads, state, params=None, *, hessian_diagonal, **_):
        return grads, hessian_diagonal()

    params = jax.tree.map(jnp.asarray, init_params(TINY, 0))
    optimizer = optax.GradientTransformationExtraArgs(lambda params: jax.tree.map(jnp.zeros_like, params), update)
    step, batch = make_train_step(transformer(TINY), optimizer, 1), make_batch(grad_accum=2)
    state = jax.tree.map(jnp.asarray, init_state(params, optimizer, 1))

    @jax.jit
    def draws():
        return jax.lax.map(
            lambda n: step(state._replace(step=n), batch, 0.0).opt_state["norm"]["scale"], jnp.arange(400)
        )

    # By hand: sum over v of p(v) (d logit(v) - mean over p of d logit)^2, averaged over the scored tokens.
    def logits(scale_D):
        return forward(TINY, params | {"norm": {"scale": scale_D}}, batch.inputs_ABT.reshape(8, 6)) @ head(params).T

    @jax.jit
    def gauss_newton(scale_D):
        jacobian_BTVD, p_BTV = jax.jacobian(logits)(scale_D), jax.nn.softmax(logits(scale_D))
        centred_BTVD = jacobian_BTVD - jnp.einsum("btv,btvd->btd", p_BTV, jacobian_BTVD)[:, :, None]
        return jnp.einsum("btv,btvd->btd", p_BTV, centred_BTVD**2)[batch.loss_mask_ABT.reshape(8, 6)].mean(axis=0)

    expected_D = gauss_newton(params["norm"]["scale"])
    draws_ND = np.asarray(draws())
    assert (expected_D > 0).all() and not np.array_equal(draws_ND[0], draws_ND[1])
    # The square of a sum of some 34 independent terms: each mean has a relative deviation of sqrt(2 / 400) = 7 %.
    np.testing.assert_allclose(draws_ND.mean(axis=0), expected_D, rtol=0.28)


def names_of(labels, kind):
    leaves = jax.tree.leaves_with_path(labels)
    return {jax.tree_util.keystr(path, simple=True, separator="/") for path, label in leaves if label == kind}


@pytest.mark.parametrize("preset", PRESETS)
def test_muon_takes_the_projections_of_every_preset(preset):
    narrow = {"n_layer": 2, "vocab_size": 64, "d_model": 2 * PRESETS[preset].n_head, "d_ff": 8, "max_seq_len": 16}
    config = replace(PRESETS[preset], **narrow)
    for tied in (True, False):
        params = init_params(replace(config, tie_embeddings=tied), 0)
        all_2d = {name for name in names_of(jax.tree.map(lambda a: a.ndim, params), 2)}
        outside = {"embed/embedding"} | ({"positions/embedding"} if config.pos_encoding == "learned" else set())
        outside |= set() if tied else {"head/kernel"}
        projections = {name for name in all_2d if name.startswith("blocks/")}
        assert len(projections) == config.n_layer * (7 if config.mlp_type == "swiglu" else 6)
        assert projections | outside == all_2d
        assert names_of(muon_partition(params, MuonConfig()), "muon") == projections
        assert names_of(muon_partition(params, MuonConfig(allow_all_2d=True)), "muon") == all_2d
        with_tied = names_of(muon_partition(params, MuonConfig(allow_tied_embed=True)), "muon")
        assert with_tied == projections | ({"embed/embedding"} if tied else set())


def test_muon_goes_by_shape_and_by_three_names_in_a_model_of_ones_own():
    matrix = jnp.ones((3, 2))
    params = {
        "embedder": {"w": matrix}, "embed": [matrix, jnp.ones(2)], "scan": {"kernels": jnp.ones((4, 3, 2))},
        "rows": (matrix, jnp.ones(3)), "lm": {"head": {"w": matrix}}, "decay": jnp.float32(1),
    }  # fmt: skip
    labels = muon_partition(params, MuonConfig())
    assert jax.tree.structure(labels) == jax.tree.structure(params)
    assert names_of(labels, "muon") == {"embedder/w", "rows/0"}
    assert len(names_of(labels, "rest")) == 6
    with pytest.raises(InputError, match="muon has nothing to do: no array .*allow_all_2d: true"):
        make_optimizer(OptimConfig(name="muon")).init({"embed": matrix, "norm": jnp.ones(3)})


@each
def test_only_matrices_decay(config):
    params = {"scale": jnp.full(3, 2.0), "kernel": jnp.full((3, 2), 2.0), "embed": jnp.full((5, 3), 2.0)}
    assert matrices(params) == {"scale": False, "kernel": True, "embed": True}
    config = replace(config, weight_decay=0.25, muon=replace(config.muon, weight_decay_mult=3.0, lr_scale=5.0))
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates = run_rule(config, params, [zeros], [zeros])[0]
    np.testing.assert_array_equal(updates["scale"], np.zeros(3))
    np.testing.assert_array_equal(updates["kernel"], np.full((3, 2), -7.5 if config.name == "muon" else -0.5))
    np.testing.assert_array_equal(updates["embed"], np.full((5, 3), -0.5))


@each
def test_moments_stand_under_the_keys_of_the_parameters(config):
    params = init_params(TINY, 0)
    state = make_optimizer(config).init(params)
    paths = {jax.tree_util.keystr(path, simple=True, separator="/"): p for path, p in jax.tree.leaves_with_path(params)}
    num_moments = dict.fromkeys(paths, 0)
    for path, array in jax.tree.leaves_with_path(state):
        here = jax.tree_util.keystr(path, simple=True, separator="/")
        owner = [name for name in paths if here.endswith("/" + name)]
        if owner:
            assert array.shape == paths[owner[0]].shape
            num_moments[owner[0]] += 1
        else:
            assert array.size <= 3  # counts, and the coefficients of muon's polynomial
    kernel, norm = "blocks/000/mlp/up/kernel", "norm/scale"
    expected = {"adamw": (2, 2), "lion": (1, 1), "muon": (1, 2), "sophia": (2, 2)}[config.name]
    expected = (1, 1) if config == MUON_LION else expected
    assert (num_moments[kernel], num_moments[norm]) == expected and min(num_moments.values()) >= 1


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "web.jsonl"
    words = "the quick brown fox jumps over a lazy dog".split()
    rng = np.random.default_rng(0)
    file.write_text("".join(json.dumps({"text": " ".join(rng.choice(words, 30))}) + "\n" for _ in range(120)))
    return file


def run_config(text, **optim):
    return build_config(
        {
            "tokenizer": {"kind": "byte"},
            "model": {"preset": "tiny", "n_layer": 1, "d_model": 16, "n_head": 2, "n_kv_head": 1, "d_ff": 24},
            "sources": {"web": {"path": str(text), "held_out": "10%"}},
            "phases": [{"name": "all", "until": "end", "mixture": {"web": 1.0}}],
            "evalsets": {"primary": {"held_out_of": "web", "max_sequences": 4}},
            "train": {"steps": 7, "batch_size": 4, "seq_len": 16},
            "optim": {"lr": 1e-2, "schedule": "constant", **optim},
            "checkpoint": {"every": 3},
            "logging": {"every": 1, "tensorboard": False},
        }
    )


@pytest.mark.parametrize(
    ("optim", "other", "told"),
    [
        ({"adam": {"nesterov": True}}, {"name": "muon"}, "optim.name: got muon, but the run's .* belongs to adamw"),
        ({"name": "lion"}, {}, "optim.name: got adamw, but the run's optimizer state belongs to lion"),
        (
            {"name": "muon"},
            {"name": "muon", "muon": {"rest": "lion"}},
            "optim.muon.rest: got lion, but the run's .* belongs to adamw",
        ),
        ({"name": "sophia", "sophia": {"every": 2}}, {"name": "lion"}, "got lion, but .* belongs to sophia"),
    ],
)
def test_each_learns_and_resumes_bit_for_bit(text, tmp_path, optim, other, told):
    config = run_config(text, **optim)
    train(config, tmp_path, store_dir=text.parent)
    whole, losses = saved_arrays(tmp_path / "checkpoints/7"), [row["loss"] for row in load_run(tmp_path).metrics]
    assert losses[0] == pytest.approx(math.log(257), abs=0.05) and losses[-1] < losses[0] - 0.1
    with pytest.raises(InputError, match=told):
        train(run_config(text, **other), tmp_path, resume=3, store_dir=text.parent)

    assert train(config, tmp_path, resume=3, store_dir=text.parent)["skipped_updates"] == 0
    assert saved_arrays(tmp_path / "checkpoints/7") == whole
    assert losses == [row["loss"] for row in load_run(tmp_path).metrics] and len(losses) == 7
    # Step 3 is between two of sophia's estimates.
    assert [event["step"] for event in load_run(tmp_path).events if event["event"] == "resume"] == [3]


def test_every_optimizer_and_every_key_is_in_its_tables():
    """Else plan would take it for one of the user's own, or a key would be accepted that nobody reads."""
    assert all(rule.moments is not None for rule in OPTIMIZERS.values())
    read_by_all = ["name", "weight_decay", "grad_clip"]
    assert sorted([*read_by_all, *{key for rule in OPTIMIZERS.values() for key in rule.reads}]) == sorted(
        f.name for f in fields(OptimConfig)
    )


def test_two_optimizers_may_read_one_key(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "mine", Rule(OPTIMIZERS["adamw"].make, reads=("b1", "eps")))
    told = "applies to adamw and mine only, but the optimizer is lion; leave it out"
    assert OptimConfig(name="lion", b1=0.5).problems() == [("b1", told)]
    assert OptimConfig(name="mine", b1=0.5).problems() == []
    assert [key for key, _ in OptimConfig(name="mine", b2=0.5, lion=LionConfig(b1=0.5)).problems()] == ["b2", "lion"]
    monkeypatch.setitem(OPTIMIZERS, "mine", Rule(OPTIMIZERS["adamw"].make))  # which keys it reads is not known
    assert OptimConfig(name="mine", b2=0.5, lion=LionConfig(b1=0.5)).problems() == []


def test_what_is_not_as_known_as_the_rules_here(monkeypatch):
    muon = OptimConfig(name="muon")
    assert muon.users_own is None and OptimConfig().users_own is None
    monkeypatch.setitem(OPTIMIZERS, "same", OPTIMIZERS["adamw"])  # the command line does not know the name
    assert OptimConfig(name="same").users_own == "same"
    monkeypatch.setitem(OPTIMIZERS, "adamw", Rule(OPTIMIZERS["adamw"].make))
    assert muon.users_own == OptimConfig().users_own == "adamw"
    monkeypatch.setitem(OPTIMIZERS, "mine", OPTIMIZERS["lion"].make)
    with pytest.raises(InputError, match=r"OPTIMIZERS\['mine'\]: got <function lion.*>, expected Rule\(FUNCTION\)"):
        muon.problems()


def test_settings_that_change_which_arrays_the_state_has_are_in_its_layout():
    params = {"embed": {"embedding": jnp.ones((5, 3))}, "up": jnp.ones((3, 4)), "norm": jnp.ones(3)}
    muon = OptimConfig(name="muon")
    changes = [{"rest": "lion"}, {"allow_all_2d": True}, {"allow_tied_embed": True}]
    others = [replace(muon, muon=MuonConfig(**change)) for change in changes]
    states = [jax.tree.structure(make_optimizer(config).init(params)) for config in (muon, *others)]
    assert all(states[0] != other for other in states[1:])
    assert all(state_layout(muon) != state_layout(config) for config in others)
    for config, same in ((muon, MuonConfig(momentum=0.5)), (OptimConfig(), MuonConfig(rest="lion"))):
        assert state_layout(config) == state_layout(replace(config, muon=same))


def test_an_optimizer_of_ones_own_is_one_function_in_the_table(text, tmp_path, monkeypatch):
    step_size = 1.0

    def first(params):
        return jax.tree.map(jnp.zeros_like, params)

    def moved(updates, state, params=None, **_):
        state = jax.tree.map(lambda update, trace: update + 0.5 * trace, updates, state)
        return jax.tree.map(lambda trace: -step_size * trace, state), state

    def momentum(config):
        return optax.GradientTransformationExtraArgs(first, moved)  # equal each time

    with pytest.raises(
        InputError, match=r"optim.name: no such optimizer; did you mean 'muon'\? \(optimizers: adamw, l"
    ):
        run_config(text, name="momuon")
    monkeypatch.setitem(OPTIMIZERS, "momentum", Rule(momentum))
    config = run_config(text, name="momentum", b1=0.5, lr=0.1)
    assert train(config, tmp_path / "run", store_dir=text.parent)["total_steps"] == 7
    losses = [row["loss"] for row in load_run(tmp_path / "run").metrics]
    assert losses[-1] < losses[0]
    step_size = 0.0  # what it reads has changed, though it is the same function
    train(config, tmp_path / "changed", store_dir=text.parent)
    assert [row["loss"] for row in load_run(tmp_path / "changed").metrics] != losses
    step_size = 1.0
    updates = run_rule(config.optim, {"w": [[3.0]]}, [{"w": [[1.0]]}, {"w": [[1.0]]}])
    assert [float(u["w"][0, 0]) for u in updates] == [-1.0, -1.5]
    assert build_config(config.to_json()) == config
    del OPTIMIZERS["momentum"]  # as in another process, where the run can be read and measured, but not trained
    assert evaluate(tmp_path / "run", store_dir=text.parent).step == 7
    with pytest.raises(InputError, match=r"optim.name: no such optimizer"):
        train(load_run(tmp_path / "run").config, tmp_path / "other", store_dir=text.parent)
    assert not (tmp_path / "other").exists()


def test_what_a_rule_makes_is_a_chain_of_optax(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "five", Rule(lambda config: 5))
    with pytest.raises(InputError, match=r"OPTIMIZERS\['five'\]: its function gave 5, expected a chain of optax"):
        make_optimizer(OptimConfig(name="five"))


def test_what_goes_on_with_an_optimizer_of_ones_own_is_a_call(text, tmp_path, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "plain", Rule(lambda config: optax.scale(-1.0)))
    (tmp_path / "c.json").write_text(json.dumps(run_config(text, name="plain").to_json()))
    train(load_config(tmp_path / "c.json"), tmp_path / "run", store_dir=text.parent)
    told = (tmp_path / "run/train.log").read_text()
    given = "from Python, with a higher train.steps and 'plain' in OPTIMIZERS"
    assert "resume='latest'" in told and f"{given}\n" in told
    del OPTIMIZERS["plain"]
    assert inspect_run(load_run(tmp_path / "run"))["commands"]["train longer"].endswith(given)
    assert "make_model" not in told
    with pytest.raises(InputError, match="optim.name: no such optimizer.* one of your own goes into OPTIMIZERS of"):
        load_config(tmp_path / "run/config.yaml")


@pytest.mark.parametrize(
    ("optim", "told"),
    [
        ({"b1": 0.9999999999}, "optim.b1: got 0.9999999999, expected 0 to 0.9999999"),
        ({"grad_clip": 1e-60}, "optim.grad_clip: got 1e-60, expected 0, or 1.2e-38 to 3.4e+38"),
        ({"eps": 1e-60}, "optim.eps: got 1e-60, expected 1.2e-38 to 3.4e+38"),
        ({"b2": -0.1}, "optim.b2: got -0.1, expected 0 to 0.9999999"),
        ({"eps": 1e39}, "optim.eps: got 1e+39, expected 1.2e-38 to 3.4e+38"),
        ({"grad_clip": 1e39}, "optim.grad_clip: got 1e+39, expected 0, or 1.2e-38 to 3.4e+38"),
        ({"weight_decay": -1.0}, "optim.weight_decay: got -1.0, expected 0 to 100"),
        ({"grad_clip": -1.0}, "optim.grad_clip: got -1.0, expected 0, or 1.2e-38 to 3.4e+38"),
        ({"name": "lion", "lion": {"b1": 1.0}}, "optim.lion.b1: got 1.0, expected 0 to 0.9999999"),
        ({"name": "lion", "lion": {"b2": -1.0}}, "optim.lion.b2: got -1.0, expected 0 to 0.9999999"),
        ({"name": "lion", "lion": {"beta1": 0.9}}, "optim.lion.beta1: no such key"),
        ({"name": "muon", "muon": {"lr_scale": 0.0}}, "optim.muon.lr_scale: got 0.0, expected 1e-06 to 1000"),
        ({"name": "muon", "muon": {"weight_decay_mult": -1.0}}, "weight_decay_mult: got -1.0, expected 0 to 100"),
        ({"name": "muon", "muon": {"consistent_rms": 0.0}}, "consistent_rms: got 0.0, expected 1.2e-38 to 3.4e+38"),
        ({"name": "muon", "muon": {"momentun": 0.9}}, "optim.muon.momentun: no such key; did you mean 'momentum'?"),
        ({"name": "muon", "muon": {"momentum": 1.0}}, "optim.muon.momentum: got 1.0, expected 0 to 0.9999999"),
        ({"name": "muon", "muon": {"ns_steps": 0}}, "optim.muon.ns_steps: got 0, expected 1 to 20"),
        ({"name": "muon", "muon": {"ns_steps": 21}}, "optim.muon.ns_steps: got 21, expected 1 to 20"),
        ({"name": "muon", "muon": {"lr_scale": 1000.5}}, "optim.muon.lr_scale: got 1000.5, expected 1e-06 to 1000"),
        ({"weight_decay": 100.5}, "optim.weight_decay: got 100.5, expected 0 to 100"),
        ({"name": "sophia", "sophia": {"every": 10**9 + 1}}, "optim.sophia.every: got 1000000001, expected 1 to 1000000000"),
        ({"name": "muon", "muon": {"ns_steps": 2.5}}, "optim.muon.ns_steps: got 2.5, expected an integer"),
        ({"name": "muon", "muon": {"rest": "sophia"}}, "optim.muon.rest: got \"sophia\", expected 'adamw' or 'lion'"),
        ({"name": "sophia", "sophia": {"b1": 1.0}}, "optim.sophia.b1: got 1.0, expected 0 to 0.9999999"),
        ({"name": "sophia", "sophia": {"b2": 1.0}}, "optim.sophia.b2: got 1.0, expected 0 to 0.9999999"),
        ({"name": "sophia", "sophia": {"gamma": 0.0}}, "optim.sophia.gamma: got 0.0, expected 1.2e-38 to 3.4e+38"),
        ({"name": "sophia", "sophia": {"eps": 0.0}}, "optim.sophia.eps: got 0.0, expected 1.2e-38 to 3.4e+38"),
        ({"name": "sophia", "sophia": {"every": 0}}, "optim.sophia.every: got 0, expected 1 to 1000000000"),
        ({"lion": {"b1": 0.8}}, "optim.lion: applies to lion only, but the optimizer is adamw; leave it out"),
        ({"name": "lion", "b2": 0.99}, "optim.b2: applies to adamw only, but the optimizer is lion; leave it out"),
        ({"name": "sophia", "muon": {"momentum": 0.9}}, "optim.muon: applies to muon only, but the optimizer is sophia"),
        ({"name": "muon", "sophia": {"every": 5}}, "optim.sophia: applies to sophia only, but the optimizer is muon with"),
        ({"name": "muon", "muon": {"rest": "lion"}, "adam": {"nesterov": True}}, "optim.adam: applies to adamw only, but"),
        ({"name": "muon", "lion": {"b1": 0.8}}, "optim.lion: applies to lion only, but the optimizer is muon with adamw"),
        ({"muon": {"rest": "lion"}, "lion": {"b1": 0.8}}, "optim.lion: applies to lion only, but the optimizer is adamw"),
    ],
)  # fmt: skip
def test_a_problem_names_its_key(text, optim, told):
    with pytest.raises(InputError) as error:
        run_config(text, **optim)
    assert any(told in problem for problem in error.value.problems), error.value.problems


@pytest.mark.parametrize(
    "optim",
    [
        {"b1": 0.0, "b2": 0.0, "weight_decay": 0.0, "grad_clip": 0.0},
        {"name": "lion", "lion": {"b1": 0.0, "b2": 0.0}, "b1": 0.9, "muon": {"rest": "adamw"}},
        {"name": "muon", "muon": {"consistent_rms": None, "weight_decay_mult": 0.0, "momentum": 0.0, "ns_steps": 1}},
        {"name": "muon", "muon": {"allow_tied_embed": True}, "b1": 0.5, "adam": {"nesterov": True}},
        {"name": "muon", "muon": {"rest": "lion"}, "lion": {"b1": 0.5}},
        {"name": "sophia", "sophia": {"b1": 0.0, "b2": 0.0, "every": 1}},
        {
            "name": "muon",
            "muon": {"weight_decay_mult": 100.0, "ns_steps": 20, "lr_scale": 1000.0},
            "weight_decay": 100.0,
        },
        {"name": "sophia", "sophia": {"every": 10**9}},
    ],
)
def test_the_edges_are_fine(text, optim):
    config = run_config(text, **optim)
    assert config.optim.problems() == [] and build_config(config.to_json()) == config


def test_infinities_are_refused_in_library_use():
    config = OptimConfig(eps=math.inf, weight_decay=math.inf, grad_clip=math.nan, b1=math.nan)
    assert {path for path, _ in config.problems()} == {"eps", "weight_decay", "grad_clip", "b1"}


def test_a_tied_embedding_is_asked_for_only_where_there_is_one(text):
    data = run_config(text, name="muon", muon={"allow_tied_embed": True}).to_json()
    data["model"]["tie_embeddings"] = False
    with pytest.raises(InputError, match="optim.muon.allow_tied_embed: the model has a separate head"):
        build_config(data)


def test_the_settings_need_no_jax():
    program = "import sys, curriculum.train.optimizer; print([m for m in ('jax', 'optax') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_tool_compares_at_equal_tokens(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("small.json").write_text(json.dumps(run_config(text).to_json()))  # JSON is YAML
    arguments = ["--config", "small.json", "--steps", "4", "--seeds", "1", "--optimizers", "adamw", "lion"]
    tool.main([*arguments, "--output-dir", "out", "--json", "out.json"])

    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert table[0][:4] == ["optimizer", "lr", "val", "time of a step / adamw's"] and len(table) == 4
    results = json.loads(Path("out.json").read_text())["results"]
    assert [r["optimizer"] for r in results] == [row[0] for row in table[2:]] == ["adamw", "lion"]
    assert [r["tokens"] for r in results] == [4 * 4 * 16] * 2
    assert [r["state_bytes_per_parameter"] for r in results] == pytest.approx([8, 4], abs=0.01)  # and a count
    losses = [dict(load_run(f"out/{name}-4-steps-seed-0").evals())[4] for name in ("adamw", "lion")]
    assert [r["losses"]["val"] for r in results] == [[losses[0], None], [losses[1], None]] and losses[0] != losses[1]


def test_the_tools_means_deviations_and_ratios(capsys):
    def run(loss, seconds):
        losses = {"val": loss, "code": 2 * loss}
        return {
            "lr": 0.1,
            "tokens": 5,
            "losses": losses,
            "step_seconds": seconds,
            "state_bytes": 18,
            "num_parameters": 4,
        }

    tool.print_table(tool.summarise({"lion": [run(1.0, 2.0), run(3.0, 9.0)], "adamw": [run(4.0, 1.0), run(4.0, 3.0)]}))
    assert capsys.readouterr().out.splitlines() == [
        "| optimizer | lr | val | code | time of a step / adamw's | state bytes a parameter |",
        "|---|---:|---:|---:|---:|---:|",
        "| lion | 0.1 | 2.0000 ± 1.4142 | 4.0000 ± 2.8284 | 2.50 | 4.50 |",
        "| adamw | 0.1 | 4.0000 ± 0.0000 | 8.0000 ± 0.0000 | 1.00 | 4.50 |",
    ]


def test_every_setting_of_the_tool_is_a_good_config():
    for name, settings in tool.OPTIMIZERS.items():
        overrides = [f"optim.{key}={json.dumps(setting)}" for key, setting in settings.items()]
        optim = load_config(tool.QUICKSTART, overrides, check_paths=False).optim
        assert optim.lr == settings["lr"] and name.startswith(optim.name)
    assert len({json.dumps(settings) for settings in tool.OPTIMIZERS.values()}) == 6
