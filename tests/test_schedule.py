"""Clocks, ramps and segments, and what of them is refused or warned of."""

import dataclasses
import json
from dataclasses import replace

import numpy as np
import processor
import pytest
from schedules import CONSTANT, SUPPLIES, problems, resolved

from phases.checks import ScheduleError, check_phases
from phases.clocks import resolve_steps
from phases.lr import LrProgram, LrSchedule
from phases.mixture import _tree
from phases.schedule import (
    NOT_DATA,
    Phase,
    Ramp,
    Schedule,
    Segment,
    SourceSupply,
    cut,
    segments_from_json,
    segments_to_json,
)


@pytest.mark.parametrize(
    "until, step",
    [
        (37, 37),
        ("37%", 37),
        ("33.3%", 34),  # 33.3 steps, rounded up
        ("1200 tokens", 30),
        ("1201 tokens", 31),
        ("1.2K tokens", 30),
        ("0.0012M tokens", 30),
        ("1.2e3 tokens", 30),
        ("12E+2tokens", 30),
        ("2 epochs of law", 80),  # half of 40 tokens a step, so 20 x 80 = 2 x 800
        ("1.5 epochs of law", 60),
        ("1 epoch of law", 40),
    ],
)
def test_every_clock_rounds_up_to_a_step(until, step):
    schedule = resolved(Phase("a", until, {"web": 1, "law": 1}), Phase("b", "end", {"web": 1.0}))
    assert schedule.phase_bounds == (("a", 0, step), ("b", step, 100))


def test_epochs_count_from_the_run_s_start():
    schedule = resolved(
        Phase("a", 20, {"law": 1.0}),
        Phase("b", "2 epochs of law", {"law": 0.5, "web": 0.5}),
        Phase("c", "end", {"web": 1}),
    )
    assert schedule.phase_bounds[1] == ("b", 20, 60)  # 800 in a, 20 a step after
    assert schedule.cursors_at(60)["law"] == 1600


def test_percent_is_exact_where_floats_are_not():
    assert resolve_steps("7%", 100) == 7  # 0.07 * 100 is 7.000000000000001
    assert resolve_steps("0.1%", 1000) == 1
    assert resolve_steps("55%", 100) == 55


@pytest.mark.parametrize(
    "phases, path, words",
    [
        (
            [Phase("a", 50, {"web": 1}), Phase("b", 40, {"web": 1})],
            "phases[1].until",
            "ends at step 40 but starts at step 50",
        ),
        ([Phase("a", 150, {"web": 1})], "phases[0].until", "after the run's end at step 100"),
        ([Phase("a", 50, {"web": 1})], "phases[0].until", "before the run's end at step 100"),
        ([Phase("a", "soon", {"web": 1})], "phases[0].until", "epochs ('2 epochs of web') or 'end'"),
        ([Phase("a", "500M", {"web": 1})], "phases[0].until", "or 'end'; did you mean '500M tokens'?"),
        ([Phase("a", "600k toks", {"web": 1})], "phases[0].until", "or 'end'; did you mean '600k tokens'?"),
        ([Phase("a", "2 epochs of lwa", {"web": 1})], "phases[0].until", "did you mean 'law'?"),
        (
            [Phase("a", "9 epochs of law", {"law": 1}), Phase("b", "end", {"web": 1})],
            "phases[0].until",
            "'9 epochs of law' is not reached before the run's end at step 100 (5 by then)",
        ),
        ([Phase("a", "end", {"web": 1}), Phase("b", "end", {"web": 1})], "phases[0].until", "last phase only"),
        (
            [Phase("a", 50, {"web": 1}), Phase("a", "end", {"web": 1})],
            "phases[1].name",
            "already the name of phases[0]",
        ),
        ([Phase("a b", "end", {"web": 1})], "phases[0].name", "expected letters"),
        ([Phase("a", "end", {"wbe": 1})], "phases[0].mixture.wbe", "no such source; did you mean 'web'?"),
        ([Phase("a", "end", {"web": -1})], "phases[0].mixture.web", "proportion of 0 or more"),
        ([Phase("a", "end", {"web": float("nan")})], "phases[0].mixture.web", "proportion of 0 or more"),
        ([Phase("a", "end", {"web": 0})], "phases[0].mixture", "no positive proportion"),
        ([Phase("a", "end", {})], "phases[0].mixture", "no positive proportion"),
        ([Phase("a", "end", {"web": 1}, ramp_steps=5)], "phases[0].ramp_steps", "no mixture before it"),
        (
            [Phase("a", 95, {"web": 1}), Phase("b", "end", {"law": 1}, ramp_steps=6)],
            "phases[1].ramp_steps",
            "got 6 steps for a phase of 5",
        ),
        (
            [Phase("a", 50, {"web": 1}), Phase("b", "end", {"law": 1}, ramp_steps="x")],
            "phases[1].ramp_steps",
            "a percentage of train.steps",
        ),
        (
            [Phase("a", "end", {"web": 1}, lr=LrProgram(rewarm_steps=60, decay_steps=60))],
            "phases[0].lr.decay_steps",
            "more than the phase's 100 steps",
        ),
        ([Phase("a", "end", {"web": 1}, lr=LrProgram(peak=-1.0))], "phases[0].lr.peak", "positive learning rate"),
        ([Phase("a", "end", {"web": 1}, lr=LrProgram(decay_to_ratio=2))], "phases[0].lr.decay_to_ratio", "0 to 1"),
        (
            [Phase("a", 50, {"web": 1}), Phase("b", "end", {"web": 1}, lr=LrProgram(peak=5e-3))],
            "phases[1].lr.peak",
            "jumps from 0.001 to 0.005 at step 50",
        ),
        ([Phase("a", "end", {"web": 1e308, "law": 1e308})], "phases[0].mixture", "more than a float holds"),
        ([Phase("a", "9" * 5001 + "%", {"web": 1})], "phases[0].until", "expected a step, a percentage"),
        ([Phase("a", "9" * 5001 + " epochs of law", {"web": 1})], "phases[0].until", "expected a step, a percentage"),
        (
            [Phase("a", "9" * 18 + " epochs of law", {"law": 1})],
            "phases[0].until",
            "is not reached before the run's end at step 100 (5 by then); ask for fewer epochs, raise train.steps",
        ),
        ([Phase("a", 16**5000, {"web": 1})], "phases[0].until", "a number of more than 30 digits"),
        (
            [Phase("a", 50, {"web": 1}), Phase("b", "end", {"law": 1.0}, ramp_steps="9" * 5001 + "%")],
            "phases[1].ramp_steps",
            "a percentage of train.steps",
        ),
        ([], "phases", "at least one phase"),
    ],
)
def test_problems_name_the_place_and_the_mending(phases, path, words):
    found = problems(*phases)
    assert [p for p, _ in found] == [path]
    assert words in found[0][1]


def test_all_problems_at_once():
    found = problems(Phase("a", 5, {"x": 1}), Phase("a", "end", {"y": 1}))
    assert [path for path, _ in found] == ["phases[0].mixture.x", "phases[1].name", "phases[1].mixture.y"]
    assert list(check_phases([Phase("a", "end", {"web": 1})], ["web"])) == []


def test_problems_of_clocks_ramps_and_rates_are_told_together():
    lr = LrSchedule(warmup_steps="lots", decay_steps=-1)
    program = LrProgram(rewarm_steps="a bit", decay_steps="5 %%")
    found = problems(Phase("a", "soon", {"web": 1}), Phase("b", "later", {"x": 1}, ramp_steps="y", lr=program), lr=lr)
    assert sorted(path for path, _ in found) == [
        "optim.decay_steps",
        "optim.warmup_steps",
        "phases[0].until",
        "phases[1].lr.decay_steps",
        "phases[1].lr.rewarm_steps",
        "phases[1].mixture.x",
        "phases[1].ramp_steps",
        "phases[1].until",
    ]
    found = problems(
        Phase("a", 50, {"web": 1}, lr=LrProgram(decay_steps=51)),
        Phase("b", "end", {"web": 1}, ramp_steps=51),
        lr=LrSchedule(warmup_steps=101),
    )
    assert problems(Phase("a", "end", {"web": 1}), lr=LrSchedule(decay_steps=101))[0][0] == "optim.decay_steps"
    assert [path for path, _ in found] == ["phases[0].lr.decay_steps", "phases[1].ramp_steps", "optim.warmup_steps"]


def test_sizes_to_come_leave_every_other_check():
    unknown = {name: SourceSupply(None) for name in SUPPLIES}

    def early(*phases, lr=CONSTANT):
        return resolved(*phases, supplies=unknown, lr=lr, sizes_to_come=True)

    epochs = Phase("b", "2 epochs of law", {"law": 1})
    end = Phase("c", "end", {"web": 1})
    assert early(Phase("a", 10, {"web": 1}), epochs, end) is None
    assert early(Phase("a", 10, {"web": 1}), end).total_steps == 100
    for wrong, path in (
        ([Phase("a", 150, {"web": 1}), epochs, end], "phases[0].until"),
        ([epochs, Phase("c", "end", {"web": 1}, ramp_steps="x")], "phases[1].ramp_steps"),
        ([Phase("a", "2 epochs of lwa", {"web": 1}), end], "phases[0].until"),
    ):
        with pytest.raises(ScheduleError) as error:
            early(*wrong)
        assert [p for p, _ in error.value.problems] == [path]
    with pytest.raises(ScheduleError, match="optim.warmup_steps: warm-up .101. and decay .0. steps are more than"):
        early(epochs, end, lr=LrSchedule(warmup_steps=101))


def test_phases_that_a_source_may_keep_from_being_reached_are_judged_once_its_size_is_known():
    """A run that resolves with its sizes passes the check without them too, of its past and of its beginning."""
    before, behind = Phase("a", 4, {"web": 1}), (Phase("c", 50, {"web": 1}), Phase("d", "end", {"web": 1}))
    phases = (before, Phase("b", 55, {"law": 1}), *behind)
    sizes = {"web": SourceSupply(8000), "law": SourceSupply(800, 0.5, "stop")}
    unknown = {name: replace(supply, num_tokens=None) for name, supply in sizes.items()}
    whole = resolved(*phases, supplies=sizes)
    assert whole.phase_bounds == (("a", 0, 4), ("b", 4, 14)) and "phase c is never reached" in " ".join(whole.warnings)
    for past in ((), cut(whole.segments, 3), cut(whole.segments, 9)):
        assert resolved(*phases, supplies=unknown, sizes_to_come=True, past=past) is None
    with pytest.raises(ScheduleError, match=r"phases\[2\].until: ends at step 50 but starts at step 55"):
        resolved(*phases, supplies=sizes | {"law": SourceSupply(800)})
    with pytest.raises(ScheduleError, match=r"phases\[1\].until: ends at step 4 but starts at step 50"):
        resolved(behind[0], before, phases[1], behind[1], supplies=unknown, sizes_to_come=True)
    unread = resolved(*behind, supplies=unknown, sizes_to_come=True)
    assert unread.total_steps == 100  # law is in no phase: it stops nothing


def test_a_run_beyond_what_the_arithmetic_holds_is_refused():
    for changes in ({"total": 2**41}, {"length": 2**60}, {"batch": 2**60}):
        (path, message), *more = problems(Phase("a", "end", {"web": 1.0}), **changes)
        assert path == "train.steps" and "at most 2**42 sequences and 2**62 tokens" in message and not more
    # 2**40 steps of 4 sequences are the most: law's share is still exact there.
    schedule = resolved(Phase("a", "end", {"web": 0.75, "law": 0.25}), total=2**40 - 1, batch=4, length=2**19)
    assert schedule.cursors_at(2**40 - 1)["law"] == (2**40 - 1) * 2**19


def test_unknown_sizes_matter_only_to_clocks_that_need_them():
    unknown = {"web": SourceSupply(None), "law": SourceSupply(None, max_epochs=1)}
    assert resolved(Phase("a", "end", {"web": 1, "law": 1}), supplies=unknown).total_steps == 100
    found = problems(Phase("a", "2 epochs of law", {"law": 1}), Phase("b", "end", {"web": 1}), supplies=unknown)
    assert "not prepared yet" in found[0][1]


def test_weights_are_normalised_and_it_is_said():
    schedule = resolved(Phase("a", "end", {"web": 3, "law": 1}))
    assert schedule.segments[0].mixture == {"web": 0.75, "law": 0.25}
    assert schedule.warnings == ("phase a: proportions add up to 4, normalised to web 0.75, law 0.25",)


def test_what_holds_of_many_phases_is_one_warning_and_of_those_that_are_over_none():
    phases = [Phase(f"p{i}", 10 * (i + 1), {"web": 3, "law": 0.001}) for i in range(9)]
    phases.append(Phase("p9", "end", {"web": 3, "law": 0.001}))
    odd = "proportions add up to 3.001, normalised to web 0.9997, law 0.0003332"
    none = "law has a positive proportion but gets no sequence"
    others = "the same applies to {} more phases: {}, ..."
    schedule = resolved(*phases)
    assert schedule.warnings == (
        f"phase p0: {odd}; {others.format(9, 'p1, p2, p3')}",
        f"phase p0: {none}; {others.format(9, 'p1, p2, p3')}",
    )
    past = cut(schedule.segments, 65)  # within p6
    later = resolved(*phases, past=past).warnings
    assert later[-4:] == tuple(f"phase p{i}: {none}" for i in (6, 7, 8, 9))
    assert not any("p5" in warning for warning in later) and any(odd in warning for warning in later)
    every = {f"s{i}": SourceSupply(8000) for i in range(6)}
    (told,) = resolved(Phase("a", "end", dict.fromkeys(every, 2)), supplies=every).warnings
    assert told.endswith("normalised to s0 0.1667, s1 0.1667, s2 0.1667, s3 0.1667, ...")


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ([60, 40], None),
        ([33.3, 33.3, 33.4], None),
        ([0.1] * 10, None),  # 0.9999999999999999
        ([14.3] * 6 + [14.2], None),
        ([0.0999] * 10, "0.999"),
        ([33.33] * 3, "99.99"),
        ([60, 50], "110"),
        ([6, 4], "10"),
    ],
)
def test_shares_of_1_and_percentages_need_no_word(weights, told):
    names = [f"s{number}" for number in range(len(weights))]
    mixture = dict(zip(names, weights, strict=True))
    schedule = resolved(Phase("a", "end", mixture), supplies=dict.fromkeys(names, SourceSupply(10**6)))
    assert schedule.segments[0].mixture == pytest.approx({name: mixture[name] / sum(weights) for name in names})
    if told is None:
        assert schedule.warnings == ()
    else:
        assert f"proportions add up to {told}, normalised to s0" in schedule.warnings[0]


@pytest.mark.parametrize("none", [0, "0%", "0 %", "0.0%"])
def test_the_first_phase_may_say_that_it_has_no_ramp(none):
    assert resolved(Phase("a", "end", {"web": 1}, ramp_steps=none)) == resolved(Phase("a", "end", {"web": 1}))


def test_a_weight_that_is_given_nothing_is_a_warning():
    schedule = resolved(Phase("a", "end", {"web": 0.9999, "law": 0.0001}))
    assert schedule.warnings == ("phase a: law has a positive proportion but gets no sequence",)


def test_segments_that_ramp_alike_share_their_table():
    ramp = Ramp({"web": 1.0}, 10)
    first = Segment(0, 20, "a", {"web": 0.5, "law": 0.5}, ramp, (), {"web": 0, "law": 0}, 8, 16)
    alike = dataclasses.replace(first, mixture={"law": 0.5, "web": 0.5}, ramp=Ramp({"web": 1.0}, 10), lr_scale=2.0)
    assert alike.quotas is first.quotas
    others = [
        dataclasses.replace(first, batch_size=16),
        dataclasses.replace(first, mixture={"web": 0.4, "law": 0.6}),
        dataclasses.replace(first, ramp=None),
        *(
            dataclasses.replace(first, ramp=dataclasses.replace(ramp, **change))
            for change in (
                {"from_mixture": {"law": 1.0}},
                {"steps": 11},
                {"shape": "cosine"},
                {"steps_done": 3},
                {"mass_ratio": 0.5},
            )
        ),
    ]
    counts = first.quotas.counts(np.arange(0, 160))
    for other in others:
        assert other.quotas is not first.quotas and not np.array_equal(other.quotas.counts(np.arange(160)), counts)


def test_of_many_sources_that_get_no_sequence_some_are_named():
    rare = {f"s{i}": 1e-6 for i in range(7)}
    supplies = {**SUPPLIES, **dict.fromkeys(rare, SourceSupply(1000))}
    (warning,) = [
        w for w in resolved(Phase("a", "end", {"web": 1.0, **rare}), supplies=supplies).warnings if "no seq" in w
    ]
    assert warning == "phase a: s0, s1, s2, s3 and 3 more have a positive proportion but get no sequence"


def test_only_a_share_in_some_step_asks_for_a_sequence():
    phases = Phase("a", 50, {"web": 1}), Phase("b", "end", {"law": 1.0}, ramp_steps=1)
    assert resolved(*phases).warnings == ()
    later = resolved(phases[0], Phase("b", "end", {"law": 1.0}, ramp_steps=2), batch=1)  # web has 1/2 in one step
    assert later.segments[1].mean_mixture() == {"law": 49.5 / 50, "web": pytest.approx(0.5 / 50)}


def test_a_warmup_that_is_none_is_none_that_does_nothing():
    assert resolved(Phase("a", "end", {"web": 1}, lr=LrProgram(peak=1e-3))).warnings == ()


def test_inverse_sqrt_needs_a_warmup():
    phases = (Phase("a", 40, {"web": 1.0}), Phase("b", "end", {"web": 1.0}))
    with pytest.raises(ScheduleError, match="optim.warmup_steps: got none, expected at least one"):
        resolved(*phases, lr=LrSchedule(schedule="inverse_sqrt"))
    rates = resolved(*phases, lr=LrSchedule(lr=1.0, schedule="inverse_sqrt", warmup_steps=4)).rates([3, 15, 63])
    assert rates == pytest.approx([1, 0.5, 0.25])


def test_rates_that_do_nothing_are_warnings():
    web = {"web": 1.0}
    one = (Phase("a", "end", web),)
    assert "wsd with decay_steps 0 never decays" in resolved(*one, lr=LrSchedule()).warnings[0]
    for schedule, how in (("cosine", "decays all the way from the warm-up to the end"), ("constant", "never decays")):
        (told,) = resolved(*one, lr=LrSchedule(schedule=schedule, decay_steps="20%")).warnings
        assert told == f"optim.decay_steps does nothing: optim.schedule {schedule} {how}"
        (longer,) = resolved(*one, lr=LrSchedule(schedule=schedule, warmup_steps=50, decay_steps=60)).warnings
        assert longer == told  # together they are more than the run, but only the warm-up is made
        for none in (0, "0%", "0.0%"):
            assert resolved(*one, lr=LrSchedule(schedule=schedule, decay_steps=none)).warnings == ()
    assert resolved(*one, lr=LrSchedule(decay_steps=10)).warnings == ()
    (warning,) = resolved(
        Phase("a", "end", web, lr=LrProgram(rewarm_steps=5)), lr=LrSchedule(schedule="cosine", warmup_steps=9)
    ).warnings
    assert "optim.warmup_steps does nothing" in warning
    for peak in (None, 1e-3):
        (warning,) = resolved(Phase("a", 50, web), Phase("b", "end", web, lr=LrProgram(5, peak))).warnings
        assert "phases[1].lr.rewarm_steps does nothing" in warning
    assert resolved(Phase("a", 50, web), Phase("b", "end", web, lr=LrProgram(5, 2e-3))).warnings == ()


def test_a_final_decay_that_a_phase_stands_in_the_way_of_is_a_warning():
    first, decay = Phase("a", 50, {"web": 1.0}), LrSchedule(decay_steps=20)

    def told(until, program):
        last = (Phase("c", "end", {"web": 1.0}),) if until != "end" else ()
        return list(resolved(first, Phase("b", until, {"web": 1.0}, lr=program), *last, lr=decay).warnings)

    nothing = "optim.decay_steps does nothing: the last phase has a learning rate of its own (phases[1].lr)"
    assert told("end", LrProgram(5, 2e-3)) == [f"{nothing}, which does not decay; give it decay_steps"]
    assert told("end", LrProgram(5, 2e-3, decay_steps=10)) == [nothing]
    assert told(90, LrProgram(5, 2e-3)) == []  # c decays from 90 to 100


@pytest.mark.parametrize(("decay_steps", "told"), [(10, False), (0, True)])
def test_a_last_phase_that_decays_by_itself_needs_no_final_decay(decay_steps, told):
    last = Phase("b", "end", {"web": 1.0}, lr=LrProgram(5, 2e-3, decay_steps=decay_steps))
    warnings = resolved(Phase("a", 50, {"web": 1.0}), last, lr=LrSchedule()).warnings
    assert any("never decays" in warning for warning in warnings) == told


def test_a_jump_names_the_peak_and_its_way_out():
    web = {"web": 1.0}

    def phases(**program):
        return Phase("a", 50, web), Phase("b", "end", web, lr=LrProgram(**program))

    for program in ({"peak": 1.0}, {"peak": 1.0, "rewarm_steps": 1}, {"peak": 1.0, "decay_steps": 50}, {"peak": 1e-5}):
        (path, message), *more = problems(*phases(**program))
        assert path == "phases[1].lr.peak" and "a decay or a re-warming of at least 2 updates" in message and not more
    assert resolved(*phases(peak=1.0), lr=LrSchedule(lr=1e-3, allow_jump=True)).segments[-1].lr[-1].last == 1.0
    assert resolved(*phases(peak=1.0, rewarm_steps=2)).segments[-1].lr[-1].last == 1.0
    for decay_steps in (1, 2, 50):
        lr = LrSchedule(lr=1e-3, decay_steps=decay_steps)
        assert resolved(Phase("a", "end", web), lr=lr).segments[-1].lr[-1].last == 1e-4


def test_a_decay_to_the_ratio_1_is_allowed():
    phase = Phase("a", "end", {"web": 1}, lr=LrProgram(decay_steps=10, decay_to_ratio=1.0))
    assert set(resolved(phase).rates(np.arange(100))) == {1e-3}


def test_ramp_step_k_has_moved_k_plus_one_of_n():
    schedule = resolved(Phase("a", 50, {"web": 1}), Phase("b", "end", {"law": 1.0}, ramp_steps=4))
    segment = schedule.segments[1]
    law = [segment.mixture_at(step).get("law", 0.0) for step in range(50, 56)]
    assert law == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    cosine = Ramp({"web": 1.0}, 4, "cosine").progress
    assert cosine == pytest.approx([0.1464466, 0.5, 0.8535534, 1.0])


def test_segments_carry_cursors_and_rates():
    schedule = resolved(Phase("a", 50, {"web": 0.5, "law": 0.5}), Phase("b", "end", {"web": 1.0}))
    first, second = schedule.segments
    assert first.cursors == {"web": 0, "law": 0}
    assert second.cursors == {"web": 1000, "law": 1000}
    assert [(p.first, p.last) for p in second.lr] == [(1e-3, 1e-3)]
    assert schedule.cursors_at(100) == {"web": 3000, "law": 1000}


def test_nothing_is_passed_over_where_the_run_begins():
    assert resolved(Phase("a", 50, {"web": 1}), Phase("b", "end", {"web": 1, "law": 1})).passed_over(0) == {}


def test_segments_survive_json():
    schedule = resolved(
        Phase("a", 50, {"web": 0.5, "law": 0.5}),
        Phase("b", "end", {"web": 1.0}, ramp_steps=7, lr=LrProgram(rewarm_steps=5, decay_steps=9)),
        lr=LrSchedule(lr=1e-3, warmup_steps=10),
    )
    back = segments_from_json(json.loads(json.dumps(segments_to_json(schedule.segments))))
    assert back == schedule.segments and len(back) == 2


def test_a_long_plan_with_fifty_sources_resolves_quickly():
    names = [f"s{i:02d}" for i in range(50)]
    supplies = {name: SourceSupply(10**10) for name in names}
    phases = [
        Phase(
            f"p{k}",
            f"{10 * (k + 1)}%",
            {n: 1 + (i * 7 + k) % 13 for i, n in enumerate(names)},
            ramp_steps=0 if k == 0 else 500,
        )
        for k in range(10)
    ]
    schedule = None

    def resolve():
        nonlocal schedule
        schedule = resolved(*phases, supplies=supplies, total=75_000, batch=512, length=1024)

    assert processor.seconds(resolve) < processor.loop_seconds(25e6)  # takes as long as about 4e6 rounds
    assert len(schedule.segments) == 10 and sum(schedule.cursors_at(75_000).values()) == 75_000 * 512 * 1024


def test_shares_that_come_again_need_no_new_tree():
    """Segments are cut, rated and resolved again; each of the 10 phases has one tree all the same."""
    names = [f"s{i}" for i in range(9)]
    shares = np.random.default_rng(97).random((10, 9))
    ends = [*range(10, 100, 10), "end"]
    phases = [Phase(f"p{i}", ends[i], dict(zip(names, shares[i].tolist(), strict=True))) for i in range(10)]
    supplies = {name: SourceSupply(800) for name in names}
    before = _tree.cache_info().misses
    schedule = resolved(*phases, supplies=supplies)
    assert resolved(*phases, supplies=supplies) == schedule
    assert _tree.cache_info().misses == before + 10


def test_of_each_field_of_a_segment_it_is_said_whether_data_depend_on_it():
    """A field that is new belongs here or into NOT_DATA: else an edit of it would begin the order of the data anew."""
    places = {"start", "end", "phase", "cursors", "first_sequence"}
    data = {"mixture", "ramp", "batch_size", "seq_len"}
    assert {field.name for field in dataclasses.fields(Segment)} == places | data | NOT_DATA.keys()
    assert not (places | data) & NOT_DATA.keys()


def test_tokens_up_to_a_step_are_told_without_going_through_the_segments():
    """Every event and row has them, also those of a run of thousands of phases."""
    phases = [Phase("a", 10, {"web": 1.0}), Phase("b", 30, {"web": 1.0}, batch_size=2, seq_len=5)]
    segments = resolved(*phases, Phase("c", "end", {"law": 1.0})).segments
    gone_through = []

    class Counted(tuple):
        def __iter__(self):
            gone_through.append(self)
            return super().__iter__()

    schedule = Schedule(Counted(segments))
    told = [schedule.tokens(step) for step in range(102)]
    by_hand = [*10 * [40], *20 * [10], *70 * [40], 0]  # of each update, none after the end
    assert told == [sum(by_hand[:step]) for step in range(102)] and told[-1] == 3400
    assert len(gone_through) == 2  # for the starts of segments, and for the tokens before them
