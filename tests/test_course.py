"""What a run trains on after so many updates, worked by hand from its config."""

import json
import re
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from tiny_run import tiny_data, tiny_train, write_corpus

from curriculum.config import build_config
from curriculum.errors import InputError
from curriculum.find_checkpoint import checkpoint_steps
from curriculum.record.queries import consumption
from curriculum.run import load_run
from curriculum.scheduling import continued_schedule, resolve_schedule
from curriculum.train import trainer
from curriculum.train.history import History
from curriculum.train.resuming import ledger
from curriculum.train.resuming.edits import find_edit
from curriculum.train.setup import build
from curriculum.train.trainer import train
from phases.rollback import RollbackRefused


def test_after_so_many_updates_it_is_the_newest_one_that_counts(tmp_path):
    """The tiny run: 12 updates, the first 6 of phase a; 2 of warm-up to 3e-3, and 2 of decay to a tenth of it."""
    setup = build(build_config(tiny_data(write_corpus(tmp_path))), tmp_path / "store")
    try:
        course = setup.course
        assert course.total_steps == 12 and course.phase_ends == {6, 12}
        assert [course.phase_at(done) for done in (0, 1, 6, 7, 12)] == ["a", "a", "a", "b", "b"]
        mixtures = [course.mixture_at(done) for done in (0, 6, 7, 12)]
        assert mixtures == [{"web": 1.0}, {"web": 1.0}, {"law": 1.0}, {"law": 1.0}]
        rates = [course.rate_at(done) for done in (0, 1, 2, 6, 12)]
        assert rates == pytest.approx([1.5e-3, 1.5e-3, 3e-3, 3e-3, 3e-4], rel=1e-12)
    finally:
        setup.close()


def test_the_sources_are_read_in_blocks_of_the_longest_rows_of_any_phase(tmp_path):
    phases = [
        {"name": "a", "until": 6, "mixture": {"web": 1.0}},
        {"name": "b", "until": "end", "mixture": {"web": 1.0}},
    ]
    phases[1]["seq_len"] = 64
    config = build_config(tiny_data(write_corpus(tmp_path), phases=phases))
    with closing(build(config, tmp_path / "store")) as setup:
        assert setup.course.plan.block_tokens == 64
        assert [[shape.T for shape in setup.course.shapes_from(step)] for step in (0, 5, 6)] == [
            [32, 64],
            [32, 64],
            [64],
        ]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("on_eos", [False, True])
def test_packing_says_which_targets_of_its_batches_are_scored(tmp_path, masked, on_eos):
    packing = {"mask_boundary_loss": masked, "train_on_eos": on_eos}
    config = build_config(tiny_data(write_corpus(tmp_path), packing=packing))
    with closing(build(config, tmp_path / "store")) as setup:
        batches = [setup.course.feed[step] for step in range(6)]
        eot = setup.corpus.tokenizer.eot
    inputs, targets, scored = (
        np.stack([getattr(batch, name) for batch in batches]) for name in ("inputs_ABT", "targets_ABT", "loss_mask_ABT")
    )
    after_end, end = inputs == eot, targets == eot
    assert after_end.any() and end.any()
    assert (scored == ~((after_end & masked) | (end & (not on_eos)))).all()


def test_up_to_its_own_step_a_branch_is_planned_as_its_trunk_was(tmp_path):
    acts = {"action": "law is replayed more", "edits": []}
    with closing(build(build_config(tiny_data(write_corpus(tmp_path))), tmp_path / "store")) as setup:
        course = setup.course
        course.branched_from = {"step": 4, "phase_ends": [[2, [5, 9]], [4, [6, 9]]], "acts": {"3": acts, "4": acts}}
        ends = [course.phase_ends_at(step) for step in (2, 3, 4, 5)]
        assert ends == [{5, 9}, {6, 9}, {6, 9}, {6, 12}]
        assert [course.of_trunk(step) for step in (2, 3, 4)] == [None, acts, None]


@pytest.mark.parametrize("end", [9, 14])
def test_a_run_ends_where_its_course_does_by_then(end, tmp_path, monkeypatch):
    """An edit of the schedule after 6 updates moves the end from step 12."""
    judge = trainer.judge

    def judge_and_edit(run, done, evaluated):
        course = run.setup.course
        if done == 6:
            sections = {"train": {"steps": end, "batch_size": 4, "seq_len": 32}}
            config = build_config(tiny_data(tmp_path, **sections))
            schedule = resolve_schedule(config, run.setup.corpus.tokens_per_epoch)
            course._replan(schedule, schedule.segments)
        return judge(run, done, evaluated)

    monkeypatch.setattr(trainer, "judge", judge_and_edit)
    complete = tiny_train(write_corpus(tmp_path), tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert (
        complete["total_steps"] == end == run.metrics[-1]["step"] == max(checkpoint_steps(tmp_path / "run/checkpoints"))
    )
    assert [e["step"] for e in run.events if e["event"] == "eval"] == [0, 3, 6, 9, *([] if end == 9 else [12, 14])]


EPOCHS = [
    {"name": "a", "until": 2, "mixture": {"web": 1.0}},
    {"name": "b", "until": "0.4 epochs of web", "mixture": {"web": 0.8, "law": 0.2}},
    {"name": "c", "until": "end", "mixture": {"law": 1.0}},
]


def test_where_data_were_passed_over_a_phase_of_so_many_epochs_ends_where_it_would_have(tmp_path):
    """Whatever else is edited or raised later: its clock would count what was passed over too."""
    write_corpus(tmp_path)
    sections = {
        "phases": EPOCHS,
        "train": {"steps": 60, "batch_size": 4, "seq_len": 32},
        "optim": {"lr": 3e-3, "warmup_steps": 0, "schedule": "constant"},
    }

    def config_of(edits):
        return build_config(tiny_data(tmp_path, **{**sections, **edits}))

    def with_b(**edit):
        return {"phases": [EPOCHS[0], {**EPOCHS[1], **edit}, EPOCHS[2]]}

    setup = build(config_of({}), tmp_path / "store")
    course = setup.course
    try:
        bounds = course.schedule.phase_bounds
        (_, start, end) = bounds[1]
        assert start == 2 and 25 < end < 55
        course.pass_over(4, 8, back_to=4)
        assert course.schedule.phase_bounds == bounds
        for step in (end - 10, end - 1):  # without the 8 steps b would end at end - 8
            history = History("now", "b", rollbacks=({"step": 4, "first_bad_step": 4, "skip_steps": 8},))
            saved = json.loads(json.dumps(ledger.entry(setup, step, history, {}, 0.0)))

            def gone_on(edits, saved=saved):
                config = config_of(edits)
                return continued_schedule(config, setup.corpus.tokens_per_epoch, find_edit(config, saved).past)[0]

            for edits in ({}, {"optim": {**sections["optim"], "lr": 2e-3}}, with_b(mixture={"web": 0.5, "law": 0.5})):
                on = gone_on(edits)
                assert on.phase_bounds == bounds and on.shares(step)["web"] == (0.5 if "phases" in edits else 0.8)
            assert gone_on(with_b(until="0.5 epochs of web")).phase_bounds[1][2] > end
        assert course.raise_share(end - 1, "law", 2.0, 0.5)["until"] == end and course.schedule.phase_bounds == bounds
        course.pass_over(4, 8, back_to=4)
        assert course.schedule.phase_bounds == bounds
    finally:
        setup.close()


def test_data_that_are_passed_over_leave_the_shares_that_were_raised_up_to_there(tmp_path):
    phases = [{"name": "a", "until": "end", "mixture": {"web": 0.5, "law": 0.5}}]
    with closing(build(build_config(tiny_data(write_corpus(tmp_path), phases=phases)), tmp_path / "store")) as setup:
        course = setup.course

        def raised():
            return [step for step, *_ in course.before_raised], course.schedule.shares(11)["law"]

        for step in (4, 6, 8):
            course.raise_share(step, "law", 1.2, 0.9)
        course.pass_over(8, 1, back_to=8)
        assert raised() == ([4, 6, 8], pytest.approx(0.5 * 1.2**3))
        course.pass_over(4, 1, back_to=4)
        assert raised() == ([4], pytest.approx(0.5 * 1.2))


def test_what_was_passed_over_stays_so_to_the_end_of_the_last_phase_that_it_reaches(tmp_path):
    with closing(build(build_config(tiny_data(write_corpus(tmp_path))), tmp_path / "store")) as setup:
        course = setup.course
        assert course.schedule.phase_bounds == (("a", 0, 6), ("b", 6, 12))
        course.pass_over(4, 1, back_to=4)
        assert course.past.end == 6
        for step in (6, 4):  # b's first update, and once more before it
            course.pass_over(step, 1, back_to=step)
            assert course.past.end == 12


def test_a_source_that_the_run_went_on_without_is_not_gone_back_to(tmp_path):
    write_corpus(tmp_path)
    phases = [{"name": "a", "until": "end", "mixture": {"web": 0.5, "law": 0.5}}]
    config = build_config(tiny_data(tmp_path, phases=phases))
    sections = {
        "phases": [{**phases[0], "mixture": {"web": 1.0}}],
        "sources": {"web": tiny_data(tmp_path)["sources"]["web"]},
    }
    without = build_config(tiny_data(tmp_path, evalsets={"primary": {"held_out_of": "web"}}, **sections))
    with closing(build(config, tmp_path / "store")) as setup:
        saved = json.loads(json.dumps(ledger.entry(setup, 8, History("now", "a"), {}, 0.0)))
    past = find_edit(without, saved, accept_past=True).past
    with closing(build(without, tmp_path / "store", past=past)) as setup:
        course = setup.course
        planned = course.schedule
        for first, good in ((5, 4), (9, 6)):  # the first bad update, the newest checkpoint before it
            with pytest.raises(
                RollbackRefused, match=f"law, which updates from step {good} on draw from, is gone from"
            ):
                course.pass_over(first, 1, back_to=good)
            assert course.schedule == planned
        course.pass_over(9, 1, back_to=8)
        assert course.schedule != planned and course.schedule.phase_bounds == planned.phase_bounds


def test_a_source_that_standing_updates_ahead_read_cannot_go(tmp_path):
    """Between the checkpoint that the run went back to and the data that it passes over, all is as it was."""
    write_corpus(tmp_path)
    phases = [
        {"name": "a", "until": 4, "mixture": {"web": 1.0}},
        {"name": "b", "until": "end", "mixture": {"web": 0.5, "law": 0.5}},
    ]
    sections = {"phases": phases, "evalsets": {"primary": {"held_out_of": "web"}}}
    history = History("now", "a", rollbacks=({"step": 4, "first_bad_step": 6, "skip_steps": 1},))
    with closing(build(build_config(tiny_data(tmp_path, **sections)), tmp_path / "store")) as setup:
        setup.course.pass_over(6, 1, back_to=4)
        saved = json.loads(json.dumps(ledger.entry(setup, 4, history, {}, 0.0)))
    sections |= {
        "phases": [phases[0], {**phases[1], "mixture": {"web": 1.0}}],
        "sources": {"web": tiny_data(tmp_path)["sources"]["web"]},
    }
    without = build_config(tiny_data(tmp_path, **sections))
    with closing(build(without, tmp_path / "store", past=find_edit(without, saved).past)) as setup:
        with pytest.raises(
            InputError, match="sources: law is gone, but already scheduled updates from step 4 on still read"
        ):
            ledger.check_past(saved, ledger.found_in(setup), accept_past=True)


def test_a_run_whose_seed_is_changed_reads_on_in_the_order_that_it_has(tmp_path):
    write_corpus(tmp_path)
    with closing(build(build_config(tiny_data(tmp_path)), tmp_path / "store")) as setup:
        saved = json.loads(json.dumps(ledger.entry(setup, 8, History("now", "b"), {}, 0.0)))
        order = setup.course.plan.draws(8)[0].offset.tolist()
    config = build_config(tiny_data(tmp_path, seed=7))
    past = find_edit(config, saved, accept_past=True).past
    with closing(build(config, tmp_path / "store", past=past)) as setup:
        assert setup.course.plan.draws(8)[0].offset.tolist() == order
    with closing(build(config, tmp_path / "store")) as setup:
        assert setup.course.plan.draws(8)[0].offset.tolist() != order


def test_null_in_the_architecture_is_as_if_left_out(tmp_path):
    with closing(build(build_config(tiny_data(write_corpus(tmp_path))), tmp_path / "store")) as setup:
        saved = json.loads(json.dumps(ledger.entry(setup, 4, History("now", "a"), {}, 0.0)))
        found = ledger.found_in(setup)
    null, seven = ({**saved["model"], "sliding_window": window} for window in (None, 7))
    assert "sliding_window" not in saved["model"] == found.architecture
    for then, now in ((saved["model"], null), (null, saved["model"])):
        ledger.check_past({**saved, "model": then}, replace(found, architecture=now))
    for then, now, told in ((null, seven, r"7 \(was None\)"), (seven, null, r"None \(was 7\)")):
        with pytest.raises(InputError, match=f"architecture of a run cannot change: sliding_window {told}$"):
            ledger.check_past({**saved, "model": then}, replace(found, architecture=now))


def test_parameters_of_other_shapes_are_refused_where_the_architecture_is_the_same(tmp_path):
    """As those of a user's own model may be."""
    with closing(build(build_config(tiny_data(write_corpus(tmp_path))), tmp_path / "store")) as setup:
        saved = json.loads(json.dumps(ledger.entry(setup, 4, History("now", "a"), {}, 0.0)))
        found = ledger.found_in(setup)
    name, shape = min(found.parameters.items())
    for other in ({name: [*shape, 1]}, {name: None}, {"a": [1]}):  # another shape, one that is gone, one that is new
        parameters = {n: s for n, s in {**found.parameters, **other}.items() if s is not None}
        ((changed, got),) = other.items()
        told = f"model: the parameters of a run cannot change: {changed} {got} (was {found.parameters.get(changed)})"
        with pytest.raises(InputError, match=re.escape(told)):
            ledger.check_past(saved, replace(found, parameters=parameters))
    assert ledger.check_past(saved, replace(found, parameters=None)) == []  # they are not known before it is built


def switches(run_dir):
    events = [e for e in load_run(run_dir).events if e["event"] == "phase_switch"]
    return [(e["step"], e["from_phase"], e["new_phase"]) for e in events]


def test_a_first_phase_that_is_renamed_before_its_first_update_is_no_switch(tmp_path):
    """Of a run whose gold is what it began with, so that it may be resumed at step 0."""
    write_corpus(tmp_path)
    tiny_train(tmp_path, tmp_path / "base")
    ruinous = {"schedule": "constant", "lr": 1.0, "warmup_steps": 0}
    sections = {"adaptation": {"init_from": str(tmp_path / "base")}, "optim": ruinous}
    tiny_train(tmp_path, tmp_path / "run", **sections)
    assert checkpoint_steps(tmp_path / "run/gold") == [0]
    phases = [{"name": "first", "until": 6, "mixture": {"web": 1.0}}, tiny_data(tmp_path)["phases"][1]]
    for resume in ("gold", 0):  # once more: the checkpoint still has the old name
        tiny_train(tmp_path, tmp_path / "run", resume=resume, phases=phases, **sections)
        assert switches(tmp_path / "run") == [(6, "first", "b")]
    told = [e["phase"] for e in load_run(tmp_path / "run").events if e["event"] == "eval"]
    assert told == ["a", "first", "first", "b", "b"]


def test_a_phase_that_is_extended_where_it_ended_is_switched_back_to(tmp_path):
    sections = {"checkpoint": {"every": 6, "keep": 3}}
    tiny_train(write_corpus(tmp_path), tmp_path / "run", **sections)
    assert switches(tmp_path / "run") == [(6, "a", "b")]
    sections["phases"] = [{"name": "a", "until": 9, "mixture": {"web": 1.0}}, tiny_data(tmp_path)["phases"][1]]
    config = build_config(tiny_data(tmp_path, **sections))
    train(config, tmp_path / "run", resume=6, accept_past=True, store_dir=tmp_path / "store")
    assert switches(tmp_path / "run") == [(6, "a", "b"), (6, "b", "a"), (9, "a", "b")]
    read = [(row["phase"], row["step"], row["tokens"]) for row in consumption(load_run(tmp_path / "run"))]
    assert read == [("a", 9, {"web": 9 * 4 * 32}), ("b", 12, {"law": 3 * 4 * 32})]


def test_a_phase_that_an_edit_leaves_no_step_is_not_switched_from(tmp_path):
    """The record told the switch to it, where the run was taken up; none of its updates was made."""
    sections = {"checkpoint": {"every": 6, "keep": 3}}
    tiny_train(write_corpus(tmp_path), tmp_path / "run", **sections)
    sections["phases"] = [tiny_data(tmp_path)["phases"][0], {"name": "c", "until": "end", "mixture": {"web": 1.0}}]
    tiny_train(tmp_path, tmp_path / "run", resume=6, **sections)
    assert switches(tmp_path / "run") == [(6, "a", "b"), (6, "a", "c")]
    run = load_run(tmp_path / "run")
    switch = [event for event in run.events if event["event"] == "phase_switch"][-1]
    assert (switch["mixture_before"], switch["mixture_after"]) == ({"web": 1.0}, {"web": 1.0})
    assert [(row["phase"], row["step"]) for row in consumption(run)] == [("a", 6), ("c", 12)]


def test_a_last_checkpoint_that_is_gone_is_told_but_not_of_the_disk(tmp_path, monkeypatch):
    save = trainer.save
    monkeypatch.setattr(
        trainer, "save", lambda run, done, *how, **also: run.offsets() if done == 12 else save(run, done, *how, **also)
    )
    with pytest.raises(InputError) as error:
        tiny_train(write_corpus(tmp_path), tmp_path / "run")
    assert str(error.value) == (
        f"{tmp_path}/run/checkpoints/12: the last checkpoint is missing, although no save failed; the last good "
        "one is of step 10; continue with --resume latest"
    )
