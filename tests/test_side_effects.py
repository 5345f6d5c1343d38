"""Whatever watches a run leaves no trace on it: the same training bits with evals, logs, views and checkpoints or not."""

import json
import os
import sys

import jax
import numpy as np
import pytest
from compared_runs import saved_arrays, without_clock

from curriculum.config import build_config
from curriculum.find_checkpoint import checkpoint_steps
from curriculum.run import load_run
from curriculum.train.trainer import train

STEPS = 12


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The config of a run over two phases, and what it reads."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for name, letters in (("web", "etaoin"), ("law", "shrdlu"), ("own", "cmfwyp")):
        texts = ["".join(rng.choice(list(letters + " "), int(rng.integers(40, 200)))) for _ in range(110)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "gate").write_text("#!/bin/sh\necho '{\"accept\": true}'\n")
    (folder / "gate").chmod(0o700)
    return {
        "name": "watched",
        "tokenizer": {"kind": "byte"},
        "model": {
            "preset": "tiny", "n_layer": 1, "d_model": 16, "n_head": 2, "n_kv_head": 1, "d_ff": 24, "dropout": 0.1,
        },
        "sources": {name: {"path": str(folder / f"{name}.jsonl"), "held_out": "10%"} for name in ("web", "law")},
        "phases": [
            {"name": "foundation", "until": 6, "mixture": {"web": 1.0}},
            {"name": "domain", "until": "end", "mixture": {"law": 0.7, "web": 0.3}, "ramp_steps": 3},
        ],
        "evalsets": {
            "every": 4,
            "primary": {"held_out_of": "web"},
            "sets": {"law": {"held_out_of": "law"}},
            "gold": {"subject_to": {"law": {"max_increase": 0.0}}},  # it rises, and keeps all from being the gold
        },
        "train": {"steps": STEPS, "batch_size": 4, "seq_len": 16},
        "optim": {"lr": 3e-3, "warmup_steps": 2, "decay_steps": 4},
        "checkpoint": {"every": STEPS},
        "logging": {"every": 2, "tensorboard": False},
    }  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def plain(data, store, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    train(build_config(data), run_dir, store_dir=store)
    return run_dir


def final_bits(run_dir):
    """Every array of the last checkpoint that training goes on from."""
    folder = run_dir / "checkpoints" / str(checkpoint_steps(run_dir / "checkpoints")[-1])
    arrays = saved_arrays(folder)
    assert any("opt_state" in name for name in arrays)
    return folder.name, arrays


def losses(run_dir):
    """Each metrics row without the clock, by its step."""
    return {row["step"]: row for row in without_clock(load_run(run_dir).metrics)}


def changed(data, section, **changes):
    return {**data, section: {**data[section], **changes}}


def same_training(data, store, plain, run_dir):
    """Train with other settings: the bits are those of the plain run. The run."""
    train(build_config(data), run_dir, store_dir=store)
    assert final_bits(run_dir) == final_bits(plain)
    return load_run(run_dir)


@pytest.mark.parametrize(("every", "evals"), [(1, 13), (1000, 3)])
def test_the_interval_of_evals(data, store, plain, tmp_path, every, evals):
    run = same_training(changed(data, "evalsets", every=every), store, plain, tmp_path / "run")
    assert [e["event"] for e in run.events].count("eval") == evals  # at the start, at both phase ends, and as asked
    assert losses(tmp_path / "run") == losses(plain)


def test_which_sets_there_are(data, store, plain, tmp_path):
    """No extra set; a set of its own text more. The held-out text stays out of training whoever measures it."""
    none = changed(data, "evalsets", sets={}, gold={})
    own = {"path": data["sources"]["web"]["path"].replace("web", "own")}
    more = changed(data, "evalsets", sets={**data["evalsets"]["sets"], "own": own, "first": {"held_out_of": "web"}})
    for number, (config, names) in enumerate([(none, set()), (more, {"eval_law", "eval_own", "eval_first"})]):
        run = same_training(config, store, plain, tmp_path / str(number))
        first = next(event for event in run.events if event["event"] == "eval")
        assert names == set(first) & {"eval_law", "eval_own", "eval_first"}
        assert losses(tmp_path / str(number)) == losses(plain)


def test_the_interval_of_rows(data, store, plain, tmp_path):
    """A row holds means since the one before: those of other rows differ, what is learned does not."""
    run = same_training(changed(data, "logging", every=1), store, plain, tmp_path / "run")
    assert [row["step"] for row in run.metrics] == [*range(1, 13)]
    mine, theirs = losses(tmp_path / "run"), losses(plain)
    for step in (2, 12):  # of as many tokens each; rows have six decimals
        assert (mine[step - 1]["loss"] + mine[step]["loss"]) / 2 == pytest.approx(theirs[step]["loss"], abs=2e-6)


def test_tensorboard(data, store, plain, tmp_path):
    run = same_training(changed(data, "logging", tensorboard=True), store, plain, tmp_path / "run")
    assert list(run.directory.path.glob("tensorboard/*tfevents*")) and not (plain / "tensorboard").exists()
    assert losses(tmp_path / "run") == losses(plain)


def test_wandb(data, store, plain, tmp_path):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install 'curriculum[wandb]'")
    config = changed(data, "logging", wandb={"project": "tests", "mode": "offline"})
    run = same_training(config, store, plain, tmp_path / "run")
    wandb.teardown()
    assert list(run.directory.path.glob("wandb/offline-run-*/*.wandb"))
    assert losses(tmp_path / "run") == losses(plain)


def test_checkpoints_golds_and_a_gate(data, store, plain, tmp_path):
    """A checkpoint after every third step, and every gold after a program has looked at it."""
    gate = data["sources"]["web"]["path"].replace("web.jsonl", "gate")
    gated = changed(data, "evalsets", gold={"gate": gate}, sets={})
    run = same_training({**gated, "checkpoint": {"every": 3}}, store, plain, tmp_path / "run")
    saved = [event["step"] for event in run.events if event["event"] == "checkpoint"]
    assert saved == [3, 6, 9, 12] and run.gold_step is not None
    assert losses(tmp_path / "run") == losses(plain) and load_run(plain).gold_step is None


def test_a_reader_that_goes_away(data, store, plain, tmp_path, monkeypatch):
    """What the console prints goes to a pipe that nobody reads any more."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    closed = os.fdopen(write_end, "w", buffering=1)
    monkeypatch.setattr(sys, "stdout", closed)
    same_training(data, store, plain, tmp_path / "run")
    monkeypatch.undo()
    closed.close()
    assert losses(tmp_path / "run") == losses(plain)
    log = (tmp_path / "run/train.log").read_text()
    assert (
        log.count("console: Broken pipe; from here on, output goes to this file only\n") == 1
        and "complete: 12 steps" in log
    )


def test_a_profiler(data, store, plain, tmp_path):
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every Python call takes seconds to write down
    with jax.profiler.trace(str(tmp_path / "profile"), profiler_options=options):
        same_training(data, store, plain, tmp_path / "run")
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert losses(tmp_path / "run") == losses(plain)


def test_what_is_compared_can_differ(data, store, plain, tmp_path):
    train(build_config(changed(data, "optim", lr=3.001e-3)), tmp_path / "run", store_dir=store)
    (step, mine), (other_step, theirs) = final_bits(tmp_path / "run"), final_bits(plain)
    assert step == other_step and mine.keys() == theirs.keys()
    assert all(mine[name] != theirs[name] for name in mine if name.startswith("params"))
    assert any(mine[name] != theirs[name] for name in mine if "opt_state" in name)
    assert losses(tmp_path / "run")[12]["loss"] != losses(plain)[12]["loss"]
