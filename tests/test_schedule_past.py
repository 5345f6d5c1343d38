"""A frozen past: what is trained stands, what lies ahead comes from the phases."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from schedules import CONSTANT, SUPPLIES, THREE, WSD, after, after_problems, problems, resolved

from phases.checks import ScheduleError
from phases.lr import LrProgram, LrSchedule
from phases.schedule import Phase, SourceSupply, cut


def test_a_past_that_ends_with_a_segment_changes_nothing():
    supplies = {**SUPPLIES, "law": SourceSupply(800, 0.95, "renormalise"), "x": SourceSupply(40, 1, "renormalise")}
    phases = (THREE[0], Phase("b", 60, {"web": 0.3, "law": 0.5, "x": 0.2}, ramp_steps=20), THREE[2])
    whole = resolved(*phases, supplies=supplies, lr=WSD)
    ends = [s.end for s in whole.segments]
    # x is exhausted within b's ramp and law after it, and again what was left of law within c's.
    assert ends == [30, 44, 52, 60, 65, 100]
    for end in ends:
        assert after(cut(whole.segments, end), *phases, supplies=supplies) == whole
    for end in range(45, 60):  # what was taken out does not come back within its phase
        inside = after(cut(whole.segments, end), *phases, supplies=supplies).segment_at(end)
        assert inside.start == end and inside.mixture == whole.segment_at(end).mixture


@pytest.mark.parametrize("end", range(1, 100))
def test_a_past_that_ends_anywhere_changes_no_data_and_no_rates(end):
    whole = resolved(*THREE, lr=WSD)
    cut_there = after(cut(whole.segments, end), *THREE)
    assert cut_there.phase_bounds == whole.phase_bounds == (("a", 0, 30), ("b", 30, 60), ("c", 60, 100))
    assert cut_there.rates(np.arange(100)).tolist() == whole.rates(np.arange(100)).tolist()
    for step in range(101):
        given, expected = (s.segment_at(step).mixture_at(step) for s in (cut_there, whole))
        assert given == expected and cut_there.cursors_at(step) == whole.cursors_at(step)
    assert end in {s.start for s in cut_there.segments}
    assert order(cut_there, 100) == order(whole, 100)
    # And the same again where it is cut once more, within what goes on and after it.
    for again in {end + 1, (end + 100) // 2} - {100}:
        twice = after(cut(cut_there.segments, again), *THREE)
        assert order(twice, 100) == order(whole, 100)
        assert twice.rates(np.arange(100)).tolist() == whole.rates(np.arange(100)).tolist()
    for name in ("web", "law"):
        mean = [
            sum(segment.mean_mixture().get(name, 0.0) * (segment.end - segment.start) for segment in s.segments)
            for s in (cut_there, whole)
        ]
        assert mean[0] == pytest.approx(mean[1])


def order(schedule, until):
    """Every sequence before step `until` as (source, sequences of it before), and how many there are of each."""
    out, count = [], Counter()
    for step in range(until):
        segment = schedule.segment_at(step)
        first = segment.first_sequence + (step - segment.start) * segment.batch_size
        drawn, before = segment.quotas.locate(np.arange(first, first + segment.batch_size))
        for source, number in zip(drawn, before, strict=True):
            name = segment.quotas.sources[source]
            out.append((name, segment.cursors[name] + int(number) * segment.seq_len))
            assert out[-1][1] == count[name]  # nothing is read twice or left out
            count[name] += segment.seq_len
    assert out
    return out


def test_what_goes_on_meets_its_cap_and_its_clock_where_the_phase_would():
    law, web = SourceSupply(800, 1, "renormalise"), SourceSupply(8000)
    mixed = Phase("a", "end", {"law": 0.43, "web": 0.57}, lr=LrProgram())
    clock = (replace(mixed, until="0.9 epochs of law"), Phase("b", "end", {"web": 1.0}))
    for phases in ((mixed,), clock):
        whole = resolved(*phases, supplies={"law": law, "web": web}, lr=CONSTANT)
        boundary = whole.segments[0].end
        assert 40 < boundary < 60 and len(whole.segments) == 2
        for end in (1, 17, boundary - 1, boundary, boundary + 1):
            given = after(cut(whole.segments, end), *phases, supplies={"law": law, "web": web}, lr=CONSTANT)
            assert order(given, 100) == order(whole, 100) and given.phase_bounds == whole.phase_bounds


def test_a_ramp_that_is_over_is_no_part_of_what_an_edit_begins():
    whole = resolved(Phase("a", 30, {"law": 1.0}), Phase("b", "end", {"web": 1.0}, ramp_steps=10), total=50)
    mixed = Phase("b", "end", {"web": 0.5, "law": 0.5}, ramp_steps=10)
    edited = after(cut(whole.segments, 45), Phase("a", 30, {"law": 1.0}), mixed, total=50, lr=CONSTANT)
    assert edited.segment_at(45).start == 45 and edited.segment_at(45).ramp is None


@pytest.mark.parametrize("b", [Phase("b", 30, {"law": 1.0}, ramp_steps=10), Phase("b", 21, {"law": 1.0})])
def test_a_ramp_that_goes_on_still_leaves_from_the_last_update_before_its_phase(b):
    phases = (Phase("a", 20, {"web": 1.0}), b, Phase("c", "end", {"web": 0.5, "law": 0.5}, ramp_steps=20))
    whole = resolved(*phases)
    on = after(cut(whole.segments, 40), *phases, lr=CONSTANT)
    assert on.segment_at(40) == whole.segment_at(40).continued(40)
    assert order(on, 100) == order(whole, 100)


def test_what_goes_on_may_change_its_mixture_and_its_end_on_the_way():
    a, b, c = THREE
    whole = resolved(*THREE, lr=WSD)
    on = after(cut(whole.segments, 40), *THREE)
    assert on.segment_at(45).first_sequence == 40 and on.segment_at(45).cursors == whole.segment_at(45).cursors
    longer = after(cut(on.segments, 45), a, replace(b, until=70), c)  # the order of b is not touched by its end
    assert order(longer, 60) == order(whole, 60)
    other = after(cut(on.segments, 45), a, replace(b, mixture={"web": 1.0}), c).segment_at(45)
    assert (other.start, other.first_sequence, other.ramp.steps_done) == (45, 0, 15)
    assert other.cursors == whole.cursors_at(45)
    assert other.mixture_at(45) == pytest.approx({"web": 0.7 * 4 / 20 + 16 / 20, "law": 0.3 * 4 / 20})
    rest, expected = (replace(s.segment_at(45).rest(45), lr=()) for s in (on, whole))
    assert rest == expected and rest.ramp.steps_done == 15


def test_the_phases_decide_what_follows_a_past():
    past = cut(resolved(*THREE, lr=WSD).segments, 45)
    assert [(s.start, s.end) for s in past] == [(0, 30), (30, 45)]

    def bounds(*phases, **kwargs):
        return after(past, *phases, **kwargs).phase_bounds

    a, b, c = THREE
    # The current phase goes on with another mixture and another end.
    edited = after(past, a, replace(b, until=70, mixture={"web": 1.0}), c)
    assert edited.phase_bounds == (("a", 0, 30), ("b", 30, 70), ("c", 70, 100))
    assert edited.segments[2].mixture == {"web": 1.0} and edited.segments[2].ramp.steps_done == 15
    assert edited.segments[2].ramp.from_mixture == {"web": 0.7, "law": 0.3}
    assert edited.segments[:2] == past
    # It was declared to end by now: the next one begins.
    assert bounds(a, replace(b, until=40), c) == (("a", 0, 30), ("b", 30, 45), ("c", 45, 100))
    # It is gone, or renamed.
    assert bounds(a, c) == (("a", 0, 30), ("b", 30, 45), ("c", 45, 100))
    assert bounds(a, replace(b, name="x", ramp_steps=10), c) == (
        ("a", 0, 30),
        ("b", 30, 45),
        ("x", 45, 60),
        ("c", 60, 100),
    )
    # A finished phase is history, whatever is said of it now, also where percentages of a longer run move its end.
    assert bounds(replace(a, until=44), b, c) == (("a", 0, 30), ("b", 30, 60), ("c", 60, 100))
    longer = bounds(replace(a, until="30%"), replace(b, until="60%"), c, total=200)
    assert longer == (("a", 0, 30), ("b", 30, 120), ("c", 120, 200))
    new = after(past, a, Phase("x", 40, {"web": 1.0}), b, c)
    assert new.phase_bounds == (("a", 0, 30), ("b", 30, 60), ("c", 60, 100))
    assert "phase x is never trained: it would end by step 45" in new.warnings[0]
    # In its place is one that would be over by now: that one is never trained.
    past_by = after(past, a, Phase("x", 40, {"web": 1.0}), c)
    assert past_by.phase_bounds == (("a", 0, 30), ("b", 30, 45), ("c", 45, 100))
    assert "phase x is never trained: it would end by step 45" in past_by.warnings[0]
    # The next phase's ramp leaves from what is trained.
    ramp = after(past, a, c).segments[-1].ramp
    assert ramp.from_mixture == pytest.approx({"web": 0.7 - 0.4 * 15 / 20, "law": 0.3 + 0.4 * 15 / 20})


def test_caps_and_clocks_count_what_a_past_has_read():
    web, law = {"web": 1.0}, {"law": 1.0}  # 40 tokens a step
    past = resolved(Phase("a", 15, law), Phase("b", "end", web)).segments[:1]
    capped = {**SUPPLIES, "law": SourceSupply(800, 1, "stop")}
    stopping = after(past, Phase("a", 10, law), Phase("b", 40, web), Phase("c", "end", law), supplies=capped)
    assert stopping.total_steps == 45 and stopping.cursors_at(45)["law"] == 800
    clock = (Phase("a", 15, law), Phase("b", "2 epochs of law", law), Phase("c", "end", web))
    assert after(past, *clock).phase_bounds[1] == ("b", 15, 40)
    assert after(after(past, *clock).segments[:2], *clock).phase_bounds == (("a", 0, 15), ("b", 15, 40), ("c", 40, 100))
    ((path, message),) = after_problems(past, clock[0], Phase("b", "end", law), supplies={
        **SUPPLIES, "law": SourceSupply(800, 1)})  # fmt: skip
    assert path == "sources.law.max_epochs" and "step 20 (phase b)" in message
    # A past that ends where a source is exhausted: the run stops there, as it would have.
    phases = (Phase("a", "end", {"law": 0.5, "web": 0.5}),)
    supplies = {**SUPPLIES, "law": SourceSupply(790, 1, "stop")}
    whole = resolved(*phases, supplies=supplies)
    again = after(whole.segments, *phases, supplies=supplies, lr=CONSTANT)
    assert again == whole and again.total_steps == 39 and "the run stops at step 39" in again.warnings[0]


def test_a_past_keeps_its_rates_and_a_jump_where_it_ends_is_refused():
    phases = (Phase("a", "end", {"web": 1.0}),)
    lr = LrSchedule(lr=1e-3, decay_steps=40, min_lr_ratio=0.0)
    whole = resolved(*phases, lr=lr)
    half = after(cut(whole.segments, 79), *phases, lr=lr, total=140)  # 19 of 40 updates down, then up again
    assert half.rates(78) == pytest.approx(1e-3 * 21 / 40) and half.rates(79) == 1e-3
    assert half.rates(np.arange(79)).tolist() == whole.rates(np.arange(79)).tolist()
    assert half.rates(139) == 0.0 and half.rates(119) == pytest.approx(1e-3 / 2)
    ((path, message),) = after_problems(cut(whole.segments, 82), *phases, lr=lr, total=140)
    assert path == "optim.allow_jump"
    assert "jumps from 0.00045 to 0.001 at step 82, where the fixed part of the schedule ends" in message
    assert after(cut(whole.segments, 82), *phases, lr=replace(lr, allow_jump=True), total=140).rates(82) == 1e-3
    # Where a phase begins there without a rate of its own, it is still what the rate depends on.
    of_optim = (Phase("a", 82, {"web": 1.0}), Phase("b", "end", {"web": 1.0}))
    ((path, message),) = after_problems(cut(whole.segments, 82), *of_optim, lr=replace(lr, lr=5e-3), total=140)
    assert path == "optim.allow_jump" and "the fixed part of the schedule ends: more than 2x; give the " in message
    # With one, it is the phase's rate.
    new = (Phase("a", 82, {"web": 1.0}), Phase("b", "end", {"web": 1.0}, lr=LrProgram(peak=2e-3)))
    ((path, _),) = after_problems(cut(whole.segments, 82), *new, lr=lr)
    assert path == "phases[1].lr.peak"
    rewarmed = after(
        cut(whole.segments, 82), new[0], replace(new[1], lr=LrProgram(peak=2e-3, rewarm_steps=10)), lr=lr
    )  # from the rate that the past really ends with
    assert rewarmed.rates(82) == pytest.approx(0.45e-3 + (2e-3 - 0.45e-3) / 10)


def test_a_ramp_of_more_steps_than_memory_holds_is_refused_like_any_that_is_too_long():
    ((path, message),) = problems(Phase("a", 50, {"web": 1.0}), Phase("b", "end", {"law": 1.0}, ramp_steps=2**42))
    assert path == "phases[1].ramp_steps"
    assert message == f"got {2**42} steps for a phase of 50 (steps 50 to 100), expected at most its length"


def test_a_past_that_cannot_stand_before_what_is_declared():
    past = cut(resolved(*THREE, lr=WSD).segments, 45)
    a, b, c = THREE
    for phases, kwargs, path, words in (
        (
            THREE,
            {"total": 44},
            "train.steps",
            "got 44, but the run's schedule is already fixed up to step 45; set at least 45",
        ),
        (
            THREE,
            {"length": 5},
            "train.seq_len",
            "got a longest sequence of 5, but steps 0 to 30 are fixed with sequences of 10, which must divide it",
        ),
        ((a, replace(b, until=70)), {}, "phases[1].until", "the last phase ends at step 70, before the run's end"),
        (
            (a, replace(b, until=40)),
            {},
            "phases[1].until",
            "no phase after the trained ones lasts beyond step 45",
        ),
        (
            (replace(b, ramp_steps=0), replace(a, until="end")),
            {},
            "phases[1].name",
            "'a' was already trained, before step 45",
        ),
        (
            (replace(a, until="end"),),
            {},
            "phases[0].name",
            "'a' was trained before 'b', which ends at step 45; give this phase another name, or name it 'b' to go",
        ),
    ):
        ((where, message),) = after_problems(past, *phases, **kwargs)
        assert where == path and words in message


def test_sources_may_come_and_those_never_read_may_go():
    past = resolved(Phase("a", 20, {"web": 1.0}), Phase("b", "end", {"web": 1.0})).segments[:1]
    new = after(
        past, Phase("b", "end", {"web": 1, "new": 1}), supplies={"web": SourceSupply(8000), "new": SourceSupply(8)}
    )
    assert new.segments[0].cursors == {"web": 0, "new": 0} and new.segments[1].cursors == {"web": 800, "new": 0}


def test_sizes_to_come_after_a_past():
    past = resolved(Phase("a", 20, {"web": 1.0}), Phase("b", "end", {"web": 1.0})).segments[:1]
    unknown = {name: SourceSupply(None) for name in SUPPLIES}

    def early(*phases):
        return resolved(*phases, supplies=unknown, sizes_to_come=True, past=past)

    assert early(Phase("a", "1 epoch of web", {"web": 1.0}), Phase("b", "end", {"web": 1.0})) is None
    with pytest.raises(ScheduleError, match=r"phases\[0\].until: the last phase ends at step 30"):
        early(Phase("a", 30, {"web": 1.0}))


def test_a_phase_that_ended_as_its_source_ran_out_is_followed_by_the_next():
    supplies = {"law": SourceSupply(800, 1, "stop"), "web": SourceSupply(8000)}
    phases = Phase("a", 20, {"law": 1.0}), Phase("b", "end", {"web": 1.0})  # 800 of 800 tokens at step 20
    whole = resolved(*phases, supplies=supplies, lr=WSD)
    assert whole.total_steps == 100 and after(whole.segments[:1], *phases, supplies=supplies) == whole


def test_a_run_that_stopped_does_not_go_on_with_what_a_new_segment_would_fit_in():
    supplies = {"law": SourceSupply(40, 1, "stop"), "web": SourceSupply(8000)}
    phases = (Phase("a", "end", {"law": 0.6, "web": 0.4}),)
    whole = resolved(*phases, supplies=supplies)  # of law 2 sequences, then 3, and 4 are all there are
    assert whole.total_steps == 1 and whole.cursors_at(1)["law"] == 20
    again = after(whole.segments, *phases, supplies=supplies, lr=CONSTANT)
    assert again == whole and "the run stops at step 1: law is limited to 1 epoch" in again.warnings[0]
