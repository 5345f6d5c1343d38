"""`max_epochs` and `on_exhaust`: law has 800 tokens; alone it gives 40 a step, so 20 steps an epoch."""

import json
import re
from dataclasses import replace

import processor
import pytest
from schedules import SUPPLIES, after, problems, resolved

from phases.schedule import Phase, SourceSupply, cut, joined, segments_from_json, segments_to_json


def test_a_cap_whose_exhaustion_is_an_error_hides_no_later_problem():
    phases = (Phase("a", 50, {"web": 1}), Phase("b", 40, {"web": 1}))
    ((path, _),) = problems(*phases, supplies={"web": SourceSupply(None, 1)}, sizes_to_come=True)
    assert path == "phases[1].until"


@pytest.mark.parametrize("epochs", [0.0, -1.0, float("nan"), float("inf")])
def test_a_cap_is_a_finite_number_above_zero(epochs):
    found = problems(Phase("a", "end", {"web": 1.0}), supplies={"web": SourceSupply(8000, epochs)})
    assert [path for path, _ in found] == ["sources.web.max_epochs"] and "finite number above 0" in found[0][1]


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
