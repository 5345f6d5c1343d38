"""Whole runs that meet noise, a rate that explodes and a state that is not finite: skipped, gone back from, or ended."""

import json
import re
import shlex
import shutil
import signal

import numpy as np
import pytest
from click.testing import CliRunner
from compared_runs import CLOCK_FIELDS, record, saved_arrays, without_clock
from tiny_run import diverges, flip_bit, tiny_data, tiny_train, with_changes, write_corpus

from curriculum.branch import branch
from curriculum.cli.main import cli
from curriculum.config import build_config, load_config
from curriculum.disk.lock import RunLock
from curriculum.errors import InputError
from curriculum.find_checkpoint import read_ledger
from curriculum.run import load_run
from curriculum.run_directory import RunDirectory
from curriculum.train import divergence, trainer
from curriculum.train.bases import base_again
from curriculum.train.checkpoints.best import BestCheckpoints
from curriculum.train.checkpoints.folder import Checkpoints
from curriculum.train.course import Course
from curriculum.train.divergence import Diverged
from curriculum.train.history import History
from curriculum.train.resuming.start import start_of
from curriculum.train.setup import build
from curriculum.train.signals import Stopped, StopSignals
from curriculum.train.trainer import train, train_built
from curriculum.views import inspection_text
from curriculum.views.inspection import inspect_run
from curriculum.views.model_card_sections import training

BAD, SWITCH, STEPS, ROWS, LENGTH = range(135, 138), 70, 150, 8, 16


def config_data(folder, **changes):
    """150 steps in two phases, of which the second is of another text; `changes` are `section__key=value`."""
    data = {
        "tokenizer": {"kind": "byte"},
        "model": {"preset": "tiny", "n_layer": 1, "d_model": 16, "n_head": 1, "n_kv_head": 1, "d_ff": 16},
        "sources": {name: {"path": str(folder / f"{name}.bin"), "held_out": "5%"} for name in ("web", "law")},
        "phases": [
            {"name": "first", "until": SWITCH, "mixture": {"web": 1.0}},
            {"name": "second", "until": "end", "mixture": {"law": 1.0}},
        ],
        "evalsets": {"every": 50, "primary": {"held_out_of": "law"}},
        "train": {
            "steps": STEPS,
            "batch_size": ROWS,
            "seq_len": LENGTH,
            "skip_updates": {"sigmas": 4.0, "window_steps": 48, "judge_from_steps": 24},
        },
        "optim": {"lr": 3e-2, "warmup_steps": 0, "schedule": "constant"},
        "checkpoint": {"every": 4, "keep": 3},
        "logging": {"every": 1, "tensorboard": False},
    }
    return with_changes(data, changes)


ROLLBACK = {"train__rollback": {"after": 3, "skip_steps": 5, "max": 2}}


def short(place, steps, max, law=0.0):
    """A run of one phase that saves every 5 steps, and goes back `max` times."""
    rollback = {"after": 1, "skip_steps": 3, "max": max}
    return config_data(
        place,
        phases=[{"name": "only", "until": "end", "mixture": {"web": 1 - law, "law": law}}],
        train={"steps": steps, "batch_size": ROWS, "seq_len": LENGTH, "rollback": rollback},
        checkpoint={"every": 5, "keep": 9},
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two sources of tokens, `noisy/` with noise in the three batches of BAD, and the store."""
    folder = tmp_path_factory.mktemp("divergence")
    rng = np.random.default_rng(0)
    tokens = {name: np.tile(rng.permutation(12) + first, 1500) for name, first in (("web", 40), ("law", 90))}
    tokens = {name: np.where(rng.random(len(t)) < 0.1, t + 1, t) for name, t in tokens.items()}
    for name, values in tokens.items():
        values.astype("<u2").tofile(folder / f"{name}.bin")
    setup = build(build_config(config_data(folder)), folder / "store")
    setup.course.feed.close()
    offsets = np.concatenate([draws.offset for draws in setup.course.plan.draws(BAD[0], len(BAD))])
    for offset in offsets:
        tokens["law"][offset : offset + LENGTH + 1] = rng.integers(130, 256, LENGTH + 1)
    (folder / "noisy").mkdir()
    for name, values in tokens.items():
        values.astype("<u2").tofile(folder / f"noisy/{name}.bin")
    return folder


def trained(place, run_dir, data, resume=None):
    train(build_config(data), run_dir, store_dir=place / "store", resume=resume)
    return run_dir


@pytest.fixture(scope="module")
def clean(place):
    return trained(place, place / "clean", config_data(place))


@pytest.fixture(scope="module")
def gone_back(place):
    return trained(place, place / "gone_back", config_data(place / "noisy", **ROLLBACK))


@pytest.fixture(scope="module")
def from_the_start(place):
    """A run whose schedule was that of `gone_back` from the start."""
    setup = build(build_config(config_data(place / "noisy", **ROLLBACK)), place / "store")
    setup.course.pass_over(BAD[0], 5, back_to=0)
    directory = RunDirectory(place / "from_the_start")
    with RunLock(directory.path) as lock:
        train_built(setup, directory, None, lock)
    return place / "from_the_start"


def state_of(run_dir, step=STEPS):
    arrays = saved_arrays(run_dir / f"checkpoints/{step}")
    assert any("guard" in name for name in arrays)
    return arrays


def rollbacks(run_dir):
    return [event for event in load_run(run_dir).events if event["event"] == "rollback"]


def last_loss(run_dir):
    return load_run(run_dir).complete["final_val_loss"]


def test_an_honest_rise_at_a_phase_switch_skips_nothing(clean):
    losses = [row["loss"] for row in load_run(clean).metrics]
    before = np.array(losses[SWITCH - 48 : SWITCH])
    assert losses[SWITCH] > before.mean() + 4 * before.std()  # it would have been skipped
    assert load_run(clean).complete["skipped_updates"] == 0


def test_a_bad_batch_is_skipped_counted_and_said(place, clean, tmp_path, capsys):
    run_dir = trained(place, tmp_path / "run", config_data(place / "noisy", logging__every=5))
    complete, rows = load_run(run_dir).complete, load_run(run_dir).metrics
    assert (complete["skipped_updates"], complete["skipped_nonfinite"], complete["skipped_outliers"]) == (3, 0, 3)
    assert [(row["step"], row["skipped_outliers"]) for row in rows[26:29]] == [(135, 0), (140, 3), (145, 3)]
    assert last_loss(run_dir) == pytest.approx(last_loss(clean), abs=0.1) and last_loss(run_dir) < 1.5
    out = capsys.readouterr().out
    assert "\nskipped 3 updates up to step 140: 3 with a loss or gradient norm far above the recent ones\n" in out
    assert "3 of 150 updates were skipped: 3 with a loss or gradient norm far above the recent ones" in out


def test_bad_updates_in_words():
    assert divergence._bad_updates(7, 1) == "update 7 was bad"
    assert divergence._bad_updates(7, 2) == "2 updates in a row were bad, from update 7 on"


def test_three_bad_batches_in_a_row_are_gone_back_from(place, clean, gone_back):
    run, (rollback,) = load_run(gone_back), rollbacks(gone_back)
    wanted = {"step": 132, "told_at_step": 138, "first_bad_step": 135, "skip_steps": 5, "number": 1, "max": 2}
    assert {key: rollback[key] for key in wanted} == wanted
    assert rollback["reason"] == "3 updates in a row were bad, from update 135 on"
    assert run.complete["skipped_updates"] == 0 and [row["step"] for row in run.metrics] == list(range(1, STEPS + 1))
    assert last_loss(gone_back) == pytest.approx(last_loss(clean), abs=0.1)
    ledger = json.loads((gone_back / "checkpoints/150/ledger/metadata").read_text())
    assert ledger["history"]["rollbacks"] == [{"step": 132, "first_bad_step": 135, "skip_steps": 5}]
    skipped = [(s["start"], s["end"], s["phase"], s["first_sequence"]) for s in ledger["segments"]]
    assert skipped == [(0, 70, "first", 0), (70, 135, "second", 0), (135, 150, "second", (135 - 70 + 5) * ROWS)]
    # The checkpoint in the middle of the row, and what was recorded after the one gone back to, were set aside.
    assert (gone_back / "superseded/136").is_dir()
    lines = [json.loads(line) for line in (gone_back / "superseded.jsonl").read_text().splitlines()]
    rows = [line["line"] for line in lines if line["file"] == "metrics.jsonl"]
    assert [row["step"] for row in rows] == list(range(133, 139)) and rows[-1]["skipped_outliers"] == 3


def test_it_is_bit_for_bit_the_run_that_was_planned_so(gone_back, from_the_start):
    assert state_of(gone_back) == state_of(from_the_start)
    events, rows = record(gone_back, without=("resume", "rollback"))
    other_events, other_rows = record(from_the_start)
    assert rows == other_rows and len(rows) == STEPS
    events[0].pop("plan"), other_events[0].pop("plan")  # `gone_back` planned otherwise when it began
    assert events == other_events


def test_what_was_passed_over_is_not_told_as_read(gone_back):
    run, ledger = load_run(gone_back), read_ledger(gone_back / f"checkpoints/{STEPS}")
    a_step = ROWS * LENGTH
    read = {"web": SWITCH * a_step, "law": (STEPS - SWITCH) * a_step}
    first, second = inspect_run(run)["phases"]
    assert (first["tokens"], second["tokens"]) == ({"web": read["web"]}, {"law": read["law"]})
    assert sum(read.values()) == run.events[-1]["tokens_processed"] == 19_200
    # How far a source is used up, by what max_epochs caps, is another number.
    state = json.loads((gone_back / "training_state.json").read_text())
    assert state["tokens_drawn"] == read and state["consumed"] == {**read, "law": read["law"] + 5 * a_step}
    size = run.start["sources"]["law"]["tokens_per_epoch"]
    assert second["epochs"]["law"] == state["consumed"]["law"] / size
    drawn = {name: source["tokens_drawn"] for name, source in ledger["sources"].items()}
    assert drawn == read
    card = "\n".join(training(run, STEPS, drawn, []))
    assert "19,200 tokens up to step 150." in card and "| law 10,240 |" in card
    assert f" | 10,240 | {read['law'] / size:.3g} |" in card


def test_resumed_after_it_the_run_still_passes_over(place, gone_back, tmp_path):
    run_dir = shutil.copytree(gone_back, tmp_path / "run")
    trained(place, run_dir, config_data(place / "noisy", **ROLLBACK), resume=144)
    assert state_of(run_dir) == state_of(gone_back) and record(run_dir) == record(gone_back)
    assert len(rollbacks(run_dir)) == 1


def test_the_gold_checkpoint_will_do_where_no_other_lies_before_it(place, from_the_start, tmp_path):
    data = config_data(place / "noisy", **ROLLBACK, checkpoint={"every": 150, "keep": 2})
    run = load_run(trained(place, tmp_path / "run", data))
    assert state_of(tmp_path / "run") == state_of(from_the_start)
    (rollback,) = rollbacks(tmp_path / "run")
    assert rollback["step"] == 100 and [row["step"] for row in run.metrics] == list(range(1, STEPS + 1))


def test_a_branch_takes_over_what_its_trunk_passed_over(place, tmp_path, monkeypatch):
    """Of two sources, so that an order that began anew would be another one."""
    diverges(monkeypatch, (19, 17))
    trained(place, tmp_path / "trunk", short(place, steps=30, max=2, law=0.27))
    (rollback,) = rollbacks(tmp_path / "trunk")
    assert rollback["step"] == 15
    # The checkpoints are those of step 15, which knows of no rollback, and of 25; the last is the branch of a branch.
    for trunk, at in (("trunk", 18), ("trunk", 25), ("at18", 19)):
        branch(tmp_path / trunk, at, tmp_path / f"at{at}", store_dir=place / "store")
        assert state_of(tmp_path / f"at{at}", 30) == state_of(tmp_path / "trunk", 30)
        assert without_clock(rollbacks(tmp_path / f"at{at}")) == without_clock([rollback])
        ledger = json.loads((tmp_path / f"at{at}/checkpoints/30/ledger/metadata").read_text())
        assert ledger["history"]["rollbacks"] == [{"step": 15, "first_bad_step": 17, "skip_steps": 3}]


def test_a_rollback_that_no_checkpoint_of_the_trunk_knows_is_told_once_by_a_branch(place, tmp_path, monkeypatch):
    """It comes to that rollback by itself, on its way from the checkpoint to the step where it branches."""
    diverges(monkeypatch, *[(19, 17)] * 4)  # the second time it ends the run, and the branch as well
    with pytest.raises(Diverged):
        trained(place, tmp_path / "trunk", short(place, steps=30, max=1))
    with pytest.raises(Diverged):
        branch(tmp_path / "trunk", 18, tmp_path / "new", store_dir=place / "store")
    for name in ("trunk", "new"):
        (told,) = rollbacks(tmp_path / name)
        assert (told["step"], told["first_bad_step"], told["number"]) == (15, 17, 1)


def test_a_branch_where_its_trunk_s_second_rollback_begins_comes_to_it_by_itself(place, tmp_path, monkeypatch):
    diverges(monkeypatch, (8, 7), (11, 10))
    trained(place, tmp_path / "trunk", short(place, steps=20, max=2, law=0.27))
    diverges(monkeypatch, (11, 10))
    branch(tmp_path / "trunk", 10, tmp_path / "new", store_dir=place / "store")
    for name in ("trunk", "new"):
        told = [(e["number"], e["step"], e["first_bad_step"]) for e in rollbacks(tmp_path / name)]
        assert told == [(1, 5, 7), (2, 10, 10)]
    assert state_of(tmp_path / "new", 20) == state_of(tmp_path / "trunk", 20)


def test_a_branch_before_the_data_that_its_trunk_passed_over_may_go_back_itself(place, tmp_path, monkeypatch):
    """From a checkpoint that was saved after the rollback, and before its first bad update."""
    found = diverges(monkeypatch, (19, 17), (19, 17))
    with monkeypatch.context() as patch:
        patch.setattr(StopSignals, "after", lambda _, step: signal.SIGTERM if found and step == 16 else None)
        with pytest.raises(Stopped):
            trained(place, tmp_path / "trunk", short(place, steps=24, max=1))
    (of_trunk,) = read_ledger(tmp_path / "trunk/checkpoints/16")["history"]["rollbacks"]
    assert (of_trunk["step"], of_trunk["first_bad_step"]) == (15, 17)
    shutil.copytree(tmp_path / "trunk/checkpoints/16", tmp_path / "trunk/kept/16")
    branch(tmp_path / "trunk", 16, tmp_path / "new", store_dir=place / "store")
    assert read_ledger(tmp_path / "new/kept/16")["history"]["rollbacks"] == []
    (own,) = read_ledger(tmp_path / "new/checkpoints/24")["history"]["rollbacks"]
    assert (own["step"], own["first_bad_step"]) == (16, 17)


class Killed(BaseException):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("where", ["before the record is cut", "after it"])
def test_killed_while_it_goes_back_it_comes_to_the_same(place, gone_back, tmp_path, monkeypatch, where):
    data, run_dir = config_data(place / "noisy", **ROLLBACK), tmp_path / "run"
    begin, knobs = BestCheckpoints.__init__, Course.knobs

    def dies_or(call):
        def called(self, *arguments):
            if (run_dir / "superseded/136").exists():
                raise Killed
            return call(self, *arguments)

        return called

    with monkeypatch.context() as patch:
        if where == "after it":
            patch.setattr(Course, "knobs", dies_or(knobs))
        else:
            patch.setattr(BestCheckpoints, "__init__", dies_or(begin))
        with pytest.raises(Killed):
            trained(place, run_dir, data)
    kept = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert kept == list(range(1, 133 if where == "after it" else 139))
    trained(place, tmp_path / "run", data, resume="latest")
    assert state_of(tmp_path / "run") == state_of(gone_back)
    assert record(tmp_path / "run") == record(gone_back)


def exploding(place, **changes):
    """From step 70 on the rate rises to what no parameter survives."""
    phases = config_data(place)["phases"]
    phases[1]["lr"] = {"rewarm_steps": 30, "peak": 1e30}
    optim = {"lr": 1e-2, "warmup_steps": 0, "schedule": "constant", "allow_jump": True}
    return config_data(place, **{"phases": phases, "optim": optim, **changes})


def test_a_rate_that_explodes_ends_with_exit_code_3_and_a_summary(place, tmp_path):
    run = tmp_path / "a run"
    config = {**exploding(place, **ROLLBACK), "name": "explodes"}
    config["optim"] |= {"allow_jump": False}  # a re-warming need not ask
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    command = ["train", str(tmp_path / "config.yaml"), "--run-dir", str(run), "--store-dir"]
    done = CliRunner().invoke(cli, [*command, str(place / "store")])
    assert done.exit_code == 3, done.output
    *_, last = load_run(run).events
    assert last["event"] == "diverged" and [r["skip_steps"] for r in last["rollbacks"]] == [5, 5]
    first, good = last["first_bad_step"], last["last_good_step"]
    assert SWITCH < first < STEPS and good <= first and good in Checkpoints(run / "checkpoints").steps()
    told = done.stderr
    for words in (
        f"training diverged at step {last['step']} of 150 (phase second, learning rate ",
        f"3 updates in a row were bad, from update {first} on",
        "  loss         ",
        "  grad norm    ",
        "  rollbacks    2 of 2: to step ",
        f"  last good    step {good} of ",
        "  what to try  a lower optim.lr (or the phase's lr.peak)",
        f"curriculum branch '{run}' --at {good} --run-dir NEW --store-dir {place / 'store'} --set ",
    ):
        assert words in told
    assert f"diverged at step {last['step']}: " in done.stdout and "rollback 2 of 2 at step" in done.stdout
    assert "Traceback" not in told

    # The command that is printed does what the advice says: a rate that is lower at once.
    (advice,) = [line for line in told.splitlines() if "from the last good step on: " in line]
    words = shlex.split(advice.partition("curriculum ")[2])
    words[words.index("NEW")] = str(tmp_path / "lower")
    at = words.index("KEY=VALUE")
    words[at : at + 1] = ["optim.lr=1e-4", "--set", "phases[1].lr=null", "--set", f"train.steps={SWITCH + 2}"]
    branched = CliRunner().invoke(cli, words)
    assert branched.exit_code == 0, branched.output
    assert load_run(tmp_path / "lower").metrics[-1]["lr"] == 1e-4


@pytest.mark.slow
def test_a_share_that_was_raised_on_the_way_is_not_raised_once_more(place, tmp_path):
    """Its eval comes between the checkpoint and the first bad update: what followed from it is done again, once."""
    evalsets = {
        "every": 1,
        "primary": {"held_out_of": "web"},  # none of law, whose share pays
        "sets": {"web": {"held_out_of": "web"}},
        "regression": {"action": "replay", "replay_factor": 10.0, "replay_max_share": 0.9},
    }
    data = exploding(place, **ROLLBACK, evalsets=evalsets, checkpoint={"every": 70, "keep": 3})
    data["phases"][1]["lr"]["peak"] = 1e3
    with pytest.raises(Diverged):
        trained(place, tmp_path / "run", data)
    events = load_run(tmp_path / "run").events
    (rollback,) = [e for e in events if e["event"] == "rollback"]  # the last: all went back to the same checkpoint
    (edit,) = [e for e in events if e["event"] == "schedule_edit" and e["step"] > 70]
    assert rollback["step"] == 70 < edit["step"] <= rollback["first_bad_step"] and rollback["number"] == 2
    assert (edit["mixture_before"], edit["mixture_after"]) == ({"law": 1.0}, {"law": 0.9, "web": 0.1})
    lines = [json.loads(line)["line"] for line in (tmp_path / "run/superseded.jsonl").read_text().splitlines()]
    before = [line for line in lines if line.get("event") == "schedule_edit"]
    assert len(before) == 2 and all({**e, **{k: edit[k] for k in CLOCK_FIELDS & e.keys()}} == edit for e in before)


def test_what_was_done_before_is_said_by_the_newest_rollback_alone():
    acts = {"145": {"action": "law is replayed more", "edits": [{"kind": "replay"}]}}
    first = {"step": 140, "first_bad_step": 150, "skip_steps": 20, "acts": acts}
    nothing = {"action": None, "edits": []}

    def done_before(step, *rollbacks):
        return History("now", "second", rollbacks=rollbacks).done_before(step)

    assert [done_before(step, first) for step in (140, 145, 150, 151)] == [None, acts["145"], nothing, None]
    # Data were passed over before that step since then, so that its batches are others now.
    for second in ({"step": 140, "first_bad_step": 140}, {"step": 120, "first_bad_step": 130}):
        assert done_before(145, first, second | {"skip_steps": 20}) is None
    assert done_before(125, first, {"step": 120, "first_bad_step": 130, "skip_steps": 20}) == nothing
    # Up to where it went back to all is as the older one says.
    assert done_before(145, first, {"step": 148, "first_bad_step": 149, "skip_steps": 20}) == acts["145"]


def test_without_a_rollback_a_window_full_of_bad_updates_ends_the_run(place, tmp_path):
    with pytest.raises(Diverged, match="48 updates in a row were bad") as told:
        trained(place, tmp_path / "run", exploding(place, phases=[
            {"name": "first", "until": "end", "mixture": {"web": 1.0}, "lr": {"rewarm_steps": 0, "peak": 1e30}}]))  # fmt: skip
    assert "rollbacks    none (train.rollback is not set)" in str(told.value) and "not finite" in str(told.value)


@pytest.mark.parametrize("explodes_at", [2, 8])
def test_bad_updates_to_the_end_that_are_most_of_a_short_run_are_its_divergence(place, tmp_path, explodes_at):
    phases = [
        {"name": name, "until": until, "mixture": {"web": 1.0}, "lr": {"peak": peak}}
        for name, until, peak in (("sane", explodes_at, 1e-3), ("wild", "end", 1e30))
    ]
    data = exploding(place, phases=phases, train__steps=14)
    if explodes_at == 8:
        assert load_run(trained(place, tmp_path / "run", data)).complete["skipped_updates"] > 2
        return
    with pytest.raises(Diverged, match="1[01] updates in a row were bad, from update [34] on"):
        trained(place, tmp_path / "run", data)


def test_a_divergence_after_the_run_was_moved_away_is_left_to_its_resume(place, tmp_path, monkeypatch):
    """Where it was there is no checkpoint to go back to: the record would say so for good."""
    run_dir, log = tmp_path / "run", trainer.log

    def moved_at_13(run, done):
        log(run, done)
        if done == 13:
            run.settle(done)
            run_dir.rename(tmp_path / "elsewhere")

    monkeypatch.setattr(trainer, "log", moved_at_13)
    phases = [
        {"name": name, "until": until, "mixture": {"web": 1.0}, "lr": {"peak": peak}}
        for name, until, peak in (("sane", 2, 1e-3), ("wild", "end", 1e30))
    ]
    with pytest.raises(InputError, match="run: was moved or removed while the run trained"):
        trained(place, run_dir, exploding(place, phases=phases, train__steps=14))
    assert load_run(tmp_path / "elsewhere").diverged is None and not run_dir.exists()


def test_the_newest_checkpoint_from_before_the_bad_updates_stays(place, tmp_path, capsys):
    """They take 48 updates to be a divergence, in which 12 checkpoints are saved, of which 3 are kept."""
    with pytest.raises(Diverged) as told:
        trained(place, tmp_path / "run", exploding(place))
    last = load_run(tmp_path / "run").events[-1]
    first, good = last["first_bad_step"], last["last_good_step"]
    assert good == first // 4 * 4 >= SWITCH - 4
    steps = Checkpoints(tmp_path / "run/checkpoints").steps()
    assert steps[0] == good < first + 30 < steps[1] and len(steps) == 4
    summary = str(told.value)
    assert re.search(r"loss         [\d.]+ ± \S+ over 5 metrics rows before; then ", summary)
    way = f"--at {good} --run-dir NEW --store-dir {place / 'store'} --set KEY=VALUE"
    assert way in summary and "resume from" not in capsys.readouterr().out
    facts = inspect_run(load_run(tmp_path / "run"))
    assert facts["commands"]["go on"].endswith(way)
    assert "diverged, in phase second" in inspection_text.text(facts)[1]
    # While a run has no row of bad updates it keeps no more than it is told to.
    trained(place, tmp_path / "sound", config_data(place, train__steps=SWITCH + 8, checkpoint={"every": 20, "keep": 1}))
    assert Checkpoints(tmp_path / "sound/checkpoints").steps() == [SWITCH + 8]


def test_a_state_that_is_not_finite_is_never_saved(place, tmp_path):
    """The largest rate that float32 holds: the first update is finite, and its sum with the parameters is not."""
    optim = {"lr": 3.4e38, "warmup_steps": 0, "schedule": "constant", "weight_decay": 100.0}
    data = config_data(
        place, optim=optim, checkpoint={"every": 1, "keep": 3}, train__rollback=ROLLBACK["train__rollback"]
    )
    with pytest.raises(Diverged, match="params.* is not finite after step 1") as told:
        trained(place, tmp_path / "run", data)
    assert "rollbacks    2 of 2: to step 0 (bad from 0), to step 0 (bad from 0)" in str(told.value)
    assert "last good    none" in str(told.value)
    assert Checkpoints(tmp_path / "run/checkpoints").steps() == []


def test_data_that_cannot_be_passed_over_end_the_run(place, tmp_path):
    data = config_data(place / "noisy", **ROLLBACK)
    drawn = (STEPS - SWITCH) * ROWS * LENGTH
    setup = build(build_config(data), place / "store")
    setup.course.feed.close()
    size = setup.corpus.tokens_per_epoch["law"]
    data["sources"]["law"] |= {"max_epochs": (drawn + ROWS * LENGTH) / size}
    with pytest.raises(
        Diverged,
        match="the data of 5 steps cannot be passed over: more than 0.* epochs of law would be read by step 150",
    ):
        trained(place, tmp_path / "run", data)


def test_what_a_config_may_ask_for(place):
    skip = {"sigmas": 6.0, "window_steps": 16, "judge_from_steps": 17}
    for changes, words in (
        ({"train__skip_updates": skip}, "judge_from_steps: got 17, expected at most the window_steps"),
        ({"train__skip_updates": {"sigmas": -1}}, "train.skip_updates.sigmas: "),
        ({"train__rollback": {"after": 0}}, "train.rollback.after: "),
        ({"train__rollback": {"often": 3}}, "train.rollback.often: "),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words.replace("(", "[(]")):
            build_config(config_data(place, **changes))
    assert build_config(config_data(place, train__skip_updates=None)).train.window_steps == 128
    assert build_config(config_data(place)).train.diverged_after == 48
    assert load_config("configs/quickstart.yaml", check_paths=False).train.skip_updates.judge_from_steps == 64


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A folder with a run `base`, and a run `run` that began with its parameters."""
    folder = write_corpus(tmp_path_factory.mktemp("adapted"))
    tiny_train(folder, folder / "base")
    tiny_train(folder, folder / "run", **begun_with_base(folder, 12))
    return folder


def begun_with_base(folder, steps):
    rollback = {"after": 3, "skip_steps": 2}
    return {
        "adaptation": {"init_from": str(folder / "base")},
        "train": {"steps": steps, "batch_size": 4, "seq_len": 32, "rollback": rollback},
        "optim": {"lr": 3e-3, "schedule": "constant"},
    }


def without_a_checkpoint(folder, run_dir, monkeypatch):
    """Goes on to step 16, and finds at 14 that it diverged and that no checkpoint is there to go back to."""

    def all_gone(directory, _):
        for place in (directory.checkpoints, directory.gold):
            shutil.rmtree(place)

    found = diverges(monkeypatch, (14, 13), good=all_gone)
    tiny_train(folder, run_dir, resume="latest", **begun_with_base(folder, 16))
    assert found


def test_a_run_that_begins_anew_after_a_resume_begins_with_what_it_began_with(adapted, tmp_path, monkeypatch):
    shutil.copytree(adapted / "run", tmp_path / "run")
    (first, begun_with), *_ = load_run(tmp_path / "run").evals()
    without_a_checkpoint(adapted, tmp_path / "run", monkeypatch)
    run = load_run(tmp_path / "run")
    assert [e["step"] for e in run.events if e["event"] == "rollback"] == [0] and run.complete["total_steps"] == 16
    assert (first, begun_with) == run.evals()[0] == (0, load_run(adapted / "base").evals()[-1][1])


def test_a_branch_at_the_very_start_is_the_run_itself(adapted, tmp_path):
    worse = begun_with_base(adapted, 12) | {"optim": {"lr": 1.0, "schedule": "constant"}}
    tiny_train(adapted, tmp_path / "run", **worse)
    assert (tmp_path / "run/gold/0").exists()
    branch(tmp_path / "run", 0, tmp_path / "new", store_dir=adapted / "store")
    assert state_of(tmp_path / "new", 12) == state_of(tmp_path / "run", 12)


def test_another_run_at_the_place_of_the_one_it_began_from_is_refused(adapted):
    config = build_config(tiny_data(adapted, **begun_with_base(adapted, 12)))
    start = start_of(config)
    for other, told in (({"run": "other"}, "from other of 20"), ({"started_at": "then"}, "from tiny of then")):
        with pytest.raises(InputError, match=f"base: is run tiny of 20.*, but the run began {told}"):
            base_again(config, None, start.lineage | other)


def test_a_run_that_cannot_begin_anew_ends(adapted, tmp_path, monkeypatch):
    shutil.copytree(adapted / "run", tmp_path / "run")
    places = [adapted / "base" / place for place in ("checkpoints", "gold")]
    arrays = [path for place in places for path in (place / "12/params/ocdbt.process_0/d").iterdir()]
    arrays = {path.stat().st_ino: path for path in arrays}.values()  # the gold is hard links of the checkpoint
    whole = {path: path.read_bytes() for path in arrays}
    for path in arrays:
        flip_bit(path)
    try:
        with pytest.raises(Diverged) as told:
            without_a_checkpoint(adapted, tmp_path / "run", monkeypatch)
    finally:
        for path, content in whole.items():
            path.write_bytes(content)
    for words in (
        "training diverged at step 14: planted",
        "/run up to step 13 verifies",
        "the run needs what it began from (adaptation.init_from), which is gone:",
        "has another checksum than the manifest says",
        "expected step 12 of run tiny that the run began from",
        "restore it from a copy, and continue with --resume latest",
    ):
        assert words in str(told.value)
    *_, last = load_run(tmp_path / "run").events
    assert (last["event"], last["step"], last["first_bad_step"], last["last_good_step"]) == ("diverged", 14, 13, None)
