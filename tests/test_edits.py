"""A run that goes on with another config: what is trained stands, what lies ahead is the config's, nothing is lost."""

import copy
import importlib.util
import json
from collections import Counter
from dataclasses import asdict, field, make_dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from curriculum.config import build_config
from curriculum.errors import InputError
from curriculum.scheduling import check_schedule, continued_schedule, declaration, resolve_schedule, training_settings
from curriculum.train.resuming.edits import (
    _acts_at_once,
    _in_words,
    _reason,
    edit_event,
    find_edit,
    gone_back,
    gone_on,
)
from curriculum.train.resuming.ledger import Found
from phases.batches import DataPlan
from phases.rollback import pass_over
from phases.schedule import Phase, Ramp, Schedule, Segment, SourceSupply, cut, segments_from_json, segments_to_json

LENGTH, BATCH = 8, 4
EPOCHS = {"web": 100 * LENGTH, "law": 60 * LENGTH, "code": 40 * LENGTH, "new": 30 * LENGTH}
BASE = {
    "sources": {name: {"path": f"{name}.txt"} for name in ("web", "law", "code")},
    "phases": [
        {"name": "a", "until": "40%", "mixture": {"web": 0.7, "law": 0.3}},
        {"name": "b", "until": "80%", "mixture": {"web": 0.3, "law": 0.5, "code": 0.2}, "ramp_steps": "10%"},
        {"name": "c", "until": "end", "mixture": {"code": 1.0}},
    ],
    "evalsets": {"primary": {"path": "val.txt"}},
    "train": {"steps": 100, "batch_size": BATCH, "seq_len": LENGTH},
    "optim": {"lr": 1e-3, "warmup_steps": "10%", "decay_steps": 10},
}
STEP = 60  # in the second phase, behind its ramp


def changed(data, *edits):
    """A copy of a config after each of `edits` was called with it."""
    data = copy.deepcopy(data)
    for edit in edits:
        edit(data)
    return data


def config_of(data):
    return build_config(copy.deepcopy(data), check_paths=False)


def epochs_of(config):
    return {name: EPOCHS[name] for name in config.sources}


def ledger_of(config, schedule, step, past=None, sources=None):
    """What `find_edit` reads of a ledger, as a checkpoint would keep it."""
    drawn = schedule.cursors_at(step)
    saved = {
        "step": step,
        "declared": declaration(config),
        "settings": training_settings(config),
        "segments": segments_to_json(schedule.segments),
        "past_end": past.end if past else 0,
        "settled": dict(past.settled) if past else {},
        "data_seed": config.seed if past is None or past.seed is None else past.seed,
        "sources": {name: {"tokens_per_epoch": EPOCHS[name], "tokens_drawn": drawn[name]} for name in drawn},
        "block_tokens": config.longest_seq_len,
        "branched_from": None,
        "history": {"rollbacks": []},
        "model": {"rope_theta": 1e4},
    }
    return json.loads(json.dumps(saved))


def begun(data=BASE, step=STEP):
    """(schedule, ledger) of a run that has come to a step."""
    config = config_of(data)
    schedule = resolve_schedule(config, epochs_of(config))
    return schedule, ledger_of(config, schedule, step)


def resumed(saved, data, accept_past=False):
    """(schedule, past, edit) of the run as another config goes on with it."""
    config = config_of(data)
    edit = find_edit(config, saved, accept_past=accept_past)
    schedule, past = continued_schedule(config, epochs_of(config), edit.past)
    return schedule, past, edit


def refusal(saved, data, **options):
    """(problems, details) of the refusal of a config."""
    with pytest.raises(InputError) as error:
        resumed(saved, data, **options)
    return list(error.value.problems), list(error.value.details)


def read(schedule, until, seed=1337):
    """Every row before step `until`: (source, epoch, offset) of each, in order."""
    plan = DataPlan(schedule, seed, EPOCHS, LENGTH)
    return [
        (plan.sources[source], int(epoch), int(offset))
        for draws in plan.draws(0, until)
        for source, epoch, offset in zip(*draws, strict=True)
    ]


def segmented(saved):
    """The schedule in a ledger."""
    return Schedule(segments_from_json(saved["segments"]))


def assert_nothing_lost(schedule, saved, step=STEP):
    """The trained steps are the ledger's, and of every source each epoch is read whole before the next begins."""
    trained = read(segmented(saved), step)
    rows = read(schedule, schedule.total_steps)
    assert rows[: len(trained)] == trained and len(trained) == step * BATCH < len(rows)
    counts = Counter(rows)
    assert max(counts.values()) == 1
    for name in {source for source, _, _ in rows}:
        by_epoch = Counter(epoch for source, epoch, _ in rows if source == name)
        full = EPOCHS[name] // LENGTH
        assert [by_epoch[e] for e in sorted(by_epoch)][:-1] == [full] * (len(by_epoch) - 1)
        assert list(sorted(by_epoch)) == list(range(len(by_epoch)))


def phase(data, name):
    return next(p for p in data["phases"] if p["name"] == name)


def renamed(name, to):
    return lambda data: phase(data, name).update(name=to)


def removed(name):
    return lambda data: data["phases"].remove(phase(data, name))


def reweighted(name, **mixture):
    return lambda data: phase(data, name).update(mixture=mixture)


def inserted(at, name, until):
    return lambda data: data["phases"].insert(at, {"name": name, "until": until, "mixture": {"law": 1.0}})


def swapped(i, j):
    def swap(data):
        phases = data["phases"]
        phases[i], phases[j] = phases[j], phases[i]

    return swap


def put(path, value):
    *sections, key = path.split(".")

    def set_value(data):
        for section in sections:
            data = data[section]
        data[key] = value

    return set_value


def future(data):
    """Another phase behind, so that the future has two to reorder."""
    phase(data, "c")["until"] = "90%"
    data["phases"].append({"name": "d", "until": "end", "mixture": {"web": 1.0}})


def moved_ends(data):
    phase(data, "c")["until"], phase(data, "d")["until"] = "end", "90%"


MATRIX = {
    # what is edited: (edits, the place that a refusal names; None where it is free)
    "past add": ([inserted(0, "x", 10)], "phases[0].name"),
    "past remove": ([removed("a"), lambda d: phase(d, "b").update(ramp_steps=0)], "phases"),
    "past reweight": ([reweighted("a", web=0.5, law=0.5)], "phases[0].mixture"),
    "past reorder": ([swapped(0, 1), lambda d: phase(d, "b").update(until=20, ramp_steps=0)], "phases"),
    "past rename": ([renamed("a", "first")], "phases"),
    "past bounds": ([lambda d: phase(d, "a").update(until=50)], "phases[0].until"),
    "past seed": ([put("seed", 7)], "seed"),
    "past batch size": ([put("train.batch_size", 2 * BATCH)], "train.batch_size"),
    "current add": ([inserted(1, "x", 50)], "phases[1].name"),
    "current remove": ([removed("b")], None),
    "current reweight": ([reweighted("b", code=1.0)], None),
    "current reorder": ([swapped(1, 2), lambda d: phase(d, "c").update(until=70)], "phases[1].name"),
    "current rename": ([renamed("b", "second")], None),
    "current end later": ([lambda d: phase(d, "b").update(until=85)], None),
    "current end earlier": ([lambda d: phase(d, "b").update(until=61)], None),
    "current end now": ([lambda d: phase(d, "b").update(until=60)], None),
    "current end by now": ([lambda d: phase(d, "b").update(until=50)], "phases[1].until"),
    "current end in epochs by now": (
        [lambda d: phase(d, "b").update(until="1 epoch of web"), reweighted("b", web=1.0)], "phases[1].mixture"),
    "current end now, reweight": (
        [lambda d: phase(d, "b").update(until="60%"), reweighted("b", code=1.0)], "phases[1].mixture"),
    "current end now, batch size": (
        [lambda d: phase(d, "b").update(until=60, batch_size=2)], "phases[1].batch_size"),
    "future add": ([inserted(2, "x", 85)], None),
    "future remove": ([removed("d"), lambda d: phase(d, "c").update(until="end")], None),
    "future reweight": ([reweighted("c", law=0.2, web=0.8)], None),
    "future reorder": ([swapped(2, 3), moved_ends], None),
    "future rename": ([renamed("c", "third")], None),
    "future source": ([put("sources.new", {"path": "new.txt"}), reweighted("c", new=1.0)], None),
    "future longer": ([put("train.steps", 200)], None),
}  # fmt: skip


@pytest.mark.parametrize("name", MATRIX)
def test_no_edit_repeats_or_skips_a_sequence(name):
    edits, refused_at = MATRIX[name]
    base = changed(BASE, future)
    _, saved = begun(base)
    data = changed(base, *edits)
    if refused_at:
        problems, how = refusal(saved, data)
        assert any(problem.startswith(f"config: {refused_at}: ") for problem in problems), problems
        assert how[-1].endswith("--accept-past") and how[1:3] == ["--- trained", "+++ config"]
    if name == "past batch size":
        schedule, past, _ = resumed(saved, data, accept_past=True)
        assert [s.batch_size for s in schedule.segments if s.start >= STEP] == [2 * BATCH] * 3
        assert schedule.tokens(STEP) == STEP * BATCH * LENGTH and schedule.tokens(70) == (STEP + 20) * BATCH * LENGTH
    else:
        schedule, past, edit = resumed(saved, data, accept_past=bool(refused_at))
        assert edit.changes and bool(edit.accepted) == bool(refused_at)
    assert_nothing_lost(schedule, saved)
    # Once it is recorded it is the run's, and goes on as it was planned.
    config = config_of(data)
    again, _, edit = resumed(ledger_of(config, schedule, 85, past), data)
    assert again == schedule and not edit.changes


def test_a_phase_under_way_that_was_renamed_cannot_be_renamed_back():
    _, saved = begun()
    data = changed(BASE, renamed("b", "second"))
    schedule, past, _ = resumed(saved, data)
    for step in (70, 95):  # at 80 it is over
        saved = ledger_of(config_of(data), schedule, step, past)
        problems, how = refusal(saved, BASE)
        told = "config: phases: got phase b, which lasted up to step 60, then second began: it cannot come back"
        assert told in problems
        assert "-- name: second\n" in "\n".join(how)
        assert not resumed(saved, data)[2].changes


def test_a_refusal_shows_the_difference_and_what_to_put_back():
    _, saved = begun()
    data = changed(BASE, reweighted("a", web=1.0), put("seed", 3), put("train.batch_size", 8), reweighted("c", web=1.0))
    problems, how = refusal(saved, data)
    assert problems == [
        "config: seed: got 3, but steps 0 to 60 were trained with 1337",
        "config: train.batch_size: got 8, but steps 0 to 40 were trained with 4; leave it as it was, and set "
        "batch_size on the phases still to come",
        'config: phases[0].mixture: got {"web": 1.0}, but steps 0 to 40 were trained with {"web": 0.7, "law": 0.3}',
    ]
    assert (
        "\n".join(how)
        == """what is already trained is fixed; the difference:
--- trained
+++ config
@@ -1,3 +1,3 @@
-seed: 1337
-train: {batch_size: 4}
+seed: 3
+train: {batch_size: 8}
 phases:
@@ -5,2 +5,2 @@
   until: 40%
-  mixture: {web: 0.7, law: 0.3}
+  mixture: {web: 1.0}
put this back into the config:
seed: 1337
train: {batch_size: 4}
phases:
- name: a
  until: 40%
  mixture: {web: 0.7, law: 0.3}
or keep the edit, which is recorded, and continue from what was trained: --accept-past"""
    )


def test_what_is_put_back_has_the_shape_that_train_no_longer_gives():
    base = changed(BASE, put("train.seq_len", 4), shaped("a", seq_len=2), shaped("c", seq_len=8))
    config = config_of(base)
    saved = ledger_of(config, resolve_schedule(config, epochs_of(config)), 85)
    longer = [put("train.seq_len", 8), shaped("b", seq_len=4, grad_accum=2)]
    data = changed(base, *longer, lambda d: phase(d, "a").update(until=30))
    _, how = refusal(saved, data)
    assert not [
        line for line in how[: how.index("put this back into the config:")] if line[:1] in "+-" and "seq" in line
    ]
    back = yaml.safe_load("\n".join(how[how.index("put this back into the config:") + 1 : -1]))
    edited = {p["name"]: p for p in back["phases"]}
    assert edited["b"]["seq_len"] == 4 and edited["b"]["grad_accum"] == 2
    phases = [edited.get(p["name"], p) for p in data["phases"]]
    assert resumed(saved, {**data, **back, "phases": phases})[0].phase_bounds[0] == ("a", 0, 40)


def test_a_phase_that_ends_where_the_run_goes_on_is_one_that_is_over():
    """Also one by the clock of a longer run, and the last one of a run that is extended."""
    _, saved = begun()
    data = changed(BASE, lambda d: phase(d, "b").update(until="55%"), reweighted("b", code=1.0))
    problems, how = refusal(saved, data)
    trained = '{"web": 0.3, "law": 0.5, "code": 0.2}'
    assert problems == [
        'config: phases[1].until: got "55%", but steps 40 to 60 were trained in this phase: let it end at 60 or later, '
        'as "80%" does',
        f'config: phases[1].mixture: got {{"code": 1.0}}, but steps 40 to 60 were trained with {trained}',
    ]
    assert list(how[how.index("put this back into the config:") + 5 :][:3]) == [
        "- name: b",
        "  until: 80%",
        "  mixture: {web: 0.3, law: 0.5, code: 0.2}",
    ]
    # An end that may be is shown as it is, and so is the step, where what was declared is no end ahead any more.
    for edits, until in (
        ([lambda d: phase(d, "b").update(until="60%"), reweighted("b", code=1.0)], "60%"),
        ([lambda d: phase(d, "b").update(until="55%"), put("train.steps", 70)], "60"),
    ):
        _, how = refusal(saved, changed(BASE, *edits))
        assert f"  until: {until}" in how[how.index("put this back into the config:") + 5 :]
    # What the refusal gives back is taken, and what it calls for is no edit of the past later.
    assert resumed(saved, BASE)[0].phase_bounds[1:] == (("b", 40, 80), ("c", 80, 100))
    true = changed(BASE, lambda d: phase(d, "b").update(until=60))
    schedule, past, edit = resumed(saved, true)
    assert schedule.phase_bounds[1:] == (("b", 40, 60), ("c", 60, 100)) and not edit.accepted
    resumed(ledger_of(config_of(true), schedule, 85, past), changed(true, lambda d: phase(d, "b").update(until="60%")))

    longer = changed(BASE, put("train.steps", 200), put("optim.allow_jump", True))
    longer["phases"].append({"name": "d", "until": "end", "mixture": {"web": 1.0}})
    for until, step in (("50%", 100), (90, 90)):
        phase(longer, "c")["until"] = until
        _, saved = begun(step=step)
        schedule, _, _ = resumed(saved, longer)
        assert schedule.phase_bounds[2:] == (("c", 80, step), ("d", step, 200))
        with pytest.raises(InputError, match=rf"phases\[2\].mixture: got .*, but steps 80 to {step} were trained with"):
            resumed(saved, changed(longer, reweighted("c", law=1.0)))
    # A finished run that is given no more steps is told that nothing is taken up, which is no refusal.
    _, saved = begun(step=100)
    assert not resumed(saved, changed(BASE, reweighted("c", law=1.0)))[2].accepted


def test_the_warnings_of_a_schedule_that_an_edit_leaves_alone_are_told_with_it():
    data = changed(BASE, put("optim.schedule", "constant"))
    planned, saved = begun(data)
    (told,) = planned.warnings
    assert told == "optim.decay_steps does nothing: optim.schedule constant never decays"
    for edit in (
        put("evalsets.every", 7),
        put("logging", {"every": 3}),
        put("evalsets.sets", {"m": {"path": "m.txt"}}),
    ):
        schedule, _, event = resumed(saved, changed(data, edit))
        assert len(event.changes) <= 1 and schedule == segmented(saved) and schedule.warnings == (told,)
    # What stands needs not resolve again: a share was raised, and the rate jumps where the config's would go on.
    saved["segments"][-1]["lr"] = [{**piece, "first": 1e-5, "last": 1e-5} for piece in saved["segments"][-1]["lr"]]
    saved["segments"][1]["lr"] = saved["segments"][-1]["lr"]
    schedule, *_ = resumed(saved, changed(data, put("evalsets.every", 7)))
    assert schedule == segmented(saved) and schedule.warnings == ()


def test_a_ramp_that_is_added_or_taken_away_is_refused_without_its_shape():
    _, saved = begun(step=90)
    problems, _ = refusal(saved, changed(BASE, lambda d: phase(d, "b").update(ramp_steps=0)))
    assert problems == ['config: phases[1].ramp_steps: got 0, but steps 40 to 80 were trained with "10%"']
    problems, _ = refusal(saved, changed(BASE, lambda d: phase(d, "b").update(ramp_shape="cosine")))
    assert problems == ['config: phases[1].ramp_shape: got "cosine", but steps 40 to 80 were trained with "linear"']


def test_the_same_in_other_words_is_no_edit_of_the_past():
    _, saved = begun()
    data = changed(BASE, reweighted("a", web=70, law=30), lambda d: phase(d, "a").update(until="1280 tokens"))
    schedule, _, edit = resumed(saved, data)
    assert [change["path"] for change in edit.changes] == ["phases.a.until", "phases.a.mixture"]
    assert_nothing_lost(schedule, saved)
    with pytest.raises(InputError, match=r"phases\[0\].until: got \"1281 tokens\", but steps 0 to 40 were trained"):
        resumed(saved, changed(BASE, lambda d: phase(d, "a").update(until="1281 tokens")))


@pytest.mark.parametrize("steps", (101, 150, 1000))
def test_more_steps_leave_what_has_begun_as_it_is(steps):
    data = changed(BASE, lambda d: phase(d, "b").update(lr={"rewarm_steps": "5%", "peak": 1.5e-3, "decay_steps": 2}))
    for step in (5, 45, 60):  # in the warm-up, in the ramp and the re-warming, behind them
        planned, saved = begun(data, step)
        schedule, past, edit = resumed(saved, changed(data, put("train.steps", steps), put("optim.allow_jump", True)))
        assert_nothing_lost(schedule, saved, step)
        assert [c["path"] for c in edit.changes] == ["train.steps", "optim.allow_jump"]
        assert schedule.phase_bounds[0] == ("a", 0, 40 if step > 40 else -(-4 * steps // 10))
        assert schedule.total_steps == steps
        same = np.arange(10 if step == 5 else 75)
        assert schedule.rates(same).tolist() == planned.rates(same).tolist()
        for s in range(10 if step == 5 else 80):
            assert schedule.segment_at(s).mixture_at(s) == planned.segment_at(s).mixture_at(s)
        # And once more, by which time the first extension's numbers are the ledger's.
        config = config_of(changed(data, put("train.steps", steps), put("optim.allow_jump", True)))
        again = ledger_of(config, schedule, step + 1, past)
        later, _, _ = resumed(again, changed(data, put("train.steps", 2000), put("optim.allow_jump", True)))
        assert later.rates(same).tolist() == planned.rates(same).tolist()


def test_a_jump_of_the_rate_that_more_steps_cause_is_refused():
    _, saved = begun(step=97)  # 7 of 10 updates into the decay
    words = "optim.allow_jump: the learning rate jumps from 0.00037 to 0.001 at step 97.* resume from a step before its decay"
    with pytest.raises(InputError, match=words):
        resumed(saved, changed(BASE, put("train.steps", 200)))
    schedule, _, _ = resumed(saved, changed(BASE, put("train.steps", 200), put("optim.allow_jump", True)))
    assert schedule.rates(97) == 1e-3
    _, saved = begun(step=87)  # no step before it would help
    with pytest.raises(InputError, match="allow_jump: true, or restore what the rate depends on"):
        resumed(saved, changed(BASE, put("optim.lr", 1e-2)))


@pytest.mark.parametrize(
    "edit",
    [lambda data: None, lambda data: data["sources"].update(new={"path": "new.txt"})],
    ids=["as it was", "a source added"],
)
def test_a_run_that_a_source_stops_goes_on_in_the_decay_before_its_end(edit):
    data = changed(BASE, lambda data: data["sources"]["law"].update(max_epochs=1, on_exhaust="stop"))
    schedule, saved = begun(data, step=45)
    # 40 steps of 4 sequences with 0.3 law read 48 of 60; the ramp to 0.5 reads 1.28, 1.36, ... more: 12.5 in 8 steps.
    assert schedule.total_steps == 48
    config = config_of(changed(data, edit))
    check_schedule(config, find_edit(config, saved).past)  # without sizes nobody knows of that end, nor of its decay
    again, _, _ = resumed(saved, changed(data, edit))
    steps = range(48)
    assert again.total_steps == 48 and list(again.rates(steps)) == list(schedule.rates(steps))
    assert schedule.rates([44, 47]) == pytest.approx([3.7e-4, 1e-4])  # 10 steps from 1e-3, which is more than twice


def test_what_lies_ahead_may_have_another_rate_from_the_step_on():
    planned, saved = begun()
    schedule, _, edit = resumed(saved, changed(BASE, put("optim.lr", 6e-4)))
    assert edit.changes == ({"path": "optim.lr", "was": 1e-3, "now": 6e-4},) and not edit.accepted
    assert schedule.rates(59) == planned.rates(59) == 1e-3 and schedule.rates(60) == 6e-4


def test_a_seed_that_is_accepted_leaves_the_order_of_the_sources():
    _, saved = begun()
    data = changed(BASE, put("seed", 7))
    schedule, past, _ = resumed(saved, data, accept_past=True)
    assert past.seed == 1337 and schedule.segments == resumed(saved, BASE)[0].segments[:0] + schedule.segments
    assert read(schedule, 100, past.seed) == read(segmented(saved), 100) != read(schedule, 100, 7)
    assert ledger_of(config_of(data), schedule, 80, past)["data_seed"] == 1337


def test_a_source_that_was_read_may_go_and_come_again_with_its_count():
    _, saved = begun()
    without = changed(
        BASE, lambda d: d["sources"].pop("law"), reweighted("a", web=1.0), reweighted("b", web=0.5, code=0.5)
    )
    with pytest.raises(InputError, match=r"phases\[0\].mixture: got .*, but steps 0 to 40 were trained"):
        resumed(saved, without)
    schedule, past, edit = resumed(saved, without, accept_past=True)
    assert {"path": "sources.law", "was": {"max_epochs": None, "on_exhaust": "error"}, "now": None} in edit.changes
    drawn = segmented(saved).cursors_at(STEP)["law"]
    assert drawn > 0 and schedule.cursors_at(100)["law"] == drawn
    assert_nothing_lost(schedule, saved)
    later = ledger_of(config_of(without), schedule, 85, past)
    back = changed(without, put("sources.law", {"path": "law.txt"}), reweighted("c", law=1.0))
    again, _, edit = resumed(later, back)
    assert not edit.accepted and again.cursors_at(100)["law"] == drawn + 15 * BATCH * LENGTH
    assert_nothing_lost(again, later, 85)


def test_a_ledger_from_before_a_field_of_phases_was_added_is_one_without_it():
    _, saved = begun()
    for declared in saved["declared"]["phases"]:
        del declared["rope_theta"], declared["batch_size"]
    on, _, edit = resumed(saved, BASE)
    assert not edit.changes and on.segments == segments_from_json(saved["segments"])
    _, _, edit = resumed(saved, changed(BASE, shaped("c", rope_theta=1e6)))
    assert [(c["path"], c["was"], c["now"]) for c in edit.changes] == [("phases.c.rope_theta", None, 1e6)]
    with pytest.raises(InputError, match=r"phases\[0\].batch_size: got 2"):
        resumed(saved, changed(BASE, shaped("a", batch_size=2)))


def test_a_raised_share_stands_to_its_phases_end_unless_what_that_phase_draws_is_edited():
    _, saved = with_a_raised_share()
    on, past, edit = resumed(saved, BASE)
    assert not edit.changes and on.segments == segments_from_json(saved["segments"]) and past.end == 80
    on, past, _ = resumed(saved, changed(BASE, reweighted("c", web=1.0)))
    assert on.segment_at(79).mixture == {"web": 0.8, "law": 0.2} and on.segment_at(80).mixture == {"web": 1.0}
    on, past, _ = resumed(saved, changed(BASE, reweighted("b", code=1.0)))
    assert on.segment_at(59).mixture == {"web": 0.8, "law": 0.2} and on.segment_at(60).mixture == {"code": 1.0}
    later = changed(BASE, lambda data: phase(data, "b").update(until=85, lr={"peak": 9e-4}))
    on, past, _ = resumed(saved, later)
    assert [on.segment_at(step).mixture["web"] for step in (60, 84)] == [0.8, 0.8] and on.segment_at(85).phase == "c"
    # What a rollback passed over ahead of the checkpoint is passed over all the same.
    rolled = {**saved, "history": {"rollbacks": [{"step": 60, "first_bad_step": 66, "skip_steps": 2}]}}
    on, past, _ = resumed(rolled, changed(BASE, reweighted("b", code=1.0)))
    assert past.end == 67 and on.segment_at(66).mixture == {"web": 0.8, "law": 0.2}
    assert on.segment_at(67).mixture == {"code": 1.0}


@pytest.mark.parametrize("step", (95, 100))
def test_a_raised_share_of_the_last_phase_stays_raised_in_a_longer_run(step):
    base = changed(BASE, put("optim.schedule", "constant"))
    schedule, _ = begun(base)
    raised = replace(schedule.segment_at(90).rest(90), mixture={"web": 0.8, "law": 0.2}, ramp=None)
    ended = Schedule((*cut(schedule.segments, 90), raised))
    saved = ledger_of(config_of(base), ended, step) | {"past_end": 100}
    longer = changed(base, put("train.steps", 150))
    on, past, _ = resumed(saved, longer)
    assert on.total_steps == past.end == 150 and on.segment_at(149).mixture == raised.mixture
    assert read(on, 150) == read(Schedule((*cut(schedule.segments, 90), replace(raised, end=150))), 150)
    on, _, _ = resumed(saved, changed(longer, reweighted("c", law=1.0)), accept_past=True)
    assert on.segment_at(step - 1).mixture == raised.mixture and on.segment_at(step).mixture == {"law": 1.0}
    after = {"name": "d", "until": "end", "mixture": {"web": 1.0}}
    apart = changed(longer, lambda data: phase(data, "c").update(until=100), lambda data: data["phases"].append(after))
    on, _, _ = resumed(saved, apart)
    assert on.segment_at(99).mixture == raised.mixture and on.segment_at(100).mixture == {"web": 1.0}


def test_of_many_changes_the_reason_tells_twelve_and_counts_the_others():
    changes = [{"path": f"phases.p{i}.until", "was": i, "now": i + 1} for i in range(15)]
    told = [f"phases.p{i}.until {i} → {i + 1}" for i in range(12)]
    assert _reason(changes[:12]) == "; ".join(told)
    assert _reason(changes[:13]) == "; ".join([*told, "and 1 more change"])
    assert _reason(changes) == "; ".join([*told, "and 3 more changes"])


def test_an_edit_on_the_way_back_to_a_bad_update_changes_rates_at_once_and_data_after_it():
    config = config_of(BASE)
    schedule = resolve_schedule(config, epochs_of(config))
    supplies = {name: SourceSupply(tokens) for name, tokens in EPOCHS.items()}
    saved = ledger_of(config, pass_over(schedule, supplies, 66, 3), STEP) | {"past_end": 80}
    saved["history"] = {"rollbacks": [{"step": STEP, "first_bad_step": 66, "skip_steps": 3}]}

    def reason(edits):
        edited = changed(BASE, *edits)
        on, past, edit = resumed(saved, edited)
        found = Found(config_of(edited), on, None, None, None, {}, {})
        return on, edit_event(edit, saved, found, (), ())["reason"]

    planned = segmented(saved)
    rate, told = reason([put("optim.lr", 6e-4)])
    assert rate.rates([STEP - 1, STEP, 66, 67]).tolist() == [1e-3, 6e-4, 6e-4, 6e-4] and "after them" not in told
    assert read(rate, 100) == read(planned, 100)
    assert "after them" not in reason([put("optim.weight_decay", 0.5)])[1]
    mixture, told = reason([reweighted("b", code=1.0), put("optim.lr", 6e-4)])
    assert told.endswith(f"(steps {STEP} to 67 read what was planned: phases.b.mixture acts after them)")
    assert read(mixture, 67) == read(planned, 67) and mixture.segment_at(67).mixture == {"code": 1.0}
    assert mixture.rates([STEP - 1, STEP, 67]).tolist() == [1e-3, 6e-4, 6e-4]
    # A run that goes on from there keeps to it.
    _, past, _ = resumed(saved, changed(BASE, put("optim.lr", 6e-4)))
    later = ledger_of(config_of(changed(BASE, put("optim.lr", 6e-4))), rate, 62, past) | {"history": saved["history"]}
    again, _, edit = resumed(later, changed(BASE, put("optim.lr", 6e-4)))
    assert not edit.changes and again.segments == rate.segments


def with_a_raised_share(step=STEP, until=80):
    """(the segment, ledger) of a run whose second phase has other shares from update 50 on."""
    schedule, saved = begun(step=step)
    raised = replace(schedule.segment_at(50).rest(50), mixture={"web": 0.8, "law": 0.2}, ramp=None)
    behind = replace(schedule.segments[2], cursors=raised.cursors_at(until))
    segments = segments_to_json([*cut(schedule.segments, 50), raised, behind])
    return raised, {**saved, "segments": json.loads(json.dumps(segments)), "past_end": until}


SAME_DRAWS = {
    # what is edited of a phase whose share was raised: (edits, whether each update of it draws the same)
    "percentages": ([reweighted("b", web=30, law=50, code=20)], True),
    "a weight of 0": ([put("sources.new", {"path": "new.txt"}), reweighted("b", web=3, law=5, code=2, new=0)], True),
    "replay of what it names": ([put("adaptation", {"replay": {"web": 0.2}})], True),
    "replay of another": (
        [put("sources.new", {"path": "new.txt"}), put("adaptation", {"replay": {"new": 0.2}})], False),
    "its batch written out": ([lambda d: phase(d, "b").update(batch_size=BATCH)], True),
    "its length written out": ([lambda d: phase(d, "b").update(seq_len=LENGTH)], True),
    "its ramp in steps": ([lambda d: phase(d, "b").update(ramp_steps=10)], True),
    "another ramp": ([lambda d: phase(d, "b").update(ramp_steps=11)], False),
    "another shape of the ramp": ([lambda d: phase(d, "b").update(ramp_shape="cosine")], False),
    "its ramp in steps, of a longer run": (
        [put("train.steps", 200), lambda d: phase(d, "b").update(ramp_steps=10)], True),
    "another ramp in the same words as before": (
        [put("train.steps", 200), lambda d: phase(d, "b").update(ramp_steps=" 10 %")], False),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME_DRAWS)
def test_a_raised_share_ends_where_its_phase_draws_something_else_not_where_it_says_it_in_other_words(name):
    raised, saved = with_a_raised_share()
    edits, same = SAME_DRAWS[name]
    on, _, edit = resumed(saved, changed(BASE, *edits), accept_past=True)
    assert edit.changes and on.segment_at(59).mixture == raised.mixture
    assert (on.segment_at(60).mixture == raised.mixture) == same
    if same:
        assert read(on, 80) == read(segmented(saved), 80)


def test_a_ramp_that_stayed_as_long_as_it_was_may_be_written_out():
    """10 % of 100 steps, and 10 steps still once the run was given 200."""
    raised, saved = with_a_raised_share()
    longer = changed(BASE, put("train.steps", 200))
    on, past, _ = resumed(saved, longer)
    saved = ledger_of(config_of(longer), on, 70, past)
    assert saved["settled"]["b.ramp_steps"] == 10
    for ramp_steps, mixture in ((10, raised.mixture), ("10%", raised.mixture), (20, BASE["phases"][1]["mixture"])):
        edited = changed(longer)
        phase(edited, "b")["ramp_steps"] = ramp_steps
        on, _, _ = resumed(saved, edited)
        assert on.segment_at(70).mixture == mixture


@pytest.mark.parametrize("step", (60, 70))
def test_where_a_share_was_raised_or_data_passed_over_the_rest_of_the_config_may_change(step):
    """Rates, batches and steps are the config's from the step on; the mixture and the order of the data stay."""
    config = config_of(BASE)
    schedule = resolve_schedule(config, epochs_of(config))
    supplies = {name: SourceSupply(tokens) for name, tokens in EPOCHS.items()}
    schedule = pass_over(schedule, supplies, 52, 3)
    saved = ledger_of(config, schedule, step) | {"past_end": 80}
    saved["history"] = {"rollbacks": [{"step": 50, "first_bad_step": 52, "skip_steps": 3}]}
    on, past, _ = resumed(saved, changed(BASE, put("optim.lr", 6e-4)))
    assert on.rates([step - 1, step, 79]).tolist() == [1e-3, 6e-4, 6e-4]
    assert read(on, 100) == read(schedule, 100) and past.end == 80
    assert read(on, 100) != read(resolve_schedule(config, epochs_of(config)), 100)
    again, _, edit = resumed(ledger_of(config_of(changed(BASE, put("optim.lr", 6e-4))), on, step + 1, past),
                             changed(BASE, put("optim.lr", 3e-4)))  # fmt: skip
    assert again.rates([step, step + 1]).tolist() == [6e-4, 3e-4] and read(again, 80) == read(on, 80)
    on, _, _ = resumed(saved, changed(BASE, put("train.batch_size", 2 * BATCH)), accept_past=True)
    assert on.segment_at(step - 1).batch_size == BATCH and on.segment_at(step).batch_size == 2 * BATCH
    assert on.tokens(step + 1) - on.tokens(step) == 2 * BATCH * LENGTH
    assert read(on, step) == read(schedule, step) and max(Counter(read(on, 100)).values()) == 1
    longer, past, _ = resumed(saved, changed(BASE, put("train.steps", 200), put("optim.lr", 6e-4)))
    assert longer.total_steps == 200 and longer.phase_bounds[1] == ("b", 40, 160) and past.end == 160
    assert read(longer, step) == read(schedule, step) and longer.segment_at(step).first_sequence > 0


def test_a_raised_share_is_raised_until_a_source_stops_the_run():
    """Also where another order of data, after that, would not be over the source's cap at once."""
    phases = [{"name": "a", "until": "end", "mixture": {"law": 0.02, "web": 0.98}}]
    ends = set()
    for sequences in range(1, 7):  # of the 60 that an epoch has
        law = {"path": "law.txt", "max_epochs": (sequences + 0.5) / 60, "on_exhaust": "stop"}
        config = changed(BASE, put("phases", phases), put("sources.law", law), put("optim.schedule", "constant"))
        schedule = resolve_schedule(config_of(config), epochs_of(config_of(config)))
        raised = replace(schedule.segment_at(9).rest(9), mixture={"law": 0.02, "web": 0.96, "code": 0.02})
        edited = Schedule((*cut(schedule.segments, 9), raised))
        saved = ledger_of(config_of(config), edited, 10) | {"past_end": schedule.total_steps}
        on, past, _ = resumed(saved, changed(config, put("optim.lr", 6e-4)))
        assert on.segments[-1].mixture == raised.mixture and past.end == on.total_steps
        assert on.cursors_at(on.total_steps)["law"] <= sequences * LENGTH
        assert raised.cursors_at(on.total_steps + 1)["law"] > sequences * LENGTH
        ends.add(on.total_steps)
    assert len(ends) > 4 and max(ends) < 100


def test_a_raised_share_of_a_source_that_goes_ends_with_it():
    schedule, saved = begun(step=85)
    raised = replace(schedule.segment_at(82).rest(82), mixture={"code": 0.5, "law": 0.5})
    segments = [*cut(schedule.segments, 82), raised]
    saved = {**saved, "segments": json.loads(json.dumps(segments_to_json(segments))), "past_end": 100}
    data = changed(BASE, lambda d: d["sources"].pop("law"), reweighted("a", web=1.0), reweighted("b", web=1.0))
    on, _, _ = resumed(saved, data, accept_past=True)
    assert on.segment_at(84).mixture == {"code": 0.5, "law": 0.5} and on.segment_at(85).mixture == {"code": 1.0}
    assert on.cursors_at(100)["law"] == on.cursors_at(85)["law"] > schedule.cursors_at(85)["law"]


def test_nothing_is_past_at_step_0_and_eval_sets_are_free():
    _, saved = begun(step=0)
    _, _, edit = resumed(saved, changed(BASE, put("seed", 3), reweighted("a", web=1.0)))
    assert len(edit.changes) == 2 and not edit.accepted
    schedule, saved = begun()
    on, _, edit = resumed(saved, changed(BASE, put("evalsets.sets", {"more": {"path": "more.txt"}})))
    assert on.segments == schedule.segments
    assert edit.changes == ({"path": "evalsets.sets.more", "was": None, "now": True},)


def test_settings_outside_the_schedule_are_told_and_change_no_data():
    whole, saved = begun()
    edited = changed(
        BASE,
        lambda d: d["optim"].update(weight_decay=0.0),
        lambda d: d.update(model={"preset": "tiny", "dropout": 0.1}),
    )
    schedule, _, edit = resumed(saved, edited)
    assert list(edit.changes) == [
        {"path": "optim.weight_decay", "was": 0.1, "now": 0.0},
        {"path": "model.dropout", "was": None, "now": 0.1},
    ]
    assert schedule.segments == whole.segments and not edit.accepted
    assert resumed(saved, BASE)[2].changes == ()


def test_what_a_set_is_judged_by_is_told_where_the_set_stays():
    def with_sets(primary=None, **sets):
        sets = {name: {"path": f"{name}.txt", **own} for name, own in sets.items()}
        return changed(BASE, put("evalsets", {"primary": {"path": "val.txt", **(primary or {})}, "sets": sets}))

    whole, saved = begun(with_sets(stays={"tolerance": 0.5}, same={"every": 300}, goes={"every": 200}))
    edited = with_sets({"tolerance": 5.0}, stays={"every": 200}, same={"every": 300}, comes={"every": 200})
    schedule, _, edit = resumed(saved, edited)
    assert list(edit.changes) == [
        {"path": "evalsets.sets.comes", "was": None, "now": True},
        {"path": "evalsets.sets.goes", "was": True, "now": None},
        {"path": "evalsets.primary.tolerance", "was": None, "now": 5.0},
        {"path": "evalsets.sets.stays.every", "was": None, "now": 200},
        {"path": "evalsets.sets.stays.tolerance", "was": 0.5, "now": None},
    ]
    assert [_in_words(change) for change in edit.changes[1:4]] == [
        "evalsets.sets.goes removed",
        "evalsets.primary.tolerance null → 5.0",
        "evalsets.sets.stays.every null → 200",
    ]
    assert schedule.segments == whole.segments


def test_a_mapping_is_told_by_what_changed_in_it():
    data = changed(BASE, lambda d: phase(d, "c").update(lr={"decay_steps": 20}))
    _, saved = begun(data)
    other = changed(data, put("adaptation", {"replay": {"law": 0.1}}), reweighted("b", web=0.3, law=0.6, code=0.2))
    phase(other, "c").update(lr={"decay_steps": 10}, mixture={"code": 2.0})
    edit = resumed(saved, other)[2]
    assert [_in_words(change) for change in edit.changes] == [
        'adaptation.replay {} → {"law": 0.1}',
        "phases.b.mixture.law 0.5 → 0.6",
        'phases.c.mixture {"code": 1.0} → {"code": 2.0}',
        "phases.c.lr.decay_steps 20 → 10",
    ]
    assert edit.changes[1]["now"] == {"web": 0.3, "law": 0.6, "code": 0.2}  # whole, as it was


def test_a_clock_in_tokens_counts_the_batches_that_there_were():
    _, saved = begun()
    tokens = (STEP * BATCH + 25 * 2 * BATCH) * LENGTH
    data = changed(BASE, put("train.batch_size", 2 * BATCH), lambda d: phase(d, "b").update(until=f"{tokens} tokens"))
    schedule, _, _ = resumed(saved, data, accept_past=True)
    assert [end for _, _, end in schedule.phase_bounds] == [40, 85, 100] and schedule.tokens(85) == tokens


def test_another_replay_counts_from_the_phase_under_way_on():
    replayed = changed(BASE, put("adaptation", {"replay": {"new": 0.1}}), put("sources.new", {"path": "new.txt"}))
    more = changed(replayed, put("adaptation", {"replay": {"new": 0.2}}))
    _, saved = begun(replayed, step=30)  # in the first phase
    schedule, _, edit = resumed(saved, more)
    assert [change["path"] for change in edit.changes] == ["adaptation.replay"]
    assert schedule.shares(29)["new"] == pytest.approx(0.1) and schedule.shares(30)["new"] == pytest.approx(0.2)
    assert_nothing_lost(schedule, saved, 30)
    _, saved = begun(replayed)
    with pytest.raises(
        InputError, match="adaptation.replay.new: got 0.2, but steps 0 to 60 were trained with 0.1; name the"
    ):
        resumed(saved, more)


def shaped(name, **shape):
    return lambda data: phase(data, name).update(shape)


def units(schedule, first, until):
    """Every 4 tokens that the steps from `first` on read: (source, epoch, offset), in order."""
    plan = DataPlan(schedule, 1337, EPOCHS, LENGTH)
    return [
        (plan.sources[source], int(epoch), int(offset) + k)
        for step, draws in enumerate(plan.draws(first, until - first), first)
        for source, epoch, offset in zip(*draws, strict=True)
        for k in range(0, schedule.segment_at(step).seq_len, 4)
    ]


OTHER = {"seq_len": 4, "batch_size": 6}
SHAPES = {
    # what is edited: (edits, the places that a refusal names; what the refused or accepted edit makes of step 60 on)
    "past": ([shaped("a", **OTHER)], ["phases[0].seq_len", "phases[0].batch_size"], (BATCH, LENGTH)),
    "past theta": ([shaped("a", rope_theta=5e5)], ["phases[0].rope_theta"], (BATCH, LENGTH)),
    "past train": ([put("train.batch_size", 6)], ["train.batch_size"], (6, LENGTH)),
    "train with phases of their own": (
        [put("train.batch_size", 6), shaped("a", batch_size=BATCH)], [], (6, LENGTH)),
    "current": ([shaped("b", **OTHER)], [], (6, 4)),
    "current theta": ([shaped("b", rope_theta=5e5)], [], (BATCH, LENGTH)),
    "future": ([shaped("c", **OTHER)], [], (BATCH, LENGTH)),
    "all but the past": (
        [put("train.seq_len", 4), shaped("a", seq_len=LENGTH), shaped("c", seq_len=LENGTH)], [], (BATCH, 4)),
    "micro-steps": ([shaped("b", grad_accum=2), shaped("a", grad_accum=4)], [], (BATCH, LENGTH)),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_the_shape_of_a_phase_that_is_over_stands_and_others_may_change(name):
    edits, refused, shape = SHAPES[name]
    whole, saved = begun()
    data = changed(BASE, *edits)
    if refused:
        problems, how = refusal(saved, data)
        places = [problem.removeprefix("config: ").split(": got")[0] for problem in problems]
        assert sorted(places) == sorted(refused)
        assert "but steps 0 to 40 were trained with" in problems[0]
        assert "\n--- trained\n+++ config\n" in "\n".join(how)
    schedule, past, edit = resumed(saved, data, accept_past=bool(refused))
    assert edit.changes and bool(edit.accepted) == bool(refused)
    at = schedule.segment_at(STEP)
    assert (at.batch_size, at.seq_len) == shape
    assert units(schedule, 0, STEP) == units(whole, 0, STEP)
    read_of = units(schedule, 0, 100)
    assert len(read_of) == len(set(read_of)) == schedule.tokens(100) // 4
    if name in ("current theta", "micro-steps", "past", "past theta"):
        assert units(schedule, 0, 100) == units(whole, 0, 100)
    if name == "future":
        assert [change["path"] for change in edit.changes] == ["phases.c.seq_len", "phases.c.batch_size"]
        assert schedule.segment_at(80).seq_len == 4 and units(schedule, 0, 80) == units(whole, 0, 80)
    if name == "current theta":
        assert [schedule.segment_at(s).rope_theta for s in (59, 60, 79, 80)] == [None, 5e5, 5e5, None]
    if name == "micro-steps":
        assert schedule.segments == whole.segments
        assert [change["path"] for change in edit.changes] == ["phases.a.grad_accum", "phases.b.grad_accum"]
    config = config_of(data)
    again, _, edit = resumed(ledger_of(config, schedule, 85, past), data)
    assert again == schedule and not edit.changes


def test_a_new_field_of_a_phase_stands_once_it_is_trained(monkeypatch):
    """Of a phase with one field more than there is; `past_edits` is read anew, as with it in phases/schedule.py."""
    module = {"__module__": __name__}
    more = make_dataclass("Phase", [("window", int, field(default=8))], bases=(Phase,), frozen=True, namespace=module)
    monkeypatch.setattr("phases.schedule.Phase", more)
    spec = importlib.util.find_spec("curriculum.train.resuming.past_edits")
    spec.loader.exec_module(anew := importlib.util.module_from_spec(spec))
    config, (_, saved) = config_of(BASE), begun()
    was = {**saved["declared"], "phases": [asdict(more(**p)) for p in BASE["phases"]]}
    for name, refused in (("a", True), ("b", False), ("c", False)):
        now = changed(was, shaped(name, window=4))
        contrast = anew.Contrast(saved, was, now, STEP)
        problems = list(anew.of_past(contrast))
        assert problems == [("phases[0].window", "got 4, but steps 0 to 40 were trained with 8")][: int(refused)]
        told = [line for line in anew.how_to_fix(config, contrast, problems) if "window" in line]
        assert len(told) == int(refused) and all(line.startswith("+") and "window: 4" in line for line in told)
        assert anew.draw_alike(was, now, name, {}) is False and anew.draw_alike(was, now, "ab"[name == "a"], {}) is True


@pytest.mark.parametrize("written", [["a"], ["b"], ["a", "b", "c"]], ids=str)
def test_the_models_own_rope_theta_may_be_written_out_and_left_out_again(written):
    """Of the phase under way too, in which a share was raised: it goes on."""
    plain, told = BASE, changed(BASE, *(shaped(name, rope_theta=1e4) for name in written))
    for was, now in ((plain, told), (told, plain)):
        config = config_of(was)
        whole = resolve_schedule(config, epochs_of(config))
        schedule, _, edit = resumed(ledger_of(config, whole, STEP), now)
        assert schedule == whole and edit.changes == ()
        saved = ledger_of(config, whole, STEP) | {"past_end": 80}
        assert find_edit(config_of(now), saved).past.segments == find_edit(config, saved).past.segments
        other = changed(now, shaped("c", batch_size=6))
        schedule, _, edit = resumed(saved, other)
        assert [change["path"] for change in edit.changes] == ["phases.c.batch_size"]
        assert schedule.segment_at(60).end == 80 and find_edit(config_of(other), saved).past.going_on is not None


@pytest.mark.parametrize(
    "edits, path, got",
    [
        ([put("train.seq_len", 16)], "train.seq_len", 16),
        ([put("train.seq_len", 4)], "train.seq_len", 4),
        ([shaped("c", seq_len=16)], "phases[2].seq_len", 16),
    ],
)
def test_the_blocks_of_a_run_stay(edits, path, got):
    _, saved = begun()
    expected = (
        f"config: {path}: got {got}, but the run's sources are read in blocks of 8, its longest sequence at the "
        "start; expected 8 as the longest (train.seq_len may stay so while phases have shorter ones)"
    )
    problems, _ = refusal(saved, changed(BASE, *edits), accept_past=True)
    assert problems == [expected]


def test_the_phase_that_had_the_longest_sequence_is_named():
    base = changed(BASE, put("train.seq_len", 4), shaped("c", seq_len=8))
    config = config_of(base)
    saved = ledger_of(config, resolve_schedule(config, epochs_of(config)), STEP)
    with pytest.raises(InputError, match=r"config: phases\[2\].seq_len: got 4, but .* in blocks of 8"):
        resumed(saved, changed(base, shaped("c", seq_len=4)))


def test_a_raised_share_goes_on_with_another_batch_and_ends_with_another_phase():
    _, saved = with_a_raised_share()
    on, _, _ = resumed(saved, changed(BASE, put("train.batch_size", 6), shaped("a", batch_size=BATCH)))
    assert (on.segment_at(60).batch_size, on.segment_at(60).mixture) == (6, {"web": 0.8, "law": 0.2})
    on, _, _ = resumed(saved, changed(BASE, shaped("b", batch_size=6)))
    assert (on.segment_at(60).batch_size, on.segment_at(60).mixture) == (6, {"web": 0.3, "law": 0.5, "code": 0.2})


def test_a_change_of_the_schedule_has_its_step_and_any_other_acts_at_once():
    _, saved = begun(step=0)
    scheduled = {
        "seed": 3, "train.steps": 200, "train.batch_size": 2, "optim.lr": 2e-3, "sources.law.max_epochs": 9,
        "adaptation": {"replay": {"web": 0.1}},
    }  # fmt: skip
    others = {"train.skip_updates": None, "optim.weight_decay": 0.3, "averages": {"ema_decay": 0.9}}
    data = changed(BASE, *(put(path, value) for path, value in (scheduled | others).items()))
    data["phases"][0] |= {"grad_accum": 2, "mixture": {"web": 1.0}}
    data["phases"].append({"name": "d", "until": "end", "mixture": {"law": 1.0}})
    data["phases"][2]["until"] = 190
    data["evalsets"] |= {"every": 7, "sets": {"more": {"path": "more.txt"}}}
    _, _, edit = resumed(saved, data)
    told = {change["path"]: _acts_at_once(change, config_of(data)) for change in edit.changes}
    assert told == {
        **dict.fromkeys(["seed", "train.steps", "train.batch_size", "optim.lr", "sources.law.max_epochs"], False),
        **dict.fromkeys(["adaptation.replay", "phases.a.mixture", "phases.c.until", "phases.d"], False),
        **dict.fromkeys(["train.skip_updates", "optim.weight_decay", "phases.a.grad_accum"], True),
        **dict.fromkeys(["averages.ema_decay", "evalsets.every", "evalsets.sets.more"], True),
    }
    text = {"path": "sources.law", "was": {"stream": "one"}, "now": {"stream": "another"}}
    assert _in_words(text) == "sources.law: its text has changed"
    assert _acts_at_once(text, config_of(data)) and not _acts_at_once(text | {"now": None}, config_of(data))


def test_a_run_that_goes_back_keeps_what_its_edit_warned_of():
    """In the part that the edit's step stays of, else in the one that acts at once."""
    schedule, _ = begun()
    setup = SimpleNamespace(config=config_of(BASE), course=SimpleNamespace(schedule=schedule))  # all that is read of it
    paths = "evalsets.sets.more", "optim.lr"
    at_once, of_schedule = ({"path": path, "was": None, "now": 1} for path in paths)
    event = {"accepted_past": False, "warnings": ["one"]}
    first, second = gone_back({**event, "changes": [at_once]}, setup, 20)
    assert first is None and second["changes"] == [at_once] and second["warnings"] == ["one"]
    first, second = gone_back({**event, "changes": [at_once, of_schedule]}, setup, 20)
    assert first["warnings"] == ["one"] and second["changes"] == [at_once] and second["warnings"] == []


def test_what_acts_at_once_was_accepted_only_if_it_is_of_text():
    schedule, _ = begun()
    setup = SimpleNamespace(config=config_of(BASE), course=SimpleNamespace(schedule=schedule))  # all that is read of it
    of_set = {"path": "evalsets.sets.more", "was": None, "now": True}
    of_text = {"path": "sources.law", "was": {"stream": "one"}, "now": {"stream": "another"}}
    seed = {"path": "seed", "was": 1, "now": 2}
    event = {"accepted_past": True, "warnings": []}
    for at_once, accepted in ((of_set, False), (of_text, True)):
        first, second = gone_back({**event, "changes": [at_once, seed]}, setup, 20)
        assert (first["accepted_past"], second["accepted_past"]) == (True, accepted)


@pytest.mark.parametrize(("step", "phase", "start", "until"), [(100, 2, 80, 90), (80, 1, 40, 70)])
def test_a_phase_that_lasted_to_its_end_is_not_told_to_last_longer(step, phase, start, until):
    _, saved = begun(step=step)
    data = changed(BASE, put("train.steps", 160))
    data["phases"].append({"name": "d", "until": "end", "mixture": {"web": 1.0}})
    data["phases"][2]["until"] = 150
    data["phases"][phase]["until"] = until
    problems, _ = refusal(saved, data)
    fix = f"steps {start} to {step} were trained in this phase: let it end at {step}"
    assert problems == [f"config: phases[{phase}].until: got {until}, but {fix}"]


def test_a_segment_does_not_go_on_without_a_source_that_its_ramp_leaves():
    was = declaration(config_of(BASE))
    now = changed(was, lambda declared: declared["sources"].pop("web"))
    ramp = Ramp({"web": 0.3, "law": 0.5, "code": 0.2}, 10)
    segment = Segment(80, 100, "c", {"code": 1.0}, ramp, (), dict.fromkeys(EPOCHS, 0), BATCH, LENGTH)
    assert gone_on(segment, 85, was, was, {}) == segment.continued(85)
    assert gone_on(segment, 85, was, now, {}) is None
    without = replace(segment, ramp=None)
    assert gone_on(without, 85, was, now, {}) == without.continued(85)


def test_an_edit_before_a_branch_s_own_step_acts_from_there():
    """Up to it the branch repeats its trunk."""
    schedule, saved = begun()
    saved |= {"past_end": 70, "branched_from": {"step": 70}}
    of_b = {"mixture": {"web": 1.0}}
    edited = changed(BASE, lambda data: phase(data, "b").update(of_b), lambda data: data["optim"].update(lr=9e-4))
    after, _, edit = resumed(saved, edited)
    assert (edit.past.end, edit.past.rates_from) == (70, 70)
    assert read(after, 70) == read(schedule, 70) and after.shares(69) != after.shares(70) == {"web": 1.0}
    assert after.rates(np.arange(70)).tolist() == schedule.rates(np.arange(70)).tolist()
    assert after.rates(70) == 9e-4
