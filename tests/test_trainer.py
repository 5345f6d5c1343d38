"""Whole runs: record, resume after kill -9, evals without a trace on training, accumulation, switches."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from compared_runs import record, saved_arrays, without_clock
from tiny_run import tiny_data, tiny_train, with_changes, write_corpus

from curriculum.config import build_config
from curriculum.errors import InputError
from curriculum.find_checkpoint import read_ledger
from curriculum.model.loss import score_targets
from curriculum.plan_resumed import plan_resumed
from curriculum.run import load_run
from curriculum.train.checkpoints.folder import Checkpoints
from curriculum.train.setup import build
from curriculum.train.step import UpdateKnobs, read_window
from curriculum.train.trainer import train
from curriculum.views.inspection import inspect_run

WORDS = {
    "web": "the quick brown fox jumps over a lazy dog while rain falls on quiet green hills",
    "code": "def return for while if else class import lambda yield ( ) [ ] { } : = + -",
    "law": "whereas the party of first part shall pursuant hereto section clause provided that",
}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Three sources of 120 documents each."""
    return write_corpus(tmp_path_factory.mktemp("corpus"), WORDS, num=120, high=90)


def config_data(corpus, **changes):
    """A run of 60 steps over three phases; `changes` are `section__key=value`."""
    data = {
        "name": "test",
        "tokenizer": {"kind": "byte"},
        "model": {"preset": "tiny", "n_layer": 1, "d_model": 32, "n_head": 2, "n_kv_head": 1, "d_ff": 48},
        "sources": {name: {"path": str(corpus / f"{name}.jsonl"), "held_out": "10%"} for name in WORDS},
        "phases": [
            {"name": "foundation", "until": 20, "mixture": {"web": 0.8, "code": 0.2}},
            {"name": "bridge", "until": 40, "mixture": {"web": 0.4, "code": 0.2, "law": 0.4}, "ramp_steps": 15},
            {"name": "domain", "until": "end", "mixture": {"law": 0.9, "web": 0.1}, "lr": {"decay_steps": 10}},
        ],
        "evalsets": {
            "every": 10,
            "primary": {"held_out_of": "web"},
            "sets": {"code": {"held_out_of": "code", "every": 20}, "law": {"held_out_of": "law", "max_sequences": 9}},
        },
        "train": {"steps": 60, "batch_size": 8, "seq_len": 32},
        "optim": {"lr": 3e-3, "warmup_steps": 5, "decay_steps": 10},
        "checkpoint": {"every": 5, "keep": 3},
        "logging": {"every": 3, "tensorboard": False},
    }
    return with_changes(data, changes)


def final_state(run_dir: Path):
    """Every array of the newest checkpoint as bytes."""
    step = Checkpoints(run_dir / "checkpoints").steps()[-1]
    return step, saved_arrays(run_dir / "checkpoints" / str(step))


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="session")
def whole(corpus, store, tmp_path_factory):
    """60 steps in one go."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    train(build_config(config_data(corpus)), run_dir, store_dir=store)
    return run_dir


@pytest.fixture
def copied(whole, tmp_path):
    """A copy of it, which a test may change."""
    return shutil.copytree(whole, tmp_path / "run")


KILL = """
import json, os, signal, sys
from pathlib import Path
from curriculum.config import build_config
from curriculum.train import trainer
from curriculum.train.feed import Feed
data, run_dir, store, kill_at, resume = json.loads(sys.argv[1])
make = Feed.__getitem__
def killed(self, step):
    if step == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    return make(self, step)
Feed.__getitem__ = killed
trainer.train(build_config(data), run_dir, resume=resume, store_dir=store)
"""


def train_in_process(data, run_dir, store, kill_at=None, resume=None):
    arguments = json.dumps([data, str(run_dir), str(store), kill_at, resume])
    done = subprocess.run([sys.executable, "-c", KILL, arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == (-signal.SIGKILL if kill_at is not None else 0), done.stderr[-3000:]


def test_killed_and_resumed_equals_one_go(corpus, store, whole, tmp_path):
    run_dir = tmp_path / "run"
    data = config_data(corpus)
    for kill_at, resume in ((7, None), (20, "latest"), (33, "latest"), (None, "latest")):
        train_in_process(data, run_dir, store, kill_at, resume)
    assert final_state(run_dir) == final_state(whole)
    assert record(run_dir) == record(whole)
    for step in (0, 10, 20, 40, 60):
        with np.load(run_dir / f"evals/{step}.npz") as mine, np.load(whole / f"evals/{step}.npz") as other:
            assert mine.files and sorted(mine.files) == sorted(other.files)
            assert all(np.array_equal(mine[name], other[name]) for name in mine.files)
    superseded = [json.loads(line) for line in (run_dir / "superseded.jsonl").read_text().splitlines()]
    assert superseded  # what the kills cut off is kept


def test_events_tell_the_run_in_order(whole):
    events, metrics = record(whole)
    names = [e["event"] for e in events]
    assert names[0] == "training_start" and names[-1] == "training_complete" and names.count("training_start") == 1
    evals = [(e["step"], e["phase"]) for e in events if e["event"] == "eval"]
    assert evals == [
        *[(step, "foundation") for step in (0, 10, 20)],
        *[(step, "bridge") for step in (30, 40)],
        *[(step, "domain") for step in (50, 60)],
    ]  # at a boundary the closing phase
    assert [e for e in events if e["event"] == "eval"][-1]["lr"] == pytest.approx(3e-4)
    switches = [e for e in events if e["event"] == "phase_switch"]
    assert [(e["step"], e["from_phase"], e["new_phase"]) for e in switches] == [
        (20, "foundation", "bridge"),
        (40, "bridge", "domain"),
    ]
    assert switches[0]["consumed"] == {"web": 128 * 32, "code": 32 * 32, "law": 0}
    at_boundary = [(e["event"], e.get("phase")) for e in events if e["step"] == 20]
    assert at_boundary == [
        ("eval", "foundation"),
        ("phase_switch", None),
        ("gold_checkpoint", None),
        ("checkpoint", None),
    ]
    due = {e["step"]: set(e) & {"val_loss", "eval_code", "eval_law"} for e in events if e["event"] == "eval"}
    assert due[10] == {"val_loss", "eval_law"} and due[20] == {"val_loss", "eval_code", "eval_law"}
    assert [row["step"] for row in metrics] == list(range(3, 61, 3))
    assert metrics[0]["loss_law"] is None and metrics[-1]["loss_law"] > 0
    assert metrics[-1]["lr"] == pytest.approx(3e-4)
    complete = events[-1]
    assert complete["total_steps"] == 60 and complete["total_tokens"] == 60 * 8 * 32
    assert complete["final_val_loss"] == [e for e in events if e["event"] == "eval"][-1]["val_loss"]
    assert complete["best_val_loss"] == min(e["val_loss"] for e in events if e["event"] == "eval")


def test_a_row_holds_means_since_the_row_before(corpus, store, whole, tmp_path):
    phases = config_data(corpus)["phases"][:1]
    phases[0]["until"] = "end"
    rows = []
    for every in (1, 4):
        data = config_data(corpus, train__steps=8, phases=phases, logging__every=every, optim={"schedule": "constant"})
        train(build_config(data), tmp_path / f"every{every}", store_dir=store)
        rows.append(record(tmp_path / f"every{every}")[1])
    singles, fours = rows
    assert [row["step"] for row in fours] == [4, 8] and len(singles) == 8
    for row, part in zip(fours, (singles[:4], singles[4:]), strict=True):
        assert row["loss"] == pytest.approx(np.mean([r["loss"] for r in part]), abs=2e-6)  # rounded to six decimals
        assert row["grad_norm"] == pytest.approx(np.mean([r["grad_norm"] for r in part]), rel=1e-6)


def test_no_row_counts_more_tokens_than_slots_after_a_run_went_on_beyond_its_end(tmp_path):
    """Its row at the end, here of step 12, stands between two that the interval asks for."""
    write_corpus(tmp_path)
    common = {"logging": {"every": 10, "tensorboard": False}, "optim": {"lr": 3e-3, "schedule": "constant"}}
    tiny_train(tmp_path, tmp_path / "run", **common)
    first, second = tiny_data(tmp_path)["phases"]
    longer = {
        "phases": [first, second | {"until": 12}, first | {"name": "c", "until": "end", "batch_size": 16}],
        "train": {"steps": 24, "batch_size": 4, "seq_len": 32},
    }
    tiny_train(tmp_path, tmp_path / "run", resume="latest", **longer, **common)
    rows = load_run(tmp_path / "run").metrics
    assert [row["step"] for row in rows] == [10, 12, 20, 24]
    assert {(row["packing_utilization"], row["scored_share"]) for row in rows} == {(1.0, 1.0)}  # of a stream


def test_training_learns(whole):
    losses = dict(load_run(whole).evals())
    assert losses[0] == pytest.approx(np.log(257), abs=0.1)
    assert losses[40] < 3.5


def test_grad_accum_changes_no_data_and_no_loss(corpus, store, whole, tmp_path):
    train(build_config(config_data(corpus, train__grad_accum=4)), tmp_path / "run", store_dir=store)
    rows, expected = record(tmp_path / "run")[1], record(whole)[1]
    assert len(rows) == 20
    for row, other in zip(rows, expected, strict=True):
        # float32 sums in another order; AdamW's division by small second moments magnifies them a little
        assert row["loss"] == pytest.approx(other["loss"], rel=2e-4)
        assert row["mixture"] == other["mixture"]


def test_a_finished_run_says_so_and_writes_nothing(corpus, store, whole, capsys):
    def files():
        files = [p for p in sorted(whole.rglob("*")) if p.is_file() and p.name != ".lock"]
        return {p: p.stat().st_mtime_ns for p in files}

    before = files()
    complete = train(build_config(config_data(corpus)), whole, resume="latest", store_dir=store)
    assert complete["event"] == "training_complete" and "is finished" in capsys.readouterr().out
    assert files() == before and len(before) > 10


def test_a_run_that_is_shortened_to_where_it_stands_is_measured_there(tmp_path):
    write_corpus(tmp_path)
    run_dir = tmp_path / "run"
    tiny_train(tmp_path, run_dir)
    assert 8 not in [e["step"] for e in load_run(run_dir).events if e["event"] == "eval"]
    complete = tiny_train(tmp_path, run_dir, resume=8, train={"steps": 8, "batch_size": 4, "seq_len": 32})
    last = [e for e in load_run(run_dir).events if e["event"] == "eval"][-1]
    assert (last["step"], complete["final_val_loss"]) == (8, last["val_loss"])
    assert complete["transfer"]["steps"][-1] == 8 and complete["transfer"]["sets"].keys() == {"val", "law"}


def test_a_run_that_is_shortened_between_two_rows_has_a_last_row_and_may_be_extended(tmp_path, capsys):
    write_corpus(tmp_path)
    shorter, logging = {"steps": 8, "batch_size": 4, "seq_len": 32}, {"every": 5, "tensorboard": False}
    constant = {"logging": logging, "optim": {"lr": 3e-3, "schedule": "constant"}}
    planned = tiny_train(tmp_path, tmp_path / "planned", train=shorter, **constant)
    run_dir = tmp_path / "run"
    tiny_train(tmp_path, run_dir, **constant)
    capsys.readouterr()
    shortened = tiny_train(tmp_path, run_dir, resume=8, train=shorter, **constant)
    _, row = load_run(run_dir).metrics
    assert row["step"] == 8 and row["tokens_per_sec"] is row["step_time_s"] is None
    assert without_clock([row]) == without_clock(load_run(tmp_path / "planned").metrics[-1:])
    assert shortened["final_train_loss"] == planned["final_train_loss"] == row["loss"]
    assert "step 8/8" in capsys.readouterr().out
    # Continued with the same config it is finished, as the plan says; its checkpoint is still of a longer run.
    again = build_config(tiny_data(tmp_path, train=shorter, **constant))
    assert plan_resumed(again, run_dir, store_dir=tmp_path / "store").resumes["complete"]
    train(again, run_dir, resume="latest", store_dir=tmp_path / "store")
    assert capsys.readouterr().out == f"{run_dir} is finished: 8 of 8 steps. Nothing to do.\n"
    # The row is of the run's end, not of the checkpoint.
    tiny_train(tmp_path, run_dir, resume="latest", **constant)
    assert [row["step"] for row in load_run(run_dir).metrics] == [5, 10, 12]


def test_a_run_that_a_source_stops_resumes_in_its_decay_and_says_why_it_ends(corpus, store, tmp_path, capsys):
    data = config_data(
        corpus,
        phases=[{"name": "a", "until": "end", "mixture": {"law": 0.5, "web": 0.5}}],
        evalsets={"every": 50, "primary": {"held_out_of": "web"}},
        optim__decay_steps=4,
    )
    data["sources"]["law"] |= {"max_epochs": 0.05, "on_exhaust": "stop"}
    complete = train(build_config(data), tmp_path / "run", store_dir=store)
    end = complete["total_steps"]
    assert 8 < end < 60 and end % 5 in (2, 3, 4)  # a checkpoint lies in the decay, and one at the end
    before = final_state(tmp_path / "run"), record(tmp_path / "run")
    train(build_config(data), tmp_path / "run", resume=end // 5 * 5, store_dir=store)
    assert (final_state(tmp_path / "run"), record(tmp_path / "run")) == before
    for steps in (60, 70):
        data["train"]["steps"] = steps
        assert train(build_config(data), tmp_path / "run", resume="latest", store_dir=store)["total_steps"] == end
        told = f"is finished: {end} of {end} steps. Nothing to do. It ended before train.steps because a source with"
        assert told in capsys.readouterr().out
    # What the console and inspect then say to do: the rate decays before the early end too.
    before_decay = (end - 4) // 5 * 5
    (tmp_path / "run/config.yaml").write_text("name: x")  # as the command writes it
    inspected = inspect_run(load_run(tmp_path / "run"))
    assert f" --resume {before_decay} --set sources.NAME.max_epochs=MORE" in inspected["commands"]["train longer"]
    assert not inspected["longer_needs_jump"]
    data["sources"]["law"]["max_epochs"] = 0.1
    with pytest.raises(InputError, match="the learning rate jumps"):
        train(build_config(data), tmp_path / "run", resume="latest", store_dir=store)
    assert train(build_config(data), tmp_path / "run", resume=before_decay, store_dir=store)["total_steps"] > end
    out = capsys.readouterr().out
    assert re.search(
        r"  ended early  at step \d+ of 70: a source with on_exhaust: stop has been read max_epochs times\n", out
    )
    assert re.search(r"  resume from  \S+/\d+, before the rate's decay, with a higher sources.NAME.max_epochs\n", out)


def test_the_end_of_a_run_and_the_refusal_of_its_latest_name_the_same_step(tmp_path, capsys):
    """That before the decay, though up to step 8 of it the rate would not yet jump by more than 2x."""
    place, run_dir = write_corpus(tmp_path), tmp_path / "run"
    sections = {"optim": {"lr": 3e-3, "decay_steps": 8}, "checkpoint": {"every": 2, "keep": 9}}
    tiny_train(place, run_dir, **sections)
    assert f"  resume from  {run_dir}/checkpoints/4, before the rate's decay, with a" in capsys.readouterr().out
    longer = {"steps": 20, "batch_size": 4, "seq_len": 32}
    with pytest.raises(InputError, match="the learning rate jumps .*\nor resume from .* after it: --resume 4$"):
        tiny_train(place, run_dir, "latest", train=longer, **sections)
    for folder in ("checkpoints/2", "checkpoints/4", "gold/3"):
        shutil.rmtree(run_dir / folder)
    with pytest.raises(InputError, match="the learning rate jumps .*\nor resume from .* after it: --resume 8$"):
        tiny_train(place, run_dir, "latest", train=longer, **sections)


def test_a_run_directory_in_use_is_refused_without_resume(corpus, store, whole):
    with pytest.raises(InputError, match=r"holds a run; .* --resume latest, .*resume='latest' and run_dir"):
        train(build_config(config_data(corpus)), whole, store_dir=store)


def test_resume_latest_of_nothing_starts_at_step_0(corpus, store, tmp_path):
    data = config_data(corpus, train__steps=20, phases=config_data(corpus)["phases"][:1])
    data["phases"][0]["until"] = "end"
    assert train(build_config(data), tmp_path / "new", resume="latest", store_dir=store)["total_steps"] == 20


def test_what_would_change_the_past_is_refused_and_the_future_is_free(corpus, store, tmp_path, capsys):
    run_dir = tmp_path / "run"
    phases = [
        {"name": "a", "until": 10, "mixture": {"web": 1.0}},
        {"name": "b", "until": "end", "mixture": {"code": 1.0}},
    ]
    optim = {"lr": 1e-3, "schedule": "constant"}
    data = config_data(corpus, train__steps=20, phases=phases, optim=optim)
    train(build_config(data), run_dir, store_dir=store)

    def refused(words, **changes):
        with pytest.raises(InputError, match=words):
            train(build_config({**data, **changes}), run_dir, resume="latest", store_dir=store)

    longer = {**data["train"], "steps": 30}
    b_of_web = {**phases[1], "mixture": {"web": 1.0}}
    no_code = {"sources": {"web": data["sources"]["web"]}, "evalsets": {"primary": {"held_out_of": "web"}},
               "phases": [phases[0], b_of_web]}  # fmt: skip
    refused(r"phases\[0\].until: got 12, but steps 0 to 10 were trained in this phase: let it end at 10",
            train=longer, phases=[{**phases[0], "until": 12}, phases[1]])  # fmt: skip
    refused(r"phases\[0\].mixture: got .*, but steps 0 to 10 were trained with", train=longer,
            phases=[{**phases[0], "mixture": {"web": 1.0, "law": 0.5}}, phases[1]])  # fmt: skip
    refused("the learning rate jumps from 0.001 to 0.003 at step 20", train=longer, optim={**optim, "lr": 3e-3})
    # The decay would begin at step 5: up to 15 the rate is more than half of what it was.
    decayed = {**optim, "schedule": "wsd", "decay_steps": 25, "min_lr_ratio": 0.0}
    refused("the learning rate jumps from 0.001 to 0.00036 at step 20.*\nor resume from an earlier checkpoint and retrain "
            "the steps after it: --resume 15$", train=longer, optim=decayed)  # fmt: skip
    refused("seed: got 7, but steps 0 to 20 were trained with 1337", train=longer, seed=7)
    refused("architecture of a run cannot change", train=longer, model={**data["model"], "n_layer": 2})
    refused("train.steps: got 15, but the run's schedule is already fixed up to step 20",
            train={**data["train"], "steps": 15})  # fmt: skip
    # No text is prepared with another tokenizer, and what would follow from it is not told.
    stores = sorted((Path(store) / "stores").iterdir())
    refused("^[^\n]*tokenizer: is not the one that the run was trained with; [^\n]*$", train=longer,
            tokenizer={"kind": "char"}, model={**data["model"], "n_layer": 2})  # fmt: skip
    assert stores and sorted((Path(store) / "stores").iterdir()) == stores
    refused("sources: code is gone, but 2,560 of its tokens were trained on; .*--accept-past", train=longer, **no_code)
    other = build_config({**data, **no_code, "train": longer, "optim": {**optim, "name": "lion"}})
    with pytest.raises(InputError, match="optim.name: got lion") as told:
        train(other, run_dir, resume="latest", accept_past=True, store_dir=store)
    assert "code is gone" not in str(told.value)  # that is accepted

    accepted = tmp_path / "accepted"
    shutil.copytree(run_dir, accepted)
    less = {**data, **no_code, "train": {**longer, "batch_size": 4}, "seed": 7}
    train(build_config(less), accepted, resume="latest", accept_past=True, store_dir=store)
    run = load_run(accepted)
    edit = next(e for e in run.events if e["event"] == "schedule_edit")
    assert (edit["step"], edit["kind"], edit["accepted_past"], edit["until"]) == (20, "config", True, 30)
    assert edit["mixture_before"] == {"code": 1.0} and edit["mixture_after"] == {"web": 1.0}
    paths = {change["path"] for change in edit["changes"]}
    assert {"seed", "train.steps", "train.batch_size", "sources.code", "phases.b.mixture"} <= paths
    assert run.complete["total_tokens"] == (20 * 8 + 10 * 4) * 32
    kept = read_ledger(accepted / "checkpoints/30")
    drawn = {name: source["tokens_drawn"] for name, source in kept["sources"].items()}
    assert drawn == {"web": (10 * 8 + 10 * 4) * 32, "code": 10 * 8 * 32}
    assert train(build_config(less), accepted, resume="latest", store_dir=store) == run.complete
    assert "have no effect" not in capsys.readouterr().out
    slower = {**less, "optim": {**optim, "lr": 5e-4}}
    assert train(build_config(slower), accepted, resume="latest", store_dir=store) == run.complete
    assert "Nothing to do. The changes in the config have no effect: all steps are trained." in capsys.readouterr().out
    assert len(load_run(accepted).events) == len(run.events)

    events = len(load_run(run_dir).events)
    more = {**data, "train": longer, "phases": [*phases[:1], {**phases[1], "until": 20}, {
        "name": "c", "until": "end", "mixture": {"law": 1.0}}]}  # fmt: skip
    more["evalsets"] = {
        **data["evalsets"],
        "sets": {**data["evalsets"]["sets"], "late": {"held_out_of": "law", "max_sequences": 1}},
    }
    more["optim"] = {**optim, "scale_lr_by_batch": "sqrt"}
    train(build_config(more), run_dir, resume="latest", store_dir=store)
    after = load_run(run_dir).events
    assert len(after) > events and after[-1]["total_steps"] == 30
    assert [e["event"] for e in after].count("training_complete") == 1
    resumed = next(i for i, e in enumerate(after) if e["event"] == "resume")
    assert after[resumed]["step"] == 20 and after[resumed + 2]["eval_late"] > 0 and "val_loss" not in after[resumed + 2]
    assert after[resumed + 1]["event"] == "schedule_edit" and not after[resumed + 1]["accepted_past"]
    of_data, of_rates = after[resumed + 1]["warnings"]
    assert of_rates == "optim.scale_lr_by_batch does nothing: every phase has train.batch_size"
    assert of_data.startswith("evalsets.sets.late measures 1 of ") and "more than max_sequences of 1" in of_data
    assert f"  warning    {of_data}\n" in capsys.readouterr().out
    assert read_ledger(run_dir / "checkpoints/30")["data_warnings"] == [of_data]
    reason = after[resumed + 1]["reason"]
    assert reason == (
        'train.steps 20 → 30; optim.scale_lr_by_batch null → "sqrt"; phases.b.until "end" → 20; phases.c added; '
        "evalsets.sets.late added"
    )


def test_an_added_set_keeps_what_was_measured_at_its_first_step(copied, corpus, store, whole):
    longer = config_data(corpus, train__steps=70)
    longer["phases"][2] |= {"until": 60, "lr": {"decay_steps": 10}}
    longer["phases"].append({"name": "more", "until": "end", "mixture": {"web": 1.0}})
    longer["evalsets"]["sets"]["late"] = {"held_out_of": "law", "max_sequences": 3}
    train(build_config(longer), copied, resume="latest", store_dir=store)
    with np.load(copied / "evals/60.npz") as now, np.load(whole / "evals/60.npz") as before:
        assert set(now.files) > set(before.files) and any(name.startswith("late.") for name in now.files)
        assert before.files and all(np.array_equal(now[name], before[name]) for name in before.files)
    switches = [(e["step"], e["new_phase"]) for e in load_run(copied).events if e["event"] == "phase_switch"]
    assert switches == [(20, "bridge"), (40, "domain"), (60, "more")]


def test_a_setting_that_changed_the_data_is_named(corpus, store, tmp_path):
    from curriculum.train.history import History
    from curriculum.train.resuming.ledger import check_past, entry, found_in

    rows = [
        {"messages": [{"role": "user", "content": f"ask {i}"}, {"role": "assistant", "content": f"say {i}"}],
         "prompt": f"p{i}", "completion": f"c{i}"}
        for i in range(150)
    ]  # fmt: skip
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    talks = {"path": str(tmp_path / "talks.jsonl"), "format": "messages", "held_out": "10%"}
    web = {"path": str(corpus / "web.jsonl"), "held_out": "10%"}
    base = {
        "sources": {"web": web, "talks": talks},
        "phases": [{"name": "a", "until": "end", "mixture": {"web": 0.5, "talks": 0.5}}],
        "evalsets": {"primary": {"held_out_of": "web"}, "sets": {"talks": {"held_out_of": "talks"}}},
        "optim": {},
    }

    def set_up(**changes):
        setup = build(build_config(config_data(corpus, **{**base, **changes})), store)
        setup.course.feed.close()
        return setup

    def content_hashes(setup):
        return {name: evalset.content_hash for name, evalset in setup.corpus.evalsets.items()}

    first = set_up()
    history = History("now", "a", eval_sets=content_hashes(first))
    saved = json.loads(json.dumps(entry(first, 10, history, {}, 1.0)))
    check_past(saved, found_in(first))

    def problems(saved, **changes):
        with pytest.raises(InputError) as error:
            check_past(saved, found_in(set_up(**changes)))
        return [problem.removeprefix("config: ") for problem in error.value.problems]

    begun = "but the run was begun with"
    assistant = (
        'chat.assistant: got "A{content};", ' + begun + r' "<|im_start|>assistant\n{content}<|im_end|>\n"; restore it'
    )
    renamed = {**base["evalsets"], "seq_len": 16}
    fewer, pairs = {**web, "held_out": 0.2}, {**talks, "format": "completion"}
    for changes, expected in (
        ({"chat": {"assistant": "A{content};"}}, assistant),
        ({"sources": {"web": fewer, "talks": talks}}, f"sources.web.held_out: got 0.2, {begun} 0.1; restore it"),
        ({"sources": {"web": web, "talks": pairs}}, f'sources.talks.format: got "completion", {begun} "messages"; restore it'),
        ({"evalsets": renamed}, f"evalsets.seq_len: got 16, {begun} null; restore it"),
    ):  # fmt: skip
        assert problems(saved, **changes) == [expected]
    other = json.loads(json.dumps(saved))
    other["sources"]["web"]["stream"] = other["history"]["eval_sets"]["primary"] = "another"
    of_text, of_set = problems(other)
    assert of_text.startswith("sources.web: ")
    assert of_set == "evalsets.primary: is not the set that the run measured under this name; restore it"
    # A template that no source of conversations uses is free; so is the same share in other words.
    text = {"sources": {"web": web}, "phases": [{"name": "a", "until": "end", "mixture": {"web": 1.0}}],
            "evalsets": {"primary": {"held_out_of": "web"}}}  # fmt: skip
    plain = set_up(**text)
    kept = json.loads(json.dumps(entry(plain, 10, replace(history, eval_sets=content_hashes(plain)), {}, 1.0)))
    same = {"chat": {"user": "Q{content}"}, "sources": {"web": {**web, "held_out": 0.1}}}
    check_past(kept, found_in(set_up(**{**text, **same})))


def test_source_text_that_changed_is_refused(corpus, store, tmp_path):
    folder = shutil.copytree(corpus, tmp_path / "corpus")
    data = config_data(
        folder, train__steps=6, phases=[{"name": "a", "until": "end", "mixture": {"web": 1.0}}], optim={}
    )
    *_, early, late = (folder / "web.jsonl").read_text().splitlines()
    for name, text in (("early", early), ("late", late)):
        (tmp_path / f"{name}.jsonl").write_text(text)
    sets = data["evalsets"]["sets"]
    sets["early"] = {"path": str(tmp_path / "early.jsonl")}
    train(build_config(data), tmp_path / "run", store_dir=store)
    data["train"]["steps"] = 12

    def refused(words):
        with pytest.raises(InputError, match=words):
            train(build_config(data), tmp_path / "run", resume="latest", store_dir=store)

    with_early = sets.pop("early")
    put_back = "eval set early is gone: .*; put eval set early back, or continue"
    refused(f"^config: sources.web: {put_back}")
    sets["late"] = {"path": str(tmp_path / "late.jsonl")}
    refused(f"eval set late holds documents that the run has trained on: .*; {put_back}")
    del sets["late"]
    sets["early"] = with_early
    (folder / "web.jsonl").write_text((folder / "web.jsonl").read_text() + json.dumps({"text": "one more"}) + "\n")
    refused("^config: sources.web: its training text has changed")


def test_a_trained_tokenizer_stays_when_a_source_is_added(corpus, store, tmp_path):
    phases = [{"name": "a", "until": 6, "mixture": {"web": 1.0}}]
    data = config_data(corpus, tokenizer={"kind": "bpe", "vocab_size": 270}, phases=phases, train__steps=6, optim={})
    data["sources"].pop("law")
    data["evalsets"]["sets"] = {}
    train(build_config(data), tmp_path / "run", store_dir=store)
    data["sources"]["law"] = {"path": str(corpus / "law.jsonl")}
    data["phases"].append({"name": "b", "until": "end", "mixture": {"law": 1.0}})
    data["train"]["steps"] = 10
    complete = train(build_config(data), tmp_path / "run", resume="latest", store_dir=store)
    assert complete["total_steps"] == 10 and load_run(tmp_path / "run").metrics[-1]["loss_law"] > 0


def test_an_empty_step_folder_is_no_checkpoint(corpus, store, tmp_path):
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints/99").mkdir(parents=True)
    data = config_data(
        corpus, train__steps=6, phases=[{"name": "a", "until": "end", "mixture": {"web": 1.0}}], optim={}
    )
    assert train(build_config(data), run_dir, resume="latest", store_dir=store)["total_steps"] == 6
    assert Checkpoints(run_dir / "checkpoints", 3).steps() == [5, 6] and (run_dir / "superseded/99").is_dir()


def test_a_refused_resume_changes_nothing(copied, corpus, store):
    (copied / "events.jsonl").write_text("")

    def files():
        return {p: p.read_bytes() for p in copied.rglob("*") if p.is_file() and p.name != ".lock"}

    before = files()
    with pytest.raises(InputError, match="expected a line to end at byte"):
        train(build_config(config_data(corpus)), copied, resume=50, store_dir=store)
    assert files() == before and len(before) > 10


def test_a_run_is_read_without_its_data(corpus, store, tmp_path):
    folder = shutil.copytree(corpus, tmp_path / "corpus")
    data = config_data(
        folder, train__steps=4, phases=[{"name": "a", "until": "end", "mixture": {"web": 1.0}}], optim={}
    )
    train(build_config(data), tmp_path / "run", store_dir=store)
    shutil.rmtree(folder)
    run = load_run(tmp_path / "run")
    assert run.complete["total_steps"] == 4 and run.config.train.steps == 4 and len(run.evals("law")) == 2


def test_what_is_closed_may_be_closed_again(corpus, store):
    """As where a second Ctrl-C comes between two feeds, when a schedule changes."""
    setup = build(build_config(config_data(corpus)), store)
    setup.course.feed[0]
    setup.close()
    setup.close()


def test_the_start_warns_of_what_the_plan_warns_of(corpus, store):
    setup = build(build_config(config_data(corpus)), store)
    setup.close()
    split = replace(setup, config=replace(setup.config, mesh=replace(setup.config.mesh, tensor=2)))
    (told,) = set(split.warnings()) - set(setup.warnings())
    assert told.startswith("mesh.tensor 2 does not divide the 257 rows of the embedding")


def test_updates_that_are_not_finite_are_counted_and_said(corpus, store, tmp_path, capsys):
    phases = [
        {"name": name, "until": until, "mixture": {"web": 1.0}, "lr": {"peak": peak}}
        for name, until, peak in (("sane", 6, 1e-3), ("wild", "end", 1e30))
    ]
    optim = {"lr": 1e-3, "schedule": "constant", "allow_jump": True}
    complete = train(
        build_config(config_data(corpus, train__steps=12, phases=phases, optim=optim)),
        tmp_path / "run",
        store_dir=store,
    )
    assert 0 < complete["skipped_updates"] < 6
    assert f"{complete['skipped_updates']} of 12 updates were skipped" in capsys.readouterr().out
    lines = (tmp_path / "run/events.jsonl").read_text().splitlines()
    assert len([json.loads(line, parse_constant=pytest.fail) for line in lines]) > 3  # no bare NaN or Infinity


def test_resume_at_a_step_sets_later_checkpoints_aside(copied, corpus, store, whole):
    train(build_config(config_data(corpus)), copied, resume=50, store_dir=store)
    assert final_state(copied) == final_state(whole)
    assert record(copied) == record(whole)
    assert sorted(p.name for p in (copied / "superseded").iterdir()) == ["55", "60", "evals"]
    with pytest.raises(InputError, match="has no checkpoint of that step; available: 50, 55, 60"):
        train(build_config(config_data(corpus)), copied, resume=51, store_dir=store)


def test_functions_are_traced_once_over_phases_and_sets(corpus, store, tmp_path, monkeypatch):
    from curriculum.train import compiled, trainer

    traces, built = [], []
    forward = compiled.score_targets

    def kept(*arguments):
        built.append(build(*arguments))
        return built[0]

    monkeypatch.setattr(trainer, "build", kept)

    def counted(*arguments):
        traces.append("eval")
        return forward(*arguments)

    def make_step(*arguments, **settings):
        step = unwrapped(*arguments, **settings)

        def counted_step(*inputs):
            traces.append("train")
            return step(*inputs)

        return counted_step

    unwrapped = compiled.make_train_step
    monkeypatch.setattr(compiled, "score_targets", counted)
    monkeypatch.setattr(compiled, "make_train_step", make_step)
    data = config_data(corpus, train__steps=40)
    data["phases"] = [
        {"name": f"p{i}", "until": 10 * (i + 1), "mixture": {"web": 1.0, "law": i + 0.5}} for i in range(4)
    ]
    data["evalsets"]["sets"]["general"] = {"held_out_of": "web", "max_sequences": 3}
    train(build_config(data), tmp_path / "run", store_dir=store)
    assert len(load_run(tmp_path / "run").events[0]["evalsets"]) == 4
    assert sorted(traces) == ["eval", "train"]
    assert len(built[0].compiled.updates.seconds) == 1


@pytest.mark.parametrize(
    "number, code", [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_saves_and_the_run_goes_on(corpus, store, whole, tmp_path, number, code):
    config_path = tmp_path / "config.yaml"
    config_path.write_text(yaml.safe_dump(config_data(corpus)))
    command = [str(Path(sys.executable).parent / "curriculum"), "train", str(config_path), "--run-dir",
               str(tmp_path / "run"), "--store-dir", str(store)]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == code and "--resume latest" in errors and "Traceback" not in errors
    done = subprocess.run([*command, "--resume", "latest"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert final_state(tmp_path / "run") == final_state(whole)
    mine, expected = record(tmp_path / "run"), record(whole)
    assert mine[1] == expected[1] and [e["event"] for e in mine[0]] == [e["event"] for e in expected[0]]


# --- a phase of instruction tuning --------------------------------------------------------------------------


def test_a_phase_of_conversations_learns_from_answers_alone(corpus, tmp_path):
    rng = np.random.default_rng(3)
    rows = []
    for i in range(130):
        ask, say = (" ".join(rng.choice(WORDS["law"].split(), int(rng.integers(3, 9)))) for _ in range(2))
        rows.append({"messages": [{"role": "user", "content": f"{ask} {i}"}, {"role": "assistant", "content": say}]})
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = config_data(
        corpus,
        sources={
            "web": {"path": str(corpus / "web.jsonl"), "held_out": "10%"},
            "talks": {"path": str(tmp_path / "talks.jsonl"), "format": "messages", "held_out": "10%"},
        },
        chat={"user": "<{content}>", "assistant": "[{content}]"},
        phases=[
            {"name": "text", "until": 4, "mixture": {"web": 1.0}},
            {"name": "chat", "until": "end", "mixture": {"web": 0.25, "talks": 0.75}},
        ],
        evalsets={"every": 4, "primary": {"held_out_of": "web"}, "sets": {"talks": {"held_out_of": "talks"}}},
        train={"steps": 8, "batch_size": 8, "seq_len": 32, "grad_accum": 2},
        optim={"lr": 3e-3, "warmup_steps": 2, "decay_steps": 2},
        logging={"every": 1, "tensorboard": False},
    )
    config = build_config(data)
    train(config, tmp_path / "run", store_dir=tmp_path / "store")
    run = load_run(tmp_path / "run")
    assert [row["loss_talks"] is None for row in run.metrics] == [True] * 4 + [False] * 4
    evals = [event for event in run.events if event["event"] == "eval"]
    assert [event["step"] for event in evals] == [0, 4, 8] and evals[-1]["eval_talks"] < evals[0]["eval_talks"]

    setup = build(config, tmp_path / "store")
    try:
        stream = setup.corpus.streams["talks"].tokens[:]
        # What is scored, told by the template's brackets alone: an answer with its "]", and the end-of-text after it.
        expected_N = np.zeros(len(stream), bool)
        for answer in re.finditer(r"\[([^]]*\]\n)", "".join(map(chr, np.where(stream == 256, 10, stream)))):
            expected_N[answer.start(1) : answer.end(1)] = True
        assert 0.2 < expected_N.mean() < 0.8 and expected_N[stream == 256].all()
        offsets_of = {step: setup.course.plan.draws(step)[0] for step in range(8)}
        for step, draws in offsets_of.items():
            batch = setup.course.feed[step]
            mask_MT = np.asarray(batch.loss_mask_ABT).reshape(8, 32)
            assert run.metrics[step]["scored_share"] == pytest.approx(mask_MT.mean(), abs=1e-6)
            sources = [setup.course.plan.sources[s] for s in draws.source]
            assert sources.count("talks") == (6 if step >= 4 else 0)
            for row, (source, offset) in enumerate(zip(sources, draws.offset.tolist(), strict=True)):
                expected_T = expected_N[offset + 1 : offset + 33] if source == "talks" else np.ones(32, bool)
                assert mask_MT[row].tolist() == expected_T.tolist()

        # The loss of the last batch at the first parameters: the mean over those targets and no others.
        params = setup.states.first().params
        inputs_MT, targets_MT = (np.asarray(a).reshape(8, 32) for a in (batch.inputs_ABT, batch.targets_ABT))
        nats_MT = np.asarray(score_targets(setup.model, params, inputs_MT, targets_MT)["nats"], np.float64)
        state = setup.update_at(0)(setup.states.first(), batch, *UpdateKnobs())
        assert np.sum(state.window.tokens_S2) == mask_MT.sum() < 8 * 32
        found = read_window(state.window, setup.course.plan.sources)
        assert found["loss"] == pytest.approx(nats_MT[mask_MT].mean(), rel=1e-6)
        talks_M = np.array([source == "talks" for source in sources])
        assert found["source_loss"]["talks"] == pytest.approx(nats_MT[talks_M][mask_MT[talks_M]].mean(), rel=1e-6)
    finally:
        setup.course.feed.close()


def test_a_long_eval_tells_how_far_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("curriculum.data.progress.PASSING_SECONDS", 0.0)
    tiny_train(write_corpus(tmp_path), tmp_path / "run", averages={"ema_decay": 0.9})
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("measuring")]
    assert re.match(r"measuring step 0: 0 of \d+ windows \(0%\)", told[0])
    assert {line.split(":")[0] for line in told} == {
        "measuring step 0",
        *(f"measuring step {s}{average}" for s in (3, 6, 9, 12) for average in ("", " ema")),
    }
