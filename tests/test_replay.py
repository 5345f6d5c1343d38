"""A raised share, by drawing from sources whose tokens name themselves and counting everything."""

import json
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from test_rollback import LR, PHASES

from phases.batches import DataPlan, epoch_tokens
from phases.checks import ScheduleError
from phases.declared import Curriculum
from phases.lr import LrProgram, LrSchedule
from phases.replay import ReplayRefused, raise_share
from phases.resolve import resolve
from phases.schedule import (
    Phase,
    SourceSupply,
    cut,
    joined,
    segments_from_json,
    segments_to_json,
)

LENGTH, BATCH, TOTAL = 8, 6, 120


def first_difference(old, new, until):
    """The first step before `until` at which two schedules read or learn at other rates, None where there is none."""
    rates = old.rates(np.arange(until)), new.rates(np.arange(until))

    def at(schedule, rates, step):
        segment = schedule.segment_at(step)
        return segment.phase, segment.mixture_at(step), segment.batch_size, rates[step]

    return next((s for s in range(until) if at(old, rates[0], s) != at(new, rates[1], s)), None)


TOKENS = {
    name: number * 10_000 + np.arange(blocks * LENGTH + 1)
    for number, (name, blocks) in enumerate({"web": 300, "code": 40, "law": 7, "new": 12}.items(), 1)
}
SUPPLIES = {name: SourceSupply(epoch_tokens(len(tokens), LENGTH)) for name, tokens in TOKENS.items()}


def curriculum_of(phases=PHASES, supplies=SUPPLIES, lr=LR):
    return Curriculum(phases, supplies, lr, total_steps=TOTAL, batch_size=BATCH, seq_len=LENGTH)


def resolved(phases=PHASES, supplies=SUPPLIES, past=(), lr=LR):
    return resolve(curriculum_of(phases, supplies, lr), past=past)


def raised(schedule, step, source, factor=2.0, max_share=0.5, *, spared=(), phases=PHASES, supplies=SUPPLIES, lr=LR):
    return raise_share(
        schedule,
        curriculum_of(phases, supplies, lr),
        step=step,
        source=source,
        factor=factor,
        max_share=max_share,
        spared=spared,
    )


def rows(schedule):
    """Every row of the run as (source name, first token)."""
    plan = DataPlan(schedule, 5, {name: s.num_tokens for name, s in SUPPLIES.items()}, LENGTH)
    out = []
    for step in range(schedule.total_steps):
        batch = plan.batch(step, TOKENS, eot=0)
        names = [plan.sources[i] for i in batch.source_ids_AB.ravel()]
        out += list(zip(names, batch.inputs_ABT[..., 0].ravel().tolist(), strict=True))
    return out


def check_counts(schedule):
    """What the data plan promises: every share within two sequences, no sequence repeated or skipped in an epoch."""
    drawn = rows(schedule)
    assert len(drawn) == TOTAL * BATCH
    for segment in schedule.segments:
        count, exact = Counter(), Counter()
        for position in range(segment.start * BATCH, segment.end * BATCH):
            for name, share in segment.mixture_at(position // BATCH).items():
                exact[name] += share
            count[drawn[position][0]] += 1
            assert all(abs(count[name] - exact[name]) < 2 for name in exact) and set(count) <= set(exact)
    for name, tokens in TOKENS.items():
        firsts, blocks = [first for source, first in drawn if source == name], (len(tokens) - 1) // LENGTH
        assert len(firsts) * LENGTH == schedule.cursors_at(TOTAL)[name]
        for epoch in range(0, len(firsts), blocks):
            part = firsts[epoch : epoch + blocks]
            assert len(set(part)) == len(part)
    return drawn


def test_the_share_is_raised_to_the_end_of_its_phase_and_no_further():
    schedule = resolved()
    edit = raised(schedule, 60, "web")
    assert (edit.phase, edit.until) == ("b", 80)
    assert edit.mixture_before == {"law": 0.9, "web": 0.1}
    assert edit.mixture_after == pytest.approx({"law": 0.8, "web": 0.2})
    assert [(s.start, s.end) for s in edit.schedule.segments] == [(0, 30), (30, 60), (60, 80), (80, 120)]
    assert edit.past == edit.schedule.segments[:3]
    assert edit.schedule.segments[3].mixture == {"code": 0.5, "law": 0.5}
    assert edit.schedule.segments[3].ramp.from_mixture == pytest.approx({"law": 0.8, "web": 0.2})
    assert edit.schedule.phase_bounds == schedule.phase_bounds
    assert edit.schedule.rates(np.arange(TOTAL)).tolist() == schedule.rates(np.arange(TOTAL)).tolist()
    before, after = check_counts(schedule), check_counts(edit.schedule)
    assert before[: 60 * BATCH] == after[: 60 * BATCH] and before[60 * BATCH :] != after[60 * BATCH :]
    web = [sum(name == "web" for name, _ in drawn[60 * BATCH : 80 * BATCH]) for drawn in (before, after)]
    assert abs(web[0] - 12) < 2 and abs(web[1] - 24) < 2  # of 120


def test_a_share_is_not_raised_at_the_cost_of_a_source_that_is_spared():
    """Of law, web and code at 0.5, 0.3 and 0.2: what law is to have more comes from code alone."""
    phases = (Phase("a", "end", {"law": 0.5, "web": 0.3, "code": 0.2}),)
    schedule = resolved(phases)
    edit = raised(schedule, 60, "law", 1.2, 0.9, spared={"web", "new"}, phases=phases)
    assert edit.mixture_after == pytest.approx({"law": 0.6, "web": 0.3, "code": 0.1})
    assert edit.mixture_after["web"] == 0.3
    check_counts(edit.schedule)
    all_of_code = raised(schedule, 60, "law", 1.4, 0.9, spared={"web", "new"}, phases=phases)
    assert all_of_code.mixture_after == pytest.approx({"law": 0.7, "web": 0.3})
    with pytest.raises(ReplayRefused, match="^the added share would come from web, whose sets got worse too$"):
        raised(schedule, 60, "law", 1.5, 0.9, spared={"web", "new"}, phases=phases)
    with pytest.raises(ReplayRefused, match="^the added share would come from code, web, whose sets got worse too$"):
        raised(schedule, 60, "law", 1.2, 0.9, spared={"web", "code"}, phases=phases)
    with pytest.raises(ReplayRefused, match="^its share is already 0.5"):
        raised(schedule, 60, "law", 1.2, 0.4, spared={"web", "code"}, phases=phases)
    # A ramp under way: where it comes from nothing can be given, where it goes to it can.
    edit = raised(resolved(), 40, "web", 2.0, 0.9, spared={"code"})
    segment = edit.schedule.segment_at(40)
    assert segment.ramp.from_mixture == {"web": 0.7, "code": 0.3}
    assert segment.mixture == pytest.approx({"law": 0.8, "web": 0.2})


@pytest.mark.parametrize("step", [0, 13, 29, 30, 31, 40, 49, 50, 65, 79, 80, 81, 89, 119])
def test_any_step_may_be_edited(step):
    schedule = resolved()
    share = schedule.segment_at(step).mixture_at(step).get("new", 0.0)
    edit = raised(schedule, step, "new", factor=30.0)
    assert share == 0 and edit.mixture_after["new"] == pytest.approx(0.3)
    until = next(end for _, start, end in schedule.phase_bounds if start <= step < end)
    assert edit.until == until and edit.schedule.phase_bounds == schedule.phase_bounds
    for s in range(step, until):
        now, before = edit.schedule.segment_at(s).mixture_at(s), schedule.segment_at(s).mixture_at(s)
        assert now == pytest.approx({**{name: 0.7 * share for name, share in before.items()}, "new": 0.3})
    ramp_end = {30: 50, 80: 89, 120: 120}[until]
    for s in [*range(ramp_end, 80), *range(max(ramp_end, 89), TOTAL)]:  # the next phase, after its ramp, is what it was
        assert edit.schedule.segment_at(s).mixture_at(s) == schedule.segment_at(s).mixture_at(s)
    assert first_difference(schedule, edit.schedule, TOTAL) == step
    check_counts(edit.schedule)


def test_both_ends_of_a_ramp_under_way_are_raised_alike():
    edit = raised(resolved(), 40, "web", factor=3.0, max_share=0.8)
    segment = edit.schedule.segment_at(40)
    assert segment.start == 40 and segment.ramp.steps_done == 10 and segment.ramp.steps == 20
    # web 0.7 to 0.1 becomes 0.8 to 0.3; step 40 has moved 11 of 20.
    assert segment.ramp.from_mixture == pytest.approx({"web": 0.8, "code": 0.2})
    assert segment.mixture == pytest.approx({"web": 0.3, "law": 0.7})
    assert edit.mixture_after["web"] == pytest.approx(0.8 * 9 / 20 + 0.3 * 11 / 20)
    assert edit.mixture_before["web"] == pytest.approx(0.7 * 9 / 20 + 0.1 * 11 / 20)


def test_raised_twice_in_a_phase_and_in_two_phases():
    once = raised(resolved(), 40, "web").schedule
    twice = raised(once, 60, "web")
    assert twice.mixture_before["web"] == pytest.approx(0.2) and twice.mixture_after["web"] == pytest.approx(0.4)
    assert cut(twice.schedule.segments, 60) == cut(once.segments, 60)
    third = raised(twice.schedule, 85, "web").schedule
    assert [s.start for s in third.segments] == [0, 30, 40, 60, 80, 85]
    check_counts(third)


def test_the_frozen_past_alone_gives_the_edited_schedule_back():
    for step in (0, 35, 60, 80, 100):
        edit = raised(resolved(), step, "new")
        past = segments_from_json(json.loads(json.dumps(segments_to_json(edit.past))))
        assert past[-1].end == edit.until and resolved(past=past) == edit.schedule


def test_a_share_is_scaled_from_one_percent_capped_and_never_lowered():
    def share(source, **numbers):
        return raised(resolved(), 60, source, **numbers).mixture_after[source]

    assert share("new", factor=2.0) == pytest.approx(0.02)
    assert share("web", factor=9.0, max_share=0.25) == 0.25
    assert raised(resolved(), 60, "new", factor=200.0, max_share=1.0).mixture_after == {"new": 1.0}
    with pytest.raises(
        ReplayRefused, match="^its share is already 0.9; replay_factor 2 with replay_max_share 0.5 gives no more$"
    ):
        raised(resolved(), 60, "law")
    with pytest.raises(ReplayRefused, match="^its share is already 0.1; replay_factor 0.5 with"):
        raised(resolved(), 60, "web", factor=0.5)


def test_an_epoch_clock_counts_the_raised_share():
    phases = (PHASES[0], Phase("b", "2 epochs of law", {"law": 0.5, "web": 0.5}), Phase("c", "end", {"web": 1.0}))
    schedule = resolved(phases)
    assert schedule.phase_bounds[1] == ("b", 30, 35)  # 14 sequences at 3 a step
    edit = raised(schedule, 32, "law", max_share=1.0, phases=phases)
    assert edit.schedule.phase_bounds[1] == ("b", 30, 34) and edit.until == 34  # 6 of them in 2 steps, 8 in 6 a step
    edit = raised(schedule, 32, "web", max_share=0.9, phases=phases)
    assert (
        edit.until > 40
        and edit.schedule.cursors_at(edit.until)["law"] >= 2 * 56 > edit.schedule.cursors_at(edit.until - 1)["law"]
    )
    assert resolved(phases, past=edit.past) == edit.schedule


def test_a_source_at_its_cap_leaves_the_raised_mixture():
    supplies = {**SUPPLIES, "new": SourceSupply(96, 1, "renormalise")}  # 12 sequences, at 3 a step
    edit = raised(resolved(supplies=supplies), 60, "new", factor=50.0, supplies=supplies)
    assert [(s.start, s.end) for s in edit.schedule.segments[2:]] == [(60, 64), (64, 80), (80, 120)]
    assert edit.schedule.segments[3].mixture == pytest.approx({"law": 0.9, "web": 0.1})
    assert resolved(supplies=supplies, past=edit.past) == edit.schedule
    with pytest.raises(ReplayRefused, match="no more of it would be read by step 80, where the phase ends"):
        raised(edit.schedule, 70, "new", supplies=supplies)


@pytest.mark.parametrize("epochs", [0.1, 1])
def test_a_cap_below_what_is_read_already_takes_the_source_out_from_here_on(epochs):
    """Whatever this order of data had read of it before: the past stays, and its last step is not trained again."""
    supplies = {**SUPPLIES, "new": SourceSupply(96, 4, "renormalise")}
    edit = raised(resolved(supplies=supplies), 60, "new", factor=50.0, supplies=supplies)
    under_way = edit.schedule.segment_at(66)
    assert (under_way.start, under_way.end) == (60, 76) and under_way.read_by(66)["new"] == 144
    lowered = curriculum_of(supplies={**SUPPLIES, "new": SourceSupply(96, epochs, "renormalise")})
    past = cut(edit.schedule.segments, 66)
    again = resolve(lowered, past=past, going_on=under_way.continued(66))
    assert again.segments[: len(past)] == past
    assert [(s.start, s.end) for s in again.segments[len(past) :]] == [(66, 80), (80, 120)]
    assert "new" not in again.segments[len(past)].mixture and again.tokens(120) == 120 * BATCH * LENGTH
    check_counts(again)


def test_a_run_that_a_source_stops_ends_where_it_did_and_with_the_raised_share():
    """At 1 of 50 sequences law lasts for about 8 steps each; a batch later it would be read beyond its cap."""
    phases, lr, accepted = (Phase("a", "end", {"law": 0.02, "web": 0.98}),), LrSchedule(schedule="constant"), []
    for sequences in range(8, 14):
        supplies = {**SUPPLIES, "law": SourceSupply(sequences * LENGTH, 1, "stop")}
        schedule = resolved(phases, supplies, lr=lr)
        for step in range(40, schedule.total_steps, 3):
            try:
                edit = raised(schedule, step, "new", phases=phases, supplies=supplies, lr=lr)
            except ReplayRefused:
                continue
            assert edit.until == edit.schedule.total_steps == schedule.total_steps < TOTAL
            last = edit.schedule.segments[-1]
            assert last.start == step and last.mixture == pytest.approx({"law": 0.0196, "web": 0.9604, "new": 0.02})
            assert last.cursors_at(last.end)["law"] <= sequences * LENGTH < last.cursors_at(last.end + 1)["law"]
            accepted.append(step)
    assert len(accepted) > 5


@pytest.mark.parametrize(
    "step, source, words, changes",
    [
        (120, "web", "the run has no update after step 120", {}),
        (-1, "web", "the run has no update after step -1", {}),
        (60, "elsewhere", "there is no source elsewhere", {}),
        (60, "new", "new has no training text", {"new": SourceSupply(0)}),
        (60, "new", "step 64 [(]phase b[)] would read more than 1 epoch of new", {"new": SourceSupply(96, 1)}),
        (60, "new", "the run would end at step 64 instead of 120", {"new": SourceSupply(96, 1, "stop")}),
        (60, "new", "the run would end at step 60 instead of 120", {"new": SourceSupply(8, 1, "stop")}),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(step, source, words, changes):
    given = {
        "supplies": SUPPLIES | changes,
        "phases": [replace(phase, lr=None) for phase in PHASES],
        "lr": LrSchedule(schedule="constant"),
    }
    with pytest.raises(ReplayRefused, match=words):
        raised(resolved(**given), step, source, factor=50.0, **given)


def test_a_clock_that_the_edit_keeps_from_being_reached_is_refused():
    phases = (*PHASES[:2], Phase("c", "44 epochs of law", {"law": 1.0}), Phase("d", "end", {"web": 1.0}))
    schedule = resolved(phases)
    with pytest.raises(ReplayRefused, match="phases.2..until: '44 epochs of law' is not reached"):
        raised(schedule, 31, "web", factor=50.0, max_share=0.95, phases=phases)


def test_a_phase_that_is_not_declared_any_more_is_refused():
    past = cut(resolved().segments, 50)
    phases = (PHASES[0], PHASES[2])
    schedule = resolved(phases, past=past)
    with pytest.raises(ReplayRefused, match="phase b is not declared to continue at step 40"):
        raised(schedule, 40, "web", phases=phases)


def drawn_at_random(rng):
    """Phases, supplies and a learning rate of 60 steps, with clocks, ramps, programs and caps of every kind."""
    names = ["s0", "s1", "s2", "s3"]
    kinds = ["renormalise", "stop", "repeat", "error"]
    supplies = {
        n: SourceSupply(rng.choice([80, 160, 400, 4000]), rng.choice([None, None, 1, 2.5, 8]), rng.choice(kinds))
        for n in names
    }
    if stops := rng.random() < 0.4:  # some time in the run: a rare source without which it ends
        supplies["s0"] = SourceSupply(rng.choice([20, 30, 40, 50]), 1, "stop")
    phases, ends = [], sorted(rng.sample(range(3, 57), rng.randint(0, 3)))
    for i, end in enumerate([*ends, "end"]):
        mixture = {n: rng.choice([0, 0.1, 0.5, 1, 3]) for n in names} | {"s3": rng.choice([0.1, 1])}
        clock = f"{rng.choice([1, 2, 3])} epochs of {rng.choice(names)}"
        until = end if end == "end" else rng.choice([end, end, clock])
        program = LrProgram(rng.choice([0, 3]), rng.choice([None, 1e-3, 1.5e-3]), rng.choice([0, 4]))
        ramp_steps, shape = rng.choice([0, 3, 10]) if i else 0, rng.choice(["linear", "cosine"])
        if stops:
            mixture["s0"] = 0.03 * sum(mixture.values())
        phases.append(Phase(f"p{i}", until, mixture, ramp_steps, shape, rng.choice([None, program])))
    schedule = rng.choice(["wsd", "cosine", "linear", "constant"])
    return phases, supplies, LrSchedule(1e-3, schedule, rng.choice([0, 4]), rng.choice([0, 10]))


def test_whatever_the_schedule_a_past_and_an_edit_fit_into_it():
    counts = Counter()
    for seed in range(120):
        rng = random.Random(seed)
        curriculum = Curriculum(*drawn_at_random(rng), total_steps=60, batch_size=4, seq_len=10)
        try:
            schedule = resolve(curriculum)
        except ScheduleError:
            continue
        for segment in schedule.segments:
            past = cut(schedule.segments, segment.end)
            assert resolve(curriculum, past=past) == schedule
            counts["segments"] += 1
        for step in rng.sample(range(1, schedule.total_steps + 1), min(4, schedule.total_steps)):
            again = resolve(curriculum, past=cut(schedule.segments, step))
            assert joined(again.segments) == joined(schedule.segments)
            updates = np.arange(schedule.total_steps)
            assert again.rates(updates).tolist() == schedule.rates(updates).tolist()
        for _ in range(3):
            step, source = rng.randint(0, schedule.total_steps), rng.choice(["s0", "s1", "s2", "s3"])
            edit = {"step": step, "source": source, "factor": rng.choice([2, 10]), "max_share": rng.choice([0.5, 1.0])}
            try:
                replay = raise_share(schedule, curriculum, **edit)
            except ReplayRefused:
                counts["refused"] += 1
                continue
            stops = replay.until == replay.schedule.total_steps < 60
            if not stops:
                assert resolve(curriculum, past=replay.past) == replay.schedule
            assert replay.schedule.total_steps == schedule.total_steps
            assert replay.past == cut(replay.schedule.segments, replay.until)
            assert first_difference(schedule, replay.schedule, step) is None
            schedule = replay.schedule
            counts["stops" if stops else "edits"] += 1
    assert min(counts["segments"], counts["refused"], counts["edits"]) > 50 and counts["stops"] > 5
