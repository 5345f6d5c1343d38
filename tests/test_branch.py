"""Branches: the trunk's run up to a step, exactly, and one of their own from there; and schedules edited in a run."""

import errno
import json
import os
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from compared_runs import saved_arrays, without_clock
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.util import tensor_util
from test_trainer import WORDS
from tiny_run import write_corpus

from curriculum.branch import _headed, _settled, branch
from curriculum.branching.copy import copy_trunk
from curriculum.cli.main import cli
from curriculum.config import build_config, load_config
from curriculum.disk.durable import scratch
from curriculum.disk.manifest import damage, write_manifest
from curriculum.errors import InputError
from curriculum.find_checkpoint import checkpoint_steps, read_ledger
from curriculum.parsing.yaml12 import read_yaml
from curriculum.record.commands import program
from curriculum.run import load_run
from curriculum.run_directory import RunDirectory
from curriculum.scheduling import Past, resolve_schedule
from curriculum.train.history import History
from curriculum.train.resuming import ledger
from curriculum.train.setup import build
from curriculum.train.trainer import train
from curriculum.views.inspection import inspect_run
from curriculum.views.shared_past import shared_past
from phases.replay import ReplayRefused
from phases.schedule import segments_from_json


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three sources and the config of a trunk of 24 steps, with a checkpoint every 2."""
    folder = write_corpus(tmp_path_factory.mktemp("branch"), WORDS)
    data = {
        "name": "trunk",
        "tokenizer": {"kind": "byte"},
        "model": {"preset": "tiny", "n_layer": 1, "d_model": 16, "n_head": 2, "n_kv_head": 1, "d_ff": 24},
        "sources": {name: {"path": str(folder / f"{name}.jsonl"), "held_out": "10%"} for name in WORDS},
        "phases": [
            {"name": "a", "until": 8, "mixture": {"web": 0.7, "code": 0.3}},
            {"name": "b", "until": 18, "mixture": {"law": 0.8, "web": 0.2}, "ramp_steps": 7},
            {"name": "c", "until": "end", "mixture": {"code": 1.0}},
        ],
        "evalsets": {"every": 4, "primary": {"held_out_of": "web"}, "sets": {"law": {"held_out_of": "law"}}},
        "train": {"steps": 24, "batch_size": 4, "seq_len": 32},
        "optim": {"lr": 3e-3, "warmup_steps": 3, "decay_steps": 8},
        "checkpoint": {"every": 2, "keep": 20},
        "logging": {"every": 3},
    }
    (folder / "trunk.yaml").write_text(yaml.safe_dump(data))
    return folder


@pytest.fixture(scope="module")
def whole(folder):
    """The trunk, trained to its end; it remembers an option."""
    config = load_config(folder / "trunk.yaml", ["logging.every=2"])
    train(config, folder / "whole", store_dir=folder / "store")
    return folder / "whole"


@pytest.fixture
def trunk(whole, tmp_path):
    """A copy of the trunk whose newest checkpoint is that of step 12."""
    shutil.copytree(whole, tmp_path / "trunk")
    for place in ("checkpoints", "gold"):
        for step in checkpoint_steps(tmp_path / "trunk" / place):
            if step > 12:
                shutil.rmtree(tmp_path / "trunk" / place / str(step))
    return tmp_path / "trunk"


EDITS = ["phases[1].until=17", "phases[1].mixture={web: 1.0}", "train.steps=20"]


@pytest.fixture(scope="module")
def branched(folder, whole):
    """At step 14, from the checkpoint of 12 of a trunk that is gone afterwards: (directory, what was printed)."""
    trunk, new = folder / "trunk", folder / "runs" / "new"
    shutil.copytree(whole, trunk)
    shutil.rmtree(trunk / "checkpoints/14")
    options = [f"--set={edit}" for edit in [*EDITS, "checkpoint.every=1"]]
    arguments = ["branch", str(trunk), "--at", "14", "--run-dir", str(new), *options]
    done = CliRunner().invoke(cli, [*arguments, "--store-dir", str(folder / "store")], catch_exceptions=False)
    assert done.exit_code == 0
    shutil.rmtree(trunk)
    return new, done.output


def state(run_dir, step):
    return saved_arrays(run_dir / "checkpoints" / str(step))


def record(run_dir, up_to=10**9):
    """Events and metrics up to a step, without clocks and what a process tells of itself."""
    run = load_run(run_dir)
    skipped = ("resume", "checkpoint", "schedule_edit")
    rows = [
        [
            {k: v for k, v in line.items() if k != "progress_pct"}
            for line in without_clock(lines)
            if line["step"] <= up_to and line.get("event") not in skipped
        ]
        for lines in (run.events, run.metrics)
    ]
    assert all(rows)
    return rows


def test_up_to_its_step_a_branch_is_its_trunk_and_after_it_its_own(whole, branched, folder):
    new, shown = branched
    assert f"resumed at step 12 of 20, a branch of {folder / 'trunk'}\n" in shown and "complete: 20 steps" in shown
    assert state(new, 14) == state(whole, 14)  # the trunk's own checkpoint of 14 was gone
    assert record(new, 14) == record(whole, 14)
    for step in (0, 4, 8, 12):
        with np.load(new / f"evals/{step}.npz") as mine, np.load(whole / f"evals/{step}.npz") as other:
            assert mine.files and all(np.array_equal(mine[name], other[name]) for name in other.files)
    assert not (new / "evals/24.npz").exists()
    segments = segments_from_json(read_ledger(new / "checkpoints/20")["segments"])
    assert [(s.phase, s.start, s.end) for s in segments] == [("a", 0, 8), ("b", 8, 14), ("b", 14, 17), ("c", 17, 20)]
    trunk = segments_from_json(read_ledger(whole / "checkpoints/24")["segments"])
    assert segments[0] == trunk[0] and segments[1].quotas.sources == trunk[1].quotas.sources
    assert [row["mixture"] for row in load_run(new).metrics if row["step"] == 16] == [
        {"web": 1.0, "code": 0.0, "law": 0.0}
    ]
    assert record(new)[0][-1]["event"] == "training_complete" and record(new)[0][-1]["total_steps"] == 20
    assert state(new, 16) != state(whole, 16) and state(new, 20).keys() == state(whole, 20).keys()


def test_a_branch_tells_where_it_comes_from(branched, folder):
    new, printed = branched
    resolved = json.loads((new / "config.resolved.json").read_text())
    point = resolved["derived"]["branched_from"]
    assert len(point.pop("id")) == 16
    assert point == {"run": str(folder / "trunk"), "step": 14, "branched_from": None}
    assert resolved["command_line"][0] == "--set logging.every=2"  # the trunk's own
    assert "--set train.steps=20" in resolved["command_line"]
    head, empty, rest = (new / "config.yaml").read_text().partition("\n\n")
    assert empty and rest == (folder / "trunk.yaml").read_text()
    first, *added, last = head.splitlines()
    assert first == f"# A branch of {folder / 'trunk'} from step 14: the config of that run, to which this one adds"
    assert added == [f"#   {option}" for option in resolved["command_line"]]
    assert last == "# What is trained is written out in config.resolved.json."
    events = [(e["event"], e["step"]) for e in load_run(new).events]
    assert events.count(("schedule_edit", 14)) == 1 and [e for e in events if e[0] == "training_start"] == [
        ("training_start", 0)
    ]
    (edit,) = [e for e in load_run(new).events if e["event"] == "schedule_edit"]
    assert edit["kind"] == "branch" and edit["phase"] == "b" and edit["until"] == 17
    # The trunk's ramp has come to its end at step 14; the branch's is as far, to another mixture.
    assert edit["mixture_before"] == {"law": 0.8, "web": 0.2} and edit["mixture_after"] == {"web": 1.0}
    assert edit["reason"].startswith(f"branched from {folder / 'trunk'} at step 14 --set phases.b.until=17")
    assert "logging.every" not in edit["reason"]
    changed = {change["path"]: (change["was"], change["now"]) for change in edit["changes"]}
    assert changed.keys() == {"phases.b.until", "phases.b.mixture", "train.steps"}
    assert changed["train.steps"] == (24, 20) and changed["phases.b.mixture"][1] == {"web": 1.0}
    told = f"train {new / 'config.yaml'} --run-dir {new} --store-dir {folder / 'store'} --resume"
    longer = inspect_run(load_run(new))["commands"]["train longer"]
    assert longer.endswith(f"{told} 12 --set train.steps=MORE") and f"{longer}\n" in printed


@pytest.mark.parametrize("step", [12, 13, 17])
def test_a_branch_resumes_exactly(branched, folder, tmp_path, step):
    """From the checkpoint that it took over, from one before it left its trunk, and from a later one."""
    new, again = branched[0], tmp_path / "again"
    shutil.copytree(new, again)
    config = load_config(again / "config.yaml", remembered=RunDirectory(again).command_line())
    train(config, again, resume=step, store_dir=folder / "store")
    assert state(again, 20) == state(new, 20)
    assert record(again) == record(new)
    events = [[(e["event"], e["step"]) for e in load_run(r).events if e["event"] != "resume"] for r in (again, new)]
    assert events[0] == events[1] and ("schedule_edit", 14) in events[0]


def test_a_branch_at_a_checkpoint_may_change_how_it_trains(whole, folder, tmp_path, capsys):
    new = tmp_path / "new"
    few = "evalsets.sets.few={held_out_of: code, max_sequences: 1}"
    overrides = ["optim.weight_decay=0.5", "train.steps=28", few]
    branch(whole, "16", new, overrides=overrides, store_dir=folder / "store")
    assert record(new, 15) == record(whole, 15)
    (edit,) = (e for e in load_run(new).events if e["event"] == "schedule_edit")
    (warning,) = edit["warnings"]
    told = capsys.readouterr()
    assert (
        warning.startswith("evalsets.sets.few measures 1 of its 8 documents: the first alone has 5 windows")
        and f"warning: {warning}\n" == told.err
    )
    assert told.out.startswith(
        f"schedule edit at step 16: {edit['reason']} | {edit['phase']} until step {edit['until']}\n"
    )
    events = [(e["event"], e["step"]) for e in load_run(new).events]
    at = events.index(("schedule_edit", 16))
    assert events[at - 1 : at + 2] == [("checkpoint", 16), ("schedule_edit", 16), ("resume", 16)]
    assert inspect_run(new)["progress"]["num_resumes"] == 0
    config = load_config(new / "config.yaml", remembered=RunDirectory(new).command_line())
    train(config, new, resume=16, store_dir=folder / "store")  # the edit is of the checkpoint's record
    assert "warning" not in capsys.readouterr().out
    events = [(e["event"], e["step"]) for e in load_run(new).events]
    assert events.count(("schedule_edit", 16)) == 1 and state(new, 18) != state(whole, 18)
    assert inspect_run(load_run(new))["progress"]["num_resumes"] == 1


def test_a_branch_that_minimises_something_else_has_no_gold_until_it_finds_one(whole, folder, tmp_path):
    """Of the trunk's gold nothing is said any more: it is the best by another measure."""
    other = ["evalsets.gold.minimise=law/loss", "evalsets.gold.overfit_ratio=0.1"]
    complete = branch(whole, 12, tmp_path / "new", overrides=other, store_dir=folder / "store")
    blocked = [e for e in load_run(tmp_path / "new").events if e["event"] == "gold_blocked" and e["step"] > 12]
    assert blocked and complete["gold_step"] is None and load_run(tmp_path / "new").gold_step is None
    assert load_run(whole).gold_step is not None


def test_what_a_branch_takes_over(trunk, folder, tmp_path):
    golds = checkpoint_steps(trunk / "gold")
    assert golds and max(golds) <= 12
    shutil.copytree(trunk / "checkpoints/12", trunk / "gold/20")
    write_manifest(trunk / "gold/20", 20)
    shutil.copytree(trunk / "checkpoints/8", trunk / "kept/8")
    new = tmp_path / "new"
    with scratch(tmp_path, new) as killed:
        (killed / "new" / "checkpoints" / "2").mkdir(parents=True)
        shutil.copytree(killed.parent, f"{killed.parent}k")  # nobody holds it, as of a call that was killed
    branch(trunk, 13, new, overrides=["train.steps=20"], store_dir=folder / "store")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "trunk"]
    # Of the golds the one that the checkpoint speaks of; that of 20 is the branch's own.
    assert golds[-1] in checkpoint_steps(new / "gold") and checkpoint_steps(new / "kept") == [8]
    assert read_ledger(new / "gold" / str(checkpoint_steps(new / "gold")[-1]))["step"] > 12
    past = ledger.past_of(read_ledger(new / "gold" / str(golds[-1])))
    assert past[-1].end == 13 and past == ledger.past_of(read_ledger(new / "checkpoints/20"))
    assert sorted(int(p.name) for p in (new / "checkpoints").iterdir()) == [12, 14, 16, 18, 20]


@pytest.mark.parametrize("linked", [True, False])
def test_what_a_branch_takes_over_takes_no_space_where_the_disk_has_hard_links(
    trunk, folder, tmp_path, monkeypatch, linked
):
    def held(place):
        return {path.relative_to(place): path.read_bytes() for path in place.rglob("*") if path.is_file()}

    def refused(path, to):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    if not linked:
        monkeypatch.setattr(os, "link", refused)
    before, own = held(trunk), [Path("ledger/metadata"), Path("manifest.json")]
    gold = f"gold/{checkpoint_steps(trunk / 'gold')[-1]}"
    branch(trunk, 12, tmp_path / "new", overrides=["train.steps=20"], store_dir=folder / "store")
    for taken in ("checkpoints/12", gold):
        names = held(trunk / taken)
        assert damage(tmp_path / "new" / taken) is None and len(names) > 10 and set(own) < set(names)
        shared = [name for name in names if (trunk / taken / name).samefile(tmp_path / "new" / taken / name)]
        assert sorted(shared) == (sorted(set(names) - set(own)) if linked else [])
    assert held(trunk) == before


def of_resumed_trunk(folder, trunk, tmp_path):
    """At step 20 of a trunk that was resumed at 12."""
    train(load_config(folder / "trunk.yaml", ["logging.every=2"]), trunk, resume=12, store_dir=folder / "store")
    branch(trunk, 20, tmp_path / "new", overrides=["train.steps=26"], store_dir=folder / "store")
    assert [event["step"] for event in load_run(tmp_path / "new").events if event["event"] == "resume"] == [12, 20]
    return tmp_path / "new"


@pytest.mark.parametrize("resumed", [False, True])
def test_a_branch_s_curves_are_the_trunk_s_and_then_its_own_without_a_zig_zag(request, resumed):
    if resumed:
        new = of_resumed_trunk(*(request.getfixturevalue(name) for name in ("folder", "trunk", "tmp_path")))
    else:
        new, _ = request.getfixturevalue("branched")
    multiplexer = EventMultiplexer(size_guidance={"tensors": 0}).AddRunsFromDirectory(str(new / "tensorboard"))
    multiplexer.Reload()
    run = load_run(new)
    curves = {tag: multiplexer.Tensors(".", tag) for tag in ("train/loss", "eval/law/loss", "phase/index")}
    for tag, expected in {
        "train/loss": [(row["step"], row["loss"]) for row in run.metrics],
        "eval/law/loss": run.evals("law"),
        "phase/index": [(row["step"], "abc".index(row["phase"])) for row in run.metrics],
    }.items():
        points = [(e.step, float(tensor_util.make_ndarray(e.tensor_proto))) for e in curves[tag]]
        assert points == [(step, float(np.float32(value))) for step, value in expected] and points[0][0] in (0, 2)
    session = multiplexer.GetAccumulator(".").SummaryMetadata("_hparams_/session_start_info")
    assert b"new" in session.plugin_data.content and b"whole" not in session.plugin_data.content


@pytest.mark.parametrize(
    "at, overrides, words",
    [
        ("25", [], "--at 25: .*trunk has only reached step 24; give a step up to 24"),
        ("-1", [], "--at -1: expected a step of"),
        ("half", [], "--at half: expected a step of"),
        (12.0, [], "--at 12.0: expected a step of"),
        (np.int64(25), [], "--at 25: .*trunk has only reached step 24; give a step up to 24"),
        ("9" * 5000, [], "--at 9+: expected a step of"),  # Python refuses to read as many digits
        ("1", [], "--at 1: .*trunk has no checkpoint at or before it; available: 2, 4, 6, 8, 10, 12$"),
        ("12", ["seed=7"], "seed: got 7, but steps 0 to 12 were trained with 1337"),
        ("12", ["model.n_layer=2"], "model: the architecture of a run cannot change"),
        ("12", ["tokenizer={kind: char}"], "tokenizer: is not the one that the run was trained with"),
        ("12", ["train.stepz=20"], "train.stepz: no such key"),
        ("13", ["optim.weight_decay=0.5"], "optim.weight_decay: got 0.5, but the branch must repeat steps 12 to 13 as its "
         "trunk trained them, with 0.1; restore it, or branch at the step of a checkpoint: 2, 4, 6, 8, 10, 12"),
        ("13", ["train.grad_accum=2"], "train.grad_accum: got 2, but the branch must repeat steps 12 to 13"),
        ("13", ["train.batch_size=8"], "train.batch_size: got 8"),
        ("13", ["phases[1].grad_accum=2"], r"phases\[1\].grad_accum: got 2, but the branch must repeat steps 12 to 13"),
        ("12", ["phases[0].batch_size=2"], r"phases\[0\].batch_size: got 2, but steps 0 to 8 were trained with 4"),
        ("13", ["evalsets.every=3"], "evalsets.every: got 3, but the branch must repeat steps 12 to 13 .* with 4; re"),
        ("13", ["evalsets.gold.minimise=law/loss"], 'evalsets.gold.minimise: got "law/loss", but the branch must repeat'),
        ("13", ["evalsets.regression.tolerance=0.5"], "evalsets.regression.tolerance: got 0.5, but the branch must repeat"),
        ("13", ["evalsets.sets.web={held_out_of: web}"], "evalsets.sets.web: got .*, but the branch must repeat steps 12"),
        ("13", ["logging.every=1"], "logging.every: got 1, but the branch must repeat steps 12 to 13"),
        ("12", ["train.batch_size=8"], "train.batch_size: got 8, but steps 0 to 8 were trained with 4; leave it as it was"),
        ("13", ["train.steps=13"], "train.steps: the run ends at step 13, where the branch begins"),
        ("12", ["sources.law.max_epochs=0.001", "sources.law.on_exhaust=stop"], "sources: the run ends at step 12, where "
         "the branch begins, as a source with on_exhaust: stop is used up; raise its max_epochs, or choose another"),
        ("13", ["train.steps=12"], "train.steps: got 12, but the run's schedule is already fixed"),
        ("13", ["optim.lr=3e-2"], "optim.allow_jump: the learning rate jumps from 0.003 to 0.03 at step 13, "
         "where the fixed part of the schedule ends: more than 2x; start a phase there with its own lr"),
        ("8", ["optim.lr=3e-2"], "optim.allow_jump: the learning rate jumps from 0.003 to 0.03 at step 8, where the fixed "
         "part of the schedule ends: more than 2x; give the phase that begins there its own lr"),
    ],
)  # fmt: skip
def test_what_cannot_be_branched_is_refused_and_creates_nothing(trunk, folder, at, overrides, words):
    if "train.steps=13" in overrides or "train.steps=12" in overrides:
        overrides = [
            *overrides,
            "phases=[{name: a, until: 8, mixture: {web: 7, code: 3}}, {name: b, until: end, mixture: {web: 1}}]",
        ]
    before, stores = sorted(trunk.rglob("*")), sorted((folder / "store/stores").iterdir())
    with pytest.raises(InputError, match=words):
        branch(trunk, at, trunk.parent / "new", overrides=overrides, store_dir=folder / "store")
    assert stores and sorted((folder / "store/stores").iterdir()) == stores
    assert [p.name for p in trunk.parent.iterdir()] == ["trunk"] and sorted(trunk.rglob("*")) == before


def test_a_branch_without_a_source_that_was_read_is_told_to_begin_before_it_was(whole, folder, tmp_path):
    """And of no option that `branch` does not have."""
    sources = {name: {"path": str(folder / f"{name}.jsonl"), "held_out": "10%"} for name in ("web", "code")}
    overrides = [f"sources={json.dumps(sources)}", "phases[1].mixture={web: 1}", "evalsets.sets={}"]
    message = (
        "sources: law is gone, but [0-9,]+ of its tokens were trained on; restore it, or branch before it was read$"
    )
    with pytest.raises(InputError, match=message):
        branch(whole, 12, tmp_path / "new", overrides=overrides, store_dir=folder / "store")


def test_where_a_branch_may_not_lie(whole, tmp_path):
    with pytest.raises(InputError, match="holds no run; expected a directory made by"):
        branch(tmp_path, 4, tmp_path / "new")
    with pytest.raises(InputError, match=r"already holds a run; choose another, or continue .*--resume latest"):
        branch(whole, 4, whole)
    shutil.copytree(whole, tmp_path / "from Python")
    (tmp_path / "from Python/config.yaml").unlink()
    with pytest.raises(InputError, match="already holds a run; choose another$"):
        branch(whole, 4, tmp_path / "from Python")
    shutil.rmtree(tmp_path / "from Python")
    inside = whole / "checkpoints" / "sub"
    with pytest.raises(InputError, match="checkpoints/sub: lies within the run .*whole; choose a folder outside it"):
        branch(whole, 4, inside)
    assert not inside.exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    with pytest.raises(InputError, match="full: is not empty; choose a new folder"):
        branch(whole, 4, tmp_path / "full")
    with pytest.raises(InputError, match="mine.txt is not a writable folder"):
        branch(whole, 4, tmp_path / "full/mine.txt")
    assert [p.name for p in tmp_path.iterdir()] == ["full"]


def test_a_trunk_whose_record_is_cut_short_is_refused(trunk, folder, tmp_path):
    events = trunk / "events.jsonl"
    events.write_bytes(b"\n".join(events.read_bytes().split(b"\n")[:9]) + b"\n")
    metrics = trunk / "metrics.jsonl"
    with pytest.raises(InputError, match="events.jsonl: got .* bytes, expected a line to end at byte"):
        branch(trunk, 12, tmp_path / "new", store_dir=folder / "store")
    assert metrics.exists() and not (tmp_path / "new").exists()


def test_a_checkpoint_that_a_training_trunk_deletes_meanwhile_is_told_as_gone(trunk, folder, tmp_path, monkeypatch):
    def deleted(made, directory, setup, step, checkpoint, *more):
        shutil.rmtree(checkpoint)
        return copy_trunk(made, directory, setup, step, checkpoint, *more)

    monkeypatch.setattr("curriculum.branch.copy_trunk", deleted)
    with pytest.raises(InputError, match="checkpoints/12: is gone: a training run keeps only its newest"):
        branch(trunk, 12, tmp_path / "new", store_dir=folder / "store")
    assert not (tmp_path / "new").exists()


def test_of_two_branches_into_one_new_directory_the_later_is_refused(trunk, folder, tmp_path, monkeypatch):
    """It was new to both when they began; neither removes what the other is making."""
    new = tmp_path / "new"

    def overtaken(made, *more):
        monkeypatch.undo()
        branch(trunk, 13, new, overrides=["train.steps=20"], store_dir=folder / "store")
        return copy_trunk(made, *more)

    monkeypatch.setattr("curriculum.branch.copy_trunk", overtaken)
    with pytest.raises(InputError, match=f"--run-dir {new}: is not empty any more; choose a new folder"):
        branch(trunk, 13, new, overrides=["train.steps=22"], store_dir=folder / "store")
    assert load_run(new).events[-1]["event"] == "training_complete" and load_run(new).events[-1]["step"] == 20
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "trunk"]


def test_a_damaged_checkpoint_is_told_and_the_one_before_serves(whole, trunk, folder, tmp_path, capsys):
    array = next((trunk / "checkpoints/12/params/d").iterdir())
    array.write_bytes(array.read_bytes()[:-1])
    shutil.rmtree(trunk / "gold/12", ignore_errors=True)
    branch(trunk, 13, tmp_path / "new", overrides=["train.steps=20"], store_dir=folder / "store")
    assert f"{trunk}/checkpoints/12: is damaged: params/d/" in capsys.readouterr().err
    assert record(tmp_path / "new", 13) == record(whole, 13)
    assert sorted(int(p.name) for p in (tmp_path / "new/checkpoints").iterdir())[:2] == [10, 12]
    assert state(tmp_path / "new", 12) == state(whole, 12)


def test_a_damaged_checkpoint_has_another_place_beside_it(trunk, folder, tmp_path):
    shutil.copytree(trunk / "checkpoints/12", trunk / "kept/12")
    (trunk / "checkpoints/12/params/_METADATA").unlink()
    branch(trunk, 12, tmp_path / "new", overrides=["train.steps=20"], store_dir=folder / "store")
    assert sorted(int(p.name) for p in (tmp_path / "new/checkpoints").iterdir()) == [12, 14, 16, 18, 20]


def test_a_trunk_without_a_checkpoint_that_verifies_is_refused(trunk, folder, tmp_path):
    shutil.rmtree(trunk / "gold", ignore_errors=True)
    for checkpoint in (trunk / "checkpoints").iterdir():
        (checkpoint / "params/_METADATA").unlink()
        (checkpoint / "params/_METADATA").symlink_to("nowhere")
    with pytest.raises(InputError, match="12: is damaged: .*_METADATA: no checksum can be taken: No such .* none"):
        branch(trunk, 12, tmp_path / "new", overrides=["train.steps=20"], store_dir=folder / "store")
    assert [p.name for p in tmp_path.iterdir()] == ["trunk"]


def test_a_run_of_no_file_branches_too(whole, folder, tmp_path):
    data = yaml.safe_load((folder / "trunk.yaml").read_text()) | {"checkpoint": {"every": 4, "keep": 9}}
    data["logging"] = {"tensorboard": False}
    train(build_config(data), tmp_path / "trunk", store_dir=folder / "store")
    done = branch(
        tmp_path / "trunk", 20, tmp_path / "new", overrides=["phases[2].mixture={web: 1}"], store_dir=folder / "store"
    )
    assert done["total_steps"] == 24 and not (tmp_path / "new/config.yaml").exists()
    resolved = json.loads((tmp_path / "new/config.resolved.json").read_text())
    assert resolved["phases"][2]["mixture"] == {"web": 1} and not (tmp_path / "new/tensorboard").exists()
    assert record(tmp_path / "new", 20) == record(tmp_path / "trunk", 20)
    assert state(tmp_path / "new", 24) != state(tmp_path / "trunk", 24)


@pytest.fixture(scope="module")
def replaying(folder):
    """A trunk whose sets get worse at the evals of 12 and 16, whereupon their sources are replayed more."""
    data = yaml.safe_load((folder / "trunk.yaml").read_text())
    data["phases"][1]["lr"] = {"rewarm_steps": 2, "peak": 3.0}
    data["evalsets"]["sets"] = {"code": {"held_out_of": "code"}}  # worse as well; law is left to give for both
    data["evalsets"]["regression"] = {"action": "replay", "replay_factor": 1.5, "replay_max_share": 0.9}
    data["checkpoint"] = {"every": 10, "keep": 9}
    (folder / "replaying.yaml").write_text(yaml.safe_dump(data))
    train(load_config(folder / "replaying.yaml"), folder / "replaying", store_dir=folder / "store")
    return folder / "replaying"


def edits(run_dir):
    return without_clock(event for event in load_run(run_dir).events if event["event"] == "schedule_edit")


@pytest.mark.parametrize("at", [14, 13, 12, 10])
def test_a_branch_without_a_change_is_its_trunk_to_the_end(replaying, folder, tmp_path, at):
    assert [(e["step"], e["kind"]) for e in edits(replaying)][:1] == [(12, "replay")]
    new = tmp_path / "new"
    branch(replaying, at, new, store_dir=folder / "store")
    assert state(new, 24) == state(replaying, 24)
    assert record(new) == record(replaying)
    own = [e for e in edits(new) if e["kind"] == "branch"]
    assert [e for e in edits(new) if e["kind"] == "replay"] == edits(replaying) and len(own) == 1
    assert own[0]["step"] == at and own[0]["mixture_before"] == own[0]["mixture_after"]


def test_a_raised_share_lasts_unless_the_branch_changes_its_phase(replaying, folder, tmp_path):
    trunk = segments_from_json(read_ledger(replaying / "checkpoints/24")["segments"])
    raised = next(s for s in trunk if s.start == 12)
    assert raised.mixture == pytest.approx({"law": 0.7, "web": 0.3})  # nothing of it at the cost of code
    assert raised.ramp.from_mixture == pytest.approx({"web": 0.7, "code": 0.3})
    other_words = ["phases[1].mixture={law: 80, web: 20}", "phases[1].batch_size=4", "adaptation.replay={web: 0.1}"]
    for name, changes, kept in (
        ("kept", ["phases[2].mixture={web: 1.0}", *other_words], True),
        ("changed", ["phases[1].mixture={law: 0.7, web: 0.3}"], False),
    ):
        branch(replaying, 13, tmp_path / name, overrides=changes, store_dir=folder / "store")
        segments = segments_from_json(read_ledger(tmp_path / name / "checkpoints/24")["segments"])
        (on,) = [s for s in segments if s.start == 13]
        assert on.mixture == (raised.mixture if kept else {"law": 0.7, "web": 0.3})
        assert (replace(on, end=0, lr=()) == replace(raised.continued(13), end=0, lr=())) == kept
        assert [e for e in edits(tmp_path / name) if e["step"] == 12] == [
            e for e in edits(replaying) if e["step"] == 12
        ]


def test_a_raised_share_of_the_last_phase_stays_raised_in_a_longer_branch(replaying, folder, tmp_path):
    data = yaml.safe_load((folder / "replaying.yaml").read_text())
    del data["phases"][2]
    data["phases"][1]["until"] = "end"
    trunk = tmp_path / "trunk"
    train(build_config(data), trunk, store_dir=folder / "store")
    for at in (20, 24):
        branch(trunk, at, tmp_path / f"at{at}", overrides=["train.steps=30"], store_dir=folder / "store")
        segments = segments_from_json(read_ledger(tmp_path / f"at{at}/checkpoints/30")["segments"])
        assert (at, segments[-1].mixture) == (at, pytest.approx({"law": 0.7, "web": 0.3}))
    # And in one of a trunk that was made longer itself.
    data["train"]["steps"] = 30
    train(build_config(data), trunk, store_dir=folder / "store", resume="latest", accept_past=True)
    for at in (24, 27):
        branch(trunk, at, tmp_path / f"from{at}", store_dir=folder / "store")
        assert state(tmp_path / f"from{at}", 30) == state(trunk, 30)


def test_a_phase_ends_where_a_rollback_left_it_only_in_a_branch_that_takes_the_rollback_over(folder):
    config = load_config(folder / "trunk.yaml")
    whole = resolve_schedule(config, dict.fromkeys(config.sources, 10**6))
    settled = {"a.until": 8, "b.until": 18, "b.ramp_steps": 7}
    first, second = ({"first_bad_step": step} for step in (3, 12))
    for rollbacks, stand in (([first, second], settled), ([first], {"a.until": 8, "b.ramp_steps": 7})):
        assert _settled(settled, whole, rollbacks) == stand
    assert _settled(settled, whole, []) == {"b.ramp_steps": 7}


def test_a_branch_of_a_branch_tells_of_both_and_shares_the_pasts_of_both(replaying, folder, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    branch(replaying, 13, first, overrides=["phases[2].mixture={web: 1.0}"], store_dir=folder / "store")
    branch(first, 17, second, overrides=["train.steps=26"], store_dir=folder / "store")  # from the checkpoint of 10
    assert record(second, 17) == record(first, 17)
    told = [e for e in edits(first) if e["step"] <= 16]
    assert [e["step"] for e in told if e["kind"] == "branch"] == [13]
    assert edits(second)[: len(told)] == told and edits(second)[len(told)]["step"] == 17
    runs = [load_run(path) for path in (replaying, first, second)]
    assert [shared_past(runs[i], runs[j]) for i, j in ((0, 1), (0, 2), (1, 2))] == [13, 13, 17]
    point = runs[2].branched_from
    assert (point["step"], point["branched_from"]["step"], point["branched_from"]["branched_from"]) == (17, 13, None)
    assert point["branched_from"] == runs[1].branched_from


def test_a_branch_of_a_branch_from_before_that_left_knows_the_phases_that_were_planned_then(
    whole, branched, folder, tmp_path
):
    """The number of evals that lie ahead is what a verdict's confidence is shared among."""
    phases = "phases=[{name: a, until: 8, mixture: {web: 7, code: 3}}, {name: b, until: end, mixture: {web: 1}}]"
    first, second = tmp_path / "first", tmp_path / "second"
    detectable = {}
    for trunk, new in ((whole, first), (branched[0], second)):
        branch(trunk, 13, new, overrides=[phases, "train.steps=20"], store_dir=folder / "store")
        assert read_ledger(new / "checkpoints/20")["branched_from"]["phase_ends"] == [[13, [8, 18, 24]]]
        detectable[new] = [(e["step"], e["detectable"]) for e in load_run(new).events if "detectable" in e]
    assert detectable[first] == detectable[second] and [s for s, _ in detectable[first]] == [4, 8, 12, 16, 20]


def test_a_branch_that_a_regression_stops_says_how_to_go_on(whole, folder, tmp_path):
    new = tmp_path / "a new one"
    edits = ["phases[2].lr={rewarm_steps: 2, peak: 30.0}", "evalsets.regression.action=stop"]
    arguments = ["branch", str(whole), "--at", "16", "--run-dir", str(new), *(f"--set={edit}" for edit in edits)]
    done = CliRunner().invoke(cli, [*arguments, "--store-dir", str(folder / "store")])
    assert done.exception is None and done.exit_code == 0
    assert "stopped at step 20, which was saved" in done.output
    where = f"--run-dir '{new}' --store-dir {folder / 'store'} --resume latest"
    assert f"; continue with `{program('curriculum')} train '{new / 'config.yaml'}' {where}`, or " in done.output
    # The newest eval that it is worse than is the one of the phase's start, which is a gold.
    back = f"branch '{new}' --at 18 --run-dir NEW --store-dir {folder / 'store'} --set KEY=VALUE"
    assert f", or go back to before that with `{program('curriculum')} {back}`\n" in done.output
    third = tmp_path / "third"
    given = back.replace("NEW", str(third)).replace("KEY=VALUE", "evalsets.regression.action=log")
    assert CliRunner().invoke(cli, shlex.split(given)).exit_code == 0 and load_run(third).complete
    assert inspect_run(load_run(new))["commands"]["go on"].endswith(f"train '{new / 'config.yaml'}' {where}")


def test_a_share_is_raised_in_the_middle_of_a_run_without_compiling(folder):
    config = load_config(folder / "trunk.yaml")
    setup = build(config, folder / "store")
    try:
        now = setup.states.first()
        for step in range(24):
            if step == 11:  # within the ramp; batches up to 13 are made already
                told = setup.course.raise_share(11, "web", 3.0, 0.9)
                again = build(config, folder / "store", past=Past(ledger.past_of(_entry(setup))))
            now = setup.update_at(step)(now, setup.course.feed[step], *setup.course.knobs(step))
        assert len(setup.compiled.updates.seconds) == 1
        assert told["kind"] == "replay" and told["phase"] == "b" and told["until"] == 18
        assert told["mixture_after"]["web"] > told["mixture_before"]["web"] > 0.2
        one, other = setup.course, again.course
        assert other.schedule == one.schedule and other.rates.tolist() == one.rates.tolist()
        assert [s.start for s in other.schedule.segments] == [0, 8, 11, 18] and len(other.past.segments) == 3
        for step in range(24):
            for mine, its in zip(one.feed[step], other.feed[step], strict=True):
                assert np.array_equal(np.asarray(mine), np.asarray(its))
        standing = setup.course.schedule
        with pytest.raises(ReplayRefused, match="^there is no source elsewhere$"):
            setup.course.raise_share(12, "elsewhere", 2.0, 0.5)
        setup.course.branched_from = {"run": "runs/trunk", "step": 14, "acts": {}, "phase_ends": []}
        with pytest.raises(ReplayRefused, match="^up to step 14 the schedule is the trunk's$"):
            setup.course.raise_share(12, "web", 2.0, 0.95)
        assert setup.course.schedule is standing
        setup.course.raise_share(14, "web", 2.0, 0.95)
        assert setup.course.schedule != standing
        again.course.feed.close()
    finally:
        setup.course.feed.close()


def _entry(setup):
    history = History.begin(setup)
    return json.loads(json.dumps(ledger.entry(setup, 11, history, {}, 0.0)))


def test_a_dry_run_shows_what_would_be_trained_and_leaves_nothing(whole, folder, tmp_path, capsys):
    options = {
        "overrides": ["train.steps=28", "phases.c.mixture={web: 0.25, code: 0.75}"],
        "store_dir": folder / "store",
    }
    assert branch(whole, "16", tmp_path / "new", **options, dry_run=True) is None
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"dry run: a branch of {whole} at step 16, from its checkpoint of step 16"
    assert "  phase      c [17, 28) code 0.75, web 0.25" in told or any(
        "c [" in line and "0.75" in line for line in told
    )
    assert any(line.startswith("schedule edit at step 16: branched from") for line in told)
    assert told[-1] == "no run was written" and not (tmp_path / "new").exists()
    branch(whole, "16", tmp_path / "new", **options)
    edits = [line for line in told if line.startswith("schedule edit")]
    assert edits[0] in capsys.readouterr().out.splitlines()


def test_problems_of_the_copied_config_are_told_at_their_lines(tmp_path):
    """Below the comments that a branch puts at the top of its trunk's file."""
    (tmp_path / "trunk.yaml").write_text("\ufeffname: a\ntrain:\n  steps: 4\n")
    data, origin = read_yaml(tmp_path / "trunk.yaml")
    config = SimpleNamespace(origin=origin, command_line=["--set a=b\nc"])
    headed = _headed(config, str(tmp_path / "copy.yaml"), "runs/trunk from step 3")
    (tmp_path / "copy.yaml").write_text(headed.text)
    again, read = read_yaml(tmp_path / "copy.yaml")
    assert again == data and read.positions == headed.positions and "#   --set a=b\\nc\n" in headed.text
    assert headed.place("train.steps") == f"{tmp_path / 'copy.yaml'}:7:3"
    # Of a branch of it: its options are all there, and those comments would be of another run.
    again = SimpleNamespace(origin=replace(read, file="b"), command_line=["--set a=b\nc", "--set d=e"])
    twice = _headed(again, str(tmp_path / "copy.yaml"), "runs/copy from step 5")
    (tmp_path / "copy.yaml").write_text(twice.text)
    assert read_yaml(tmp_path / "copy.yaml")[1].positions == twice.positions
    assert twice.text.count("# A branch of ") == 1 and "runs/trunk" not in twice.text and "--set d=e\n" in twice.text
