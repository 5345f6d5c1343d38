"""Clocks, ramps, caps and segments."""

import dataclasses
import json
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import processor
import pytest

from phases.checks import ScheduleError, check_phases
from phases.clocks import resolve_steps
from phases.declared import Curriculum
from phases.lr import LrProgram, LrSchedule
from phases.mixture import _tree
from phases.resolve import resolve
from phases.schedule import (
    NOT_DATA,
    Phase,
    Ramp,
    Schedule,
    Segment,
    SourceSupply,
    cut,
    joined,
    segments_from_json,
    segments_to_json,
)

CONSTANT = LrSchedule(lr=1e-3, schedule="constant")
SUPPLIES = {"web": SourceSupply(8000), "law": SourceSupply(800)}


def resolved(*phases, supplies=SUPPLIES, total=100, batch=4, length=10, lr=CONSTANT, **known):
    return resolve(Curriculum(phases, supplies, lr, total_steps=total, batch_size=batch, seq_len=length), **known)


def problems(*phases, **kwargs):
    with pytest.raises(ScheduleError) as error:
        resolved(*phases, **kwargs)
    return error.value.problems


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


def test_a_cap_whose_exhaustion_is_an_error_hides_no_later_problem():
    phases = (Phase("a", 50, {"web": 1}), Phase("b", 40, {"web": 1}))
    ((path, _),) = problems(*phases, supplies={"web": SourceSupply(None, 1)}, sizes_to_come=True)
    assert path == "phases[1].until"


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


@pytest.mark.parametrize("epochs", [0.0, -1.0, float("nan"), float("inf")])
def test_a_cap_is_a_finite_number_above_zero(epochs):
    found = problems(Phase("a", "end", {"web": 1.0}), supplies={"web": SourceSupply(8000, epochs)})
    assert [path for path, _ in found] == ["sources.web.max_epochs"] and "finite number above 0" in found[0][1]


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


# max_epochs: law has 800 tokens; alone it gives 40 a step, so 20 steps an epoch.


def test_exhausted_source_is_an_error_that_names_the_step():
    found = problems(Phase("a", "end", {"law": 1.0}), supplies={**SUPPLIES, "law": SourceSupply(800, 2)})
    assert found[0][0] == "sources.law.max_epochs"
    assert "step 40 (phase a)" in found[0][1] and "renormalise" in found[0][1]


def test_exactly_the_cap_is_allowed():
    supplies = {**SUPPLIES, "law": SourceSupply(800, 5)}
    assert resolved(Phase("a", "end", {"law": 1.0}), supplies=supplies).cursors_at(100)["law"] == 4000


def test_stop_ends_the_run_before_the_batch_that_would_exceed():
    supplies = {**SUPPLIES, "law": SourceSupply(790, 1, "stop")}
    schedule = resolved(Phase("a", 60, {"law": 1.0}), Phase("b", "end", {"web": 1.0}), supplies=supplies)
    assert schedule.total_steps == 19  # 20 steps would be 800
    assert any("stops at step 19" in w for w in schedule.warnings)
    assert any("phase b is never reached" in w for w in schedule.warnings)


def test_renormalise_goes_on_without_the_source():
    supplies = {**SUPPLIES, "law": SourceSupply(800, 1, "renormalise")}
    schedule = resolved(Phase("a", "end", {"law": 0.5, "web": 0.5}), supplies=supplies)
    assert [(s.start, s.end, s.mixture) for s in schedule.segments] == [
        (0, 40, {"law": 0.5, "web": 0.5}),
        (40, 100, {"web": 1.0}),
    ]
    assert schedule.segments[1].cursors == {"web": 800, "law": 800}
    assert schedule.phase_bounds == (("a", 0, 100),)


def test_sources_that_are_exhausted_by_the_same_update_go_by_their_names():
    supplies = {"web": SourceSupply(8000), **dict.fromkeys(("law", "code"), SourceSupply(400, 1, "renormalise"))}
    phase = Phase("a", "end", {"web": 0.5, "law": 0.25, "code": 0.25})
    schedule = resolved(phase, supplies=supplies)
    assert [(s.start, s.end, set(s.mixture)) for s in schedule.segments] == [(0, 40, set(supplies)), (40, 100, {"web"})]
    told = [f"from step 40 on, phase a continues without {name}, which is exhausted" for name in ("code", "law")]
    assert schedule.warnings == tuple(told)
    supplies |= dict.fromkeys(("law", "code"), SourceSupply(400, 1))
    assert [path for path, _ in problems(phase, supplies=supplies)] == ["sources.code.max_epochs"]


def test_a_stop_is_told_after_what_was_exhausted_before_it():
    supplies = {"web": SourceSupply(1000, 1, "stop"), "law": SourceSupply(400, 1, "renormalise")}
    told = resolved(Phase("a", "end", {"web": 0.5, "law": 0.5}), supplies=supplies).warnings
    assert told == (
        "from step 20 on, phase a continues without law, which is exhausted",
        "the run stops at step 35: web is limited to 1 epoch",
    )


def test_a_stop_before_the_first_update_is_an_error_of_its_source():
    supplies = {"web": SourceSupply(1000, 0.001, "stop"), "law": SourceSupply(400)}
    (problem,) = problems(Phase("a", 20, {"web": 0.5, "law": 0.5}), Phase("b", "end", {"law": 1.0}), supplies=supplies)
    assert problem == (
        "sources.web.max_epochs",
        "the first update would read more than 0.001 epochs of web (1,000 tokens an epoch), so nothing is left to train "
        "on; raise max_epochs, give the source more text, or lower the batch size",
    )


def test_a_source_that_was_read_beyond_a_cap_is_not_read_on():
    def capped(max_epochs, **past):
        supplies = {**SUPPLIES, "law": SourceSupply(800, max_epochs, "renormalise")}
        return resolved(Phase("a", "end", {"law": 0.5, "web": 0.5}), supplies=supplies, **past).segments

    segments = capped(0.5, past=cut(capped(1), 30))
    assert [(s.start, s.end, set(s.mixture)) for s in segments] == [(0, 30, {"law", "web"}), (30, 100, {"web"})]


def test_of_many_sources_that_are_exhausted_one_warning_tells():
    names = [f"s{i}" for i in range(8)]

    def warnings_of(num):
        supplies = {n: SourceSupply(20 * (i + 1), 1, "renormalise") for i, n in enumerate(names[:num])}
        phase = Phase("a", "end", {"web": 1.0, **dict.fromkeys(supplies, 0.2)})
        return [w for w in resolved(phase, supplies={**SUPPLIES, **supplies}).warnings if "exhausted" in w]

    each = warnings_of(4)
    assert [re.search("without (s.), which", w)[1] for w in each] == names[:4] and not any(
        "more are" in w for w in each
    )
    assert each == sorted(each, key=lambda w: int(w.split()[2]))
    (told,) = warnings_of(6)
    assert re.fullmatch(
        r"from step \d+ on, phase a continues without s0, which is exhausted; 5 more are exhausted in it, the last at step "
        r"\d+: s1, s2, s3, ...",
        told,
    )


def test_a_share_that_is_less_than_a_float_holds_is_none():
    supplies = {**SUPPLIES, "law": SourceSupply(800, 1, "renormalise")}
    phase = Phase("a", "end", {"web": 5e-324, "law": 2})
    assert resolved(phase).segments[0].mixture == {"law": 1.0}
    assert resolved(phase).warnings == ("phase a: proportions add up to 2, normalised to law 1",)
    ((path, message),) = problems(phase, supplies=supplies)
    assert path == "phases[0].mixture" and "law is exhausted at step 20 and nothing else is in the mixture" in message


def test_of_a_source_that_a_phase_never_reads_nothing_is_passed_over():
    """It is exhausted before its first update, so that its cursor need not begin a longer sequence."""
    supplies = {"web": SourceSupply(8000), "law": SourceSupply(800, 0.01, "renormalise")}  # 8 tokens
    phases = [Phase("a", 1, {"law": 1.0}, seq_len=2), Phase("b", "end", {"web": 0.5, "law": 0.5})]
    schedule = resolved(*phases, supplies=supplies)
    assert [(s.phase, s.start, s.end) for s in schedule.segments] == [("a", 0, 1), ("b", 1, 100)]
    assert schedule.segments[1].mixture == {"web": 1.0}
    assert schedule.cursors_at(1) == {"web": 0, "law": 8} and schedule.cursors_at(100)["law"] == 8
    assert schedule.passed_over(1) == {}


def test_a_goal_that_rounding_up_alone_reaches_is_reached_before():
    """78 of 80 tokens are read in sequences of 2; the next one of 10 begins at 80."""
    supplies = {"web": SourceSupply(8000), "law": SourceSupply(80)}
    phases = [
        Phase("a", 10, {"web": 1.0}),
        Phase("b", "1 epoch of law", {"law": 1.0}, seq_len=2),
        Phase("c", "end", {"web": 1.0}),
    ]
    past = cut(resolved(*phases, supplies=supplies, batch=1).segments, 49)
    assert past[-1].cursors_at(49)["law"] == 78
    phases[1] = replace(phases[1], seq_len=10)
    ((path, message),) = problems(*phases, supplies=supplies, batch=1, past=past)
    assert path == "phases[1].until" and message.startswith(
        "'1 epoch of law' is reached before step 49, where the phase starts"
    )


def test_a_phase_that_stops_at_once_does_not_go_on_without_a_source():
    supplies = {"code": SourceSupply(400, 1, "renormalise"), "law": SourceSupply(400, 1, "stop")}
    phases = [Phase("a", 20, {"law": 0.5, "code": 0.5}), Phase("b", "end", {"law": 0.2, "code": 0.8})]
    schedule = resolved(*phases, supplies=supplies)
    assert schedule.total_steps == 20
    assert schedule.warnings == ("the run stops at step 20: law is limited to 1 epoch",)


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_renormalise_within_a_ramp_keeps_the_ratios_of_what_remains(shape):
    supplies = {name: SourceSupply(80_000) for name in ("web", "code", "law", "math")}
    phases = (
        Phase("a", 10, {"web": 0.6, "law": 0.3, "math": 0.1}),
        Phase("b", "end", {"law": 0.5, "code": 0.35, "math": 0.15}, ramp_steps=60, ramp_shape=shape),
    )
    whole = resolved(*phases, supplies=supplies)
    supplies["law"] = SourceSupply(400, 1, "renormalise")
    supplies["math"] = SourceSupply(200, 1, "renormalise")
    cut = resolved(*phases, supplies=supplies)
    assert len(cut.segments) == 4 and 10 < cut.segments[2].start < cut.segments[3].start < 70
    for step in range(10, 100):
        given = cut.segment_at(step).mixture_at(step)
        before = {name: whole.segment_at(step).mixture_at(step).get(name, 0.0) for name in given}
        remaining = sum(before.values())
        assert given == pytest.approx({name: share / remaining for name, share in before.items()})
    back = segments_from_json(json.loads(json.dumps(segments_to_json(cut.segments))))
    assert back == cut.segments


def test_a_ramp_ends_where_all_that_it_comes_from_is_exhausted():
    law = SourceSupply(800, 1, "renormalise")  # a reads 720 tokens, and the ramp's first two updates 70 more
    phases = (Phase("a", 18, {"law": 1}), Phase("b", "end", {"web": 1}, ramp_steps=10))
    schedule = resolved(*phases, supplies={**SUPPLIES, "law": law})
    found = [(s.start, s.end, s.ramp and s.ramp.steps) for s in schedule.segments]
    assert found == [(0, 18, None), (18, 20, 10), (20, 100, None)]
    assert schedule.segment_at(20).mixture_at(20) == {"web": 1.0}
    law = SourceSupply(50, 1, "renormalise")  # which the ramp's four updates read: 5, 10, 15 and 20
    phases = (Phase("a", 10, {"web": 1}), Phase("b", "end", {"law": 0.5, "web": 0.5}, ramp_steps=4))
    assert [(s.start, s.ramp) for s in resolved(*phases, supplies={**SUPPLIES, "law": law}).segments][2:] == [
        (14, None)
    ]


def test_an_epoch_clock_counts_what_is_drawn_after_another_source_is_exhausted():
    supplies = {"law": SourceSupply(800), "web": SourceSupply(400, 1, "renormalise")}
    phases = (
        Phase("a", "2 epochs of law", {"law": 0.5, "web": 0.5}),
        Phase("b", "end", {"law": 1.0}),
    )
    # 20 tokens a step of each until web's 400 are read at step 20, then 40 of law: 400 + 30 * 40 = 1,600.
    schedule = resolved(*phases, supplies=supplies)
    assert schedule.phase_bounds == (("a", 0, 50), ("b", 50, 100)) and schedule.cursors_at(50)["law"] == 1600
    # A cap that would only be met after the clock's end is none.
    supplies["web"] = SourceSupply(400, 5, "error")
    supplies["code"] = SourceSupply(8000)
    phases = (phases[0], Phase("b", "end", {"code": 1.0}))
    assert resolved(*phases, supplies=supplies).phase_bounds[0] == ("a", 0, 80)


def test_an_epoch_clock_that_its_source_s_cap_keeps_from_being_reached():
    supplies = {**SUPPLIES, "law": SourceSupply(800, 1, "renormalise")}
    phases = Phase("a", "2 epochs of law", {"law": 0.5, "web": 0.5}), Phase("b", "end", {"web": 1.0})
    ((path, message),) = problems(*phases, supplies=supplies)
    assert path == "phases[0].until" and "never reached: law is exhausted at step 40" in message


@pytest.mark.parametrize("on_exhaust", ["error", "renormalise"])
def test_a_phase_may_end_with_the_epochs_that_its_source_is_capped_at(on_exhaust):
    """40 tokens a step, where two epochs are 1,580: 1,560 of them at step 39, and one update more would exceed them."""
    phases = Phase("a", "2 epochs of law", {"law": 1.0}), Phase("b", "end", {"web": 1.0})
    capped = {**SUPPLIES, "law": SourceSupply(790, 2, on_exhaust)}
    free = {**SUPPLIES, "law": SourceSupply(790)}
    assert resolved(*phases, supplies=free).phase_bounds[0] == ("a", 0, 40)
    whole = resolved(*phases, supplies=capped)
    assert whole.phase_bounds == (("a", 0, 39), ("b", 39, 100)) and whole.warnings == ()
    assert whole.cursors_at(100)["law"] == 1560
    # A run that goes on from that very step has the phase behind it; with a higher cap it goes on, as without one.
    for step in (20, 39, 60):
        assert joined(after(cut(whole.segments, step), *phases, supplies=capped).segments) == joined(whole.segments)
    higher = {**SUPPLIES, "law": SourceSupply(790, 3, on_exhaust)}
    assert after(cut(whole.segments, 39), *phases, supplies=higher).phase_bounds[0] == ("a", 0, 40)
    # Half an epoch is 392.5 tokens, rounded up for the clock and down for the cap; nothing is to be had of fewer.
    half = {**SUPPLIES, "law": SourceSupply(785, 0.5, on_exhaust)}
    fewer = Phase("a", "0.5 epochs of law", {"law": 1.0}), phases[1]
    assert resolved(*fewer, supplies=half).phase_bounds[0] == ("a", 0, 9)
    none = {**SUPPLIES, "law": SourceSupply(30, 1, on_exhaust)}
    assert problems(Phase("a", "1 epoch of law", {"law": 1.0}), phases[1], supplies=none)
    # Where another source is exhausted with the same update, both are.
    both = {
        "law": SourceSupply(790, 2, on_exhaust),
        "code": SourceSupply(790, 2, "renormalise"),
        "web": SUPPLIES["web"],
    }
    mixed = Phase("a", "2 epochs of law", {"law": 0.5, "code": 0.5}), phases[1]
    assert resolved(*mixed, supplies=both).phase_bounds == (("a", 0, 79), ("b", 79, 100))
    # It is its own source's cap that ends it, no other's.
    both["code"] = SourceSupply(790, 2)
    more_code = Phase("a", "2 epochs of law", {"law": 0.25, "code": 0.75}), phases[1]
    assert [path for path, _ in problems(*more_code, supplies=both)] == ["sources.code.max_epochs"]


def test_a_run_that_stops_with_the_epochs_that_its_phase_should_end_with_says_how_it_would_go_on():
    phases = Phase("a", "2 epochs of law", {"law": 1.0}), Phase("b", "end", {"web": 1.0})
    stopped = resolved(*phases, supplies={**SUPPLIES, "law": SourceSupply(790, 2, "stop")})
    assert stopped.total_steps == 39
    assert stopped.warnings == (
        "the run stops at step 39: law is limited to 2 epochs, and the update that reaches '2 epochs of law' would "
        "read more; with on_exhaust error or renormalise the phase ends here instead, and the run continues",
        "phase b is never reached: the run stops at step 39",
    )
    for step in (20, 39):
        on = resolved(
            *phases, supplies={**SUPPLIES, "law": SourceSupply(790, 2, "stop")}, past=cut(stopped.segments, step)
        )
        assert (on.total_steps, on.warnings) == (39, stopped.warnings)


def test_an_epoch_clock_reached_before_its_phase_is_an_error():
    phases = Phase("a", 60, {"law": 1.0}), Phase("b", "3 epochs of law", {"law": 1.0}), Phase("c", "end", {"web": 1})
    ((path, message),) = problems(*phases)  # 2,400 tokens at step 60: just reached
    assert path == "phases[1].until" and "is reached before step 60" in message and "ends must increase" in message


def test_caps_are_exact_decimals():
    supplies = {"law": SourceSupply(1000, 0.7, "stop")}  # 700 tokens; the float 0.7 would make it 699
    assert resolved(Phase("a", "end", {"law": 1.0}), supplies=supplies, batch=1).total_steps == 70


def test_repeat_has_no_cap():
    supplies = {**SUPPLIES, "law": SourceSupply(800, 1, "repeat")}
    assert resolved(Phase("a", "end", {"law": 1.0}), supplies=supplies).cursors_at(100)["law"] == 4000


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


def test_a_long_plan_whose_sources_are_exhausted_one_after_another_resolves_quickly():
    names = [f"s{i:02d}" for i in range(30)]
    supplies = {name: SourceSupply(10**9, 1 + i, "renormalise") for i, name in enumerate(names)} | {
        "web": SourceSupply(10**10)
    }
    phase, schedule = Phase("a", "end", dict.fromkeys(supplies, 1.0)), None

    def resolve():
        nonlocal schedule
        schedule = resolved(phase, supplies=supplies, total=1_500_000, batch=512, length=1024)

    assert processor.seconds(resolve) < processor.loop_seconds(2e7)  # takes as long as about 5e6 rounds
    assert len(schedule.segments) == 31
    # Equal shares of 31: the first has read its 10^9 tokens after so many steps of 512 sequences of 1,024.
    assert schedule.segments[0].end == pytest.approx(31 * 10**9 / (512 * 1024), abs=2)
    read = schedule.cursors_at(1_500_000)
    assert all(0 <= (i + 1) * 10**9 - read[name] < 512 * 1024 for i, name in enumerate(names))


# A frozen past: what is trained stands, what lies ahead comes from the phases.

THREE = (
    Phase("a", 30, {"web": 0.7, "law": 0.3}),
    Phase("b", 60, {"web": 0.3, "law": 0.7}, ramp_steps=20, lr=LrProgram(rewarm_steps=6, peak=1.5e-3, decay_steps=9)),
    Phase("c", "end", {"web": 0.9, "law": 0.1}, ramp_steps=11, ramp_shape="cosine"),
)
WSD = LrSchedule(lr=1e-3, warmup_steps=7, decay_steps=20)


def after(past, *phases, **kwargs):
    """The phases resolved after a past, with `resolved`'s numbers."""
    return resolved(*phases, past=past, **({"lr": WSD} | kwargs))


def after_problems(past, *phases, **kwargs):
    with pytest.raises(ScheduleError) as error:
        after(past, *phases, **kwargs)
    return error.value.problems


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
