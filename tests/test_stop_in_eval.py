"""A signal that arrives during an eval: the run leaves it and saves, and a resume does that eval again."""

import json
import shutil

import pytest
from tiny_run import assert_same_run, signalled, tiny_data, tiny_train, worse_from, write_corpus

from curriculum.branch import branch
from curriculum.errors import InputError
from curriculum.find_checkpoint import checkpoint_steps, read_ledger
from curriculum.run import load_run
from curriculum.train.signals import Stopped
from curriculum.train.watch import RegressionStop


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A corpus, and runs that nothing disturbed."""
    place = write_corpus(tmp_path_factory.mktemp("stop"))
    tiny_train(place, place / "unbroken", averages=AVERAGES)
    return place


AVERAGES = {"ema_decay": 0.9, "phase_mean": 2}


def stopped_in(place, run_dir, number, step, resume=None, **sections):
    after = []
    with pytest.MonkeyPatch.context() as patch:
        signalled(patch, number, then=lambda: after.append(1))
        with pytest.raises(Stopped, match=f"stopped by SIGTERM at step {step}, which was saved"):
            tiny_train(place, run_dir, resume=resume, **sections)
    assert not after and checkpoint_steps(run_dir / "checkpoints")[-1] == step
    events = load_run(run_dir).events
    assert [e["event"] for e in events if e["step"] == step and e["event"] != "resume"] == ["checkpoint"]
    assert not (run_dir / f"evals/{step}.npz").exists()


# Evals of the raw parameters and of their moving average, then of a phase's mean where it ends: passes 0, 1-2, 3-5, ...
@pytest.mark.parametrize(("number", "step"), [(1, 3), (2, 3), (3, 6), (5, 6), (6, 9), (8, 12), (10, 12)])
def test_a_signal_ends_an_eval_and_a_resume_does_it_again(place, tmp_path, number, step):
    """Between two planned checkpoints, at a phase's end with one, and at the run's end."""
    stopped_in(place, tmp_path / "run", number, step, averages=AVERAGES)
    stopped_in(place, tmp_path / "run", 0, step, resume="latest", averages=AVERAGES)
    tiny_train(place, tmp_path / "run", resume="latest", averages=AVERAGES)
    assert_same_run(tmp_path / "run", place / "unbroken")
    assert [e["event"] for e in load_run(tmp_path / "run").events].count("resume") == 2


def test_a_checkpoint_that_lacks_its_eval_is_replaced_once_that_is_done(place, tmp_path):
    """So that a run that `action: stop` then ends goes on from there, and a rollback finds what the eval led to."""
    stops = {"evalsets": tiny_data(place)["evalsets"] | {"regression": {"action": "stop"}}}
    stopped_in(place, tmp_path / "run", 2, 6, **stops)
    assert read_ledger(tmp_path / "run/checkpoints/6")["history"]["eval_left"]
    with pytest.MonkeyPatch.context() as patch:
        worse_from(patch, 0)
        with pytest.raises(RegressionStop, match="stopped at step 6, which was saved"):
            tiny_train(place, tmp_path / "run", resume="latest", **stops)
    history = read_ledger(tmp_path / "run/checkpoints/6")["history"]
    assert not history["eval_left"] and history["watch"]["standing"]
    tiny_train(place, tmp_path / "run", resume="latest", **stops)
    assert [e["step"] for e in load_run(tmp_path / "run").events if e["event"] == "eval"] == [0, 3, 6, 9, 12]


def test_what_the_mean_of_a_phase_lacks_is_noted_by_the_eval_that_is_done_again(place, tmp_path):
    """The mean was written before the eval that was left; with it the run had said which checkpoint is missing."""
    averages = {"phase_mean": 3}
    stopped_in(place, tmp_path / "run", 1, 3, averages=averages)
    shutil.rmtree(tmp_path / "run/checkpoints/2")
    stopped_in(place, tmp_path / "run", 2, 6, resume="latest", averages=averages)
    assert (tmp_path / "run/averages/a/mean.json").exists()
    tiny_train(place, tmp_path / "run", resume="latest", averages=averages)
    notes = {e["step"]: e.get("notes", []) for e in load_run(tmp_path / "run").events if e["event"] == "eval"}
    assert "the mean of phase a covers only the checkpoints 4 and 6: checkpoint 2 is gone" in notes[6]


def test_a_branch_begins_before_a_step_whose_eval_is_still_due(place, tmp_path):
    stopped_in(place, tmp_path / "trunk", 5, 6, averages=AVERAGES)
    branch(tmp_path / "trunk", 6, tmp_path / "branch", store_dir=place / "store")
    resume = next(e for e in load_run(tmp_path / "branch").events if e["event"] == "resume")
    assert resume["step"] == 4
    stopped_in(place, tmp_path / "early", 1, 3, averages=AVERAGES, checkpoint={"every": 5})
    told = "--at 3: .* has no checkpoint at or before it; available: none; once the run is continued with --resume latest, "
    with pytest.raises(InputError, match=f"{told}that of step 3"):
        branch(tmp_path / "early", 3, tmp_path / "other", store_dir=place / "store")
    assert json.loads((tmp_path / "early/training_state.json").read_text()).keys().isdisjoint({"eval_left"})


def test_a_branch_knows_the_schedule_from_a_checkpoint_whose_eval_is_still_due(place, tmp_path):
    """It begins from an older one, which does not know the share that was raised in between."""
    replays = {
        "phases": [{"name": "a", "until": "end", "mixture": {"web": 0.2, "law": 0.8}}],
        "evalsets": {"every": 3, "primary": {"held_out_of": "web"}, "regression": {"action": "replay"}},
        "checkpoint": {"every": 20, "keep": 1},
    }
    with pytest.MonkeyPatch.context() as patch:
        worse_from(patch, 2)
        stopped_in(place, tmp_path / "trunk", 3, 9, **replays)
    trunk = load_run(tmp_path / "trunk")
    assert [e["step"] for e in trunk.events if e["event"] == "schedule_edit"] == [6]
    assert checkpoint_steps(tmp_path / "trunk/gold") == [3]
    branch(tmp_path / "trunk", 8, tmp_path / "branch", store_dir=place / "store")
    losses = [[row["loss"] for row in run.metrics[:8]] for run in (trunk, load_run(tmp_path / "branch"))]
    assert losses[0] == losses[1] and len(losses[0]) == 8


def test_nothing_is_saved_where_a_signal_ends_the_eval_before_the_first_update(place, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        signalled(patch, 0, then=lambda: pytest.fail("the eval goes on"))
        with pytest.raises(Stopped, match=r"^stopped by SIGTERM before the first update, so nothing had to be saved$"):
            tiny_train(place, tmp_path / "run", averages=AVERAGES)
    assert checkpoint_steps(tmp_path / "run/checkpoints") == []
    tiny_train(place, tmp_path / "run", resume="latest", averages=AVERAGES)
    assert_same_run(tmp_path / "run", place / "unbroken")


@pytest.mark.parametrize("number", [0, 1])
def test_a_signal_ends_the_first_eval_of_a_set_that_a_resume_adds(place, tmp_path, number):
    """Of its raw parameters, and of their moving average."""
    evalsets = tiny_data(place)["evalsets"]
    added = evalsets | {"sets": evalsets["sets"] | {"again": {"held_out_of": "web"}}}
    for run in ("run", "undisturbed"):
        shutil.copytree(place / "unbroken", tmp_path / run)
    with pytest.MonkeyPatch.context() as patch:
        signalled(patch, number, then=lambda: pytest.fail("the eval goes on"))
        with pytest.raises(Stopped, match="at step 8, which was saved"):
            tiny_train(place, tmp_path / "run", resume=8, averages=AVERAGES, evalsets=added)
    tiny_train(place, tmp_path / "run", resume="latest", averages=AVERAGES, evalsets=added)
    tiny_train(place, tmp_path / "undisturbed", resume=8, averages=AVERAGES, evalsets=added)
    assert_same_run(tmp_path / "run", tmp_path / "undisturbed")
    assert [e["step"] for e in load_run(tmp_path / "run").events if e["event"] == "eval"] == [0, 3, 6, 8, 9, 12]
