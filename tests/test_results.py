"""The results of evals, where a run is taken up at a step and given another set there."""

import json
import signal
from collections import namedtuple

import numpy as np
import pytest
from tiny_run import tiny_train, write_corpus

from curriculum.branch import branch
from curriculum.record import windows
from curriculum.record.windows import read_results, write_results
from curriculum.run import load_run
from curriculum.train import trainer
from curriculum.train.signals import Stopped, StopSignals
from curriculum.train.watch import RegressionStop
from evalsets.metrics import WindowResults

OPTIM = {"lr": 3e-3, "schedule": "constant", "warmup_steps": 2}  # as it is whatever train.steps is


def evalsets(**more):
    return {"every": 3, "primary": {"held_out_of": "web"}, "sets": {"law": {"held_out_of": "law"}, **more}}


def measured(run_dir, step):
    with np.load(run_dir / f"evals/{step}.npz") as file:
        return {key.rpartition(".")[0] for key in file.files}


def killed_before_its_first_checkpoint(place, run_dir, resume, **sections):
    class Killed(Exception):
        pass

    def die(*_):
        raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(trainer, "_loop", die)
        tiny_train(place, run_dir, resume, **sections)


def test_a_set_measured_after_the_last_checkpoint_is_measured_again_after_a_kill(tmp_path):
    run_dir = tmp_path / "run"
    write_corpus(tmp_path)
    tiny_train(tmp_path, run_dir, optim=OPTIM)
    longer = {
        "phases": [
            {"name": "a", "until": 6, "mixture": {"web": 1.0}},
            {"name": "b", "until": 12, "mixture": {"law": 1.0}},
            {"name": "c", "until": "end", "mixture": {"web": 1.0}},
        ],
        "train": {"steps": 14, "batch_size": 4, "seq_len": 32},
        "evalsets": evalsets(extra={"held_out_of": "law", "max_sequences": 5}),
        "optim": OPTIM,
    }
    killed_before_its_first_checkpoint(tmp_path, run_dir, "latest", **longer)
    before = np.load(run_dir / "evals/12.npz")
    assert measured(run_dir, 12) == {"primary", "law", "extra"}

    tiny_train(tmp_path, run_dir, "latest", **longer)
    events = load_run(run_dir).events
    assert [e["step"] for e in events if e["event"] == "eval" and "eval_extra" in e] == [12, 14]
    assert [(e["step"], e["new_phase"]) for e in events if e["event"] == "phase_switch"] == [(6, "b"), (12, "c")]
    with np.load(run_dir / "evals/12.npz") as now, np.load(run_dir / "superseded/evals/12.npz") as superseded:
        for file in (now, superseded):
            assert file.files and set(file.files) == set(before.files)
            assert all(np.array_equal(file[name], before[name]) for name in before.files)


def test_a_set_that_came_and_went_leaves_nothing_at_the_step_that_is_taken_up_again(tmp_path):
    run_dir, keep = tmp_path / "run", {"every": 2, "keep": 50}

    def x(words):
        path = tmp_path / "x.jsonl"
        path.write_text("".join(json.dumps({"text": f"{words} {i} " * 9}) + "\n" for i in range(20)))
        return evalsets(x={"path": str(path)})

    write_corpus(tmp_path)
    tiny_train(tmp_path, run_dir, optim=OPTIM, checkpoint=keep)
    killed_before_its_first_checkpoint(tmp_path, run_dir, 6, optim=OPTIM, checkpoint=keep, evalsets=x("first text"))
    assert measured(run_dir, 6) == {"primary", "law", "x"}
    # Where a branch begins, and a phase with it, which is compared with what was measured there.
    branch(run_dir, 6, tmp_path / "branch", overrides=["phases[1].name=other"], store_dir=tmp_path / "store")
    assert measured(tmp_path / "branch", 6) == {"primary", "law", "x"}

    tiny_train(tmp_path, run_dir, 6, optim=OPTIM, checkpoint=keep)
    assert measured(run_dir, 6) == {"primary", "law"}
    other = tiny_train(tmp_path, run_dir, 8, optim=OPTIM, checkpoint=keep, evalsets=x("zzqqx jvkw"))
    start, loss = (other["transfer"]["sets"]["x"][key] for key in ("start", "loss"))
    assert loss[0] is None and loss[1] < start  # at the end of the first phase there was no such set


def test_evals_whose_windows_a_copy_lacks_are_told(tmp_path, capfd):
    """As of a copy that was made while the run saved: its `evals/` are older than its checkpoints."""
    run_dir = tmp_path / "run"
    write_corpus(tmp_path)
    tiny_train(tmp_path, run_dir)
    tiny_train(tmp_path, run_dir, 10)
    assert "lacks the windows" not in capfd.readouterr().err
    for step in (6, 9, 12):  # 12 is measured again
        (run_dir / f"evals/{step}.npz").unlink()
    tiny_train(tmp_path, run_dir, 10)
    (told,) = [line for line in capfd.readouterr().err.splitlines() if "lacks the windows" in line]
    assert told.startswith(f"{run_dir}: evals/ lacks the windows of the evals at step 6, 9, which are in the record; ")


def test_an_alarm_where_a_run_is_taken_up_stops_it_once_its_first_update_is_saved(tmp_path, capsys):
    """A phase that the config begins at the step of the checkpoint is measured there, after the switch."""

    def sections(switch):
        return {
            "phases": [
                {"name": "a", "until": switch, "mixture": {"web": 1.0}},
                {"name": "b", "until": "end", "mixture": {"law": 1.0}},
            ],
            "train": {"steps": 40, "batch_size": 4, "seq_len": 32},
            # So high a rate makes every set worse than it was at step 0; law is not read before.
            "optim": {"lr": 3.0, "schedule": "constant", "warmup_steps": 0, "grad_clip": 0.0},
            "checkpoint": {"every": 4, "keep": 9},
            "evalsets": {
                "every": 50,
                "primary": {"held_out_of": "web"},
                "sets": {"law": {"held_out_of": "law"}},
                "regression": {"action": "stop", "tolerance": 0.0},
            },
        }

    run_dir = tmp_path / "run"
    write_corpus(tmp_path)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(StopSignals, "after", lambda self, step: signal.SIGTERM if step == 8 else None)
        tiny_train(tmp_path, run_dir, **sections(30))
    with pytest.raises(RegressionStop, match="stopped at step 9, which was saved: val got worse"):
        tiny_train(tmp_path, run_dir, "latest", **sections(8))
    told = [(e["event"], e["step"]) for e in load_run(run_dir).events if e["step"] >= 8]
    assert [name for name in told if name[0] in ("eval", "phase_switch", "eval_regression")] == [
        ("eval", 8),
        ("phase_switch", 8),
        ("eval_regression", 8),
    ]
    assert (run_dir / "checkpoints/9").is_dir()

    # That it goes on in spite of an alarm is said.
    capsys.readouterr()
    tiny_train(tmp_path, run_dir, "latest", **sections(8) | {"train": {"steps": 10, "batch_size": 4, "seq_len": 32}})
    assert "resumed at step 9 of 10; an alarm of val had stopped it at step 8\n" in capsys.readouterr().out
    resumed = [e.get("stopped_by") for e in load_run(run_dir).events if e["event"] == "resume"]
    assert resumed == [None, {"step": 8, "sets": ["val"]}]


def test_an_eval_from_before_there_was_a_metric_is_read_without_it(tmp_path, monkeypatch):
    path = tmp_path / "evals/0.npz"
    before = WindowResults(*(np.arange(start, start + 3) for start in range(len(WindowResults._fields))))
    write_results(path, {"primary": before}, {})

    fields, defaults = WindowResults._fields, WindowResults._field_defaults.values()
    Later = namedtuple("Later", [*fields, "calibration_N"], defaults=[*defaults, None])
    monkeypatch.setattr(windows, "WindowResults", Later)
    (found,) = read_results(path).values()
    assert found.calibration_N is None and np.array_equal(found[:-1], before)
    write_results(path.with_name("4.npz"), {"primary": found}, {})
    assert read_results(path.with_name("4.npz"))["primary"].calibration_N is None
    write_results(path, {"primary": Later(*before, np.ones(3))}, {})
    assert read_results(path)["primary"].calibration_N.tolist() == [1, 1, 1]
    np.savez(path, **{"primary.nats": before.nats_N, "primary.correct": before.correct_N})
    with pytest.raises(KeyError, match="primary.tokens"):  # which is no metric that came later
        read_results(path)
