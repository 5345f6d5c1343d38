"""Phases of other shapes: each update compiled once and ahead of need, the same numbers however a batch is cut, resume at
and around a switch, and everything that reads a checkpoint by the rope theta that it was trained with."""

import os
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax import monitoring
from test_trainer import corpus, final_state, record  # noqa: F401

from curriculum.config import build_config
from curriculum.errors import InputError
from curriculum.evaluate import evaluate
from curriculum.export import export
from curriculum.model.loss import score_targets
from curriculum.model.model import Model
from curriculum.model.presets import ModelConfig
from curriculum.model.transformer import transformer
from curriculum.run import load_run
from curriculum.run_directory import read_json
from curriculum.train import trainer
from curriculum.train.checkpoints.arrays import load_params
from curriculum.train.dry_run import dry_run
from curriculum.train.feed import Feed
from curriculum.train.programs import COMPILE_THREAD, Programs, StepShape, compiling
from curriculum.train.setup import Setup, build
from curriculum.train.signals import Stopped
from curriculum.train.step import read_window
from curriculum.train.trainer import train
from evalsets.metrics import summarise
from phases.schedule import Segment

COMPILED = "/jax/core/compile/backend_compile_duration"
THETA = 3.0


def shaped(corpus, **changes):  # noqa: F811
    """36 steps: shorter rows, then the model's own, then fewer rows, of another theta, in micro-steps."""
    mixture = {"web": 0.5, "law": 0.5}
    data = {
        "name": "shaped",
        "tokenizer": {"kind": "byte"},
        "model": {"preset": "tiny", "n_layer": 1, "d_model": 16, "n_head": 2, "n_kv_head": 1, "d_ff": 32},
        "sources": {name: {"path": str(corpus / f"{name}.jsonl"), "held_out": "10%"} for name in ("web", "law")},
        "phases": [
            {"name": "short", "until": 12, "mixture": mixture, "seq_len": 16, "batch_size": 8},
            {"name": "base", "until": 24, "mixture": mixture},
            {
                "name": "turned", "until": "end", "mixture": mixture,
                "batch_size": 2, "grad_accum": 2, "rope_theta": THETA,
            },
        ],
        "evalsets": {"every": 6, "primary": {"held_out_of": "web", "max_sequences": 3}, "sets": {}},
        "train": {"steps": 36, "batch_size": 4, "seq_len": 32},
        "optim": {"lr": 3e-2, "warmup_steps": 2, "decay_steps": 10},
        "averages": {"ema_decay": 0.9, "phase_mean": 2},
        "checkpoint": {"every": 6, "keep": 9},
        "logging": {
            "every": 3, "tensorboard": False, "generate_every": 6,
            "generate": {"prompts": ["a"], "max_tokens": 4},
        },
    }  # fmt: skip
    return {**data, **changes}


SHAPES = [StepShape(1, 8, 16), StepShape(1, 4, 32), StepShape(2, 1, 32, THETA)]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("shaped-store")


def watched(data, run_dir, store, known=False):
    """A run in one go: its setup, and what the backend compiled, as (step under way, thread, name)."""
    if not known:
        jax.clear_caches()  # of the runs before
    at, setups, compiled, original = [0], [], [], Setup.update_at

    def update_at(setup, step):
        if step == 1:  # let the background be done, however slow the machine
            setup.compiled.updates._worker.submit(lambda: None).result()
        at[0], setups[:] = step, [setup]
        return original(setup, step)

    def listen(event, seconds, fun_name=None, **_):
        if event == COMPILED:
            compiled.append((at[0], threading.current_thread().name, fun_name))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Setup, "update_at", update_at)
        monitoring.register_event_duration_secs_listener(listen)
        try:
            train(build_config(data), run_dir, store_dir=store)
        finally:
            monitoring.unregister_event_duration_listener(listen)
    return setups[0], compiled


@pytest.fixture(scope="module")
def whole(corpus, store, tmp_path_factory):  # noqa: F811
    run_dir = tmp_path_factory.mktemp("shaped") / "run"
    return run_dir, *watched(shaped(corpus), run_dir, store)


def check_compiled(setup, compiled, shapes):
    """After its first step a run compiles what its phases need in the background, and else only what any run needs once."""
    made, thetas = setup.compiled, list(dict.fromkeys(shape.rope_theta for shape in shapes))
    assert setup.course.shapes_from(0) == shapes and list(made.updates.seconds) == shapes
    assert list(made.suites.seconds) == list(made.samples.seconds) == thetas == [None, THETA]
    ahead = Counter(name for _, thread, name in compiled if thread.startswith(COMPILE_THREAD))
    samples = {f"jit(_trace_{name})": 2 for name in ("no_rows", "prefill", "decode")}
    assert ahead == {"jit(train_step)": len(shapes) - 1, "jit(sum_windows)": 1, **samples}
    on_main = [(step, name) for step, thread, name in compiled if step > 0 and thread == threading.main_thread().name]
    # Once a process, whatever the phases are: what clears a metrics window, what a save needs, and the mean of the first.
    once = Counter(f"jit({name})" for name in ("clear_window", "_finite", "_copied", "_add"))
    assert Counter(name for _, name in on_main) <= once and all(step < 12 for step, _ in on_main)


def test_every_shape_is_compiled_once_and_ahead(whole):
    run_dir, setup, compiled = whole
    check_compiled(setup, compiled, SHAPES)
    stalls = {row["step"]: row["switch_stall_s"] for row in load_run(run_dir).metrics if "switch_stall_s" in row}
    assert list(stalls) == [15, 27]
    assert all(0 < stall < min(setup.compiled.updates.seconds.values()) for stall in stalls.values())


def main(corpus, folder):  # noqa: F811
    """On 2 devices, over which the parameters are split: two phases, the second of another theta."""
    jax.config.update("jax_num_cpu_devices", 2)
    data = shaped(Path(corpus), mesh={"fsdp": 2})
    data["phases"] = [
        data["phases"][1] | {"until": 12},
        data["phases"][1] | {"name": "turned", "until": "end", "rope_theta": THETA},
    ]
    data["train"]["steps"] = 24
    setup, compiled = watched(data, Path(folder, "run"), Path(folder, "store"))
    check_compiled(setup, compiled, [StepShape(1, 4, 32), StepShape(1, 4, 32, THETA)])
    evals = {e["step"]: e for e in load_run(Path(folder, "run")).events if e["event"] == "eval"}
    assert all({"ema", "phase_mean"} <= evals[step].keys() for step in (12, 24))


def test_a_later_run_of_the_same_shapes_compiles_nothing(corpus, store, tmp_path):  # noqa: F811
    """And its numbers are those of a run that compiles everything."""
    others = {"seed": 8, "optim": {"lr": 1e-2, "warmup_steps": 4, "decay_steps": 6}}
    data = shaped(corpus, **others)
    for phase in data["phases"]:
        phase["mixture"] = {"web": 0.2, "law": 0.8}
    watched(shaped(corpus), tmp_path / "first", store)
    setup, made = watched(data, tmp_path / "later", store, known=True)
    assert [name for *_, name in made if not name.startswith("jit(_trace_")] == []  # but for samples
    assert list(setup.compiled.updates.seconds) == SHAPES
    _, made = watched(data, tmp_path / "alone", store)
    assert "jit(train_step)" in [name for *_, name in made]
    assert final_state(tmp_path / "later") == final_state(tmp_path / "alone")
    assert record(tmp_path / "later") == record(tmp_path / "alone")


@pytest.mark.slow
def test_shapes_are_compiled_ahead_on_several_devices(corpus, tmp_path):  # noqa: F811
    command = [sys.executable, __file__, corpus, tmp_path]
    done = subprocess.run(
        command, env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_rows_tell_the_tokens_of_each_shape(whole):
    run_dir, *_ = whole
    rows = {row["step"]: row for row in load_run(run_dir).metrics}
    assert [rows[step]["tokens_seen"] for step in (12, 24, 36)] == [12 * 128, 24 * 128, 24 * 128 + 12 * 64]
    assert {row["packing_utilization"] for row in rows.values()} == {1.0}
    assert rows[3]["loss"] > rows[36]["loss"] > 0


@pytest.mark.slow
def test_the_theta_of_a_phase_is_what_it_is_trained_and_measured_with(whole, store):
    """By hand from the checkpoint at the switch: the next batch's loss is that of the model of the new theta."""
    run_dir, setup, _ = whole
    base = setup.config
    setup = build(base, store)
    try:
        window_steps = setup.config.train.window_steps
        state = setup.states.restored(run_dir / "checkpoints/24", setup.course.plan.sources, window_steps)
        batch = setup.course.feed[24]
        architecture = ModelConfig.of(read_json(run_dir / "model.json"))
        assert architecture.rope_theta == 10_000
        losses = {}
        for theta in (10_000.0, THETA):
            model = transformer(replace(architecture, rope_theta=theta))
            rows = [np.asarray(a).reshape(2, 32) for a in (batch.inputs_ABT, batch.targets_ABT)]
            losses[theta] = float(np.asarray(score_targets(model, state.params, *rows)["nats"], np.float64).mean())
        assert abs(losses[THETA] - losses[10_000.0]) > 1e-4
        after = setup.update_at(24)(state, batch, *setup.course.knobs(24))
        assert read_window(after.window, setup.course.plan.sources)["loss"] == pytest.approx(losses[THETA], rel=2e-6)

        evals = {e["step"]: e["val_loss"] for e in load_run(run_dir).events if e["event"] == "eval"}
        evalset = setup.corpus.evalsets["primary"]
        for step, theta in ((24, 10_000.0), (36, THETA)):
            params = load_params(run_dir / f"checkpoints/{step}/params")
            found = {}
            for other in (10_000.0, THETA):
                model = transformer(replace(architecture, rope_theta=other))
                scores = score_targets(model, params, evalset.tokens_NT1[:, :-1], evalset.tokens_NT1[:, 1:])
                found[other] = float(np.asarray(scores["nats"], np.float64)[evalset.scored_NT].mean())
            assert evals[step] == pytest.approx(found[theta], abs=2e-6)
            assert min(abs(evals[step] - loss) for t, loss in found.items() if t != theta) > 5e-6
    finally:
        setup.close()


@pytest.mark.slow
def test_a_checkpoint_is_measured_later_as_it_was_then(whole, store):
    run_dir, *_ = whole
    for step in (24, 30, 36):
        results = evaluate(run_dir, step=step, store_dir=store).results["val"]
        with np.load(run_dir / f"evals/{step}.npz") as then:
            assert len(results.nats_N) and np.array_equal(results.nats_N, then["primary.nats"])


@pytest.mark.slow
def test_an_export_has_the_theta_of_its_step(whole, tmp_path):
    run_dir, *_ = whole
    for step, theta in ((24, 10_000.0), (36, THETA)):
        export(run_dir, tmp_path / f"own{step}", step=step)
        assert read_json(tmp_path / f"own{step}/model.json")["rope_theta"] == theta
        export(run_dir, tmp_path / f"hf{step}", format="hf", step=step)
        config = read_json(tmp_path / f"hf{step}/config.json")
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == theta
        assert f"theta {theta:,g})" in (tmp_path / f"hf{step}/README.md").read_text()
    assert read_json(run_dir / "model.json")["rope_theta"] == 10_000


@pytest.mark.slow
def test_a_run_that_begins_from_a_checkpoint_has_its_theta(whole, corpus, store, tmp_path):  # noqa: F811
    run_dir, *_ = whole
    for step, theta in ((24, 10_000.0), (36, THETA)):
        data = shaped(corpus, adaptation={"init_from": str(run_dir / f"checkpoints/{step}")})
        del data["model"], data["tokenizer"]
        # Before the first update it is that of the base still, so that its loss there is what training may lose.
        data |= {"phases": [{"name": "only", "until": "end", "mixture": {"web": 1}, "rope_theta": 7.0}]}
        setup = build(config := build_config(data), store, start=trainer.start_of(config))
        assert setup.model.architecture["rope_theta"] == theta
        evals = {e["step"]: e["val_loss"] for e in load_run(run_dir).events if e["event"] == "eval"}
        measured = setup.suite_at(0).run(setup.states.first().params)["primary"]
        assert summarise(measured).loss == pytest.approx(evals[step], abs=1e-6)
        setup.close()


@pytest.mark.slow
@pytest.mark.parametrize("stops", [(12, 24), (7, 19, 31)])
def test_stopped_and_resumed_equals_one_go(stops, whole, corpus, store, tmp_path, monkeypatch):  # noqa: F811
    run_dir, resume = tmp_path / "run", None
    take = Feed.__getitem__

    def stopping(at):
        def taken(feed, step):
            if step == at:
                raise Stopped(15, step, None, "")  # nothing of this step is saved
            return take(feed, step)

        return taken

    for at in stops:
        monkeypatch.setattr(Feed, "__getitem__", stopping(at))
        with pytest.raises(Stopped):
            train(build_config(shaped(corpus)), run_dir, resume=resume, store_dir=store)
        resume = "latest"
    monkeypatch.setattr(Feed, "__getitem__", take)
    train(build_config(shaped(corpus)), run_dir, resume=resume, store_dir=store)
    assert final_state(run_dir) == final_state(whole[0])
    assert record(run_dir) == record(whole[0])


@pytest.mark.slow
def test_micro_steps_of_a_phase_change_no_data_and_the_numbers_by_rounding(whole, corpus, store):  # noqa: F811
    data = shaped(corpus)
    for phase, grad_accum in zip(data["phases"], (4, 2, 1), strict=True):
        phase["grad_accum"] = grad_accum
    setups = [build(build_config(d), store) for d in (shaped(corpus), data)]
    assert setups[1].course.shapes_from(0) == [StepShape(4, 2, 16), StepShape(2, 2, 32), StepShape(1, 2, 32, THETA)]
    for step in (6, 12, 24):  # the first two phases, and the last
        batches, told = [], []
        for setup in setups:
            folder, window_steps = whole[0] / f"checkpoints/{step}", setup.config.train.window_steps
            state = setup.states.restored(folder, setup.course.plan.sources, window_steps)
            batches.append([np.asarray(a).reshape(-1) for a in setup.course.feed[step]])
            after = setup.update_at(step)(state, setup.course.feed[step], *setup.course.knobs(step))
            told.append(read_window(after.window, setup.course.plan.sources))
        assert all(np.array_equal(*arrays) for arrays in zip(*batches, strict=True))
        # Sums of float32 in another order.
        assert told[0]["loss"] == pytest.approx(told[1]["loss"], rel=1e-6)
        assert told[0]["grad_norm"] == pytest.approx(told[1]["grad_norm"], rel=1e-5)
    for setup in setups:
        setup.close()


@pytest.mark.slow
def test_a_dry_run_takes_a_step_of_every_shape(corpus, store):  # noqa: F811
    told = dry_run(build_config(shaped(corpus)), store_dir=store)
    updates = told["updates"]
    assert [update["shape"] for update in updates] == ["1 x 8 rows of 16 tokens", "1 x 4 rows of 32 tokens", "2 x 1 rows of 32 tokens, rope_theta 3"]  # fmt: skip
    assert all(update["compile_s"] > 0 for update in updates)
    # In place: the parameters, their gradients and two moments, and what a micro-step keeps of each token.
    eight, four, one = (update["bytes"] / told["num_parameters"] / 4 for update in updates)
    assert 4 < one < four and 4 < eight


def test_a_theta_is_not_for_a_model_of_ones_own(corpus, store):  # noqa: F811
    with pytest.raises(InputError) as raised:
        build(build_config(shaped(corpus)), store, make_model=lambda vocab_size: None)
    assert raised.value.problems == ("config: phases[2].rope_theta: is not supported with make_model; leave it out",)


def test_what_cannot_be_compiled_in_the_background_is_told_at_its_step():
    def compile(shape):
        if shape.T == 32:
            raise ValueError("no room for it")
        return shape.T

    programs = Programs(compile)
    assert programs[SHAPES[0]] == 16
    programs.ahead(SHAPES)
    programs._worker.submit(lambda: None).result()  # the failure has been by now, and nothing was raised
    assert programs[SHAPES[0]] == 16
    with pytest.raises(ValueError, match="no room for it") as raised:
        programs[SHAPES[2]]
    assert raised.value.__notes__ == ["while the update of 2 x 1 rows of 32 tokens, rope_theta 3 was compiled"]
    programs.close()


def test_what_is_under_way_is_not_begun_again():
    go_on, made = threading.Event(), []

    def compile(shape):
        assert go_on.wait(60)
        made.append(shape)
        return shape.T

    programs = Programs(compile)
    programs.ahead(SHAPES)
    programs.ahead(SHAPES)  # as after a rollback
    go_on.set()
    assert [programs[shape] for shape in SHAPES] == [16, 32, 32]
    programs.ahead(SHAPES)
    programs._worker.shutdown(wait=True)
    assert sorted(made) == sorted(SHAPES)


def test_a_batch_that_the_micro_steps_do_not_divide_is_cut_into_fewer():
    segment = Segment(0, 9, "a", {"web": 1.0}, None, (), {"web": 0}, batch_size=6, seq_len=32)
    assert [StepShape.of(segment, n) for n in (1, 4, 5, 6)] == [(1, 6, 32, None), (2, 3, 32, None), (1, 6, 32, None), (6, 1, 32, None)]  # fmt: skip


def test_a_program_is_waited_for_made_at_once_or_left():
    begun, go_on, made = threading.Event(), threading.Event(), []

    def compile(shape):
        made.append((shape.T, threading.current_thread().name.startswith(COMPILE_THREAD)))
        if shape.T == 1:
            begun.set()
            assert go_on.wait(60)
        return shape.T

    first, second, third = (StepShape(1, 1, T) for T in (1, 2, 3))
    programs = Programs(compile)
    programs.ahead([first, second, third])
    assert begun.wait(60)
    assert programs[second] == 2  # not begun: made here, while the other one is under way
    assert made == [(1, True), (2, False)]
    programs.close()  # does not wait, and leaves the third
    assert compiling()
    threading.Timer(0.05, go_on.set).start()
    assert programs[first] == 1  # waited for
    programs._worker.shutdown(wait=True)
    assert not compiling() and made == [(1, True), (2, False)] and sorted(s.T for s in programs.seconds) == [1, 2]


def test_what_is_made_ahead_is_warmed_and_shares_a_thread():
    warmed, threads = [], set()

    def compile(key):
        threads.add(threading.get_ident())
        return key

    programs = Programs(compile, lambda key, program: warmed.append((key, program)))
    others = Programs(compile, of="the eval with", beside=programs)
    first, second = (StepShape(1, 1, T) for T in (1, 2))
    assert programs[first] == first
    programs.ahead([first, second])
    others.ahead([3.0])
    programs._worker.submit(lambda: None).result()
    assert warmed == [(second, second)]  # the first is run at once anyway
    assert len(threads) == 2 and threading.get_ident() in threads
    assert programs[second] == second and others[3.0] == 3.0 and list(others.seconds) == [3.0]
    programs.close()


def test_an_update_that_is_compiled_ahead_has_run_once_on_zeros(corpus, store, monkeypatch):  # noqa: F811
    """Seen from inside the model: what tokens an update was given."""
    seen = []

    def forward(params, tokens_BT, segment_ids_BT, keys_B):
        jax.debug.callback(lambda tokens_BT: seen.append(np.array(tokens_BT)), tokens_BT)
        return params["embed"][tokens_BT] @ params["embed"].T

    model = Model(init=lambda seed: {"embed": np.ones((257, 4), np.float32)}, forward=forward)
    data = shaped(corpus, logging={"tensorboard": False})
    data["phases"] = [data["phases"][0], {**data["phases"][1], "until": "end"}]
    setup = build(build_config(data), store, make_model=lambda vocab_size: model)
    try:
        first = setup.update_at(0)
        setup.compiled.ahead(setup.course.shapes_from(0))
        setup.compiled.updates._worker.submit(lambda: None).result()
        jax.effects_barrier()
        assert list(setup.compiled.updates.seconds) == SHAPES[:2]
        assert list(setup.compiled.suites.seconds) == [None]  # before the first eval of a run that goes on
        assert [tokens_BT.shape for tokens_BT in seen] == [(4, 32)]  # the first is run at once anyway
        assert not seen[0].any()
        first(setup.states.first(), setup.course.feed[0], *setup.course.knobs(0))
        jax.effects_barrier()
        assert seen[1].shape == (8, 16) and seen[1].any()

        # A state that is too large for a second one beside it.
        monkeypatch.setattr("curriculum.train.compiled.WARMED_BYTES", 0)
        setup.compiled._warm(SHAPES[0], first)
        jax.effects_barrier()
        assert len(seen) == 2
    finally:
        setup.close()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "optim": {"name": "sophia"},
            "averages": {"ema_decay": 0.9},
            "logging": {"generate_every": 6, "tensorboard": False},
        },
        {"adaptation": {"lora": {"rank": 2}}, "optim": {"name": "muon"}},
    ],
    ids=str,
)
def test_a_run_beside_which_nothing_is_compiled(corpus, store, tmp_path, monkeypatch, capsys, changes):  # noqa: F811
    """As on an NVIDIA card. What has run once for that leaves no trace in the state, and the run is the same."""
    if "adaptation" in changes:
        base = build_config(shaped(corpus, train={"steps": 12}) | {"phases": shaped(corpus)["phases"][:1]})
        train(base, tmp_path / "base", store_dir=store)
        changes = {**changes, "adaptation": {**changes["adaptation"], "init_from": str(tmp_path / "base")}}
    config = build_config(shaped(corpus, **changes))
    train(config, tmp_path / "usual", store_dir=store)
    states, compiling_s = [], []

    def ready(setup, step, state):
        before = jax.device_get(state)
        state = as_it_is(setup, step, state)
        assert list(setup.compiled.updates.seconds) == SHAPES
        assert list(setup.compiled.suites.seconds) == [None, THETA]
        assert not setup.compiled.updates._ahead and setup.course.feed._ahead == {}
        assert jax.tree.structure(before) == jax.tree.structure(state)
        for one, another in zip(jax.tree.leaves(before), jax.tree.leaves(jax.device_get(state)), strict=True):
            np.testing.assert_array_equal(one, another, strict=True)
        states.append(state)
        compiling_s.append(sum(setup.compiled.updates.seconds.values()))
        return state

    as_it_is = Setup.make_ready
    monkeypatch.setattr(Setup, "make_ready", ready)
    monkeypatch.setattr("curriculum.train.compiled.backend", lambda: "gpu")
    train(config, tmp_path / "ready", store_dir=store)
    assert len(states) == 1 and "\n  compiling  3 updates and what else" in "".join(capsys.readouterr())
    assert load_run(tmp_path / "ready").metrics[0]["first_step_compile_time_s"] > compiling_s[0]
    for one, another in zip(
        *(jax.tree.leaves(final_state(tmp_path / name)) for name in ("usual", "ready")), strict=True
    ):
        np.testing.assert_array_equal(one, another)


ENDS = """
import sys, time
from curriculum.cli import main
from curriculum.train.programs import Programs, StepShape
programs = Programs(lambda shape: time.sleep(300))
programs.ahead([StepShape(1, 1, 1)])
programs.close()
def command():
    print("saved")
    {ends}
main.run_command = command
main.main()
"""


@pytest.mark.parametrize("ends, code, told", [("sys.exit(143)", 143, ""), ("1 / 0", 1, "ZeroDivisionError")])
def test_the_command_ends_while_something_is_compiled(ends, code, told):
    command = [sys.executable, "-c", ENDS.format(ends=ends)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (code, "saved\n") and told in done.stderr


def test_what_is_asked_of_closed_programs_is_no_program_unless_it_is_ready_or_under_way():
    begun, goes_on = threading.Event(), threading.Event()
    programs = Programs(lambda shape: shape if shape == 1 else (begun.set(), goes_on.wait(10), shape)[-1])
    assert programs[1] == 1
    programs.ahead([2, 3])
    assert begun.wait(10)
    programs.close()
    goes_on.set()
    assert (programs[1], programs[2]) == (1, 2)
    for shape in (3, 4):
        with pytest.raises(TypeError) as refused:
            programs[shape]
        assert refused.value.__notes__ == [f"while the update of {shape} was compiled"]


def test_the_callers_context_of_jax_holds_for_what_is_compiled_ahead():
    """jax's context managers hold in their own thread: a later phase would be compiled without them, and a resume with."""
    compiled_in = []

    def compile(shape):
        compiled_in.append(threading.current_thread().name.startswith(COMPILE_THREAD))
        return jax.config.jax_threefry_partitionable

    programs, usual = Programs(compile), jax.config.jax_threefry_partitionable
    with jax.threefry_partitionable(not usual):
        programs.ahead([1, 2])
        assert [programs[1], programs[2]] == [not usual] * 2
    programs.ahead([3])
    assert programs[3] is usual
    assert compiled_in == [False, False, True]


if __name__ == "__main__":
    main(*sys.argv[1:])
