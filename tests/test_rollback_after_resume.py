"""A run that was stopped, perhaps edited, and went on, and then goes back to before the stop."""

import json
import os
import shutil
import signal
from functools import partial

import pytest
from tiny_run import diverges, flip_bit, last_state, record, tiny_data, tiny_train, write_corpus

from curriculum.config import build_config
from curriculum.errors import InputError
from curriculum.find_checkpoint import read_ledger
from curriculum.plan_resumed import plan_resumed
from curriculum.run import load_run
from curriculum.run_directory import RunDirectory
from curriculum.train import divergence
from curriculum.train.checkpoints.folder import Checkpoints
from curriculum.train.signals import Stopped, StopSignals
from phases.schedule import Schedule, segments_from_json

RAISES = {
    "optim": {"lr": 3.0, "warmup_steps": 0, "schedule": "constant", "grad_clip": 0.0},
    "phases": [{"name": "a", "until": "end", "mixture": {"web": 0.9, "law": 0.1}}],
    "evalsets": {
        "every": 6,
        "primary": {"held_out_of": "web", "tolerance": 100.0},
        "sets": {"law": {"held_out_of": "law"}},
        "regression": {"action": "replay", "tolerance": 0.0},
    },
    "train": {"steps": 12, "batch_size": 4, "seq_len": 32, "rollback": {"after": 3, "skip_steps": 2, "max": 1}},
}
CALM = RAISES | {"evalsets": {"every": 6, "primary": {"held_out_of": "web"}}}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("rollback_after_resume"))


class Killed(BaseException):
    """A process ends here, and saves nothing more."""


def kill(patch, run_dir, when):
    """End the next process that goes back: before it has changed anything else, or in the first update on the way."""
    set_aside_after, after, killed = Checkpoints.set_aside_after, StopSignals.after, []

    def end_if(there):
        if there and not killed and RunDirectory(run_dir).going_back.exists():
            killed.append(True)
            raise Killed

    def before_anything(checkpoints, step):
        end_if(when == "decided" and checkpoints.directory == (run_dir / "checkpoints").absolute())
        set_aside_after(checkpoints, step)

    def in_an_update(stop, step):
        end_if(when == "recorded")
        return after(stop, step)

    patch.setattr(Checkpoints, "set_aside_after", before_anything)
    patch.setattr(StopSignals, "after", in_an_update)
    return killed


def trained(
    place,
    run_dir,
    monkeypatch,
    *,
    stop=None,
    first=5,
    edit=(),
    back_to=4,
    killed=None,
    meanwhile=None,
    again=(),
    **sections,
):
    """Diverges at step 8, bad from update `first` on, and goes back to step 4; `stop`: the step to stop after.

    Where it is stopped it goes on with `edit` in the place of some sections. `killed`: when it is on the way back; then
    `meanwhile` is called with its folder, and it goes on with `again` in the place of some sections.
    """
    shutil.rmtree(run_dir, ignore_errors=True)
    after = StopSignals.after
    with monkeypatch.context() as patch:
        found = diverges(patch, (8, first))
        if stop is not None:
            patch.setattr(StopSignals, "after", lambda _, step: signal.SIGTERM if step == stop else None)
            with pytest.raises(Stopped):
                tiny_train(place, run_dir, **sections)
            patch.setattr(StopSignals, "after", after)
            assert not found
        goes_on = partial(tiny_train, place, run_dir, **{**sections, **dict(edit)})
        if killed is not None:
            ended = kill(patch, run_dir, killed)
            with pytest.raises(Killed):
                goes_on(resume=None if stop is None else "latest")
            assert ended
            if meanwhile is not None:
                meanwhile(run_dir)
        goes_on(resume=None if stop is None and killed is None else "latest", **dict(again))
    assert [e["step"] for e in load_run(run_dir).events if e["event"] == "rollback"] == [back_to] and found
    assert not RunDirectory(run_dir).going_back.exists()
    return load_run(run_dir)


@pytest.fixture(scope="module")
def unbroken(place):
    """Its share of law is raised at 6, after the first bad update: for the data that are passed over."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return trained(place, place / "unbroken", monkeypatch, **RAISES)


def shares(run):
    return [round(row["mixture"]["law"], 9) for row in run.metrics]


def test_a_share_that_is_raised_on_the_way_back_and_forth_is_raised_once(place, unbroken, tmp_path, monkeypatch):
    assert shares(unbroken) == [0.1] * 6 + [0.2] * 6
    trained(place, tmp_path / "run", monkeypatch, stop=7, **RAISES)
    assert last_state(tmp_path / "run") == last_state(place / "unbroken")
    assert record(tmp_path / "run") == record(place / "unbroken")


def test_so_it_is_where_the_config_was_edited_in_between(place, unbroken, tmp_path, monkeypatch):
    run = trained(
        place, tmp_path / "run", monkeypatch, stop=7, edit={"optim": {**RAISES["optim"], "lr": 2.5}}, **RAISES
    )
    assert shares(run) == shares(unbroken) and {row["lr"] for row in run.metrics[7:]} == {2.5}
    law, other = (
        read_ledger(r.directory.path / "checkpoints/12")["sources"]["law"]["tokens_drawn"] for r in (run, unbroken)
    )
    assert law == other > 0


def test_what_the_config_changed_in_between_is_told_where_it_acts(place, tmp_path, monkeypatch):
    """Trained again are updates 4 and 5, of the same data: the rate from step 7 on is of the schedule, decay is not."""
    sections = {
        "checkpoint": {"every": 4, "keep": 3},
        "evalsets": {"every": 4, "primary": {"held_out_of": "web"}},
        "phases": RAISES["phases"],  # no eval at 6: it would go back to the gold of that step
        "train": RAISES["train"],
        "optim": {"lr": 3e-3, "warmup_steps": 0, "schedule": "constant"},
    }
    optim = {**sections["optim"], "lr": 2e-3, "weight_decay": 50.0}
    run = trained(place, tmp_path / "run", monkeypatch, stop=7, first=6, edit={"optim": optim}, **sections)
    edits = [e for e in run.events if e["event"] == "schedule_edit"]
    assert [(e["step"], [c["path"] for c in e["changes"]], e["reason"]) for e in edits] == [
        (4, ["optim.weight_decay"], "optim.weight_decay 0.1 → 50.0"),
        (7, ["optim.lr"], "optim.lr 0.003 → 0.002"),
    ]
    assert [run.events.index(e) for e in edits][0] == 1 + [e["event"] for e in run.events].index("rollback")
    lines = [json.loads(line) for line in (tmp_path / "run/superseded.jsonl").read_text().splitlines()]
    before = {line["line"]["step"]: line["line"] for line in lines if line["file"] == "metrics.jsonl"}
    now = {row["step"]: row for row in run.metrics}
    assert now[5]["loss"] == before[5]["loss"] and now[6]["loss"] > before[6]["loss"]
    assert [now[step]["lr"] for step in (5, 7, 8, 12)] == [3e-3, 3e-3, 2e-3, 2e-3]


def test_it_goes_back_to_a_gold_that_is_newer_than_what_a_stop_saved(place, tmp_path, monkeypatch):
    """The stop at 5 saves the one checkpoint that is no gold."""
    sections = {
        "checkpoint": {"every": 500},
        "evalsets": {"every": 2, "primary": {"held_out_of": "web"}},
        "train": RAISES["train"],
        "optim": {"lr": 3e-3, "warmup_steps": 0, "schedule": "constant"},
    }
    trained(place, tmp_path / "run", monkeypatch, stop=5, first=7, back_to=6, **sections)


EDITS = {
    "none": {},
    "rate": {"optim": {**RAISES["optim"], "lr": 2.5}},
    "mixture": {"phases": [{"name": "a", "until": "end", "mixture": {"web": 0.4, "law": 0.6}}]},
}


@pytest.mark.parametrize(("name", "back_to"), [("none", 4), ("rate", 4), ("mixture", 4), ("mixture", 0), ("rate", 0)])
def test_a_kill_on_the_way_back_changes_nothing(place, tmp_path, monkeypatch, name, back_to):
    """Though the checkpoint that it goes back to, if there is one, knows neither the rollback nor the edit at 7."""
    data = CALM | {"checkpoint": {"every": 2 if back_to else 500, "keep": 3}}
    once, *killed = (
        trained(
            place, tmp_path / f"{kind}", monkeypatch, stop=7, edit=EDITS[name], back_to=back_to, killed=kind, **data
        )
        for kind in (None, "decided", "recorded")
    )
    assert len(set(shares(once))) == (2 if name == "mixture" else 1)
    for run in killed:
        assert record(tmp_path / "None") == record(run.directory.path)
        assert last_state(tmp_path / "None") == last_state(run.directory.path)
        edited = [(e["step"], [c["path"] for c in e["changes"]]) for e in run.events if e["event"] == "schedule_edit"]
        assert edited == ([] if name == "none" else [(7, ["optim.lr" if name == "rate" else "phases.a.mixture"])])


def passed_over(run):
    """Tokens that the schedule of the last checkpoint passes over."""
    schedule = Schedule(segments_from_json(read_ledger(run.directory.checkpoints / "12")["segments"]))
    total = schedule.total_steps
    return sum(schedule.cursors_at(total).values()) - sum(schedule.read(0, total).values())


@pytest.mark.parametrize("back_to", [4, 0])
def test_an_edit_after_a_kill_on_the_way_back_does_not_bring_the_bad_data_again(place, tmp_path, monkeypatch, back_to):
    data = CALM | {"checkpoint": {"every": 2 if back_to else 500, "keep": 3}}
    once = trained(place, tmp_path / "once", monkeypatch, back_to=back_to, **data)
    slower = {"optim": {**RAISES["optim"], "lr": 2.5}}
    for when in ("decided", "recorded"):
        killed = trained(place, tmp_path / when, monkeypatch, back_to=back_to, killed=when, again=slower, **data)
        assert passed_over(killed) == passed_over(once) > 0
        assert killed.metrics[-1]["lr"] == 2.5


def test_on_the_way_back_to_a_checkpoint_that_is_damaged_meanwhile(place, tmp_path, monkeypatch):
    """It goes on from the one before, still with the rollback."""

    def damage(run_dir):
        flip_bit(max((run_dir / "checkpoints/4/params").rglob("*"), key=lambda p: p.is_file() and p.stat().st_size))

    run = trained(place, tmp_path / "run", monkeypatch, killed="recorded", meanwhile=damage, back_to=2, **CALM)
    assert passed_over(run) > 0


def test_a_plan_on_the_way_back_is_that_of_the_run(place, tmp_path, monkeypatch):
    def plan(run_dir):
        planned = plan_resumed(build_config(tiny_data(place, **CALM)), run_dir, store_dir=place / "store")
        assert (planned.resumes["step"], planned.resumes["edit"]) == (4, None)

    for when in ("decided", "recorded"):
        trained(place, tmp_path / when, monkeypatch, killed=when, meanwhile=plan, **CALM)


def test_the_file_of_the_way_back_has_its_name_on_the_disk_before_anything_is_changed(place, tmp_path, monkeypatch):
    forced, run_dir = set(), tmp_path / "run"

    def fsync(descriptor):
        forced.add((os.fstat(descriptor).st_ino, RunDirectory(run_dir).going_back.exists()))

    def check(_):
        assert (run_dir.stat().st_ino, True) in forced
        forced.add("checked")

    monkeypatch.setattr(os, "fsync", fsync)
    trained(place, run_dir, monkeypatch, killed="decided", meanwhile=check, **RAISES)
    assert "checked" in forced


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"step": 4, "ledger": {}, "rollback": {"rollbacks": [1]}}'])
def test_a_damaged_file_of_the_way_back_is_told_and_a_step_goes_without_it(place, tmp_path, monkeypatch, content):
    class Enough(Exception):
        pass

    def damage(run_dir):
        file = RunDirectory(run_dir).going_back
        file.write_text(content)
        with pytest.raises(InputError, match=r"going_back\.json: is damaged; delete it"):
            tiny_train(place, run_dir, resume="latest", **CALM)
        assert file.exists()
        tiny_train(place, run_dir, resume=2, **CALM)
        assert not file.exists()
        raise Enough

    with pytest.raises(Enough):
        trained(place, tmp_path / "run", monkeypatch, killed="recorded", meanwhile=damage, **CALM)


def test_a_mesh_that_does_not_divide_the_rows_of_a_past_phase_is_told_on_the_way_back(place, tmp_path, monkeypatch):
    """A resume checks the phases ahead alone, so that a finished one may have other rows."""
    asked = []
    monkeypatch.setattr(divergence, "row_shards", lambda mesh: asked.append(mesh) or 3)
    with pytest.raises(divergence.Diverged) as told:
        trained(place, tmp_path / "run", monkeypatch, **RAISES)
    assert (
        "  rollbacks    0 of 1\n               the run cannot go back to step 4 on this mesh: train.batch_size: got 4 in"
        in str(told.value)
    )
    assert asked and load_run(tmp_path / "run").diverged["last_good_step"] == 4
